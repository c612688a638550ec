"""Bytes that PyTorch allocates for a step of Megatron-LM with Transformer Engine's layers.

Every tensor of a rank is counted when the output layer goes back, the loss is computed or the last
layer goes back, whichever is most. Weights are in 16 bits. Letters as in memory.py.

Sources: NVIDIA/Megatron-LM, megatron/core (tensor_parallel/layers.py, fusions, transformer/moe,
distrib_optimizer.py) and Transformer Engine 2 (module/linear.py, layernorm_linear.py, base.py), for
what autograd saves; checked against published bytes (docs/planner-accuracy.md).
"""

from typing import NamedTuple

import numpy as np

from analysis.planner.columns import Array, Columns

NONE, SELECTIVE, FULL = range(3)


class Place(NamedTuple):
    """A pipeline stage: its layers, those of them without experts, the micro-batches' worth of
    them that it holds, and whether it has the embedding, and the logits; (n,) each."""

    layers: Array
    dense: Array
    flying: Array
    first: Array
    last: Array


def attention_numbers(x: Columns) -> Array:
    """Numbers that a rank holds of one layer's attention. Of latent attention (arXiv 2405.04434)
    what makes the latents is whole, and head_dim is the part of a head without positions."""
    h, inner, value = x.hidden, x.heads * x.head_dim, x.heads * x.value_dim
    usual = h * (2 * inner + 2 * x.kv_heads * x.head_dim)
    turned = x.heads * (x.head_dim + x.rope_dim) * np.where(x.q_lora > 0, x.q_lora, h)
    latents = h * (x.q_lora + x.kv_lora + x.rope_dim)
    split = turned + x.kv_lora * (inner + value) + value * h
    return np.where(x.kv_lora > 0, split / x.tp + latents, usual / x.tp)


def mlp_numbers(x: Columns, width: Array, cut: Array) -> Array:
    """Numbers that a rank holds of a feed-forward of that width, cut over `cut` ranks."""
    return x.hidden * width * (2.0 + x.glu) / cut


def states(x: Columns, at: Place) -> dict[str, Array]:
    """Bytes of weights, gradients and optimizer, which is sharded over the copies: dp x cp, of
    experts tp x cp x dp / (ep x etp). Where kernels add gradients up, Transformer Engine keeps an
    empty one of each shape in 16 bits for autograd."""
    routed, attention = at.layers - at.dense, attention_numbers(x)
    mlp, shared = (mlp_numbers(x, width, x.tp) for width in (x.ffn, x.shared_ffn))
    expert = mlp_numbers(x, x.moe_ffn, x.etp)
    norm = x.hidden * np.where(x.biased, 2, 1)
    biases = x.biased * (2 * x.hidden + (x.head_dim * (x.heads + 2 * x.kv_heads) + x.ffn) / x.tp)
    n = at.layers * (attention + 2 * norm + biases) + at.dense * mlp
    n = n + routed * (shared + x.hidden * x.experts) + at.last * norm
    ends = 1.0 * at.first + at.last * (x.untied | ~at.first)
    n = n + ends * x.vocab * x.hidden / x.tp + x.positions * x.hidden * at.first
    experts = routed * expert * x.experts / x.ep
    sharded = x.zero_stage > 0
    copies = np.where(sharded, x.tp * x.cp * x.dp / (x.ep * x.etp), 1)
    shapes = attention + (at.dense > 0) * mlp + (routed > 0) * (shared + expert)
    return {
        "weights": 2.0 * (n + experts),
        "gradients": x.grad_width * (n + experts) + 2.0 * shapes * x.fused_gradients,
        "optimizer": 12.0 * (n / np.where(sharded, x.shards, 1) + experts / copies),
    }


class Kept(NamedTuple):
    """Bytes that a layer keeps of a micro-batch; edge: its input."""

    edge: Array
    attention: Array
    scores: Array
    mlp: Array
    experts: Array


