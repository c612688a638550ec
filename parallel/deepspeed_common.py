"""What DeepSpeed's two engines share: the JSON, the optimizer, the log noise. Imports deepspeed."""

import contextlib
import importlib
import logging
import os
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from parallel import cpu
from parallel.checkpointer import State, adam_step, adam_tensors, hold, set_adam_step
from parallel.optim import param_groups
from parallel.spec import RunSpec, read_deepspeed_json

if not torch.cuda.is_available():
    # Otherwise DeepSpeed guesses from what is installed; it must agree with our device.
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
os.environ.setdefault("DS_LOG_LEVEL", "error")

if not torch.cuda.is_available():
    # Leaving zero.Init, DeepSpeed puts back torch's tensor factories as it found them when it was
    # imported. megatron-core's layers need the redirected ones, so these come first.
    cpu.patch()

import deepspeed
from deepspeed.utils import logger

logger.setLevel(logging.ERROR)  # rank 0 prints its whole configuration otherwise
if not torch.cuda.is_available():
    # On CPU DeepSpeed compiles a shared-memory all-reduce in C++ (a minute, and a compiler) to use
    # beside gloo. Every engine here communicates over gloo, so that their times compare.
    # (By import_module: `deepspeed.comm.torch`, the attribute, is torch itself.)
    importlib.import_module("deepspeed.comm.torch").build_shm_op = lambda: None


def config(spec: RunSpec) -> dict[str, Any]:
    """The DeepSpeed configuration: the user's JSON with the run's settings put over it."""
    merged = read_deepspeed_json(Path(spec.deepspeed_config)) if spec.deepspeed_config else {}
    # These two are ours: AdamW and the schedule are the same in every engine.
    for ours in ("optimizer", "scheduler"):
        merged.pop(ours, None)
    layout = spec.layout
    zero = {**merged.get("zero_optimization", {}), "stage": layout.zero_stage}
    for key, where in (("offload_optimizer", ("optimizer", "all")), ("offload_param", ("all",))):
        if layout.offload in where:
            zero[key] = {**zero.get(key, {}), "device": "cpu"}
        else:
            zero.pop(key, None)
    merged |= {
        "train_batch_size": layout.global_batch,
        "train_micro_batch_size_per_gpu": layout.micro_batch,
        "gradient_accumulation_steps": layout.n_micro,
        "gradient_clipping": spec.clip_grad,
        "zero_optimization": zero,
        "zero_allow_untested_optimizer": True,  # torch's AdamW
        "zero_force_ds_cpu_optimizer": False,  # DeepSpeed's CPU Adam needs a C++ compiler
        "steps_per_print": 10**9,  # train.py prints
    }
    for name in ("bf16", "fp16"):
        merged[name] = {**merged.get(name, {}), "enabled": spec.precision == name}
    if spec.precision == "bf16" and layout.zero_stage > 0:  # without ZeRO it cannot
        merged.setdefault("data_types", {"grad_accum_dtype": "fp32"})
    if clips_itself(spec):
        merged["gradient_clipping"] = 0.0
    return merged


def clips_itself(spec: RunSpec) -> bool:
    """Whether our AdamW measures and clips the gradient: in fp32 and fp16 without ZeRO.

    DeepSpeed's (0.19) own is wrong there. In fp32 `clip_grad_norm_` hands out no norm, leaves out
    what later pipeline stages hold undivided by tp and counts the tied embedding's second copy. In
    fp16 FP16_UnfusedOptimizer asks the gradients, not their parameters, whether they are split over
    tp or a copy: the shares of tp ranks other than 0 are left out, the second copy is counted.
    """
    return spec.precision in ("fp32", "fp16") and spec.layout.zero_stage == 0


