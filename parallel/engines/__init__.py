"""The engines: what each must do, and how to load one by name. Torch-free.

An engine knows only how to run a step. Loop, clock, log line and run folder are trainer.py's.
Read ddp.py and reference.py first, the shortest, then optim.py and clipping.py, which all share.
megatron.py and deepspeed_pipe.py build their models with layers.py, whose configuration is
megatron_config.py's and whose weights are reference_values.py's. The others are the machine's:
devices.py, kernels.py, cpu.py.
"""

import contextlib
import importlib
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from base.errors import UsageError
from parallel.config.run_spec import RunSpec
from parallel.record.facts import TRIED, tried, versions

if TYPE_CHECKING:
    from parallel.checkpoint.contents import State

Batch = tuple[Any, Any]  # tokens and labels: torch tensors, each [micro_batch, seq_len], int64


class Reduced(NamedTuple):
    """What the ranks tell each other at the end of a step: their mean loss, and whether one of them
    was asked to stop."""

    loss: float
    stop: bool


class StepResult(NamedTuple):
    """What one optimizer step reports, the same on every rank.

    loss: mean cross-entropy over the tokens of the whole global batch, before the update.
    grad_norm: L2 norm of the whole gradient before clipping; None when the step was skipped.
    loss_scale: the scale the loss was multiplied with (1.0 without fp16).
    skipped: the optimizer did not step, because fp16 gradients overflowed.
    stop: a rank was asked to stop.
    """

    loss: float
    grad_norm: float | None
    loss_scale: float = 1.0
    skipped: bool = False
    stop: bool = False


class Engine(Protocol):
    """What trains the model of a run with one library. It is built with (spec, device, kernels)
    once the process group exists; all ranks call it alike.

    modules: the models, or parts of one, that this rank computes with, as torch modules.
    """

    modules: list[Any]

    def step(self, batches: Iterator[Batch], lr: float, stop: Callable[[], bool]) -> StepResult:
        """Consumes n_micro micro-batches of this dp rank and does one optimizer step. stop: returns
        whether this rank was asked to stop (`bool`: never); all hear of it with the loss."""

    def evaluate(self, batches: Iterator[Batch], n: int) -> float:
        """Returns the mean loss over n micro-batches of every dp rank, and leaves the weights as
        they are."""

    def state(self) -> "State":
        """Returns what this rank trains, as live tensors that are read or filled."""

    def restore(self, adam_step: int, scaler: dict[str, float]) -> None:
        """Takes over what is derived from the tensors of `state`, which have been filled."""

    def describe(self) -> dict[str, Any]:
        """Returns facts for run.json: what the library resolved for itself."""

    def close(self) -> None:
        """Frees what must be freed before the process group is destroyed."""


def import_engine(name: str) -> ModuleType:
    """Imports an engine, and so its library: the file of its name."""
    return importlib.import_module(f"parallel.engines.{name}")


def load(spec: RunSpec, device: Any, kernels: str, draws: bool = True) -> Engine:
    """Imports the engine's module (and so its library), and returns the engine, built on this rank.
    draws: whether its starting weights are drawn; they are NaN otherwise, for a checkpoint to
    replace."""
    from models import gpt  # here: it needs torch

    try:
        module = import_engine(spec.engine)
        with contextlib.nullcontext() if draws else gpt.not_drawn():
            return module.build(spec, device, kernels)
    except ImportError as error:
        message = f"engine {spec.engine} cannot work here: {error}; {tried(versions())}"
        raise UsageError(message) from error
    except (AttributeError, TypeError) as error:  # ours, or of a library that was not tried
        if (libraries := tried(versions())) != TRIED:
            error.add_note(libraries)
        raise
