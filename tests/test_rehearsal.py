"""A rank rehearsed on shapes alone does the FLOPs, sends the messages and holds the bytes that the
formulas say."""

import argparse
import json
import os
import subprocess
import sys

import pytest

from analysis.measured import rehearsals
from benchmarks import rehearse_studies
from parallel import rehearse
from parallel.config.message_bytes import parameter_sizes
from parallel.config.settings import RunSpec, add_flags, from_flags, resolve
from parallel.config.study import load_study
from tests.conftest import ROOT, run_module

SIZES = ["--n-layer", "4", "--seq-len", "2048", "--micro-batch", "4", "--grad-accum", "8"]
MODEL, LLAMA = ["--preset", "1.7b", *SIZES], ["--preset", "llama3-8b", *SIZES]
ENGINES = {"megatron", "deepspeed_pipe", "deepspeed_zero", "fsdp2", "ddp"}


@pytest.fixture(scope="module")
def processes() -> rehearse.Processes:
    """The libraries are imported once for all rehearsals here."""
    return rehearse.Processes([resolve(("test", {"engine": name})) for name in ENGINES])


def run_of(*flags: str) -> RunSpec:
    parser = argparse.ArgumentParser()
    add_flags(parser)
    return resolve(("test", from_flags(parser.parse_args(flags))))


@pytest.mark.parametrize(
    "flags",
    [
        ["--engine", "megatron", "--gpus", "64", "--tp", "2", "--pp", "4", "--zero-stage", "1"],
        ["--engine", "megatron", "--gpus", "64", "--tp", "8", "--pp", "2", "--vpp", "2"]
        + ["--sequence-parallel", "--recompute", "full"],
        ["--engine", "deepspeed_pipe", "--gpus", "16", "--tp", "2", "--pp", "4"]
        + ["--zero-stage", "1"],
        ["--engine", "deepspeed_zero", "--gpus", "8", "--zero-stage", "1", "--precision", "fp32"],
        ["--engine", "fsdp2", "--gpus", "8", "--zero-stage", "3", "--precision", "fp32"],
        ["--engine", "ddp", "--gpus", "2", "--precision", "fp32"],
    ],
    ids=lambda flags: "-".join(flags[1::2]),
)
def test_flops_messages_and_states_are_those_of_the_formulas(flags, processes):
    model = LLAMA if "--recompute" in flags else MODEL
    precision = [] if "--precision" in flags else ["--precision", "bf16"]
    spec = run_of(*model, *flags, *precision)
    for number in rehearse.ranks_of(spec, "first-and-last"):
        rank = processes.rehearse(spec, number)
        assert not rank.error
        for what, ours, formula in rehearse.comparison(spec, rank):
            if what == "pp calls" and spec.engine == "deepspeed_pipe":
                ours -= rank.stage < 3  # a first step describes what a stage sends on
            if what.startswith("dp ") and spec.engine == "ddp":
                assert ours == 0  # the C++ reducer's all-reduces are not rehearsed
            elif what == "TFLOP" or what.endswith(" calls") and formula is not None:
                assert ours == pytest.approx(formula, rel=1e-3), (what, number)
            elif what == "peak GB":
                assert ours == pytest.approx(formula, rel=0.03), number
            elif what in ("tp GB", "pp GB", "dp GB", "embedding GB") and formula is not None:
                assert ours == pytest.approx(formula, rel=1e-3), (what, number)
        assert ("dp is 0" in rehearse.printed(spec, rank)) == (spec.engine == "ddp")
        assert rank.parameters == sum(size for size, _ in parameter_sizes(spec, number))
        width = 4 if spec.precision == "fp32" else 2
        shards = spec.layout.dp if spec.engine == "fsdp2" else 1
        held = shards * rank.peak["weights"]
        assert held == pytest.approx(width * rank.parameters, rel=1e-3)


