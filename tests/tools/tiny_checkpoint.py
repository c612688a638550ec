"""Small checkpoints, and an engine that only has their tensors."""

from pathlib import Path

import torch

from models.config import parameter_shapes, preset
from parallel.checkpoint.checkpointer import Checkpointer
from parallel.checkpoint.contents import KINDS, State, unpadded
from parallel.config.resolve import resolve
from parallel.ranks import Ranks

SIZES = {"n_layer": 1, "hidden": 8, "n_head": 2, "vocab_size": 11, "max_seq_len": 4}
FACTS = {"run": "r", "git": {"commit": "c"}, "data": {"path": "d", "sha256": "s"}}


class Engine:
    """Holds the whole model; its values say how many steps it has taken."""

    def __init__(self, value: float = 0.0):
        shapes = parameter_shapes(preset("tiny", **SIZES))
        self.tensors = {n: {k: torch.zeros(s) for k in KINDS} for n, s in shapes.items()}
        self.adam_step = 0
        self.set(value)

    def set(self, value: float) -> None:
        for number, name in enumerate(self.tensors):
            for kind, tensor in self.tensors[name].items():
                tensor.copy_(torch.arange(tensor.numel()).view_as(tensor) + number)
                tensor.add_(value * (1 + KINDS.index(kind)))

    def state(self) -> State:
        pieces = []
        for name, tensors in self.tensors.items():
            shape = tuple(tensors["param"].shape)
            pieces += unpadded(name, shape, (0,) * len(shape), shape, 0, tensors)
        return State(pieces, self.adam_step)

    def restore(self, adam_step: int, scaler: dict) -> None:
        self.adam_step = adam_step

    def numbers(self) -> list:
        return [t.tolist() for kinds in self.tensors.values() for t in kinds.values()]


def saver_of(
    engine: Engine,
    save: Path,
    rank: int = 0,
    world: int = 1,
    tick=lambda: None,
    device: str = "cpu",
    **chosen,
) -> Checkpointer:
    settings = {**SIZES, "save_interval": 1, "keep_last": 0, "steps": 100, **chosen}
    spec = resolve(("test", settings), gpus=1)
    ranks = Ranks(rank, world, tick)
    return Checkpointer(engine, spec, FACTS, save, ranks, torch.device(device))


def save_some(save: Path, steps: list[int], **chosen) -> Checkpointer:
    """Save a checkpoint of each of these steps."""
    engine = Engine()
    saver = saver_of(engine, save, **chosen)
    for step in steps:
        engine.set(step)
        engine.adam_step = step
        saver.save(step)
    saver.wait()
    return saver
