"""The engines: what each can do (torch-free, for planning) and how to load one by name.

An engine knows only how to run a step. Loop, clock, log line and run folder are train.py's.
"""

import importlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from parallel.checkpointer import State
    from parallel.spec import RunSpec

Batch = tuple[Any, Any]  # tokens and labels: torch tensors, each [micro_batch, seq_len], int64


@dataclass(frozen=True)
class StepResult:
    """What one optimizer step reports, the same on every rank.

    loss: mean cross-entropy over the tokens of the whole global batch, before the update.
    grad_norm: L2 norm of the whole gradient before clipping; None when the step was skipped.
    loss_scale: the scale the loss was multiplied with (1.0 without fp16).
    skipped: the optimizer did not step, because fp16 gradients overflowed.
    """

    loss: float
    grad_norm: float | None
    loss_scale: float = 1.0
    skipped: bool = False


class Engine(Protocol):
    """Built with (spec, device, kernels) once the process group exists; all ranks call it alike."""

    def step(self, batches: "Iterator[Batch]", lr: float) -> StepResult:
        """Consume n_micro micro-batches of this dp rank and do one optimizer step."""

    def evaluate(self, batches: "Iterator[Batch]", n: int) -> float:
        """Mean loss over n micro-batches of every dp rank, without touching the weights."""

    def state(self) -> "State":
        """What this rank trains, as live tensors: read to be saved, filled to be restored."""

    def restore(self, adam_step: int, scaler: dict[str, float]) -> None:
        """The tensors of `state` have been filled: take over what is derived from them."""

    def describe(self) -> dict[str, Any]:
        """Facts for run.json: what the library resolved for itself."""

    def close(self) -> None:
        """Free what must be freed before the process group is destroyed."""


@dataclass(frozen=True)
class Ability:
    """What an engine can be asked for; anything else is refused with a sentence."""

    module: str
    summary: str
    zero_stages: tuple[int, ...] = (0,)
    recompute: tuple[str, ...] = ("none", "full")
    offload: tuple[str, ...] = ("none",)
    implementations: tuple[str, ...] = ("gpt",)
    kernels: tuple[str, ...] = ("torch",)
    tp: bool = False
    pp: bool = False
    vpp: bool = False
    sequence_parallel: bool = False
    compile: bool = False


_MEGATRON_KERNELS = ("te", "apex", "torch")  # what megatron-core's layers can be made of

ENGINES: dict[str, Ability] = {
    "ddp": Ability(
        module="parallel.engines.ddp",
        summary="plain PyTorch, DistributedDataParallel when there is more than one rank",
        implementations=("gpt", "hf"),
        compile=True,
    ),
    "deepspeed_zero": Ability(
        module="parallel.engines.deepspeed_zero",
        summary="DeepSpeed's engine: ZeRO stage 0 to 3, offload; tp through megatron-core layers",
        zero_stages=(0, 1, 2, 3),
        offload=("none", "optimizer", "all"),
        implementations=("gpt", "hf"),
        kernels=_MEGATRON_KERNELS,  # with tp > 1
        tp=True,
    ),
    "deepspeed_pipe": Ability(
        module="parallel.engines.deepspeed_pipe",
        summary="DeepSpeed's PipelineModule over megatron-core's tensor-parallel layers",
        zero_stages=(0, 1),
        kernels=_MEGATRON_KERNELS,
        tp=True,
        pp=True,
    ),
    "megatron": Ability(
        module="parallel.engines.megatron",
        summary="megatron-core: GPTModel, its DDP, 1F1B and interleaved schedules;"
        " zero_stage 1 is its distributed optimizer",
        zero_stages=(0, 1),
        recompute=("none", "selective", "full"),
        kernels=_MEGATRON_KERNELS,
        tp=True,
        pp=True,
        vpp=True,
        sequence_parallel=True,
    ),
}


def inabilities(spec: "RunSpec") -> list[str]:
    """What `spec` asks of its engine that the engine does not do, in words."""
    able, layout, name = ENGINES[spec.engine], spec.layout, spec.engine
    found = []
    for axis in ("tp", "pp", "vpp"):
        if getattr(layout, axis) > 1 and not getattr(able, axis):
            others = [e for e, a in ENGINES.items() if getattr(a, axis)]
            found.append(
                f"engine {name} has no {axis} (asked: {getattr(layout, axis)};"
                f" engines with {axis}: {', '.join(others)})"
            )
    if layout.sequence_parallel and not able.sequence_parallel:
        found.append(f"engine {name} has no sequence_parallel (megatron has)")
    for what, value, known in (
        ("zero_stage", layout.zero_stage, able.zero_stages),
        ("recompute", layout.recompute, able.recompute),
        ("offload", layout.offload, able.offload),
        ("implementation", spec.implementation, able.implementations),
    ):
        if value not in known:
            allowed = ", ".join(map(str, known))
            found.append(f"engine {name} offers {what} {allowed}, not {value}")
    if spec.compile and not able.compile:
        found.append(f"engine {name} does not compile its model (ddp does)")
    if spec.implementation == "hf" and layout.tp > 1:
        found.append(f"Hugging Face's GPT-2 has no tp (asked: {layout.tp})")
    if name == "deepspeed_zero" and spec.precision == "bf16" and layout.zero_stage == 0:
        found.append(
            "DeepSpeed without ZeRO updates the bf16 weights themselves, with no fp32 copy;"
            " for bf16 use zero_stage 1, 2 or 3"
        )
    return found


def kernels_of(spec: "RunSpec") -> tuple[str, ...]:
    """The kernel sets that `spec`'s engine has code for, best first."""
    if spec.engine == "deepspeed_zero" and spec.layout.tp == 1:
        return ("torch",)  # the reference model, not megatron-core's layers
    return ENGINES[spec.engine].kernels


def load(spec: "RunSpec", device: Any, kernels: str) -> Engine:
    """Import the engine's module (and so its library) and build it on this rank."""
    module = importlib.import_module(ENGINES[spec.engine].module)
    return module.build(spec, device, kernels)
