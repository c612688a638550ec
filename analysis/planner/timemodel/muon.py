"""Muon's step: the Newton-Schulz iterations of each matrix, and where they run.

Jordan et al. 2024 (kellerjordan.github.io/posts/muon): five times X <- aX + (bA + cA^2) X with A =
X X^T. Of a matrix whose sides are s <= l these are 2 s^2 l + 2 s^3 + 2 s^2 l FLOPs. With ZeRO 1
each matrix has one data-parallel rank at home (Megatron-LM's layer-wise optimizer). Of the tp ranks
that share a matrix all repeat it whole ("duplicated"), or each multiplies its part and A is added
up ("distributed"), or one does it for all ("layer_sharded").
"""

from typing import NamedTuple

import numpy as np

from analysis.planner.columns import MUON, Array, Columns
from analysis.planner.memory.pipeline import stages_of
from analysis.planner.timemodel.links import all_reduce
from analysis.planner.timemodel.machine import Machine

ITERATIONS = 5
DISTRIBUTED, LAYER_SHARDED = map(MUON.index, ("distributed", "layer_sharded"))


class _Matrices(NamedTuple):
    """Matrices of a stage: how many, their sides whole, the copies that share them, and how many
    ranks cut each."""

    count: Array
    rows: Array
    columns: Array
    copies: Array
    cut: Array


def _matrices(steps: Columns) -> list[_Matrices]:
    """Returns the matrices of the fullest stage, without router and latents, which are small.
    Queries, keys and values are apart; a gate and its neighbour are one."""
    layers = np.maximum(*stages_of(steps)[:2])
    dense, routed = layers * (1 - steps.routed), layers * steps.routed
    heads, h = steps.head_dim * steps.heads, steps.hidden
    keys = np.where(steps.kv_lora > 0, heads, steps.head_dim * steps.kv_heads)
    sharing = steps.replicas, steps.tp
    found = [
        _Matrices(2 * layers, heads, h, *sharing),  # queries, projection
        _Matrices(2 * layers, keys, h, *sharing),
    ]
    for count, width, places in (
        (dense, steps.ffn, sharing),
        (routed * (steps.shared_ffn > 0), steps.shared_ffn, sharing),
        (routed * steps.experts / steps.ep, steps.moe_ffn, (steps.expert_replicas, steps.etp)),
    ):
        found.append(_Matrices(count, width * (1 + steps.glu), h, *places))
        found.append(_Matrices(count, h, width, *places))
    return found


def newton_schulz(steps: Columns, machine: Machine, constants: dict) -> Array:
    """Returns the seconds of Muon's products and messages between tp ranks on the rank that has
    most of them; 0 where Adam steps."""
    total, largest = np.zeros(len(steps)), np.zeros(len(steps))
    rate = machine.peak * constants["gemm"]
    for matrices in _matrices(steps):
        short = np.minimum(matrices.rows, matrices.columns) * 1.0
        long = np.maximum(matrices.rows, matrices.columns) * 1.0
        cut = matrices.cut
        parts = np.where(steps.muon == DISTRIBUTED, cut, 1)
        each = ITERATIONS * (4.0 * short**2 * long / parts + 2.0 * short**3) / rate
        # In fp32: all parts of a matrix, to and fro; or A in each iteration.
        exchanged = np.where(steps.muon == DISTRIBUTED, short**2, short * long)
        sent = all_reduce(cut, 4.0 * exchanged, steps.gpus_per_node, machine, constants)
        times = np.where(steps.muon == DISTRIBUTED, ITERATIONS, 1) * (cut > 1)
        each = each + times * sent
        homes = np.where(steps.zero_stage > 0, matrices.copies, 1)
        homes = homes * np.where(steps.muon == LAYER_SHARDED, cut, 1)
        total = total + matrices.count * each / homes
        largest = np.maximum(largest, each * (matrices.count > 0))
    return np.where(steps.muon > 0, np.maximum(total, largest), 0.0)
