"""One file per rank with the pieces that it saves; ranges of all files are read."""

import json
import math
import zlib
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from itertools import accumulate, groupby
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from models.tensor_files import write_safetensors
from parallel.checkpoint.contents import NEVER_SAVED, Piece, Shape
from parallel.checkpoint.folders import Damaged
from parallel.checkpoint.manifest import KINDS

_TOGETHER = 1 << 26  # elements of pieces that are read together: 0.8 GB, in host memory
_BLOCK = 1 << 24  # bytes of one read


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


class Stored(NamedTuple):
    """Elements of a piece that a file holds. rows: of each range of neighbours its first byte after
    the header, its first element in the piece, its elements. step: bytes to the next kind's."""

    file: int
    rows: np.ndarray
    step: int


class Reader:
    """Reads parameters and moments from a checkpoint, whichever layout wrote it: of each file the
    ranges that are asked for. `manifest` is without the files, which have numbers here."""

    def __init__(self, folder: Path, manifest: dict[str, Any]):
        self.folder = folder
        self.manifest = {key: value for key, value in manifest.items() if key != "files"}
        self.files = [(file["path"], file["bytes"], file["crc32"]) for file in manifest["files"]]
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

    def entry(self, number: int) -> dict[str, Any]:
        """A file's entry in the manifest, without its checksum."""
        pieces = [
            {"name": name, "start": start, "stop": stop, "begin": begin}
            for name, boxes in self.parts.items()
            for runs in boxes.values()
            for start, stop, _, begin in runs[runs[:, 2] == number].tolist()
        ]
        path, size, _ = self.files[number]
        return {"path": path, "bytes": size, "pieces": pieces}

    def fill(
        self, pieces: list[Piece], tick: Callable = lambda: None, frames: Iterable[int] = ()
    ) -> np.ndarray:
        """Fill the live tensors of pieces; a share of each file's CRC-32, which is the exclusive or
        of all ranks' shares. It is of what this rank saves of its pieces (Piece.saved), and of the
        rest of the files `frames`.

        Raises:
            Damaged: a file does not hold what the manifest says, or none holds all of a piece.
        """
        read = [row for file in frames for row in self._frame(file)]
        ends = accumulate(map(len, pieces))
        for _, group in groupby(zip(ends, pieces, strict=True), lambda row: row[0] // _TOGETHER):
            wanted, copies = defaultdict(list), []
            for _, piece in group:
                host = {kind: tensor.to("cpu") for kind, tensor in piece.tensors.items()}
                copies += zip(piece.tensors.values(), host.values(), strict=True)
                for stored in self._ranges(piece):
                    wanted[stored.file].append((stored, piece.saved, host))
            for file in sorted(wanted):  # each is opened once
                read += self._read(file, wanted[file], tick)
            for live, tensor in copies:
                live.copy_(tensor)  # nothing where it is on the host itself
        file, crc, after = np.array(read, np.int64).reshape(-1, 3).T
        crcs = np.zeros(len(self.files), np.int64)
        np.bitwise_xor.at(crcs, file, _moved(crc, after))
        return crcs

    def _ranges(self, piece: Piece) -> Iterator[Stored]:
        """Where the elements of a piece are stored."""
        missing = len(piece)
        for box, runs in self.parts.get(piece.name, {}).items():
            here, there, n = _shared((piece.offset, piece.part), box)
            # Of these ranges what is in the piece, and then in each run.
            first, ends = np.maximum(here, piece.start), here + n
            ends = np.minimum(ends, piece.start + len(piece))
            inside, ahead = first < ends, there - here
            there, ends, ahead = ((x + ahead)[inside] for x in (first, ends, 0))
            low = np.searchsorted(runs[:, 1], there[:1], "right").sum()
            high = np.searchsorted(runs[:, 0], ends[-1:]).sum()
            for start, stop, file, begin in runs[low:high].tolist():
                of = slice(np.searchsorted(ends, start, "right"), np.searchsorted(there, stop))
                first = np.maximum(there[of], start)
                length = np.minimum(ends[of], stop) - first
                rows = begin + 4 * (first - start), first - ahead[of] - piece.start, length
                missing -= length.sum()
                yield Stored(file, np.stack(rows, 1), 4 * (stop - start))
        if missing:
            raise Damaged(f"{self.folder} does not hold all of {piece.name}")

    def _read(self, file: int, wanted: list, tick: Callable) -> Iterator[tuple[int, int, int]]:
        """Read ranges of a file into tensors on the host. Of each that this rank saves: the file,
        its CRC-32, and how many bytes of the file are behind it."""
        name, size, _ = self.files[file]
        with (self.folder / name).open("rb", buffering=0) as stream:
            data = 8 + int.from_bytes(stream.read(8), "little")
            for stored, saved, host in wanted:
                for kind, tensor in host.items():
                    numbers = memoryview(tensor.view(torch.uint8).numpy())
                    begin = data + KINDS.index(kind) * stored.step
                    for at, here, n in stored.rows.tolist():
                        stream.seek(begin + at)
                        target = numbers[4 * here : 4 * (here + n)]
                        while n_bytes := len(target) and stream.readinto(target[:_BLOCK]):
                            target = target[n_bytes:]
                            tick()
                        if len(target):
                            raise Damaged(f"{stream.name} is damaged: it ends too early")
                        own = range(max(here, saved.start), min(here + n, saved.stop))
                        if own:
                            crc = zlib.crc32(numbers[4 * own.start : 4 * own.stop])
                            yield file, crc, size - begin - at - 4 * (own.stop - here)

    def _frame(self, file: int) -> list[tuple[int, int, int]]:
        """As _read, of what is no piece: the header, and the random states that earlier versions
        wrote behind the pieces."""
        name, size, _ = self.files[file]
        with (self.folder / name).open("rb", buffering=0) as stream:
            head = stream.read(8)
            head += stream.read(int.from_bytes(head, "little"))
            header, end = json.loads(head[8:]), 0
            for piece in sorted(self.entry(file)["pieces"], key=lambda piece: piece["begin"]):
                for kind in KINDS:
                    begin, end = end, end + 4 * (piece["stop"] - piece["start"])
                    if header[f"{kind}/{piece['name']}"]["data_offsets"] != [begin, end]:
                        raise Damaged(f"{stream.name} is damaged: it has another order")
            stream.seek(len(head) + end)
            rest = stream.read()
        return [(file, zlib.crc32(head), size - len(head)), (file, zlib.crc32(rest), 0)]

    def gathered(self, name: str, kind: str = "param") -> Tensor:
        """A full parameter, or a moment of it, in fp32."""
        shape = self.shapes[name]
        full, begin = torch.empty(math.prod(shape)), (0,) * len(shape)
        self.fill([Piece(name, shape, begin, shape, 0, {kind: full}, NEVER_SAVED)])
        return full.view(shape)


def _shared(*boxes: tuple[Shape, Shape]) -> tuple[np.ndarray, np.ndarray, int]:
    """The elements that two parts (offset, shape) of a parameter share, as ranges of n neighbours
    in both: where each range begins in the first part, where in the second, and n."""
    (a, a_part), (b, b_part) = boxes
    sides = zip(a, a_part, b, b_part, strict=True)
    axes = [range(max(i, j), min(i + n, j + m)) for i, n, j, m in sides]
    axis = len(axes) - 1
    while axis and a_part[axis] == b_part[axis] == len(axes[axis]):
        axis -= 1  # an axis that both have in full makes one range with the axis before it
    starts = []
    for offset, part in boxes:
        at = np.zeros(1, np.int64)
        for i, (indexes, first, size) in enumerate(zip(axes, offset, part, strict=True)):
            steps = np.array(indexes if i < axis else indexes[:1], np.int64) - first
            at = (at[:, None] * size + steps).ravel()
        starts.append(at)
    return *starts, math.prod(map(len, axes[axis:]))


def _moved(crc: np.ndarray, after: np.ndarray) -> np.ndarray:
    """The CRC-32 of each range of a file, moved on by the bytes that are `after` it there. Those of
    ranges that make up the file give its CRC-32 by exclusive or (zlib's crc32_combine)."""
    power = np.array(1 << 23)  # x^8; the highest bit is the coefficient of x^0
    while after.any():
        crc = np.where(after & 1, _times(crc, power), crc)
        power, after = _times(power, power), after >> 1
    return crc


def _times(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """The product of polynomials over GF(2), modulo CRC-32's."""
    product = a & 0
    for bit in range(31, -1, -1):
        product = product ^ (a >> bit & 1) * b
        b = b >> 1 ^ (b & 1) * 0xEDB88320
    return product
