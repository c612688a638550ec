"""The GPT's layers out of megatron-core's tensor-parallel parts, with the reference GPT's weights.

`gpt_model` is a model or one stage of it; the layers at the end of this file are for DeepSpeed's
PipelineModule. megatron-core's activations are [S, B, H]; tokens and labels stay [B, S].
"""
# ruff: noqa: E402  (megatron-core is patched before its modules are imported)

import importlib
import math
import re
from collections.abc import Callable
from dataclasses import asdict
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from models import gpt
from models.config import GPTConfig, parameter_shapes
from models.gpt import Held, fill, fused_attention, gelu, positions, rope_frequencies
from models.megatron_names import MEGATRON_LAYER, MEGATRON_TOP
from parallel.checkpoint.contents import is_split
from parallel.config.run_spec import RunSpec
from parallel.engines.cpu import import_megatron
from parallel.engines.kernels import adds_up_gradients, compute_dtype, packs_documents
from parallel.engines.megatron_versions import (
    check_norms_computed_again,
    index_of,
    language_model,
    mlp_submodules,
)

import_megatron()

from megatron.core import parallel_state, tensor_parallel
from megatron.core.fusions.fused_cross_entropy import fused_vocab_parallel_cross_entropy
from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding
from megatron.core.models.gpt import gpt_layer_specs
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.parallel_state import get_tensor_model_parallel_group as tp_group
from megatron.core.parallel_state import get_tensor_model_parallel_rank as tp_rank
from megatron.core.tensor_parallel import layers as linear_layers
from megatron.core.transformer.moe.moe_utils import MoEAuxLossAutoScaler
from megatron.core.transformer.multi_latent_attention import MLASelfAttention
from megatron.core.transformer.spec_utils import ModuleSpec, build_module
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig

# An expert's parameter: of a linear layer of its own, or one of several in a grouped one.
_EXPERT = re.compile(
    r"mlp\.experts\.(local_experts\.(?P<alone>\d+)\.)?"
    r"(?P<inner>linear_fc[12]\.(weight|bias))(?P<grouped>\d*)"
)


def start(spec: RunSpec, cuda: bool) -> TransformerConfig:
    """Form megatron-core's process groups (tp fastest, then cp, dp, pp) and random state; the
    configuration of the run's GPT."""
    layout, of_experts = spec.layout, {}
    if spec.model.experts:  # of which nothing is formed for a dense model
        of_experts["expert_model_parallel_size"] = layout.ep
        of_experts["expert_tensor_parallel_size"] = layout.etp
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=layout.tp,
        pipeline_model_parallel_size=layout.pp,
        virtual_pipeline_model_parallel_size=layout.vpp if layout.vpp > 1 else None,
        context_parallel_size=layout.cp,
        create_gloo_process_groups=False,
        order="tp-cp-ep-dp-pp",
        distributed_timeout_minutes=spec.timeout_s / 60,  # goes into a timedelta as it is
        **of_experts,
    )
    tensor_parallel.model_parallel_cuda_manual_seed(
        spec.seed, use_cudagraphable_rng=spec.cuda_graphs and cuda
    )
    if spec.tp_overlap and cuda:
        share_buffers(spec)
    return transformer_config(spec, cuda)


