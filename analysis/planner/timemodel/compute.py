"""What the GPU computes: products, attention, and what moves through its memory."""

import numpy as np

from analysis.planner.columns import Array, Columns
from analysis.planner.memory.activations import routed_tokens
from analysis.planner.memory.model_states import mlp_numbers
from analysis.planner.timemodel.machine import Machine


def _gemm(m: Array, n: Array, k: Array, peak: Array, c: dict) -> Array:
    """Returns the seconds of a GEMM (m x k)(k x n) at peak x efficiency; longer where a side is
    short or ill aligned.

    Tensor cores want sides in multiples of 64 half-precision elements (NVIDIA, "Matrix
    Multiplication Background User's Guide", tile and wave quantisation).
    """
    seconds = 2.0 * m * n * k / (peak * c["gemm"])
    short = 1.0 + c["sat"] * (1.0 / m + 1.0 / n + 1.0 / k)
    crooked = ((n % 64 != 0) | (k % 64 != 0)) * c["align"]
    return seconds * (short + crooked)


def gemms(x: Columns, machine: Machine, c: dict) -> Array:
    """Returns the seconds of the four GEMMs of a layer, forward, one micro-batch: QKV, projection,
    MLP up and down; of a mean layer where some have experts."""
    m, h = x.tokens, x.hidden
    peak = np.where(x.fp8, np.maximum(machine.peak, machine.fp8), machine.peak)
    qkv = x.head_dim * (x.heads + 2 * x.kv_heads) / x.tp
    products = _gemm(m, qkv, h, peak, c) + _gemm(m, h, x.head_dim * x.heads / x.tp, peak, c)
    if x.kv_lora.any():
        products = np.where(x.kv_lora > 0, _latent_gemms(x, peak, c), products)
    dense = 1.0 - x.routed
    products = products + dense * _gemm(m, x.ffn * (1 + x.glu) / x.tp, h, peak, c)
    products = products + dense * _gemm(m, h, x.ffn / x.tp, peak, c)
    if x.experts.any():
        products = products + x.routed * _expert_gemms(x, peak, c)
    return products


def _latent_gemms(x: Columns, peak: Array, c: dict) -> Array:
    """Returns the seconds of queries and keys and values of latent attention, down and up, and the
    projection (arXiv 2405.04434); tp ranks make the same latents."""
    m, h, latent = x.tokens, x.hidden, np.maximum(x.q_lora, 1)
    queries = x.heads * (x.head_dim + x.rope_dim) / x.tp
    down = _gemm(m, latent, h, peak, c) * (x.q_lora > 0)
    inner = np.maximum(x.kv_lora, 1)
    return (
        down
        + _gemm(m, queries, np.where(x.q_lora > 0, latent, h), peak, c)
        + _gemm(m, inner + x.rope_dim, h, peak, c)
        + _gemm(m, x.heads * (x.head_dim + x.value_dim) / x.tp, inner, peak, c)
        + _gemm(m, h, np.maximum(x.heads * x.value_dim / x.tp, 1), peak, c)
    )


def _expert_gemms(x: Columns, peak: Array, c: dict) -> Array:
    """Returns the seconds of the router, the shared experts and the products of a rank's experts,
    forward: each takes its part of the tokens."""
    h, gate = x.hidden, 1 + x.glu

    def feed_forward(m: Array, width: Array) -> Array:
        return _gemm(m, width * gate, h, peak, c) + _gemm(m, h, width, peak, c)

    own_experts = np.maximum(x.experts / x.ep, 1)
    tokens_each = np.maximum(x.each(routed_tokens) * x.imbalance / own_experts, 1)
    routed = own_experts * feed_forward(tokens_each, np.maximum(x.moe_ffn / x.etp, 1))
    shared = feed_forward(x.tokens, np.maximum(x.shared_ffn / x.tp, 1))
    return routed + shared * (x.shared_ffn > 0)


