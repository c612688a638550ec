"""A gradient between backward and AdamW: its sum over ranks, its norm, its clipping."""

from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from parallel.config.run_spec import RunSpec


def summed_over(group: Any) -> Callable[[Tensor], Tensor]:
    """Returns a hook that sums a parameter's gradients over the ranks of a group. It is for a
    parameter of which each rank has the whole and applies it to a part of its own (a norm of heads,
    to its heads)."""

    def sum_over_ranks(gradient: Tensor) -> Tensor:
        dist.all_reduce(total := gradient.clone(), group=group)
        return total

    return sum_over_ranks


def whole_norm(_: int, __: Tensor, tensors: list[list[Tensor]], *___: Any) -> tuple[Tensor, None]:
    """Returns the L2 norm, fp32 [1], of all tensors of a list at once. It stands in for
    megatron-core's, which reads the norm of each and so waits for the device with every one."""
    norms = torch.stack(torch._foreach_norm(tensors[0]))
    return torch.linalg.vector_norm(norms).reshape(1), None


def scale(_: int, __: Tensor, tensors: list[list[Tensor]], factor: float) -> None:
    """Multiplies all tensors of a list at once. It stands in for megatron-core's."""
    torch._foreach_mul_(tensors[0], factor)


def clip_gradients(parameters: Iterable[Tensor], spec: RunSpec, norm: Tensor) -> None:
    """Scales the gradients so that their whole L2 norm, which is `norm` now, is at most the run's
    clip_grad."""
    if spec.clip_grad:
        nn.utils.clip_grads_with_norm_(parameters, spec.clip_grad, norm)


class ClippingAdamW(torch.optim.AdamW):
    """AdamW that measures and clips the global gradient norm first, where DeepSpeed is wrong (see
    deepspeed_common.clips_itself).

    counts(p): whether this rank's copy of p enters the norm. group: the ranks whose parts make one
    model; None where this rank has all of it.
    """

    def __init__(self, *args: Any, spec: RunSpec, counts: Callable, group: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self.spec, self.group = spec, group
        # By position: in fp16 DeepSpeed puts fp32 copies in the place of the parameters, and those
        # have not the attributes that `counts` reads.
        self.counted = [counts(p) for group in self.param_groups for p in group["params"]]
        # Where DeepSpeed's engine looks. A tensor: reading it here would wait for the device.
        self._global_grad_norm: torch.Tensor | None = None

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        """Measures the gradient's norm over the group, clips the gradient, and updates the
        weights."""
        parameters = [p for group in self.param_groups for p in group["params"]]
        grads = [
            p.grad
            for p, is_counted in zip(parameters, self.counted, strict=True)
            if is_counted and p.grad is not None
        ]
        zero = [torch.zeros((), device=parameters[0].device)]
        # One list of operations for all gradients, not two for each.
        total = torch.stack(torch._foreach_norm(grads or zero, dtype=torch.float32)).square().sum()
        if self.group is not None:
            dist.all_reduce(total, group=self.group)
        self._global_grad_norm = total.sqrt()
        clip_gradients(parameters, self.spec, self._global_grad_norm)
        super().step(closure)
