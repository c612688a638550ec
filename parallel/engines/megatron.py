"""megatron-core: GPTModel, its DDP and distributed optimizer, 1F1B and interleaved schedules."""

import itertools
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.distributed import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.transformer.module import Float16Module
from torch import Tensor

from parallel import layers
from parallel.breakdown import name_group
from parallel.checkpointer import State, adam_step, adam_tensors, hold, set_adam_step, share
from parallel.engines import Batch, StepResult
from parallel.optim import set_lr
from parallel.ranges import MegatronTimers, region
from parallel.spec import RunSpec


class MegatronEngine:
    def __init__(self, spec: RunSpec, device: torch.device, kernels: str):
        self.spec, self.device, layout = spec, device, spec.layout
        cuda = device.type == "cuda"
        layers.init_groups(spec)
        config = layers.transformer_config(spec, cuda)
        ddp = DistributedDataParallelConfig(
            grad_reduce_in_fp32=True,
            overlap_grad_reduce=cuda and layout.dp > 1,
            overlap_param_gather=cuda and layout.dp > 1 and layout.zero_stage == 1,
            use_distributed_optimizer=layout.zero_stage == 1,
        )
        self.chunks = []
        for chunk in range(layout.vpp):
            vp_stage = chunk if layout.vpp > 1 else None
            model = layers.gpt_model(
                spec,
                config,
                kernels,
                pre_process=parallel_state.is_pipeline_first_stage(False, vp_stage),
                post_process=parallel_state.is_pipeline_last_stage(False, vp_stage),
                vp_stage=vp_stage,
            ).to(device)
            if spec.precision != "fp32":
                model = Float16Module(config, model)
            self.chunks.append(DistributedDataParallel(config, ddp, model))
        self.optimizer = get_megatron_optimizer(
            OptimizerConfig(
                optimizer="adam",
                lr=spec.lr,
                min_lr=spec.min_lr,
                weight_decay=spec.weight_decay,
                adam_beta1=spec.beta1,
                adam_beta2=spec.beta2,
                adam_eps=spec.adam_eps,
                clip_grad=spec.clip_grad,
                params_dtype=layers.DTYPES[spec.precision],
                bf16=spec.precision == "bf16",
                fp16=spec.precision == "fp16",
                initial_loss_scale=2.0**16,
                use_distributed_optimizer=layout.zero_stage == 1,
                overlap_param_gather=ddp.overlap_param_gather,
            ),
            self.chunks,
            use_gloo_process_groups=False,
        )
        for group in self.optimizer.param_groups:  # Megatron-LM's scheduler does this every step
            group["weight_decay"] = spec.weight_decay * group["wd_mult"]
        config.timers = MegatronTimers()
        name_group(parallel_state.get_embedding_group(check_initialized=False), "embedding")
        config.grad_scale_func = self.optimizer.scale_loss
        config.finalize_model_grads_func = finalize_model_grads
        if ddp.overlap_grad_reduce:
            syncs = [chunk.no_sync for chunk in self.chunks]
            config.no_sync_func = syncs if layout.vpp > 1 else syncs[0]
        self.config, self.ddp_config = config, ddp
        self.schedule = get_forward_backward_func()

    def _run(self, batches: Iterator[Batch], n_micro: int, forward_only: bool) -> float:
        """The schedule over n_micro micro-batches; their mean loss over all ranks."""
        vpp = self.spec.layout.vpp
        feeds = list(itertools.tee(batches, vpp))
        losses = self.schedule(
            forward_step_func=self._forward,
            data_iterator=feeds if vpp > 1 else feeds[0],
            model=self.chunks if vpp > 1 else self.chunks[0],
            num_microbatches=n_micro,
            seq_length=self.spec.seq_len,
            micro_batch_size=self.spec.layout.micro_batch,
            forward_only=forward_only,
        )
        # Only the last stage has losses; every tp and dp rank of it has its own copy or share.
        mine = torch.stack([loss["loss"] for loss in losses]).mean() if losses else torch.zeros(())
        total = mine.float().reshape(1).to(self.device)
        dist.all_reduce(total)
        return float(total) / (self.spec.layout.tp * self.spec.layout.dp)

    def _forward(self, batches: Iterator[Batch], model: Any) -> tuple[Tensor, Any]:
        tokens_BS, labels_BS = next(batches)
        output = model(tokens_BS, layers.position_ids(tokens_BS), None, labels=labels_BS)
        return output, _mean

    def step(self, batches: Iterator[Batch], lr: float) -> StepResult:
        with region("optimizer"):
            for chunk in self.chunks:
                chunk.zero_grad_buffer()
            self.optimizer.zero_grad()
        loss = self._run(batches, self.spec.layout.n_micro, forward_only=False)
        set_lr(self.optimizer.param_groups, lr)
        scale = float(self.optimizer.get_loss_scale())
        with region("optimizer"):
            stepped, norm, _ = self.optimizer.step()
        return StepResult(loss, float(norm) if stepped else None, scale, not stepped)

    @torch.no_grad()
    def evaluate(self, batches: Iterator[Batch], n: int) -> float:
        for chunk in self.chunks:
            chunk.eval()
        loss = self._run(batches, n, forward_only=True)
        for chunk in self.chunks:
            chunk.train()
        return loss

    def _optimizers(self) -> list[Any]:
        return getattr(self.optimizer, "chained_optimizers", [self.optimizer])

    def state(self) -> State:
        layout, rank, held, step = self.spec.layout, dist.get_rank(), [], 0
        partitioned = layout.zero_stage == 1
        for optimizer in self._optimizers():
            adam = optimizer.optimizer
            for p, master, start in self._masters(optimizer):
                copies = share(layout, rank, layers.is_split(p), partitioned)
                if layers.is_tied_copy(p, layout, rank):
                    copies = (0, 0)
                held += hold(
                    **p.reference, start=start, tensors=adam_tensors(adam, master), share=copies
                )
            step = max(step, adam_step(adam))
        scaler = {}
        if self.spec.precision == "fp16":
            found = self._optimizers()[0].grad_scaler.state_dict()
            scaler = {"scale": float(found["scale"]), "good_steps": int(found["growth_tracker"])}
            scaler["hysteresis"] = int(found["hysteresis_tracker"])
        return State(held, step, scaler, layers.random_tracker())

    def _masters(self, optimizer: Any) -> Iterator[tuple[Tensor, Tensor, int]]:
        """Parameters, the fp32 tensor that Adam updates (of) each, and where in it that begins."""
        if self.spec.layout.zero_stage == 1:
            for p, (group, order) in optimizer.model_param_group_index_map.items():
                start = optimizer._get_model_param_range_map(p)["param"].start
                yield p, optimizer.optimizer.param_groups[group]["params"][order], start
            return
        updated = {id(p) for g in optimizer.optimizer.param_groups for p in g["params"]}
        for p in (p for chunk in self.chunks for p in chunk.parameters()):
            master = getattr(p, "main_param", p)
            if id(master) in updated:
                yield p, master, 0

    @torch.no_grad()
    def restore(self, adam_step: int, scaler: dict[str, float]) -> None:
        for optimizer in self._optimizers():
            set_adam_step(optimizer.optimizer, adam_step)
            if self.spec.precision != "fp32" or self.spec.layout.zero_stage == 1:
                optimizer._copy_main_params_to_model_params()
            if scaler and self.spec.precision == "fp16":
                found = optimizer.grad_scaler.state_dict()
                found["scale"].fill_(scaler["scale"])
                found["growth_tracker"] = int(scaler["good_steps"])
                left = scaler.get("hysteresis", found["hysteresis_tracker"])
                found["hysteresis_tracker"] = int(left)
                optimizer.grad_scaler.load_state_dict(found)
        if self.spec.layout.zero_stage == 1:
            for chunk in self.chunks:
                chunk.start_param_sync(force_sync=True)

    def describe(self) -> dict[str, Any]:
        return {
            "schedule": self.schedule.__name__,
            "overlap_grad_reduce": self.ddp_config.overlap_grad_reduce,
            "batch_p2p_comm": self.config.batch_p2p_comm,
        }

    def close(self) -> None:
        parallel_state.destroy_model_parallel()


def _mean(losses_BS: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    """megatron-core's loss function: what to differentiate, and what to report."""
    loss = losses_BS.float().mean()
    # A copy: the schedule divides what it differentiates in place.
    return loss, {"loss": loss.detach().clone()}


build = MegatronEngine
