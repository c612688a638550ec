"""Floating-point operations of one training step, under every convention this field prints.

A multiply-add is 2 operations. Letters: B sequences, s sequence length, L layers, h hidden size,
a heads of size d, k heads of keys and values, f feed-forward size, V vocabulary, P parameters.
The functions return FLOPs per token; a step of B sequences costs B * s times that. They differ,
by up to a third, in what they count:

=============  ====================================================================================
megatron       model FLOPs: the matrix products of forward and backward, and of attention the half
               that the causal mask leaves; no recomputation
megatron-full  the same with all of attention's s x s square
sc21           Narayanan et al. SC'21, equation 3: full attention; 4 passes through the layers with
               full recomputation, else 3; the output layer 3
palm           Chowdhery et al. 2022, appendix B, the numerator of MFU: 6 P + 12 L a d s, where P
               leaves out embeddings that do no matrix product; full attention
6n             Kaplan et al. 2020: 6 per parameter
seed           the Jean Zay tables: 8 per parameter with recomputation, 6 without
=============  ====================================================================================

Who prints what:

=============  ====================================================================================
megatron       this repository; Megatron-LM, NeMo and MaxText since 2025; Megatron Bridge
megatron-full  Megatron-LM, NeMo and MaxText before; Primus, nanotron. Megatron-LM of 2023 took
               f = 4h without a gate for every model, so it prints less for a gated one
sc21           InternEvo; Megatron-DeepSpeed, which counts 4.5 h V for the output layer where
               nothing is recomputed
palm           torchtitan, nanoGPT, nanochat; llm-foundry, whose P has the position embedding
=============  ====================================================================================

Vocabularies count as GPTConfig has them, without padding, so that a model's FLOPs do not depend on
tp. Megatron-LM counts the padded one: 0.09 % more for GPT-2 124M (50,304 rows, not 50,257).
"""

from collections.abc import Callable
from functools import partial

from models.config import GPTConfig

DEFAULT_CONVENTION = "megatron"


def _layer(config: GPTConfig, seq_len: int, causal: bool) -> int:
    """Multiply-adds of one token in one layer, forward: its matrices, and scores and context."""
    h, f, queries = config.hidden, config.ffn_hidden, config.n_head * config.head_dim
    attention = 2 * h * (queries + config.kv_heads * config.head_dim)  # q and out; k and v
    return attention + (2 + config.gated) * h * f + (2 - causal) * seq_len * queries


def megatron(config: GPTConfig, seq_len: int, recompute: bool, causal: bool = True) -> float:
    """Model FLOPs per token as in Megatron-LM's `num_floating_point_operations`.

    3 * 2 * [ L * (2h*a*d + 2h*k*d + 2*h*f + s*a*d) + h*V ]: forward plus twice that for backward; a
    gated feed-forward has 3 h f, full attention 2 s a d. `recompute` does not change it: recomputed
    work is not model work.
    """
    layers = config.n_layer * _layer(config, seq_len, causal)
    return 6.0 * (layers + config.hidden * config.vocab_size)


def sc21(config: GPTConfig, seq_len: int, recompute: bool) -> float:
    """Narayanan et al. SC'21 equation 3, divided by B*s, for any shape of the layers.

    With recomputation, f = 4h and a head for each key: 96 L h^2 (1 + s/(6h) + V/(16 L h)). The
    output layer is never recomputed, so it counts three passes in both cases.
    """
    passes = 4 if recompute else 3
    layers = config.n_layer * _layer(config, seq_len, causal=False)
    return 2.0 * (passes * layers + 3 * config.hidden * config.vocab_size)


def palm(config: GPTConfig, seq_len: int, recompute: bool) -> float:
    """Chowdhery et al. 2022 (PaLM), appendix B: 6 P + 12 L a d s, without recomputation.

    P leaves out learned positions and an untied input embedding, which are looked up; a word
    embedding that is tied to the output layer does a matrix product and counts.
    """
    looked_up = config.max_seq_len * (config.position == "learned")
    looked_up += config.vocab_size * (not config.tied)
    attention = 2 * config.n_layer * config.n_head * config.head_dim * seq_len
    return 6.0 * (config.n_params - looked_up * config.hidden + attention)


def six_n(config: GPTConfig, seq_len: int, recompute: bool) -> float:
    """Kaplan et al. 2020 (arXiv 2001.08361), section 2.1: 6 FLOPs per parameter and token.

    All parameters, as the papers of GPT-3 and Llama 3 multiply them; Kaplan leaves embeddings out.
    """
    return 6.0 * config.n_params


def seed(config: GPTConfig, seq_len: int, recompute: bool) -> float:
    """The Jean Zay tables' rule: 2 * 4 per parameter with recomputation, 2 * 3 without."""
    return (8.0 if recompute else 6.0) * config.n_params


CONVENTIONS: dict[str, Callable[[GPTConfig, int, bool], float]] = {
    "megatron": megatron,
    "megatron-full": partial(megatron, causal=False),
    "sc21": sc21,
    "palm": palm,
    "6n": six_n,
    "seed": seed,
}


def tflops_per_gpu(
    config: GPTConfig,
    seq_len: int,
    tokens: float,
    seconds: float,
    gpus: int,
    convention: str = DEFAULT_CONVENTION,
    recompute: bool = False,
) -> float:
    """TFLOP/s per GPU when `tokens` (all ranks together) take `seconds` on `gpus` GPUs."""
    return CONVENTIONS[convention](config, seq_len, recompute) * tokens / (seconds * gpus * 1e12)


def stated_size_tflops(
    params: float, tokens: float, seconds: float, gpus: float, recompute: bool = True
) -> float:
    """TFLOP/s per GPU by the `seed` convention, for a model whose size is stated (52e9 parameters)
    and whose shape is not known."""
    return (8.0 if recompute else 6.0) * params * tokens / (seconds * gpus * 1e12)
