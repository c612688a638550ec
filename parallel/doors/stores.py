"""Folders of torch.distributed.checkpoint, which megatron-core's torch_dist is, too: a table,
`.metadata`, says which box of which tensor begins where in which file."""

import io
from collections.abc import Callable, Iterable, Iterator
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
        try:
            with self.file.open("rb") as stream:
                stream.seek(self.begin)
                return pickles.load(io.BytesIO(stream.read(self.size)), self.file)
        except OSError as error:
            raise UsageError(f"{self.file}: {error.strerror}") from error


class Store:
    """What a folder holds. shapes: of its tensors. objects: what else it stores, by name."""

    def __init__(self, folder: Path):
        table = pickles.read_table(folder / TABLE)
        self.folder, self.shapes, self.objects, self.boxes = folder, {}, {}, {}
        try:
            for name, kept in table.state_dict_metadata.items():
                if hasattr(kept, "chunks"):
                    self.shapes[name], self.boxes[name] = tuple(kept.size), []
            parts = {
                (name, tuple(box.offsets)): tuple(box.sizes)
                for name in self.shapes
                for box in table.state_dict_metadata[name].chunks
            }
            for index, place in table.storage_data.items():
                file = folder / Path(place.relative_path).name
                if getattr(place, "transform_descriptors", None):
                    raise UsageError(f"{file} is compressed: save it without extensions")
                name, offset = index.fqn, tuple(getattr(index, "offset", None) or ())
                stored = Stored(file, place.offset, place.length, offset)
                if name in self.boxes:
                    stored = stored._replace(part=parts[name, offset])
                    self.boxes[name].append(stored)
                else:
                    self.objects[name] = stored
        except (AttributeError, KeyError, TypeError) as error:
            raise UsageError(f"{folder / TABLE} is damaged: {error!r:.80}") from error

    def tensor(self, name: str, layer: int | None = None) -> Tensor:
        """A full tensor, or one layer of a stacked one, on the CPU.

        Raises:
            UsageError: its files do not hold all of it, or hold what may run code.
        """
        shape, value, missing = self.shapes[name], None, 0
        begin = 0 if layer is None else layer
        wanted = shape if layer is None else (1, *shape[1:])
        for box in self.boxes[name]:
            first, last = begin, begin + (wanted[0] if wanted else 0)
            if wanted and (box.offset[0] >= last or box.offset[0] + box.part[0] <= first):
                continue
            part = box.load()
            if not isinstance(part, Tensor) or tuple(part.shape) != box.part:
                raise UsageError(f"{box.file} is damaged: it holds another part of {name}")
            if value is None:
                value = torch.empty(wanted, dtype=part.dtype)
                missing = value.numel()
            offset = box.offset
            if layer is not None:
                part = part[layer - offset[0] :][:1]
                offset = (0, *offset[1:])
            value[tuple(map(_range, offset, part.shape))] = part
            missing -= part.numel()
        if value is None or missing:
            raise UsageError(f"{self.folder} does not hold all of {name}")
        return value if layer is None else value[0]


def _range(begin: int, n: int) -> slice:
    return slice(begin, begin + n)


class Box(NamedTuple):
    """What to write: the part at `offset` of each tensor of `names`, all of this shape, whose bytes
    are stored once; or an object, of a shape of None."""

    names: list[str]
    shape: Shape | None
    offset: Shape
    content: Callable[[], Any]


def write(folder: Path, boxes: Iterable[Box]) -> None:
    """Write a store; one box at a time is in memory.

    Raises:
        OSError: the disk does not take it.
    """
    tensors: dict[str, Any] = {}
    places, waiting, number = {}, list(reversed(list(boxes))), 0
    while waiting:
        file = f"__{number}_0.distcp"
        write_blocks(folder / file, _blocks(file, waiting, tensors, places))
        number += 1
    pickles.write_table(folder / TABLE, Metadata(tensors, storage_data=places))


def _blocks(
    file: str, waiting: list[Box], tensors: dict[str, Any], places: dict
) -> Iterator[memoryview]:
    """The bytes of a file of some gigabytes, of the last boxes that wait; notes where each is."""
    begin = 0
    while waiting and begin < FILE_BYTES:
        names, shape, offset, content = waiting.pop()
        content, stream = content(), io.BytesIO()
        torch.save(content, stream)
        place = _StorageInfo(file, begin, stream.tell())
        for name in names:
            if shape is None:
                tensors[name] = BytesStorageMetadata()
                places[MetadataIndex(name)] = place
                continue
            empty = TensorStorageMetadata(TensorProperties(content.dtype), torch.Size(shape), [])
            box = ChunkStorageMetadata(torch.Size(offset), content.shape)
            tensors.setdefault(name, empty).chunks.append(box)
            places[MetadataIndex(name, offset)] = place
        yield stream.getbuffer()
        begin += place.length
