"""Checkpoints of other programs, in and out, by way of one `WholeCheckpoint`.

A format is a module here with `read` and `write`. pickles.py is the one reader of pickles, names.py
knows what others call our parameters, ours.py reads and writes our own checkpoints.
"""

import importlib
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from torch import Tensor

from base.errors import UsageError
from models.config import GPTConfig
from parallel.checkpoint.folders import others_checkpoint


class WholeCheckpoint(NamedTuple):
    """The full parameters and moments of our GPT, as a checkpoint has them, read one at a time.

    step: iterations done. adam_step: AdamW's steps, of which none was skipped.
    kinds: ("param",), or contents.KINDS where it has AdamW's moments.
    tensor(name, kind): fp32, of `models.config.parameter_shapes`' name and shape.
    facts: "run", where it is from in words, for the manifest and train.log; perhaps "commit".
    """

    config: GPTConfig
    step: int
    adam_step: int
    kinds: tuple[str, ...]
    tensor: Callable[[str, str], Tensor]
    facts: dict[str, Any]


def read(path: Path, model: GPTConfig) -> WholeCheckpoint:
    """Opens the newest checkpoint at a path, in whichever of others' formats it is."""
    if newest := others_checkpoint(path):
        door = importlib.import_module(f"parallel.checkpoint.doors.{newest.form}")
        return door.read(newest.folder, model)
    if not path.exists():
        raise UsageError(f"{path} does not exist")
    advice = "--load takes ours and Hugging Face's as they are"
    raise UsageError(f"{path} is no torch_dist, DCP or DeepSpeed checkpoint; {advice}")
