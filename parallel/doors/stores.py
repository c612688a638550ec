"""Folders of torch.distributed.checkpoint, which megatron-core's torch_dist is, too: a table,
`.metadata`, says which box of which tensor begins where in which file."""

import io
import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from base.errors import UsageError
from base.storage import write_blocks
from parallel.doors import pickles

TABLE = ".metadata"
FILE_BYTES = 4 << 30
Shape = tuple[int, ...]


class Stored(NamedTuple):
    """A box of a tensor, or an object (no offset), in a file."""

    file: Path
    begin: int
    size: int
    offset: Shape = ()
    part: Shape = ()

    def load(self) -> Any:
        """Raises: UsageError: it is damaged, or holds what may run code."""
        with self.file.open("rb") as stream:
            stream.seek(self.begin)
            return pickles.load(io.BytesIO(stream.read(self.size)), self.file)


class Store:
    """What a folder holds. shapes: of its tensors. objects: whatever it stores, by name."""

    def __init__(self, folder: Path):
        table, self.folder = pickles.read_table(folder / TABLE), folder
        self.shapes: dict[str, Shape] = {}
        self.boxes: dict[str, list[Stored]] = {}
        self.objects: dict[str, Stored] = {}
        try:
            parts = {}
            for name, kept in table.state_dict_metadata.items():
                if hasattr(kept, "chunks"):
                    self.shapes[name], self.boxes[name] = tuple(kept.size), []
                    parts |= {(name, tuple(c.offsets)): tuple(c.sizes) for c in kept.chunks}
            for index, place in table.storage_data.items():
                file = folder / Path(place.relative_path).name
                if getattr(place, "transform_descriptors", None):
                    raise UsageError(f"{file} is compressed: save it without extensions")
                offset = tuple(getattr(index, "offset", None) or ())
                part = parts.get((index.fqn, offset), ())
                stored = Stored(file, place.offset, place.length, offset, part)
                self.boxes.get(index.fqn, []).append(stored)
                self.objects[index.fqn] = stored
        except (AttributeError, TypeError) as error:
            raise UsageError(f"{folder / TABLE} is damaged: {error!r:.80}") from error

    def tensor(self, name: str, layer: int | None = None) -> Tensor:
        """A full tensor, or one layer of a stacked one, on the CPU.

        Raises:
            UsageError: its files do not hold all of it, or hold what may run code.
        """
        shape = self.shapes[name]
        value, filled = torch.zeros(shape[layer is not None :]), 0
        for box in self.boxes[name]:
            where = [slice(o, o + n) for o, n in zip(box.offset, box.part, strict=True)]
            if layer is not None and not where[0].start <= layer < where[0].stop:
                continue
            part = box.load()
            if not isinstance(part, Tensor) or tuple(part.shape) != box.part:
                raise UsageError(f"{box.file} is damaged: it holds another part of {name}")
            if layer is not None:
                part = part[layer - where.pop(0).start]
            value[tuple(where)] = part
            filled += part.numel()
        if filled != value.numel():
            raise UsageError(f"{self.folder} does not hold all of {name}")
        return value


class Box(NamedTuple):
    """What to write: the part at `offset` of each tensor of `names`, all of this shape, whose bytes
    are stored once; or an object, of a shape of None."""

    names: list[str]
    shape: Shape | None
    offset: Shape
    content: Any


def write(folder: Path, boxes: Iterator[Box]) -> None:
    """Write a store; one box at a time is asked for, and in memory.

    Raises:
        OSError: the disk does not take it.
    """
    tensors: dict[str, Any] = {}
    places: dict[MetadataIndex, _StorageInfo] = {}

    def blocks(file: str, boxes: Iterator[Box]) -> Iterator[memoryview]:
        """The bytes of a file of some gigabytes."""
        begin = 0
        for names, shape, offset, content in boxes:
            torch.save(content, stream := io.BytesIO())
            place = _StorageInfo(file, begin, stream.tell())
            for name in names:
                if shape is None:
                    tensors[name], places[MetadataIndex(name)] = BytesStorageMetadata(), place
                    continue
                kind = TensorProperties(content.dtype)
                whole = TensorStorageMetadata(kind, torch.Size(shape), [])
                box = ChunkStorageMetadata(torch.Size(offset), content.shape)
                tensors.setdefault(name, whole).chunks.append(box)
                places[MetadataIndex(name, offset)] = place
            yield stream.getbuffer()
            begin += place.length
            if begin >= FILE_BYTES:
                return

    for number in itertools.count():
        if (first := next(boxes, None)) is None:
            break
        file = f"__{number}_0.distcp"
        write_blocks(folder / file, blocks(file, itertools.chain([first], boxes)))
    pickles.write_table(folder / TABLE, Metadata(tensors, storage_data=places))
