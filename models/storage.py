"""Bytes that saved training state takes, predicted before it is written, and how what was written
is brought to the disk. Plain Python.

A weights-only export holds one number per parameter, 2 bytes in bf16. What training needs to go on
holds three fp32 numbers per parameter: the master weight and AdamW's two moments. Saved apart they
are the split of the Jean Zay study's 181B checkpoint: 0.34 TB of fp16 layer states and 2.0 TB of
optimizer states, 2 + 12 bytes per parameter. Padding and duplicates never count: a checkpoint
holds every parameter once, whatever the layout.
"""

import os
import zlib
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import BinaryIO

BYTES = {"fp32": 4, "bf16": 2, "fp16": 2}  # per number
STATE_BYTES_PER_PARAM = 4 + 4 + 4  # fp32 master weight, AdamW's exp_avg and exp_avg_sq


def weights_bytes(n_params: float, dtype: str = "bf16") -> float:
    """A weights-only export's tensors; its two headers add a few kilobytes."""
    return n_params * BYTES[dtype]


def state_bytes(n_params: float) -> float:
    """The full state that training resumes from, without the weights-only export."""
    return n_params * STATE_BYTES_PER_PARAM


def checkpoint_bytes(n_params: float, dtype: str | None = "bf16") -> float:
    """The full state and, unless `dtype` is None, a weights-only export beside it."""
    return state_bytes(n_params) + (weights_bytes(n_params, dtype) if dtype else 0)


def sync(path: Path) -> None:
    """Bring a file, or a folder's names, to the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def write_synced(path: Path, text: str, mode: int = 0o666) -> None:
    """Replace a small file by one that is on disk; `mode` is who may read it, less the umask."""
    aside = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with open(aside, "w", opener=lambda name, flags: os.open(name, flags, mode)) as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.replace(aside, path)
    finally:
        aside.unlink(missing_ok=True)
    sync(path.parent)


def write_blocks(
    path: Path, blocks: Iterable[bytes | memoryview], tick: Callable[[], None] = lambda: None
) -> tuple[int, int]:
    """Write blocks of bytes to a file that is on disk when this returns: (bytes, CRC-32).

    While a block is summed it is being written, and the disk takes those before: one sync at the
    end would find the disk idle until then, and last for minutes in which nothing ticks. One write
    and one sync are under way at most. The system tells each error once, so none may be missed.

    Raises:
        OSError: as the disk has it.
    """
    size = crc32 = 0
    writing = syncing = None
    with path.open("wb", buffering=0) as file, ThreadPoolExecutor() as pool:
        for block in blocks:
            if writing is not None:
                writing.result()
            writing = pool.submit(_write, file, memoryview(block))
            if syncing is None or syncing.done():
                if syncing is not None:
                    syncing.result()
                syncing = pool.submit(os.fsync, file.fileno())
            crc32 = zlib.crc32(block, crc32)
            size += len(block)
            tick()
        for pending in (writing, syncing):
            if pending is not None:
                pending.result()
        os.fsync(file.fileno())
    return size, crc32


def _write(file: BinaryIO, block: memoryview) -> None:
    """All of a block, which the system may take in parts."""
    while len(block):
        block = block[file.write(block) :]
