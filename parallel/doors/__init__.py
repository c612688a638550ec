"""Doors for others' checkpoints: each is read as, and written from, one `Foreign`.

A format is a module here with `recognises(path)`, `read(path, model)` and, where we write it,
`write(folder, foreign)`; `FORMATS` lists them. pickles.py is the one reader of pickles, names.py
knows what others call our parameters, ours.py reads and writes our own checkpoints.
"""

import importlib
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

from torch import Tensor

from base.errors import UsageError
from models.config import GPTConfig
from models.weights_config import holds_weights, model_of

# In the order in which a path is tried.
FORMATS = ("torch_dist", "deepspeed")


class Foreign(NamedTuple):
    """A checkpoint: the full parameters and moments of our GPT, read one at a time.

    step: iterations done. adam_step: AdamW's steps, of which none was skipped.
    kinds: ("param",), or manifest.KINDS where it has AdamW's moments.
    tensor(name, kind): fp32, of `models.config.parameter_shapes`' name and shape.
    facts: "run", where it is from in words, for the manifest and train.log; perhaps "commit".
    """

    config: GPTConfig
    step: int
    adam_step: int
    kinds: tuple[str, ...]
    tensor: Callable[[str, str], Tensor]
    facts: dict[str, Any]


def door(name: str) -> ModuleType:
    """The module of a format."""
    return importlib.import_module(f"parallel.doors.{name}")


def read(path: Path, model: GPTConfig | None) -> Foreign:
    """Open a checkpoint of whichever format is there. model: its sizes; else they are those of a
    config.json, in its folder or beside it.

    Raises:
        UsageError: no format knows it, or nothing states its sizes; or as that format's `read`.
    """
    for name in FORMATS:
        if (folder := door(name).recognises(path)) is None:
            continue
        if model is None:
            beside = list(filter(holds_weights, (folder, folder.parent)))
            if not beside:
                raise UsageError(f"{folder} does not state its model: name it with --model")
            model = model_of(beside[0])
        return door(name).read(folder, model)
    raise UsageError(f"{path} is no checkpoint that a door is for; docs/checkpoints.md lists them")
