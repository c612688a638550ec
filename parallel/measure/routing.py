"""Where routers send tokens: how many chose each expert, counted in the steps that have a line.

An expert's load is its tokens over the mean of its layer's experts: 1 where all have as many. A
layer takes as long as its fullest expert where these are on several ranks, so `expert_load` is the
largest. Letters: L layers with experts, E experts.
"""

from collections.abc import Iterable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from parallel.config.run_spec import RunSpec
from parallel.measure.ranges import region

ROUTERS = ("MixtureOfExperts", "AutoEPMoELayer", "TopKRouter")  # ours, DeepSpeed's, megatron-core's


class Routing:
    """Counts each expert's tokens on the device; every rank calls all of it alike.

    modules: what this rank computes with. counting: whether the step that runs is counted.
    tokens_LE: of this rank's part of the step; after `read` of the whole step.
    """

    def __init__(self, spec: RunSpec, modules: Iterable[nn.Module], device: torch.device):
        assert (experts := spec.model.experts)
        self.spec, self.counting = spec, False
        self.blocks = [name for name, has in spec.model.blocks.items() if has]
        shape = (len(self.blocks), experts.num_experts)
        self.tokens_LE = torch.zeros(shape, dtype=torch.int64, device=device)
        layers = (m for module in modules for m in module.modules() if type(m).__name__ in ROUTERS)
        for index, layer in enumerate(layers):
            if block := getattr(layer, "block", ""):  # a pipeline stage has some alone
                index = self.blocks.index(block)
            layer.register_forward_hook(partial(self._add, self.tokens_LE[index]))

    def _add(self, sum_E: Tensor, layer: nn.Module, _: Any, output: tuple[Tensor, Tensor]) -> None:
        """Adds the tokens that a layer's forward pass sent to each expert to `sum_E`."""
        # A forward pass inside a backward pass is recomputation: it was counted before.
        if self.counting and torch._C._current_graph_task_id() == -1:
            has_counts = hasattr(layer, "tokens_E")  # megatron-core's says what a token chose
            sum_E += layer.tokens_E if has_counts else output[1].sum(0)

    def begin(self, counting: bool) -> None:
        """Begins a step."""
        self.counting = counting
        self.tokens_LE.zero_()

    def read(self) -> float:
        """Returns the step's `expert_load`, that of the layer with the largest. It waits for the
        device, so an engine calls it after it has read the step's loss and norm."""
        self.counting = False
        if dist.get_world_size() > 1:
            with region("control"):
                dist.all_reduce(self.tokens_LE)
        return float(self.loads_L().max())

    def loads_L(self) -> Tensor:
        """Returns the tokens of each layer's fullest expert over the mean of its experts."""
        tokens_LE = self.tokens_LE.double()
        return tokens_LE.amax(1) / tokens_LE.mean(1)

    def facts(self) -> dict[str, Any]:
        """Returns what training_metrics.json says of the step that was read last, by block."""
        experts, tokens_LE = self.spec.model.experts, self.tokens_LE.tolist()
        if not any(map(sum, tokens_LE)):  # a checkpoint was loaded that had all steps
            return {"routing": self.spec.routing}
        choices = self.spec.tokens_per_step * experts.moe_router_topk * len(self.blocks)
        return {
            "routing": self.spec.routing,
            "dropped": 1 - sum(map(sum, tokens_LE)) / choices,
            "expert_load": dict(zip(self.blocks, self.loads_L().tolist(), strict=True)),
            "tokens_per_expert": dict(zip(self.blocks, tokens_LE, strict=True)),
        }