def test_a_step_that_cannot_be_trained_names_the_error_and_its_line(monkeypatch):
    spec = resolve(("test", {"engine": "megatron", "gpus": 4, "tp": 2, "pp": 2}))
    monkeypatch.setattr(rehearse, "_train_step", lambda *_: spec.no_such_setting)
    found = rehearse.rehearse(spec, 3)
    assert (found.rank, found.stage) == (3, 1)
    assert found.error.startswith("AttributeError: 'RunSpec' object has no attribute")
    assert "rank 3 (stage 1 of 2) could not train a step" in rehearse.printed(spec, found)


def test_ranks_of_a_stage_with_nothing_cut_over_dp_do_equal_work(processes):
    flags = ["--preset", "tiny", "--vocab-size", "300", "--gpus", "4", "--tp", "2"]
    spec = run_of(*flags, "--engine", "megatron")  # padding for tp rank 1 alone
    first, last = processes.rehearse(spec, 0), processes.rehearse(spec, 3)
    assert not first.error
    assert (first.peak, first.flops, first.messages) == (last.peak, last.flops, last.messages)
    assert rehearse.work_of(spec, 0) == rehearse.work_of(spec, 3)
    for cut in (
        run_of(*flags, "--engine", "megatron", "--zero-stage", "1"),
        run_of(*flags, "--engine", "deepspeed_pipe", "--zero-stage", "1"),
    ):
        assert rehearse.work_of(cut, 0) == rehearse.work_of(cut, 1) != rehearse.work_of(cut, 2)


def test_cuts_made_quickly_are_those_of_torch():
    """Of all that is known of a tensor without storage: its shape, strides, type and storage."""
    import torch
    from torch._subclasses.fake_tensor import FakeTensorMode

    from parallel.measure.rehearsal import _CUTS, _quickly

    aten = torch.ops.aten
    with FakeTensorMode():
        x, y = torch.empty(6, 8, dtype=torch.bfloat16), torch.empty(2, 8)
        cases: list[tuple] = [
            (aten.slice.Tensor, (x, 1, 2, 7, 2)),
            (aten.slice.Tensor, (x, 0, 4, 100)),
            (aten.view.default, (x, [3, -1])),
            (aten.detach.default, (x,)),
            (aten.cat.default, ([x, x],)),
            (aten.cat.default, ([x, y], 0)),
        ]
        assert {func for func, _ in cases} == _CUTS
        for func, args in cases:
            ours, theirs = _quickly(func, args, {}), func(*args)
            for known in ("shape", "dtype", "device"):
                assert getattr(ours, known) == getattr(theirs, known)
            assert ours.stride() == theirs.stride()
            assert ours.storage_offset() == theirs.storage_offset()
            assert ours.untyped_storage().nbytes() == theirs.untyped_storage().nbytes()
            shared = ours.untyped_storage()._cdata == x.untyped_storage()._cdata
            assert shared == (func is not aten.cat.default)


