"""Fused kernels: Transformer Engine, NVIDIA apex or plain PyTorch, whichever is really usable.

An import proves nothing: PyPI's `apex` is an unrelated package, and a library may not fit the GPU.
So a layer norm of each is run. Only this file looks for these libraries.
"""

import importlib
import os
import shutil
import sys
from collections.abc import Sequence

import torch

from models.errors import UsageError

# Kernel set -> its library, a module and the layer norm there, and what else must be importable:
# PyPI's unrelated apex has no compiled layer norm.
_LIBRARIES = {
    "te": ("Transformer Engine", "transformer_engine.pytorch", "LayerNorm"),
    "apex": ("NVIDIA's apex", "apex.normalization", "FusedLayerNorm", "fused_layer_norm_cuda"),
}


def usable() -> dict[str, str]:
    """Each kernel set, and "" where it works or the reason why it does not."""
    return {name: problem(name) for name in (*_LIBRARIES, "torch")}


def problem(kernels: str) -> str:
    """Why a kernel set's layer norm does not run here, or ""."""
    if kernels == "torch":
        return ""
    library, module, norm, *needed = _LIBRARIES[kernels]
    if not torch.cuda.is_available():
        return f"{library} needs a GPU"
    try:
        for name in needed:
            importlib.import_module(name)
        layer = getattr(importlib.import_module(module), norm)(8)
        layer.cuda()(torch.ones(1, 8, device="cuda"))
    except (ImportError, OSError, AttributeError, RuntimeError) as error:
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        return f"{library} does not work here: {reason}"
    return ""


def choose(asked: str, device: torch.device, offered: Sequence[str]) -> str:
    """The kernel set to use, of those `offered` (the engine has code for), best first.

    Raises:
        UsageError: the one that was asked for is not offered or does not work; with the reason.
    """
    if asked == "auto":
        tried = offered if device.type == "cuda" else ("torch",)
        return next(name for name in tried if not problem(name))
    if asked not in offered:
        raise UsageError(f"kernels {asked}: this engine has {', '.join(offered)}")
    if reason := problem(asked):
        raise UsageError(f"kernels {asked}: {reason}")
    return asked


def hide_others(chosen: str) -> None:
    """Let no library import a better kernel set than the chosen one. megatron-core would take its
    optimizer and the gradient's norm from it."""
    better = {"te": (), "apex": ("transformer_engine",), "torch": ("transformer_engine", "apex")}
    sys.modules.update(dict.fromkeys(better[chosen]))


def check_compiler(device: torch.device) -> None:
    """See that torch.compile can work here: on a CPU it writes C++.

    Raises:
        UsageError: there is no compiler for it.
    """
    compiler = os.environ.get("CXX", "g++")
    if device.type == "cpu" and shutil.which(compiler) is None:
        raise UsageError(f"compile needs a C++ compiler on a CPU, and there is no {compiler} here")
