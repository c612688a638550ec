"""Activations: what the layers keep from forward to backward, and what the one at work needs.

A token's numbers are whole on every tp rank (norms and what lies between products; over t with
sequence parallelism) or split over t (heads, feed-forward). [K] Korthikanti et al. 2022, arXiv
2205.05198: s b h (10 + 24/t + 5 a s / (h t)) bytes of a layer of a GPT (equation 2), all of it over
t with sequence parallelism (equation 4). What Megatron core's layers save beside that is in its
sources (transformer/, fusions/, moe/) and Transformer Engine's (module/linear.py,
layernorm_linear.py), and was checked against published bytes (docs/planner-accuracy.md).

Letters: b sequences of a micro-batch, s sequence length, h hidden, a heads of size d, k heads of
keys and values, f feed-forward, t tp.
"""

from functools import lru_cache
from typing import NamedTuple

from analysis.planner.columns import FULL, NONE, SELECTIVE, Step
from analysis.planner.memory.pipeline import InFlight, Stage


class Kept(NamedTuple):
    """Bytes that a layer keeps of a micro-batch when nothing is recomputed: of its norms and its
    attention, of the s x s scores, of a dense feed-forward, of experts; edge: its input."""

    edge: float
    attention: float
    scores: float
    dense: float
    experts: float

    def layer(self, routed: bool) -> float:
        """Returns the bytes of one layer, with experts or without."""
        return self.attention + self.scores + (self.experts if routed else self.dense)


def routed_tokens(step: Step) -> float:
    """Returns the tokens that a rank's experts take of a micro-batch when all experts take the same
    number."""
    return step.tokens / step.sequence_cut * step.topk * step.etp


@lru_cache(1)
def kept(step: Step) -> Kept:
    """Returns what one layer keeps of a micro-batch.

    With autocast the norms' inputs are in fp32. In fp8 the inputs of the four products have one
    byte (`model_states.fp8_copies`).
    """
    token = step.tokens * step.width / 2  # the bytes below are of numbers in 16 bits
    attention = token * (_whole(step) / step.sequence_cut + _heads(step) / step.tp)
    inner = _inner(step)
    dense = token * inner * step.ffn / step.tp
    experts = 0.0
    if step.experts:
        expert = 2.0 * step.hidden * (1 + step.biased)
        expert += step.moe_ffn / step.etp * (inner + (0.0 if step.glu else 2.0))
        shared = step.tokens * inner * step.shared_ffn / step.tp
        experts = shared + routed_tokens(step) * expert
    edge = step.tokens * step.hidden * (4 if step.autocast else step.width) / step.sequence_cut
    return Kept(edge, attention, _scores(step), dense, experts)


def _whole(step: Step) -> float:
    """Returns the bytes of a token that tp does not split: 8 h, the inputs of two norms and of two
    sub-blocks, and 2 h for dropout's two masks; of latent attention its latents. RMSNorm keeps no
    more."""
    each = 8.0
    if step.dropout:
        each += 2.0
    if step.autocast:
        each += 4.0
    if step.in_fp8:
        each -= 2.0
    latents = 2.0 * (2 * step.q_lora + 2 * step.kv_lora + step.rope_dim) if step.kv_lora else 0.0
    return step.hidden * each + latents


def _heads(step: Step) -> float:
    """Returns the bytes of a token's heads: 4 (a + k) d for queries, keys, values and the output,
    which is the projection's input.

    Where every tensor is counted, attention also keeps a sum of each row in fp32, and its output
    twice where context parallelism or the kernel's order of dimensions needs another. PyTorch keeps
    2 (a + k) d more with norms of queries and keys, and with rotary positions: the values are a
    view of the product that also holds the queries and keys from before. Within documents its
    attention repeats keys and values for all heads. In fp8 attention keeps its output beside the
    projection's input.
    """
    heads, kv_heads, head_dim = step.heads, step.kv_heads, step.head_dim
    size = 4.0 * head_dim * (heads + kv_heads)
    if step.kv_lora:
        size = 4.0 * heads * (head_dim + step.rope_dim + step.value_dim)
    if step.counted:
        row_sum = 4.0 if step.flash else 0.0
        value = step.value_dim if step.kv_lora else head_dim
        second_output = 2.0 * value if step.output_twice else 0.0
        return size + heads * (row_sum + second_output)
    repeated = step.documents and kv_heads < heads
    if step.qk_norm:
        size += 2.0 * head_dim * (heads + kv_heads)
    if step.rotary and not repeated:
        size += 2.0 * head_dim * (heads + kv_heads)
    if repeated:
        size += 4.0 * head_dim * (heads - kv_heads)
    if step.in_fp8:
        size += head_dim * heads
    return size


