"""Stages of a pipeline: the slowest, the messages between them, and runs that stall."""

from typing import NamedTuple

import numpy as np

from analysis.planner.columns import Array, Columns
from analysis.planner.engines import constant
from analysis.planner.memory.pipeline import stages_of
from analysis.planner.timemodel.compute import logits
from analysis.planner.timemodel.layer import layer
from analysis.planner.timemodel.links import SENT, SHOWN, inside_rate
from analysis.planner.timemodel.machine import Machine

STALL_GPUS = 360  # nanotron's runs on 512 GPUs stall; of those on 256 and fewer, some do


class PipelineTimes(NamedTuple):
    """Seconds of a micro-batch on the slowest stage, and of a mean stage in the bubble."""

    micro_batch: Array
    slot: Array


def stages(x: Columns, machine: Machine, c: dict) -> PipelineTimes:
    """Returns the seconds of forward and backward, with what a stalling pipeline waits."""
    layer_s, head_s = layer(x, machine, c), logits(x, machine, c)
    first, middle, last = stages_of(x)
    slowest = np.maximum(np.maximum(first, middle) * layer_s, last * layer_s + head_s)
    mean = ((x.layers + x.mtp) * layer_s + (1 + x.mtp) * head_s) / x.pp
    slowest = np.maximum(slowest, mean * (x.mtp > 0))
    each, slot = (wait * stalls(x) for wait in pipeline_stall(x))
    return PipelineTimes(slowest + c["micro"] + each, mean + c["micro"] + slot)


def stalls(x: Columns) -> Array:
    """Returns whether a row is a pipeline of a kind whose runs stall in nanotron: of 110 on 512
    GPUs 109 did, and nearly all whose tp groups span 4 nodes. Bool (n,)."""
    return (x.pp > 1) & ((x.gpus > STALL_GPUS) | (x.tp >= 4 * x.gpus_per_node))


def pipeline_stall(x: Columns) -> PipelineTimes:
    """Returns what a pipeline that stalls adds, whatever its size: each message between stages
    waits. A stage has four a micro-batch, and two where all stages are ends. A slot of the bubble
    waits for one. Why they wait is not known."""
    message = constant(x, "stall")
    return PipelineTimes(message * np.where(x.pp > 2, 4.0, 2.0), message)


def p2p(x: Columns, machine: Machine, c: dict) -> Array:
    """Returns the seconds that sending activations and their gradients between stages adds to a
    micro-batch.

    Every GPU of a node sends at once, so each has its share of the node's network.
    """
    volume = 2.0 * x.tokens * x.hidden * x.width
    scattered = x.sequence_parallel | ~x.deepspeed  # Megatron's scatter-gather [N 4.1]
    volume = volume / np.where(scattered, x.tp, 1)
    inside = x.gpus <= x.gpus_per_node
    rate = np.where(inside, machine.link * c["link"], machine.network * SENT / x.gpus_per_node)
    return (x.pp > 1) * x.vpp * volume / rate * SHOWN


def tied_embedding(x: Columns, machine: Machine, c: dict) -> Array:
    """Returns the seconds of the all-reduce of a tied embedding's gradient between the first and
    the last stage, which are on two nodes wherever there are two."""
    volume = x.vocab * x.hidden / x.tp * x.grad_width
    inside = inside_rate(np.array(2), x.gpus_per_node, machine, c)
    outside = machine.network * c["network"] / x.gpus_per_node
    rate = np.where(x.gpus <= x.gpus_per_node, inside, outside)
    return np.where((x.pp > 1) & (x.zero_stage < 3) & ~x.untied, volume / rate, 0.0)
