"""Ranks that hold the same parameters: gradients, ZeRO's messages, the optimizer."""

from typing import Any

import numpy as np

from analysis.planner.columns import FAMILIES, Array, Columns, Step
from analysis.planner.engines import FAMILY, constant
from analysis.planner.memory.model_states import attention_numbers, mlp_numbers
from analysis.planner.memory.pipeline import layer_numbers, stage_layers, stages_of
from analysis.planner.timemodel.links import inside_rate, latency, outside_rate
from analysis.planner.timemodel.machine import Machine
from analysis.planner.timemodel.muon import newton_schulz
from analysis.planner.timemodel.stages import STALL_GPUS
from parallel.measure.wire import wire_bytes

HOST_RATE = 2e9  # bytes/s of a rank's share of CPU Adam and PCIe (the Jean Zay offload rows)
MODULES = 3  # DeepSpeed's ZeRO-3 gathers a layer's modules one by one


def parameters(steps: Columns) -> Array:
    """Returns the trained parameters of the fullest rank, without its experts: its share of layers
    and, at an end, the embedding. Norms and biases take no time to speak of."""
    return steps.each(_parameters)


def _words(steps: Any) -> Any:
    """Returns the weights, whole, of the words at an end of a pipeline: with one stage those of an
    output layer of its own, too; of a step and of columns."""
    return steps.vocab * steps.hidden * (1 + (steps.untied & (steps.pp == 1)))


def _parameters(step: Step) -> float:
    """Returns `parameters` of one step."""
    first, middle, last = stage_layers(step)
    table = _words(step)
    if not (step.experts or step.kv_lora):
        layer = layer_numbers(step)
        return max(middle * layer, max(first, last) * layer + table) / step.tp
    mlp, shared = (mlp_numbers(step, width, step.tp) for width in (step.ffn, step.shared_ffn))
    routed = 1.0 - step.dense_layers / step.layers if step.experts else 0.0
    own = (1.0 - routed) * mlp + routed * (shared + step.hidden * step.experts)
    return max(first, last) * (attention_numbers(step) + own) + table / step.tp


def expert_parameters(steps: Columns) -> Array:
    """Returns the trained parameters of a rank's experts, of the fullest rank."""
    layers = np.maximum(*stages_of(steps)[:2]) * steps.routed
    return layers * mlp_numbers(steps, steps.moe_ffn, steps.etp) * steps.experts / steps.ep


def ring_nodes(steps: Columns) -> Array:
    """Returns the nodes that the ranks which hold the same parameters span."""
    return _ring_nodes(steps, steps.tp, steps.replicas)


