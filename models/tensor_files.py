"""Safetensors files: the one writer, and what a file says that it holds.

The format (safetensors' README) is the length of the header in 8 bytes, a JSON header with the
dtype, shape and place of each tensor, and then the bytes. We write it ourselves because the library
needs all tensors in memory at once; here one is enough.
"""

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from base.errors import UsageError
from base.storage import Written, write_blocks

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
CODES = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16"}  # safetensors' names
_SMALL, _BLOCK = 1 << 20, 1 << 24  # bytes: small tensors are joined, large ones are cut


def write_safetensors(
    path: Path,
    layout: Mapping[str, tuple[torch.dtype, tuple[int, ...]]],
    tensors: Iterable[Tensor],
    metadata: dict[str, str] | None = None,
    tick: Callable[[], None] = lambda: None,
) -> Written:
    """Writes and syncs `tensors`, in the order of `layout`, as a file; returns its size and CRC-32.

    layout: name -> (dtype to store, shape). tick: called after each block of some megabytes.
    """
    header: dict[str, object] = {} if metadata is None else {"__metadata__": metadata}
    end = 0
    for name, (dtype, shape) in layout.items():
        begin, end = end, end + torch.Size(shape).numel() * dtype.itemsize
        header[name] = {"dtype": CODES[dtype], "shape": shape, "data_offsets": [begin, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    stored = (
        tensor.detach().to("cpu", dtype).flatten()
        for tensor, (dtype, _) in zip(tensors, layout.values(), strict=True)
    )
    return write_blocks(path, _blocks(len(text).to_bytes(8, "little") + text, stored), tick)


def _blocks(head: bytes, tensors: Iterable[Tensor]) -> Iterator[memoryview]:
    """Yields the head and the tensors' bytes in blocks: small tensors joined, large ones cut."""
    pending = bytearray(head)
    for tensor in tensors:
        data = memoryview(tensor.view(torch.uint8).numpy()).cast("B")
        if len(pending) + len(data) <= _SMALL:
            pending += data
            continue
        yield memoryview(bytes(pending))
        pending.clear()
        for begin in range(0, len(data), _BLOCK):
            yield data[begin : begin + _BLOCK]
    yield memoryview(bytes(pending))


def stored_shapes(path: Path) -> dict[str, tuple[int, ...]]:
    """Returns the name and shape of each tensor in a safetensors file, from its header.

    Raises:
        UsageError: the file is missing, or no complete safetensors file.
    """
    try:
        with safe_open(path, framework="numpy") as stored:
            return {name: tuple(stored.get_slice(name).get_shape()) for name in stored.keys()}
    except OSError as error:
        raise UsageError(f"{path}: {error.strerror or error}") from error
    except SafetensorError as error:
        raise UsageError(f"{path} is damaged: it is no safetensors file: {error}") from error