def attention(x: Columns, machine: Machine, c: dict) -> Array:
    """Returns the seconds of scores and context of a layer, forward: 4 b s^2 a d FLOPs [N eq. 2].
    Flash attention skips the masked half. Without it, passes over the b a s^2 scores are added
    (write, softmax, dropout)."""
    pairs = x.tokens * x.seq * x.heads / x.tp
    latent = (x.head_dim + x.rope_dim + x.value_dim) / 2.0  # of keys and of values
    width = np.where(x.kv_lora > 0, latent, x.head_dim)
    flops = 4.0 * pairs * width * np.where(x.flash, 0.5, 1.0)
    crooked = x.head_dim % 8 != 0
    scores = np.where(x.flash, 0.0, 6.5 * x.width) * pairs
    return flops / (machine.peak * c["attn"]) * (1 + crooked * c["align"]) + scores / (
        machine.memory_rate * c["mem"]
    )


def elementwise(x: Columns, machine: Machine, c: dict) -> Array:
    """Returns the bytes that one layer moves, forward, over the memory rate: norms, dropouts and
    residuals (whole on every rank unless sequence-parallel [K]), GELU, biases and transposes (split
    by tp)."""
    sbh = x.tokens * x.hidden * x.width
    replicated = 13.0 * sbh / np.where(x.sequence_parallel, x.tp, 1)
    dense = 8.0 * x.ffn * (1.0 - x.routed) * (1 + 0.5 * x.glu) / (4.0 * x.hidden)
    split = (6.0 + dense) * sbh / x.tp
    moved = replicated + split
    if x.kv_lora.any():  # queries and keys are joined with their positions, values copied
        joined = x.heads * (2 * (x.head_dim + x.rope_dim) + x.value_dim) * (x.kv_lora > 0)
        moved = moved + 2.0 * x.tokens * joined * x.width / x.tp
    if x.experts.any():
        moved = moved + x.routed * _permuted(x)
    return moved / (machine.memory_rate * c["mem"])


def _permuted(x: Columns) -> Array:
    """Returns the bytes moved in the experts' part of a layer, forward: the router's scores in fp32
    in ten passes, tokens sorted by expert before their messages and after, and back, and the
    activation. DeepEP's kernels do the first sorting and the last sum. A pass reads the experts'
    weights, and backward adds to their gradients."""
    own_tokens = x.tokens / np.where(x.sequence_parallel, x.tp, 1)
    scores = 40.0 * own_tokens * x.experts
    times_moved = np.where(x.deep_ep, 4.0, 6.0) * x.topk + 2.0
    sorting = own_tokens * times_moved * x.imbalance * x.hidden * x.width * x.etp
    weights = mlp_numbers(x, x.moe_ffn, x.etp) * x.experts / x.ep
    weights = weights * (2.0 * x.width + 2.0 * x.grad_width) / 3.0
    routed_numbers = x.each(routed_tokens) * x.imbalance * x.moe_ffn / x.etp
    activated = routed_numbers + x.tokens * x.shared_ffn / x.tp
    return scores + sorting + weights + 2.0 * (1 + 0.5 * x.glu) * x.width * activated


def ring_sums(x: Columns, machine: Machine, c: dict) -> Array:
    """Returns the seconds of a layer, all passes, in which a cp rank adds what other ranks' keys
    and values gave to what it has: outputs in forward, gradients of queries, keys and values in
    backward. A sum reads two numbers and writes one (Transformer Engine's p2p); balanced over the
    ranks, a causal mask leaves 3/4 of them."""
    forward = x.heads * np.where(x.recompute > 0, 2.0, 1.0)
    numbers = (forward + x.heads + 2 * x.kv_heads) * x.tokens * x.head_dim / x.tp
    moved = 0.75 * (x.cp - 1) * 3.0 * numbers * x.width
    return moved / (machine.memory_rate * c["mem"])


def logits(x: Columns, machine: Machine, c: dict) -> Array:
    """Returns the seconds of the output layer and the loss of one micro-batch, forward and
    backward: never recomputed."""
    m = x.tokens
    gemm = 3.0 * _gemm(m, np.ceil(x.vocab / x.tp / 128) * 128, x.hidden, machine.peak, c)
    loss = 60.0 * m * x.vocab / x.tp / (machine.memory_rate * c["mem"])  # fp32, about ten passes
    return (gemm + loss) * c["head"]
