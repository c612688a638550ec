"""What is the same in every engine: the mean loss of all ranks, decay groups, AdamW, the
learning-rate schedule, fp16's loss scale. Gradients are clipped in clipping.py."""

import math
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from parallel.checkpoint.contents import KINDS, Piece, pieces_of
from parallel.config.layout import Layout
from parallel.config.run_spec import RunSpec
from parallel.engines import Reduced
from parallel.measure.ranges import region

BIAS_STEP = 1e-3  # Wang et al. 2024, and megatron-core's moe_router_bias_update_rate


def mean_over_ranks(share: Tensor, parts: int, stop: bool = False) -> Reduced:
    """Returns the sum of all ranks' shares over `parts`, and whether any rank stops: one message of
    two numbers. share: one number. It waits for the device."""
    stops = share.new_full((), stop, dtype=torch.float32)
    sums = torch.stack([share.float().reshape(()), stops])
    if dist.get_world_size() > 1:
        dist.all_reduce(sums)
    total, n_stops = sums.tolist()
    return Reduced(total / parts, n_stops > 0)


class ScaleRule(NamedTuple):
    """The rule by which fp16's loss scale changes (Micikevicius et al. 2018, arXiv 1710.03740,
    section 3.2): megatron-core's, in every engine.

    window: good steps in a row that double it. hysteresis: overflows until it is halved, and with
    every further one; a doubling sets the count back. refills: so does every good step. least: the
    scale is never halved below this.
    """

    window: int = 1000
    hysteresis: int = 2
    refills: bool = False
    least: float = 1.0


USUAL_RULE = ScaleRule()


class LossScale(NamedTuple):
    """fp16's loss scale as a checkpoint stores it.

    good_steps: good steps in a row. hysteresis: at which overflow from now on the scale is halved.
    """

    scale: float = 2.0**16
    good_steps: int = 0
    hysteresis: int = USUAL_RULE.hysteresis

    @classmethod
    def of(cls, stored: dict[str, float], rule: ScaleRule = USUAL_RULE) -> "LossScale":
        """Returns the scale that a checkpoint stores. Another program may have counted good steps
        beyond the window, and overflows below 1."""
        good_steps = min(int(stored["good_steps"]), rule.window - 1)
        hysteresis = max(int(stored.get("hysteresis", rule.hysteresis)), 1)
        return cls(float(stored["scale"]), good_steps, hysteresis)

    def after(self, skipped: bool, rule: ScaleRule = USUAL_RULE) -> "LossScale":
        """Returns the scale of the next step. skipped: this step's gradients overflowed.

        An overflow halves it once `hysteresis` has run down to 1; `window` good steps in a row
        double it.
        """
        if skipped:
            scale = max(self.scale / 2, rule.least) if self.hysteresis == 1 else self.scale
            return LossScale(scale, 0, max(self.hysteresis - 1, 1))
        if self.good_steps + 1 == rule.window:
            return LossScale(2 * self.scale, 0, rule.hysteresis)
        hysteresis = rule.hysteresis if rule.refills else self.hysteresis
        return LossScale(self.scale, self.good_steps + 1, hysteresis)


def lr_at(spec: RunSpec, step: int) -> float:
    """Returns the learning rate of optimizer step `step`, from 0: linear warm-up, then cosine.

    The first step already moves (lr/warmup); the last of `spec.steps` ends at min_lr.
    """
    if step < spec.warmup_steps:
        return spec.lr * (step + 1) / spec.warmup_steps
    if spec.lr_schedule == "constant":
        return spec.lr
    span = spec.steps - 1 - spec.warmup_steps
    progress = min(1.0, (step - spec.warmup_steps) / span) if span > 0 else 1.0
    return spec.min_lr + 0.5 * (1 + math.cos(math.pi * progress)) * (spec.lr - spec.min_lr)


def param_groups(parameters: Iterable[nn.Parameter], weight_decay: float) -> list[dict]:
    """Returns two AdamW groups: matrices (embeddings too), which it decays, and biases and norms,
    which it does not. An empty group is left out."""
    groups = [{"params": [], "weight_decay": rate} for rate in (weight_decay, 0.0)]
    for p in parameters:
        if p.requires_grad:
            shape = getattr(p, "ds_shape", p.shape)  # ZeRO-3 flattens and empties parameters
            groups[len(shape) < 2]["params"].append(p)
    return [group for group in groups if group["params"]]


