"""A rank rehearsed on shapes alone sends the planner's messages and holds its parameters' bytes."""

import json

import pytest

from analysis import plan
from analysis.planner.messages import parameter_sizes, sent_bytes
from base.errors import UsageError
from parallel import rehearse
from parallel.config.resolve import resolve
from parallel.config.study import Study, load_study
from tests.conftest import ROOT, run_module

STUDIES = ROOT / "tests" / "studies"


def counted(name: str) -> tuple[Study, list[dict]]:
    """A study of tests/studies, and what was counted on its ranks."""
    study = load_study(STUDIES / f"rehearsed_{name}.toml")
    command = ["parallel.rehearse", "--study", str(study.path), "--format", "json"]
    done = run_module(*command, timeout=1200)
    ranks = json.loads(done.stdout)["ranks"]
    assert not [rank["error"] for rank in ranks if rank["error"]]
    assert done.returncode == 0, done.stderr + done.stdout
    return study, ranks


@pytest.mark.parametrize(
    ("name", "n_ranks"),  # one of each stage
    [("engines", 5 + 2 * 2), pytest.param("megatrons", 1 + 2 * 2, marks=pytest.mark.slow)],
)
def test_messages_and_weights_are_those_of_the_planner(name, n_ranks):
    study, ranks = counted(name)
    assert len(ranks) == n_ranks
    for rank in ranks:
        spec, number = study.specs[rank["run"]], rank["rank"]
        rehearsed = rehearse.shortened(spec, rank["stage"])
        for axis, wanted in sent_bytes(rehearsed, number).items():
            if spec.engine == "ddp":  # whose C++ reducer is not rehearsed
                assert axis not in rank["messages"]
            elif wanted is not None:
                sent = rank["messages"][axis][2]
                assert sent == pytest.approx(wanted, rel=1e-3), (rank["run"], number, axis)
        whole = sum(size for size, _ in parameter_sizes(spec, number))
        assert rank["parameters"] == whole
        width = 4 if spec.precision == "fp32" else 2
        sharded = spec.layout.zero_stage == 3 or spec.engine == "fsdp2"
        shards = spec.layout.shards if sharded else 1
        if spec.engine != "deepspeed_zero" or shards == 1:  # ZeRO-3 keeps some of it whole
            assert shards * rank["peak"]["weights"] == pytest.approx(width * whole, rel=1e-3)


EXPERT, OUTSIDE = 3 * 4096 * 14336, 32000 * 4096  # numbers of an expert, and of the word table
LAYER = 2 * 4096 * (4096 + 1024) + 2 * 4096 + 8 * 4096  # attention, norms, router


@pytest.mark.slow
def test_experts_are_rehearsed_with_as_many_tokens_each():
    study, ranks = counted("experts")
    rows = {(rank["run"], rank["rank"]): rank for rank in ranks}
    for (run, number), rank in rows.items():
        sizes = parameter_sizes(study.specs[run], number)
        assert rank["parameters"] == sum(size for size, _ in sizes)
        spec = rehearse.shortened(study.specs[run], rank["stage"])
        sent = rank["messages"]
        assert {"ep", "etp"} & sent.keys() == {
            axis for axis in ("ep", "etp") if getattr(spec.layout, axis) > 1
        }
        for axis, wanted in sent_bytes(spec, number).items():
            if wanted is not None:
                assert sent[axis][2] == pytest.approx(wanted, rel=1e-3), (run, number, axis)
    # One of 8 experts on each rank, twice on 16; Adam's 12 bytes over the ranks with the same.
    outside = 2 * LAYER + 2 * OUTSIDE + 4096
    peak = rows["megatron-ep8-dp16-zero1", 0]["peak"]
    assert peak["weights"] == pytest.approx(2 * (outside + 2 * EXPERT), rel=1e-3)
    assert peak["gradients"] == pytest.approx(4 * (outside + 2 * EXPERT), rel=1e-3)
    adam = 12 * (outside / 16 + 2 * EXPERT / 2)
    assert peak["optimizer"] == pytest.approx(adam, rel=1e-3)


