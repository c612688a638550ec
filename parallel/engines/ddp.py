"""Plain PyTorch: the reference GPT, DistributedDataParallel when there is more than one rank.

fp32, or autocast to bf16/fp16 over fp32 weights; fp16 with torch's GradScaler.
"""

import contextlib
from functools import partial

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from models.tensor_files import DTYPES
from parallel.config.run_spec import RunSpec
from parallel.engines.reference import DataParallelEngine, build_reference
from parallel.measure.step_parts import ddp_hook


class DDPEngine(DataParallelEngine):
    """Trains the one-device model in DistributedDataParallel, or by itself where dp is 1."""

    def __init__(self, spec: RunSpec, device: torch.device, kernels: str):
        module = build_reference(spec, device).to(device)
        model: nn.Module = module  # with dp, what wraps it
        loss_weight = 1 / spec.layout.n_micro
        if spec.layout.dp > 1:
            device_ids = [device] if device.type == "cuda" else None
            # Gradients live in the buckets that are reduced: one copy less of each.
            model = DistributedDataParallel(
                module,
                device_ids=device_ids,
                gradient_as_bucket_view=True,
                broadcast_buffers=False,
            )
            if hook := ddp_hook():
                model.register_comm_hook(None, hook)
                loss_weight /= spec.layout.dp  # the hook sums; the reducer itself averages
        if spec.compile:
            model.compile()
        dtype = DTYPES[spec.precision]
        autocast = partial(torch.autocast, device.type, dtype, enabled=dtype != torch.float32)
        super().__init__(spec, device, model, module, loss_weight, autocast)

    def reducing(self, last: bool) -> contextlib.AbstractContextManager:
        """Returns the context of a micro-batch: the last one alone reduces gradients."""
        waits = self.spec.layout.dp > 1 and not last
        return self.model.no_sync() if waits else contextlib.nullcontext()

    def restore(self, adam_step: int, scaler: dict[str, float]) -> None:
        """Restores as every engine does, and leaves DDP's buckets as an unbroken run has them."""
        super().restore(adam_step, scaler)
        if self.spec.layout.dp > 1 and adam_step:
            self._run_backward_once()

    def _run_backward_once(self) -> None:
        """Runs a backward pass whose gradients are dropped. After its first, DDP regroups the
        gradients that it sums together. A resumed run must sum in the same order as one that never
        stopped.
        """
        shape = (self.spec.layout.micro_batch, self.spec.seq_len)
        tokens_BS = torch.zeros(shape, dtype=torch.int64, device=self.device)
        with self.autocast():
            loss = self.model(tokens_BS, tokens_BS)
        loss.backward()
        self.optimizer.zero_grad(set_to_none=True)


build = DDPEngine
