"""The weights of our GPT in Hugging Face's directories, read and written.

    config.json        the model's sizes and arithmetic, as transformers' class has them
    model.safetensors  every parameter once, in one dtype; or parts, which an index names

The arithmetic is the same, only names and layouts differ (models/hf_config.py). Our qkv rows are
group by group: the queries of a group's heads, its key, its value. Hugging Face has all queries,
all keys, all values, in one matrix or in three. transformers is not needed. A directory is there
complete or not at all, and nothing in it is ever unpickled.
"""

import json
import shutil
from bisect import bisect
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from typing import NamedTuple

import torch
from safetensors import safe_open
from torch import Tensor

from base.errors import UsageError
from base.files import read_json
from base.storage import new_folder, sync, write_synced
from models.config import GPTConfig, parameter_shapes
from models.hf_config import (
    CONFIG,
    architecture,
    config_of,
    hugging_face_config,
    hugging_face_names,
)
from models.tensor_files import DTYPES, stored_shapes, write_safetensors

TENSORS = "model.safetensors"
Box = tuple[slice, ...]
_METADATA = {"format": "pt"}  # as the library's own writer for PyTorch puts it
_PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl")
_INDEX = "model.safetensors.index.json"
_EMBEDDING = "embedding.word.weight"
_HEAD = "lm_head.weight"  # where it is tied, some files repeat the embedding under this name
_CONSTANTS = (".attn.bias", ".attn.masked_bias", ".rotary_emb.inv_freq")  # in old files


class Tokenizer(NamedTuple):
    """The files of a tokenizer to send along, how many ids it has, and the id that ends a text."""

    paths: Sequence[Path] = ()
    ids: int = 0
    end: int | None = None


NO_TOKENIZER = Tokenizer()


def to_hugging_face(config: GPTConfig, name: str, value: Tensor) -> list[Tensor]:
    """Returns a whole reference parameter, called `name`, as transformers' class has it: one tensor
    for each of `hugging_face_names`."""
    parts = [value]
    if ".attn.qkv." in name:
        group = value.unflatten(0, (config.kv_heads, -1, config.head_dim))
        parts = [rows.flatten(0, 2) for rows in group.split(_group_rows(config), dim=1)]
        if len(hugging_face_names(config, name)) == 1:
            parts = [torch.cat(parts)]
    transposed = _is_transposed(config, name, value.dim())
    return [(part.t() if transposed else part).contiguous() for part in parts]


def _stored_rows(config: GPTConfig, name: str, rows: range) -> Iterator[tuple[int, range]]:
    """Yields where transformers' class has rows of a reference parameter, range after range:
    which of its `hugging_face_names`, and the rows in that tensor."""
    if ".attn.qkv." not in name:
        yield 0, rows
        return
    sizes = [config.head_dim * heads for heads in _group_rows(config)]
    starts, row = [0, sizes[0], sum(sizes[:2])], rows.start
    joined = len(hugging_face_names(config, name)) == 1
    while row < rows.stop:
        group, group_row = divmod(row, sum(sizes))
        part = bisect(starts, group_row) - 1
        group_row -= starts[part]
        n = min(sizes[part] - group_row, rows.stop - row)
        first = group * sizes[part] + group_row + joined * config.kv_heads * starts[part]
        yield (0 if joined else part), range(first, first + n)
        row += n


def from_hugging_face(config: GPTConfig, name: str, parts: list[Tensor]) -> Tensor:
    """Inverts `to_hugging_face`, without padded vocabulary rows."""
    return _box(config, name, (slice(None),), lambda part, box: parts[part][box])


def _box(config: GPTConfig, name: str, box: Box, read: Callable[[int, Box], Tensor]) -> Tensor:
    """Returns a box of a reference parameter. read(number, box) gives a box of the tensor with
    the name of that number in `hugging_face_names`."""
    shape, (rows, *columns) = parameter_shapes(config)[name], box
    transposed, boxes = _is_transposed(config, name, len(shape)), []
    for number, stored in _stored_rows(config, name, range(shape[0])[rows]):
        stored_rows = slice(stored.start, stored.stop)
        if transposed:
            boxes.append(read(number, (*(columns or [slice(None)]), stored_rows)).t())
        else:
            boxes.append(read(number, (stored_rows, *columns)))
    return torch.cat(boxes)


