"""Options of megatron-core, which a run of `megatron` names as megatron-core does. Torch-free.

Any field of its TransformerConfig, DistributedDataParallelConfig and OptimizerConfig is one, but
those that a setting of ours decides. parallel/engines/megatron_config.py has `check_options` look
at those of the installed version.
"""

from collections.abc import Iterable, Iterator, Mapping
from difflib import get_close_matches
from importlib import metadata
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin

from base.errors import UsageError

# A setting -> the fields that it decides.
_DECIDES = {
    "n_layer": "num_layers",
    "hidden": "hidden_size",
    "n_head": "num_attention_heads",
    "n_kv_head": "num_query_groups",
    "ffn_hidden": "ffn_hidden_size",
    "norm": "normalization",
    "norm_eps": "layernorm_epsilon",
    "qk_norm": "qk_layernorm",
    "activation": "activation_func gated_linear_unit",
    "bias": "add_bias_linear",
    "experts": "num_moe_experts moe_ffn_hidden_size moe_shared_expert_intermediate_size"
    " moe_layer_freq moe_router_topk moe_router_score_function moe_router_pre_softmax"
    " moe_router_topk_scaling_factor moe_router_enable_expert_bias moe_router_num_groups"
    " moe_router_group_topk moe_aux_loss_coeff",
    "tp": "tensor_model_parallel_size",
    "cp": "context_parallel_size",
    "pp": "pipeline_model_parallel_size",
    "vpp": "virtual_pipeline_model_parallel_size",
    "ep": "expert_model_parallel_size",
    "etp": "expert_tensor_parallel_size",
    "decoder_first_pipeline_num_layers": "num_layers_in_first_pipeline_stage",
    "decoder_last_pipeline_num_layers": "num_layers_in_last_pipeline_stage",
    "zero_stage": "use_distributed_optimizer",
    "recompute": "recompute_granularity recompute_method recompute_modules recompute_num_layers",
    "precision": "bf16 fp16 fp8 params_dtype pipeline_dtype",
    "deterministic": "deterministic_mode",
    "beta1": "adam_beta1",
    "beta2": "adam_beta2",
}
_DECIDED = {name: setting for setting, names in _DECIDES.items() for name in names.split()}
NEED_TRANSFORMER_ENGINE = ("tp_comm_overlap", "cross_entropy_fusion_impl")
_CAPTURES = ("cuda_graph_impl", "enable_cuda_graph", "external_cuda_graph")
# Those that a rehearsal, which has no GPU, leaves out.
NEED_GPU = (*NEED_TRANSFORMER_ENGINE, *_CAPTURES)


def fields_decided(setting: str) -> list[str]:
    """Returns megatron-core's names of what a setting of ours decides; most are flags, too."""
    return _DECIDES[setting].split()


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
        if setting := name if name in settings else _DECIDED.get(name):
            yield f"megatron {name} is decided by {setting}: set that"
        if name == "optimizer":
            yield "megatron optimizer cannot be set: every engine trains with AdamW"
        values = value if isinstance(value, list) else [value]
        if not all(isinstance(element, bool | int | float | str) for element in values):
            yield f"megatron {name} must be a number, a text, true, false or a list of these"


def check_options(options: Mapping[str, Any], configurations: Iterable[type]) -> None:
    """Refuses options that the installed megatron-core does not have, or of another type.

    configurations: its dataclasses, whose fields are the options.
    """
    kinds = {
        name: field.type
        for configuration in configurations
        for name, field in configuration.__dataclass_fields__.items()
    }
    for name, value in options.items():
        if name not in kinds:
            similar = get_close_matches(name, kinds, 1)
            hint = f"; did you mean {similar[0]}?" if similar else ""
            version = metadata.version("megatron-core")
            raise UsageError(f"megatron-core {version} has no option {name}{hint}")
        if not _takes(kinds[name], value):
            kind = kinds[name]
            wanted = kind.__name__ if isinstance(kind, type) else str(kind).replace("typing.", "")
            wanted = wanted.replace("Literal", "one of ")
            raise UsageError(f"megatron {name} must be {wanted}, not {value!r}")


def _takes(kind: Any, value: Any) -> bool:
    """Returns whether a field of this type may have the value. megatron-core judges what is neither
    a plain type, a choice nor a list."""
    origin = get_origin(kind)
    if origin is Literal:
        return value in get_args(kind)
    if origin in (Union, UnionType):
        return any(_takes(part, value) for part in get_args(kind))
    if kind in (bool, int, float, str, NoneType):
        return type(value) is kind or (kind is float and type(value) is int)
    return origin is not list or isinstance(value, list)