def adamw(
    parameters: Iterable[nn.Parameter],
    spec: RunSpec,
    kind: Callable[..., torch.optim.AdamW] = torch.optim.AdamW,
) -> torch.optim.AdamW:
    """Returns AdamW over `param_groups` with the run's betas and epsilon, fused (see `fuse`). kind:
    torch's class, or a subclass of it."""
    groups, betas = param_groups(parameters, spec.weight_decay), (spec.beta1, spec.beta2)
    return kind(groups, lr=spec.lr, betas=betas, eps=spec.adam_eps, fused=True)


def fuse(adam: torch.optim.Optimizer) -> None:
    """Lets torch's AdamW that a library made pass once over weights, gradients and moments. Its
    dozen passes were a quarter of a GPT-2 124M step of 512 tokens on one core."""
    if isinstance(adam, torch.optim.Adam):
        for settings in (adam.defaults, *adam.param_groups):
            settings["fused"] = True


def set_lr(groups: Iterable[dict], lr: float) -> None:
    """Sets the learning rate of an optimizer's groups."""
    for group in groups:
        group["lr"] = lr


@torch.no_grad()
def balance(biases: list[Tensor], tokens: list[Tensor], group: Any = None) -> None:
    """Steps the bias of each router's experts, [E], up for an expert that got fewer tokens than the
    mean in this step, and down for one that got more. tokens: of each router, [E], how many tokens
    this rank's part of the step sent to each expert. It is called after the optimizer's step, for a
    checkpoint may copy the biases until then."""
    tokens_LE = torch.stack(tokens).double()
    if dist.get_world_size(group) > 1:
        with region("control"):
            dist.all_reduce(tokens_LE, group=group)
    fewer_LE = (tokens_LE.mean(1, keepdim=True) - tokens_LE).sign().float()
    torch._foreach_add_(biases, list(fewer_LE), alpha=BIAS_STEP)


# --- AdamW's state, which a checkpoint stores ----------------------------------------------------


def _counts_in_groups(adam: torch.optim.Optimizer) -> bool:
    """Returns whether AdamW counts its steps per group, as the FusedAdam of apex and of Transformer
    Engine do, and not per parameter, as torch's AdamW does."""
    return not isinstance(adam, torch.optim.Adam)


def adam_tensors(adam: torch.optim.Optimizer, parameter: Tensor) -> dict[str, Tensor]:
    """Returns a parameter that `adam` updates and its two moments, by kind. Before the first step
    the moments are made here."""
    state = adam.state[parameter]
    if "exp_avg" not in state:
        if not _counts_in_groups(adam):
            fused = adam.defaults.get("fused") or adam.defaults.get("capturable")
            device = parameter.device if fused else "cpu"
            state["step"] = torch.zeros((), dtype=torch.float32, device=device)
        for kind in KINDS[1:]:
            state[kind] = torch.zeros_like(parameter, memory_format=torch.preserve_format).detach()
    return {"param": parameter, **{kind: state[kind] for kind in KINDS[1:]}}


def biases_of(routers: Iterable[tuple[str, Any]], layout: Layout) -> list[Piece]:
    """Returns the pieces of the experts' biases of (name, router) pairs. No gradient trains them,
    so their moments are zeros; every rank of a stage has all of them."""
    trained = []
    for name, router in routers:
        bias, shape = router.expert_bias, tuple(router.expert_bias.shape)
        reference = {"name": f"{name}.expert_bias", "shape": shape, "offset": (0,), "part": shape}
        bias.references = [reference]
        moments = {kind: torch.zeros_like(bias) for kind in KINDS[1:]}
        trained.append((bias, {"param": bias} | moments, 0))
    return pieces_of(trained, layout, dist.get_rank())


def adam_step(adam: torch.optim.Optimizer) -> int:
    """Returns how many steps AdamW has done, 0 before its first."""
    if _counts_in_groups(adam):  # a group without parameters is never counted up
        return max((int(group.get("step", 0)) for group in adam.param_groups), default=0)
    return next((int(state["step"]) for state in adam.state.values() if "step" in state), 0)


def set_adam_step(adam: torch.optim.Optimizer, step: int) -> None:
    """Sets how many steps AdamW has done, for a checkpoint that was loaded."""
    if _counts_in_groups(adam):
        for group in adam.param_groups:
            group["step"] = step
    for state in adam.state.values():
        if "step" in state:
            state["step"].fill_(step)
