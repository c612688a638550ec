"""One layer and one micro-batch: what the GPU does, and the host that launches it."""

import numpy as np

from analysis.planner.columns import FULL, SELECTIVE, Array, Columns
from analysis.planner.engines import constant
from analysis.planner.timemodel.compute import attention, elementwise, gemms, ring_sums
from analysis.planner.timemodel.links import context_parallel, expert_parallel, tensor_parallel
from analysis.planner.timemodel.machine import Machine

PLAIN_SOFTMAX = 0.2  # added share of launching: cast, scale, mask, softmax, cast are five kernels
HOST_SPREAD = 0.04  # added share of launching for each further rank of a tp group
# Added shares of launching a layer (1.2 ms). Layers that the host holds up take 13 ms (DeepSeek-V2
# Lite on MI355X, Moonlight on H100: 64 experts), 15 (Qwen3 on H100: 128) and 33 (DeepSeek-V3 on
# GB200: 256).
ROUTED_LAUNCH = 4.5  # router, permutation, messages
HYBRID_LAUNCH = 2.0  # the same where HybridEP does most of it, and graphs the rest
CHUNK_LAUNCH = 0.04  # for each expert of the model: all-to-all sorts what came in a chunk for each
EXPERT_LAUNCH = 0.02  # for each expert of the rank: its products start one by one
LATENT_LAUNCH = 3.0  # latent attention: its products, norms, positions and copies
ROUTED_GAP = 0.5  # added share of the time in which the kernels of a layer start and drain
SHARPNESS = 5.0  # power of the mean of GPU time and launch time; infinity would be max()


def passes(x: Columns) -> Array:
    """Returns the forward-equivalents of a layer in a step: 1 forward + 2 backward, + 1 when
    recomputed."""
    return np.where(x.recompute == FULL, 4.0, 3.0)


def launch(x: Columns, c: dict) -> Array:
    """Returns the host seconds to launch one layer, all passes; backward launches about as much as
    forward. The ranks of a tp group of a node wait for their slowest host at each collective. In a
    pipeline nanotron's host takes longer for each rank of the group, but not in a run on one node.
    """
    # Megatron's softmax kernel wants b a / t in fours (its fused_softmax.py, is_kernel_available).
    plain = ~x.flash & (x.micro_batch * x.heads / x.tp % 4 != 0)
    shares = 1.0 + plain * PLAIN_SOFTMAX  # of launching a plain layer
    if x.experts.any():
        chunks = np.where(x.deep_ep | x.padded, 0.0, CHUNK_LAUNCH * x.experts)
        routed = np.where(x.hybrid_ep, HYBRID_LAUNCH, ROUTED_LAUNCH)
        shares = shares + x.routed * (routed + chunks + EXPERT_LAUNCH * x.experts / x.ep)
    shares = (shares + LATENT_LAUNCH * (x.kv_lora > 0)) * (1.0 + HOST_SPREAD * (x.tp - 1))
    staged = (x.pp > 1) & (x.gpus > x.gpus_per_node)
    each_pass = c["launch"] * constant(x, "host") * shares
    each_pass = each_pass + constant(x, "stage_host") * x.tp * staged
    return each_pass * (passes(x) - 1.0)


def layer(x: Columns, machine: Machine, c: dict) -> Array:
    """Returns the seconds of one layer and micro-batch, forward and backward: the larger of GPU and
    host time, smooth."""
    core = attention(x, machine, c) * np.where(x.flash, constant(x, "attention"), 1.0)
    moved = elementwise(x, machine, c) * constant(x, "elementwise")
    again = x.plain & (x.recompute == SELECTIVE)  # all but products and attention
    gpu = passes(x) * (gemms(x, machine, c) + moved) + again * moved
    gpu = gpu + np.where((x.recompute > 0) & ~again, 4.0, 3.0) * core
    gpu = gpu + tensor_parallel(x, machine, c) + context_parallel(x, machine, c)
    gpu = gpu + ring_sums(x, machine, c)
    if x.experts.any():
        gpu = gpu + expert_parallel(x, machine, c)
    gaps = 1.0 + ROUTED_GAP * x.routed
    gpu = gpu + c["gap"] * gaps * passes(x)  # kernels start and drain one by one
    return (gpu**SHARPNESS + launch(x, c) ** SHARPNESS) ** (1 / SHARPNESS)
