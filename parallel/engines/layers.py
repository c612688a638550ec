"""The GPT out of megatron-core's tensor-parallel parts, with the reference GPT's weights.

`gpt_model` is a model or one stage of it. megatron-core's activations are [S, B, H]; tokens and
labels stay [B, S].
"""
# ruff: noqa: E402  (megatron-core is patched before its modules are imported)

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from models import gpt
from models.config import GPTConfig
from models.gpt import Held, fill, fused_attention, positions, rope_frequencies
from models.megatron_names import MEGATRON_TOP
from parallel.config.run_spec import RunSpec
from parallel.engines.cpu import import_megatron
from parallel.engines.kernels import adds_up_gradients, compute_dtype, packs_documents
from parallel.engines.megatron_versions import (
    check_norms_computed_again,
    index_of,
    language_model,
    mlp_submodules,
)
from parallel.engines.reference_values import layer_value, reference_value

import_megatron()

from megatron.core import parallel_state, tensor_parallel
from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding
from megatron.core.models.gpt import gpt_layer_specs
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.parallel_state import get_tensor_model_parallel_rank as tp_rank
from megatron.core.tensor_parallel import layers as linear_layers
from megatron.core.transformer.multi_latent_attention import MLASelfAttention
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_config import TransformerConfig


class SequenceParallelNorm:
    """Makes torch's LayerNorm or RMSNorm for megatron-core's layers, whose own wrapper refuses
    sequence parallelism. That only needs parameters that are marked as copies on tp ranks which
    each see a part of the sequence: megatron-core then sums their gradients."""

    def __new__(
        cls, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, **_: Any
    ) -> nn.Module:
        """Returns the norm, of size H; megatron-core calls the class as one of its own."""
        kind = nn.RMSNorm if config.normalization == "RMSNorm" else nn.LayerNorm
        norm = kind(hidden_size, eps=eps, dtype=config.params_dtype)
        for parameter in norm.parameters():
            parameter.sequence_parallel = config.sequence_parallel
        return norm


class FusedAttention(nn.Module):
    """A layer that puts torch's fused attention into megatron-core's, as in the reference GPT.

    megatron-core's own, without Transformer Engine, writes all s x s scores in fp32.
    """

    def __init__(self, **_: Any):
        super().__init__()

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **_: Any
    ) -> Tensor:
        """Returns the attended values, [S, B, N/tp * D], of queries [S, B, N/tp, D] and keys and
        values [S, B, K/tp, D].

        attention_mask: what is added to scores, [B, 1, S, S]; None for causal attention.
        """
        q_BNSD, k_BKSD, v_BKSD = (tensor.permute(1, 2, 0, 3) for tensor in (query, key, value))
        y_BNSD = fused_attention(q_BNSD, k_BKSD, v_BKSD, attention_mask)
        return y_BNSD.permute(2, 0, 1, 3).flatten(2)


class WholeLinear(nn.Linear):
    """A linear layer, x W^T, of which each tp rank has all of W; it returns what megatron-core's
    linear layers return, its output and no bias."""

    def forward(self, x: Tensor) -> tuple[Tensor, None]:
        return super().forward(x), None


class LatentAttention(MLASelfAttention):
    """megatron-core's latent attention, but `linear_kv_down_proj` is whole on every tp rank, as
    with Transformer Engine. A part of it (0.16, 0.19) gets no gradient from other ranks' heads,
    which have the same rotated keys. Only the latents have norms: 0.19 adds one to queries without
    a latent."""

    def __init__(self, config: TransformerConfig, *args: Any, **settings: Any):
        super().__init__(config, *args, **settings)
        down = self.linear_kv_down_proj
        if isinstance(down, tensor_parallel.ColumnParallelLinear):
            rows = config.kv_lora_rank + config.qk_pos_emb_head_dim
            whole = WholeLinear(down.input_size, rows, bias=False, dtype=config.params_dtype)
            whole.weight.sequence_parallel = config.sequence_parallel
            self.linear_kv_down_proj = whole

    def _resolve_qk_norm_config(self, submodules: Any) -> dict[str, Any]:
        return vars(submodules)


