"""One file per rank with the pieces that it saves; ranges of all files are read."""

import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from models.tensor_files import write_safetensors
from parallel.checkpoint.contents import KINDS, Piece, Shape
from parallel.checkpoint.folders import Damaged

_BLOCK = 1 << 24  # bytes of one read


def write_rank_file(
    folder: Path, rank: int, pieces: list[Piece], tick: Callable = lambda: None
) -> dict[str, Any]:
    """Writes a rank's pieces into a file and syncs it; returns the file's entry in the manifest."""
    tensors = {f"{kind}/{p.name}": p.tensors[kind] for p in pieces for kind in KINDS}
    assert len(tensors) == len(pieces) * len(KINDS), "a rank holds two pieces of one parameter"
    layout = {name: (tensor.dtype, (tensor.numel(),)) for name, tensor in tensors.items()}
    path = folder / f"rank-{rank:05d}.safetensors"
    size, crc32 = write_safetensors(path, layout, tensors.values(), tick=tick)
    keys = ("name", "shape", "offset", "part", "start")
    described = [
        {key: getattr(p, key) for key in keys} | {"stop": p.start + len(p)} for p in pieces
    ]
    return {"path": path.name, "bytes": size, "crc32": crc32, "pieces": described}


class Stored(NamedTuple):
    """Elements of a piece that one file holds.

    rows: of each range of neighbours its first byte after the header, its first element in the
    piece, and its number of elements. step: bytes from one kind's tensor to the next kind's.
    """

    file: int
    rows: np.ndarray
    step: int


class Reader:
    """Reads parameters and moments from a checkpoint, whichever layout wrote it. Of each file it
    reads the ranges that are asked for.

    manifest: the checkpoint's, without the files. files: their entries, without the pieces.
    """

    def __init__(self, folder: Path, manifest: dict[str, Any]):
        self.folder = folder
        self.manifest = {key: value for key, value in manifest.items() if key != "files"}
        self.files = [
            {key: file[key] for key in ("path", "bytes", "crc32")} for file in manifest["files"]
        ]
        self.shapes: dict[str, Shape] = {}
        parts: dict[str, dict[tuple[Shape, Shape], list]] = {}
        for number, file in enumerate(manifest["files"]):
            begin = 0
            for piece in file["pieces"]:
                name, box = piece["name"], (tuple(piece["offset"]), tuple(piece["part"]))
                self.shapes[name] = tuple(piece["shape"])
                runs = parts.setdefault(name, {}).setdefault(box, [])
                runs.append((piece["start"], piece["stop"], number, begin))
                begin += 4 * len(KINDS) * (piece["stop"] - piece["start"])
        # parameter -> part (offset, shape) -> its runs in order: start, stop, file, first byte
        self.parts = {
            name: {box: np.array(sorted(runs)) for box, runs in boxes.items()}
            for name, boxes in parts.items()
        }

    def fill(self, pieces: list[Piece], tick: Callable = lambda: None) -> None:
        """Fills the live tensors of pieces.

        Raises:
            Damaged: a file ends too early, or none holds all of a piece.
        """
        for piece in pieces:
            host = {kind: tensor.to("cpu") for kind, tensor in piece.tensors.items()}
            for stored in self._ranges(piece):
                self._read(stored, host, tick)
            for kind, tensor in piece.tensors.items():
                tensor.copy_(host[kind])  # nothing where it is on the host itself

    def _ranges(self, piece: Piece) -> Iterator[Stored]:
        """Yields where the elements of a piece are stored, for each file that has some."""
        missing = len(piece)
        for box, runs in self.parts.get(piece.name, {}).items():
            in_piece, in_box, n = _shared((piece.offset, piece.part), box)
            # Of these ranges what is in the piece, and then in each run.
            first = np.maximum(in_piece, piece.start)
            ends = np.minimum(in_piece + n, piece.start + len(piece))
            inside, ahead = first < ends, in_box - in_piece
            begins, ends, ahead = ((elements + ahead)[inside] for elements in (first, ends, 0))
            first_run = np.searchsorted(runs[:, 1], begins[:1], "right").sum()
            end_run = np.searchsorted(runs[:, 0], ends[-1:]).sum()
            for start, stop, file, begin in runs[first_run:end_run].tolist():
                common = slice(np.searchsorted(ends, start, "right"), np.searchsorted(begins, stop))
                first = np.maximum(begins[common], start)
                length = np.minimum(ends[common], stop) - first
                rows = begin + 4 * (first - start), first - ahead[common] - piece.start, length
                missing -= length.sum()
                yield Stored(file, np.stack(rows, 1), 4 * (stop - start))
        if missing:
            raise Damaged(f"{self.folder} does not hold all of {piece.name}")

    def _read(self, stored: Stored, host: dict[str, Tensor], tick: Callable) -> None:
        """Reads the ranges of one file into a piece's tensors on the host, by kind."""
        with (self.folder / self.files[stored.file]["path"]).open("rb", buffering=0) as stream:
            data = 8 + int.from_bytes(stream.read(8), "little")
            for kind, tensor in host.items():
                numbers = memoryview(tensor.view(torch.uint8).numpy())
                begin = data + KINDS.index(kind) * stored.step
                for offset, first, n in stored.rows.tolist():
                    stream.seek(begin + offset)
                    target = numbers[4 * first : 4 * (first + n)]
                    while n_bytes := len(target) and stream.readinto(target[:_BLOCK]):
                        target = target[n_bytes:]
                        tick()
                    if len(target):
                        raise Damaged(f"{stream.name} is damaged: it ends too early")

    def gathered(self, name: str, kind: str = "param") -> Tensor:
        """Returns a full parameter, or a moment of it, in fp32."""
        shape = self.shapes[name]
        full = torch.empty(math.prod(shape))
        self.fill([Piece(name, shape, (0,) * len(shape), shape, 0, {kind: full})])
        return full.view(shape)


class SharedRanges(NamedTuple):
    """The elements that two parts of a parameter share, as ranges of neighbours in both: where each
    range begins in the first part, where in the second, and how many elements each has."""

    first: np.ndarray
    second: np.ndarray
    size: int


def _shared(*boxes: tuple[Shape, Shape]) -> SharedRanges:
    """Returns what two parts (offset, shape) of a parameter share."""
    (a_offset, a_part), (b_offset, b_part) = boxes
    sides = zip(a_offset, a_part, b_offset, b_part, strict=True)
    # Of each axis, the indices that both parts have.
    axes = [range(max(i, j), min(i + n, j + m)) for i, n, j, m in sides]
    axis = len(axes) - 1
    while axis and a_part[axis] == b_part[axis] == len(axes[axis]):
        axis -= 1  # an axis that both have in full makes one range with the axis before it
    starts = []
    for offset, sizes in boxes:
        begins = np.zeros(1, np.int64)
        for i, (indices, first, size) in enumerate(zip(axes, offset, sizes, strict=True)):
            steps = np.array(indices if i < axis else indices[:1], np.int64) - first
            begins = (begins[:, None] * size + steps).ravel()
        starts.append(begins)
    return SharedRanges(*starts, size=math.prod(map(len, axes[axis:])))
