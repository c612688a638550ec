"""DeepSpeed's engine: ZeRO stages 0 to 3 and offload, over our GPT, Hugging Face's, or a
tensor-parallel one from megatron-core's layers."""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from models.tensor_files import DTYPES
from parallel.checkpoint.contents import is_split
from parallel.config.settings import RunSpec
from parallel.engines import Batch, Reduced
from parallel.engines import deepspeed_common as common
from parallel.engines.optim import mean_over_ranks
from parallel.engines.reference import build_reference, evaluate
from parallel.measure.ranges import region


class TensorParallelGPT(nn.Module):
    """megatron-core's GPTModel behind the reference model's call: (tokens, labels) -> mean loss."""

    def __init__(self, spec: RunSpec, config: Any, kernels: str, held: Any):
        super().__init__()
        from parallel.engines import layers

        self.model = layers.gpt_model(spec, config, kernels, held=held)
        self.positions_and_mask = partial(layers.positions_and_mask, spec)

    def forward(self, tokens_BS: Tensor, labels_BS: Tensor) -> Tensor:
        where = self.positions_and_mask(tokens_BS)
        losses_BS = self.model(tokens_BS, *where, labels=labels_BS)
        return losses_BS.float().mean()


class DeepSpeedZeroEngine(common.DeepSpeedEngine):
    def __init__(self, spec: RunSpec, device: torch.device, kernels: str):
        split = spec.layout.tp > 1
        mpu, counts, group = None, lambda p: True, None
        if split:
            from parallel.engines import layers

            config = layers.start(spec, device.type == "cuda")
            mpu = layers.model_parallel_unit()
            first = mpu.get_tensor_model_parallel_rank() == 0
            counts, group = lambda p: first or is_split(p), mpu.get_model_parallel_group()

        if spec.implementation == "hf":
            import models.hf_model  # noqa: F401  (before zero.Init patches what it imports)

        with common.partitioned(spec, mpu) as held:
            if split:
                model: nn.Module = TensorParallelGPT(spec, config, kernels, held)
            else:
                model = build_reference(spec, device, DTYPES[spec.precision], held)
        adam = common.optimizer(model.parameters(), spec, counts, group)
        super().__init__(spec, device, model, adam, mpu)
        self.facts = layers.options(config) if split else {}

    def _train(self, batches: Iterator[Batch], stop: Callable[[], bool]) -> Reduced:
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


build = DeepSpeedZeroEngine
