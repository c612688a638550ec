"""What the two DeepSpeed engines share: configuration, optimizer, step and state."""

import contextlib
import importlib
import logging
import os
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from models import gpt
from parallel.checkpoint.contents import State, pieces_of
from parallel.config.deepspeed_json import as_deepspeed_json, read_deepspeed_json
from parallel.config.run_spec import RunSpec
from parallel.engines import Batch, StepResult, clipping, cpu, optim

os.environ.setdefault("DS_LOG_LEVEL", "error")
if not torch.cuda.is_available():
    # Otherwise DeepSpeed guesses from what is installed; it must agree with our device.
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    # Leaving zero.Init, DeepSpeed puts back torch's tensor factories as it found them when it was
    # imported. megatron-core's layers need the redirected ones, so patch before the import.
    cpu.patch()

import deepspeed
from deepspeed.utils import logger

# ZeRO-3 has thousands of NVTX ranges a step.
nvtx = importlib.import_module("deepspeed.utils.nvtx")
nvtx.enable_nvtx = "NSYS_PROFILING_SESSION_ID" in os.environ
logger.setLevel(logging.ERROR)  # rank 0 prints its whole configuration otherwise
# ZeRO asks whether the optimizer is Muon, whose functions are decorated. Here it is always AdamW.
with cpu.uncompiled(), contextlib.suppress(ImportError):
    importlib.import_module("deepspeed.runtime.zero.muon.muon_optimizer")
if not torch.cuda.is_available():
    # On CPU DeepSpeed compiles a shared-memory all-reduce in C++ (a minute, and a compiler) to use
    # beside gloo. Every engine here communicates over gloo, so that their times compare.
    # (By import_module: `deepspeed.comm.torch`, the attribute, is torch itself.)
    importlib.import_module("deepspeed.comm.torch").build_shm_op = lambda: None


pins_host_memory = torch.cuda.is_available()  # without CUDA it cannot


def config(spec: RunSpec) -> dict[str, Any]:
    """Returns the DeepSpeed configuration: the user's JSON with the run's settings put over it."""
    merged = read_deepspeed_json(Path(spec.deepspeed_config)) if spec.deepspeed_config else {}
    for section in ("optimizer", "scheduler"):  # AdamW and schedule are the same in every engine
        merged.pop(section, None)
    layout, stated = spec.layout, as_deepspeed_json(spec.layout, spec.precision)
    zero = {**merged.get("zero_optimization", {})}
    for key in ("offload_optimizer", "offload_param"):
        user_settings = zero.pop(key, {})
        if (ours := stated["zero_optimization"].get(key)) is not None:
            ours |= {"pin_memory": pins_host_memory} | user_settings | {"device": "cpu"}
    zero |= stated["zero_optimization"]
    # DeepSpeed's BF16_Optimizer, which bf16 has with stage 1 and without offload, knows no overlap.
    knows_overlap = (spec.precision, layout.zero_stage, layout.offload) != ("bf16", 1, "none")
    if spec.engine == "deepspeed_zero" and layout.zero_stage in (1, 2) and knows_overlap:
        # Reduce gradients while backward goes on, as it does by itself at stage 3: one more bucket.
        zero.setdefault("overlap_comm", True)
    for name in ("bf16", "fp16"):
        stated[name] = {**merged.get(name, {}), **stated[name]}
    for name in ("data_types", "communication_data_type"):  # the user's, where the JSON has one
        if name in merged:
            stated.pop(name, None)
    merged |= stated | {
        "gradient_clipping": 0.0 if clips_itself(spec) else spec.clip_grad,
        "zero_optimization": zero,
        "zero_allow_untested_optimizer": True,  # torch's AdamW
        "zero_force_ds_cpu_optimizer": False,  # DeepSpeed's CPU Adam needs a C++ compiler
        "steps_per_print": 10**9,  # train.py prints
        # It waits for the device twice a micro-batch.
        "timers": {"throughput": {"enabled": False}},
    }
    if layout.ep > 1:
        merged["expert_parallel"] = auto_ep(spec)
    return merged


