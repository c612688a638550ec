"""What the GPU computes: products, attention, and what moves through its memory."""

import numpy as np

from analysis.planner.columns import Array, Columns
from analysis.planner.memory.activations import routed_tokens
from analysis.planner.memory.model_states import mlp_numbers
from analysis.planner.timemodel.machine import Machine

# Bytes that move for each number that FP8 casts: two read, one written by rows, one by columns.
QUANTISED = 4.0


def _gemm(m: Array, n: Array, k: Array, peak: Array, constants: dict) -> Array:
    """Returns the seconds of a GEMM (m x k)(k x n) at peak x efficiency; longer where a side is
    short or ill aligned.

    Tensor cores want sides in multiples of 64 half-precision elements (NVIDIA, "Matrix
    Multiplication Background User's Guide", tile and wave quantisation).
    """
    seconds = 2.0 * m * n * k / (peak * constants["gemm"])
    sides = 1.0 + constants["sat"] * (1.0 / m + 1.0 / n + 1.0 / k)
    alignment = np.where((n % 64 != 0) | (k % 64 != 0), constants["align"], 0.0)
    return seconds * (sides + alignment)


def gemms(steps: Columns, machine: Machine, constants: dict) -> Array:
    """Returns the seconds of the four GEMMs of a layer, forward, one micro-batch: QKV, projection,
    MLP up and down; of a mean layer where some have experts."""
    tokens, h, peak = steps.tokens, steps.hidden, _peak(steps, machine)
    qkv = steps.head_dim * (steps.heads + 2 * steps.kv_heads) / steps.tp
    heads = steps.head_dim * steps.heads / steps.tp
    products = _gemm(tokens, qkv, h, peak, constants) + _gemm(tokens, h, heads, peak, constants)
    if steps.kv_lora.any():
        products = np.where(steps.kv_lora > 0, _latent_gemms(steps, peak, constants), products)
    dense = 1.0 - steps.routed
    products = products + dense * _feed_forward(steps, peak, constants)
    if steps.experts.any():
        products = products + steps.routed * _expert_gemms(steps, peak, constants)
    return products


def _peak(steps: Columns, machine: Machine) -> Array:
    """Returns the FLOP/s of a card in the precision of the layers' products."""
    return np.where(steps.fp8, np.maximum(machine.peak, machine.fp8), machine.peak)


def _feed_forward(steps: Columns, peak: Array, constants: dict) -> Array:
    """Returns the seconds of the two products of a layer without experts, forward."""
    width = steps.ffn / steps.tp
    up = _gemm(steps.tokens, width * (1 + steps.glu), steps.hidden, peak, constants)
    return up + _gemm(steps.tokens, steps.hidden, width, peak, constants)


def repeated(steps: Columns, machine: Machine, constants: dict) -> Array:
    """Returns the seconds of the products of modules whose forward backward repeats."""
    peak = _peak(steps, machine)
    dense = steps.repeats_mlp * (1.0 - steps.routed) * _feed_forward(steps, peak, constants)
    if not steps.repeats_latent.any():
        return dense
    return dense + np.where(steps.repeats_latent, _latent_up(steps, peak, constants), 0.0)


def _latent_gemms(steps: Columns, peak: Array, constants: dict) -> Array:
    """Returns the seconds of queries and keys and values of latent attention, down and up, and the
    projection (arXiv 2405.04434); tp ranks make the same latents."""
    tokens, h = steps.tokens, steps.hidden
    # A size of 0 means that the model has no such latents; a product of side 0 has no time.
    down = np.where(
        steps.q_lora > 0, _gemm(tokens, np.maximum(steps.q_lora, 1), h, peak, constants), 0.0
    )
    inner = np.maximum(steps.kv_lora, 1)
    values = np.maximum(steps.heads * steps.value_dim / steps.tp, 1)
    return (
        down
        + _gemm(tokens, inner + steps.rope_dim, h, peak, constants)
        + _latent_up(steps, peak, constants)
        + _gemm(tokens, h, values, peak, constants)
    )


def _latent_up(steps: Columns, peak: Array, constants: dict) -> Array:
    """Returns the seconds in which latents become queries, and keys and values."""
    queries = steps.heads * (steps.head_dim + steps.rope_dim) / steps.tp
    keys_and_values = steps.heads * (steps.head_dim + steps.value_dim) / steps.tp
    latent, inner = (
        np.where(steps.q_lora > 0, steps.q_lora, steps.hidden),
        np.maximum(steps.kv_lora, 1),
    )
    queries_s = _gemm(steps.tokens, queries, latent, peak, constants)
    return queries_s + _gemm(steps.tokens, keys_and_values, inner, peak, constants)


def _expert_gemms(steps: Columns, peak: Array, constants: dict) -> Array:
    """Returns the seconds of the router, the shared experts and the products of a rank's experts,
    forward: each takes its part of the tokens."""
    h, gate = steps.hidden, 1 + steps.glu

    def feed_forward(m: Array, width: Array) -> Array:
        return _gemm(m, width * gate, h, peak, constants) + _gemm(m, h, width, peak, constants)

    own_experts = np.maximum(steps.experts / steps.ep, 1)
    tokens_each = np.maximum(steps.each(routed_tokens) * steps.imbalance / own_experts, 1)
    routed = own_experts * feed_forward(tokens_each, np.maximum(steps.moe_ffn / steps.etp, 1))
    shared = feed_forward(steps.tokens, np.maximum(steps.shared_ffn / steps.tp, 1))
    return routed + shared * (steps.shared_ffn > 0)


