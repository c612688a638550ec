"""Weights-only folders: a GPT's weights whole, named as the reference GPT names them.

model.safetensors  every parameter once, unpadded, in one dtype; the tied output layer is not there
config.json        the model's sizes, the dtype, the bytes and CRC-32 of model.safetensors, and what
                   the writer adds (step, run, ...)

The layout that trained them does not show, so any engine can start from such a folder and
`python -m models.hf` can turn it into a Hugging Face directory and back. A folder is there whole
or not at all. Nothing in it is ever unpickled.
"""

import json
import shutil
import zlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass, field
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from models.config import GPTConfig, parameter_shapes
from models.errors import UsageError
from models.files import parse_json
from models.storage import BYTES, sync, write_blocks

TENSORS, CONFIG = "model.safetensors", "config.json"
FORMAT = "gpt-weights-1"
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
_CODES = {"fp32": "F32", "bf16": "BF16", "fp16": "F16"}  # safetensors' names
_PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl")


@dataclass(frozen=True)
class Weights:
    """What `read_weights` found; tensors are read one at a time, when asked for."""

    path: Path
    config: GPTConfig
    dtype: str
    facts: dict[str, Any] = field(default_factory=dict)  # what the writer added

    def tensor(self, name: str) -> Tensor:
        """One parameter, whole, on the CPU, in the dtype that it is stored in."""
        with safe_open(self.path / TENSORS, framework="pt") as stored:
            return stored.get_tensor(name)

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Every parameter in the model's order."""
        with safe_open(self.path / TENSORS, framework="pt") as stored:
            for name in parameter_shapes(self.config):
                yield name, stored.get_tensor(name)


def write_weights(
    folder: Path | str,
    config: GPTConfig,
    tensor: Callable[[str], Tensor],
    dtype: str = "bf16",
    facts: dict[str, Any] | None = None,
    beside: Iterable[Path] = (),
) -> int:
    """Write a weights-only folder and return its bytes.

    tensor(name) gives each of `models.config.parameter_shapes(config)`, whole, on any device; it is
    asked for one at a time and in that order, so that only one need ever be whole in memory.
    `facts` are added to config.json, the files `beside` (a tokenizer's) are copied along. A folder
    of that name is replaced when the new one is complete.

    Raises:
        UsageError: the folder cannot be written (disk full ...); nothing is left behind.
        ValueError: a tensor has another shape than the model's.
    """
    shapes = parameter_shapes(config)

    def values() -> Iterator[Tensor]:
        for name, shape in shapes.items():
            value = tensor(name)
            if tuple(value.shape) != shape:
                raise ValueError(f"{name} is {tuple(value.shape)}, the model has {shape}")
            yield value

    with Aside(folder) as aside:
        size, crc32 = write_safetensors(aside / TENSORS, shapes, values(), dtype)
        described = {
            "format": FORMAT,
            "model": asdict(config),
            "n_params": config.n_params,
            "dtype": dtype,
            "safetensors": {"bytes": size, "crc32": crc32},
            **(facts or {}),
        }
        copy_beside(beside, aside)
        return size + write_text(aside / CONFIG, json.dumps(described, indent=2) + "\n")


def read_weights(
    folder: Path | str, verify: bool = True, tick: Callable[[], None] = lambda: None
) -> Weights:
    """Open a weights-only folder; with `verify` its checksum is computed first, with a `tick` for
    every few megabytes.

    Raises:
        UsageError: missing, torn, altered, or not such a folder; it names the file and the numbers.
    """
    folder = Path(folder)
    described = read_json(folder / CONFIG)
    if described.get("format") != FORMAT:
        hint = "; import it first: python -m models.hf import" if "model_type" in described else ""
        raise UsageError(f"{folder / CONFIG} describes no weights-only folder of ours{hint}")
    refuse_pickles(folder)
    known = ("format", "model", "n_params", "dtype", "safetensors")
    try:
        config = GPTConfig(**described["model"])
        n_params, dtype, stated = (described[key] for key in known[2:])
        size, crc32, code = stated["bytes"], stated["crc32"], _CODES[dtype]
    except (KeyError, TypeError, UsageError) as error:
        raise UsageError(f"{folder / CONFIG} is damaged: {error!r}") from error
    path = folder / TENSORS
    try:
        found = path.stat().st_size
        if found != size:
            raise UsageError(f"{path} is damaged: {found} bytes, written were {size!r:.60}")
        if verify and _crc32(path, tick) != crc32:
            raise UsageError(f"{path} is damaged: its bytes have changed since they were written")
    except OSError as error:
        raise UsageError(f"{path}: {error.strerror}") from error
    stored = stored_tensors(path)
    if len(stored) != config.n_parameters:  # before as many names are made as config.json asks for
        raise UsageError(f"{path} holds {len(stored)} tensors, the model has {config.n_parameters}")
    if others := sorted({other for other, _ in stored.values()} - {code}):
        raise UsageError(f"{path} holds {', '.join(others)}, not {dtype} as its {CONFIG} says")
    shapes = {name: shape for name, (_, shape) in stored.items()}
    if problems := differing(shapes, parameter_shapes(config)):
        raise UsageError(f"{path} is not the model of its {CONFIG}: {problems}")
    if n_params != config.n_params:
        raise UsageError(
            f"{folder / CONFIG} is damaged: n_params is {n_params!r:.60}, not {config.n_params}"
        )
    facts = {k: v for k, v in described.items() if k not in known}
    return Weights(folder, config, dtype, facts)