class ClippingAdamW(torch.optim.AdamW):
    """AdamW that measures and clips the global gradient norm first (see `clips_itself`).

    `counts(p)` says whether this rank's copy of p enters the norm; `group` holds the ranks whose
    shares add up to one whole model (None: this rank has all of it).
    """

    def __init__(self, *args: Any, limit: float, counts: Callable, group: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self.limit, self.group = limit, group
        # By place: in fp16 DeepSpeed puts fp32 copies, which know nothing, in the parameters'.
        self.counted = [[counts(p) for p in group["params"]] for group in self.param_groups]
        self._global_grad_norm: float | None = None  # where DeepSpeed's engine looks

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        grads, counted = [], []
        for group, counts in zip(self.param_groups, self.counted, strict=True):
            for p, counts_here in zip(group["params"], counts, strict=True):
                if p.grad is not None:
                    grads.append(p.grad)
                    counted += [p.grad] * counts_here
        device = grads[0].device
        squares = [g.float().square().sum() for g in counted] or [torch.zeros((), device=device)]
        total = torch.stack(squares).sum()
        if self.group is not None:
            dist.all_reduce(total, group=self.group)
        self._global_grad_norm = float(total.sqrt())
        if self.limit and self._global_grad_norm > self.limit:
            scale = self.limit / (self._global_grad_norm + 1e-6)
            torch._foreach_mul_(grads, scale)
        super().step(closure)


def optimizer(
    parameters: Iterable[nn.Parameter],
    spec: RunSpec,
    counts: Callable[[nn.Parameter], bool] = lambda p: True,
    group: Any = None,
) -> torch.optim.Optimizer:
    """The AdamW to hand to deepspeed.initialize."""
    groups = param_groups(parameters, spec.weight_decay)
    adam = {"lr": spec.lr, "betas": (spec.beta1, spec.beta2), "eps": spec.adam_eps}
    if clips_itself(spec):
        return ClippingAdamW(groups, limit=spec.clip_grad, counts=counts, group=group, **adam)
    return torch.optim.AdamW(groups, **adam)


def connect() -> None:
    """Let DeepSpeed use the process group that is there already."""
    deepspeed.init_distributed(dist_init_required=False, verbose=False)


@contextlib.contextmanager
def partitioned(spec: RunSpec, mpu: Any) -> Iterator[Callable]:
    """Inside, with ZeRO-3, modules keep only this rank's share of each parameter once made.

    So a model's own initialisation of weights, which comes after, would write to nothing and
    training would start from noise. Yields what gathers one parameter to be written (see gpt.fill).
    """
    connect()
    if spec.layout.zero_stage < 3:
        yield contextlib.nullcontext
        return
    group = mpu.get_data_parallel_group() if mpu is not None else None
    with deepspeed.zero.Init(config_dict_or_path=config(spec), data_parallel_group=group, mpu=mpu):
        yield lambda parameter: deepspeed.zero.GatheredParameters([parameter], modifier_rank=0)


def initialize(spec: RunSpec, model: nn.Module, adam: torch.optim.Optimizer, mpu: Any) -> Any:
    """deepspeed.initialize with AdamW handed in and no printing."""
    engine, *_ = deepspeed.initialize(
        model=model,
        optimizer=adam,
        config=config(spec),
        mpu=mpu,
        dist_init_required=False,
    )
    if spec.precision == "fp16" and spec.layout.zero_stage == 0:
        set_adam_step(inner(engine), 0)  # it steps once, without gradients, to make the moments
        # 0.19 raises its scale and then divides by it the gradients of the lower one: `after_step`
        # raises it.
        update = engine.optimizer._update_scale
        engine.optimizer._update_scale = lambda skip: update(skip) if skip else None
    return engine


def scaled(spec: RunSpec, engine: Any, loss: torch.Tensor) -> torch.Tensor:
    """The loss, with its gradient multiplied by fp16's scale where DeepSpeed does not do it.

    Without ZeRO, 0.19 divides the gradients by the scale but multiplies no loss with it.
    """
    if spec.precision == "fp16" and spec.layout.zero_stage == 0 and loss.requires_grad:
        scale = _scaler(engine).cur_scale
        loss.register_hook(lambda gradient: gradient * scale)
    return loss


def before_step(spec: RunSpec, engine: Any) -> tuple[int, float]:
    """What `after_step` must know: how many steps fp16 has skipped, and its scale."""
    scale = float(_scaler(engine).cur_scale) if spec.precision == "fp16" else 1.0
    return engine.skipped_steps, scale


def after_step(
    spec: RunSpec, engine: Any, before: tuple[int, float]
) -> tuple[float | None, float, bool]:
    """Gradient norm, loss scale and whether fp16 skipped, of the step just taken."""
    skipped_before, scale = before
    skipped = engine.skipped_steps > skipped_before
    if skipped:
        return None, scale, True
    if spec.precision == "fp16" and spec.layout.zero_stage == 0:
        type(engine.optimizer)._update_scale(engine.optimizer, False)
    told = inner(engine)._global_grad_norm if clips_itself(spec) else engine.get_global_grad_norm()
    return None if told is None else float(told), scale, False


def _masters(spec: RunSpec, engine: Any) -> Iterator[tuple[nn.Parameter, dict, int]]:
    """This rank's parameters, the fp32 tensors that train them, and where in them these begin.

    ZeRO and bf16 train flat partitions of all parameters one after the other.
    """
    outer = engine.optimizer
    adam = inner(engine)
    if spec.layout.zero_stage == 3:
        for p in engine.module.parameters():
            group, at, n = outer.grad_position[outer.get_param_id(p)]
            start = dist.get_rank(p.ds_process_group) * n
            flat = adam_tensors(adam, outer.fp32_partitioned_groups_flat[group])
            n = min(n, p.ds_numel - start)  # the last partitions are padded
            if n > 0:
                yield p, {kind: t.detach()[at : at + n] for kind, t in flat.items()}, start
    elif hasattr(outer, "update_lp_params"):  # ZeRO 1 and 2, and DeepSpeed's bf16 optimizer
        for p in engine.module.parameters():
            if (mapping := p._hp_mapping) is not None:
                (partition,) = adam.param_groups[mapping.param_group_index]["params"]
                at, n = mapping.hp_fragment_address.start, mapping.hp_fragment_address.numel
                flat = adam_tensors(adam, partition)
                cut = {kind: t.detach()[at : at + n] for kind, t in flat.items()}
                yield p, cut, mapping.lp_fragment_address.start
    elif outer is adam:
        for p in engine.module.parameters():
            yield p, adam_tensors(adam, p), 0
    else:  # fp16 without ZeRO
        for halves, masters in zip(outer.fp16_groups, outer.fp32_groups, strict=True):
            for p, master in zip(halves, masters, strict=True):
                yield p, adam_tensors(adam, master), 0


def inner(engine: Any) -> torch.optim.Optimizer:
    """The AdamW inside whatever DeepSpeed wrapped it in."""
    outer = engine.optimizer
    return outer if isinstance(outer, torch.optim.Optimizer) else outer.optimizer


def _scaler(engine: Any) -> Any:
    """What keeps fp16's scale and counts: an object with ZeRO, else the optimizer's settings."""
    outer = engine.optimizer
    return outer.loss_scaler if hasattr(outer, "loss_scaler") else outer.loss_scale_config


def state(spec: RunSpec, engine: Any, place: Callable, tracker: Any) -> State:
    """The engine's state; place(parameter, partitioned) is where it lies in the whole model."""
    partitioned = spec.layout.zero_stage > 0 or hasattr(engine.optimizer, "update_lp_params")
    held = []
    for p, tensors, start in _masters(spec, engine):
        held += hold(**place(p, partitioned), start=start, tensors=tensors)
    scaler = {}
    if spec.precision == "fp16":
        found = _scaler(engine)
        good = found.cur_iter - found.last_overflow_iter - 1
        scaler = {"scale": float(found.cur_scale), "good_steps": max(0, int(good))}
        if hasattr(found, "cur_hysteresis"):
            scaler["hysteresis"] = int(found.cur_hysteresis)
    return State(held, adam_step(inner(engine)), scaler, tracker)


@torch.no_grad()
def restore(spec: RunSpec, engine: Any, step: int, scaler: dict[str, float]) -> None:
    """Bring the weights that the model computes with in line with the fp32 ones, just filled."""
    outer = engine.optimizer
    set_adam_step(inner(engine), step)
    if scaler and spec.precision == "fp16":
        found = _scaler(engine)
        found.cur_scale = scaler["scale"]
        found.last_overflow_iter, found.cur_iter = -1, int(scaler["good_steps"])
        if "hysteresis" in scaler and hasattr(found, "cur_hysteresis"):
            found.cur_hysteresis = int(scaler["hysteresis"])
    if spec.layout.zero_stage == 3:
        outer._partition_all_parameters()
        for group in range(len(outer.fp32_partitioned_groups_flat)):
            outer._reassign_or_swap_out_partitioned_parameters(group)
        if outer.persistent_parameters:
            outer.persistent_parameters[0].all_gather(outer.persistent_parameters)
    elif hasattr(outer, "update_lp_params"):
        outer.update_lp_params()
    elif outer is not inner(engine):
        for halves, masters in zip(outer.fp16_groups, outer.fp32_groups, strict=True):
            for p, master in zip(halves, masters, strict=True):
                p.data.copy_(master.data)
