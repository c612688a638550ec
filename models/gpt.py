"""The reference GPT on one device, and the weights every engine starts from.

The model does not know it is parallel. `config.parameter_shapes` and `starting_values` define the
starting weights of *every* engine: each parameter has random numbers of its own, seeded by (seed,
its name), and an element's place in it says which. A rank draws those of the part that it holds.
So the starting model does not depend on the layout.

Shapes: B sequences, S positions, H hidden, N heads, K heads of keys and values, D head size,
F feed-forward, V vocabulary, T = B * S tokens, E experts, C chosen experts of a token.
"""

import contextlib
import hashlib
import math
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from functools import partial
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from models.config import INIT_STD, LLAMA3_ROPE, Experts, GPTConfig, parameter_shapes
from models.config import LatentAttention as LatentSizes

WITH_VOCABULARY = ("embedding.word.weight", "output.weight")  # a row for each token id
# What selective recomputation keeps: the outputs of matrix products and of fused attention.
_KEPT = [torch.ops.aten.mm.default, torch.ops.aten.addmm.default] + [
    getattr(torch.ops.aten, f"_scaled_dot_product_{kernel}").default
    for kernel in (
        "flash_attention",
        "efficient_attention",
        "cudnn_attention",
        "flash_attention_for_cpu",
    )
]
# What torch's checkpoint is told, for each kind of recomputation. "full" repeats all of a block, as
# Megatron-LM does; torch alone leaves out what comes after the last tensor that backward needs.
# "reentrant" does the same for ZeRO-3, whose hooks take a module's weights away after its forward
# pass: in "full" that is between a repeated forward pass and the backward pass that began before.
RECOMPUTED: dict[str, dict] = {
    "selective": {
        "use_reentrant": False,
        "context_fn": partial(create_selective_checkpoint_contexts, _KEPT),
    },
    "full": {"use_reentrant": False, "early_stop": False},
    "reentrant": {"use_reentrant": True},
}
_DRAWN_AT_ONCE = 2**16  # elements, which stay in a core's cache
_draws = ContextVar("draws", default=True)


class Held(NamedTuple):
    """What this rank has of a parameter: `tensor` is its elements from `start` on, row-major."""

    tensor: Tensor
    start: int


def undivided(parameter: nn.Parameter) -> Held:
    """Returns all of a parameter, which is what a single rank holds."""
    return Held(parameter, 0)


@contextlib.contextmanager
def not_drawn() -> Iterator[None]:
    """Puts NaN in the place of starting values inside: something else will replace them all."""
    token = _draws.set(False)
    try:
        yield
    finally:
        _draws.reset(token)


def gelu(x: Tensor) -> Tensor:
    """Returns GPT-2's activation: the tanh approximation of GELU (Hendrycks & Gimpel 2016)."""
    return F.gelu(x, approximate="tanh")


