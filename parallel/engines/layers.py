"""The GPT's layers out of megatron-core's tensor-parallel parts, with the reference GPT's weights.

Shared by the engines that split tensors: `gpt_model` is a model or one stage of it; the layers at
the end of this file are for DeepSpeed's PipelineModule. megatron-core's activations are [S, B, H];
tokens and labels stay [B, S].
"""

import os
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from models.config import GPTConfig, parameter_shapes
from models.gpt import fill, gelu, init_parameter
from models.tensor_files import DTYPES
from parallel.checkpoint.contents import is_split
from parallel.config.settings import RunSpec
from parallel.engines.cpu import import_megatron

import_megatron()

from megatron.core import parallel_state, tensor_parallel  # noqa: E402
from megatron.core.models.gpt import GPTModel  # noqa: E402
from megatron.core.models.gpt.gpt_layer_specs import (  # noqa: E402
    get_gpt_layer_local_spec,
    get_gpt_layer_with_transformer_engine_spec,
)
from megatron.core.transformer.spec_utils import build_module  # noqa: E402
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules  # noqa: E402
from megatron.core.transformer.transformer_config import TransformerConfig  # noqa: E402

# megatron-core's name inside a layer -> the reference GPT's. Transformer Engine keeps the norms
# inside the linear layers that follow them.
_LAYER_NAMES = {
    f"{theirs}{kind}": f"{ours}.{kind}"
    for theirs, ours in {
        "input_layernorm.": "norm1",
        "self_attention.linear_qkv.layer_norm_": "norm1",
        "self_attention.linear_qkv.": "attn.qkv",
        "self_attention.linear_proj.": "attn.out",
        "pre_mlp_layernorm.": "norm2",
        "mlp.linear_fc1.layer_norm_": "norm2",
        "mlp.linear_fc1.": "mlp.up",
        "mlp.linear_fc2.": "mlp.down",
    }.items()
    for kind in ("weight", "bias")
}
_TOP_NAMES = {
    "embedding.word_embeddings.weight": "embedding.word.weight",
    "embedding.position_embeddings.weight": "embedding.position.weight",
    "decoder.final_layernorm.weight": "norm.weight",
    "decoder.final_layernorm.bias": "norm.bias",
    "output_layer.weight": "embedding.word.weight",
}


def start(spec: RunSpec, cuda: bool) -> TransformerConfig:
    """Form megatron-core's process groups (tp fastest, then dp, then pp) and random state; the
    configuration of the run's GPT."""
    # Megatron wants its tensor-parallel kernels in launch order on CUDA.
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    layout = spec.layout
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=layout.tp,
        pipeline_model_parallel_size=layout.pp,
        virtual_pipeline_model_parallel_size=layout.vpp if layout.vpp > 1 else None,
        create_gloo_process_groups=False,
        order="tp-cp-ep-dp-pp",
        distributed_timeout_minutes=spec.timeout_s / 60,  # goes into a timedelta as it is
    )
    tensor_parallel.model_parallel_cuda_manual_seed(spec.seed)
    return transformer_config(spec, cuda)


class ModelParallelUnit:
    """megatron-core's process groups under the names DeepSpeed asks its `mpu` for (pp = 1)."""

    get_model_parallel_rank = staticmethod(parallel_state.get_tensor_model_parallel_rank)
    get_model_parallel_world_size = staticmethod(
        parallel_state.get_tensor_model_parallel_world_size
    )
    get_model_parallel_group = staticmethod(parallel_state.get_tensor_model_parallel_group)
    get_tensor_model_parallel_rank = get_model_parallel_rank
    get_tensor_model_parallel_world_size = get_model_parallel_world_size
    get_tensor_model_parallel_group = get_model_parallel_group
    get_data_parallel_rank = staticmethod(parallel_state.get_data_parallel_rank)
    get_data_parallel_world_size = staticmethod(parallel_state.get_data_parallel_world_size)
    get_data_parallel_group = staticmethod(parallel_state.get_data_parallel_group)


class SequenceParallelNorm(nn.LayerNorm):
    """torch's LayerNorm for megatron-core's layers.

    megatron-core's own wrapper refuses sequence parallelism. It only needs parameters that are
    marked as copies on tp ranks which each see a part of the sequence: megatron-core then sums
    their gradients.
    """

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, **_: Any):
        super().__init__(hidden_size, eps=eps, dtype=config.params_dtype)
        for parameter in self.parameters():
            parameter.sequence_parallel = config.sequence_parallel


