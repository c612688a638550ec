"""Floating-point operations of one training step, under every convention this field prints.

A multiply-add is 2 operations. Letters: B sequences, s sequence length, L layers, h hidden size,
f feed-forward size, V vocabulary, P parameters. Every function returns FLOPs per token; a step of
B sequences costs B * s times that. They differ, by up to a third, in what they count:

=============  ===================================================================================
convention     counts
=============  ===================================================================================
megatron       model FLOPs as Megatron-LM prints them today: matmuls and the causal half of
               attention, forward and backward, no recomputation
sc21           Narayanan et al. SC'21 equation 3: full (not causal) attention; 4 passes with full
               activation recomputation, else 3
palm           Chowdhery et al. 2022 appendix B, the numerator of MFU: 6 P + 12 L h s, where P
               leaves out the position embedding
6n             Kaplan et al. 2020: 6 per parameter
seed           the Jean Zay tables: 8 per parameter with recomputation, 6 without
=============  ===================================================================================
"""

from collections.abc import Callable

from models.config import GPTConfig

DEFAULT_CONVENTION = "megatron"


def megatron(config: GPTConfig, seq_len: int, recompute: bool) -> float:
    """Model FLOPs per token as in Megatron-LM's `num_floating_point_operations` (2025 on).

    3 * 2 * [ L * (3h*h + h*h + 2*h*f + s*h) + h*V ]: forward plus twice that for backward; the two
    attention products count half of the s x s square because the mask is causal. `recompute` does
    not change it: recomputed work is not model work.
    """
    h, f = config.hidden, config.ffn_hidden
    per_layer = 4 * h * h + 2 * h * f + seq_len * h
    return 6.0 * (config.n_layer * per_layer + h * config.vocab_size)


def sc21(config: GPTConfig, seq_len: int, recompute: bool) -> float:
    """Narayanan et al. SC'21 equation 3, divided by B*s, for any f.

    With recomputation and f = 4h: 96 L h^2 (1 + s/(6h) + V/(16 L h)). The output layer is never
    recomputed, so it counts three passes in both cases.
    """
    h, f = config.hidden, config.ffn_hidden
    passes = 4 if recompute else 3
    layers = config.n_layer * (8 * h * h + 4 * h * f + 4 * seq_len * h)
    return float(passes * layers + 6 * h * config.vocab_size)


def palm(config: GPTConfig, seq_len: int, recompute: bool) -> float:
    """Chowdhery et al. 2022 (PaLM), appendix B: 6 P + 12 L h s, without recomputation.

    P leaves out the position embedding, which does no matrix product; the word embedding counts,
    because tied to the output layer it does one.
    """
    matmul_params = config.n_params - config.max_seq_len * config.hidden
    return 6.0 * matmul_params + 12.0 * config.n_layer * config.hidden * seq_len


def six_n(config: GPTConfig, seq_len: int, recompute: bool) -> float:
    """Kaplan et al. 2020 (arXiv 2001.08361), section 2.1: 6 FLOPs per parameter and token."""
    return 6.0 * config.n_params


def seed(config: GPTConfig, seq_len: int, recompute: bool) -> float:
    """The Jean Zay tables' rule: 2 * 4 per parameter with recomputation, 2 * 3 without."""
    return (8.0 if recompute else 6.0) * config.n_params


CONVENTIONS: dict[str, Callable[[GPTConfig, int, bool], float]] = {
    "megatron": megatron,
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
