"""PyTorch's FSDP2 (`torch.distributed.fsdp.fully_shard`): parameters, gradients and AdamW's moments
are cut over the dp ranks, along each parameter's first dimension.

Each block is one group of parameters that are gathered together, the embedding another, last norm
and output layer a third: their messages run beside the blocks' work. A tied embedding, which is
needed from first to last, is one group with the last norm. With zero_stage 3 a block is gathered
for its forward pass and again for its backward pass (reshard_after_forward); with zero_stage 2 all
stay gathered from the first forward pass of a step to the last backward pass. Gradients are reduced
with every micro-batch, or once a step, each rank holding them whole in fp32 until then
(`Layout.reductions`). bf16 is a MixedPrecisionPolicy: fp32 shards, bf16 weights in compute, fp32
reduction.
"""

import contextlib
import math
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import fsdp
from torch.distributed.device_mesh import init_device_mesh

from models import gpt
from models.tensor_files import DTYPES
from parallel.config.run_spec import RunSpec
from parallel.engines.optim import adam_tensors
from parallel.engines.reference import DataParallelEngine, name_parameters, our_gpt


class FSDP2Engine(DataParallelEngine):
    """Trains the one-device model, whose blocks `fully_shard` cuts over the dp ranks."""

    def __init__(self, spec: RunSpec, device: torch.device, kernels: str):
        self.spec, layout = spec, spec.layout
        self.shards = layout.shards
        # The shards of a copy are neighbouring ranks, in one node where they fit. One copy alone
        # has no dimension of the mesh.
        sizes = {"copy": layout.dp // layout.shards, "shard": layout.shards}
        if sizes["copy"] == 1:
            del sizes["copy"]
        mesh = init_device_mesh(device.type, tuple(sizes.values()), mesh_dim_names=tuple(sizes))
        self.shard_group = mesh.get_group("shard")
        offload = fsdp.OffloadPolicy()
        if layout.offload == "all":
            offload = fsdp.CPUOffloadPolicy(pin_memory=device.type == "cuda")
        rules = {
            "mesh": mesh,
            "mp_policy": fsdp.MixedPrecisionPolicy(DTYPES[spec.precision], torch.float32),
            "offload_policy": offload,
        }
        # No rank ever has the whole model: it is built without memory, then filled shard by shard.
        with torch.device("meta"):
            model = our_gpt(spec, layout.recompute)
        self.reshards = layout.zero_stage == 3
        for block in model.blocks:
            fsdp.fully_shard(block, reshard_after_forward=self.reshards, **rules)
            if spec.compile:
                block.compile()
        # Backward begins with the output layer: gathering it again would win nothing.
        if not spec.model.tied:
            fsdp.fully_shard(model.embedding, reshard_after_forward=self.reshards, **rules)
            model.embedding.set_unshard_in_backward(False)  # it needs the tokens alone
            fsdp.fully_shard([model.norm, model.output], reshard_after_forward=False, **rules)
        fsdp.fully_shard(model, reshard_after_forward=False, **rules)
        model.to_empty(device="cpu" if layout.offload == "all" else device)
        gpt.initialise(model, spec.seed, lambda p: gpt.Held(p.to_local(), self._start(p)))
        name_parameters(model, spec.model)
        super().__init__(spec, device, model, model, 1 / layout.n_micro)

    def _start(self, parameter: nn.Parameter) -> int:
        """Returns the number of the first element of this rank's shard in the parameter."""
        rows = -(-parameter.shape[0] // self.shards)  # of every shard but the last ones
        return dist.get_rank() % self.shards * rows * math.prod(parameter.shape[1:])

    def reducing(self, last: bool) -> contextlib.AbstractContextManager:
        """Sets what follows a micro-batch's backward pass: whether gradients are reduced, over
        shards and over copies, and whether blocks are cut again. Returns a context that does
        nothing."""
        every_micro_batch = self.spec.layout.reductions > 1
        self.model.set_requires_gradient_sync(last or every_micro_batch)
        self.model.set_requires_all_reduce(last)  # of the copies: their shards add up until then
        self.model.set_reshard_after_backward(last or self.reshards)
        return contextlib.nullcontext()

    @torch.no_grad()  # else autograd makes a function around each local part
    def grad_norm(self) -> Tensor:
        """Returns the L2 norm of the gradient, of which each rank of a copy has a part."""
        parts = [p.grad.to_local() for p in self.parameters]
        squared_norm = nn.utils.get_total_norm(parts).to(self.device).square()
        dist.all_reduce(squared_norm, group=self.shard_group)
        return squared_norm.sqrt()

    def held(self, parameter: nn.Parameter) -> tuple[dict[str, Tensor], int]:
        """Returns this rank's shards of a parameter and its moments, and where they begin."""
        tensors = adam_tensors(self.optimizer, parameter)
        return {kind: tensor.to_local() for kind, tensor in tensors.items()}, self._start(parameter)

    def describe(self) -> dict[str, Any]:
        """Returns, for run.json, how the dp ranks share the state."""
        return {
            "reshard_after_forward": self.reshards,
            "shards": self.shards,
            "copies": self.spec.layout.dp // self.shards,
        }


build = FSDP2Engine