def test_without_a_gpu_the_megatron_engine_does_not_load_torchs_compiler():
    script = "import sys, parallel.engines.megatron; sys.exit('torch._inductor' in sys.modules)"
    hidden = os.environ | {"CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, "-W", "ignore", "-c", script]
    assert subprocess.run(command, cwd=ROOT, env=hidden).returncode == 0


def test_ranks_that_are_none_are_refused():
    done = run_module("parallel.rehearse", "--gpus", "4", "--rank", "4")
    assert done.returncode == 2
    assert "not '4': the ranks of ddp-dp4 are 0 to 3" in done.stderr


def test_what_needs_transformer_engine_is_named_with_the_flags_without_it():
    split = ["--engine", "megatron", "--gpus", "4", "--cp", "2", "--preset", "1.7b"]
    why = "a rehearsal has no Transformer Engine for cp 2{}: try --cp 1{}"
    assert rehearse.unable(run_of(*split, "--precision", "bf16")) == why.format("", "")
    both = run_of(*split, "--precision", "fp8")
    assert rehearse.unable(both) == why.format(" and precision fp8", " --precision bf16")
    assert not rehearse.unable(run_of("--engine", "megatron"))


def test_the_worst_rank_is_of_the_stage_with_the_highest_peak_by_formula():
    split = ["--engine", "megatron", "--gpus", "64", "--tp", "8", "--pp", "8"]
    short = run_of("--preset", "175b", *split)
    stage, why = rehearse.worst_stage(short)
    peaks = [sum(rehearse.memory_by_formula(short, stage).values()) for stage in range(8)]
    assert peaks[stage] == max(peaks)
    assert rehearse.ranks_of(short, "worst") == [8 * stage]
    assert why.startswith(f"stage {stage} has the highest peak by formula (stage 0 ")


STUDY = """
question = "Do they fit?"
baseline = "ddp-seed1"
cluster = "small"
[defaults]
engine = "ddp"
preset = "tiny"
precision = "fp32"
[[sweep]]
include = [{ seed = 1 }, { seed = 7 }]
"""
CLUSTER = """
[small]
description = "one GPU"
gpus_per_node = 1
cores_per_node = 1
gpu = "V100-SXM2-16GB"
gpu_memory_gb = {gb}
"""


@pytest.fixture
def study(tmp_path, monkeypatch):
    """A study on a cluster whose card has the asked GB."""

    def made(gb: float):
        path = tmp_path / "study.toml"
        path.write_text(STUDY)
        (tmp_path / "clusters.toml").write_text(CLUSTER.format(gb=gb))
        monkeypatch.setenv("SCALING_CLUSTERS", str(tmp_path / "clusters.toml"))
        return path

    return made


def test_runs_of_equal_work_are_rehearsed_once_and_their_memory_is_drawn(
    study, tmp_path, capsys, processes
):
    out = tmp_path / "drawn"
    path = str(study(16))
    assert rehearse.main(["--study", path, "--format", "json", "--out", str(out)]) == 0
    printed = capsys.readouterr()
    first, second = json.loads(printed.out)["ranks"]
    assert (first["same_as"], second["same_as"]) == ("", first["run"])
    assert printed.err.count("rehearsing ") == 1
    stem = out / f"{first['run']}-rank0"
    points = json.loads(stem.with_name(stem.name + ".json").read_text())
    most = max(sum(point["bytes"].values()) for point in points)
    peak = sum(first["peak"].values())
    assert 0.99 * peak <= most <= peak
    assert stem.with_name(stem.name + ".png").read_bytes().startswith(b"\x89PNG")


def test_a_run_that_does_not_fit_is_neither_rendered_nor_submitted(study, tmp_path):
    path = str(study(4))
    out = tmp_path / "scripts"
    done = run_module("slurm.render", path, "--rehearse", "--out", str(out))
    assert done.returncode == 2 and not out.exists()
    assert "and a step may use 3.8 of the card's 4" in done.stdout
    assert "not every run trains a step and fits its card" in done.stderr


def test_the_table_of_studies_says_what_does_not_train_does_not_fit_and_is_missing(tmp_path):
    study = "slurm/published/megatron-base-16gb.toml"
    small, broken, *_ = runs = load_study(ROOT / study).specs
    lines = [",".join(rehearse_studies.COLUMNS)]
    for run, stage, weights, error in ((small, 0, 20 * 2**30, ""), (broken, 0, 0, "No kernel")):
        row = dict.fromkeys(rehearse_studies.COLUMNS, 0) | {"study": study, "run": run}
        row |= {"stage": stage, "weights_bytes": weights, "error": error, "same_as": ""}
        lines.append(",".join(map(str, row.values())))
    path = tmp_path / "rehearsed.csv"
    path.write_text("\n".join(lines) + "\n")
    found = {row["run"]: row for row in rehearsals.runs(path) if row["study"] in study}
    assert list(found) == list(runs)
    assert "tensors take 20.0 GB" in found[small]["wrong"]
    assert found[broken]["wrong"] == "cannot train a step: No kernel"
    assert {row["wrong"] for run, row in found.items() if run not in (small, broken)} == {
        "not rehearsed"
    }