def _ring_nodes(steps: Columns, apart: Array, n: Array) -> Array:
    """Returns the nodes that n ranks span of which each is `apart` ranks from the next."""
    return n / np.clip(steps.gpus_per_node // apart, 1, n)


def ring_rate(steps: Columns, apart: Array, n: Array, machine: Machine, constants: dict) -> Array:
    """Returns the bytes/s of one ring of the n ranks that hold the same parameters, `apart` ranks
    apart.

    Inside a node it has the links' rate. Beyond a node it shares the network with the rings beside
    it. One ring alone does not fill all adapters (hence the square root). A ring over more nodes is
    slower, by the power -0.3: Jean Zay's all-reduce went from 10.6 to 6.9 GB/s between 4 and 16
    nodes, and ZeRO-3's gathers on Selene slowed by 1.6 between 48 and 280.
    """
    inside = apart * n <= steps.gpus_per_node
    nodes = _ring_nodes(steps, apart, n)
    alone = np.sqrt(n / nodes / np.minimum(steps.gpus_per_node, steps.gpus))
    rate = outside_rate(nodes, machine, constants, constant(steps, "crowd")) * alone
    within = inside_rate(apart * n, steps.gpus_per_node, machine, constants)
    return np.where(inside, within, np.minimum(rate, within))


def ring_stall(steps: Columns) -> Array:
    """Returns the seconds that nanotron's data-parallel ring stalls in a step, for each of its
    nodes, on more than STALL_GPUS GPUs without a pipeline. ZeRO-1, which gathers narrower weights,
    moves fewer bytes than an all-reduce and stalls for as much less."""
    narrower = (steps.grad_width + steps.width) / (2.0 * steps.grad_width)
    moved = np.where(steps.zero_stage == 1, narrower, 1.0)
    stall_s = constant(steps, "ring_stall") * ring_nodes(steps) * moved
    return np.where((steps.pp == 1) & (steps.gpus > STALL_GPUS), stall_s, 0.0)


def data_parallel(steps: Columns, machine: Machine, constants: dict) -> Array:
    """Returns the seconds of the messages of gradients and weights between the ranks that hold the
    same ones, before any overlap.

    They are the gradients' all-reduce over the n ranks of dp and cp (ring, 2 (n-1)/n), or ZeRO's
    reduce-scatter and all-gathers [R 7]. ZeRO-3 gathers the weights in forward and in backward of
    every micro-batch. FSDP2 reduces `reductions` times a step, and at stage 2 gathers once a step.
    Experts have rings of their own.
    """
    shards = np.where(steps.fsdp2, steps.shards, steps.replicas)
    rate = ring_rate(steps, steps.tp, shards, machine, constants)
    words = _words(steps) / steps.tp
    shared = _reduced(steps, shards, parameters(steps), words, rate, constants)
    if (shards < steps.replicas).any():
        shared = shared + _between_copies(steps, shards, machine, constants)
    if not steps.experts.any():
        return shared
    n, apart = steps.expert_replicas, steps.ep * steps.etp
    rate = ring_rate(steps, apart, n, machine, constants)
    experts = _reduced(steps, n, expert_parameters(steps), np.zeros(1), rate, constants)
    return shared + np.where(steps.experts > 0, experts, 0.0)


def _between_copies(steps: Columns, shards: Array, machine: Machine, constants: dict) -> Array:
    """Returns the seconds in which FSDP2's copies of the model add up the gradients of a shard."""
    copies = steps.replicas / shards
    rate = ring_rate(steps, steps.tp * shards, copies, machine, constants)
    size = wire_bytes("all_reduce", copies, steps.grad_width * parameters(steps) / shards)
    calls = steps.layers * (copies > 1) * latency(copies, constants)
    return calls + size / rate * constants["exposed"]


def _reduced(
    steps: Columns, n: Array, numbers: Array, words: Array, rate: Array, constants: dict
) -> Array:
    """Returns `data_parallel` of that many parameters, which n ranks hold; `words` of them are
    outside layers."""
    # By a rank that gathers them all once.
    numbers_sent, words_sent = (wire_bytes("all_gather", n, size) for size in (numbers, words))
    schedules = (_zero_3, _reduced_once)
    zero_3, once = (schedule(steps, n, numbers_sent, rate, constants) for schedule in schedules)
    fsdp2 = _fsdp2(steps, n, numbers_sent, words_sent, rate, constants)
    return np.select([steps.fsdp2, steps.zero_stage == 3], [fsdp2, zero_3], once)


def _reduced_once(
    steps: Columns, n: Array, numbers_sent: Array, rate: Array, constants: dict
) -> Array:
    """Returns `_reduced` of gradients that stay on a rank until the last micro-batch. DeepSpeed's
    stage 2 is here, too: it cannot accumulate whole gradients and reduces every micro-batch."""
    gradients = 2.0 * numbers_sent * steps.grad_width
    # Elsewhere ZeRO-1 reduces to shards and gathers weights. DeepSpeed's stage 1 all-reduces.
    scatters = (steps.zero_stage == 1) & ~steps.deepspeed
    gradients = np.where(scatters, numbers_sent * (steps.grad_width + steps.width), gradients)
    gathers = np.where(steps.deepspeed & (steps.zero_stage > 0), numbers_sent * steps.width, 0.0)
    times = np.where(steps.zero_stage == 2, steps.n_micro, 1)
    transfer = (gradients * times + gathers) / rate * constants["exposed"]
    return transfer + steps.layers / steps.pp * (n > 1) * latency(n, constants)


def _zero_3(steps: Columns, n: Array, numbers_sent: Array, rate: Array, constants: dict) -> Array:
    """Returns `_reduced` of DeepSpeed's ZeRO-3: two gathers and a reduction a micro-batch."""
    modules = np.where(steps.deepspeed, MODULES, 1)
    calls = 3.0 * steps.n_micro * steps.layers * (n > 1) * latency(n, constants) * modules
    size = numbers_sent * (2.0 * steps.width + steps.grad_width)
    return calls + size / rate * steps.n_micro * constants["exposed"]


def _fsdp2(
    steps: Columns, n: Array, numbers_sent: Array, words_sent: Array, rate: Array, constants: dict
) -> Array:
    """Returns `_reduced` of FSDP2, which reduces as often as `reductions` says. What is outside
    layers stays whole from a micro-batch's forward to its backward."""
    gathers = np.where(steps.zero_stage == 3, 2.0 * steps.n_micro, 1.0)
    calls = (gathers + steps.reductions) * steps.layers / steps.pp * (n > 1) * latency(n, constants)
    size = numbers_sent * (gathers * steps.width + steps.reductions * steps.grad_width)
    size = size - np.where(steps.zero_stage == 3, words_sent * steps.width * steps.n_micro, 0.0)
    return calls + size / rate * constants["exposed"]


def hidden(steps: Columns, traffic_s: Array, micro_s: Array) -> Array:
    """Returns the seconds of data-parallel traffic that run beside the computation of micro-batches
    of micro_s seconds each. Gradients are whole in the last backward alone. ZeRO-3 and FSDP2 gather
    in every pass. ZeRO-1's traffic comes after the last backward, but of Megatron core, which
    reduces in the last backward and gathers in the next forward. Megatron's FSDP gathers experts
    beside the computation as PyTorch's does."""
    always = steps.fsdp2 | (steps.zero_stage == 3)
    experts = always & (steps.experts > 0) & ~steps.deepspeed
    overlap = np.where(experts, FAMILY["fsdp"]["overlap"], constant(steps, "overlap"))
    beside = micro_s * np.where(always, steps.n_micro, 2.0 / 3.0)
    overlaps = (steps.zero_stage != 1) | (steps.family == FAMILIES.index("megatron_core"))
    return overlap * (overlaps & ~steps.gradients_wait) * np.minimum(traffic_s, beside)


def optimizer(steps: Columns, machine: Machine, constants: dict) -> Array:
    """Returns the seconds of Adam over the rank's parameters, memory-bound (about 30 bytes each);
    Muon moves about as much and has its products. The fixed cost of a step is in it: gradient norm,
    scaler, logging."""
    moved = 30.0 * parameters(steps) / np.where(steps.zero_stage > 0, steps.replicas, 1)
    if steps.experts.any():
        shards = np.where(steps.zero_stage > 0, steps.expert_replicas, 1)
        moved = moved + 30.0 * expert_parameters(steps) / shards
    move = moved / (machine.memory_rate * constants["mem"])
    host = moved / HOST_RATE * (steps.offload > 0)
    products = newton_schulz(steps, machine, constants) if steps.muon.any() else 0.0
    return move + host + products + constants["step"]
