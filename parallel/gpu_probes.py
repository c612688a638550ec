"""What this machine's PyTorch sees and which kernels are right on it; gpu_check starts it.

Each probe prints one JSON object, in a process of its own: a broken driver or library ends or
hangs that process and not the check.
"""

import json
import math
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from models.gpt import attention_kernel, fused_attention
from models.gpus import lacking
from models.tensor_files import DTYPES
from parallel.engines import kernels
from parallel.engines.devices import driver

# Relative to the largest value, forward and backward; TF32 in place of fp32 is about 5e-4 off.
BARS = {"fp32": 1e-4, "fp16": 5e-3, "bf16": 3e-2}


def machine() -> dict[str, Any]:
    """The GPUs, and the versions of what drives them.

    lacks: what a check may need -> why this machine does not have it, "" where it has.
    """
    here = torch.cuda.is_available()
    count = torch.cuda.device_count() if here else 0
    cards = [torch.cuda.get_device_properties(i) for i in range(count)]
    capability = min(((card.major, card.minor) for card in cards), default=(0, 0))
    name = cards[0].name if cards else "a CPU"
    formats = ("bf16", "fp16", "fp8")
    why = f"{name} has no {{}}" if here else "needs a GPU"
    lacks = dict.fromkeys(formats, "")
    lacks |= {f: why.format(f) for f in lacking(formats, name if here else None, capability)}
    nccl = here and dist.is_nccl_available()
    return {
        "torch_build": torch.__version__,
        "why_no_gpu": "" if here else _why_no_gpu(),
        "gpus": [
            {
                "name": card.name,
                "gb": card.total_memory / 1e9,
                "free": torch.cuda.mem_get_info(i)[0] / card.total_memory,
            }
            for i, card in enumerate(cards)
        ],
        "capability": list(capability),
        "architectures": torch.cuda.get_arch_list() if here else [],
        "driver": driver() if here else None,
        "cuda": torch.version.cuda or torch.version.hip,
        "nccl": ".".join(map(str, torch.cuda.nccl.version())) if nccl else None,
        "cudnn": torch.backends.cudnn.version() if here else None,
        "peer_access": [
            [i == j or torch.cuda.can_device_access_peer(i, j) for j in range(count)]
            for i in range(count)
        ],
        "lacks": lacks | {"te": kernels.usable()["te"]},
    }


def _why_no_gpu() -> str:
    if torch.version.cuda is None and torch.version.hip is None:
        return f"this PyTorch ({torch.__version__}) is built without CUDA"
    try:
        torch.cuda.init()
    except (RuntimeError, AssertionError) as error:
        return str(error).strip().splitlines()[0]
    return "torch.cuda.is_available() is False"


def attention() -> dict[str, Any]:
    """Each attention kernel beside plain attention in fp32, and each kernel library's layer norm.

    rows: (what, relative error or None, bar, why there is no error).
    """
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    backends = (SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION)
    backends += (SDPBackend.CUDNN_ATTENTION,) if device.type == "cuda" else ()
    precisions = ["fp32", "bf16"]
    if device.type == "cuda":
        capability = torch.cuda.get_device_capability(device)
        precisions = ["fp32", "fp16"] + ["bf16"] * (not lacking(["bf16"], "", capability))
    torch.manual_seed(0)
    rows = []
    for precision in precisions:
        inputs = [torch.randn(2, 4, 256, 64, device=device).to(DTYPES[precision]) for _ in range(3)]
        for backend in (None, *backends):
            what = "torch's choice" if backend is None else backend.name.lower()
            rows.append(_row(f"{what} {precision}", precision, _sdpa(backend), inputs))
        # As the models call it: two queries a key, and positions that begin again at 100.
        grouped = [inputs[0], *(x[:, :2] for x in inputs[1:])]
        for what, given, mask in (
            ("grouped queries", grouped, None),
            ("documents", inputs, _documents(256, 100, device)),
        ):
            kernel = attention_kernel(*given, mask)
            ours = partial(fused_attention, mask=mask)
            what = f"{what} ({kernel}) {precision}"
            rows.append(_row(what, precision, ours, given, partial(plain, mask=mask)))
        if device.type == "cuda" and precision != "fp32" and not kernels.usable()["te"]:
            ours = _te(4, 64)
            rows.append(_row(f"te_attention {precision}", precision, ours, inputs))
    offered = ("te", "apex", "torch")
    return {
        "rows": rows,
        "usable": kernels.usable(),
        "chosen": kernels.choose("auto", device, offered),
    }


def plain(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None) -> Tensor:
    """Causal attention over [batch, heads, sequence, size], or where `mask` is True, written out;
    k and v may have fewer heads."""
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v))
    if mask is None:
        mask = _documents(q.shape[2], 0, q.device)
    scores = (q @ k.transpose(-2, -1) / math.sqrt(q.shape[-1])).masked_fill(~mask, -math.inf)
    return scores.softmax(-1) @ v


def _documents(length: int, second: int, device: torch.device) -> Tensor:
    """True where a token attends: to itself and those before it in its document, of which another
    begins at `second`."""
    mask = torch.ones(length, length, dtype=torch.bool, device=device).tril()
    mask[second:, :second] = False
    return mask[None, None]


def _sdpa(backend: SDPBackend | None) -> Callable[..., Tensor]:
    def call(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        with sdpa_kernel(backend) if backend else nullcontext():
            return F.scaled_dot_product_attention(q, k, v, is_causal=True)

    return call


def _te(heads: int, size: int) -> Callable[..., Tensor]:
    layer = kernels.te_attention(heads, size)

    def call(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out = layer(*(x.transpose(1, 2).contiguous() for x in (q, k, v)))
        return out.unflatten(-1, (heads, size)).transpose(1, 2)

    return call


def _row(
    what: str, precision: str, ours: Callable, inputs: list[Tensor], theirs: Callable = plain
) -> tuple:
    try:
        return what, kernels.error_of(ours, theirs, inputs), BARS[precision], ""
    except RuntimeError as error:
        return what, None, BARS[precision], str(error).strip().splitlines()[0]


def show(probe: Callable[[], dict[str, Any]]) -> None:
    print(json.dumps(probe()))