# --- files, shared with Hugging Face's directories ------------------------------------------------


class Aside:
    """A folder that is written aside and takes its name, on disk, when it is whole.

    `with Aside(folder) as aside:` gives an empty folder beside it; leaving syncs and renames it,
    replacing an older `folder`; an exception removes it, and an OSError becomes a UsageError.
    """

    def __init__(self, folder: Path | str):
        self.folder = Path(folder).absolute()
        # One name, whoever writes: what a killed writer left is cleared by the next.
        self.aside = self.folder.with_name(f".{self.folder.name}.partial")
        self.old = self.folder.with_name(f".{self.folder.name}.old")

    def __enter__(self) -> Path:
        try:
            shutil.rmtree(self.aside, ignore_errors=True)
            self.aside.mkdir(parents=True)
        except OSError as error:
            raise self._refusal(error) from error
        return self.aside

    def __exit__(self, kind, error, traceback) -> None:
        try:
            if error is None:
                sync(self.aside)
                shutil.rmtree(self.old, ignore_errors=True)
                if self.folder.exists():
                    self.folder.rename(self.old)
                self.aside.rename(self.folder)
                sync(self.folder.parent)
                shutil.rmtree(self.old, ignore_errors=True)
        except OSError as failed:
            error = failed
        if error is not None:
            shutil.rmtree(self.aside, ignore_errors=True)
        if isinstance(error, OSError):
            raise self._refusal(error) from error

    def _refusal(self, error: OSError) -> UsageError:
        return UsageError(f"cannot write {self.folder}: {error.strerror or error}")


def write_text(path: Path, text: str) -> int:
    """Write and sync a small file; returns its bytes."""
    path.write_text(text)
    sync(path)
    return path.stat().st_size


def copy_beside(files: Iterable[Path], folder: Path) -> None:
    """Copy files byte for byte and sync them."""
    for file in files:
        shutil.copyfile(file, folder / file.name)
        sync(folder / file.name)


def write_safetensors(
    path: Path, shapes: dict[str, tuple[int, ...]], values: Iterable[Tensor], dtype: str
) -> tuple[int, int]:
    """Write tensors, in the order of `shapes`, as one safetensors file: (bytes, CRC-32).

    By hand, because the library wants all of them in memory: the format is the header's length in
    8 bytes, a JSON header of dtype, shape and place, and then the bytes (safetensors' README).
    CRC-32 finds accidents, not forgeries; SHA-256 would be slower than a disk.
    """
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, shape in shapes.items():
        start, end = end, end + BYTES[dtype] * torch.Size(shape).numel()
        header[name] = {"dtype": _CODES[dtype], "shape": shape, "data_offsets": [start, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    blocks = chain(
        [len(text).to_bytes(8, "little") + text],
        (
            value.detach().to("cpu", DTYPES[dtype]).flatten().view(torch.uint8).numpy().data
            for value in values
        ),
    )
    return write_blocks(path, blocks)


def stored_tensors(path: Path) -> dict[str, tuple[str, tuple[int, ...]]]:
    """name -> (safetensors' dtype, shape) of a safetensors file.

    Raises:
        UsageError: missing, or no whole safetensors file.
    """
    try:
        with safe_open(path, framework="pt") as stored:
            parts = {name: stored.get_slice(name) for name in stored.keys()}
            return {n: (part.get_dtype(), tuple(part.get_shape())) for n, part in parts.items()}
    except OSError as error:
        raise UsageError(f"{path}: {error.strerror or error}") from error
    except SafetensorError as error:
        raise UsageError(f"{path} is damaged, or no safetensors file: {error}") from error


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object.

    Raises:
        UsageError: missing or damaged.
    """
    try:
        found = parse_json(path.read_text())
    except OSError as error:
        raise UsageError(f"{path}: {error.strerror}") from error
    except ValueError as error:
        raise UsageError(f"{path} is damaged: {error}") from error
    if not isinstance(found, dict):
        raise UsageError(f"{path} is damaged: it is no JSON object")
    return found


def refuse_pickles(folder: Path) -> None:
    """Refuse a folder without safetensors; one of pickles is told what to do.

    Raises:
        UsageError: no safetensors file there.
    """
    if any(folder.glob("*.safetensors")):
        return
    pickles = sorted(p.name for p in folder.iterdir() if p.suffix in _PICKLES)
    if not pickles:
        raise UsageError(f"{folder / TENSORS}: No such file or directory")
    raise UsageError(
        f"{folder} holds pickles ({', '.join(pickles[:3])}), which can run code when read, so only"
        " safetensors is: where you trust it, load it with transformers and save_pretrained() it"
    )


def differing(found: dict[str, tuple], wanted: dict[str, tuple], shown: int = 3) -> str:
    """What of `wanted` is missing, of another shape or more than wanted in `found`; "" if none."""
    problems = [f"{n} is missing" for n in wanted if n not in found]
    problems += [f"{n} is unknown" for n in found if n not in wanted]
    problems += [
        f"{n} is {list(found[n])}, not {list(wanted[n])}"
        for n in wanted
        if n in found and found[n] != wanted[n]
    ]
    more = f" and {len(problems) - shown} more" if len(problems) > shown else ""
    return "; ".join(problems[:shown]) + more


def _crc32(path: Path, tick: Callable[[], None]) -> int:
    crc32 = 0
    with path.open("rb") as file:
        while block := file.read(1 << 22):
            crc32 = zlib.crc32(block, crc32)
            tick()
    return crc32
