"""One GPU: every engine at world size 1 over NCCL, bf16 and fp32, against plain PyTorch on it."""

import math

import pytest
import torch

from parallel.record.reader import Run, read_run
from tests.conftest import run_module

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no GPU here"),
]

ENGINES = {
    "ddp": [],
    "fsdp2": ["--zero-stage", "3"],
    "deepspeed_zero": ["--zero-stage", "1"],
    "deepspeed_pipe": [],
    "megatron": [],
}


@pytest.fixture(scope="session")
def train(tmp_path_factory, tokens):
    """Train an engine on the GPU once per session and precision; its run."""
    done: dict[tuple[str, str], Run] = {}

    def run(engine: str, precision: str) -> Run:
        if (engine, precision) not in done:
            folder = tmp_path_factory.mktemp(f"{engine}-{precision}") / "run"
            flags = ["--engine", engine, *ENGINES[engine], "--precision", precision]
            flags += ["--preset", "small", "--global-batch", "16", "--micro-batch", "8"]
            flags += ["--steps", "20", "--lr", "1e-3", "--min-lr", "1e-4", "--device", "cuda"]
            ended = run_module(
                "parallel.train", *flags, "--data", str(tokens), "--out", str(folder), ranks=1,
                DS_ACCELERATOR="cuda",
            )  # fmt: skip
            assert ended.returncode == 0, ended.stderr
            done[engine, precision] = read_run(folder)
        return done[engine, precision]

    return run


@pytest.mark.parametrize("engine", ENGINES)
def test_fp32_is_the_same_model_on_a_gpu(engine, train):
    run, baseline = train(engine, "fp32"), train("ddp", "fp32")
    for ours, theirs in zip(run.steps, baseline.steps, strict=True):
        assert abs(ours["loss"] - theirs["loss"]) <= 2e-4
        assert abs(ours["grad_norm"] / theirs["grad_norm"] - 1) <= 2e-3


@pytest.mark.parametrize("engine", ENGINES)
def test_bf16_trains_on_a_gpu(engine, train):
    run = train(engine, "bf16")
    assert run.state == "complete" and run.facts["host"]["gpu"]
    assert abs(run.steps[0]["loss"] - math.log(257)) <= 0.3
    assert run.steps[-1]["loss"] < run.steps[0]["loss"] - 0.5


@pytest.mark.parametrize("engine", [engine for engine in ENGINES if engine != "fsdp2"])
def test_fp16_scales_its_loss_on_a_gpu(engine, train):
    run = train(engine, "fp16")
    assert run.state == "complete"
    assert max(step["loss_scale"] for step in run.steps) > 1
    assert run.steps[-1]["loss"] < run.steps[0]["loss"] - 0.5
