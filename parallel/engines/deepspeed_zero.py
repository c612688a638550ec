"""DeepSpeed's engine: ZeRO stages 0 to 3 and offload, over our GPT, Hugging Face's, or a
tensor-parallel one from megatron-core's layers."""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from models.config import Experts, parameter_shapes
from models.gpt import MixtureOfExperts
from models.tensor_files import DTYPES
from parallel.checkpoint.contents import is_split
from parallel.config.run_spec import RunSpec
from parallel.engines import Batch, Reduced
from parallel.engines import deepspeed_common as common
from parallel.engines.optim import mean_over_ranks
from parallel.engines.reference import build_reference, evaluate, whole
from parallel.measure.ranges import region


class TensorParallelGPT(nn.Module):
    """megatron-core's GPTModel, called as the reference model is: (tokens, labels) -> mean loss."""

    def __init__(self, spec: RunSpec, config: Any, kernels: str, local_part: Any):
        super().__init__()
        from parallel.engines import layers

        self.model = layers.gpt_model(spec, config, kernels, held_of=local_part)
        self.positions_and_mask = partial(layers.positions_and_mask, spec)

    def forward(self, tokens_BS: Tensor, labels_BS: Tensor) -> Tensor:
        position_inputs = self.positions_and_mask(tokens_BS)
        losses_BS = self.model(tokens_BS, *position_inputs, labels=labels_BS)
        return losses_BS.float().mean()


class DeepSpeedZeroEngine(common.DeepSpeedEngine):
    """Trains the GPT with DeepSpeed's engine, of which ZeRO partitions the state."""

    def __init__(self, spec: RunSpec, device: torch.device, kernels: str):
        is_tensor_parallel = spec.layout.tp > 1
        mpu, counts, group = None, lambda p: True, None
        if is_tensor_parallel:
            from parallel.engines import megatron_config

            config = megatron_config.start(spec, device.type == "cuda")
            mpu = megatron_config.model_parallel_unit()
            is_first = mpu.get_tensor_model_parallel_rank() == 0
            counts, group = lambda p: is_first or is_split(p), mpu.get_model_parallel_group()

        if spec.implementation == "hf":
            import models.hf_model  # noqa: F401  (before zero.Init patches what it imports)

        with common.partitioned(spec, mpu) as local_part:
            if is_tensor_parallel:
                model: nn.Module = TensorParallelGPT(spec, config, kernels, local_part)
            else:
                model = build_reference(spec, device, DTYPES[spec.precision], local_part)
        adam: Any = partial(common.adamw_of_experts, model, spec)
        if spec.layout.ep == 1:
            adam = common.optimizer(model.parameters(), spec, counts, group)
        super().__init__(spec, device, model, adam, mpu)
        self.facts = megatron_config.options(config) if is_tensor_parallel else {}
        for name, layer in model.named_modules():
            if type(layer).__name__ == "AutoEPMoELayer":
                _name_experts(name, layer, spec)
                _add_balance(layer, spec.model.experts)

    def _train(self, batches: Iterator[Batch], stop: Callable[[], bool]) -> Reduced:
        """Runs a step's micro-batches and the optimizer; returns the mean loss and whether any rank
        stops."""
        total = torch.zeros((), device=self.device)
        for tokens_BS, labels_BS in batches:
            with region("forward"):
                loss = self._scaled(self.engine(tokens_BS, labels_BS))
            with region("backward"):
                self.engine.backward(loss)
            with region("optimizer"):
                self.engine.step()  # an optimizer step only after the last micro-batch
            total += loss.detach() / self.spec.layout.n_micro
        return mean_over_ranks(total, dist.get_world_size(), stop())

    def evaluate(self, batches: Iterator[Batch], n: int) -> float:
        mean = evaluate(self.engine, batches, n, self.device)
        return mean_over_ranks(mean, dist.get_world_size()).loss  # equal on tp ranks


def _name_experts(name: str, layer: nn.Module, spec: RunSpec) -> None:
    """Gives the parameters that AutoEP made what `pieces_of` reads. AutoEP stacks each matrix of
    this rank's experts."""
    shapes, experts, n_experts = (
        parameter_shapes(spec.model),
        layer.experts,
        layer.num_local_experts,
    )
    names = {layer.router.gate.weight: [f"{name}.router.weight"]}
    rank_experts = range(layer.ep_rank * n_experts, (layer.ep_rank + 1) * n_experts)
    for weight, kind in ((experts.w1, "gate"), (experts.w2, "down"), (experts.w3, "up")):
        names[weight] = [f"{name}.experts.{expert}.{kind}.weight" for expert in rank_experts]
    for parameter, references in names.items():
        parameter.references = [whole(reference, shapes[reference]) for reference in references]


def _add_balance(layer: nn.Module, config: Experts) -> None:
    """Makes AutoEP's layer return, and keep, what `MixtureOfExperts` does; AutoEP itself balances
    nothing."""
    outputs: dict[str, Tensor] = {}

    def balanced(layer: nn.Module, _: Any, y_BSH: Tensor) -> tuple[Tensor, Tensor]:
        logits_TE, layer.tokens_E = outputs.pop("logits").float(), outputs.pop("tokens")
        is_softmax = config.moe_router_score_function == "softmax"
        scores_TE = logits_TE.softmax(-1) if is_softmax else logits_TE.sigmoid()
        return y_BSH, MixtureOfExperts.balance_loss(config, scores_TE, layer.tokens_E)

    layer.router.gate.register_forward_hook(lambda _, __, logits: outputs.update(logits=logits))
    layer.router.register_forward_hook(lambda _, __, output: outputs.update(tokens=output[2]))
    layer.register_forward_hook(balanced)


build = DeepSpeedZeroEngine
