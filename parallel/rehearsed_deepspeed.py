"""What DeepSpeed needs to be rehearsed: without the numbers that ranks tell each other."""
# ruff: noqa: I001  (deepspeed comes after deepspeed_common)

import math
from collections.abc import Callable
from typing import Any

import torch

from models.tensor_files import DTYPES
from parallel.config.run_spec import RunSpec
from parallel.engines import deepspeed_common

from deepspeed.accelerator import get_accelerator
from deepspeed.runtime import utils
from deepspeed.runtime.pipe.engine import PipelineEngine
from deepspeed.runtime.zero import partition_parameters, partitioned_param_coordinator, stage3


def redirect(spec: RunSpec, in_host_memory: Callable[[torch.Tensor], None]) -> None:
    """Patches DeepSpeed in this process. in_host_memory: called with each tensor that DeepSpeed
    pins there, with offload."""
    shape = (spec.seq_len, spec.layout.micro_batch, spec.model.hidden)  # [S, B, H] between stages
    dtype = DTYPES[spec.precision]

    def received(engine: Any, _: int) -> Any:
        """Returns the buffers for a stage's input, of shapes that the stage before would send."""
        if not engine.is_pipe_partitioned:
            return torch.empty(shape, dtype=dtype, requires_grad=True)
        tp = engine.grid.get_slice_parallel_world_size()
        own_part = torch.empty(math.prod(shape) // tp, dtype=dtype)
        return torch.empty(len(shape) + 4 + tp, dtype=torch.int64), own_part

    def from_meta(meta: Any, local_part: torch.Tensor, group: Any, device: Any = None) -> Any:
        """Returns the tensor of this part, whose `meta` has no numbers that could be read."""
        tensor = object.__new__(utils.PartitionedTensor)
        tensor.group, tensor.num_parts, tensor.rank = group, group.size(), group.rank()
        tensor.even_split = math.prod(shape) % group.size() == 0
        tensor.orig_size, tensor.orig_device = list(shape), torch.device("cpu")
        tensor.local_data = local_part.detach()
        tensor.partition = utils.partition_uniform(math.prod(shape), group.size())
        return tensor

    def pinned(tensor: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
        in_host_memory(tensor)
        return tensor

    # Ranks compare lists of numbers; its CPU accelerator refuses fp16.
    for module in (partition_parameters, partitioned_param_coordinator, stage3):
        module.assert_ints_same_as_other_ranks = lambda _: None
    get_accelerator().is_fp16_supported = lambda: True
    deepspeed_common.pins_host_memory = True
    get_accelerator().pin_memory = pinned
    PipelineEngine._recv_tensor_meta = received
    utils.PartitionedTensor.from_meta = staticmethod(from_meta)
