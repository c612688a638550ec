"""megatron-core: GPTModel, its DDP and distributed optimizer, 1F1B and interleaved schedules."""
# ruff: noqa: E402  (megatron-core is patched before its modules are imported)

import itertools
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from parallel.checkpoint.contents import State, pieces_of
from parallel.config.run_spec import RunSpec
from parallel.engines import Batch, StepResult, clipping, layers, megatron_config, optim
from parallel.engines.cpu import import_megatron
from parallel.engines.kernels import compute_dtype, packs_documents
from parallel.engines.megatron_versions import batch_on_this_cp_rank
from parallel.measure.ranges import megatron_timer, region
from parallel.measure.step_parts import name_group

import_megatron()

from megatron.core import distributed, parallel_state
from megatron.core.optimizer import OptimizerConfig, clip_grads, get_megatron_optimizer
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.transformer.module import Float16Module
from megatron.core.utils import local_multi_tensor_l2_norm

if clip_grads.l2_norm_impl is local_multi_tensor_l2_norm:  # no Transformer Engine and no apex
    clip_grads.l2_norm_impl = clipping.whole_norm
    clip_grads.multi_tensor_scale_impl = clipping.scale


class MegatronEngine:
    """Trains megatron-core's GPTModel with its DDP, optimizer and pipeline schedules.

    chunks: this rank's model chunks, one per virtual pipeline stage. shares: how many ranks have a
    share of the loss. packs: whether documents of a micro-batch lie one after another in one row.
    """

    def __init__(self, spec: RunSpec, device: torch.device, kernels: str):
        self.spec, self.device, layout = spec, device, spec.layout
        cuda = device.type == "cuda"
        copies = layout.dp * layout.cp  # the ranks that hold the same parameters
        self.shares = copies * layout.tp  # of the loss
        dtype = compute_dtype(spec)
        self.packs = packs_documents(spec, kernels)
        config = megatron_config.start(spec, cuda)
        ddp = megatron_config.configured(
            distributed.DistributedDataParallelConfig,
            spec,
            cuda,
            grad_reduce_in_fp32=True,
            overlap_grad_reduce=cuda and copies > 1,
            overlap_param_gather=cuda and copies > 1 and layout.zero_stage == 1,
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
            self.chunks.append(distributed.DistributedDataParallel(config, ddp, model))
        self.modules = self.chunks
        modules = (m for chunk in self.chunks for m in chunk.modules())
        self.biased = [m for m in modules if getattr(m, "expert_bias", None) is not None]
        for router in self.biased:  # Float16Module rounded them
            for buffer in (router.expert_bias, router.local_tokens_per_expert):
                buffer.data = buffer.data.float()
        config.moe_router_enable_expert_bias = False  # `step` changes them, after the optimizer
        self.optimizer = get_megatron_optimizer(
            megatron_config.configured(
                OptimizerConfig,
                spec,
                cuda,
                lr=spec.lr,
                weight_decay=spec.weight_decay,
                adam_beta1=spec.beta1,
                adam_beta2=spec.beta2,
                adam_eps=spec.adam_eps,
                clip_grad=spec.clip_grad,
                params_dtype=dtype,
                bf16=dtype == torch.bfloat16,
                fp16=spec.precision == "fp16",
                initial_loss_scale=optim.LossScale().scale,
                loss_scale_window=optim.USUAL_RULE.window,
                hysteresis=optim.USUAL_RULE.hysteresis,
                min_loss_scale=optim.USUAL_RULE.least,
                use_distributed_optimizer=layout.zero_stage == 1,
                overlap_param_gather=ddp.overlap_param_gather,
            ),
            self.chunks,
            use_gloo_process_groups=False,
        )
        for optimizer in self._optimizers():
            optim.fuse(optimizer.optimizer)
        for optimizer in self._optimizers()[:-1]:  # the last gathers what each has updated
            optimizer.ddp_config = replace(ddp, overlap_param_gather=True)
        for group in self.optimizer.param_groups:  # Megatron-LM's scheduler does this every step
            group["weight_decay"] = spec.weight_decay * group["wd_mult"]
        config.timers = megatron_timer
        name_group(parallel_state.get_embedding_group(check_initialized=False), "embedding")
        name_group(parallel_state.get_data_parallel_group(with_context_parallel=True), "dp")
        if spec.model.experts:
            stage_group = parallel_state.get_expert_tensor_and_model_parallel_group()
            name_group(stage_group, "ep" if layout.ep > 1 else "etp")
            name_group(parallel_state.get_expert_model_parallel_group(), "ep")
            name_group(parallel_state.get_expert_tensor_parallel_group(), "etp")
            name_group(parallel_state.get_expert_data_parallel_group(), "expert_dp")
        config.grad_scale_func = self.optimizer.scale_loss
        config.finalize_model_grads_func = distributed.finalize_model_grads
        if ddp.overlap_grad_reduce:
            syncs = [chunk.no_sync for chunk in self.chunks]
            config.no_sync_func = syncs if layout.vpp > 1 else syncs[0]
        self.config, self.ddp_config = config, ddp
        self.schedule = get_forward_backward_func()

    def _run(self, batches: Iterator[Batch], n_micro: int, forward_only: bool) -> Tensor:
        """Runs the schedule over n_micro micro-batches, and returns this rank's share of their mean
        loss, a scalar."""
        layout = self.spec.layout
        vpp = layout.vpp
        feeds = list(itertools.tee(batches, vpp))
        losses = self.schedule(
            forward_step_func=self._forward,
            data_iterator=feeds if vpp > 1 else feeds[0],
            model=self.chunks if vpp > 1 else self.chunks[0],
            num_microbatches=n_micro,
            seq_length=self.spec.seq_len * (layout.micro_batch if self.packs else 1),
            micro_batch_size=1 if self.packs else layout.micro_batch,
            forward_only=forward_only,
        )
        # Only the last stage has losses; every tp, cp and dp rank of it has a copy or a share.
        if losses:
            return torch.stack([loss["loss"] for loss in losses]).mean()
        return torch.zeros((), device=self.device)  # a copy to there would wait for all its work

    def _forward(self, batches: Iterator[Batch], model: Any) -> tuple[Tensor, Any]:
        """Runs one micro-batch through a model chunk. Returns its output and the function that
        makes the loss of it, as megatron-core's schedules ask for them."""
        tokens_BS, labels_BS = next(batches)
        if self.packs:
            packed = layers.packed(self.spec, tokens_BS, labels_BS)
            return model(attention_mask=None, **packed), _mean
        positions_BS, mask = layers.positions_and_mask(self.spec, tokens_BS)
        # A cp rank has one early and one late chunk of each sequence, for equal causal attention.
        rank_batch = batch_on_this_cp_rank(
            {"input_ids": tokens_BS, "position_ids": positions_BS, "labels": labels_BS}
        )
        return model(attention_mask=mask, **rank_batch), _mean

    def step(self, batches: Iterator[Batch], lr: float, stop: Callable[[], bool]) -> StepResult:
        """Does one optimizer step; see `Engine.step`. Gradients lie in megatron-core's buffers."""
        with region("optimizer"):
            for chunk in self.chunks:
                chunk.zero_grad_buffer()
            self.optimizer.zero_grad()
        share = self._run(batches, self.spec.layout.n_micro, forward_only=False)
        optim.set_lr(self.optimizer.param_groups, lr)
        scale = self.optimizer.get_loss_scale()  # a tensor that the optimizer replaces, not writes
        with region("optimizer"):
            stepped, norm, _ = self.optimizer.step()
        # Only now: reading a number waits for the device, and the optimizer would start late.
        loss, stopped = optim.mean_over_ranks(share, self.shares, stop())
        norm = float(norm) if stepped else None
        if self.biased:
            self._balance(stepped)
        return StepResult(loss, norm, float(scale), not stepped, stopped)

    def _balance(self, stepped: bool) -> None:
        """Steps the biases of the experts, unless the optimizer skipped its step, and sets the
        counts of their tokens to 0."""
        tokens = [router.local_tokens_per_expert for router in self.biased]
        if stepped:
            group = parallel_state.get_tensor_and_data_parallel_group(with_context_parallel=True)
            optim.balance([router.expert_bias for router in self.biased], tokens, group)
        torch._foreach_zero_(tokens)

    @torch.no_grad()
    def evaluate(self, batches: Iterator[Batch], n: int) -> float:
        """Returns the mean loss over n micro-batches of every dp rank; see `Engine.evaluate`."""
        for chunk in self.chunks:
            chunk.eval()
        share = self._run(batches, n, forward_only=True)
        for chunk in self.chunks:
            chunk.train()
        return optim.mean_over_ranks(share, self.shares).loss

    def _optimizers(self) -> list[Any]:
        """Returns the optimizers that megatron-core chained, or the only one."""
        return getattr(self.optimizer, "chained_optimizers", [self.optimizer])

    def state(self) -> State:
        """Returns what this rank trains; fp16's scale is taken from megatron-core's scaler."""
        layout, scaler = self.spec.layout, {}
        shards = layout.dp * layout.cp if layout.zero_stage == 1 else 1
        pieces = pieces_of(self._trained(), layout, dist.get_rank(), shards)
        pieces += optim.biases_of(((f"{m.block}.mlp.router", m) for m in self.biased), layout)
        step = max(optim.adam_step(optimizer.optimizer) for optimizer in self._optimizers())
        if self.spec.precision == "fp16":
            stored = self._optimizers()[0].grad_scaler.state_dict()
            good_steps, left = stored["growth_tracker"], stored["hysteresis_tracker"]
            stored_scale = {"scale": stored["scale"], "good_steps": good_steps, "hysteresis": left}
            scaler = optim.LossScale.of(stored_scale)._asdict()
        return State(pieces, step, scaler)

    def _trained(self) -> Iterator[tuple[Tensor, dict[str, Tensor], int]]:
        """Yields, for `pieces_of`, each parameter, the fp32 tensors of it that Adam updates, and
        the number of their first element in the parameter."""
        for optimizer in self._optimizers():
            adam = optimizer.optimizer
            if self.spec.layout.zero_stage == 1:
                for p, (group, number) in optimizer.model_param_group_index_map.items():
                    start = optimizer._get_model_param_range_map(p)["param"].start
                    partition = adam.param_groups[group]["params"][number]
                    yield p, optim.adam_tensors(adam, partition), start
                continue
            updated = {id(p) for group in adam.param_groups for p in group["params"]}
            for p in (p for chunk in self.chunks for p in chunk.parameters()):
                master = getattr(p, "main_param", p)
                if id(master) in updated:
                    yield p, optim.adam_tensors(adam, master), 0

    @torch.no_grad()
    def restore(self, adam_step: int, scaler: dict[str, float]) -> None:
        """Sets the optimizers' steps and fp16's scale, and copies the filled fp32 weights to the
        model's."""
        for optimizer in self._optimizers():
            optim.set_adam_step(optimizer.optimizer, adam_step)
            if self.spec.precision != "fp32" or self.spec.layout.zero_stage == 1:
                optimizer._copy_main_params_to_model_params()
            if scaler and self.spec.precision == "fp16":
                stored = optimizer.grad_scaler.state_dict()
                scale = optim.LossScale.of(scaler)
                stored["scale"].fill_(scale.scale)
                stored["growth_tracker"] = scale.good_steps
                stored["hysteresis_tracker"] = scale.hysteresis
                optimizer.grad_scaler.load_state_dict(stored)
        if self.spec.layout.zero_stage == 1:
            for chunk in self.chunks:
                chunk.start_param_sync(force_sync=True)

    def describe(self) -> dict[str, Any]:
        """Returns, for run.json, the schedule's name and what megatron-core was asked to do."""
        return {
            "schedule": self.schedule.__name__,
            "overlap_grad_reduce": self.ddp_config.overlap_grad_reduce,
            "recompute_norms": self.spec.computes_norms_again,
            **megatron_config.options(self.config),
        }

    def close(self) -> None:
        parallel_state.destroy_model_parallel()


def _mean(losses_BS: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    """Returns the loss to differentiate and the loss to report, as megatron-core asks for them."""
    loss = losses_BS.float().mean()
    # The schedule multiplies by cp, in place, and the gradients are averaged over dp x cp ranks.
    cp = parallel_state.get_context_parallel_world_size()
    return loss / cp, {"loss": loss.detach()}


build = MegatronEngine
