"""The peak of a step's memory, part by part, on the fullest rank or on a stage's.

Megatron core with Transformer Engine in 16 bits is `counted`: every tensor is known, of experts and
latent attention, too, and what PyTorch allocates is the largest of two moments, the output layer's
backward and the last layer's. Of the other engines all parts add up: published peaks look as an
allocator's would that does not use the freed blocks again.
"""

import math
from collections.abc import Mapping
from typing import NamedTuple

import numpy as np

from analysis.planner.columns import Array, Columns, Step
from analysis.planner.memory import buffers, model_states
from analysis.planner.memory.activations import (
    activations,
    computed_again,
    layer_goes_back,
    most_activations,
)
from analysis.planner.memory.output import logits, output_goes_back
from analysis.planner.memory.pipeline import Stage, stages
from base.errors import UsageError
from base.units import GIB
from models.config import GPTConfig, in_words
from models.headroom import CONSTANTS

ALLOCATED = {"library_gb": 0.0, "fragments": 1.0}  # CONSTANTS of what PyTorch alone allocates


class Passing(NamedTuple):
    """The bytes of activations and of logits that a stage holds at its peak."""

    activations: float
    logits: float


def _comes_and_goes(step: Step, stage: Stage) -> Passing:
    """Returns what of a stage's peak comes and goes with micro-batches."""
    most = most_activations(step, stage)
    if not step.counted:
        again = computed_again(step, stage)
        head = logits(step) if stage.has_output else 0.0
        if step.host_checkpoints:  # a layer's working memory and the logits take turns, too
            head = max(head - again, 0.0)
        return Passing(most + again, head)
    in_a_layer = most + layer_goes_back(step, stage)
    if stage.has_output:
        beside_head = activations(step, stage, stage.moments[0])
        head = output_goes_back(step)
        if beside_head + head >= in_a_layer:
            return Passing(beside_head, head)
    return Passing(in_a_layer, 0.0)


def parts(step: Step, stage: Stage, constants: Mapping[str, float] = CONSTANTS) -> dict[str, float]:
    """Returns the bytes of a rank of a stage by part; constants: as models/headroom.py has them.
    They are nan of experts that are not `counted`."""
    numbers = model_states.parameters(step, stage)
    held = _comes_and_goes(step, stage)
    library = constants["library_gb"] * GIB
    if step.counted:
        library += buffers.workspaces(step)
    sizes = {
        "weights": model_states.weights(step, numbers),
        "gradients": model_states.gradients(step, stage, numbers),
        "optimizer": model_states.optimizer(step, stage, numbers),
        "fp8_copies": model_states.fp8_copies(step, stage),
        "activations": held.activations * constants["fragments"],
        "keys_and_values": 0.0 if step.counted else buffers.received(step),
        "masks": buffers.masks(step, stage),
        "logits": held.logits * constants["fragments"],
        "buckets": buffers.buckets(step),
        "library": library,
    }
    if step.experts and not step.counted:
        return dict.fromkeys(sizes, math.nan)
    return sizes


def fullest(step: Step, constants: Mapping[str, float] = CONSTANTS) -> dict[str, float]:
    """Returns `parts` of the fullest rank."""
    ranks = [parts(step, stage, constants) for stage in stages(step)]
    return max(ranks, key=lambda sizes: sum(sizes.values()))


def peaks(steps: Columns, constants: Mapping[str, float] = CONSTANTS) -> Array:
    """Returns the peak bytes of every row's fullest rank: what must fit; nan where no formula has
    the model's parts."""
    return np.array([sum(fullest(step, constants).values()) for step in steps.rows])


def stage_peaks(steps: Columns, number: int, constants: Mapping[str, float] = CONSTANTS) -> Array:
    """Returns the peak bytes of every row's stage of that number in `stages`: 0, or -1 the last."""
    ranks = ((step, stages(step)[number]) for step in steps.rows)
    return np.array([sum(parts(step, stage, constants).values()) for step, stage in ranks])


def allocated(step: Step, stage: Stage | None = None) -> float:
    """Returns torch.cuda.max_memory_allocated of a rank of a stage, or of the fullest; nan where a
    tensor is not counted."""
    sizes = parts(step, stage, ALLOCATED) if stage else fullest(step, ALLOCATED)
    return sum(sizes.values()) if step.counted else math.nan


def check_counted(config: GPTConfig, steps: Columns, name: str) -> None:
    """Refuses rows of a model with experts or latent attention whose bytes no formula counts; name:
    of the rows, in words.

    Raises:
        UsageError: there is one.
    """
    if config.parts and not all(step.counted for step in steps.rows):
        raise UsageError(
            f"the bytes of {in_words(config.parts)} are counted for Megatron-LM alone, in 16 bits"
            f" (--precision bf16), on cards with bf16, not for {name}"
        )
