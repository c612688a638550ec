"""A rank rehearsed on shapes alone does the FLOPs, sends the messages and holds the bytes that the
formulas say."""

import argparse
import json

import pytest

from parallel import rehearse
from parallel.config.message_bytes import parameter_sizes
from parallel.config.settings import add_flags, from_flags, resolve
from tests.conftest import run_module

MODEL = ["--preset", "1.7b", "--n-layer", "4", "--seq-len", "512", "--grad-accum", "8"]
LLAMA = ["--preset", "llama3-8b", "--n-layer", "4", "--seq-len", "512", "--grad-accum", "8"]


def flags_of(flags: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    add_flags(parser)
    return parser.parse_args(flags)


def rehearsed(*flags: str) -> list[dict]:
    done = run_module("parallel.rehearse", *flags, "--format", "json")
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads(done.stdout)["ranks"]


@pytest.mark.parametrize(
    "flags",
    [
        ["--engine", "megatron", "--gpus", "64", "--tp", "2", "--pp", "4", "--zero-stage", "1"],
        ["--engine", "megatron", "--gpus", "64", "--tp", "8", "--pp", "2", "--vpp", "2"]
        + ["--sequence-parallel", "--recompute", "full"],
        ["--engine", "deepspeed_pipe", "--gpus", "16", "--tp", "2", "--pp", "4"],
        ["--engine", "deepspeed_zero", "--gpus", "8", "--zero-stage", "1", "--precision", "fp32"],
        ["--engine", "fsdp2", "--gpus", "8", "--zero-stage", "3", "--precision", "fp32"],
        ["--engine", "ddp", "--gpus", "2", "--precision", "fp32"],
    ],
    ids=lambda flags: "-".join(flags[1::2]),
)
def test_flops_messages_and_states_are_those_of_the_formulas(flags):
    model = LLAMA if "--recompute" in flags else MODEL
    precision = [] if "--precision" in flags else ["--precision", "bf16"]
    for rank in rehearsed(*model, *flags, *precision):
        beside = {row["what"]: (row["rehearsed"], row["formula"]) for row in rank["beside"]}
        for what, (ours, formula) in beside.items():
            if what == "pp calls" and flags[1] == "deepspeed_pipe":
                ours -= rank["stage"] < 3  # a first step describes what a stage sends on
            if what.startswith("dp ") and flags[1] == "ddp":
                assert ours == 0  # the C++ reducer's all-reduces are not rehearsed
            elif what == "TFLOP" or what.endswith(" calls") and formula is not None:
                assert ours == pytest.approx(formula, rel=1e-3), (what, rank["rank"])
            elif what in ("tp GB", "pp GB", "dp GB", "embedding GB") and formula is not None:
                assert ours == pytest.approx(formula, rel=1e-3), (what, rank["rank"])
        spec = resolve(("test", from_flags(flags_of([*model, *flags, *precision]))))
        assert rank["parameters"] == sum(size for size, _ in parameter_sizes(spec, rank["rank"]))
        width = 4 if "fp32" in precision + flags else 2
        shards = spec.layout.dp if flags[1] == "fsdp2" else 1
        held = shards * rank["peak"]["weights"]
        assert held == pytest.approx(width * rank["parameters"], rel=1e-3)


def test_a_step_that_cannot_be_trained_names_the_error_and_its_line(monkeypatch):
    spec = resolve(("test", {"engine": "megatron", "gpus": 4, "tp": 2, "pp": 2}))
    monkeypatch.setattr(rehearse, "_train_step", lambda *_: spec.no_such_setting)
    found = rehearse.rehearse(spec, 3)
    assert (found.rank, found.stage) == (3, 1)
    assert found.error.startswith("AttributeError: 'RunSpec' object has no attribute")
    assert "rank 3 (stage 1 of 2) could not train a step" in rehearse.printed(spec, found)


def test_ranks_that_are_none_are_refused():
    done = run_module("parallel.rehearse", "--gpus", "4", "--ranks", "4")
    assert done.returncode == 2
    assert "numbers below 4, not '4'" in done.stderr
