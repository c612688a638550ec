"""What differs between the versions of megatron-core, chosen by what the library has.

Since 0.19 a GPT is a HybridModel there, in which attention and MLP are layers of their own: "*-"
is one layer of the GPT, "*E" one with experts, and "|" ends a pipeline stage.
"""
# ruff: noqa: E402  (megatron-core is patched before its modules are imported)

import inspect
from typing import Any

from torch import Tensor, nn

from base.errors import UsageError
from parallel.engines.cpu import import_megatron

import_megatron()

from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel
from megatron.core.tensor_parallel import random
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import TransformerLayerSubmodules
from megatron.core.utils import get_batch_on_this_cp_rank

try:
    from megatron.core.models.hybrid.hybrid_block import HybridStack, HybridStackSubmodules
    from megatron.core.models.hybrid.hybrid_model import HybridModel
    from megatron.core.ssm.mlp_layer import MLPLayer
except ImportError:
    HybridModel, HybridStack = None, nn.Module

_PARTS = 1 if HybridModel is None else 2  # megatron-core's layers in one of the GPT


def batch_on_this_cp_rank(batch: dict[str, Tensor]) -> dict[str, Tensor]:
    """Returns this cp rank's early and late chunk of each sequence, [B, S / cp]."""
    # Without its group, 0.19 takes all ranks for one cp group.
    settings = {"cp_group": parallel_state.get_context_parallel_group()}
    if "is_hybrid_cp" in inspect.signature(get_batch_on_this_cp_rank).parameters:
        settings["is_hybrid_cp"] = False
    return get_batch_on_this_cp_rank(batch, **settings)


def mlp_submodules(layer: ModuleSpec) -> Any:
    """Returns the parts of a layer's MLP, which 0.19 binds to a function."""
    mlp = layer.submodules.mlp
    return mlp.submodules if isinstance(mlp, ModuleSpec) else mlp.keywords["submodules"]


def check_norms_computed_again() -> None:
    """Refuses recomputed norms where 0.19 cannot compile the C++ that it needs for them."""
    if compile_it := getattr(random, "_get_share_storage", None):
        try:
            compile_it()
        except (RuntimeError, OSError) as error:
            needs = "megatron-core compiles C++ for it with ninja, on every node"
            raise UsageError(f"recompute selective: {needs}; here: {error!s:.80}") from error


class _Stack(HybridStack):
    """A HybridStack with the final norm of the GPT's kernels: megatron-core's own is always
    Transformer Engine's."""

    def __init__(self, config: TransformerConfig, *args: Any, norm: Any, **settings: Any):
        super().__init__(config, *args, post_layer_norm=False, **settings)
        self.post_layer_norm = True
        if self.post_process:
            self.final_norm = norm(config, config.hidden_size, eps=config.layernorm_epsilon)


def language_model(
    config: TransformerConfig,
    block: TransformerBlockSubmodules,
    stage: int,
    chunks: list[range],
    **settings: Any,
) -> nn.Module:
    """Returns pipeline stage `stage` of a GPT. block: the layers of this stage. chunks: of each
    stage, the numbers of its layers in the whole GPT."""
    if HybridModel is None:
        return GPTModel(config, block, **settings)
    n_layers = chunks[-1].stop
    experts = config.moe_layer_freq if config.num_moe_experts else [0] * n_layers
    config.num_layers = _PARTS * n_layers
    # The pattern cuts the layers, and is refused beside these.
    config.num_layers_in_first_pipeline_stage = config.num_layers_in_last_pipeline_stage = None
    if config.recompute_granularity == "full":
        config.recompute_num_layers = _PARTS
    kinds = {}
    stages = [[experts[i] for i in chunk] for chunk in chunks]
    for is_moe, layer in zip(stages[stage], block.layer_specs, strict=True):
        parts = layer.submodules
        attention = TransformerLayerSubmodules(
            input_layernorm=parts.input_layernorm,
            self_attention=parts.self_attention,
            self_attn_bda=parts.self_attn_bda,
        )
        mlp = TransformerLayerSubmodules(
            pre_mlp_layernorm=parts.pre_mlp_layernorm, mlp=parts.mlp, mlp_bda=parts.mlp_bda
        )
        kinds["attention_layer"] = ModuleSpec(layer.module, submodules=attention)
        kinds["moe_layer" if is_moe else "mlp_layer"] = ModuleSpec(MLPLayer, submodules=mlp)
    norm = {"norm": block.layer_norm}
    spec = ModuleSpec(_Stack, params=norm, submodules=HybridStackSubmodules(**kinds))
    pattern = "|".join(
        "".join("*E" if is_moe else "*-" for is_moe in stage_layers) for stage_layers in stages
    )
    return HybridModel(config, spec, hybrid_layer_pattern=pattern, **settings)


def index_of(layer: nn.Module) -> int:
    """Returns which layer of the whole GPT, from 0, one of `language_model`'s decoder layers
    belongs to."""
    return (layer.layer_number - 1) // _PARTS
