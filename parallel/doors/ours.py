"""Our own checkpoints, as a `Foreign` and from one."""

import functools
import math
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

import torch

from base.errors import UsageError
from base.storage import STATE_BYTES_PER_PARAM
from models.config import GPTConfig, parameter_shapes
from models.tensor_files import write_safetensors
from models.weights import new_folder, write_weights
from parallel.checkpoint import folders
from parallel.checkpoint.manifest import IMPORTED, KINDS, rank_file
from parallel.checkpoint.rank_files import Reader
from parallel.config.layout import Layout
from parallel.doors import Foreign
from parallel.record.schema import utc_now

FILE_BYTES = 4 << 30  # of one file; a parameter is never cut


def read(folder: Path) -> Foreign:
    """A checkpoint of ours, all of whose bytes are checked first.

    Raises:
        UsageError: it is damaged, or of Hugging Face's model, whose parameters have other names.
    """
    manifest = folders.verify(folder)
    if manifest["implementation"] == "hf":
        raise UsageError(f"{folder} holds Hugging Face's own layout; only our GPT is read")
    config, step = GPTConfig(**manifest["model"]), manifest["step"]
    gathered = Reader(folder, manifest).gathered
    facts = {key: manifest.get(key) for key in ("run", "commit", "spec")}
    return Foreign(config, step, manifest["adam_step"], KINDS, gathered, facts)


def write(out: Path, foreign: Foreign, dtype: str = "fp32") -> int:
    """Write what `--load` takes: a folder with one checkpoint; without moments, the weights alone.
    One tensor at a time is in memory. The bytes that were written.

    Raises:
        UsageError: it cannot be written; nothing is left behind.
    """
    facts = {"step": foreign.step}
    facts |= {key: foreign.facts.get(key) for key in ("run", "commit")}
    if foreign.kinds != KINDS:
        weights = functools.partial(foreign.tensor, kind="param")
        return write_weights(out, foreign.config, weights, dtype, facts)
    with new_folder(out) as aside:
        folder = aside / folders.name_of(foreign.step)
        folder.mkdir()
        files = [
            _write_file(folder / rank_file(number), foreign, shapes)
            for number, shapes in enumerate(_groups(parameter_shapes(foreign.config)))
        ]
        manifest = facts | {
            "format": folders.FORMAT,
            "adam_step": foreign.adam_step,
            "time_utc": utc_now(),
            "engine": IMPORTED,
            "implementation": "gpt",
            "precision": "fp32",
            "world_size": len(files),
            "layout": asdict(Layout()),
            "model": foreign.config.as_dict(),
            "spec": {},
            "data": {"next_step": foreign.step},
            "scaler": {},
            "files": files,
        }
        folders.write_manifest(folder, manifest)
    return sum(file["bytes"] for file in files)


def _groups(shapes: dict[str, tuple[int, ...]]) -> Iterator[dict[str, tuple[int, ...]]]:
    """The parameters of each file."""
    group, size = {}, 0
    for name, shape in shapes.items():
        needed = STATE_BYTES_PER_PARAM * math.prod(shape)
        if group and size + needed > FILE_BYTES:
            yield group
            group, size = {}, 0
        group[name], size = shape, size + needed
    yield group


def _write_file(path: Path, foreign: Foreign, shapes: dict[str, tuple[int, ...]]) -> dict:
    """Write whole parameters and their moments; the file's entry in the manifest."""
    layout = {
        f"{kind}/{name}": (torch.float32, (math.prod(shape),))
        for name, shape in shapes.items()
        for kind in KINDS
    }
    values = (foreign.tensor(name, kind) for name in shapes for kind in KINDS)
    size, crc32 = write_safetensors(path, layout, values)
    pieces = [
        {"name": name, "shape": shape, "offset": (0,) * len(shape), "part": shape, "start": 0}
        | {"stop": math.prod(shape)}
        for name, shape in shapes.items()
    ]
    return {"path": path.name, "bytes": size, "crc32": crc32, "pieces": pieces}
