"""Options of megatron-core, which a run of `megatron` names as megatron-core does. Torch-free.

Any field of its TransformerConfig, DistributedDataParallelConfig and OptimizerConfig is one, but
those that a setting of ours decides. parallel/engines/megatron_config.py checks names and values
against the installed version.
"""

from collections.abc import Iterator, Mapping
from typing import Any

# A field -> what decides it: a setting's name, or words.
DECIDED = {
    "num_layers": "n_layer",
    "hidden_size": "hidden",
    "num_attention_heads": "n_head",
    "num_query_groups": "n_kv_head",
    "kv_channels": "kv_channels",
    "ffn_hidden_size": "ffn_hidden",
    "normalization": "norm",
    "layernorm_epsilon": "norm_eps",
    "qk_layernorm": "qk_norm",
    "activation_func": "activation",
    "gated_linear_unit": "activation",
    "add_bias_linear": "bias",
    "num_moe_experts": "experts",
    "tensor_model_parallel_size": "tp",
    "context_parallel_size": "cp",
    "pipeline_model_parallel_size": "pp",
    "virtual_pipeline_model_parallel_size": "vpp",
    "expert_model_parallel_size": "ep",
    "expert_tensor_parallel_size": "etp",
    "num_layers_in_first_pipeline_stage": "decoder_first_pipeline_num_layers",
    "num_layers_in_last_pipeline_stage": "decoder_last_pipeline_num_layers",
    "use_distributed_optimizer": "zero_stage",
    "recompute_granularity": "recompute",
    "recompute_method": "recompute",
    "recompute_modules": "recompute",
    "recompute_num_layers": "recompute",
    "deterministic_mode": "deterministic",
    "optimizer": "no setting: every engine trains with AdamW",
    "adam_beta1": "beta1",
    "adam_beta2": "beta2",
}
DECIDED |= dict.fromkeys("bf16 fp16 fp8 params_dtype pipeline_dtype".split(), "precision")
DECIDED |= dict.fromkeys(
    "moe_ffn_hidden_size moe_shared_expert_intermediate_size moe_layer_freq moe_router_topk"
    " moe_router_score_function moe_router_pre_softmax moe_router_topk_scaling_factor"
    " moe_router_enable_expert_bias moe_router_num_groups moe_router_group_topk"
    " moe_aux_loss_coeff".split(),
    "experts",
)
NEED_TRANSFORMER_ENGINE = ("tp_comm_overlap", "cross_entropy_fusion_impl")
_CAPTURES = ("cuda_graph_impl", "enable_cuda_graph", "external_cuda_graph")
# Those that a rehearsal, which has no GPU, leaves out.
NEED_GPU = (*NEED_TRANSFORMER_ENGINE, *_CAPTURES)


def is_asked(options: Mapping[str, Any], name: str) -> bool:
    """Returns whether an option asks for something that is usually off."""
    return options.get(name) not in (None, False, "none", "native")


def captures_graphs(options: Mapping[str, Any]) -> bool:
    """Returns whether layers become CUDA graphs, which run no Python and read the same addresses
    always."""
    return any(is_asked(options, name) for name in _CAPTURES)


def in_words(options: Mapping[str, Any]) -> str:
    return ", ".join(f"{name} {value}" for name, value in options.items())


def problems(options: Mapping[str, Any], settings: Mapping[str, Any]) -> Iterator[str]:
    """Yields why options cannot be given, as far as that is known without megatron-core."""
    for name, value in options.items():
        decides = name if name in settings else DECIDED.get(name)
        if decides in settings:
            yield f"megatron {name} is decided by {decides}: set that"
        elif decides:
            yield f"megatron {name} is decided by {decides}"
        values = value if isinstance(value, list) else [value]
        if not all(isinstance(each, bool | int | float | str) for each in values):
            yield f"megatron {name} must be a number, a text, true, false or a list of these"
