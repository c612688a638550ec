"""A checkpoint as a folder of torch.distributed.checkpoint (DCP): written, never read.

Full fp32 tensors under these names (DCP's own for the nested dicts model and optimizer):

    model.<name>                        the parameter, named as the reference GPT names it
    optimizer.state.<name>.exp_avg      AdamW's moments of it
    optimizer.state.<name>.exp_avg_sq
    optimizer.step, step                AdamW's steps and the run's, 0-d int64

`torch.distributed.checkpoint.load` fills plain tensors or DTensors of any layout from it. Loading
unpickles `.metadata`, DCP's index beside the tensors.
"""

import warnings
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint import DefaultSavePlanner, FileSystemWriter, save
from torch.distributed.checkpoint.api import CheckpointException

from base.errors import UsageError
from models.weights import new_folder
from parallel.checkpoint import folders
from parallel.checkpoint.export import open_gpt
from parallel.checkpoint.manifest import KINDS


class _OneAtATime(DefaultSavePlanner):
    """Plans with meta tensors, which take no memory, and reads each one when it is written."""

    def __init__(self, read: dict[str, Any]):
        super().__init__()
        self._read = read

    def lookup_object(self, index: Any) -> Tensor:
        return self._read[index.fqn]()


def export_dcp(folder: Path, out: Path) -> int:
    """Write a checkpoint's weights and moments as the DCP folder `out`; its bytes.

    Raises:
        UsageError: the checkpoint is damaged or no engine's GPT, or `out` cannot be written.
    """
    manifest, reader = open_gpt(folder)
    shapes, read = {}, {}
    for name in reader.pieces:
        for kind in KINDS:
            key = f"model.{name}" if kind == "param" else f"optimizer.state.{name}.{kind}"
            shapes[key] = torch.empty(reader.shape(name), device="meta")
            read[key] = lambda name=name, kind=kind: reader.gathered(name, kind)
    for key, number in (("optimizer.step", manifest["adam_step"]), ("step", manifest["step"])):
        shapes[key] = torch.empty((), dtype=torch.int64, device="meta")
        read[key] = lambda number=number: torch.tensor(number)
    try:
        with new_folder(out) as aside, warnings.catch_warnings():
            warnings.filterwarnings("ignore", "torch.distributed is disabled")  # by no_dist
            writer = FileSystemWriter(aside)  # one file, synced
            save(shapes, storage_writer=writer, planner=_OneAtATime(read), no_dist=True)
    except CheckpointException as error:  # it wraps the error of each rank; here there is one
        reason = next(iter(error.failures.values()))[0]
        if isinstance(reason, folders.Damaged):
            raise reason from error
        raise UsageError(f"cannot write {out}: {reason}") from error
    return sum(file.stat().st_size for file in Path(out).iterdir())
