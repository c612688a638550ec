"""The GPT as a list of megatron-core's layers, for DeepSpeed's PipelineModule.

That builds only the layers of its own stage. Between them travels one tensor, [S, B, H].
"""
# ruff: noqa: E402  (megatron-core is patched before its modules are imported)

import torch
from torch import Tensor, nn

from models.gpt import fill
from parallel.config.run_spec import RunSpec
from parallel.engines.cpu import import_megatron
from parallel.engines.layers import block_submodules, mask_padding, name_router
from parallel.engines.reference_values import layer_value, reference_value

import_megatron()

from megatron.core import tensor_parallel
from megatron.core.fusions.fused_cross_entropy import fused_vocab_parallel_cross_entropy
from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding
from megatron.core.parallel_state import get_tensor_model_parallel_group as tp_group
from megatron.core.transformer.moe.moe_utils import MoEAuxLossAutoScaler
from megatron.core.transformer.spec_utils import build_module
from megatron.core.transformer.transformer_config import TransformerConfig


class OutputLayer(nn.Module):
    """The output layer: it makes this tp rank's logits, [S, B, V/tp], of [S, B, H]. `weight` is
    given where it is tied."""

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
    """The word embedding, tokens [B, S] to [S, B, H]. `logits` is the output layer where that is
    tied to it."""

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
        """Returns this tp rank's logits, [S, B, V/tp], of [S, B, H]."""
        return self.output(x_SBH, self.embedding.weight)


class PositionEmbedding(nn.Module):
    """A layer that adds the learned positions to [S, B, H]."""

    def __init__(self, spec: RunSpec, config: TransformerConfig):
        super().__init__()
        shape = (spec.model.max_seq_len, spec.model.hidden)
        self.weight = nn.Parameter(torch.empty(shape, dtype=config.params_dtype))
        fill(self, lambda _, *run: reference_value(spec, *run, "embedding.position.weight"))

    def forward(self, x_SBH: Tensor) -> Tensor:
        return x_SBH + self.weight[: x_SBH.size(0), None, :]


class Block(nn.Module):
    """The transformer layer `index` (from 0, over the whole model), [S, B, H] to [S, B, H]."""

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
    """The norm between the last block and the output layer, [S, B, H] to [S, B, H]."""

    def __init__(self, spec: RunSpec, config: TransformerConfig, kernels: str):
        super().__init__()
        norm = block_submodules(spec, config, kernels).layer_norm
        self.norm = norm(config, config.hidden_size, eps=config.layernorm_epsilon)
        fill(self, lambda name, *run: reference_value(spec, *run, name))

    def forward(self, x_SBH: Tensor) -> Tensor:
        return self.norm(x_SBH)


def scale_balance(scale: Tensor) -> None:
    """Multiplies the gradient of the `balance_loss` of each layer and micro-batch by `scale`, a
    scalar. A pipeline stage adds it in backward, where the loss of the whole model is not known."""
    MoEAuxLossAutoScaler.set_loss_scale(scale)


def mean_loss(config: TransformerConfig, logits_SBV: Tensor, labels_BS: Tensor) -> Tensor:
    """Returns the mean cross-entropy, in fp32, of vocabulary-parallel logits [S, B, V/tp] and
    labels [B, S]. It is the same on every tp rank."""
    labels_SB = labels_BS.transpose(0, 1).contiguous()
    if config.cross_entropy_loss_fusion:
        return fused_vocab_parallel_cross_entropy(logits_SBV, labels_SB, tp_group()).mean()
    return tensor_parallel.vocab_parallel_cross_entropy(logits_SBV, labels_SB).mean()
