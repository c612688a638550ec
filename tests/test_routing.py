"""Where routers send tokens is counted, and a forced balance is never taken for a router's."""

import json
import math

import jsonschema
import pytest
import torch

from analysis import compare, parity, tflops
from base.errors import UsageError
from models import gpt
from models.config import PRESETS
from parallel.config.resolve import resolve
from parallel.config.study import name_without_study
from parallel.record.reader import read_run
from parallel.record.schema import CLOCK_COLUMNS, STEP_COLUMNS
from tests.conftest import run_module
from tests.fixture_runs import edit_steps, facts, write
from tests.test_training_metrics import SCHEMA

TINY = PRESETS["tiny-moe"]


def train(tokens, out, *flags, ranks=1):
    """With starting weights, which this learning rate leaves as they are to the last digit."""
    flags = ["--preset", "tiny-moe", "--n-layer", "2", "--max-seq-len", "32", *flags]
    flags += [
        "--global-batch",
        "8",
        "--micro-batch",
        "2",
        "--lr",
        "1e-30",
        "--min-lr",
        "0",
        "--data",
        str(tokens),
    ]
    flags += ["--steps", "5", "--log-interval", "2"]
    done = run_module("parallel.train", *flags, "--device", "cpu", "--out", str(out), ranks=ranks)
    assert done.returncode == 0, done.stderr
    return read_run(out)


@pytest.fixture(scope="module")
def runs(tokens, tmp_path_factory):
    out = tmp_path_factory.mktemp("runs")
    flags = {
        "one": (),
        "two": ("--recompute", "full"),
        "fsdp2": ("--engine", "fsdp2", "--zero-stage", "3"),
        "ep": ("--engine", "deepspeed_zero", "--ep", "2", "--zero-stage", "1"),
        "pipe": ("--engine", "deepspeed_pipe", "--pp", "2", "--recompute", "full"),
        "forced": ("--moe-router-force-load-balancing",),
    }
    return {k: train(tokens, out / k, *of, ranks=1 + (k != "one")) for k, of in flags.items()}


def counted(run):
    return run.metrics["summary"]["tokens_per_expert"]


def test_tokens_per_expert_are_those_of_the_whole_step_however_it_is_split(runs):
    """8 sequences of 32 tokens choose 2 experts in each of 2 layers; recomputation counts once."""
    tokens = counted(runs["one"])
    assert {k: sum(of) for k, of in tokens.items()} == {f"blocks.{i}": 8 * 32 * 2 for i in range(2)}
    assert all(counted(runs[name]) == tokens for name in ("two", "fsdp2", "ep", "pipe"))


def test_an_experts_load_is_its_most_tokens_over_the_mean_of_the_worst_layer(runs):
    for run in runs.values():
        jsonschema.validate(run.metrics, SCHEMA)
        loads = {block: max(of) / (sum(of) / 8) for block, of in counted(run).items()}
        assert run.metrics["summary"]["expert_load"] == pytest.approx(loads)
        assert run.metrics["summary"]["dropped"] == 0
        steps = {step["step"]: step["expert_load"] for step in run.steps}
        assert {step for step, load in steps.items() if load is not None} == {2, 4, 5}
        assert steps[5] == pytest.approx(max(loads.values()))
        log = (run.path / "train.log").read_text()
        assert log.count("| expert load: ") == 3 and f" expert load: {steps[5]:.3f} |" in log


def test_a_forced_balance_gives_each_expert_as_many_tokens(runs, rows_of):
    run = runs["forced"]
    assert all(of == [64] * 8 for of in counted(run).values())
    assert "routing: forced" in (run.path / "train.log").read_text()
    assert runs["one"].facts["routing"] == "natural"
    (row,) = rows_of(tflops.main, run.path)
    assert [row[k] for k in ("routing", "dropped", "expert_load")] == ["forced", 0, 1]


