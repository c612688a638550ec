"""DeepSpeed's PipelineModule over megatron-core's tensor-parallel layers; ZeRO stage 0 or 1."""

import contextlib
import io
from collections.abc import Callable, Iterator
from functools import partial

import torch
import torch.distributed as dist

from parallel.checkpoint.contents import is_split
from parallel.config.run_spec import RunSpec
from parallel.engines import Batch, Reduced, layers, megatron_config, pipeline_layers
from parallel.engines import deepspeed_common as common
from parallel.engines.optim import mean_over_ranks
from parallel.measure.ranges import within
from parallel.measure.step_parts import name_group

from deepspeed.pipe import LayerSpec, PipelineModule, TiedLayerSpec  # isort: skip  (after common)
from deepspeed.runtime.pipe import schedule  # isort: skip
from deepspeed.runtime.pipe.topology import PipeModelDataParallelTopology  # isort: skip


class DeepSpeedPipeEngine(common.DeepSpeedEngine):
    """Trains the GPT as a list of layers that DeepSpeed's PipelineModule cuts into stages."""

    def __init__(self, spec: RunSpec, device: torch.device, kernels: str):
        common.connect()
        layout = spec.layout
        self.config = config = megatron_config.start(spec, device.type == "cuda")
        if spec.model.tied:
            embedding = ("word", pipeline_layers.WordEmbedding, spec, config)
            tied = partial(TiedLayerSpec, *embedding, tied_weight_attr="embedding.weight")
            first, last = tied(), tied(forward_fn=pipeline_layers.WordEmbedding.logits)
        else:
            first = LayerSpec(pipeline_layers.WordEmbedding, spec, config)
            last = LayerSpec(pipeline_layers.OutputLayer, spec, config)
        rotary = layers.rotary(spec.model)
        model = []
        if spec.model.position == "learned":
            model.append(LayerSpec(pipeline_layers.PositionEmbedding, spec, config))
        for index in range(spec.model.n_layer):
            model.append(LayerSpec(pipeline_layers.Block, spec, config, kernels, index, rotary))
        model.append(LayerSpec(pipeline_layers.FinalNorm, spec, config, kernels))
        with contextlib.redirect_stdout(io.StringIO()):  # it prints the list of its layers
            module = PipelineModule(
                [first, *model, last],
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
                and (is_split(p) or grid.get_slice_parallel_rank() == 0)
            ),
            group=grid.get_model_parallel_group(),
        )
        super().__init__(spec, device, module, adam)
        self.facts = {"stage_boundaries": [int(p) for p in module.parts]}
        self.facts |= megatron_config.options(config)
        for tied_weights in module.tied_comms.values():
            name_group(tied_weights["group"], "embedding")
        # So that a breakdown sees the regions of a step.
        regions = {
            schedule.ForwardPass: "forward",
            schedule.BackwardPass: "backward",
            schedule.OptimizerStep: "optimizer",
        }
        methods = self.engine._INSTRUCTION_MAP
        timed = {
            instruction: within(region)(methods[instruction])
            for instruction, region in regions.items()
        }
        self.engine._INSTRUCTION_MAP = methods | timed

    def _loss(self, logits_SBV: torch.Tensor, labels_BS: torch.Tensor) -> torch.Tensor:
        """Returns the mean loss, whose gradient fp16's scale multiplies where DeepSpeed does
        not."""
        return self._scaled(pipeline_layers.mean_loss(self.config, logits_SBV, labels_BS))

    def _train(self, batches: Iterator[Batch], stop: Callable[[], bool]) -> Reduced:
        """Runs DeepSpeed's schedule over a step's micro-batches and the optimizer; returns the mean
        loss and whether any rank stops."""
        if self.spec.model.experts:
            scale = self._scaler().cur_scale if self.fp16 else 1.0
            balance_scale = float(scale) / self.spec.layout.n_micro
            pipeline_layers.scale_balance(torch.tensor(balance_scale, device=self.device))
        mean = self.engine.train_batch(batches)  # DeepSpeed has told it to all ranks
        return mean_over_ranks(mean, dist.get_world_size(), stop())

    def evaluate(self, batches: Iterator[Batch], n: int) -> float:
        return float(self.engine.eval_batch(batches, num_micro_batches=n))


build = DeepSpeedPipeEngine
