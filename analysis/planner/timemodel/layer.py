"""One layer and one micro-batch: what the GPU does, and the host that launches it."""

import numpy as np

from analysis.planner.columns import FULL, SELECTIVE, Array, Columns
from analysis.planner.engines import constant
from analysis.planner.timemodel.compute import attention, elementwise, gemms, repeated, ring_sums
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
FP8_GAP = 0.14  # added for each expert of the rank, in FP8: its kernels start one by one
FP8_ATTENTION = 0.75  # of attention's time: half are products, at twice the rate
ROUTED_GAP = 0.5  # added share of the time in which the kernels of a layer start and drain
SHARPNESS = 5.0  # power of the mean of GPU time and launch time; infinity would be max()


def passes(steps: Columns) -> Array:
    """Returns the forward-equivalents of a layer in a step: 1 forward + 2 backward, + 1 when
    recomputed."""
    return np.where(steps.recompute == FULL, 4.0, 3.0)


def launch(steps: Columns, constants: dict) -> Array:
    """Returns the host seconds to launch one layer, all passes; backward launches about as much as
    forward. The ranks of a tp group of a node wait for their slowest host at each collective. In a
    pipeline nanotron's host takes longer for each rank of the group, but not in a run on one node.
    """
    # Megatron's softmax kernel wants b a / t in fours (its fused_softmax.py, is_kernel_available).
    plain = ~steps.flash & (steps.micro_batch * steps.heads / steps.tp % 4 != 0)
    shares = 1.0 + plain * PLAIN_SOFTMAX  # of launching a plain layer
    if steps.experts.any():
        sorted_at_once = steps.deep_ep | steps.padded | steps.fused_sort
        chunks = np.where(sorted_at_once, 0.0, CHUNK_LAUNCH * steps.experts)
        routed = np.where(steps.hybrid_ep, HYBRID_LAUNCH, ROUTED_LAUNCH)
        own_experts = EXPERT_LAUNCH * steps.experts / steps.ep
        shares = shares + steps.routed * (routed + chunks + own_experts)
    shares = (shares + LATENT_LAUNCH * (steps.kv_lora > 0)) * (1.0 + HOST_SPREAD * (steps.tp - 1))
    staged = (steps.pp > 1) & (steps.gpus > steps.gpus_per_node)
    each_pass = constants["launch"] * constant(steps, "host") * shares
    each_pass = each_pass + constant(steps, "stage_host") * steps.tp * staged
    again = constants["launch"] * constant(steps, "host") * steps.repeated
    return (each_pass * (passes(steps) - 1.0) + again) * ~steps.step_graph


def layer(steps: Columns, machine: Machine, constants: dict) -> Array:
    """Returns the seconds of one layer and micro-batch, forward and backward: the larger of GPU and
    host time, smooth."""
    flash = np.where(steps.flash, constant(steps, "attention"), 1.0)
    core = attention(steps, machine, constants) * flash
    core = core * np.where(steps.fp8_attention, FP8_ATTENTION, 1.0)
    moved = elementwise(steps, machine, constants) * constant(steps, "elementwise")
    again = steps.plain & (steps.recompute == SELECTIVE)  # all but products and attention
    gpu = passes(steps) * (gemms(steps, machine, constants) + moved) + again * moved
    gpu = gpu + np.where(steps.attention_again, 4.0, 3.0) * core
    if steps.repeated.any():
        gpu = gpu + repeated(steps, machine, constants)
    gpu = gpu + tensor_parallel(steps, machine, constants)
    gpu = gpu + context_parallel(steps, machine, constants)
    gpu = gpu + ring_sums(steps, machine, constants)
    if steps.experts.any():
        gpu = gpu + expert_parallel(steps, machine, constants)
    own_experts = FP8_GAP * steps.fp8 * steps.experts / steps.ep
    gaps = 1.0 + (ROUTED_GAP + own_experts) * steps.routed * ~steps.step_graph
    gpu = gpu + constants["gap"] * gaps * passes(steps)  # kernels start and drain one by one
    return (gpu**SHARPNESS + launch(steps, constants) ** SHARPNESS) ** (1 / SHARPNESS)


def host_share(steps: Columns, machine: Machine, constants: dict) -> Array:
    """Returns how much the host limits a layer: 0 where the GPU alone does, 1 where the host does,
    0.5 where they take equally long."""
    return (launch(steps, constants) / layer(steps, machine, constants)) ** SHARPNESS
