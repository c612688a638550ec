"""A step's seconds, term by term, and how they spread where runs stall or do not."""

import numpy as np

from analysis.planner.columns import Array, Columns
from analysis.planner.timemodel.machine import Machine
from analysis.planner.timemodel.replicas import data_parallel, hidden, optimizer, ring_stall
from analysis.planner.timemodel.stages import p2p, pipeline_stall, stages, stalls, tied_embedding


def terms(x: Columns, machine: Machine, c: dict) -> dict[str, Array]:
    """Returns every additive term of a step in seconds; their sum is the prediction.

    Ranks that share a core take turns: their seconds count that many times, but not those of a
    stage that waits, for its core works for another. These are seconds before that counting.
    """
    slowest, mean = stages(x, machine, c)
    send = p2p(x, machine, c)
    wait = np.where(x.slower, c["engine"], 1.0)
    traffic = data_parallel(x, machine, c)
    ranks_per_core = np.maximum(x.gpus / machine.cores, 1.0)
    return {
        "compute": x.n_micro * slowest * wait,
        "bubble": (x.pp - 1) * (mean + send) / x.vpp * wait / ranks_per_core,
        "p2p": x.n_micro * send * wait,
        "data_parallel": traffic - hidden(x, traffic, mean) + ring_stall(x),
        "embedding": tied_embedding(x, machine, c),
        "optimizer": optimizer(x, machine, c),
    }


def seconds(x: Columns, machine: Machine, c: dict) -> Array:
    """Returns the predicted seconds of one step."""
    return sum(terms(x, machine, c).values())


def luck(x: Columns, machine: Machine, c: dict) -> Array:
    """Returns the standard deviation of log seconds that comes from runs which stall or do not.

    A pipeline that stalls with probability q takes t or t + w seconds: sqrt(q - q^2) log(1 + w/t).
    q is 109/110 where `stalls` says so. Of the other pipelines one in seven stalls on 128 GPUs, and
    half on 256. Every other ring stalls.
    """
    step_s, stall = seconds(x, machine, c), pipeline_stall(x)
    waits_s = x.n_micro * stall.micro_batch + (x.pp - 1) * stall.slot
    without_s = step_s - waits_s * stalls(x)  # step_s counts what is sure to come
    q = np.where(stalls(x), 109 / 110, 1.0 / (1.0 + (240.0 / x.gpus) ** 3)) * (x.pp > 1)
    pipelines = np.sqrt(q * (1.0 - q)) * np.log1p(waits_s / without_s)
    rings = 0.5 * np.log(step_s / (step_s - ring_stall(x)))
    return pipelines + rings