def block_submodules(
    spec: RunSpec, config: TransformerConfig, kernels: str, stage: int = 0
) -> TransformerBlockSubmodules:
    """Returns the specification of the layers of model chunk `stage`, made of the chosen kernels
    (see parallel.engines.kernels)."""
    blocks = list(spec.model.blocks.values())
    moe_flags = [blocks[i] for i in spec.layout.chunks(len(blocks))[stage]]
    norm = SequenceParallelNorm
    if kernels == "te":
        from megatron.core.extensions.transformer_engine import TENorm

        norm = TENorm
    layers = {is_moe: _layer(spec, config, kernels, norm, is_moe) for is_moe in {*moe_flags}}
    return TransformerBlockSubmodules([layers[is_moe] for is_moe in moe_flags], norm)


def _layer(
    spec: RunSpec, config: TransformerConfig, kernels: str, norm: Any, has_experts: bool
) -> ModuleSpec:
    """Returns the specification of one layer, which has experts or a feed-forward."""
    n_experts = spec.model.experts.num_experts if has_experts and spec.model.experts else None
    if kernels == "te":
        layer = gpt_layer_specs.get_gpt_layer_with_transformer_engine_spec(
            num_experts=n_experts,
            moe_grouped_gemm=config.moe_grouped_gemm,
            qk_layernorm=config.qk_layernorm,
            multi_latent_attention=bool(spec.model.mla),
        )
        if config.recompute_granularity == "selective":  # a norm within a product keeps its output
            from megatron.core.extensions.transformer_engine import TEColumnParallelLinear

            check_norms_computed_again()
            layer.submodules.input_layernorm = layer.submodules.pre_mlp_layernorm = norm
            if not spec.model.mla:
                layer.submodules.self_attention.submodules.linear_qkv = TEColumnParallelLinear
            if not has_experts:  # before experts the norm is a layer of its own
                mlp_submodules(layer).linear_fc1 = TEColumnParallelLinear
    else:
        layer = gpt_layer_specs.get_gpt_layer_local_spec(
            num_experts=n_experts, multi_latent_attention=bool(spec.model.mla)
        )
        layer.submodules.input_layernorm = layer.submodules.pre_mlp_layernorm = norm
        if config.qk_layernorm:
            attention = layer.submodules.self_attention.submodules
            attention.q_layernorm = attention.k_layernorm = attention.kv_layernorm = norm
    if spec.model.mla:
        layer.submodules.self_attention.module = LatentAttention
    # Transformer Engine's writes all s x s scores where documents give it a mask.
    if kernels != "te" or (spec.end_of_text is not None and not packs_documents(spec, kernels)):
        layer.submodules.self_attention.submodules.core_attention = FusedAttention
    return layer


def gpt_model(
    spec: RunSpec,
    config: TransformerConfig,
    kernels: str,
    pre_process: bool = True,
    post_process: bool = True,
    vp_stage: int | None = None,
    held_of: Callable[[nn.Parameter], Held] = gpt.undivided,
) -> nn.Module:
    """Returns megatron-core's GPT, or one stage of it, with the reference weights. held_of: see
    gpt.fill.

    It is called as model(tokens_BS, *positions_and_mask(spec, tokens_BS), labels=labels_BS) and
    returns the losses [B, S].
    """
    fuses = config.gradient_accumulation_fusion
    linear_layers._grad_accum_fusion_available |= fuses  # of apex, whose the output layer's is
    stage = (vp_stage or 0) * spec.layout.pp + parallel_state.get_pipeline_model_parallel_rank()
    model = language_model(
        config,
        block_submodules(spec, config, kernels, stage),
        stage,
        spec.layout.chunks(spec.model.n_layer),
        vocab_size=spec.padded_vocab,
        max_sequence_length=spec.model.max_seq_len,
        pre_process=pre_process,
        post_process=post_process,
        share_embeddings_and_output_weights=spec.model.tied,
        position_embedding_type="rope" if spec.model.position == "rope" else "learned_absolute",
        vp_stage=vp_stage,
    )
    model.rotary_pos_emb = rotary(spec.model)
    for layer in model.decoder.layers:
        if isinstance(layer.self_attention, LatentAttention):
            layer.self_attention.rotary_pos_emb = model.rotary_pos_emb
        name_router(layer, index_of(layer))
    if post_process:
        model.output_layer.gradient_accumulation_fusion = fuses and adds_up_gradients()
        model.output_layer.register_forward_hook(
            lambda _, __, output: (mask_padding(output[0], spec.model), *output[1:])
        )

    def value(name: str, parameter: nn.Parameter, start: int, n: int) -> Tensor:
        """Returns the starting values of megatron-core's parameter `name`, [n] from element `start`
        on."""
        if name == "output_layer.weight" and spec.model.tied:
            name = "embedding.word_embeddings.weight"
        if name in MEGATRON_TOP:
            return reference_value(spec, parameter, start, n, MEGATRON_TOP[name])
        number, inner = name.removeprefix("decoder.layers.").split(".", 1)
        index = index_of(model.decoder.layers[int(number)])
        return layer_value(spec, index, inner, parameter, start, n)

    fill(model, value, held_of)
    return model


