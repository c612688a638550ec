"""One file per rank with the pieces that it saves; parameters are read from the files of all."""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from models.tensor_files import write_safetensors
from parallel.checkpoint.contents import Piece, Shape
from parallel.checkpoint.folders import Damaged
from parallel.checkpoint.manifest import KINDS


def write_rank_file(
    path: Path, pieces: list[Piece], tick: Callable = lambda: None
) -> dict[str, Any]:
    """Write and sync a rank's pieces; the file's entry in the manifest.

    Raises:
        OSError: the disk does not take it.
    """
    tensors = {f"{kind}/{p.name}": p.tensors[kind] for p in pieces for kind in KINDS}
    assert len(tensors) == len(pieces) * len(KINDS), "a rank holds two pieces of one parameter"
    layout = {name: (tensor.dtype, (tensor.numel(),)) for name, tensor in tensors.items()}
    size, crc32 = write_safetensors(path, layout, tensors.values(), tick=tick)
    boxes = ("name", "shape", "offset", "part", "start")
    described = [{k: getattr(p, k) for k in boxes} | {"stop": p.start + len(p)} for p in pieces]
    return {"path": path.name, "bytes": size, "crc32": crc32, "pieces": described}


class Reader:
    """Reads parameters and moments from a checkpoint, whichever layout wrote it."""

    def __init__(self, folder: Path, manifest: dict[str, Any]):
        self.folder = folder
        self.shapes: dict[str, Shape] = {}
        # parameter -> part (offset, shape) -> its (file, piece)s
        self.parts: dict[str, dict[tuple[Shape, Shape], list[tuple[str, dict]]]] = {}
        for entry in manifest["files"]:
            for piece in entry["pieces"]:
                name, box = piece["name"], (tuple(piece["offset"]), tuple(piece["part"]))
                self.shapes[name] = tuple(piece["shape"])
                parts = self.parts.setdefault(name, {})
                parts.setdefault(box, []).append((entry["path"], piece))
        self._open: dict[str, Any] = {}

    def _file(self, name: str) -> Any:
        if name not in self._open:
            path = self.folder / name
            try:
                self._open[name] = safe_open(path, framework="pt")
            except (OSError, SafetensorError) as error:
                raise Damaged(f"{path} is no safetensors file: {error}") from error
        return self._open[name]

    def _fill_within_part(
        self, name: str, kind: str, box: tuple[Shape, Shape], start: int, target: Tensor
    ) -> int:
        """Fill `target`, the elements from `start` on of the part at `box` (offset, shape), from
        pieces of exactly that part; how many elements were filled."""
        stop, filled = start + target.numel(), 0
        for file, piece in self.parts.get(name, {}).get(box, []):
            first, last = max(start, piece["start"]), min(stop, piece["stop"])
            if first >= last:
                continue
            try:
                stored = self._file(file).get_slice(f"{kind}/{name}")
                elements = stored[first - piece["start"] : last - piece["start"]]
            except SafetensorError as error:
                raise Damaged(f"{self.folder / file} is damaged: {error}") from error
            target[first - start : last - start].copy_(elements)
            filled += last - first
        return filled

    def fill(self, piece: Piece, kind: str) -> None:
        """Fill one of a piece's live tensors.

        Raises:
            Damaged: the checkpoint does not hold all of it.
        """
        target, box = piece.tensors[kind], (piece.offset, piece.part)
        if self._fill_within_part(piece.name, kind, box, piece.start, target) < len(piece):
            part = self.part(piece.name, kind, piece.offset, piece.part).view(-1)
            target.copy_(part[piece.start : piece.start + len(piece)])

    def part(self, name: str, kind: str, offset: Shape, shape: Shape) -> Tensor:
        """Any part of a parameter, or of a moment of it, put together on the CPU.

        Raises:
            Damaged: the checkpoint does not hold all of it.
        """
        result, covered = torch.empty(shape), 0
        filled = self._fill_within_part(name, kind, (offset, shape), 0, result.view(-1))
        if filled == result.numel():
            return result
        for stored_at, stored_shape in sorted(self.parts.get(name, {})):
            sides = zip(offset, shape, stored_at, stored_shape, strict=True)
            shared = [range(max(i, j), min(i + n, j + m)) for i, n, j, m in sides]  # by axis
            if not all(map(len, shared)):
                continue
            stored = torch.empty(math.prod(stored_shape))
            box = (stored_at, stored_shape)
            if self._fill_within_part(name, kind, box, 0, stored) < stored.numel():
                continue  # reported below: not all is covered
            here, there = (
                tuple(slice(r.start - i, r.stop - i) for r, i in zip(shared, origin, strict=True))
                for origin in (offset, stored_at)
            )
            result[here] = stored.view(stored_shape)[there]
            covered += math.prod(map(len, shared))
        if covered != result.numel():
            raise Damaged(f"{self.folder} does not hold all of {name} ({kind})")
        return result

    def gathered(self, name: str, kind: str = "param") -> Tensor:
        """A full parameter, or a moment of it, in fp32."""
        shape = self.shapes[name]
        return self.part(name, kind, (0,) * len(shape), shape)
