"""Stages of a pipeline: the slowest, the messages between them, and runs that stall."""

from typing import NamedTuple

import numpy as np

from analysis.planner.columns import Array, Columns
from analysis.planner.engines import constant
from analysis.planner.memory.pipeline import stages_of
from analysis.planner.messages import stage_gathers, stage_message
from analysis.planner.timemodel.compute import logits
from analysis.planner.timemodel.layer import layer
from analysis.planner.timemodel.links import SENT, SHOWN, hidden_states, inside_rate
from analysis.planner.timemodel.machine import Machine

STALL_GPUS = 360  # nanotron's runs on 512 GPUs stall; of those on 256 and fewer, some do


class PipelineTimes(NamedTuple):
    """Seconds of a micro-batch on the slowest stage, and of a mean stage in the bubble."""

    micro_batch: Array
    slot: Array


def stages(steps: Columns, machine: Machine, constants: dict) -> PipelineTimes:
    """Returns the seconds of forward and backward, with what a stalling pipeline waits."""
    layer_s, words_s = layer(steps, machine, constants), word_messages(steps, machine, constants)
    head_s = logits(steps, machine, constants) + words_s
    first, middle, last = stages_of(steps)
    front = first * layer_s + words_s
    back = last * layer_s + head_s + words_s * (steps.pp == 1)  # one stage has both ends
    slowest = np.maximum(np.maximum(front, middle * layer_s), back)
    mean = (steps.layers + steps.mtp) * layer_s + (1 + steps.mtp) * head_s + words_s
    mean = mean / steps.pp
    slowest = np.maximum(slowest, mean * (steps.mtp > 0))
    each, slot = (wait * stalls(steps) for wait in pipeline_stall(steps))
    return PipelineTimes(slowest + constants["micro"] + each, mean + constants["micro"] + slot)


def word_messages(steps: Columns, machine: Machine, constants: dict) -> Array:
    """Returns the seconds that tp ranks add up the embedding of their words, and as much again the
    gradient of the logits' input."""
    return np.where(steps.tp > 1, hidden_states(steps, machine, constants), 0.0)


def stalls(steps: Columns) -> Array:
    """Returns whether a row is a pipeline of a kind whose runs stall in nanotron: of 110 on 512
    GPUs 109 did, and nearly all whose tp groups span 4 nodes. Bool (n,)."""
    return (steps.pp > 1) & ((steps.gpus > STALL_GPUS) | (steps.tp >= 4 * steps.gpus_per_node))


def pipeline_stall(steps: Columns) -> PipelineTimes:
    """Returns what a pipeline that stalls adds, whatever its size: each message between stages
    waits. A stage has four a micro-batch, and two where all stages are ends. A slot of the bubble
    waits for one. Why they wait is not known."""
    message = constant(steps, "stall")
    return PipelineTimes(message * np.where(steps.pp > 2, 4.0, 2.0), message)


def p2p(steps: Columns, machine: Machine, constants: dict) -> Array:
    """Returns the seconds that sending activations and their gradients between stages adds to a
    micro-batch, with the gathers of what was scattered.

    Every GPU of a node sends at once, so each has its share of the node's network.
    """
    hidden = 1.0 * steps.tokens * steps.hidden * steps.width
    cut = steps.sequence_parallel | steps.scattered
    activations = stage_message(hidden, steps.tp, cut, steps.deepspeed)
    volume = activations + np.where(steps.whole_gradients, hidden, activations)
    inside = steps.gpus <= steps.gpus_per_node
    network = machine.network * SENT / steps.gpus_per_node
    rate = np.where(inside, machine.link * constants["link"], network)
    scattered = steps.scattered & ~steps.sequence_parallel & (steps.tp > 1)
    # The stage that gathers most: one in the middle, or the first of two.
    ends = steps.pp == 2, False
    gathers = stage_gathers(*ends, scattered, steps.deepspeed, steps.whole_gradients)
    gather_s = hidden_states(steps, machine, constants) / 2.0
    seconds = steps.vpp * (volume / rate * SHOWN + gathers * gather_s)
    return np.where(steps.pp > 1, seconds, 0.0)


def tied_embedding(steps: Columns, machine: Machine, constants: dict) -> Array:
    """Returns the seconds of the all-reduce of a tied embedding's gradient between the first and
    the last stage, which are on two nodes wherever there are two."""
    volume = steps.vocab * steps.hidden / steps.tp * steps.grad_width
    inside = inside_rate(np.array(2), steps.gpus_per_node, machine, constants)
    outside = machine.network * constants["network"] / steps.gpus_per_node
    rate = np.where(steps.gpus <= steps.gpus_per_node, inside, outside)
    return np.where((steps.pp > 1) & (steps.zero_stage < 3) & ~steps.untied, volume / rate, 0.0)