def attention(steps: Columns, machine: Machine, constants: dict) -> Array:
    """Returns the seconds of scores and context of a layer, forward: 4 b s^2 a d FLOPs [N eq. 2].
    Flash attention skips the masked half. Without it, passes over the b a s^2 scores are added
    (write, softmax, dropout)."""
    pairs = steps.tokens * steps.seq * steps.heads / steps.tp
    latent = (steps.head_dim + steps.rope_dim + steps.value_dim) / 2.0  # of keys and of values
    width = np.where(steps.kv_lora > 0, latent, steps.head_dim)
    flops = 4.0 * pairs * width * np.where(steps.flash, 0.5, 1.0)
    alignment = np.where(steps.head_dim % 8 != 0, constants["align"], 0.0)
    scores = np.where(steps.flash, 0.0, 6.5 * steps.width) * pairs
    products = flops / (machine.peak * constants["attn"]) * (1 + alignment)
    return products + scores / (machine.memory_rate * constants["mem"])


def elementwise(steps: Columns, machine: Machine, constants: dict) -> Array:
    """Returns the seconds in which one layer's operators between products move their bytes,
    forward. These are norms, dropouts and residuals (whole on every rank unless sequence-parallel
    [K]), GELU, biases and transposes (split by tp)."""
    sbh = steps.tokens * steps.hidden * steps.width
    replicated = 13.0 * sbh / np.where(steps.sequence_parallel, steps.tp, 1)
    dense = 8.0 * steps.ffn * (1.0 - steps.routed) * (1 + 0.5 * steps.glu) / (4.0 * steps.hidden)
    split = (6.0 + dense) * sbh / steps.tp
    moved = replicated + split
    if steps.kv_lora.any():  # queries and keys are joined with their positions, values copied
        head = 2 * (steps.head_dim + steps.rope_dim) + steps.value_dim
        joined = np.where(steps.kv_lora > 0, steps.heads * head, 0)
        moved = moved + 2.0 * steps.tokens * joined * steps.width / steps.tp
    if steps.experts.any():
        moved = moved + steps.routed * _permuted(steps)
    return moved / (machine.memory_rate * constants["mem"])


def _permuted(steps: Columns) -> Array:
    """Returns the bytes moved in the experts' part of a layer, forward.

    The router's scores are moved in fp32 in ten passes; tokens are sorted by expert before their
    messages and after, and back; then there is the activation. DeepEP's kernels do the first
    sorting and the last sum. A pass reads the experts' weights, and backward adds to their
    gradients.
    """
    own_tokens = steps.tokens / np.where(steps.sequence_parallel, steps.tp, 1)
    scores = 40.0 * own_tokens * steps.experts
    times_moved = np.where(steps.deep_ep, 4.0, 6.0) * steps.topk + 2.0
    sorting = own_tokens * times_moved * steps.imbalance * steps.hidden * steps.width * steps.etp
    weights = mlp_numbers(steps, steps.moe_ffn, steps.etp) * steps.experts / steps.ep
    weights = weights * (2.0 * steps.width + 2.0 * steps.grad_width) / 3.0
    # FP8 reads what a product takes, also a gradient, in 16 bits, and writes it by rows and by
    # columns: inputs in forward, gradients in backward, of a third of the passes each.
    numbers = 2.0 * steps.hidden + (2.0 + steps.glu) * steps.moe_ffn / steps.etp
    quantised = QUANTISED * steps.fp8 * steps.each(routed_tokens) * steps.imbalance * numbers
    routed_numbers = steps.each(routed_tokens) * steps.imbalance * steps.moe_ffn / steps.etp
    activated = routed_numbers + steps.tokens * steps.shared_ffn / steps.tp
    return (
        scores
        + sorting
        + weights
        + quantised / 3.0
        + 2.0 * (1 + 0.5 * steps.glu) * steps.width * activated
    )


def ring_sums(steps: Columns, machine: Machine, constants: dict) -> Array:
    """Returns the seconds of a layer, all passes, in which a cp rank adds up what each rank's keys
    and values gave: outputs in forward, gradients of queries, keys and values in backward. A sum
    reads two numbers and writes one (Transformer Engine's p2p); balanced over the ranks, a causal
    mask leaves 3/4 of them."""
    forward = steps.heads * np.where(steps.recompute > 0, 2.0, 1.0)
    heads = forward + steps.heads + 2 * steps.kv_heads
    numbers = heads * steps.tokens * steps.head_dim / steps.tp
    moved = 0.75 * (steps.cp - 1) * 3.0 * numbers * steps.width
    return moved / (machine.memory_rate * constants["mem"])


def logits(steps: Columns, machine: Machine, constants: dict) -> Array:
    """Returns the seconds of the output layer and the loss of one micro-batch, forward and
    backward: never recomputed."""
    tokens = steps.tokens
    words = np.ceil(steps.vocab / steps.tp / 128) * 128
    gemm = 3.0 * _gemm(tokens, words, steps.hidden, machine.peak, constants)
    # In fp32, about ten passes.
    loss = 60.0 * tokens * steps.vocab / steps.tp / (machine.memory_rate * constants["mem"])
    return (gemm + loss) * constants["head"]
