"""A small checkpoint, and an engine that only has its tensors."""

import functools
import tempfile
from pathlib import Path

import torch

from models.config import parameter_shapes, preset
from parallel.checkpoint.checkpointer import Checkpointer
from parallel.checkpoint.contents import State, unpadded
from parallel.checkpoint.manifest import KINDS
from parallel.config.settings import resolve

SIZES = {"n_layer": 1, "hidden": 8, "n_head": 2, "vocab_size": 11, "max_seq_len": 4}
STEP = 10


class Holder:
    """An engine of a tiny model whose parameters and moments are all zero."""

    def __init__(self) -> None:
        self.adam_step, self.tensors = 0, {}
        for name, shape in parameter_shapes(preset("tiny", **SIZES)).items():
            self.tensors[name] = {kind: torch.zeros(shape) for kind in KINDS}

    def state(self) -> State:
        pieces = []
        for name, kinds in self.tensors.items():
            shape = tuple(kinds["param"].shape)
            pieces += unpadded(name, shape, (0,) * len(shape), shape, 0, kinds)
        return State(pieces, self.adam_step)

    def restore(self, adam_step: int, scaler: dict) -> None:
        self.adam_step = adam_step

    def numbers(self) -> list:
        return [t.tolist() for kinds in self.tensors.values() for t in kinds.values()]


def saver(engine: Holder, save: Path) -> Checkpointer:
    sizes = {**SIZES, "save_interval": 1, "keep_last": 0, "steps": 100}
    spec = resolve(("bad input", sizes))
    facts = {"run": "r", "git": {"commit": "c"}, "data": {"path": "d", "sha256": "s"}}
    return Checkpointer(engine, spec, facts, save, 0, 1)


@functools.cache
def files() -> dict[str, bytes]:
    """The files of a checkpoint of step 10."""
    engine = Holder()
    for number, kinds in enumerate(engine.tensors.values()):
        for tensor in kinds.values():
            tensor.uniform_(0.1, 1.0).add_(number)
    engine.adam_step = STEP
    with tempfile.TemporaryDirectory() as save:
        writer = saver(engine, Path(save))
        writer.save(STEP)
        writer.wait()
        (folder,) = Path(save).glob("step-*")
        return {p.name: p.read_bytes() for p in folder.iterdir()}


def write(save: Path) -> Path:
    """The checkpoint in a folder of checkpoints; its own folder."""
    folder = save / f"step-{STEP:08d}"
    folder.mkdir(parents=True)
    for name, data in files().items():
        (folder / name).write_bytes(data)
    return folder