def _inner(step: Step) -> float:
    """Returns the bytes of one number of a feed-forward's width: 4, before the activation and
    after; 6 with a gate where its kernel is fused and 8 where it is not; 10 where GELU is written
    out."""
    each = 4.0
    if step.glu:
        each += 4.0 if step.plain else 2.0
    if step.gelu_written_out:
        each += 6.0
    if step.in_fp8:
        each -= 1.0
    return each


def _scores(step: Step) -> float:
    """Returns the bytes of a layer's s x s scores: softmax's output and, with dropout, its mask and
    output, 5 a s^2 b / t [K]. Flash attention keeps none."""
    if step.flash:
        return 0.0
    each = 5.0 if step.dropout else 2.0
    return each * step.heads * step.seq * step.tokens / step.tp * step.width / 2


def _products(step: Step) -> float:
    """Returns the bytes of the outputs of a layer's matrix products and of attention, which
    selective recomputation of PyTorch's own operators keeps; Megatron's drops the scores alone
    [K 5]."""
    inner = 2.0 * step.head_dim * (step.heads + step.kv_heads) + step.ffn * (1.0 + step.glu)
    return step.tokens * step.width * (inner / step.tp + 2.0 * step.hidden)


def layers_keep(step: Step, layers: float, dense: float) -> float:
    """Returns the bytes that layers, `dense` of them without experts, keep of one micro-batch, as
    recomputation leaves."""
    layer = kept(step)
    edge = 0.0 if step.host_checkpoints else layer.edge
    if step.recompute == FULL:
        return layers * edge
    if step.recompute == SELECTIVE and step.plain:
        return layers * (edge + _products(step))
    scores = layer.scores if step.recompute == NONE else 0.0
    feed_forwards = dense * layer.dense + (layers - dense) * layer.experts
    return layers * (layer.attention + scores) + feed_forwards


def activations(step: Step, stage: Stage, in_flight: InFlight) -> float:
    """Returns the bytes of what the micro-batches in flight keep on a stage."""
    edge = kept(step).edge
    size = layers_keep(step, in_flight.layers, in_flight.dense)
    if step.counted and stage.has_embedding and step.dropout:
        size += in_flight.in_first_chunk * edge / 2  # the mask of the embedding's dropout
    if step.counted and stage.has_output and step.pp > 1 and step.n_micro > 1:
        # Of the micro-batch before: the gradient that was sent, and the input that this is of.
        size += 2.0 * edge
    if step.nanotron and step.sequence_parallel and step.n_micro > step.pp:
        # One whole input a layer of the micro-batch in work, gathered for tp's products, once a
        # pipeline is full (peaks of the Ultra-Scale sweep at tp 8 to 32).
        size += stage.layers * step.tokens * step.hidden * step.width
    return size


def most_activations(step: Step, stage: Stage) -> float:
    """Returns the bytes of `activations` at the moment with the most."""
    return max(activations(step, stage, moment) for moment in stage.moments)


def computed_again(step: Step, stage: Stage) -> float:
    """Returns the bytes of the one layer that is recomputed at a time."""
    layer = kept(step)
    if step.recompute == FULL:
        whole = layer.layer(routed=stage.layers > stage.dense)
        return whole - layer.edge if step.counted else whole
    if step.recompute == SELECTIVE:
        return layer.layer(False) - _products(step) if step.plain else layer.scores
    return 0.0


def layer_goes_back(step: Step, stage: Stage) -> float:
    """Returns the bytes beside the kept ones while the last layer goes back.

    They are the gradients of its output, of its activation and of a gate's two inputs, and the
    second matrix's where it is not added up in the kernel; of experts, those that come back before
    and after their messages; and what is computed again.
    """
    gate = 2.0 * (1 + step.glu)
    if stage.layers > stage.dense:
        back = routed_tokens(step) * (4.0 * step.hidden + gate * step.moe_ffn / step.etp)
    else:
        back = step.tokens * gate * step.ffn / step.tp
        if not step.fused_gradients:
            back += 2.0 * step.hidden * step.ffn / step.tp
    return kept(step).edge + back + computed_again(step, stage)