def transformer_config(spec: RunSpec, cuda: bool) -> TransformerConfig:
    """megatron-core's configuration of the run's GPT."""
    model, layout, dtype = spec.model, spec.layout, DTYPES[spec.precision]
    full = layout.recompute == "full"
    return TransformerConfig(
        num_layers=model.n_layer,
        hidden_size=model.hidden,
        num_attention_heads=model.n_head,
        ffn_hidden_size=model.ffn_hidden,
        layernorm_epsilon=model.norm_eps,
        activation_func=gelu,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        tensor_model_parallel_size=layout.tp,
        pipeline_model_parallel_size=layout.pp,
        virtual_pipeline_model_parallel_size=layout.vpp if layout.vpp > 1 else None,
        sequence_parallel=layout.sequence_parallel,
        params_dtype=dtype,
        pipeline_dtype=dtype,
        bf16=spec.precision == "bf16",
        fp16=spec.precision == "fp16",
        attention_softmax_in_fp32=True,
        use_cpu_initialization=not cuda,
        perform_initialization=False,  # `fill` does it, the same for every layout
        gradient_accumulation_fusion=False,
        masked_softmax_fusion=False,
        bias_dropout_fusion=cuda,
        # In one batch, two messages between the same two ranks differ only in their order. gloo
        # does not keep it: interleaving at pp 2 then trained on swapped gradients.
        batch_p2p_comm=cuda and layout.vpp == 1,
        overlap_p2p_comm=layout.vpp > 1,
        recompute_granularity=layout.recompute if layout.recompute != "none" else None,
        recompute_method="uniform" if full else None,
        recompute_num_layers=1 if full else None,
    )