def share_buffers(spec: RunSpec) -> None:
    """Have Transformer Engine hold the buffers, [tokens of a cp rank, H] each, through which tp
    ranks exchange parts of a tensor while a GEMM works on others."""
    library = importlib.import_module("transformer_engine.pytorch.module.base")
    library.initialize_ub(
        shape=[spec.layout.micro_batch * spec.seq_len // spec.layout.cp, spec.model.hidden],
        tp_size=spec.layout.tp,
        dtype=compute_dtype(spec),
        bootstrap_backend="nccl",
        **({"use_fp8": True} if spec.precision == "fp8" else {}),  # another name after 2.20
    )


def model_parallel_unit() -> SimpleNamespace:
    """megatron-core's process groups under the names DeepSpeed asks its `mpu` for (pp = 1)."""
    tp, dp = "tensor_model_parallel", "data_parallel"
    unit = SimpleNamespace()
    for theirs, ours in {"model_parallel": tp, tp: tp, dp: dp}.items():
        for of in ("rank", "world_size", "group"):
            setattr(unit, f"get_{theirs}_{of}", getattr(parallel_state, f"get_{ours}_{of}"))
    return unit


class SequenceParallelNorm:
    """torch's LayerNorm or RMSNorm for megatron-core's layers, whose own wrapper refuses sequence
    parallelism. That only needs parameters that are marked as copies on tp ranks which each see a
    part of the sequence: megatron-core then sums their gradients."""

    def __new__(
        cls, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, **_: Any
    ) -> nn.Module:
        kind = nn.RMSNorm if config.normalization == "RMSNorm" else nn.LayerNorm
        norm = kind(hidden_size, eps=eps, dtype=config.params_dtype)
        for parameter in norm.parameters():
            parameter.sequence_parallel = config.sequence_parallel
        return norm


class FusedAttention(nn.Module):
    """torch's fused attention in megatron-core's layers, as in the reference GPT.

    megatron-core's own, without Transformer Engine, writes all s x s scores in fp32.
    """

    def __init__(self, **_: Any):
        super().__init__()

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **_: Any
    ) -> Tensor:
        """Queries [S, B, N/tp, D], keys and values [S, B, K/tp, D] to [S, B, N/tp * D].

        attention_mask: what is added to scores, [B, 1, S, S]; None for causal attention.
        """
        q_BNSD, k_BKSD, v_BKSD = (x.permute(1, 2, 0, 3) for x in (query, key, value))
        y_BNSD = fused_attention(q_BNSD, k_BKSD, v_BKSD, attention_mask)
        return y_BNSD.permute(2, 0, 1, 3).flatten(2)


class WholeLinear(nn.Linear):
    """x W^T where each tp rank has all of W, as megatron-core calls its own."""

    def forward(self, x: Tensor) -> tuple[Tensor, None]:
        return super().forward(x), None


class LatentAttention(MLASelfAttention):
    """megatron-core's, but `linear_kv_down_proj` is whole on every tp rank, as with Transformer
    Engine. A part of it (0.16, 0.19) gets no gradient from other ranks' heads, which have the same
    rotated keys. And no norms but those of the latents: 0.19 adds one to queries without a latent.
    """

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


def transformer_config(spec: RunSpec, cuda: bool) -> TransformerConfig:
    """megatron-core's configuration of the run's GPT."""
    model, layout, dtype = spec.model, spec.layout, compute_dtype(spec)
    full = layout.recompute == "full"
    # megatron-core's fused GELU adds a bias. It is GPT-2's tanh, though it is asked for as F.gelu.
    # On a CPU nothing compiles it: a dozen passes, each of which rounds, in the place of one.
    # It weights no expert's output.
    fused = model.gated or (model.bias and cuda and not model.experts)
    activation = F.gelu if fused else gelu
    if model.gated:
        activation = F.silu
    kind = MLATransformerConfig if model.mla else TransformerConfig
    return kind(
        num_layers=model.n_layer,
        hidden_size=model.hidden,
        num_attention_heads=model.n_head,
        num_query_groups=model.kv_heads,
        kv_channels=model.head_dim,
        qk_layernorm=model.qk_norm or model.mla is not None,
        ffn_hidden_size=model.ffn_hidden,
        normalization="RMSNorm" if model.norm == "rmsnorm" else "LayerNorm",
        layernorm_epsilon=model.norm_eps,
        activation_func=activation,
        bias_activation_fusion=fused,
        gated_linear_unit=model.gated,
        add_bias_linear=model.bias,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        tensor_model_parallel_size=layout.tp,
        pipeline_model_parallel_size=layout.pp,
        virtual_pipeline_model_parallel_size=layout.vpp if layout.vpp > 1 else None,
        account_for_embedding_in_pipeline_split=layout.account_for_embedding_in_pipeline_split,
        account_for_loss_in_pipeline_split=layout.account_for_loss_in_pipeline_split,
        num_layers_in_first_pipeline_stage=layout.decoder_first_pipeline_num_layers,
        num_layers_in_last_pipeline_stage=layout.decoder_last_pipeline_num_layers,
        context_parallel_size=layout.cp,
        sequence_parallel=layout.sequence_parallel,
        tp_comm_overlap=spec.tp_overlap,
        params_dtype=dtype,
        pipeline_dtype=dtype,
        bf16=dtype == torch.bfloat16,
        fp16=spec.precision == "fp16",
        fp8="hybrid" if spec.precision == "fp8" else None,  # e4m3, gradients e5m2
        fp8_recipe=spec.fp8_recipe,
        fp8_amax_history_len=1024,  # with "max": the usual recipe for fp8_recipe delayed
        fp8_amax_compute_algo="max",
        deterministic_mode=spec.deterministic,
        use_cpu_initialization=not cuda,
        perform_initialization=False,  # `fill` does it, the same for every layout
        # Transformer Engine's layers need no library for it (kernels.hide_others hides it).
        gradient_accumulation_fusion=spec.engine == "megatron"
        and (linear_layers.HAVE_TE or adds_up_gradients()),
        apply_rope_fusion=model.position == "rope" and linear_layers.HAVE_TE and not model.mla,
        cross_entropy_loss_fusion=spec.fuses_loss,
        cross_entropy_fusion_impl="te" if spec.te_loss else "native",
        bias_dropout_fusion=cuda,
        cuda_graph_impl="local" if spec.cuda_graphs and cuda else "none",
        # What a stage has sent is needed as a node of the graph alone. The interleaved schedule
        # frees it before the message has left: gloo then sent other activations. NCCL keeps it.
        deallocate_pipeline_outputs=layout.vpp == 1 or dist.get_backend() != "gloo",
        batch_p2p_sync=False,  # a wait for the device, against an error of PyTorch before 2.0
        # In one batch, two messages between the same two ranks differ only in their order. gloo
        # does not keep it: interleaving at pp 2 then trained on swapped gradients.
        batch_p2p_comm=cuda and layout.vpp == 1,
        overlap_p2p_comm=layout.vpp > 1,
        recompute_granularity=None if layout.recompute == "none" else layout.recompute,
        # By "selective": fused attention keeps no scores.
        recompute_modules=["layernorm", *(["moe_act"] if groups_gemms(spec) else [])],
        recompute_method="uniform" if full else None,
        recompute_num_layers=1 if full else None,
        **_of_experts(spec),
        **_of_latents(model),
    )


