"""FP8 on one GPU and context parallelism on two, through Transformer Engine. Not run yet."""

import pytest
import torch

from parallel.engines import kernels
from parallel.record.reader import Run, read_run
from tests.conftest import run_module

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no GPU here"),
]


@pytest.fixture(scope="session")
def needs_te() -> None:
    if reason := kernels.usable()["te"]:
        pytest.skip(reason)


def train(folder, tokens, ranks: int, *flags: str) -> Run:
    """20 steps of a small model by megatron with Transformer Engine on `ranks` GPUs."""
    if torch.cuda.device_count() < ranks:
        pytest.skip(f"torch sees {torch.cuda.device_count()} GPUs, {ranks} are needed")
    given = ["--engine", "megatron", "--kernels", "te", "--device", "cuda", "--preset", "small"]
    given += ["--global-batch", "16", "--micro-batch", "8", "--steps", "20", "--lr", "1e-3"]
    given += ["--min-lr", "1e-4", "--data", str(tokens), "--out", str(folder / "run"), *flags]
    done = run_module("parallel.train", *given, ranks=ranks, DS_ACCELERATOR="cuda")
    assert done.returncode == 0, done.stderr
    return read_run(folder / "run")


@pytest.mark.parametrize("recipe", ["delayed", "tensorwise"])
def test_fp8_trains_like_bf16(recipe, needs_te, tokens, tmp_path):
    if torch.cuda.get_device_capability() < (8, 9):
        pytest.skip(f"{torch.cuda.get_device_name()} has no fp8")
    flags = ("--precision", "fp8", "--fp8-recipe", recipe)
    fp8 = train(tmp_path / "fp8", tokens, 1, *flags)
    bf16 = train(tmp_path / "bf16", tokens, 1, "--precision", "bf16")
    assert [step["loss"] for step in fp8.steps] != [step["loss"] for step in bf16.steps]
    assert abs(fp8.steps[-1]["loss"] - bf16.steps[-1]["loss"]) <= 0.1
    assert fp8.steps[-1]["loss"] < fp8.steps[0]["loss"] - 0.5


@pytest.mark.parametrize("position", ["learned", "rope"])
@pytest.mark.parametrize("zero_stage", ["0", "1"])
def test_two_gpus_that_share_a_sequence_train_the_same_model(
    position, zero_stage, needs_te, tokens, tmp_path
):
    """bf16: Transformer Engine's fused attention, which cp needs, has no fp32."""
    flags = ("--precision", "bf16", "--position", position, "--zero-stage", zero_stage)
    alone = train(tmp_path / "alone", tokens, 1, *flags)
    shared = train(tmp_path / "shared", tokens, 2, *flags, "--cp", "2")
    for ours, theirs in zip(shared.steps, alone.steps, strict=True):
        assert abs(ours["loss"] - theirs["loss"]) <= 0.02
        assert abs(ours["grad_norm"] / theirs["grad_norm"] - 1) <= 0.05
