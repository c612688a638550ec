"""Plain PyTorch: the reference GPT, DistributedDataParallel when there is more than one rank.

fp32, or autocast to bf16/fp16 over fp32 weights; fp16 with torch's GradScaler.
"""

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from parallel.breakdown import ddp_hook
from parallel.checkpointer import State, adam_step, adam_tensors, hold, set_adam_step, share
from parallel.engines import Batch, StepResult
from parallel.optim import adamw, set_lr
from parallel.ranges import region
from parallel.reference import build_reference
from parallel.spec import RunSpec

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


class DDPEngine:
    def __init__(self, spec: RunSpec, device: torch.device, kernels: str):
        self.spec, self.device = spec, device
        self.module = module = build_reference(spec).to(device)
        self.model: nn.Module = module
        self.share = 1 / spec.layout.n_micro  # of a micro-batch's loss in what is differentiated
        if spec.layout.dp > 1:
            ids = [device] if device.type == "cuda" else None
            # Gradients live in the buckets that are reduced: one copy less of each.
            self.model = DistributedDataParallel(
                module, device_ids=ids, gradient_as_bucket_view=True
            )
            if hook := ddp_hook():
                self.model.register_comm_hook(None, hook)
                self.share /= spec.layout.dp  # the hook sums; the reducer itself averages
        if spec.compile:
            self.model.compile()
        self.parameters = list(module.parameters())
        self.optimizer = adamw(self.parameters, spec, fused=True)
        self.scaler = torch.amp.GradScaler(device.type, enabled=spec.precision == "fp16")

    def _autocast(self) -> contextlib.AbstractContextManager:
        dtype = DTYPES[self.spec.precision]
        return torch.autocast(self.device.type, dtype, enabled=dtype != torch.float32)

    def step(self, batches: Iterator[Batch], lr: float) -> StepResult:
        n_micro, total = self.spec.layout.n_micro, torch.zeros((), device=self.device)
        for micro, (tokens_BS, labels_BS) in enumerate(batches):
            # DDP reduces gradients once, with the last micro-batch.
            waits = micro + 1 < n_micro and self.spec.layout.dp > 1
            with self.model.no_sync() if waits else contextlib.nullcontext():
                with region("forward"), self._autocast():
                    loss = self.model(tokens_BS, labels_BS)
                with region("backward"):
                    self.scaler.scale(loss * self.share).backward()
            total += loss.detach() / n_micro
        with region("optimizer"):
            self.scaler.unscale_(self.optimizer)
            limit = self.spec.clip_grad or float("inf")
            norm = nn.utils.clip_grad_norm_(self.parameters, limit)
            set_lr(self.optimizer.param_groups, lr)
            scale = self.scaler.get_scale()
            self.scaler.step(self.optimizer)
            self.scaler.update()
            self.optimizer.zero_grad(set_to_none=True)
        norm = float(norm)  # only now: reading it waits for the device
        skipped = self.spec.precision == "fp16" and not norm < float("inf")
        return StepResult(self._mean(total), None if skipped else norm, scale, skipped)

    @torch.no_grad()
    def evaluate(self, batches: Iterator[Batch], n: int) -> float:
        total = torch.zeros((), device=self.device)
        self.module.eval()
        for _ in range(n):
            batch = next(batches)
            with region("forward"), self._autocast():
                total += self.module(*batch) / n
        self.module.train()
        return self._mean(total)

    def _mean(self, value: torch.Tensor) -> float:
        """The mean over dp ranks of a scalar that is a mean on each."""
        if self.spec.layout.dp > 1:
            dist.all_reduce(value)
        return float(value) / self.spec.layout.dp

    def state(self) -> State:
        layout = self.spec.layout
        rank = dist.get_rank()
        held = []
        for name, p in self.module.named_parameters():
            tensors, origin = adam_tensors(self.optimizer, p), (0,) * p.dim()
            copies = share(layout, rank, split=True, partitioned=False)
            held += hold(name, tuple(p.shape), origin, tuple(p.shape), 0, tensors, copies)
        found = self.scaler.state_dict()
        scaler = {"scale": found["scale"], "good_steps": found["_growth_tracker"]} if found else {}
        return State(held, adam_step(self.optimizer), scaler)

    def restore(self, adam_step: int, scaler: dict[str, float]) -> None:
        set_adam_step(self.optimizer, adam_step)
        if self.spec.layout.dp > 1 and adam_step:
            self._rehearse()
        if scaler and self.scaler.is_enabled():
            carried = {"scale": scaler["scale"], "_growth_tracker": int(scaler["good_steps"])}
            self.scaler.load_state_dict(self.scaler.state_dict() | carried)

    def _rehearse(self) -> None:
        """One backward pass for nothing: after its first, DDP regroups the gradients that it sums
        together, and a run that goes on must sum in the same order as one that never stopped."""
        shape = (self.spec.micro_batch, self.spec.seq_len)
        tokens_BS = torch.zeros(shape, dtype=torch.int64, device=self.device)
        with self._autocast():
            loss = self.model(tokens_BS, tokens_BS)
        loss.backward()
        self.optimizer.zero_grad(set_to_none=True)

    def describe(self) -> dict[str, Any]:
        return {"attention": "torch scaled_dot_product_attention"}

    def close(self) -> None:
        pass


build = DDPEngine
