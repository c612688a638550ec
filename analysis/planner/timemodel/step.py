"""A step's seconds, term by term, and how they spread where runs stall or do not."""

import numpy as np

from analysis.planner.columns import Array, Columns
from analysis.planner.timemodel.machine import Machine
from analysis.planner.timemodel.replicas import data_parallel, hidden, optimizer, ring_stall
from analysis.planner.timemodel.stages import p2p, pipeline_stall, stages, stalls, tied_embedding


def terms(steps: Columns, machine: Machine, constants: dict) -> dict[str, Array]:
    """Returns every additive term of a step in seconds; their sum is the prediction.

    Ranks that share a core take turns: their seconds count that many times, but not those of a
    stage that waits, for its core works for another. These are seconds before that counting.
    """
    slowest, mean = stages(steps, machine, constants)
    send = p2p(steps, machine, constants)
    wait = np.where(steps.slower, constants["engine"], 1.0)
    traffic = data_parallel(steps, machine, constants)
    ranks_per_core = np.maximum(steps.gpus / machine.cores, 1.0)
    return {
        "compute": steps.n_micro * slowest * wait,
        "bubble": (steps.pp - 1) * (mean + send) / steps.vpp * wait / ranks_per_core,
        "p2p": steps.n_micro * send * wait,
        "data_parallel": traffic - hidden(steps, traffic, mean) + ring_stall(steps),
        "embedding": tied_embedding(steps, machine, constants),
        "optimizer": optimizer(steps, machine, constants),
    }


def seconds(steps: Columns, machine: Machine, constants: dict) -> Array:
    """Returns the predicted seconds of one step."""
    return sum(terms(steps, machine, constants).values())


def luck(steps: Columns, machine: Machine, constants: dict) -> Array:
    """Returns the standard deviation of log seconds that comes from runs which stall or do not.

    A pipeline that stalls with probability q takes t or t + w seconds: sqrt(q - q^2) log(1 + w/t).
    q is 109/110 where `stalls` says so. Of the other pipelines one in seven stalls on 128 GPUs, and
    half on 256. Every other ring stalls.
    """
    step_s, stall = seconds(steps, machine, constants), pipeline_stall(steps)
    waits_s = steps.n_micro * stall.micro_batch + (steps.pp - 1) * stall.slot
    without_s = step_s - waits_s * stalls(steps)  # step_s counts what is sure to come
    q = np.where(stalls(steps), 109 / 110, 1.0 / (1.0 + (240.0 / steps.gpus) ** 3)) * (steps.pp > 1)
    pipelines = np.sqrt(q * (1.0 - q)) * np.log1p(waits_s / without_s)
    rings = 0.5 * np.log(step_s / (step_s - ring_stall(steps)))
    return pipelines + rings
