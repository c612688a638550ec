"""DeepSpeed's engine: ZeRO stages 0 to 3 and offload, over our GPT, Hugging Face's, or a
tensor-parallel one from megatron-core's layers."""

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from parallel import deepspeed_common as common
from parallel.checkpointer import State, share
from parallel.engines import Batch, StepResult
from parallel.optim import set_lr
from parallel.ranges import region
from parallel.reference import build_reference
from parallel.spec import RunSpec


class TensorParallelGPT(nn.Module):
    """megatron-core's GPTModel behind the reference model's call: (tokens, labels) -> mean loss."""

    def __init__(self, spec: RunSpec, kernels: str, cuda: bool, whole: Any):
        super().__init__()
        from parallel import layers

        config = layers.transformer_config(spec, cuda)
        self.model = layers.gpt_model(spec, config, kernels, whole=whole)
        self.position_ids = layers.position_ids

    def forward(self, tokens_BS: Tensor, labels_BS: Tensor) -> Tensor:
        losses_BS = self.model(tokens_BS, self.position_ids(tokens_BS), None, labels=labels_BS)
        return losses_BS.float().mean()


class DeepSpeedZeroEngine:
    def __init__(self, spec: RunSpec, device: torch.device, kernels: str):
        self.spec, self.device = spec, device
        cuda, split = device.type == "cuda", spec.layout.tp > 1
        mpu, counts, group = None, lambda p: True, None
        if split:
            from parallel import layers

            layers.init_groups(spec)
            mpu = layers.ModelParallelUnit()
            first = mpu.get_tensor_model_parallel_rank() == 0
            counts, group = lambda p: first or layers.is_split(p), mpu.get_model_parallel_group()

        if spec.implementation == "hf":
            import models.hf_model  # noqa: F401  (before zero.Init patches what it imports)

        with common.partitioned(spec, mpu) as whole:
            if split:
                model: nn.Module = TensorParallelGPT(spec, kernels, cuda, whole)
            else:
                model = build_reference(spec, whole)
        adam = common.optimizer(model.parameters(), spec, counts, group)
        self.engine = common.initialize(spec, model, adam, mpu)
        self.dp_group = mpu.get_data_parallel_group() if split else None

    def step(self, batches: Iterator[Batch], lr: float) -> StepResult:
        before = common.before_step(self.spec, self.engine)
        set_lr(self.engine.optimizer.param_groups, lr)
        total = torch.zeros((), device=self.device)
        for tokens_BS, labels_BS in batches:
            with region("forward"):
                loss = common.scaled(self.spec, self.engine, self.engine(tokens_BS, labels_BS))
            with region("backward"):
                self.engine.backward(loss)
            with region("optimizer"):
                self.engine.step()  # an optimizer step only after the last micro-batch
            total += loss.detach() / self.spec.layout.n_micro
        return StepResult(self._mean(total), *common.after_step(self.spec, self.engine, before))

    @torch.no_grad()
    def evaluate(self, batches: Iterator[Batch], n: int) -> float:
        self.engine.eval()
        total = torch.zeros((), device=self.device)
        for _ in range(n):
            batch = next(batches)
            with region("forward"):
                total += self.engine(*batch) / n
        self.engine.train()
        return self._mean(total)

    def _mean(self, value: Tensor) -> float:
        dist.all_reduce(value, group=self.dp_group)
        return float(value) / self.spec.layout.dp

    def state(self) -> State:
        layout, rank, tracker = self.spec.layout, dist.get_rank(), None
        names = {id(p): name for name, p in self.engine.module.named_parameters()}
        if layout.tp > 1:
            from parallel import layers

            tracker = layers.random_tracker()

        def place(p: nn.Parameter, partitioned: bool) -> dict[str, Any]:
            if layout.tp > 1:
                split, where = layers.is_split(p), p.reference
            else:
                shape, split = tuple(getattr(p, "ds_shape", p.shape)), True
                origin = (0,) * len(shape)
                where = {"name": names[id(p)], "shape": shape, "offset": origin, "part": shape}
            return {**where, "share": share(layout, rank, split, partitioned)}

        return common.state(self.spec, self.engine, place, tracker)

    def restore(self, adam_step: int, scaler: dict[str, float]) -> None:
        common.restore(self.spec, self.engine, adam_step, scaler)

    def describe(self) -> dict[str, Any]:
        return {
            "optimizer": type(self.engine.optimizer).__name__,
            "config": common.config(self.spec),
        }

    def close(self) -> None:
        with contextlib.suppress(AttributeError):  # DeepSpeed's is missing without ZeRO
            self.engine.destroy()


build = DeepSpeedZeroEngine