def _group_rows(config: GPTConfig) -> list[int]:
    """Returns how many heads of queries, of keys and of values a group has."""
    return [config.n_head // config.kv_heads, 1, 1]


def _is_transposed(config: GPTConfig, name: str, dims: int) -> bool:
    """Returns whether the class stores a parameter transposed: a matrix of a block."""
    return name.startswith("blocks.") and dims == 2 and architecture(config).transposed


def _their_shapes(config: GPTConfig) -> dict[str, tuple[int, ...]]:
    """Returns the names and shapes of transformers' class, in the order of our model."""
    shapes = {}
    for name, shape in parameter_shapes(config).items():
        parts = to_hugging_face(config, name, torch.empty(shape, device="meta"))
        named = zip(hugging_face_names(config, name), parts, strict=True)
        shapes |= {theirs: tuple(part.shape) for theirs, part in named}
    return shapes


# --- import --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class HuggingFaceFolder:
    """A Hugging Face directory, checked. stored: transformers' name -> (file, its name there)."""

    config: GPTConfig
    stored: dict[str, tuple[Path, str]]

    @property
    def bytes(self) -> int:
        """Returns the bytes of its weight files."""
        return sum(file.stat().st_size for file in {file for file, _ in self.stored.values()})

    def tensor(self, name: str, box: Box = (slice(None),)) -> Tensor:
        """Returns a parameter as the reference GPT has it, or a box of it; no other bytes are
        read."""
        theirs = hugging_face_names(self.config, name)
        return _box(
            self.config, name, box, lambda part, part_box: self._stored(theirs[part], part_box)
        )

    def _stored(self, name: str, box: Box = (slice(None),)) -> Tensor:
        """Returns a box of the tensor that transformers calls `name`, as its file has it."""
        file, stored_name = self.stored[name]
        with safe_open(file, framework="pt") as tensors:
            return tensors.get_slice(stored_name)[box]


def open_hugging_face(source: Path) -> HuggingFaceFolder:
    """Returns a Hugging Face directory, whose model is checked to be one that our GPT can be. Rows
    of the embedding beyond config.json's vocab_size are padding and are cut.

    Raises:
        UsageError: there is no model in safetensors, or one that our GPT cannot be.
    """
    described = read_json(source / CONFIG)
    config, model_class = config_of(described, source / CONFIG)
    _refuse_pickles(source)
    stored, shapes = {}, {}
    for file in _files(source):
        for stored_name, shape in stored_shapes(file).items():
            if not stored_name.endswith(_CONSTANTS):
                is_full = stored_name.startswith((model_class.prefix, _HEAD))
                name = stored_name if is_full else model_class.prefix + stored_name
                stored[name], shapes[name] = (file, stored_name), shape
    (embedding,) = hugging_face_names(config, _EMBEDDING)
    if embedding not in stored:
        raise UsageError(f"{source}: {embedding} is missing")
    rows = next(iter(shapes[embedding]), 0)
    repeated = config.tied and shapes.pop(_HEAD, None)
    if problems := differing(shapes, _their_shapes(replace(config, vocab_size=rows))):
        raise UsageError(f"{source} is not the model of its {CONFIG}: {problems}")
    if rows < config.vocab_size:
        raise UsageError(
            f"{source}: the embedding has {rows} rows for a vocabulary of {config.vocab_size}"
        )
    model = HuggingFaceFolder(config, stored)
    if repeated and not model._stored(_HEAD).equal(model._stored(embedding)):
        raise UsageError(
            f"{source}: {_HEAD} differs from {embedding.partition('.')[2]}, but {CONFIG} ties the"
            " output layer to it"
        )
    return model


def _files(source: Path) -> list[Path]:
    """Returns the one safetensors file, or the parts that an index names."""
    if (source / TENSORS).exists() or not (source / _INDEX).exists():
        return [source / TENSORS]
    parts = read_json(source / _INDEX).get("weight_map")
    if not isinstance(parts, dict) or any(Path(str(p)).name != p for p in parts.values()):
        raise UsageError(f"{source / _INDEX} is damaged: it does not map tensors to files here")
    return [source / part for part in sorted(set(parts.values()))]


def _refuse_pickles(folder: Path) -> None:
    """Refuses a folder without a safetensors file; where there are pickles, it says what to do."""
    if any(folder.glob("*.safetensors")):
        return
    pickles = sorted(p.name for p in folder.iterdir() if p.suffix in _PICKLES)
    if not pickles:
        raise UsageError(f"{folder / TENSORS}: No such file or directory")
    raise UsageError(
        f"{folder} holds pickles ({', '.join(pickles[:3])}), which can run code when read, so only"
        " safetensors is: where you trust it, load it with transformers and save_pretrained() it"
    )


def differing(stored: dict[str, tuple], wanted: dict[str, tuple]) -> str:
    """Returns what of `wanted` is missing in `stored`, unknown there or of another shape; "" where
    nothing is."""
    problems = [f"{name} is missing" for name in wanted if name not in stored]
    problems += [f"{name} is unknown" for name in stored if name not in wanted]
    misshapen = [name for name in wanted if name in stored and stored[name] != wanted[name]]
    problems += [f"{name} is {list(stored[name])}, not {list(wanted[name])}" for name in misshapen]
    more = f" and {len(problems) - 3} more" if len(problems) > 3 else ""
    return "; ".join(problems[:3]) + more


# --- export --------------------------------------------------------------------------------------


def write_hugging_face(
    folder: Path,
    config: GPTConfig,
    tensor: Callable[[str], Tensor],
    dtype: str = "bf16",
    tokenizer: Tokenizer = NO_TOKENIZER,
) -> int:
    """Writes a directory that transformers' class loads (from_pretrained), and returns the bytes of
    its tensors.

    tensor(name) gives each parameter of `models.config.parameter_shapes` whole, on any device. They
    are asked for one at a time, so that one at a time is in memory.

    Raises:
        UsageError: no class has this model, the tokenizer has an id without a row, or the folder
            cannot be written; nothing is left behind.
    """
    model_class = architecture(config)
    if tokenizer.ids > config.vocab_size:
        raise UsageError(
            f"the tokenizer has {tokenizer.ids} ids, but the model has {config.vocab_size}"
            " embedding rows"
        )
    values = (to_hugging_face(config, name, tensor(name)) for name in parameter_shapes(config))
    described = {"architectures": [model_class.name], "model_type": model_class.model_type}
    described |= hugging_face_config(config)
    described |= {"bos_token_id": tokenizer.end, "eos_token_id": tokenizer.end}
    described["dtype"] = str(DTYPES[dtype]).removeprefix("torch.")
    with new_folder(folder) as aside:
        layout = {n: (DTYPES[dtype], shape) for n, shape in _their_shapes(config).items()}
        tensors = chain.from_iterable(values)
        size, _ = write_safetensors(aside / TENSORS, layout, tensors, _METADATA)
        write_synced(aside / CONFIG, json.dumps(described, indent=2) + "\n")
        for file in tokenizer.paths:
            shutil.copyfile(file, aside / file.name)
            sync(aside / file.name)
    return size
