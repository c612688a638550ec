"""Ranks that hold the same parameters: gradients, ZeRO's messages, the optimizer."""

import numpy as np

from analysis.planner.columns import Array, Columns, Step
from analysis.planner.engines import FAMILY, constant
from analysis.planner.memory.model_states import attention_numbers, mlp_numbers
from analysis.planner.memory.pipeline import layer_numbers, stage_layers, stages_of
from analysis.planner.timemodel.links import inside_rate, latency, outside_rate
from analysis.planner.timemodel.machine import Machine
from analysis.planner.timemodel.stages import STALL_GPUS
from parallel.measure.wire import wire_bytes

HOST_RATE = 2e9  # bytes/s of a rank's share of CPU Adam and PCIe (the Jean Zay offload rows)
MODULES = 3  # DeepSpeed's ZeRO-3 gathers a layer's modules one by one


def parameters(x: Columns) -> Array:
    """Returns the trained parameters of the fullest rank, without its experts: its share of layers
    and, at an end, the embedding. Norms and biases take no time to speak of."""
    return x.each(_parameters)


def _parameters(step: Step) -> float:
    """Returns `parameters` of one step."""
    first, middle, last = stage_layers(step)
    table = step.vocab * step.hidden * (2 if step.untied and step.pp == 1 else 1)
    if not (step.experts or step.kv_lora):
        layer = layer_numbers(step)
        return max(middle * layer, max(first, last) * layer + table) / step.tp
    mlp, shared = (mlp_numbers(step, width, step.tp) for width in (step.ffn, step.shared_ffn))
    routed = 1.0 - step.dense_layers / step.layers if step.experts else 0.0
    own = (1.0 - routed) * mlp + routed * (shared + step.hidden * step.experts)
    return max(first, last) * (attention_numbers(step) + own) + table / step.tp


def expert_parameters(x: Columns) -> Array:
    """Returns the trained parameters of a rank's experts, of the fullest rank."""
    layers = np.maximum(*stages_of(x)[:2]) * x.routed
    return layers * mlp_numbers(x, x.moe_ffn, x.etp) * x.experts / x.ep


def ring_nodes(x: Columns) -> Array:
    """Returns the nodes that the ranks which hold the same parameters span."""
    return _ring_nodes(x, x.tp, x.replicas)


