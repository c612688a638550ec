"""The one-device model a data-parallel engine trains: ours or Hugging Face's, same weights."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor, nn

from models import gpt
from models.config import GPTConfig, parameter_shapes
from parallel.config.settings import RunSpec
from parallel.engines import Batch
from parallel.measure.ranges import region


def build_reference(
    spec: RunSpec, gathered: Callable[[nn.Parameter], AbstractContextManager] = nullcontext
) -> nn.Module:
    """The run's model in fp32, called as (tokens, labels) -> mean loss. gathered: see gpt.fill."""
    recompute = spec.recompute == "full"
    if spec.implementation == "hf":
        from models import hf_model

        model = hf_model.HuggingFaceGPT(spec.model, recompute, spec.end_of_text)
        hf_model.initialise(model, spec.seed, gathered)
    else:
        model = gpt.GPT(spec.model, recompute, spec.end_of_text, spec.padded_vocab)
        gpt.initialise(model, spec.seed, gathered)
    name_parameters(model, spec.model)
    return model


def name_parameters(model: nn.Module, config: GPTConfig) -> None:
    """Give each parameter what `pieces_of` reads: its name and shape; it is there whole, the
    padding of the vocabulary too. Hugging Face's have names and shapes of their own."""
    shapes = parameter_shapes(config)
    for name, p in model.named_parameters():
        part = tuple(getattr(p, "ds_shape", p.shape))  # ZeRO-3 empties parameters
        shape = shapes.get(name, part)
        offset = (0,) * len(shape)
        p.references = [{"name": name, "shape": shape, "offset": offset, "part": part}]


@torch.no_grad()
def evaluate(
    model: nn.Module,
    batches: Iterator[Batch],
    n: int,
    device: torch.device,
    autocast: Callable[[], AbstractContextManager] = nullcontext,
) -> Tensor:
    """The mean loss of n micro-batches on this rank, a scalar."""
    total = torch.zeros((), device=device)
    model.eval()
    for _ in range(n):
        batch = next(batches)
        with region("forward"), autocast():
            total += model(*batch) / n
    model.train()
    return total
