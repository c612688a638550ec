"""The one-device model a data-parallel engine trains: ours or Hugging Face's, same weights."""

from torch import nn

from models import gpt
from parallel.spec import RunSpec


def build_reference(spec: RunSpec) -> nn.Module:
    """The run's model on the CPU in fp32, called as (tokens, labels) -> mean loss."""
    recompute = spec.recompute == "full"
    if spec.implementation == "hf":
        from models import hf

        model = hf.HuggingFaceGPT2(spec.model, recompute)
        hf.initialise(model, spec.model, spec.seed)
    else:
        model = gpt.GPT(spec.model, recompute)
        gpt.initialise(model, spec.model, spec.seed)
    return model