def block_submodules(config: TransformerConfig, kernels: str) -> TransformerBlockSubmodules:
    """The layers of one pipeline stage from the chosen kernels (see parallel.engines.kernels)."""
    if kernels == "te":
        from megatron.core.extensions.transformer_engine import TENorm

        layer, norm = get_gpt_layer_with_transformer_engine_spec(), TENorm
    else:
        layer, norm = get_gpt_layer_local_spec(), SequenceParallelNorm
        if kernels == "apex":
            from megatron.core.fusions.fused_layer_norm import FusedLayerNorm as norm
        layer.submodules.input_layernorm = layer.submodules.pre_mlp_layernorm = norm
    stage = parallel_state.get_pipeline_model_parallel_world_size()
    chunks = parallel_state.get_virtual_pipeline_model_parallel_world_size() or 1
    return TransformerBlockSubmodules([layer] * (config.num_layers // (stage * chunks)), norm)


def gpt_model(
    spec: RunSpec,
    config: TransformerConfig,
    kernels: str,
    pre_process: bool = True,
    post_process: bool = True,
    vp_stage: int | None = None,
    gathered: Callable[[nn.Parameter], AbstractContextManager] = nullcontext,
) -> GPTModel:
    """megatron-core's GPTModel (one stage of it), with the reference weights filled in.

    Called as model(tokens_BS, position_ids_BS, None, labels=labels_BS) -> losses [B, S].
    """
    model = GPTModel(
        config=config,
        transformer_layer_spec=block_submodules(config, kernels),
        vocab_size=spec.model.padded_vocab(spec.layout.tp),
        max_sequence_length=spec.model.max_seq_len,
        pre_process=pre_process,
        post_process=post_process,
        share_embeddings_and_output_weights=True,
        position_embedding_type="learned_absolute",
        vp_stage=vp_stage,
    )
    if post_process:
        model.output_layer.register_forward_hook(
            lambda _, __, output: (mask_padding(output[0], spec.model), *output[1:])
        )
    initialise(model, spec, gathered)
    return model


def position_ids(tokens_BS: Tensor) -> Tensor:
    """0 .. S-1 for every sequence, [B, S]."""
    return torch.arange(tokens_BS.size(1), device=tokens_BS.device).expand_as(tokens_BS)


def mask_padding(logits: Tensor, model: GPTConfig) -> Tensor:
    """Give the logits of padded vocabulary rows no probability; [.., V/tp], this tp rank's part."""
    tp = parallel_state.get_tensor_model_parallel_world_size()
    if model.padded_vocab(tp) == model.vocab_size:
        return logits
    first = parallel_state.get_tensor_model_parallel_rank() * logits.size(-1)
    column = torch.arange(first, first + logits.size(-1), device=logits.device)
    return logits.masked_fill(column >= model.vocab_size, torch.finfo(logits.dtype).min)


def reference_part(spec: RunSpec, name: str, parameter: nn.Parameter) -> Tensor:
    """This tp rank's part of the reference parameter `name`, in `parameter`'s shape.

    Marks a parameter that is split, as megatron-core's own initialisation does. An unmarked one
    counts as a copy, and only tp rank 0's gradient of it enters the norm.
    """
    tp = parallel_state.get_tensor_model_parallel_world_size()
    rank = parallel_state.get_tensor_model_parallel_rank()
    full = init_parameter(spec.model, name, spec.seed)
    if name == "embedding.word.weight":
        padding = spec.model.padded_vocab(tp) - spec.model.vocab_size
        full = torch.cat([full, torch.zeros(padding, spec.model.hidden)])
    shape, local = parameter_shapes(spec.model)[name], tuple(parameter.shape)
    offset = tuple(
        rank * n if n != all_n else 0 for n, all_n in zip(local, full.shape, strict=True)
    )
    # For a checkpoint's pieces (see pieces_of).
    parameter.reference = {"name": name, "shape": shape, "offset": offset, "part": local}
    if full.shape == parameter.shape:
        return full
    (split,) = [d for d in range(full.dim()) if full.size(d) != parameter.size(d)]
    if not is_split(parameter):
        tensor_parallel.set_tensor_model_parallel_attributes(parameter, True, split, 1)
    return full.chunk(tp, dim=split)[rank]


def initialise(
    model: GPTModel,
    spec: RunSpec,
    gathered: Callable[[nn.Parameter], AbstractContextManager] = nullcontext,
) -> None:
    """Give a (stage of a) GPTModel the reference weights, in place; `gathered` as in gpt.fill."""
    layers = {
        name: module.layer_number - 1  # counts from 1 over all stages
        for name, module in model.named_modules()
        if name.startswith("decoder.layers.") and name.count(".") == 2
    }

    def value(name: str, parameter: nn.Parameter) -> Tensor:
        if name in _TOP_NAMES:
            return reference_part(spec, _TOP_NAMES[name], parameter)
        layer, inner = name.rsplit(".", name.count(".") - 2)[0], name.split(".", 3)[3]
        return reference_part(spec, f"blocks.{layers[layer]}.{_LAYER_NAMES[inner]}", parameter)

    fill(model, value, gathered)


# The same GPT as a list of layers, for DeepSpeed's PipelineModule, which builds only the layers of
# its own stage. Between them travels one tensor, [S, B, H].


class WordEmbedding(nn.Module):
    """Tokens [B, S] to [S, B, H]; its `logits` is the output layer, tied by being the same."""

    def __init__(self, spec: RunSpec, config: TransformerConfig):
        super().__init__()
        self.spec, rows = spec, spec.model.padded_vocab(spec.layout.tp)
        self.embedding = tensor_parallel.VocabParallelEmbedding(
            rows, spec.model.hidden, init_method=config.init_method, config=config
        )
        self.output = tensor_parallel.ColumnParallelLinear(
            spec.model.hidden,
            rows,
            config=config,
            init_method=config.init_method,
            bias=False,
            skip_weight_param_allocation=True,
        )
        fill(self, lambda _, p: reference_part(spec, "embedding.word.weight", p))

    def forward(self, tokens_BS: Tensor) -> Tensor:
        return self.embedding(tokens_BS).transpose(0, 1).contiguous()

    def logits(self, x_SBH: Tensor) -> Tensor:
        """This tp rank's logits, [S, B, V/tp]."""
        logits_SBV, _ = self.output(x_SBH, weight=self.embedding.weight)
        return mask_padding(logits_SBV, self.spec.model)


class PositionEmbedding(nn.Module):
    """Adds the learned positions to [S, B, H]."""

    def __init__(self, spec: RunSpec, config: TransformerConfig):
        super().__init__()
        shape = (spec.model.max_seq_len, spec.model.hidden)
        self.weight = nn.Parameter(torch.empty(shape, dtype=config.params_dtype))
        fill(self, lambda _, p: reference_part(spec, "embedding.position.weight", p))

    def forward(self, x_SBH: Tensor) -> Tensor:
        return x_SBH + self.weight[: x_SBH.size(0), None, :]


class Block(nn.Module):
    """Transformer layer `index` (from 0, over the whole model), [S, B, H] to [S, B, H]."""

    def __init__(self, spec: RunSpec, config: TransformerConfig, kernels: str, index: int):
        super().__init__()
        layer = block_submodules(config, kernels).layer_specs[0]
        self.layer = build_module(layer, config=config, layer_number=index + 1)

        def value(name: str, parameter: nn.Parameter) -> Tensor:
            ours = _LAYER_NAMES[name.removeprefix("layer.")]
            return reference_part(spec, f"blocks.{index}.{ours}", parameter)

        fill(self, value)

    def forward(self, x_SBH: Tensor) -> Tensor:
        return self.layer(x_SBH, attention_mask=None)[0]


class FinalNorm(nn.Module):
    def __init__(self, spec: RunSpec, config: TransformerConfig, kernels: str):
        super().__init__()
        norm = block_submodules(config, kernels).layer_norm
        self.norm = norm(config, config.hidden_size, eps=config.layernorm_epsilon)
        fill(self, lambda name, p: reference_part(spec, name, p))

    def forward(self, x_SBH: Tensor) -> Tensor:
        return self.norm(x_SBH)


def mean_loss(logits_SBV: Tensor, labels_BS: Tensor) -> Tensor:
    """Mean cross-entropy of vocabulary-parallel logits [S, B, V/tp]; the same on every tp rank."""
    labels_SB = labels_BS.transpose(0, 1).contiguous()
    return tensor_parallel.vocab_parallel_cross_entropy(logits_SBV.float(), labels_SB).mean()


def random_tracker() -> Any:
    """megatron-core's named random states."""
    return tensor_parallel.get_cuda_rng_tracker()
