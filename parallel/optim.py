"""The optimizer's rules, the same in every engine: decay groups, AdamW, learning-rate schedule."""

import math
from collections.abc import Iterable

import torch
from torch import nn

from parallel.spec import RunSpec


def lr_at(spec: RunSpec, step: int) -> float:
    """Learning rate of optimizer step `step` (counted from 0): linear warm-up, then cosine.

    The first step already moves (lr/warmup); the last of `spec.steps` ends at min_lr.
    """
    if step < spec.warmup_steps:
        return spec.lr * (step + 1) / spec.warmup_steps
    if spec.lr_schedule == "constant":
        return spec.lr
    span = max(1, spec.steps - 1 - spec.warmup_steps)
    progress = min(1.0, (step - spec.warmup_steps) / span)
    return spec.min_lr + 0.5 * (1 + math.cos(math.pi * progress)) * (spec.lr - spec.min_lr)


def decays(parameter: torch.Tensor) -> bool:
    """AdamW decays matrices (embeddings too), never biases and norms.

    ZeRO-3 flattens and empties parameters; their true shape is then in `ds_shape`.
    """
    return len(getattr(parameter, "ds_shape", parameter.shape)) > 1


def param_groups(parameters: Iterable[nn.Parameter], weight_decay: float) -> list[dict]:
    """Two AdamW groups, decayed and not; an empty one is left out."""
    parameters = [p for p in parameters if p.requires_grad]
    groups = [
        {"params": [p for p in parameters if decays(p)], "weight_decay": weight_decay},
        {"params": [p for p in parameters if not decays(p)], "weight_decay": 0.0},
    ]
    return [group for group in groups if group["params"]]


def adamw(parameters: Iterable[nn.Parameter], spec: RunSpec, fused: bool) -> torch.optim.AdamW:
    """torch's AdamW over `param_groups` with the run's betas and epsilon.

    Fused, it passes once over weights, gradients and moments, on CPU too, where the default makes a
    dozen passes: on one core that was a quarter of a GPT-2 124M step of 512 tokens.
    """
    return torch.optim.AdamW(
        param_groups(parameters, spec.weight_decay),
        lr=spec.lr,
        betas=(spec.beta1, spec.beta2),
        eps=spec.adam_eps,
        fused=fused,
    )


def set_lr(groups: Iterable[dict], lr: float) -> None:
    """Give every parameter group of a torch-like optimizer this learning rate."""
    for group in groups:
        group["lr"] = lr