def _ring_nodes(x: Columns, apart: Array, n: Array) -> Array:
    """Returns the nodes that n ranks span of which each is `apart` ranks from the next."""
    return n / np.clip(x.gpus_per_node // apart, 1, n)


def ring_rate(x: Columns, apart: Array, n: Array, machine: Machine, c: dict) -> Array:
    """Returns the bytes/s of one ring of the n ranks that hold the same parameters, `apart` ranks
    apart.

    Inside a node it has the links' rate. Beyond a node it shares the network with the rings beside
    it. One ring alone does not fill all adapters (hence the square root). A ring over more nodes is
    slower, by the power -0.3: Jean Zay's all-reduce went from 10.6 to 6.9 GB/s between 4 and 16
    nodes, and ZeRO-3's gathers on Selene slowed by 1.6 between 48 and 280.
    """
    inside = apart * n <= x.gpus_per_node
    nodes = _ring_nodes(x, apart, n)
    alone = np.sqrt(n / nodes / np.minimum(x.gpus_per_node, x.gpus))
    rate = outside_rate(nodes, machine, c, constant(x, "crowd")) * alone
    within = inside_rate(apart * n, x.gpus_per_node, machine, c)
    return np.where(inside, within, np.minimum(rate, within))


def ring_stall(x: Columns) -> Array:
    """Returns the seconds that nanotron's data-parallel ring stalls in a step, for each of its
    nodes, on more than STALL_GPUS GPUs without a pipeline. ZeRO-1, which gathers narrower weights,
    moves fewer bytes than an all-reduce and stalls for as much less."""
    moved = np.where(x.zero_stage == 1, (x.grad_width + x.width) / (2.0 * x.grad_width), 1.0)
    return constant(x, "ring_stall") * ring_nodes(x) * moved * ((x.pp == 1) & (x.gpus > STALL_GPUS))


def data_parallel(x: Columns, machine: Machine, c: dict) -> Array:
    """Returns the seconds that the gradients' all-reduce over the n ranks of dp and cp (ring, 2
    (n-1)/n), or ZeRO's reduce-scatter and all-gathers [R 7], adds after overlap. ZeRO-3 gathers the
    weights in forward and in backward of every micro-batch. FSDP2 reduces `reductions` times a
    step, and at stage 2 gathers once a step. Experts have rings of their own."""
    rate = ring_rate(x, x.tp, x.replicas, machine, c)
    shared = _reduced(x, x.replicas, parameters(x), rate, c)
    if not x.experts.any():
        return shared
    n, apart = x.expert_replicas, x.ep * x.etp
    rate = ring_rate(x, apart, n, machine, c)
    return shared + (x.experts > 0) * _reduced(x, n, expert_parameters(x), rate, c)


def _reduced(x: Columns, n: Array, numbers: Array, rate: Array, c: dict) -> Array:
    """Returns `data_parallel` of that many parameters, which n ranks hold."""
    numbers_sent = wire_bytes("all_gather", n, numbers)  # by a rank that gathers them all once
    schedules = (_fsdp2, _zero_3, _reduced_once)
    fsdp2, zero_3, once = (schedule(x, n, numbers_sent, rate, c) for schedule in schedules)
    return np.select([x.fsdp2, x.zero_stage == 3], [fsdp2, zero_3], once)


def _reduced_once(x: Columns, n: Array, numbers_sent: Array, rate: Array, c: dict) -> Array:
    """Returns `_reduced` of gradients that stay on a rank until the last micro-batch, but for
    DeepSpeed's stage 2: that cannot accumulate whole gradients and reduces every micro-batch."""
    gradients = 2.0 * numbers_sent * x.grad_width
    # Elsewhere ZeRO-1 reduces to shards and gathers weights. DeepSpeed's stage 1 all-reduces.
    scatters = (x.zero_stage == 1) & ~x.deepspeed
    gradients = np.where(scatters, numbers_sent * (x.grad_width + x.width), gradients)
    gathers = np.where(x.deepspeed & (x.zero_stage > 0), numbers_sent * x.width, 0.0)
    times = np.where(x.zero_stage == 2, x.n_micro, 1)
    transfer = (gradients * times + gathers) / rate * c["exposed"]
    return transfer + x.layers / x.pp * (n > 1) * latency(n, c)


def _zero_3(x: Columns, n: Array, numbers_sent: Array, rate: Array, c: dict) -> Array:
    """Returns `_reduced` of DeepSpeed's ZeRO-3: two gathers and a reduction a micro-batch."""
    modules = np.where(x.deepspeed, MODULES, 1)
    calls = 3.0 * x.n_micro * x.layers * (n > 1) * latency(n, c) * modules
    size = numbers_sent * (2.0 * x.width + x.grad_width)
    return calls + size / rate * x.n_micro * c["exposed"]


def _fsdp2(x: Columns, n: Array, numbers_sent: Array, rate: Array, c: dict) -> Array:
    """Returns `_reduced` of FSDP2, which reduces as often as `reductions` says."""
    gathers = np.where(x.zero_stage == 3, 2.0 * x.n_micro, 1.0)
    calls = (gathers + x.reductions) * x.layers / x.pp * (n > 1) * latency(n, c)
    size = numbers_sent * (gathers * x.width + x.reductions * x.grad_width)
    return calls + size / rate * c["exposed"]


def hidden(x: Columns, traffic_s: Array, micro_s: Array) -> Array:
    """Returns the seconds of data-parallel traffic that run beside the computation of micro-batches
    of micro_s seconds each. Gradients are whole in the last backward alone. ZeRO-3 and FSDP2 gather
    in every pass. ZeRO-1's traffic comes after the last backward. Megatron's FSDP gathers experts
    beside the computation as PyTorch's does."""
    always = x.fsdp2 | (x.zero_stage == 3)
    experts = always & (x.experts > 0) & ~x.deepspeed
    overlap = np.where(experts, FAMILY["fsdp"]["overlap"], constant(x, "overlap"))
    beside = micro_s * np.where(always, x.n_micro, 2.0 / 3.0)
    return overlap * (x.zero_stage != 1) * np.minimum(traffic_s, beside)


def optimizer(x: Columns, machine: Machine, c: dict) -> Array:
    """Returns the seconds of Adam over the rank's parameters, memory-bound (about 30 bytes each),
    and the fixed cost of a step: gradient norm, scaler, logging."""
    moved = 30.0 * parameters(x) / np.where(x.zero_stage > 0, x.replicas, 1)
    if x.experts.any():
        shards = np.where(x.zero_stage > 0, x.expert_replicas, 1)
        moved = moved + 30.0 * expert_parameters(x) / shards
    move = moved / (machine.memory_rate * c["mem"])
    host = moved / HOST_RATE * (x.offload > 0)
    return move + host + c["step"]
