"""Messages: what links reach, and the collectives of a layer's ranks."""

import numpy as np

from analysis.planner.columns import FULL, Array, Columns
from analysis.planner.engines import CROWD, constant
from analysis.planner.memory.activations import routed_tokens
from analysis.planner.memory.buffers import keys_and_values
from analysis.planner.timemodel.compute import attention
from analysis.planner.timemodel.machine import Machine
from parallel.measure.wire import wire_bytes

SENT = 0.8  # share of a node's network that stages reach, which send in pairs and not in a ring
SHOWN = 0.4  # share of p2p that no computation hides


def inside_rate(n: Array, gpus_per_node: Array, machine: Machine, constants: dict) -> Array:
    """Returns the all-reduce bus bandwidth of n GPUs of one node. In a mesh, n GPUs own n - 1 of
    the wires."""
    wired = np.minimum(np.maximum(n - 1, 1) / np.maximum(gpus_per_node - 1, 1), 1.0)
    return machine.link * constants["link"] * np.where(machine.mesh, wired, 1.0)


def outside_rate(
    n_nodes: Array, machine: Machine, constants: dict, crowd: Array | float = CROWD
) -> Array:
    """Returns the all-reduce bus bandwidth of whole nodes: a ring over more nodes is slower."""
    return machine.network * constants["network"] * np.maximum(n_nodes, 1.0) ** -crowd


def latency(n: Array, constants: dict) -> Array:
    """Returns the seconds of a collective of n ranks before its bytes count; the constant
    `latency` is that of two."""
    return constants["latency"] * (1.0 + np.log2(np.maximum(n, 1.0))) / 2.0


def all_reduce(
    n: Array, size: Array, gpus_per_node: Array, machine: Machine, constants: dict
) -> Array:
    """Returns the seconds of one all-reduce of `size` bytes over n GPUs that fill their nodes,
    alone, as nccl-tests measures it. Ring: 2 (n-1)/n of the bytes over the bus bandwidth."""
    inside = inside_rate(np.minimum(n, gpus_per_node), gpus_per_node, machine, constants)
    outside = np.minimum(inside, outside_rate(n / gpus_per_node, machine, constants))
    rate = np.where(n > gpus_per_node, outside, inside)
    return latency(n, constants) + wire_bytes("all_reduce", n, size) / rate


def hidden_states(steps: Columns, machine: Machine, constants: dict) -> Array:
    """Returns the seconds of one all-reduce of a micro-batch's hidden states over tp."""
    size = 1.0 * steps.tokens * steps.hidden * steps.width
    return all_reduce(steps.tp, size, steps.gpus_per_node, machine, constants)


def tensor_parallel(steps: Columns, machine: Machine, constants: dict) -> Array:
    """Returns the seconds of the collectives of a layer, all passes.

    An all-reduce of b s h per sub-block is in forward and in backward [N 2.3], again in
    recomputation; with sequence parallelism the same bytes go as all-gather and reduce-scatter
    [K 4.2]. Ring: 2 (n-1)/n of the bytes. The further gather of a product's input, for its weight's
    gradient, travels beside the product of the input's, and takes no time (megatron-core's
    tensor_parallel/layers.py).
    """
    n_all_reduce = np.where(steps.recompute == FULL, 6.0, 4.0)
    # In a pipeline the host is slower than these hops (`launch`).
    nodes = steps.tp / steps.gpus_per_node
    hops = np.where((steps.pp == 1) & (steps.tp > steps.gpus_per_node), nodes, 0.0)
    each = hidden_states(steps, machine, constants) + constant(steps, "hop") * hops
    if steps.experts.any():  # experts take a rank's own part of a sequence, shared ones the whole
        each = each * (1.0 - 0.5 * steps.routed * (steps.shared_ffn == 0))
    return np.where(steps.tp > 1, n_all_reduce * each, 0.0)


def expert_parallel(steps: Columns, machine: Machine, constants: dict) -> Array:
    """Returns the seconds of a mean layer, all passes, in which tokens travel to their experts and
    back.

    Each way is an all-to-all over ep ranks, and over etp ranks an all-gather and a reduce-scatter.
    All-to-all sends a token to each of its topk experts. DeepEP sends it once to a node, and there
    once to a rank; experts are drawn at random.
    """
    ranks = steps.ep
    near = np.clip(steps.gpus_per_node // steps.etp, 1, ranks)  # of them, those that share a node
    nodes = ranks / near
    # How often a token is sent to other nodes, and in the node to other ranks.
    node_copies = np.where(steps.deep_ep, _places_drawn(nodes, steps.topk), steps.topk)
    outside = node_copies * (nodes - 1) / nodes
    rank_copies = np.where(steps.deep_ep, _places_drawn(ranks, steps.topk), steps.topk)
    inside = rank_copies * (near - 1) / near * np.where(steps.deep_ep, 1.0, near / ranks)
    tokens = steps.tokens / np.where(steps.sequence_parallel, steps.tp, 1)
    size = tokens * steps.hidden * steps.width * steps.imbalance
    links = inside_rate(ranks, steps.gpus_per_node, machine, constants) * SENT
    network = machine.network * constants["network"] * SENT / steps.gpus_per_node
    all_to_all = np.maximum(size * inside / links, size * outside / network)
    all_to_all = all_to_all + latency(ranks, constants)
    all_to_all = all_to_all * np.where(steps.ep_overlap, SHOWN, 1.0) * (ranks > 1)
    routed_size = steps.each(routed_tokens) * steps.hidden * steps.width
    both_ways = np.where(steps.our_megatron, (1.0 + 4.0 / steps.width) / 2.0, 1.0)
    routed_size = routed_size * both_ways
    gather = all_reduce(steps.etp, routed_size, steps.gpus_per_node, machine, constants) / 2.0
    times = np.where(steps.recompute == FULL, 6.0, 4.0)
    return steps.routed * times * (all_to_all + gather * (steps.etp > 1))


def _places_drawn(places: Array, draws: Array) -> Array:
    """Returns how many of so many places are drawn at least once, in the mean."""
    return places * (1.0 - (1.0 - 1.0 / places) ** draws)


def context_parallel(steps: Columns, machine: Machine, constants: dict) -> Array:
    """Returns the seconds that a layer, all passes, waits for keys and values of other cp ranks.

    In a ring [L] (Megatron-LM's p2p) a part travels while attention works on the one before, so
    that only what takes longer is added.
    """
    n = steps.cp
    # Of the group, the ranks that share a node; of the node's network, their share.
    together = np.clip(steps.gpus_per_node // steps.tp, 1, n)
    share = together / np.minimum(steps.gpus_per_node, steps.gpus)
    within = inside_rate(steps.tp * n, steps.gpus_per_node, machine, constants)
    outside = np.minimum(within, outside_rate(n / together, machine, constants) * share)
    rate = np.where(together < n, outside, within)
    # Once in forward, twice in backward (their gradients, too), once more where it is recomputed.
    times = np.where(steps.attention_again, 4.0, 3.0)
    wait = (n - 1) * constants["latency"]
    hidden = (n - 1) / n * attention(steps, machine, constants)
    shown = times * (wait - hidden) + times * (n - 1) / n * keys_and_values(steps) / rate
    return np.where(n > 1, np.maximum(shown, 0.0), 0.0)
