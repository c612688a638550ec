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


def inside_rate(n: Array, gpus_per_node: Array, machine: Machine, c: dict) -> Array:
    """Returns the all-reduce bus bandwidth of n GPUs of one node. In a mesh, n GPUs own n - 1 of
    the wires."""
    wired = np.minimum(np.maximum(n - 1, 1) / np.maximum(gpus_per_node - 1, 1), 1.0)
    return machine.link * c["link"] * np.where(machine.mesh, wired, 1.0)


def outside_rate(n_nodes: Array, machine: Machine, c: dict, crowd: Array | float = CROWD) -> Array:
    """Returns the all-reduce bus bandwidth of whole nodes: a ring over more nodes is slower."""
    return machine.network * c["network"] * np.maximum(n_nodes, 1.0) ** -crowd


def latency(n: Array, c: dict) -> Array:
    """Returns the seconds of a collective of n ranks before its bytes count; c["latency"] is that
    of two."""
    return c["latency"] * (1.0 + np.log2(np.maximum(n, 1.0))) / 2.0


def all_reduce(n: Array, size: Array, gpus_per_node: Array, machine: Machine, c: dict) -> Array:
    """Returns the seconds of one all-reduce of `size` bytes over n GPUs that fill their nodes,
    alone, as nccl-tests measures it. Ring: 2 (n-1)/n of the bytes over the bus bandwidth."""
    inside = inside_rate(np.minimum(n, gpus_per_node), gpus_per_node, machine, c)
    outside = np.minimum(inside, outside_rate(n / gpus_per_node, machine, c))
    rate = np.where(n > gpus_per_node, outside, inside)
    return latency(n, c) + wire_bytes("all_reduce", n, size) / rate


def tensor_parallel(x: Columns, machine: Machine, c: dict) -> Array:
    """Returns the seconds of the collectives of a layer, all passes: an all-reduce of b s h per
    sub-block in forward and in backward [N 2.3], again in recomputation; with sequence parallelism
    the same bytes as all-gather and reduce-scatter [K 4.2]. Ring: 2 (n-1)/n of the bytes."""
    n_all_reduce = np.where(x.recompute == FULL, 6.0, 4.0)
    size = 1.0 * x.tokens * x.hidden * x.width
    # In a pipeline the host is slower than these hops (`launch`).
    hops = np.where((x.pp == 1) & (x.tp > x.gpus_per_node), x.tp / x.gpus_per_node, 0.0)
    each = all_reduce(x.tp, size, x.gpus_per_node, machine, c) + constant(x, "hop") * hops
    if x.experts.any():  # experts take a rank's own part of a sequence, shared ones the whole
        each = each * (1.0 - 0.5 * x.routed * (x.shared_ffn == 0))
    return n_all_reduce * each * (x.tp > 1)


def expert_parallel(x: Columns, machine: Machine, c: dict) -> Array:
    """Returns the seconds of a mean layer, all passes, in which tokens travel to their experts and
    back: an all-to-all each over ep ranks, and over etp ranks an all-gather and a reduce-scatter.

    All-to-all sends a token to each of its topk experts. DeepEP sends it once to a node, and there
    once to a rank; experts are drawn at random.
    """
    ranks = x.ep
    near = np.clip(x.gpus_per_node // x.etp, 1, ranks)  # of them, those that share a node
    nodes = ranks / near
    # How often a token is sent to other nodes, and in the node to other ranks.
    node_copies = np.where(x.deep_ep, _places_drawn(nodes, x.topk), x.topk)
    outside = node_copies * (nodes - 1) / nodes
    rank_copies = np.where(x.deep_ep, _places_drawn(ranks, x.topk), x.topk)
    inside = rank_copies * (near - 1) / near * np.where(x.deep_ep, 1.0, near / ranks)
    size = x.tokens / np.where(x.sequence_parallel, x.tp, 1) * x.hidden * x.width * x.imbalance
    links = inside_rate(ranks, x.gpus_per_node, machine, c) * SENT
    network = machine.network * c["network"] * SENT / x.gpus_per_node
    all_to_all = np.maximum(size * inside / links, size * outside / network) + latency(ranks, c)
    all_to_all = all_to_all * np.where(x.ep_overlap, SHOWN, 1.0) * (ranks > 1)
    routed_size = x.each(routed_tokens) * x.hidden * x.width
    gather = all_reduce(x.etp, routed_size, x.gpus_per_node, machine, c) / 2.0
    times = np.where(x.recompute == FULL, 6.0, 4.0)
    return x.routed * times * (all_to_all + gather * (x.etp > 1))


def _places_drawn(places: Array, draws: Array) -> Array:
    """Returns how many of so many places are drawn at least once, in the mean."""
    return places * (1.0 - (1.0 - 1.0 / places) ** draws)


def context_parallel(x: Columns, machine: Machine, c: dict) -> Array:
    """Returns the seconds of a layer, all passes, in which its keys and values travel between the
    cp ranks: in a ring [L] (Megatron-LM's p2p) a part travels while attention works on the one
    before, so that only what takes longer is added."""
    n = x.cp
    together = np.clip(x.gpus_per_node // x.tp, 1, n)  # ranks of the group that share a node
    share = together / np.minimum(x.gpus_per_node, x.gpus)  # of a node's network, beside the others
    within = inside_rate(x.tp * n, x.gpus_per_node, machine, c)
    outside = np.minimum(within, outside_rate(n / together, machine, c) * share)
    rate = np.where(together < n, outside, within)
    # Once in forward, twice in backward (their gradients, too), once more where it is recomputed.
    times = np.where(x.recompute > 0, 4.0, 3.0)
    wait = (n - 1) * c["latency"]
    hidden = (n - 1) / n * attention(x, machine, c)
    shown = times * (wait - hidden) + times * (n - 1) / n * keys_and_values(x) / rate
    return np.maximum(shown, 0.0) * (n > 1)