def test_a_capacity_drops_the_same_tokens_in_every_engine(tokens, tmp_path):
    flags = ("--moe-expert-capacity-factor", "0.8", "--lr", "1e-3")
    split = ("--engine", "megatron", "--ep", "2", *flags)
    ours = train(tokens, tmp_path / "ddp", *flags)
    theirs = train(tokens, tmp_path / "megatron", *split, ranks=2)
    assert counted(ours) == counted(theirs)
    # 4 micro-batches in which an expert has room for 0.8 of its share of 64 tokens' 2 choices.
    taken = [n for of in counted(ours).values() for n in of]
    assert max(taken) == 4 * math.ceil(0.8 * 64 * 2 / 8)
    dropped = ours.metrics["summary"]["dropped"]
    assert dropped == pytest.approx(1 - sum(taken) / (2 * 8 * 32 * 2)) and 0.2 <= dropped < 0.5
    for one, other in zip(ours.steps, theirs.steps, strict=True):
        assert one["loss"] == pytest.approx(other["loss"], abs=2e-4)
        assert one["grad_norm"] == pytest.approx(other["grad_norm"], rel=2e-3)


def test_megatrons_forced_balance_is_forced_too(tokens, tmp_path):
    flags = ("--engine", "megatron", "--moe-router-force-load-balancing")
    run = train(tokens, tmp_path / "run", *flags)
    assert run.metrics["summary"]["routing"] == "forced"
    assert max(run.metrics["summary"]["expert_load"].values()) < 1.5  # 64 tokens, at random


@pytest.mark.parametrize("forced", [False, True])
def test_a_layer_counts_its_last_call_and_forced_choices_do_not_depend_on_the_split(forced):
    layer = gpt.MixtureOfExperts(TINY, TINY.experts, forced)
    x = torch.randn(4, 6, TINY.hidden)  # 6 positions: no whole turn
    parts = torch.cat([layer(half)[0] for half in x.chunk(2)])
    assert torch.allclose(layer(x)[0], parts, atol=1e-6)
    chosen = layer.router(x.flatten(0, 1)).topk(2).indices.flatten().tolist()
    natural = [chosen.count(expert) for expert in range(8)]
    assert layer.tokens_E.tolist() == ([8, 8, 8, 8, 4, 4, 4, 4] if forced else natural)


def test_a_forced_run_is_named_so_and_asked_of_experts_alone():
    settings = {"preset": "tiny-moe", "moe_router_force_load_balancing": True}
    assert name_without_study(resolve(("test", settings)), settings) == "ddp-forced-tiny-moe"
    with pytest.raises(UsageError, match="is for a model with experts alone"):
        resolve(("test", settings | {"preset": "tiny"}))


def routed(root, routing, step_s):
    about = facts("s", "ddp-natural", preset="tiny-moe")
    return write(root, about | {"routing": routing, "run": f"ddp-{routing}"}, step_s)


def test_forced_is_neither_compared_nor_verified_nor_a_speedup(tmp_path, capsys, rows_of):
    paths = [routed(tmp_path, "natural", 0.5), routed(tmp_path, "forced", 0.4)]
    (row,) = rows_of(compare.main, *paths, status=1)
    assert row["ratio"] is None and "than a router's) forced" in " ".join(row["doubts"])
    parity.main([str(tmp_path), "--format", "json"])
    forced, _ = json.loads(capsys.readouterr().out)
    assert "routing forced, baseline natural" in forced["verdict"]
    tflops.main([str(tmp_path), "--format", "json"])
    assert [row["speedup"] for row in json.loads(capsys.readouterr().out)] == [None, 1]


@pytest.mark.parametrize("routing", ("natural", "forced"))
def test_a_router_that_still_moves_had_not_settled(tmp_path, rows_of, routing):
    run = routed(tmp_path, routing, 0.5)
    settled = "routing had not settled"
    (row,) = rows_of(tflops.main, run)
    assert settled not in " ".join(row["reasons"])
    edit_steps(run, lambda rows: [r | {"expert_load": 2 - 0.04 * int(r["step"])} for r in rows])
    (row,) = rows_of(tflops.main, run)
    moves = f"{settled}: expert load went from 1.96 to 1.2" in row["reasons"]
    assert moves is (routing == "natural")


def test_a_dense_run_has_no_word_of_experts(tmp_path):
    run = write(tmp_path, about := facts("s", None))
    assert not {"moe_router_force_load_balancing", "routing"} & {*about, *about["spec"]}
    assert (run / "steps.csv").read_text().splitlines()[0] == ",".join(
        [*STEP_COLUMNS, *CLOCK_COLUMNS]
    )
    assert "expert_load" not in read_run(run).steps[0]
