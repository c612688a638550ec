"""Folders of torch.distributed.checkpoint, which megatron-core's torch_dist is, too: a table,
`.metadata`, says which box of which tensor begins where in which file."""

import io
from collections import defaultdict
from collections.abc import Iterable
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
Shape = tuple[int, ...]


class Store:
    """What a folder holds. shapes: of its tensors. places: of whatever it stores, name -> offset of
    the box -> where it is."""

    def __init__(self, folder: Path):
        self.folder, self.places = folder, defaultdict(dict)
        table = pickles.read_table(folder / TABLE)
        with pickles.understood(folder / TABLE):
            metadata = table.state_dict_metadata.items()
            tensors = {name: tensor for name, tensor in metadata if hasattr(tensor, "chunks")}
            self.shapes = {name: tuple(tensor.size) for name, tensor in tensors.items()}
            self._parts = {n: [(c.offsets, c.sizes) for c in t.chunks] for n, t in tensors.items()}
            for index, place in table.storage_data.items():
                self.places[index.fqn][tuple(getattr(index, "offset", None) or ())] = place

    def load(self, name: str, offset: Shape = ()) -> Any:
        """A box of a tensor, or an object. Raises: UsageError: it is damaged, or may run code."""
        with pickles.understood(self.folder):
            place = self.places[name][offset]
            file = self.folder / Path(place.relative_path).name
            return pickles.load(file, place.offset, place.length)

    def tensor(self, name: str, layer: int | None = None) -> Tensor:
        """A full tensor, or one layer of a stacked one. Raises: UsageError: it is not there whole,
        or as `load`."""
        value, filled = torch.zeros(self.shapes[name][layer is not None :]), 0
        for offset, shape in self._parts[name]:
            where = [slice(o, o + n) for o, n in zip(offset, shape, strict=True)]
            if layer is not None and not where[0].start <= layer < where[0].stop:
                continue
            part = self.load(name, tuple(offset))
            if not isinstance(part, Tensor) or part.shape != shape:
                raise UsageError(f"{self.folder} is damaged: it holds another part of {name}")
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


def write(folder: Path, boxes: Iterable[Box]) -> None:
    """Write a store, a file for each box; one at a time is asked for, and in memory.

    Raises:
        OSError: the disk does not take it.
    """
    tensors: dict[str, Any] = {}
    places: dict[MetadataIndex, _StorageInfo] = {}
    for number, (names, shape, offset, content) in enumerate(boxes):
        torch.save(content, stream := io.BytesIO())
        place = _StorageInfo(f"__{number}_0.distcp", 0, stream.tell())
        write_blocks(folder / place.relative_path, [stream.getbuffer()])
        for name in names:
            if shape is None:
                tensors[name], places[MetadataIndex(name)] = BytesStorageMetadata(), place
                continue
            kind = TensorProperties(content.dtype)
            whole = TensorStorageMetadata(kind, torch.Size(shape), [])
            box = ChunkStorageMetadata(torch.Size(offset), content.shape)
            tensors.setdefault(name, whole).chunks.append(box)
            places[MetadataIndex(name, offset)] = place
    pickles.write_table(folder / TABLE, Metadata(tensors, storage_data=places))