def auto_ep(spec: RunSpec) -> dict[str, Any]:
    """Returns the configuration of DeepSpeed's AutoEP: the names of the reference GPT's experts,
    and how their router chooses and weights them."""
    experts = spec.model.experts
    assert experts is not None
    return {
        "enabled": True,
        "autoep_size": spec.layout.ep,
        "moe_layer_pattern": r"blocks\.\d+\.mlp",
        "router_pattern": "router",
        "expert_pattern": "experts",
        "expert_w1": "gate",
        "expert_w2": "down",
        "expert_w3": "up",
        "has_shared_experts": True,  # where there are any
        "shared_experts_pattern": "shared",
        "top_k": experts.moe_router_topk,
        "score_func": experts.moe_router_score_function,
        "score_apply": "post",
        "route_norm": experts.norm_topk_prob,
        "routed_scaling_factor": experts.moe_router_topk_scaling_factor,
        "use_grouped_mm": torch.cuda.is_available(),
    }


def scale_rule(spec: RunSpec) -> optim.ScaleRule:
    """Returns the rule of fp16's loss scale; what the user's JSON says of it counts."""
    stated, usual = config(spec)["fp16"], optim.USUAL_RULE
    return optim.ScaleRule(
        stated.get("loss_scale_window", usual.window),
        stated.get("hysteresis", usual.hysteresis),
        stated.get("consecutive_hysteresis", usual.refills),
        stated.get("min_loss_scale", usual.least),
    )


def clips_itself(spec: RunSpec) -> bool:
    """Returns whether our AdamW measures and clips the gradient: in fp32 and fp16 without ZeRO.

    DeepSpeed 0.19 is wrong there. In fp32 its `clip_grad_norm_` returns no norm, omits parameters
    of later pipeline stages that tp does not split, and counts the tied embedding's second copy. In
    fp16 FP16_UnfusedOptimizer looks for the tp marks on the gradients, which have none: it omits
    the parts of tp ranks other than 0 and counts the second copy.
    """
    return spec.precision in ("fp32", "fp16") and spec.layout.zero_stage == 0


def optimizer(
    parameters: Iterable[nn.Parameter],
    spec: RunSpec,
    counts: Callable[[nn.Parameter], bool] = lambda p: True,
    group: Any = None,
) -> torch.optim.Optimizer:
    """Returns the AdamW to hand to deepspeed.initialize."""
    if not clips_itself(spec):
        return optim.adamw(parameters, spec)
    return optim.adamw(
        parameters, spec, partial(clipping.ClippingAdamW, spec=spec, counts=counts, group=group)
    )


def adamw_of_experts(model: nn.Module, spec: RunSpec, _: Any) -> torch.optim.AdamW:
    """Returns AdamW over the parameters that AutoEP left and those that it made. ZeRO shards the
    experts over their own copies."""
    adam = optim.adamw(model.parameters(), spec)
    for number, group in enumerate(adam.param_groups):
        group["name"] = str(number)
    split = deepspeed.moe.utils.split_params_into_different_moe_groups_for_optimizer
    adam.param_groups = split(adam.param_groups)
    return adam


def connect() -> None:
    """Lets DeepSpeed use the process group that is there already."""
    # Otherwise, on CPUs, ZeRO-3 starts numactl to count NUMA nodes, once a bucket of gradients.
    os.environ.setdefault("LOCAL_SIZE", os.environ.get("LOCAL_WORLD_SIZE", "1"))
    deepspeed.init_distributed(dist_init_required=False, verbose=False)


@contextlib.contextmanager
def partitioned(spec: RunSpec, mpu: Any) -> Iterator[Callable]:
    """Lets modules that are built inside keep only this rank's part of each parameter, with ZeRO-3.
    Yields the function that returns what this rank holds of a parameter (see gpt.fill)."""
    connect()
    if spec.layout.zero_stage < 3:
        yield gpt.undivided
        return
    group = mpu.get_data_parallel_group() if mpu is not None else None
    with deepspeed.zero.Init(config_dict_or_path=config(spec), data_parallel_group=group, mpu=mpu):
        yield _held


