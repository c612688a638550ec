"""Our own checkpoints, as a `Foreign` and from one."""

import functools
import itertools
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from base.errors import UsageError
from base.storage import STATE_BYTES_PER_PARAM
from models.config import GPTConfig, parameter_shapes
from models.weights import new_folder, write_weights
from parallel.checkpoint import folders
from parallel.checkpoint.contents import KINDS, Piece
from parallel.checkpoint.doors import Foreign
from parallel.checkpoint.rank_files import Reader, write_rank_file
from parallel.config.layout import Layout
from parallel.record.schema import utc_now

FILE_BYTES = 1 << 30  # of one file; a larger parameter has its own


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
    One file's tensors are in memory. The bytes that were written.

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
        files = list(_written(folder, foreign))
        manifest = facts | {
            "format": folders.FORMAT,
            "adam_step": foreign.adam_step,
            "time_utc": utc_now(),
            "engine": folders.IMPORTED,
            "implementation": "gpt",
            "precision": "fp32",
            "world_size": len(files),
            "layout": Layout().as_dict(),
            "model": foreign.config.as_dict(),
            "spec": {},
            "data": {"next_step": foreign.step},
            "scaler": {},
            "files": files,
        }
        folders.write_manifest(folder, manifest)
    return sum(file["bytes"] for file in files)


def _written(folder: Path, foreign: Foreign) -> Iterator[dict[str, Any]]:
    """Write files of whole parameters and their moments; the entry of each in the manifest."""
    pieces, ranks = [], itertools.count()
    for name, shape in parameter_shapes(foreign.config).items():
        size = STATE_BYTES_PER_PARAM * (sum(map(len, pieces)) + math.prod(shape))
        if pieces and size > FILE_BYTES:
            yield write_rank_file(folder, next(ranks), pieces)
            pieces = []
        tensors = {kind: foreign.tensor(name, kind).flatten() for kind in KINDS}
        pieces.append(Piece(name, shape, (0,) * len(shape), shape, 0, tensors))
    yield write_rank_file(folder, next(ranks), pieces)
