"""DeepSpeed's PipelineModule over megatron-core's tensor-parallel layers; ZeRO stage 0 or 1."""

import contextlib
import io
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from parallel import deepspeed_common as common
from parallel import layers
from parallel.breakdown import name_group
from parallel.checkpointer import State, share
from parallel.engines import Batch, StepResult
from parallel.optim import set_lr
from parallel.ranges import timed
from parallel.spec import RunSpec

from deepspeed.pipe import LayerSpec, PipelineModule, TiedLayerSpec  # isort: skip  (after common)
from deepspeed.runtime.pipe import schedule  # isort: skip
from deepspeed.runtime.pipe.topology import PipeModelDataParallelTopology  # isort: skip


class DeepSpeedPipeEngine:
    def __init__(self, spec: RunSpec, device: torch.device, kernels: str):
        self.spec, self.device, layout = spec, device, spec.layout
        common.connect()
        layers.init_groups(spec)
        config = layers.transformer_config(spec, device.type == "cuda")
        tied = partial(
            TiedLayerSpec,
            "word",
            layers.WordEmbedding,
            spec,
            config,
            tied_weight_attr="embedding.weight",
        )
        with contextlib.redirect_stdout(io.StringIO()):  # it prints the list of its layers
            module = PipelineModule(
                [
                    tied(),
                    LayerSpec(layers.PositionEmbedding, spec, config),
                    *(
                        LayerSpec(layers.Block, spec, config, kernels, index)
                        for index in range(spec.model.n_layer)
                    ),
                    LayerSpec(layers.FinalNorm, spec, config, kernels),
                    tied(forward_fn=layers.WordEmbedding.logits),
                ],
                topology=PipeModelDataParallelTopology(layout.pp, layout.tp, layout.dp),
                loss_fn=self._loss,
                # Equal numbers of blocks per stage, as Megatron cuts; not of parameters.
                partition_method="type:Block",
                activation_checkpoint_interval=1 if layout.recompute == "full" else 0,
                checkpointable_layers=["Block"],
            )
        grid = module.mpu()
        adam = common.optimizer(
            module.parameters(),
            spec,
            counts=lambda p: (
                not getattr(p, "ds_pipe_replicated", False)
                and (layers.is_split(p) or grid.get_slice_parallel_rank() == 0)
            ),
            group=grid.get_model_parallel_group(),
        )
        self.engine = common.initialize(spec, module, adam, mpu=None)
        for tied_weights in module.tied_comms.values():
            name_group(tied_weights["group"], "embedding")
        self.engine._INSTRUCTION_MAP = self.engine._INSTRUCTION_MAP | {
            instruction: timed(part, self.engine._INSTRUCTION_MAP[instruction])
            for instruction, part in (
                (schedule.ForwardPass, "forward"),
                (schedule.BackwardPass, "backward"),
                (schedule.OptimizerStep, "optimizer"),
            )
        }

    def _loss(self, logits_SBV: torch.Tensor, labels_BS: torch.Tensor) -> torch.Tensor:
        return common.scaled(self.spec, self.engine, layers.mean_loss(logits_SBV, labels_BS))

    def step(self, batches: Iterator[Batch], lr: float) -> StepResult:
        before = common.before_step(self.spec, self.engine)
        set_lr(self.engine.optimizer.param_groups, lr)
        loss = float(self.engine.train_batch(batches))
        return StepResult(loss, *common.after_step(self.spec, self.engine, before))

    def evaluate(self, batches: Iterator[Batch], n: int) -> float:
        return float(self.engine.eval_batch(batches, num_micro_batches=n))

    def state(self) -> State:
        layout, rank = self.spec.layout, dist.get_rank()

        def place(p: torch.nn.Parameter, partitioned: bool) -> dict[str, Any]:
            copies = share(layout, rank, layers.is_split(p), partitioned)
            copies = (0, 0) if layers.is_tied_copy(p, layout, rank) else copies
            return {**p.reference, "share": copies}

        return common.state(self.spec, self.engine, place, layers.random_tracker())

    def restore(self, adam_step: int, scaler: dict[str, float]) -> None:
        common.restore(self.spec, self.engine, adam_step, scaler)

    def describe(self) -> dict[str, Any]:
        return {
            "optimizer": type(self.engine.optimizer).__name__,
            "stage_boundaries": [int(p) for p in self.engine.module.parts],
            "config": common.config(self.spec),
        }

    def close(self) -> None:
        self.engine.destroy()


build = DeepSpeedPipeEngine
