"""Weights-only folders: every parameter of a GPT once, under the reference GPT's name.

model.safetensors  the parameters, unpadded, in one dtype; the tied output layer is not repeated
config.json        the model's sizes, the dtype, the bytes and CRC-32 of model.safetensors, what the
                   writer adds (step, run, ...), and its own CRC-32

They do not depend on the layout that trained them: any engine can start from such a folder, and
`python -m models.hf export` makes a Hugging Face directory of it. A folder is there complete or not
at all. Nothing in it is ever unpickled.
"""

import contextlib
import json
import shutil
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from safetensors import safe_open
from torch import Tensor

from base.bounds import Count, Whole, Words, misfit
from base.errors import UsageError
from base.storage import file_crc32, own_crc32, publish, stored_tensors, sync, write_synced
from models.config import GPTConfig, parameter_shapes
from models.tensor_files import CODES, DTYPES, write_safetensors
from models.weights_config import CONFIG, FORMAT, read_description

TENSORS = "model.safetensors"
METADATA = {"format": "pt"}  # as the library's own writer for PyTorch puts it
_COUNT = Count(0, 2**63)
_STORED = Whole({"bytes": _COUNT, "crc32": _COUNT})
_DESCRIBED = Whole({"dtype": Words(DTYPES), "safetensors": _STORED})
_PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl")


class Weights(NamedTuple):
    """What `read_weights` found; tensors are read one at a time, when asked for."""

    path: Path
    config: GPTConfig
    dtype: str

    @property
    def bytes(self) -> int:
        return (self.path / TENSORS).stat().st_size

    def tensor(self, name: str, box: tuple[slice, ...] = (slice(None),)) -> Tensor:
        """A parameter, or a box of it, on the CPU, in the dtype that it is stored in."""
        with safe_open(self.path / TENSORS, framework="pt") as stored:
            return stored.get_slice(name)[box]


def write_weights(
    folder: Path,
    config: GPTConfig,
    tensor: Callable[[str], Tensor],
    dtype: str = "bf16",
    facts: dict[str, Any] | None = None,
    beside: Iterable[Path] = (),
) -> int:
    """Write a weights-only folder and return its bytes.

    tensor(name) gives each parameter of `models.config.parameter_shapes(config)` in full, on any
    device. They are asked for one at a time in that order, so that one at a time is in memory.
    `facts` are added to config.json; the files `beside` (a tokenizer's) are copied along. A folder
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

    with new_folder(folder) as aside:
        layout = {name: (DTYPES[dtype], shape) for name, shape in shapes.items()}
        size, crc32 = write_safetensors(aside / TENSORS, layout, values(), METADATA)
        described = {"format": FORMAT, "model": config.as_dict(), "n_params": config.n_params}
        described |= {"dtype": dtype, "safetensors": {"bytes": size, "crc32": crc32}}
        described |= facts or {}
        described["crc32"] = own_crc32(described)
        copy_beside(beside, aside)
        write_synced(aside / CONFIG, json.dumps(described, indent=2) + "\n")
        return size + (aside / CONFIG).stat().st_size


def read_weights(folder: Path, tick: Callable[[], None] = lambda: None) -> Weights:
    """Open a weights-only folder; its checksum is compared first, with a tick for every few
    megabytes.

    Raises:
        UsageError: missing, altered, or not such a folder; it names the file and the numbers.
    """
    config, described = read_description(folder)
    refuse_pickles(folder)
    if problem := misfit(described, _DESCRIBED):
        raise UsageError(f"{folder / CONFIG} is damaged: {problem}")
    dtype, written = (described[key] for key in _DESCRIBED)
    path = folder / TENSORS
    try:
        if (size := path.stat().st_size) != written["bytes"]:
            raise UsageError(f"{path} is damaged: {size} bytes, written were {written['bytes']}")
        if file_crc32(path, tick) != written["crc32"]:
            raise UsageError(f"{path} is damaged: its bytes have changed since they were written")
    except OSError as error:
        raise UsageError(f"{path}: {error.strerror}") from error
    stored = stored_tensors(path)
    if len(stored) != config.n_parameters:  # before as many names are made as config.json asks for
        raise UsageError(f"{path} holds {len(stored)} tensors, the model has {config.n_parameters}")
    if others := sorted({other for other, _ in stored.values()} - {CODES[DTYPES[dtype]]}):
        raise UsageError(f"{path} holds {', '.join(others)}, not {dtype} as its {CONFIG} says")
    shapes = {name: shape for name, (_, shape) in stored.items()}
    if problems := differing(shapes, parameter_shapes(config)):
        raise UsageError(f"{path} is not the model of its {CONFIG}: {problems}")
    return Weights(folder, config, dtype)


# --- files, shared with Hugging Face's directories ------------------------------------------------


@contextlib.contextmanager
def new_folder(folder: Path) -> Iterator[Path]:
    """An empty folder beside `folder` that takes its name when the block ends, replacing an older
    one. After an exception nothing of it is left.

    Raises:
        UsageError: for an OSError inside.
    """
    folder = folder.absolute()
    # One name, whoever writes: what a killed writer left is cleared by the next.
    aside = folder.with_name(f".{folder.name}.partial")
    try:
        shutil.rmtree(aside, ignore_errors=True)
        aside.mkdir(parents=True)
        yield aside
        publish(aside, folder)
    except OSError as error:
        raise UsageError(f"cannot write {folder}: {error.strerror or error}") from error
    finally:
        shutil.rmtree(aside, ignore_errors=True)


def copy_beside(files: Iterable[Path], folder: Path) -> None:
    """Copy files byte for byte and sync them."""
    for file in files:
        shutil.copyfile(file, folder / file.name)
        sync(folder / file.name)


def refuse_pickles(folder: Path) -> None:
    """Raises: UsageError: no safetensors file there; where there are pickles, with what to do."""
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
    """What of `wanted` is missing, of another shape or more than wanted in `stored`; "" if none."""
    problems = [f"{n} is missing" for n in wanted if n not in stored]
    problems += [f"{n} is unknown" for n in stored if n not in wanted]
    both = [n for n in wanted if n in stored and stored[n] != wanted[n]]
    problems += [f"{n} is {list(stored[n])}, not {list(wanted[n])}" for n in both]
    more = f" and {len(problems) - 3} more" if len(problems) > 3 else ""
    return "; ".join(problems[:3]) + more
