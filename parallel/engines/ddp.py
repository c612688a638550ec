"""Plain PyTorch: the reference GPT, DistributedDataParallel when there is more than one rank.

fp32, or autocast to bf16/fp16 over fp32 weights; fp16 with torch's GradScaler.
"""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

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
from parallel.engines.reference import build_reference, evaluate
from parallel.measure.ranges import region
from parallel.measure.step_parts import ddp_hook


class DDPEngine:
    def __init__(self, spec: RunSpec, device: torch.device, kernels: str):
        self.spec, self.device = spec, device
        self.module = module = build_reference(spec).to(device)
        self.model: nn.Module = module
        self.loss_weight = 1 / spec.layout.n_micro  # of a micro-batch in the step's loss
        if spec.layout.dp > 1:
            ids = [device] if device.type == "cuda" else None
            # Gradients live in the buckets that are reduced: one copy less of each.
            self.model = DistributedDataParallel(
                module, device_ids=ids, gradient_as_bucket_view=True
            )
            if hook := ddp_hook():
                self.model.register_comm_hook(None, hook)
                self.loss_weight /= spec.layout.dp  # the hook sums; the reducer itself averages
        if spec.compile:
            self.model.compile()
        self.parameters = list(module.parameters())
        self.optimizer = adamw(self.parameters, spec)
        self.scaler = torch.amp.GradScaler(device.type, enabled=spec.precision == "fp16")

    def _autocast(self) -> contextlib.AbstractContextManager:
        dtype = DTYPES[self.spec.precision]
        return torch.autocast(self.device.type, dtype, enabled=dtype != torch.float32)

    def step(
        self, batches: Iterator[Batch], lr: float, stop: Callable[[], bool] = never
    ) -> StepResult:
        n_micro, total = self.spec.layout.n_micro, torch.zeros((), device=self.device)
        for micro, (tokens_BS, labels_BS) in enumerate(batches):
            # DDP reduces gradients once, with the last micro-batch.
            waits = micro + 1 < n_micro and self.spec.layout.dp > 1
            with self.model.no_sync() if waits else contextlib.nullcontext():
                with region("forward"), self._autocast():
                    loss = self.model(tokens_BS, labels_BS)
                with region("backward"):
                    self.scaler.scale(loss * self.loss_weight).backward()
            total += loss.detach() / n_micro
        with region("optimizer"):
            self.scaler.unscale_(self.optimizer)
            norm = nn.utils.get_total_norm([p.grad for p in self.parameters])
            clip_gradients(self.parameters, self.spec, norm)
            set_lr(self.optimizer.param_groups, lr)
            # A tensor, and a copy of the one that `update` writes to.
            scale = self.scaler.scale(torch.ones((), device=self.device))
            self.scaler.step(self.optimizer)
            self.scaler.update()
            self.optimizer.zero_grad(set_to_none=True)
        norm, scale = float(norm), float(scale)  # only now: reading waits for the device
        skipped = self.spec.precision == "fp16" and not norm < float("inf")
        loss, stopped = mean_over_ranks(total, self.spec.layout.dp, stop())
        return StepResult(loss, None if skipped else norm, scale, skipped, stopped)

    def evaluate(self, batches: Iterator[Batch], n: int) -> float:
        mean = evaluate(self.module, batches, n, self.device, self._autocast)
        return mean_over_ranks(mean, self.spec.layout.dp).loss

    def state(self) -> State:
        trained = ((p, adam_tensors(self.optimizer, p), 0) for p in self.parameters)
        pieces = pieces_of(trained, self.spec.layout, dist.get_rank())
        scaler = {}
        if self.scaler.is_enabled():
            stored = self.scaler.state_dict()
            scaler = {"scale": stored["scale"], "good_steps": stored["_growth_tracker"]}
        return State(pieces, adam_step(self.optimizer), scaler)

    def restore(self, adam_step: int, scaler: dict[str, float]) -> None:
        set_adam_step(self.optimizer, adam_step)
        if self.spec.layout.dp > 1 and adam_step:
            self._run_backward_once()
        if scaler and self.scaler.is_enabled():
            restored = {"scale": scaler["scale"], "_growth_tracker": int(scaler["good_steps"])}
            self.scaler.load_state_dict(self.scaler.state_dict() | restored)

    def _run_backward_once(self) -> None:
        """A backward pass whose gradients are dropped. After its first, DDP regroups the gradients
        that it sums together. A resumed run must sum in the same order as one that never stopped.
        """
        shape = (self.spec.micro_batch, self.spec.seq_len)
        tokens_BS = torch.zeros(shape, dtype=torch.int64, device=self.device)
        with self._autocast():
            loss = self.model(tokens_BS, tokens_BS)
        loss.backward()
        self.optimizer.zero_grad(set_to_none=True)

    def describe(self) -> dict[str, Any]:
        return {}

    def close(self) -> None:
        # Freed after the process group has ended, DDP can wait for a thread of gloo for ever.
        del self.model


build = DDPEngine
