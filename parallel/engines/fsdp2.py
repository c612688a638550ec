"""PyTorch's FSDP2 (`torch.distributed.fsdp.fully_shard`): parameters, gradients and AdamW's moments
are cut over the dp ranks, along each parameter's first dimension.

Each block is one group of parameters that are gathered together; embedding, last norm and output
layer are the root's. With zero_stage 3 a block is gathered for its forward pass and again for its
backward pass (reshard_after_forward); with zero_stage 2 all stay gathered from the first forward
pass of a step to the last backward pass. Gradients are reduced once a step. bf16 is a
MixedPrecisionPolicy: fp32 shards, bf16 weights in compute, fp32 reduction.
"""

import math
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
)
from torch.distributed.tensor import distribute_tensor

from models import gpt
from models.tensor_files import DTYPES
from parallel.checkpoint.contents import State, pieces_of
from parallel.config.settings import RunSpec
from parallel.engines import Batch, StepResult, never
from parallel.engines.optim import (
    adam_step,
    adam_tensors,
    adamw,
    clip_gradients,
    mean_over_ranks,
    set_adam_step,
    set_lr,
)
from parallel.engines.reference import evaluate, name_parameters
from parallel.measure.ranges import region


class FSDP2Engine:
    def __init__(self, spec: RunSpec, device: torch.device, kernels: str):
        self.spec, self.device = spec, device
        layout = spec.layout
        copies = layout.dp // layout.shards
        if copies > 1:  # the shards of a copy are neighbouring ranks, in one node where they fit
            mesh = init_device_mesh(
                device.type, (copies, layout.shards), mesh_dim_names=("copy", "shard")
            )
        else:
            mesh = init_device_mesh(device.type, (layout.dp,), mesh_dim_names=("shard",))
        self.shard_group = mesh.get_group("shard")
        offload = OffloadPolicy()
        if layout.offload == "all":
            offload = CPUOffloadPolicy(pin_memory=device.type == "cuda")
        rules = {
            "mesh": mesh,
            "mp_policy": MixedPrecisionPolicy(DTYPES[spec.precision], torch.float32),
            "offload_policy": offload,
        }
        # No rank ever has the whole model: it is built without memory, then filled shard by shard.
        with torch.device("meta"):
            self.model = gpt.GPT(
                spec.model, spec.recompute == "full", spec.end_of_text, spec.padded_vocab
            )
        self.reshards = layout.zero_stage == 3
        for block in self.model.blocks:
            fully_shard(block, reshard_after_forward=self.reshards, **rules)
            if spec.compile:
                block.compile()
        # Backward begins with the root's output layer: gathering it again would win nothing.
        fully_shard(self.model, reshard_after_forward=False, **rules)
        self.model.to_empty(device="cpu" if layout.offload == "all" else device)
        gpt.fill(self.model, self._starting_value)
        name_parameters(self.model, spec.model)
        self.parameters = list(self.model.parameters())
        self.optimizer = adamw(self.parameters, spec)

    def _starting_value(self, name: str, parameter: nn.Parameter) -> torch.Tensor:
        spec = self.spec
        value = gpt.init_parameter(spec.model, name, spec.seed, spec.padded_vocab)
        # Every rank has drawn it, so none is to send it (src_data_rank).
        placed = parameter.device_mesh, parameter.placements
        return distribute_tensor(value, *placed, src_data_rank=None)

    def step(
        self, batches: Iterator[Batch], lr: float, stop: Callable[[], bool] = never
    ) -> StepResult:
        n_micro, total = self.spec.layout.n_micro, torch.zeros((), device=self.device)
        for micro, (tokens_BS, labels_BS) in enumerate(batches):
            last = micro + 1 == n_micro
            self.model.set_requires_gradient_sync(last)
            self.model.set_reshard_after_backward(last or self.reshards)
            with region("forward"):
                loss = self.model(tokens_BS, labels_BS)
            with region("backward"):
                (loss / n_micro).backward()
            total += loss.detach() / n_micro
        with region("optimizer"):
            norm = self._grad_norm()
            clip_gradients(self.parameters, self.spec, norm)
            set_lr(self.optimizer.param_groups, lr)
            self.optimizer.step()
            self.optimizer.zero_grad(set_to_none=True)
        loss, stopped = mean_over_ranks(total, self.spec.layout.dp, stop())
        return StepResult(loss, float(norm), stop=stopped)

    def _grad_norm(self) -> torch.Tensor:
        """The L2 norm of the whole gradient, of which each rank of a copy has a part."""
        parts = [p.grad.to_local() for p in self.parameters]
        square = nn.utils.get_total_norm(parts).to(self.device).square()
        dist.all_reduce(square, group=self.shard_group)
        return square.sqrt()

    def evaluate(self, batches: Iterator[Batch], n: int) -> float:
        mean = evaluate(self.model, batches, n, self.device)
        return mean_over_ranks(mean, self.spec.layout.dp).loss

    def state(self) -> State:
        layout, rank = self.spec.layout, dist.get_rank()
        trained = []
        for p in self.parameters:
            rows = -(-p.shape[0] // layout.shards)  # of every shard but the last ones
            start = rank % layout.shards * rows * math.prod(p.shape[1:])
            tensors = adam_tensors(self.optimizer, p)
            trained.append((p, {kind: t.to_local() for kind, t in tensors.items()}, start))
        pieces = pieces_of(trained, layout, rank, layout.shards)
        return State(pieces, adam_step(self.optimizer))

    def restore(self, adam_step: int, scaler: dict[str, float]) -> None:
        set_adam_step(self.optimizer, adam_step)

    def describe(self) -> dict[str, Any]:
        layout = self.spec.layout
        return {
            "reshard_after_forward": self.reshards,
            "shards": layout.shards,
            "copies": layout.dp // layout.shards,
        }

    def close(self) -> None:
        del self.model


build = FSDP2Engine