def starting_values(
    config: GPTConfig,
    name: str,
    seed: int,
    offset: tuple[int, ...],
    part: tuple[int, ...],
    start: int,
    n: int,
) -> Tensor:
    """Returns elements [start, start + n) of a part of a parameter, row-major: fp32 [n] on a CPU.

    offset, part: where the part begins in the parameter, and its shape. Its rows behind the
    parameter's last one, which pad the vocabulary, are zeros.

    Weights are normal with standard deviation 0.02, divided by sqrt(2 L) where they write to the
    residual stream (Radford et al. 2019, section 2.3); norms are one, biases zero.
    """
    shape = parameter_shapes(config)[name]
    unpadded = max(0, min(n, (shape[0] - offset[0]) * math.prod(part[1:]) - start))
    if not _draws.get():
        values = torch.full((), math.nan).expand(unpadded)
        return values if unpadded == n else F.pad(values, (0, n - unpadded))
    # Not torch.empty: while DeepSpeed's ZeRO-3 builds a model, that gives 16 bits, on the GPU.
    values = torch.from_numpy(np.zeros(n, np.float32))
    if name.endswith("bias"):
        return values
    if "norm" in name:
        return values.fill_(1)
    std = INIT_STD
    if name.endswith(("attn.out.weight", ".down.weight")):
        std /= math.sqrt(2 * config.n_layer)
    digest = hashlib.sha256(f"{seed}:{name}".encode()).digest()
    # It can advance by any number of words (O'Neill 2014). A word is two elements.
    generator, at_word = np.random.PCG64DXSM(int.from_bytes(digest)), 0
    at = 0
    while at < unpadded:
        row, column = divmod(start + at, part[1])
        drawn = min(_DRAWN_AT_ONCE, unpadded - at)
        if part[1] < shape[1]:  # the next row's elements are not those that follow
            drawn = min(drawn, part[1] - column)
        word, skipped = divmod((offset[0] + row) * shape[1] + offset[1] + column, 2)
        generator.advance(word - at_word)
        words = generator.random_raw((skipped + drawn + 1) // 2)
        at_word = word + len(words)
        bits = torch.from_numpy(words.view(np.int32)[skipped : skipped + drawn])
        # 24 bits make a number in (-1, 1); the normal distribution's inverse takes it.
        uniform = (bits >> 8).float().add_(0.5).mul_(2.0**-23)
        torch.mul(uniform.erfinv_(), std * math.sqrt(2), out=values[at : at + drawn])
        at += drawn
    return values


def init_parameter(config: GPTConfig, name: str, seed: int) -> Tensor:
    """Returns the `starting_values` of a whole parameter, in its shape."""
    shape = parameter_shapes(config)[name]
    values = starting_values(config, name, seed, (0,) * len(shape), shape, 0, math.prod(shape))
    return values.view(shape)


def norm(config: GPTConfig, size: int) -> nn.Module:
    """Returns the model's norm: LayerNorm, or RMSNorm (Zhang & Sennrich 2019, arXiv 1910.07467)."""
    norm_class = nn.LayerNorm if config.norm == "layernorm" else nn.RMSNorm
    return norm_class(size, eps=config.norm_eps)


def positions(tokens_BS: Tensor, end_of_text: int | None) -> tuple[Tensor, Tensor | None]:
    """Returns each token's position, and which tokens it attends to; None: itself and all before.

    With `end_of_text`, the id that ends every document, positions start again at 0 after it, and no
    token attends to another document.

    Returns:
        [S] and None; with `end_of_text` [B, S] and a mask [B, 1, S, S], True where the token of the
        third index attends to that of the fourth.
    """
    if end_of_text is None:
        return torch.arange(tokens_BS.size(1), device=tokens_BS.device), None
    is_end_BS = (tokens_BS == end_of_text).int()
    document_BS = is_end_BS.cumsum(1) - is_end_BS  # documents that ended before this token
    mask_BSS = (document_BS[:, :, None] == document_BS[:, None, :]).tril()
    return mask_BSS.sum(-1) - 1, mask_BSS[:, None]


def additive(mask: Tensor, dtype: torch.dtype) -> Tensor:
    """Returns the mask of `positions` as numbers that are added to scores. They are made once
    for all layers: of truth values torch's attention makes and keeps B * S * S in each layer."""
    return torch.zeros_like(mask, dtype=dtype).masked_fill_(~mask, -torch.inf)


def rope_frequencies(config: GPTConfig, device: torch.device | None = None) -> Tensor:
    """Returns the radians per position of each pair of a head's channels, fp32 [D/2].

    theta^(-2i/D) (Su et al. 2021). With rope_scaling, Llama 3.1's rule: wavelengths above 8192
    positions are stretched by the factor, those below 2048 are not, those between in part.
    """
    size = config.rotary_dim
    exponent = torch.arange(0, size, 2, device=device).float() / size
    frequency = 1.0 / config.rope_theta**exponent
    if config.rope_scaling == 1.0:
        return frequency
    low, high, length = LLAMA3_ROPE.values()
    turns = length * frequency / (2 * math.pi)  # in the positions of pre-training
    unscaled_share = ((turns - low) / (high - low)).clamp(0.0, 1.0)
    return frequency * (unscaled_share + (1 - unscaled_share) / config.rope_scaling)


def rope_angles(config: GPTConfig, position_S: Tensor) -> Tensor | None:
    """Returns cos and sin of every rotation, fp32 [2, S, D]; None where positions are learned."""
    if config.position == "learned":
        return None
    angle_SD = torch.outer(position_S.float(), rope_frequencies(config, position_S.device))
    angle_SD = torch.cat([angle_SD, angle_SD], dim=-1)
    return torch.stack([angle_SD.cos(), angle_SD.sin()])


def rotate(x_BNSD: Tensor, angles: Tensor) -> Tensor:
    """Turns pairs of channels (i, i + D/2) by their position's angle, as Llama and Megatron do."""
    cos_SD, sin_SD = angles.to(x_BNSD.dtype)
    first, second = x_BNSD.chunk(2, dim=-1)
    return x_BNSD * cos_SD + torch.cat([-second, first], dim=-1) * sin_SD


def in_halves(x: Tensor) -> Tensor:
    """Moves channels (0, 1), (2, 3), ... to where `rotate` has its pairs."""
    return torch.cat([x[..., 0::2], x[..., 1::2]], dim=-1)


class Embedding(nn.Module):
    """The word embedding, with learned positions where the model has them: token ids [B, S] to
    hidden states [B, S, H]."""

    def __init__(self, config: GPTConfig, vocab_rows: int):
        super().__init__()
        self.tied = config.tied
        self.word = nn.Embedding(vocab_rows, config.hidden)
        learned = config.position == "learned"
        self.position = nn.Embedding(config.max_seq_len, config.hidden) if learned else None

    def forward(self, tokens_BS: Tensor, position: Tensor) -> Tensor:
        """Returns hidden states [B, S, H]; `position` is [S], or [B, S] where documents end."""
        # A tied word table is also the output layer, whose gradient is dense. On a CPU, adding only
        # the rows of these tokens to it avoids a second [V, H] gradient that is nearly all zeros.
        sparse = self.tied and tokens_BS.device.type == "cpu" and not torch.compiler.is_compiling()
        x_BSH = F.embedding(tokens_BS, self.word.weight, sparse=sparse)
        return x_BSH if self.position is None else x_BSH + self.position(position)


def fused_attention(q_BNSD: Tensor, k_BKSD: Tensor, v_BKSD: Tensor, mask: Tensor | None) -> Tensor:
    """Returns torch's fused attention [B, N, S, D]: causal, or where `mask` [B, 1, S, S] is set."""
    tensors, flags = _attention_call(q_BNSD, k_BKSD, v_BKSD, mask)
    return F.scaled_dot_product_attention(*tensors, attn_mask=mask, **flags)


def attention_kernel(q_BNSD: Tensor, k_BKSD: Tensor, v_BKSD: Tensor, mask: Tensor | None) -> str:
    """Returns the kernel that torch picks for `fused_attention`: flash, efficient, cudnn or math.

    It asks what scaled_dot_product_attention itself asks (torch 2.13).
    """
    tensors, flags = _attention_call(q_BNSD, k_BKSD, v_BKSD, mask)
    choice = SDPBackend(torch._fused_sdp_choice(*tensors, attn_mask=mask, **flags))
    return choice.name.lower().removesuffix("_attention")


def _attention_call(
    q_BNSD: Tensor, k_BKSD: Tensor, v_BKSD: Tensor, mask: Tensor | None
) -> tuple[tuple[Tensor, Tensor, Tensor], dict[str, bool]]:
    """Returns queries, keys, values and flags for scaled_dot_product_attention.

    Where no fused kernel takes fewer keys than queries, keys and values are repeated: torch would
    write all S x S scores.
    """
    grouped = k_BKSD.size(1) < q_BNSD.size(1)
    if grouped and not _takes_fewer_keys(q_BNSD, mask):
        group_size = q_BNSD.size(1) // k_BKSD.size(1)
        k_BKSD, v_BKSD = (x.repeat_interleave(group_size, dim=1) for x in (k_BKSD, v_BKSD))
        grouped = False
    return (q_BNSD, k_BKSD, v_BKSD), {"is_causal": mask is None, "enable_gqa": grouped}


def _takes_fewer_keys(q_BNSD: Tensor, mask: Tensor | None) -> bool:
    """Returns whether a fused kernel takes fewer heads of keys than of queries. On GPUs flash alone
    does (torch 2.13); it has no mask, no fp32 and no GPU before Ampere."""
    if not q_BNSD.is_cuda:
        return True
    half = _attention_dtype(q_BNSD) in (torch.float16, torch.bfloat16)
    return mask is None and half and torch.cuda.get_device_capability(q_BNSD.device) >= (8, 0)


def _attention_dtype(tensor: Tensor) -> torch.dtype:
    """Returns the dtype in which attention computes with a tensor, also under autocast."""
    device = tensor.device.type
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else tensor.dtype


class Attention(nn.Module):
    """Causal attention of N heads of queries over K heads of keys and values."""

    def __init__(self, config: GPTConfig):
        super().__init__()
        self.config = config
        N, K, D = config.n_head, config.kv_heads, config.head_dim
        self.qkv = nn.Linear(config.hidden, (N + 2 * K) * D, bias=config.bias)
        self.q_norm = norm(config, D) if config.qk_norm else None
        self.k_norm = norm(config, D) if config.qk_norm else None
        self.out = nn.Linear(N * D, config.hidden, bias=config.bias)

    def forward(self, x_BSH: Tensor, angles: Tensor | None, mask: Tensor | None) -> Tensor:
        """Returns the attention's output [B, S, H] for normed hidden states."""
        B, S, _ = x_BSH.shape
        N, K, D = self.config.n_head, self.config.kv_heads, self.config.head_dim
        group = self.qkv(x_BSH).view(B, S, K, N // K + 2, D)  # its queries, its key, its value
        q_BSND, k_BSKD, v_BSKD = group.split([N // K, 1, 1], dim=3)
        q_BNSD = q_BSND.reshape(B, S, N, D).transpose(1, 2)
        k_BKSD, v_BKSD = k_BSKD.squeeze(3).transpose(1, 2), v_BSKD.squeeze(3).transpose(1, 2)
        if self.q_norm is not None:
            q_BNSD, k_BKSD = self.q_norm(q_BNSD), self.k_norm(k_BKSD)
        if angles is not None:
            q_BNSD, k_BKSD = rotate(q_BNSD, angles), rotate(k_BKSD, angles)
        y_BNSD = fused_attention(q_BNSD, k_BKSD, v_BKSD, mask)
        return self.out(y_BNSD.transpose(1, 2).reshape(B, S, -1))


class LatentAttention(nn.Module):
    """Causal attention of N heads whose keys and values come out of one latent of a token, queries
    out of another (DeepSeek-AI 2024, arXiv 2405.04434, section 2.1).

    A head's query and key have a part without positions and one that is rotated, in that order; the
    rotated part of a key is one for all heads. Its pairs of channels are (2i, 2i + 1), as in
    DeepSeek's checkpoints and megatron-core.
    """

    def __init__(self, config: GPTConfig, sizes: LatentSizes):
        super().__init__()
        self.sizes, self.N = sizes, config.n_head
        H, N, bias = config.hidden, config.n_head, config.bias
        self.q = nn.Linear(H, N * config.head_dim, bias) if not sizes.q_lora_rank else None
        if sizes.q_lora_rank:
            self.q_down = nn.Linear(H, sizes.q_lora_rank, bias)
            self.q_norm = norm(config, sizes.q_lora_rank)
            self.q_up = nn.Linear(sizes.q_lora_rank, N * config.head_dim, bias)
        self.kv_down = nn.Linear(H, sizes.kv_lora_rank + sizes.qk_pos_emb_head_dim, bias)
        self.kv_norm = norm(config, sizes.kv_lora_rank)
        self.kv_up = nn.Linear(sizes.kv_lora_rank, N * (sizes.qk_head_dim + sizes.v_head_dim), bias)
        self.out = nn.Linear(N * sizes.v_head_dim, H, bias)

    def forward(self, x_BSH: Tensor, angles: Tensor | None, mask: Tensor | None) -> Tensor:
        """Returns the attention's output [B, S, H] for normed hidden states."""
        (B, S, _), sizes = x_BSH.shape, self.sizes
        q = self.q(x_BSH) if self.q is not None else self.q_up(self.q_norm(self.q_down(x_BSH)))
        parts = [sizes.kv_lora_rank, sizes.qk_pos_emb_head_dim]
        latent, k_rotary = self.kv_down(x_BSH).split(parts, -1)
        kv = self.kv_up(self.kv_norm(latent))
        q_BNSD, kv_BNSD = (x.view(B, S, self.N, -1).transpose(1, 2) for x in (q, kv))
        q_BNSD, q_rotary = q_BNSD.split([sizes.qk_head_dim, sizes.qk_pos_emb_head_dim], -1)
        k_BNSD, v_BNSD = kv_BNSD.split([sizes.qk_head_dim, sizes.v_head_dim], -1)
        k_rotary = k_rotary[:, None]
        if angles is not None:
            q_rotary, k_rotary = (rotate(in_halves(x), angles) for x in (q_rotary, k_rotary))
        q_BNSD = torch.cat([q_BNSD, q_rotary], -1)
        k_BNSD = torch.cat([k_BNSD, k_rotary.expand_as(q_rotary)], -1)
        y_BNSD = fused_attention(q_BNSD, k_BNSD, v_BNSD, mask)
        return self.out(y_BNSD.transpose(1, 2).reshape(B, S, -1))


class MLP(nn.Module):
    """A feed-forward: down(gelu(up(x))), or with a gate down(silu(gate(x)) * up(x))."""

    def __init__(self, config: GPTConfig, ffn_hidden: int):
        super().__init__()
        H, F_ = config.hidden, ffn_hidden
        self.gate = nn.Linear(H, F_, bias=config.bias) if config.gated else None
        self.up = nn.Linear(H, F_, bias=config.bias)
        self.down = nn.Linear(F_, H, bias=config.bias)

    def forward(self, x_BSH: Tensor) -> Tensor:
        if self.gate is None:
            return self.down(gelu(self.up(x_BSH)))
        return self.down(F.silu(self.gate(x_BSH)) * self.up(x_BSH))


class Router(nn.Linear):
    """A linear layer from tokens to their experts' logits, in fp32 whatever the weights are in
    (Fedus et al. 2021, arXiv 2101.03961, section 2.4). expert_bias: see
    Experts.moe_router_enable_expert_bias; fp32."""

    expert_bias: Tensor | None

    def __init__(self, config: GPTConfig, experts: Experts):
        super().__init__(config.hidden, experts.num_experts, config.bias)
        biased = experts.moe_router_enable_expert_bias
        self.register_buffer("expert_bias", torch.zeros(experts.num_experts) if biased else None)

    def forward(self, x_TH: Tensor) -> Tensor:
        """Returns each token's logits, fp32 [T, E]."""
        bias = None if self.bias is None else self.bias.float()
        with torch.autocast(x_TH.device.type, enabled=False):
            return F.linear(x_TH.float(), self.weight.float(), bias)


class MixtureOfExperts(nn.Module):
    """The weighted sum of the feed-forwards that a router chooses for each token, and of the shared
    ones (Shazeer et al. 2017, arXiv 1701.06538). Without a capacity factor no token is dropped.

    An expert's weight is its score: softmax or sigmoid of its logit. norm_topk_prob divides it by
    the sum of the chosen ones' (Mixtral, Qwen3; for softmax this is the softmax of the chosen
    logits). `forced`: tokens go to the experts by turns, whatever their scores are; a token's
    place in its sequence says where, so every split has the same. tokens_E: of the last call, how
    many each expert took.
    """

    tokens_E: Tensor

    def __init__(self, config: GPTConfig, sizes: Experts, forced: bool = False):
        super().__init__()
        self.sizes, self.forced = sizes, forced
        self.router = Router(config, sizes)
        width, shared = sizes.moe_ffn_hidden_size, sizes.moe_shared_expert_intermediate_size
        width = width or config.ffn_hidden
        self.experts = nn.ModuleList(MLP(config, width) for _ in range(sizes.num_experts))
        self.shared = MLP(config, shared) if shared else None

    def forward(self, x_BSH: Tensor) -> tuple[Tensor, Tensor]:
        """Returns hidden states [B, S, H], and the `balance_loss` of these tokens."""
        x_TH, C = x_BSH.flatten(0, 1), self.sizes.moe_router_topk
        logits_TE = self.router(x_TH)
        is_softmax = self.sizes.moe_router_score_function == "softmax"
        scores_TE = logits_TE.softmax(-1) if is_softmax else logits_TE.sigmoid()
        chosen_TC = self.choose(logits_TE, scores_TE)
        if self.forced:
            B, S, _ = x_BSH.shape
            turns_SC = torch.arange(S * C, device=x_BSH.device).view(S, C) % self.sizes.num_experts
            chosen_TC = turns_SC.repeat(B, 1)
        weights_TC = scores_TE.gather(1, chosen_TC)
        if self.sizes.norm_topk_prob:
            weights_TC = weights_TC / weights_TC.sum(-1, keepdim=True)
        weights = weights_TC.flatten() * self.sizes.moe_router_topk_scaling_factor
        tokens_E = chosen_TC.flatten().bincount(minlength=self.sizes.num_experts)
        self.tokens_E = tokens_E
        # Choice number i is of token i // C. Sorted, those of an expert are neighbours. An expert
        # that no token chose is called, too: its gradients are zeros.
        choices = chosen_TC.flatten().argsort(stable=True).split(tokens_E.tolist())
        if factor := self.sizes.moe_expert_capacity_factor:
            room = math.ceil(chosen_TC.numel() / self.sizes.num_experts * factor)
            choices = [picks[weights[picks].argsort(descending=True)[:room]] for picks in choices]
            self.tokens_E = tokens_E.clamp(max=room)
        y_TH = torch.zeros_like(x_TH)
        for expert, picks in zip(self.experts, choices, strict=True):
            rows = picks // C
            y_TH.index_add_(0, rows, (expert(x_TH[rows]) * weights[picks, None]).to(y_TH.dtype))
        if self.shared is not None:
            y_TH = y_TH + self.shared(x_TH)
        # The balance is of the choice by scores alone, as in megatron-core.
        if not self.forced:
            tokens_E = scores_TE.topk(C).indices.flatten().bincount(minlength=len(tokens_E))
        return y_TH.view_as(x_BSH), self.balance_loss(self.sizes, scores_TE, tokens_E)

    def choose(self, logits_TE: Tensor, scores_TE: Tensor) -> Tensor:
        """Returns each token's experts [T, C], the best first."""
        sizes, C = self.sizes, self.sizes.moe_router_topk
        if self.router.expert_bias is not None:
            scores_TE = scores_TE + self.router.expert_bias
        elif sizes.norm_topk_prob and sizes.moe_router_score_function == "softmax":
            scores_TE = logits_TE  # as in megatron-core, whose softmax is of the chosen
        if groups := sizes.moe_router_num_groups:
            scores_TGE = scores_TE.unflatten(1, (groups, -1))
            scores_TG = scores_TGE.topk(C // sizes.moe_router_group_topk).values.sum(-1)
            best_TG = scores_TG.topk(sizes.moe_router_group_topk).indices
            others_TG = torch.ones_like(scores_TG, dtype=torch.bool).scatter(1, best_TG, False)
            scores_TE = scores_TGE.masked_fill(others_TG[..., None], -torch.inf).flatten(1)
        return scores_TE.topk(C).indices

    @staticmethod
    def balance_loss(sizes: Experts, scores_TE: Tensor, tokens_E: Tensor) -> Tensor:
        """Returns moe_aux_loss_coeff * E * sum over experts of f_i P_i, a scalar.

        f_i: share of expert i in T * C choices. P_i: mean over tokens of its score; a token's
        scores are divided by their sum. (Fedus et al. 2021, equations 4 to 6, for C choices as in
        megatron-core's switch_load_balancing_loss_func.) The tokens are a micro-batch of one
        data-parallel rank. Losses of layers are added, those of micro-batches and ranks averaged.
        """
        share_E = tokens_E / tokens_E.sum()
        probability_E = (scores_TE / scores_TE.sum(-1, keepdim=True)).mean(0)
        weight = sizes.moe_aux_loss_coeff * sizes.num_experts
        return weight * (share_E * probability_E).sum()


class Block(nn.Module):
    """Pre-norm attention and feed-forward, each added to the residual stream."""

    def __init__(self, config: GPTConfig, has_experts: bool = False, forced: bool = False):
        super().__init__()
        self.norm1 = norm(config, config.hidden)
        self.attn = LatentAttention(config, config.mla) if config.mla else Attention(config)
        self.norm2 = norm(config, config.hidden)
        self.mlp: nn.Module = MLP(config, config.ffn_hidden)
        if has_experts and (sizes := config.experts):
            self.mlp = MixtureOfExperts(config, sizes, forced)

    def forward(
        self, x_BSH: Tensor, angles: Tensor | None, mask: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        """Returns hidden states [B, S, H], and the loss that balances its experts' load; None
        without experts."""
        x_BSH = x_BSH + self.attn(self.norm1(x_BSH), angles, mask)
        y_BSH, balance = self.mlp(self.norm2(x_BSH)), None
        if isinstance(y_BSH, tuple):
            y_BSH, balance = y_BSH
        return x_BSH + y_BSH, balance


class GPT(nn.Module):
    """The whole model. `recompute` drops each block's activations, or all but `_KEPT`, and
    recomputes them backward; `end_of_text` separates documents (see `positions`); `vocab_rows` pads
    the vocabulary (V); `forced` balances the experts' load (see `MixtureOfExperts`)."""

    def __init__(
        self,
        config: GPTConfig,
        recompute: str = "none",
        end_of_text: int | None = None,
        vocab_rows: int = 0,
        forced: bool = False,
    ):
        super().__init__()
        # engine_abilities refuses others.
        assert {*config.parts} <= {"experts", "mla"}, config.parts
        self.config, self.recompute, self.end_of_text = config, recompute, end_of_text
        self.vocab_rows = max(vocab_rows, config.vocab_size)
        self.embedding = Embedding(config, self.vocab_rows)
        self.blocks = nn.ModuleList(Block(config, has, forced) for has in config.blocks.values())
        self.norm = norm(config, config.hidden)
        if not config.tied:
            self.output = nn.Linear(config.hidden, self.vocab_rows, bias=False)

    def logits(self, tokens_BS: Tensor) -> Tensor:
        """Returns the logits [B, S, V] of token ids [B, S]."""
        return self._logits_and_balance(tokens_BS)[0]

    def _logits_and_balance(self, tokens_BS: Tensor) -> tuple[Tensor, list[Tensor]]:
        """Returns the logits [B, S, V], and the `balance_loss` of each layer with experts."""
        position, mask = positions(tokens_BS, self.end_of_text)
        # Rotary attention depends on differences of positions, which are the same in a document
        # wherever its positions start.
        angles = rope_angles(self.config, positions(tokens_BS, None)[0])
        x_BSH = self.embedding(tokens_BS, position)
        if mask is not None:
            mask = additive(mask, _attention_dtype(x_BSH))
        balances = []
        for block in self.blocks:
            run_block = block
            if self.training and (options := RECOMPUTED.get(self.recompute)):
                run_block = partial(checkpoint, block, **options)
            x_BSH, balance = run_block(x_BSH, angles, mask)
            if balance is not None:
                balances.append(balance)
        x_BSH = self.norm(x_BSH)
        if self.config.tied:
            logits_BSV = F.linear(x_BSH, self.embedding.word.weight)
        else:
            logits_BSV = self.output(x_BSH)
        return mask_padding(logits_BSV, self.config.vocab_size), balances

    def forward(self, tokens_BS: Tensor, labels_BS: Tensor) -> Tensor:
        """Returns the mean cross-entropy over all B*S tokens, a scalar. Its gradient is that of the
        sum with what balances the experts, as in megatron-core, which prints cross-entropy alone.
        """
        logits_BSV, balances = self._logits_and_balance(tokens_BS)
        loss = mean_loss(logits_BSV, labels_BS)
        for balance in balances:
            loss = loss + (balance - balance.detach())
        return loss


def mask_padding(logits: Tensor, vocab_size: int) -> Tensor:
    """Gives the columns from `vocab_size` on, which no token has, no probability.

    Written in place: a copy would hold all logits twice. Autograd need not know: softmax gives
    these columns probability 0, so their gradient is 0.
    """
    if logits.size(-1) > vocab_size:
        with torch.no_grad():
            logits[..., vocab_size:] = torch.finfo(logits.dtype).min
    return logits


def mean_loss(logits_BSV: Tensor, labels_BS: Tensor) -> Tensor:
    """Returns the cross-entropy averaged over tokens, in fp32 whatever the logits are in."""
    return F.cross_entropy(logits_BSV.flatten(0, 1).float(), labels_BS.flatten())


@torch.no_grad()
def fill(
    model: nn.Module,
    value: Callable[[str, nn.Parameter, int, int], Tensor],
    held_of: Callable[[nn.Parameter], Held] = undivided,
) -> None:
    """Sets what this rank holds of every parameter of a model, in place, to value(name, parameter,
    start, n): its elements [start, start + n), row-major."""
    for name, parameter in model.named_parameters():
        tensor, start = held_of(parameter)
        tensor.copy_(value(name, parameter, start, tensor.numel()).view(tensor.shape))


def initialise(model: GPT, seed: int, held_of: Callable[[nn.Parameter], Held] = undivided) -> None:
    """Gives a reference GPT its starting weights, in place."""
    shapes = parameter_shapes(model.config)

    def value(name: str, _: nn.Parameter, start: int, n: int) -> Tensor:
        offset = (0,) * len(shapes[name])
        return starting_values(model.config, name, seed, offset, shapes[name], start, n)

    fill(model, value, held_of)
    for buffer in model.buffers():
        buffer.zero_()
