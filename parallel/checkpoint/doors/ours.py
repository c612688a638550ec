"""Our own checkpoints, read as a `WholeCheckpoint` and written from one."""

import itertools
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from base.errors import UsageError
from base.storage import STATE_BYTES_PER_PARAM, new_folder
from models.config import GPTConfig, parameter_shapes
from parallel.checkpoint import folders
from parallel.checkpoint.contents import KINDS, Piece
from parallel.checkpoint.doors import WholeCheckpoint
from parallel.checkpoint.rank_files import Reader, write_rank_file
from parallel.config.layout import Layout
from parallel.record.schema import utc_now

FILE_BYTES = 1 << 30  # of one file; a larger parameter has its own


def read(folder: Path) -> WholeCheckpoint:
    """Opens a checkpoint of ours, after all its bytes were checked, so that a door can write its
    parameters whole.

    Raises:
        UsageError: it is damaged, or of Hugging Face's model, whose parameters have other names.
    """
    manifest = folders.verify(folder)
    if manifest["implementation"] == "hf":
        raise UsageError(f"{folder} holds Hugging Face's own layout; only our GPT is read")
    return WholeCheckpoint(
        config=GPTConfig(**manifest["model"]),
        step=manifest["step"],
        adam_step=manifest["adam_step"],
        kinds=KINDS,
        tensor=Reader(folder, manifest).gathered,
        facts={key: manifest.get(key) for key in ("run", "commit", "spec")},
    )


def write(out: Path, checkpoint: WholeCheckpoint) -> int:
    """Writes what `--load` takes, a folder with one checkpoint, and returns its bytes. One file's
    tensors are in memory. A checkpoint without moments is written as of step 0, and its moments as
    zeros.

    Raises:
        UsageError: it cannot be written; nothing is left behind.
    """
    step, adam_step = checkpoint.step, checkpoint.adam_step
    if checkpoint.kinds != KINDS:
        step = adam_step = 0
    with new_folder(out) as aside:
        folder = aside / folders.name_of(step)
        folder.mkdir()
        files = list(_written(folder, checkpoint))
        manifest = {
            "format": folders.FORMAT,
            "step": step,
            "adam_step": adam_step,
            "time_utc": utc_now(),
            "run": checkpoint.facts.get("run"),
            "engine": folders.IMPORTED,
            "implementation": "gpt",
            "precision": "fp32",
            "world_size": len(files),  # a file counts as a rank's
            "layout": Layout().as_dict(),
            "model": checkpoint.config.as_dict(),
            "spec": {},
            "commit": checkpoint.facts.get("commit"),
            "data": {"next_step": step},
            "scaler": {},
            "files": files,
        }
        folders.write_manifest(folder, manifest)
    return sum(file["bytes"] for file in files)


def _written(folder: Path, checkpoint: WholeCheckpoint) -> Iterator[dict[str, Any]]:
    """Writes files of whole parameters and their moments; yields the manifest's entry of each."""
    pieces, ranks = [], itertools.count()
    for name, shape in parameter_shapes(checkpoint.config).items():
        size = STATE_BYTES_PER_PARAM * (sum(map(len, pieces)) + math.prod(shape))
        if pieces and size > FILE_BYTES:
            yield write_rank_file(folder, next(ranks), pieces)
            pieces = []
        tensors = {
            kind: checkpoint.tensor(name, kind).flatten()
            if kind in checkpoint.kinds
            else torch.zeros(math.prod(shape))
            for kind in KINDS
        }
        pieces.append(Piece(name, shape, (0,) * len(shape), shape, 0, tensors))
    yield write_rank_file(folder, next(ranks), pieces)
