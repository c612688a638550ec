"""megatron-core's process groups, and its configurations of a run.

`transformer_config` states what our settings decide. Whoever builds a configuration of
megatron-core's does so by `configured`, which puts a run's options (`spec.megatron`) on top.
"""
# ruff: noqa: E402  (megatron-core is patched before its modules are imported)

import importlib
from dataclasses import asdict
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F

from base.errors import UsageError
from models.config import GPTConfig
from models.gpt import gelu
from parallel.config.megatron_options import (
    NEED_GPU,
    captures_graphs,
    check_options,
    in_words,
    is_asked,
)
from parallel.config.run_spec import RunSpec
from parallel.engines.cpu import import_megatron
from parallel.engines.kernels import adds_up_gradients, compute_dtype

import_megatron()

from megatron.core import parallel_state, tensor_parallel
from megatron.core.distributed import DistributedDataParallelConfig
from megatron.core.optimizer import OptimizerConfig
from megatron.core.tensor_parallel import layers as linear_layers
from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig

KINDS = (MLATransformerConfig, DistributedDataParallelConfig, OptimizerConfig)


def start(spec: RunSpec, cuda: bool) -> TransformerConfig:
    """Forms megatron-core's process groups (tp fastest, then cp, dp, pp) and its random state, and
    returns the configuration of the run's GPT."""
    layout, expert_sizes = spec.layout, {}
    if spec.model.experts:  # of which nothing is formed for a dense model
        expert_sizes["expert_model_parallel_size"] = layout.ep
        expert_sizes["expert_tensor_parallel_size"] = layout.etp
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=layout.tp,
        pipeline_model_parallel_size=layout.pp,
        virtual_pipeline_model_parallel_size=layout.vpp if layout.vpp > 1 else None,
        context_parallel_size=layout.cp,
        create_gloo_process_groups=False,
        order="tp-cp-ep-dp-pp",
        distributed_timeout_minutes=spec.timeout_s / 60,  # goes into a timedelta as it is
        **expert_sizes,
    )
    graphs = captures_graphs(spec.megatron) and cuda
    tensor_parallel.model_parallel_cuda_manual_seed(spec.seed, use_cudagraphable_rng=graphs)
    if is_asked(spec.megatron, "tp_comm_overlap") and cuda:
        share_buffers(spec)
    return transformer_config(spec, cuda)


def configured(kind: type, spec: RunSpec, cuda: bool, **settings: Any) -> Any:
    """Returns a configuration of megatron-core's, `kind`, with our settings and the run's options
    of it. In a rehearsal, which has no GPU, options that need one are left out."""
    options = {name: value for name, value in spec.megatron.items() if cuda or name not in NEED_GPU}
    check_options(options, KINDS)
    options = {name: value for name, value in options.items() if name in kind.__dataclass_fields__}
    try:
        return kind(**settings | options)
    except (ValueError, AssertionError, ImportError) as error:
        if not options:
            raise
        raise UsageError(f"megatron-core refuses {in_words(options)}: {error}") from error