def _of_latents(model: GPTConfig) -> dict[str, Any]:
    """What megatron-core's configuration has of latent attention; `gpt_model` gives its angles."""
    if not model.mla:
        return {}
    sizes = asdict(model.mla) | {"q_lora_rank": model.mla.q_lora_rank or None}
    return {**sizes, "rope_type": "rope", "rotary_scaling_factor": 1.0}


def _of_experts(spec: RunSpec) -> dict[str, Any]:
    """What megatron-core's configuration has of experts. Without Transformer Engine, whose grouped
    GEMM is of all, each is a pair of linear layers of its own."""
    if (of := spec.trained.experts) is None:
        return {}
    softmax, factor = of.moe_router_score_function == "softmax", of.moe_router_topk_scaling_factor
    return {
        "num_moe_experts": of.num_experts,
        "moe_ffn_hidden_size": of.moe_ffn_hidden_size or spec.model.ffn_hidden,
        "moe_shared_expert_intermediate_size": of.moe_shared_expert_intermediate_size or None,
        "moe_layer_freq": [int(has) for has in spec.model.blocks.values()],
        "moe_router_topk": of.moe_router_topk,
        "moe_router_score_function": of.moe_router_score_function,
        "moe_router_pre_softmax": softmax and not of.norm_topk_prob,
        "moe_router_topk_scaling_factor": None if factor == 1 else factor,
        "moe_router_enable_expert_bias": of.moe_router_enable_expert_bias,
        "moe_router_num_groups": of.moe_router_num_groups or None,
        "moe_router_group_topk": of.moe_router_group_topk or None,
        "moe_router_force_load_balancing": spec.moe_router_force_load_balancing,
        "moe_grouped_gemm": groups_gemms(spec),
        "moe_expert_capacity_factor": of.moe_expert_capacity_factor or None,
        "moe_router_dtype": "fp32",
        "moe_router_load_balancing_type": "aux_loss",
        "moe_aux_loss_coeff": of.moe_aux_loss_coeff,
        "moe_token_dispatcher_type": spec.moe_token_dispatcher_type,
        "expert_model_parallel_size": spec.layout.ep,
        "expert_tensor_parallel_size": spec.layout.etp,
    }


def groups_gemms(spec: RunSpec) -> bool:
    """Whether all experts of a rank are one product."""
    return linear_layers.HAVE_TE and spec.engine == "megatron" and bool(spec.model.experts)


