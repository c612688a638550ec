"""The reference GPT's starting values for megatron-core's parameters, each rank's part of them."""
# ruff: noqa: E402  (megatron-core is patched before its modules are imported)

import math
import re

import torch
from torch import Tensor, nn

from models import gpt
from models.config import parameter_shapes
from models.megatron_names import MEGATRON_LAYER
from parallel.checkpoint.contents import is_split
from parallel.config.run_spec import RunSpec
from parallel.engines.clipping import summed_over
from parallel.engines.cpu import import_megatron

import_megatron()

from megatron.core import parallel_state, tensor_parallel
from megatron.core.parallel_state import get_tensor_model_parallel_group as tp_group

# An expert's parameter: of a linear layer of its own, or one of several in a grouped one.
_EXPERT = re.compile(
    r"mlp\.experts\.(local_experts\.(?P<alone>\d+)\.)?"
    r"(?P<inner>linear_fc[12]\.(weight|bias))(?P<grouped>\d*)"
)


def reference_value(
    spec: RunSpec, parameter: nn.Parameter, start: int, n: int, *names: str
) -> Tensor:
    """Returns the starting values, [n] from element `start` on, of `parameter`; marks it, and gives
    it its `references`.

    The values are this tp rank's parts of the reference parameters `names`, one after the other (a
    gated model's fc1 is its part of the gate, then its part of up).

    Marks a parameter that is split, as megatron-core's own initialisation does. An unmarked one
    counts as a copy, and only tp rank 0's gradient of it enters the norm. An expert's is split over
    etp ranks, and none of tp's other ranks has a copy. It is marked as reduced among its own
    copies, which megatron-core 0.16 forgets where ep is 1 and etp is not tp. In DeepSpeed all ranks
    of a stage have all experts, and the mark would name a group that is not there.
    """
    group, of_expert = tp_group(), ".experts." in names[0]
    if of_expert:
        group = parallel_state.get_expert_tensor_parallel_group()
        parameter.allreduce = spec.engine != "megatron"
    tp, rank = group.size(), group.rank()
    rows, *columns = getattr(parameter, "ds_shape", parameter.shape)  # ZeRO-3 empties parameters
    part = (rows // len(names), *columns)
    parameter.references, values = [], []  # the first for a checkpoint's pieces (see pieces_of)
    for name in names:
        shape = parameter_shapes(spec.model)[name]
        padded = (spec.padded_vocab if name in gpt.WITH_VOCABULARY else shape[0], *shape[1:])
        split = [axis for axis, size in enumerate(part) if size != padded[axis]]
        offset = tuple(rank * size if axis in split else 0 for axis, size in enumerate(part))
        parameter.references.append({"name": name, "shape": shape, "offset": offset, "part": part})
        size = math.prod(part)
        first, last = min(max(start, 0), size), min(max(start + n, 0), size)
        box = name, spec.seed, offset, part
        values.append(gpt.starting_values(spec.model, *box, first, last - first))
        start -= size
    if (split or of_expert) and not is_split(parameter):
        dimension = split[0] if split else 0
        tensor_parallel.set_tensor_model_parallel_attributes(parameter, True, dimension, 1)
    of_heads = names[0].split(".")[-2] in ("q_norm", "k_norm")
    if of_heads and tp > 1 and spec.engine != "megatron":  # there megatron-core does it
        parameter.register_hook(summed_over(group))
    return values[0] if len(values) == 1 else torch.cat(values)


def layer_value(
    spec: RunSpec, index: int, name: str, parameter: nn.Parameter, start: int, n: int
) -> Tensor:
    """Returns `reference_value` of the parameter `name` of megatron-core's layer `index` (from
    0)."""
    expert = ""
    if match := _EXPERT.fullmatch(name):
        n_experts = spec.model.experts.num_experts // spec.layout.ep
        number = int(match["alone"] or match["grouped"])
        rank = parallel_state.get_expert_model_parallel_rank()
        name, expert = f"mlp.{match['inner']}", f"experts.{rank * n_experts + number}."
    reference = MEGATRON_LAYER[name].replace("mlp.", f"mlp.{expert}", 1)
    is_gated = ".up." in reference and spec.model.gated
    names = (reference.replace(".up.", ".gate."), reference) if is_gated else (reference,)
    names = tuple(f"blocks.{index}.{inner}" for inner in names)
    return reference_value(spec, parameter, start, n, *names)
