"""The one-device model a data-parallel engine trains: ours or Hugging Face's, same weights."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

from torch import nn

from models import gpt
from parallel.spec import RunSpec


def build_reference(
    spec: RunSpec, whole: Callable[[nn.Parameter], AbstractContextManager] = nullcontext
) -> nn.Module:
    """The run's model in fp32, called as (tokens, labels) -> mean loss; `whole` as in gpt.fill."""
    recompute = spec.recompute == "full"
    if spec.implementation == "hf":
        from models import hf_model

        model = hf_model.HuggingFaceGPT2(spec.model, recompute)
        hf_model.initialise(model, spec.seed, whole)
    else:
        model = gpt.GPT(spec.model, recompute)
        gpt.initialise(model, spec.seed, whole)
    return model