def options(config: TransformerConfig) -> dict[str, bool]:
    """For run.json: what megatron-core was asked to do faster or with less memory."""
    names = "bias_activation_fusion bias_dropout_fusion apply_rope_fusion cross_entropy_loss_fusion"
    names += " gradient_accumulation_fusion deallocate_pipeline_outputs batch_p2p_comm"
    names += " tp_comm_overlap"
    if config.num_moe_experts:
        names += " moe_grouped_gemm"
    return {name: getattr(config, name) for name in names.split()}


def block_submodules(
    spec: RunSpec, config: TransformerConfig, kernels: str, stage: int = 0
) -> TransformerBlockSubmodules:
    """The layers of model chunk `stage` from the chosen kernels (see parallel.engines.kernels)."""
    blocks = list(spec.model.blocks.values())
    here = [blocks[i] for i in spec.layout.chunks(len(blocks))[stage]]
    norm = SequenceParallelNorm
    if kernels == "te":
        from megatron.core.extensions.transformer_engine import TENorm

        norm = TENorm
    of_kind = {has: _layer(spec, config, kernels, norm, has) for has in {*here}}
    return TransformerBlockSubmodules([of_kind[has] for has in here], norm)


def _layer(
    spec: RunSpec, config: TransformerConfig, kernels: str, norm: Any, has_experts: bool
) -> ModuleSpec:
    """One layer, with experts or with a feed-forward."""
    experts = spec.model.experts.num_experts if has_experts and spec.model.experts else None
    if kernels == "te":
        layer = gpt_layer_specs.get_gpt_layer_with_transformer_engine_spec(
            num_experts=experts,
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
            num_experts=experts, multi_latent_attention=bool(spec.model.mla)
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
    held: Callable[[nn.Parameter], Held] = gpt.undivided,
) -> nn.Module:
    """megatron-core's GPT (one stage of it), with the reference weights; `held` as in gpt.fill.

    Called as model(tokens_BS, *positions_and_mask(spec, tokens_BS), labels=labels_BS) -> losses
    [B, S].
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
        if name == "output_layer.weight" and spec.model.tied:
            name = "embedding.word_embeddings.weight"
        if name in MEGATRON_TOP:
            return reference_value(spec, parameter, start, n, MEGATRON_TOP[name])
        number, inner = name.removeprefix("decoder.layers.").split(".", 1)
        index = index_of(model.decoder.layers[int(number)])
        return layer_value(spec, index, inner, parameter, start, n)

    fill(model, value, held)
    return model


def name_router(layer: nn.Module, index: int) -> None:
    """Tell a layer's router which block of the whole model it is of."""
    if router := getattr(layer.mlp, "router", None):
        router.block = f"blocks.{index}"


def rotary(model: GPTConfig) -> RotaryEmbedding | None:
    """megatron-core's rotary positions, by the reference GPT's frequencies; None without them.

    Its own are drawn by torch.arange, which gives bf16 where ZeRO-3 builds a bf16 model.
    """
    if model.position != "rope":
        return None
    embedding = RotaryEmbedding(model.rotary_dim, rotary_percent=1.0)
    embedding.inv_freq = rope_frequencies(model)
    return embedding


def positions_and_mask(spec: RunSpec, tokens_BS: Tensor) -> tuple[Tensor, Tensor | None]:
    """`gpt.positions` as megatron-core takes them: [B, S], and what is added to the scores."""
    position, mask = positions(tokens_BS, spec.end_of_text)
    mask = None if mask is None else gpt.additive(mask, compute_dtype(spec))
    return position.expand_as(tokens_BS), mask


def packed(spec: RunSpec, tokens_BS: Tensor, labels_BS: Tensor) -> dict[str, Any]:
    """What megatron-core's GPT takes of a micro-batch whose documents lie one after another in one
    row, [1, B * S], as Transformer Engine's attention has them; no score of two is computed. Waits
    for the device: its kernels need the number of documents."""
    begins_BS = F.pad(tokens_BS[:, :-1] == spec.end_of_text, (1, 0), value=True)
    starts, n = begins_BS.flatten().nonzero().flatten(), tokens_BS.numel()
    ends = F.pad(starts, (0, 1), value=n)
    own = torch.repeat_interleave(starts, ends.diff(), output_size=n)
    both = dict.fromkeys(("cu_seqlens_q", "cu_seqlens_kv"), ends.int())
    both |= dict.fromkeys(("max_seqlen_q", "max_seqlen_kv"), spec.seq_len)
    return {
        "input_ids": tokens_BS.reshape(1, n),
        "labels": labels_BS.reshape(1, n),
        "position_ids": (torch.arange(n, device=own.device) - own)[None],
        "packed_seq_params": PackedSeqParams(qkv_format="thd", **both),
    }