def name_router(layer: nn.Module, index: int) -> None:
    """Tells a layer's router of which block of the whole model it is."""
    if router := getattr(layer.mlp, "router", None):
        router.block = f"blocks.{index}"


def rotary(model: GPTConfig) -> RotaryEmbedding | None:
    """Returns megatron-core's rotary positions with the reference GPT's frequencies; None for a
    model without them.

    Its own are computed by torch.arange, which gives bf16 where ZeRO-3 builds a bf16 model.
    """
    if model.position != "rope":
        return None
    embedding = RotaryEmbedding(model.rotary_dim, rotary_percent=1.0)
    embedding.inv_freq = rope_frequencies(model)
    return embedding


def positions_and_mask(spec: RunSpec, tokens_BS: Tensor) -> tuple[Tensor, Tensor | None]:
    """Returns what megatron-core's GPT takes beside the tokens: the positions [B, S] of
    `gpt.positions`, and what is added to the scores, [B, 1, S, S]. The latter is None for causal
    attention alone."""
    position_ids, mask = positions(tokens_BS, spec.end_of_text)
    mask = None if mask is None else gpt.additive(mask, compute_dtype(spec))
    return position_ids.expand_as(tokens_BS), mask


def packed(spec: RunSpec, tokens_BS: Tensor, labels_BS: Tensor) -> dict[str, Any]:
    """Returns what megatron-core's GPT takes of a micro-batch whose documents lie one after another
    in one row, [1, B * S]. Transformer Engine's attention then computes no score between two
    documents. It waits for the device: the kernels need the number of documents."""
    begins_BS = F.pad(tokens_BS[:, :-1] == spec.end_of_text, (1, 0), value=True)
    starts, n_tokens = begins_BS.flatten().nonzero().flatten(), tokens_BS.numel()
    ends = F.pad(starts, (0, 1), value=n_tokens)
    own_starts = torch.repeat_interleave(starts, ends.diff(), output_size=n_tokens)
    queries_and_keys = dict.fromkeys(("cu_seqlens_q", "cu_seqlens_kv"), ends.int())
    queries_and_keys |= dict.fromkeys(("max_seqlen_q", "max_seqlen_kv"), spec.seq_len)
    return {
        "input_ids": tokens_BS.reshape(1, n_tokens),
        "labels": labels_BS.reshape(1, n_tokens),
        "position_ids": (torch.arange(n_tokens, device=own_starts.device) - own_starts)[None],
        "packed_seq_params": PackedSeqParams(qkv_format="thd", **queries_and_keys),
    }


def mask_padding(logits: Tensor, model: GPTConfig) -> Tensor:
    """Returns this tp rank's logits, [.., V/tp], as `gpt.mask_padding` makes them."""
    first = tp_rank() * logits.size(-1)
    return gpt.mask_padding(logits, max(0, model.vocab_size - first))
