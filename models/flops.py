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

Of what is beyond a dense GPT they count:

=============  ====================================================================================
megatron, its  the experts that a token is sent to and the shared ones, whether or not a capacity
full form,     drops tokens; latent attention's matrices, down and up; of multi-token prediction
sc21           its block, projection and another pass of the output layer; no router and no norm
palm, 6n,      P is the active parameters (GPTConfig.n_active), with routers, norms and biases, and
seed           with multi-token prediction; palm adds the output layer's further passes
=============  ====================================================================================

Windows: megatron counts the tokens that a layer attends to, with half of the first window; its full
form, sc21 and palm a whole window for each token. Megatron-LM counts all tokens in every layer,
Megatron Bridge windows since its release 26.06. What others print of models with experts stands
beside what is counted in logs/published/moe-flops.md.

Where attention ends with each document of a packed sequence, seq_len is the sum of the squares of
the documents' lengths over the sequence's (parallel.batches.attended_seq_len): attention's work is
that of sequences of so many tokens. Megatron-LM counts so since core 0.20 where documents are
packed as THD; others, and it for --reset-attention-mask, count whole sequences.

Vocabularies count as GPTConfig has them, without padding, so that a model's FLOPs do not depend on
tp. Megatron-LM counts the padded one: 0.09 % more for GPT-2 124M (50,304 rows, not 50,257).
"""

from collections.abc import Callable
from functools import partial

from models.config import GPTConfig

DEFAULT_CONVENTION = "megatron"


def _attention(config: GPTConfig) -> int:
    """Returns the multiply-adds of one token in the matrices of one attention, forward."""
    hidden = config.hidden
    queries = config.n_head * config.head_dim
    if not (latent := config.mla):
        return 2 * hidden * (queries + config.kv_heads * config.head_dim)  # q and out; k and v
    q_rank, kv_rank = latent.q_lora_rank, latent.kv_lora_rank
    values = config.n_head * latent.v_head_dim
    for_queries = q_rank * (hidden + queries) if q_rank else hidden * queries
    down = hidden * (kv_rank + latent.qk_pos_emb_head_dim)
    up = kv_rank * (config.n_head * latent.qk_head_dim + values)
    return for_queries + down + up + values * hidden


def _scores(config: GPTConfig, seq_len: float, causal: bool) -> float:
    """Returns the multiply-adds of one token in all layers' scores and contexts. Of a window of w
    tokens the first w of a sequence see half, on average, where the mask counts."""
    value = config.mla.v_head_dim if config.mla else config.head_dim
    numbers = config.n_head * (config.head_dim + value) / 2
    layers, windowed, attended = config.n_blocks, 0, seq_len
    if window := config.window:
        period = window.window_attn_skip_freq
        windowed = layers - (layers // period if period else 0)
        attended = min(window.window_size, seq_len)
    windows = windowed * attended * (2 - causal * attended / seq_len)
    return numbers * (windows + (layers - windowed) * (2 - causal) * seq_len)


def _blocks(config: GPTConfig, seq_len: float, causal: bool) -> float:
    """Returns the multiply-adds of one token in all blocks, forward: their matrices, but the
    routers', and scores and contexts."""
    h, blocks, with_experts = config.hidden, config.n_blocks, config.expert_layers
    feed_forward = (blocks - with_experts) * config.ffn_hidden
    if experts := config.experts:
        chosen = experts.moe_router_topk * (experts.moe_ffn_hidden_size or config.ffn_hidden)
        feed_forward += with_experts * (chosen + experts.moe_shared_expert_intermediate_size)
    matrices = blocks * _attention(config) + (2 + config.gated) * h * feed_forward
    projections = config.mtp_num_layers * 2 * h * h  # the projection of embedding and hidden state
    return matrices + projections + _scores(config, seq_len, causal)


def _logits(config: GPTConfig) -> int:
    """Returns the multiply-adds of one token in all passes of the output layer, forward."""
    return (1 + config.mtp_num_layers) * config.hidden * config.vocab_size


def megatron(config: GPTConfig, seq_len: float, recompute: bool, causal: bool = True) -> float:
    """Returns model FLOPs per token as in Megatron-LM's `num_floating_point_operations`.

    3 * 2 * [ L * (2h*a*d + 2h*k*d + 2*h*f + s*a*d) + h*V ]: forward plus twice that for backward; a
    gated feed-forward has 3 h f, full attention 2 s a d. With experts f is the width of those that
    a token passes. `recompute` does not change it: recomputed work is not model work.
    """
    return 6.0 * (_blocks(config, seq_len, causal) + _logits(config))


def sc21(config: GPTConfig, seq_len: float, recompute: bool) -> float:
    """Returns Narayanan et al. SC'21 equation 3, divided by B*s, for any shape of the layers.

    With recomputation, f = 4h and a head for each key: 96 L h^2 (1 + s/(6h) + V/(16 L h)). The
    output layer is never recomputed, so it counts three passes in both cases.
    """
    passes = 4 if recompute else 3
    return 2.0 * (passes * _blocks(config, seq_len, causal=False) + 3 * _logits(config))


def palm(config: GPTConfig, seq_len: float, recompute: bool) -> float:
    """Returns 6 P + 12 L a d s of Chowdhery et al. 2022 (PaLM), appendix B, without recomputation.

    P leaves out learned positions and an untied input embedding, which are looked up; a word
    embedding that is tied to the output layer does a matrix product and counts.
    """
    looked_up = config.max_seq_len * (config.position == "learned")
    looked_up += config.vocab_size * ((not config.tied) - config.mtp_num_layers)
    attention = _scores(config, seq_len, causal=False)
    return 6.0 * (config.n_active - looked_up * config.hidden + attention)


def six_n(config: GPTConfig, seq_len: float, recompute: bool) -> float:
    """Returns 6 FLOPs per parameter and token: Kaplan et al. 2020 (arXiv 2001.08361), section 2.1.

    All parameters count, as in the papers of GPT-3 and Llama 3; Kaplan leaves embeddings out.
    """
    return 6.0 * config.n_active


def seed(config: GPTConfig, seq_len: float, recompute: bool) -> float:
    """Returns the Jean Zay tables' FLOPs: 2 * 4 per parameter with recomputation, 2 * 3 without."""
    return (8.0 if recompute else 6.0) * config.n_active


CONVENTIONS: dict[str, Callable[[GPTConfig, float, bool], float]] = {
    "megatron": megatron,
    "megatron-full": partial(megatron, causal=False),
    "sc21": sc21,
    "palm": palm,
    "6n": six_n,
    "seed": seed,
}


def tflops_per_gpu(
    config: GPTConfig, seq_len: float, tokens: float, seconds: float, gpus: int
) -> float:
    """Returns TFLOP/s per GPU, by the default convention, when `tokens` (of all ranks together)
    take `seconds` on `gpus` GPUs."""
    flops = CONVENTIONS[DEFAULT_CONVENTION](config, seq_len, False)
    return flops * tokens / (seconds * gpus * 1e12)