@pytest.mark.slow
def test_norms_that_are_computed_again_are_not_held():
    """Of two layers two norms each, also after a micro-batch; Transformer Engine has a stand-in."""
    flags = "--engine megatron --preset llama3-8b --n-layer 2 --tp 2 --gpus 2 --device auto"
    flags += " --kernels te --seq-len 512 --micro-batch 1 --global-batch 2 --precision bf16"
    peaks = {}
    for recompute in ("none", "selective"):
        words = ["parallel.rehearse", *flags.split(), "--recompute", recompute, "--format", "json"]
        (rank,) = json.loads(run_module(*words, timeout=300).stdout)["ranks"]
        peaks[recompute] = rank["peak"]
    less = peaks["none"]["activations"] - peaks["selective"]["activations"]
    assert less == pytest.approx(4 * 512 * 4096 * 2, rel=0.01)
    assert sum(peaks["none"].values()) - sum(peaks["selective"].values()) == pytest.approx(less)


def test_a_step_that_cannot_be_trained_names_the_error_and_its_line(monkeypatch):
    spec = resolve(("test", {"engine": "megatron", "gpus": 4, "tp": 2, "pp": 2}))
    monkeypatch.setattr(rehearse, "_train_step", lambda *_: spec.no_such_setting)
    rehearsal = rehearse.rehearse(spec, 3)
    assert (rehearsal.rank, rehearsal.stage) == (3, 1)
    assert rehearsal.error.startswith("AttributeError: 'RunSpec' object has no attribute")
    assert "rank 3 (stage 1 of 2) could not train" in rehearse.printed("run", spec, rehearsal, True)


def test_ranks_that_are_none_are_refused():
    with pytest.raises(UsageError, match="not '4': the ranks of ddp-dp4 are 0 to 3"):
        rehearse.ranks_of(resolve(("test", {"gpus": 4})), "4")


def test_a_card_without_a_cluster_is_one_that_has_the_runs_number_format():
    split = {"engine": "megatron", "gpus": 4, "cp": 2, "preset": "1.7b", "precision": "fp8"}
    runs = {"a": resolve(("test", split))}
    assert rehearse.card_of("H100", None, runs).memory_gb == 80
    for name, cluster, why in (("A100", None, "A100 has no fp8"), ("H100", "dgx-h100", "one of")):
        with pytest.raises(UsageError, match=why):
            rehearse.card_of(name, cluster, runs)


def test_a_card_of_several_sizes_is_asked_for_its_memory(capsys):
    assert rehearse.main("--preset tiny --engine ddp --gpu-type A100".split()) == 2
    assert "A100 has 40 or 80 GB, 'A100' states none" in capsys.readouterr().err


@pytest.mark.parametrize(
    "where", [pytest.param("--cluster=big-purple-v100", marks=pytest.mark.slow), "--gpu-type=T4"]
)
def test_a_run_that_does_not_fit_its_card_ends_with_1(where):
    done = run_module("parallel.rehearse", "--preset", "1.7b", where)
    assert done.returncode == 1 and "a step may use 15.0 of the card's 16" in done.stdout


def test_a_run_that_trains_but_is_not_rehearsed_is_named_with_the_reason(capsys):
    run = ["--run-name", "deepspeed-zero-ep2-dp2-zero1"]
    assert rehearse.main(["--study", str(ROOT / "slurm" / "parity-moe.toml"), *run]) == 1
    error = capsys.readouterr().err
    assert f"{run[1]} is not rehearsed: DeepSpeed's AutoEP" in error
    assert "cannot train" not in error


def test_what_transformer_engine_alone_does_is_refused_with_the_planners_command(tmp_path, capsys):
    flags = "--engine megatron --preset llama3-8b --gpus 16 --tp 2 --cp 2 --pp 2 --precision fp8"
    place = "--gpu-type H100 --global-batch 8 --zero-stage 1 --recompute full"
    assert rehearse.main([*flags.split(), *place.split()]) == 1
    (line,) = [line for line in capsys.readouterr().err.splitlines() if "not rehearsed" in line]
    reason, _, command = line.partition("; the planner counts its bytes: python -m analysis.plan ")
    assert reason.endswith(
        "Transformer Engine alone has cp 2 and precision fp8, and only a GPU runs it"
    )
    assert plan.main(command.split()) == 0  # it is a command that answers
    assert "GiB on the fullest rank" in capsys.readouterr().out
    assert {"mbs=1", "zero=1", "sp=no", "recompute=full"} <= set(command.split()[-1].split(","))
    path = tmp_path / "long.toml"
    head = (STUDIES / "rehearsed_engines.toml").read_text().partition("[[")[0]
    path.write_text(head + '[[run]]\nengine = "megatron"\ngpus = 8\ncp = 2\nprecision = "bf16"\n')
    assert rehearse.main(["--study", str(path), "--cluster", "dgx-h100"]) == 1
    assert f"python -m analysis.prune {path} --cluster dgx-h100\n" in capsys.readouterr().err