def kept(x: Columns) -> Kept:
    """What one layer keeps without recomputation, its norms with its attention.

    Both norms keep their input and their output, 8 h; dropout's masks are 2 h. Attention keeps
    queries, keys, values, output and a sum of each row in fp32; its output is there twice where
    context parallelism or the kernel's order of dimensions needs another. Products keep their
    inputs. Experts keep the tokens that came, and theirs before and after the activation; weights
    of their outputs keep them once more where the activation is not fused with them, as do biases.
    """
    cut = np.where(x.sequence_parallel, x.tp, 1)
    value = np.where(x.kv_lora > 0, x.value_dim, x.head_dim)
    usual = 2 * x.head_dim * (x.heads + x.kv_heads)
    latent = 2 * x.heads * (x.head_dim + x.rope_dim + value)
    split = 2.0 * np.where(x.kv_lora > 0, latent, usual)
    split = split + x.heads * (4.0 * x.flash + 2.0 * value * x.output_twice)
    latents = 2.0 * (2 * x.q_lora + 2 * x.kv_lora + x.rope_dim)
    attention = (x.hidden * (8.0 + 2.0 * x.dropout) + latents) / cut + split / x.tp
    scores = np.where(x.dropout, 5.0, 2.0) * x.heads * x.seq / x.tp * ~x.flash
    inner = 4.0 + 2.0 * x.glu  # bytes of a number of a feed-forward's width
    expert = 2.0 * x.hidden * (1 + x.biased) + x.moe_ffn / x.etp * (inner + 2.0 * ~x.glu)
    return Kept(
        2.0 * x.tokens * x.hidden / cut,
        x.tokens * attention,
        x.tokens * scores,
        x.tokens * inner * x.ffn / x.tp,
        x.tokens * inner * x.shared_ffn / x.tp + routed_tokens(x) * expert,
    )


def routed_tokens(x: Columns) -> Array:
    """Tokens that a rank's experts take of a micro-batch when all experts take the same number."""
    return x.tokens / np.where(x.sequence_parallel, x.tp, 1) * x.topk * x.etp


def activations(x: Columns, at: Place, layer: Kept) -> Array:
    """Bytes of what the layers in flight keep, and of what the last stage of a pipeline holds of
    the micro-batch before: the gradient that it sent, and the input that this is of."""
    whole = at.layers * (layer.attention + layer.scores * (x.recompute == NONE))
    whole = whole + at.dense * layer.mlp + (at.layers - at.dense) * layer.experts
    whole = np.where(x.recompute == FULL, at.layers * layer.edge, whole)
    before = 2.0 * (x.pp > 1) * (x.n_micro > 1) * at.last
    return at.flying * (whole + at.first * x.dropout * layer.edge / 2) + before * layer.edge


def layer_back(x: Columns, at: Place, layer: Kept) -> Array:
    """Bytes beside the kept ones while the last layer goes back: the gradients of its output, of
    its activation and of a gate's two inputs, and the second matrix's where it is not added up in
    the kernel; of experts, those that come back before and after their messages; and what is
    computed again."""
    routed, gate = at.layers > at.dense, 2.0 * (1 + x.glu)
    experts = routed_tokens(x) * (4.0 * x.hidden + gate * x.moe_ffn / x.etp)
    second = 2.0 * x.hidden * x.ffn / x.tp * ~x.fused_gradients
    back = np.where(routed, experts, x.tokens * gate * x.ffn / x.tp + second)
    again = layer.attention + layer.scores + np.where(routed, layer.experts, layer.mlp) - layer.edge
    policies = [x.recompute == FULL, x.recompute == SELECTIVE]
    return layer.edge + back + np.select(policies, [again, layer.scores], 0.0)


def output_layer(x: Columns) -> Array:
    """Bytes of the last norm, of the logits, and of the gradients of the output layer. Megatron's
    loss has the logits in 16 bits and in fp32, Transformer Engine's writes the gradient in their
    place. The output layer's own gradient is there in 16 bits, empty or not, and the gathered and
    the scattered gradient of its input. Sequence parallelism gathers in a buffer that stays."""
    cut = np.where(x.sequence_parallel, x.tp, 1)
    inputs, values = 2.0 * x.tokens * x.hidden, x.tokens * x.vocab / x.tp
    gathers = inputs * (cut > 1)
    back = 2.0 * values + 2.0 * x.vocab * x.hidden / x.tp + inputs + gathers / cut
    loss = np.where(x.te_loss, 2.0, 6.0) * values
    return 2.0 * inputs / cut + np.maximum(loss, back) + gathers


def parts(x: Columns, at: Place) -> dict[str, Array]:
    """Bytes by part at the peak, torch.cuda.max_memory_allocated."""
    layer = kept(x)
    back, head = layer_back(x, at, layer), at.last * output_layer(x)
    return states(x, at) | {
        "activations": activations(x, at, layer) + back * (back > head),
        "logits": head * (back <= head),
        "library": x.workspaces * 2.0**20,
    }
