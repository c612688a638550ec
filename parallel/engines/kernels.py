"""Fused kernels: Transformer Engine or plain PyTorch, whichever is really usable.

An import proves nothing: the library may not fit the GPU. So its layer norm is compared with
PyTorch's. Only this file looks for these libraries.
"""

import functools
import importlib
import os
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Sequence

import torch
from torch import nn

from base.errors import UsageError
from models.gpt import additive, attention_kernel, fused_attention, positions
from models.tensor_files import DTYPES
from parallel.config.run_spec import RunSpec

_GRADIENT_GEMM = "fused_weight_gradient_mlp_cuda"  # of NVIDIA's apex


def problem(kernels: str) -> str:
    """Returns why the layer norm of a kernel set does not run here as PyTorch's does; "" where it
    does."""
    if kernels == "torch":
        return ""
    if not torch.cuda.is_available():
        return "Transformer Engine needs a GPU"
    try:
        layer = importlib.import_module("transformer_engine.pytorch").LayerNorm(64).cuda()
        x = torch.randn(4, 64, device="cuda", requires_grad=True)
        out, expected = layer(x), nn.LayerNorm(64).cuda()(x)
        weight = torch.linspace(-1, 1, 64, device=x.device)
        gradient, exact = (torch.autograd.grad((y * weight).sum(), x)[0] for y in (out, expected))
        error = max((out - expected).abs().max().item(), (gradient - exact).abs().max().item())
    except (ImportError, OSError, AttributeError, RuntimeError) as failure:
        reason = (str(failure).strip().splitlines() or [type(failure).__name__])[0]
        return f"Transformer Engine does not work here: {reason}"
    return "" if error < 1e-4 else f"Transformer Engine's layer norm is {error:.1e} off PyTorch's"


def compute_dtype(spec: RunSpec) -> torch.dtype:
    """Returns the dtype of weights and activations. With fp8 it is bf16: only the GEMMs of the
    layers are fp8."""
    return torch.bfloat16 if spec.precision == "fp8" else DTYPES[spec.precision]


def attention_of(spec: RunSpec, kernels: str, device: torch.device) -> str:
    """Returns what computes attention in a run, for run.json. It is Transformer Engine, or torch
    and the kernel that it picks for the run's shapes, precision, mask and device."""
    if packs_documents(spec, kernels):
        return "Transformer Engine, of packed documents"
    if kernels == "te" and spec.end_of_text is None:
        return "Transformer Engine"
    model, b, s = spec.model, spec.layout.micro_batch, spec.seq_len
    options = {"dtype": compute_dtype(spec), "device": device, "requires_grad": True}
    q, k, v = (
        torch.empty((b, heads // spec.layout.tp, s, model.head_dim), **options)
        for heads in (model.n_head, model.kv_heads, model.kv_heads)
    )
    mask = None
    if spec.end_of_text is not None:
        mask = torch.empty((b, 1, s, s), dtype=torch.bool, device=device)
    return f"torch scaled_dot_product_attention ({attention_kernel(q, k, v, mask)})"


@functools.cache
def packs_documents(spec: RunSpec, kernels: str) -> bool:
    """Returns whether Transformer Engine's attention can be trusted with documents that lie one
    after another. It must give what PyTorch's gives for each, with the run's heads and precision;
    not every card has a kernel for it."""
    if kernels != "te" or spec.end_of_text is None or spec.engine != "megatron" or spec.model.mla:
        return False
    heads, key_heads = spec.model.n_head // spec.layout.tp, spec.model.kv_heads // spec.layout.tp
    dtype, head_dim = compute_dtype(spec), spec.model.head_dim
    q, k, v = (
        torch.randn(64, n, head_dim, dtype=dtype, device="cuda", requires_grad=True)
        for n in (heads, key_heads, key_heads)
    )
    tokens_BS = torch.arange(64, device=q.device)[None]
    ends = torch.tensor([0, 24, 64], dtype=torch.int32, device=q.device)
    bounds = {"cu_seqlens_q": ends, "cu_seqlens_kv": ends, "max_seqlen_q": 64, "max_seqlen_kv": 64}
    try:
        attention = importlib.import_module("transformer_engine.pytorch").DotProductAttention
        options = {"qkv_format": "thd", "attn_mask_type": "padding_causal"}
        out = attention(heads, head_dim, key_heads, **options)(q, k, v, **bounds)
        torch.autograd.grad(out.sum(), q)
    except (ImportError, OSError, AttributeError, RuntimeError, ValueError, AssertionError):
        return False
    mask = additive(positions(tokens_BS, end_of_text=23)[1], dtype)
    exact = fused_attention(*(x.transpose(0, 1)[None] for x in (q, k, v)), mask).transpose(1, 2)
    return bool((out.view_as(exact) - exact).abs().max() < 0.05)


def adds_up_gradients() -> bool:
    """Returns whether apex's GEMM that adds a weight's gradient to an fp32 buffer is here."""
    try:
        importlib.import_module(_GRADIENT_GEMM)
    except (ImportError, OSError):
        return False
    return torch.cuda.is_available()


def choose(asked: str, device: torch.device, offered: Sequence[str]) -> str:
    """Returns the kernel set to use, of those `offered` (the engine has code for), best first."""
    if asked == "auto":
        tried = offered if device.type == "cuda" else ("torch",)
        return next(name for name in tried if not problem(name))
    if asked not in offered:
        raise UsageError(f"kernels {asked}: this engine has {', '.join(offered)}")
    if reason := problem(asked):
        raise UsageError(f"kernels {asked}: {reason}")
    return asked


def hide_others(chosen: str) -> None:
    """Makes the import of every better kernel set than the chosen one fail. megatron-core would
    take its optimizer and the norm of the gradient from it."""
    hidden = ("transformer_engine", "apex", _GRADIENT_GEMM) if chosen == "torch" else ()
    imported = [name for name in sys.modules if name.partition(".")[0] in hidden]  # by `problem`
    sys.modules.update(dict.fromkeys((*hidden, *imported)))


def check_compiler(device: torch.device) -> None:
    """Refuses a device for which torch.compile finds no compiler: on a CPU it writes C++, and on a
    GPU Triton writes C."""
    compiler = os.environ.get("CXX", "g++")
    if device.type == "cpu" and shutil.which(compiler) is None:
        raise UsageError(f"compile needs a C++ compiler on a CPU, and there is no {compiler} here")
    if device.type == "cuda" and (problem := c_compiler_problem()):
        raise UsageError(f"compile needs a C compiler for Triton: {problem}")


def c_compiler_problem() -> str:
    """Returns why Triton cannot compile here the C code that starts its kernels, or "". It takes
    the compiler that CC names, else gcc or clang, for C that includes Python.h."""
    compiler = os.environ.get("CC") or shutil.which("gcc") or shutil.which("clang")
    if compiler is None:
        return "there is no gcc and no clang, and CC names none"
    headers = sysconfig.get_path("include", "posix_prefix")
    command = [compiler, "-fsyntax-only", f"-I{headers}", "-xc", "-"]
    try:
        compiled = subprocess.run(command, input=b"#include <Python.h>\n", capture_output=True)
    except OSError as error:
        return f"{compiler} does not start ({error.strerror})"
    return f"{compiler} finds no Python.h in {headers}" if compiled.returncode else ""