def _held(parameter: nn.Parameter) -> gpt.Held:
    """Returns this rank's ZeRO-3 partition of a parameter, without its padding."""
    partition = parameter.ds_tensor
    parameter.ds_secondary_tensor = None  # hpZ's copy in the node: it is made again when needed
    start = dist.get_rank(parameter.ds_process_group) * partition.numel()
    return gpt.Held(partition[: max(0, parameter.ds_numel - start)], start)


class DeepSpeedEngine:
    """An engine around `deepspeed.initialize`: what both engines do alike once they have a model.

    mpu: the process groups of a model that is split over tp ranks. A subclass evaluates, and runs a
    step's micro-batches and the optimizer in `_train`; that returns what all ranks are told at its
    end, a `Reduced`.
    """

    def __init__(
        self,
        spec: RunSpec,
        device: torch.device,
        model: nn.Module,
        adam: torch.optim.Optimizer | Callable,
        mpu: Any = None,
    ):
        self.spec, self.device = spec, device
        self.fp16 = spec.precision == "fp16"
        self.facts: dict[str, Any] = {}  # of a subclass, for run.json
        self.engine, *_ = deepspeed.initialize(
            model=model, optimizer=adam, config=config(spec), mpu=mpu, dist_init_required=False
        )
        self.modules, self.outer = [self.engine.module], self.engine.optimizer
        if not isinstance(adam, torch.optim.Optimizer):  # what makes one, of replaced parameters
            adam = self.outer.optimizer
        self.adam = adam  # inside whatever DeepSpeed wrapped it in
        self.unfused = self.fp16 and spec.layout.zero_stage == 0  # FP16_UnfusedOptimizer
        if self.unfused:
            # While it is built, this optimizer steps once on zero gradients to make the moments.
            # That decays its fp32 weights: take them from the model again.
            self.outer.refresh_fp32_params()
            optim.set_adam_step(self.adam, 0)
        if self.fp16:
            # DeepSpeed 0.19 doubles the scale before it unscales gradients of the lower one, and
            # without ZeRO it knows no hysteresis. So `step` changes the scale, by everybody's rule.
            self.outer._update_scale = lambda *_: None
            self.scale_rule = scale_rule(spec)
            first_scale = float(self._scaler().cur_scale)
            self.loss_scale = optim.LossScale(first_scale, 0, self.scale_rule.hysteresis)

    def _scaler(self) -> Any:
        """Returns the object with fp16's scale and counts."""
        return self.outer.loss_scale_config if self.unfused else self.outer.loss_scaler

    def _scaled(self, loss: torch.Tensor) -> torch.Tensor:
        """Returns the loss with its gradient multiplied by fp16's scale. Without ZeRO, DeepSpeed
        0.19 divides the gradients by the scale but multiplies no loss with it."""
        if self.unfused and loss.requires_grad:
            scale = self._scaler().cur_scale
            loss.register_hook(lambda gradient: gradient * scale)
        return loss

    def step(self, batches: Iterator[Batch], lr: float, stop: Callable[[], bool]) -> StepResult:
        """Does one optimizer step; see `Engine.step`. `step` alone changes fp16's loss scale."""
        skipped_before = self.engine.skipped_steps
        scale = self.loss_scale.scale if self.fp16 else 1.0
        optim.set_lr(self.outer.param_groups, lr)
        loss, stopped = self._train(batches, stop)
        overflowed = self.engine.skipped_steps > skipped_before
        if self.fp16 and not config(self.spec)["fp16"].get("loss_scale"):  # which would be fixed
            self._set_scale(self.loss_scale.after(overflowed, self.scale_rule))
        if overflowed:
            return StepResult(loss, None, scale, skipped=True, stop=stopped)
        adam_clips = clips_itself(self.spec)
        norm = self.adam._global_grad_norm if adam_clips else self.engine.get_global_grad_norm()
        return StepResult(loss, None if norm is None else float(norm), scale, stop=stopped)

    def _set_scale(self, loss_scale: optim.LossScale) -> None:
        """Sets fp16's loss scale, here and in DeepSpeed's optimizer."""
        self.loss_scale = loss_scale
        self._scaler().cur_scale = loss_scale.scale

    def _trained(self) -> Iterator[tuple[nn.Parameter, dict[str, torch.Tensor], int]]:
        """Yields, for `pieces_of`, each parameter, this rank's fp32 tensors of it, and the number
        of their first element in the parameter.

        flat: the fp32 tensors of a whole partition, by kind. ZeRO and bf16 train flat partitions,
        in which all parameters lie one after the other.
        """
        outer, adam, parameters = self.outer, self.adam, self.engine.module.parameters()
        if self.spec.layout.zero_stage == 3:
            for parameter in parameters:
                group, at, size = outer.grad_position[outer.get_param_id(parameter)]
                start = dist.get_rank(parameter.ds_process_group) * size
                flat = optim.adam_tensors(adam, outer.fp32_partitioned_groups_flat[group])
                size = min(size, parameter.ds_numel - start)  # the last partitions are padded
                if size > 0:
                    own = slice(at, at + size)
                    yield parameter, {kind: t.detach()[own] for kind, t in flat.items()}, start
        elif hasattr(outer, "update_lp_params"):  # ZeRO 1 and 2, and DeepSpeed's bf16 optimizer
            for parameter in parameters:
                if (mapping := parameter._hp_mapping) is not None:
                    (partition,) = adam.param_groups[mapping.param_group_index]["params"]
                    fragment = mapping.hp_fragment_address
                    own = slice(fragment.start, fragment.start + fragment.numel)
                    flat = optim.adam_tensors(adam, partition)
                    tensors = {kind: t.detach()[own] for kind, t in flat.items()}
                    yield parameter, tensors, mapping.lp_fragment_address.start
        else:
            for parameter, master in self._masters():
                yield parameter, optim.adam_tensors(adam, master), 0

    def _masters(self) -> Iterator[tuple[nn.Parameter, torch.Tensor]]:
        """Yields, without ZeRO, each parameter and what AdamW updates for it: its fp32 master, or
        the parameter itself."""
        if not self.unfused:
            yield from ((p, p) for p in self.engine.module.parameters())
            return
        for groups in zip(self.outer.fp16_groups, self.outer.fp32_groups, strict=True):
            yield from zip(*groups, strict=True)

    def state(self) -> State:
        """Returns what this rank trains; without partitions every dp rank has the same."""
        layout = self.spec.layout
        is_partitioned = layout.zero_stage > 0 or hasattr(self.outer, "update_lp_params")
        shards = layout.dp if is_partitioned else 1
        pieces = pieces_of(self._trained(), layout, dist.get_rank(), shards)
        scaler = self.loss_scale._asdict() if self.fp16 else {}
        return State(pieces, optim.adam_step(self.adam), scaler)

    @torch.no_grad()
    def restore(self, adam_step: int, scaler: dict[str, float]) -> None:
        """Copies the filled fp32 weights to those that the model computes with; sets the counts."""
        outer = self.outer
        optim.set_adam_step(self.adam, adam_step)
        if scaler and self.fp16:
            self._set_scale(optim.LossScale.of(scaler, self.scale_rule))
        if self.spec.layout.zero_stage == 3:
            outer._partition_all_parameters()
            for group in range(len(outer.fp32_partitioned_groups_flat)):
                outer._reassign_or_swap_out_partitioned_parameters(group)
            if outer.persistent_parameters:
                outer.persistent_parameters[0].all_gather(outer.persistent_parameters)
        elif hasattr(outer, "update_lp_params"):
            outer.update_lp_params()
        elif self.unfused:
            for half, master in self._masters():
                half.data.copy_(master.data)

    def describe(self) -> dict[str, Any]:
        return {"optimizer": type(self.outer).__name__, **self.facts, "config": config(self.spec)}

    def close(self) -> None:
        with contextlib.suppress(AttributeError):  # DeepSpeed's is missing without ZeRO
            self.engine.destroy()
