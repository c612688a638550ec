"""Fused kernels: Transformer Engine, NVIDIA apex or plain PyTorch, whichever is really usable.

PyPI's `apex` is an unrelated package, so importing a module of that name proves nothing: NVIDIA's
has a compiled layer norm that runs. The only file that probes for either library.
"""

import importlib
import os
import shutil
from collections.abc import Sequence

import torch

from models.errors import UsageError


def usable() -> dict[str, str]:
    """Each kernel set, and "" where it works or the reason why it does not."""
    return {"te": _transformer_engine(), "apex": _apex(), "torch": ""}


def _transformer_engine() -> str:
    if not torch.cuda.is_available():
        return "Transformer Engine needs a GPU"
    try:
        te = importlib.import_module("transformer_engine.pytorch")
        te.LayerNorm(8).cuda()(torch.ones(1, 8, device="cuda"))
    except (ImportError, OSError, AttributeError, RuntimeError) as error:
        return f"Transformer Engine does not work here: {_first_line(error)}"
    return ""


def _apex() -> str:
    if not torch.cuda.is_available():
        return "apex needs a GPU"
    try:
        importlib.import_module("fused_layer_norm_cuda")
        normalization = importlib.import_module("apex.normalization")
        normalization.FusedLayerNorm(8).cuda()(torch.ones(1, 8, device="cuda"))
    except (ImportError, OSError, AttributeError, RuntimeError) as error:
        return f"NVIDIA's apex does not work here: {_first_line(error)}"
    return ""


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


def choose(asked: str, device: torch.device, offered: Sequence[str]) -> str:
    """The kernel set to use, of those `offered` (the engine has code for), best first.

    Raises:
        UsageError: the one that was asked for is not offered or does not work; with the reason.
    """
    if asked == "auto":
        reasons = usable() if device.type == "cuda" else {"torch": ""}
        return next(
            name for name in ("te", "apex", "torch") if name in offered and reasons.get(name) == ""
        )
    if asked not in offered:
        raise UsageError(f"kernels {asked}: this engine has {', '.join(offered)}")
    if reason := usable()[asked]:
        raise UsageError(f"kernels {asked}: {reason}")
    return asked


def check_compiler(device: torch.device) -> None:
    """See that torch.compile can work here: on a CPU it writes C++.

    Raises:
        UsageError: there is no compiler for it.
    """
    compiler = os.environ.get("CXX", "g++")
    if device.type == "cpu" and shutil.which(compiler) is None:
        raise UsageError(f"compile needs a C++ compiler on a CPU, and there is no {compiler} here")