def share_buffers(spec: RunSpec) -> None:
    """Makes Transformer Engine allocate the buffers, [tokens of a cp rank, H] each, for overlap.
    Through them tp ranks exchange parts of a tensor while a GEMM works on others."""
    library = importlib.import_module("transformer_engine.pytorch.module.base")
    library.initialize_ub(
        shape=[spec.layout.micro_batch * spec.seq_len // spec.layout.cp, spec.model.hidden],
        tp_size=spec.layout.tp,
        dtype=compute_dtype(spec),
        bootstrap_backend="nccl",
        **({"use_fp8": True} if spec.precision == "fp8" else {}),  # another name after 2.20
    )


def model_parallel_unit() -> SimpleNamespace:
    """Returns megatron-core's process groups under the names that DeepSpeed asks its `mpu` for (pp
    = 1)."""
    tp, dp = "tensor_model_parallel", "data_parallel"
    unit = SimpleNamespace()
    for alias, name in {"model_parallel": tp, tp: tp, dp: dp}.items():
        for fact in ("rank", "world_size", "group"):
            setattr(unit, f"get_{alias}_{fact}", getattr(parallel_state, f"get_{name}_{fact}"))
    return unit


def transformer_config(spec: RunSpec, cuda: bool) -> TransformerConfig:
    """Returns megatron-core's configuration of the run's GPT."""
    model, layout, dtype = spec.model, spec.layout, compute_dtype(spec)
    recomputes_all = layout.recompute == "full"
    # megatron-core's fused GELU adds a bias. It is GPT-2's tanh, though it is asked for as F.gelu.
    # On a CPU nothing compiles it: a dozen passes, each of which rounds, in the place of one.
    # It weights no expert's output.
    fuses_activation = model.gated or (model.bias and cuda and not model.experts)
    activation = F.gelu if fuses_activation else gelu
    if model.gated:
        activation = F.silu
    first_layers = layout.decoder_first_pipeline_num_layers
    # Of two stages the first's number leaves the last's: where both are stated, megatron-core 0.16
    # divides by its number of middle stages.
    states_last = layout.pp > 2 or first_layers is None
    last_layers = layout.decoder_last_pipeline_num_layers if states_last else None
    return configured(
        MLATransformerConfig if model.mla else TransformerConfig,
        spec,
        cuda,
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
        bias_activation_fusion=fuses_activation,
        gated_linear_unit=model.gated,
        add_bias_linear=model.bias,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        tensor_model_parallel_size=layout.tp,
        pipeline_model_parallel_size=layout.pp,
        virtual_pipeline_model_parallel_size=layout.vpp if layout.vpp > 1 else None,
        account_for_embedding_in_pipeline_split=layout.account_for_embedding_in_pipeline_split,
        account_for_loss_in_pipeline_split=layout.account_for_loss_in_pipeline_split,
        num_layers_in_first_pipeline_stage=first_layers,
        num_layers_in_last_pipeline_stage=last_layers,
        context_parallel_size=layout.cp,
        sequence_parallel=layout.sequence_parallel,
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
        bias_dropout_fusion=cuda,
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
        recompute_method="uniform" if recomputes_all else None,
        recompute_num_layers=1 if recomputes_all else None,
        **_of_experts(spec),
        **_of_latents(model),
    )


def _of_latents(model: GPTConfig) -> dict[str, Any]:
    """Returns the settings of latent attention in megatron-core's configuration, {} for a model
    without it; `gpt_model` gives its angles."""
    if not model.mla:
        return {}
    sizes = asdict(model.mla) | {"q_lora_rank": model.mla.q_lora_rank or None}
    return {**sizes, "rope_type": "rope", "rotary_scaling_factor": 1.0}


def _of_experts(spec: RunSpec) -> dict[str, Any]:
    """Returns the settings of experts in megatron-core's configuration, {} for a dense model. Each
    expert is a pair of linear layers of its own, except with Transformer Engine, whose grouped GEMM
    computes all."""
    if (experts := spec.trained.experts) is None:
        return {}
    is_softmax = experts.moe_router_score_function == "softmax"
    factor = experts.moe_router_topk_scaling_factor
    return {
        "num_moe_experts": experts.num_experts,
        "moe_ffn_hidden_size": experts.moe_ffn_hidden_size or spec.model.ffn_hidden,
        "moe_shared_expert_intermediate_size": experts.moe_shared_expert_intermediate_size or None,
        "moe_layer_freq": [int(has_experts) for has_experts in spec.model.blocks.values()],
        "moe_router_topk": experts.moe_router_topk,
        "moe_router_score_function": experts.moe_router_score_function,
        "moe_router_pre_softmax": is_softmax and not experts.norm_topk_prob,
        "moe_router_topk_scaling_factor": None if factor == 1 else factor,
        "moe_router_enable_expert_bias": experts.moe_router_enable_expert_bias,
        "moe_router_num_groups": experts.moe_router_num_groups or None,
        "moe_router_group_topk": experts.moe_router_group_topk or None,
        "moe_router_force_load_balancing": spec.moe_router_force_load_balancing,
        "moe_grouped_gemm": groups_gemms(spec),
        "moe_expert_capacity_factor": experts.moe_expert_capacity_factor or None,
        "moe_router_dtype": "fp32",
        "moe_router_load_balancing_type": "aux_loss",
        "moe_aux_loss_coeff": experts.moe_aux_loss_coeff,
        "moe_token_dispatcher_type": spec.moe_token_dispatcher_type,
        "expert_model_parallel_size": spec.layout.ep,
        "expert_tensor_parallel_size": spec.layout.etp,
    }


def groups_gemms(spec: RunSpec) -> bool:
    """Returns whether all experts of a rank are computed in one grouped GEMM."""
    return linear_layers.HAVE_TE and spec.engine == "megatron" and bool(spec.model.experts)


def options(config: TransformerConfig) -> dict[str, bool]:
    """Returns, for run.json, what megatron-core was asked to do faster or with less memory."""
    names = "bias_activation_fusion bias_dropout_fusion apply_rope_fusion cross_entropy_loss_fusion"
    names += " gradient_accumulation_fusion deallocate_pipeline_outputs batch_p2p_comm"
    names += " tp_comm_overlap"
    if config.num_moe_experts:
        names += " moe_grouped_gemm"
    return {name: getattr(config, name) for name in names.split()}