def mask_padding(logits: Tensor, model: GPTConfig) -> Tensor:
    """`gpt.mask_padding` of this tp rank's part of the logits, [.., V/tp]."""
    first = tp_rank() * logits.size(-1)
    return gpt.mask_padding(logits, max(0, model.vocab_size - first))


def reference_value(
    spec: RunSpec, parameter: nn.Parameter, start: int, n: int, *names: str
) -> Tensor:
    """The starting values, [n] from element `start` on, of `parameter`: this tp rank's parts of the
    reference parameters `names`, one after the other (a gated model's fc1 is its part of the gate,
    then its part of up).

    Marks a parameter that is split, as megatron-core's own initialisation does. An unmarked one
    counts as a copy, and only tp rank 0's gradient of it enters the norm. An expert's is split over
    etp ranks, and none of tp's other ranks has a copy. It is marked as reduced among its own
    copies, which megatron-core 0.16 forgets where ep is 1 and etp is not tp. In DeepSpeed all ranks
    of a stage have all experts, and the mark would name a group that is not there.
    """
    group, of_expert = tp_group(), ".experts." in names[0]
    if of_expert:
        group = parallel_state.get_expert_tensor_parallel_group()
        parameter.allreduce = spec.engine != "megatron"
    tp, rank = group.size(), group.rank()
    rows, *columns = getattr(parameter, "ds_shape", parameter.shape)  # ZeRO-3 empties parameters
    part = (rows // len(names), *columns)
    parameter.references, values = [], []  # the first for a checkpoint's pieces (see pieces_of)
    for name in names:
        shape = parameter_shapes(spec.model)[name]
        padded = (spec.padded_vocab if name in gpt.WITH_VOCABULARY else shape[0], *shape[1:])
        split = [d for d, size in enumerate(part) if size != padded[d]]
        offset = tuple(rank * size if d in split else 0 for d, size in enumerate(part))
        parameter.references.append({"name": name, "shape": shape, "offset": offset, "part": part})
        size = math.prod(part)
        first, last = min(max(start, 0), size), min(max(start + n, 0), size)
        box = name, spec.seed, offset, part
        values.append(gpt.starting_values(spec.model, *box, first, last - first))
        start -= size
    if (split or of_expert) and not is_split(parameter):
        dimension = split[0] if split else 0
        tensor_parallel.set_tensor_model_parallel_attributes(parameter, True, dimension, 1)
    of_heads = names[0].split(".")[-2] in ("q_norm", "k_norm")
    if of_heads and tp > 1 and spec.engine != "megatron":  # there megatron-core does it
        parameter.register_hook(_sum_over_tp)
    return values[0] if len(values) == 1 else torch.cat(values)


def _sum_over_tp(gradient: Tensor) -> Tensor:
    """The gradient of a whole parameter that each tp rank applies to its own heads."""
    dist.all_reduce(total := gradient.clone(), group=tp_group())
    return total


def layer_value(
    spec: RunSpec, index: int, name: str, parameter: nn.Parameter, start: int, n: int
) -> Tensor:
    """`reference_value` of the parameter `name` of megatron-core's layer `index` (from 0)."""
    expert = ""
    if of := _EXPERT.fullmatch(name):
        here = spec.model.experts.num_experts // spec.layout.ep
        number = int(of["alone"] or of["grouped"])
        rank = parallel_state.get_expert_model_parallel_rank()
        name, expert = f"mlp.{of['inner']}", f"experts.{rank * here + number}."
    ours = MEGATRON_LAYER[name].replace("mlp.", f"mlp.{expert}", 1)
    both = ".up." in ours and spec.model.gated
    names = (ours.replace(".up.", ".gate."), ours) if both else (ours,)
    names = tuple(f"blocks.{index}.{inner}" for inner in names)
    return reference_value(spec, parameter, start, n, *names)


# The same GPT as a list of layers, for DeepSpeed's PipelineModule, which builds only the layers of
# its own stage. Between them travels one tensor, [S, B, H].


class OutputLayer(nn.Module):
    """[S, B, H] to this tp rank's logits [S, B, V/tp]; `weight` is given where it is tied."""

    def __init__(self, spec: RunSpec, config: TransformerConfig):
        super().__init__()
        self.model = spec.model
        self.linear = tensor_parallel.ColumnParallelLinear(
            spec.model.hidden,
            spec.padded_vocab,
            config=config,
            init_method=config.init_method,
            bias=False,
            skip_weight_param_allocation=spec.model.tied,
        )
        fill(self, lambda _, *run: reference_value(spec, *run, "output.weight"))

    def forward(self, x_SBH: Tensor, weight: Tensor | None = None) -> Tensor:
        logits_SBV, _ = self.linear(x_SBH, weight=weight)
        return mask_padding(logits_SBV, self.model)


class WordEmbedding(nn.Module):
    """Tokens [B, S] to [S, B, H]; its `logits` is the output layer where that is tied to it."""

    def __init__(self, spec: RunSpec, config: TransformerConfig):
        super().__init__()
        sizes = spec.padded_vocab, spec.model.hidden
        self.embedding = tensor_parallel.VocabParallelEmbedding(
            *sizes, init_method=config.init_method, config=config
        )
        fill(self, lambda _, *run: reference_value(spec, *run, "embedding.word.weight"))
        self.output = OutputLayer(spec, config) if spec.model.tied else None

    def forward(self, tokens_BS: Tensor) -> Tensor:
        return self.embedding(tokens_BS).transpose(0, 1).contiguous()

    def logits(self, x_SBH: Tensor) -> Tensor:
        """This tp rank's logits, [S, B, V/tp]."""
        return self.output(x_SBH, self.embedding.weight)


class PositionEmbedding(nn.Module):
    """Adds the learned positions to [S, B, H]."""

    def __init__(self, spec: RunSpec, config: TransformerConfig):
        super().__init__()
        shape = (spec.model.max_seq_len, spec.model.hidden)
        self.weight = nn.Parameter(torch.empty(shape, dtype=config.params_dtype))
        fill(self, lambda _, *run: reference_value(spec, *run, "embedding.position.weight"))

    def forward(self, x_SBH: Tensor) -> Tensor:
        return x_SBH + self.weight[: x_SBH.size(0), None, :]


class Block(nn.Module):
    """Transformer layer `index` (from 0, over the whole model), [S, B, H] to [S, B, H]."""

    def __init__(
        self,
        spec: RunSpec,
        config: TransformerConfig,
        kernels: str,
        index: int,
        rotary: RotaryEmbedding | None,
    ):
        super().__init__()
        self.rotary = rotary
        stage, number = divmod(index, spec.model.n_layer // spec.layout.pp)
        layer = block_submodules(spec, config, kernels, stage).layer_specs[number]
        # megatron-core adds the layers of the stages before this one.
        self.layer = build_module(layer, config=config, layer_number=number + 1)
        name_router(self.layer, index)
        fill(self.layer, lambda name, *run: layer_value(spec, index, name, *run))

    def forward(self, x_SBH: Tensor) -> Tensor:
        angles_SD = self.rotary(x_SBH.size(0)) if self.rotary is not None else None
        return self.layer(x_SBH, attention_mask=None, rotary_pos_emb=angles_SD)[0]


class FinalNorm(nn.Module):
    """[S, B, H] to the same."""

    def __init__(self, spec: RunSpec, config: TransformerConfig, kernels: str):
        super().__init__()
        norm = block_submodules(spec, config, kernels).layer_norm
        self.norm = norm(config, config.hidden_size, eps=config.layernorm_epsilon)
        fill(self, lambda name, *run: reference_value(spec, *run, name))

    def forward(self, x_SBH: Tensor) -> Tensor:
        return self.norm(x_SBH)


def scale_balance(scale: Tensor) -> None:
    """Multiply the gradient of the `balance_loss` of each layer and micro-batch by `scale`, a
    scalar: a pipeline stage adds it in backward, where no loss of the whole model is."""
    MoEAuxLossAutoScaler.set_loss_scale(scale)


def mean_loss(config: TransformerConfig, logits_SBV: Tensor, labels_BS: Tensor) -> Tensor:
    """Mean cross-entropy, in fp32, of vocabulary-parallel logits [S, B, V/tp]; the same on every tp
    rank."""
    labels_SB = labels_BS.transpose(0, 1).contiguous()
    if config.cross_entropy_loss_fusion:
        return fused_vocab_parallel_cross_entropy(logits_SBV, labels_SB, tp_group()).mean()
    return tensor_parallel.vocab_parallel_cross_entropy(logits_SBV, labels_SB).mean()
