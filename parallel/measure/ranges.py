"""The region of a step that runs now, for listeners: a profiler, a breakdown of time.

    with ranges.region("forward"): ...

Regions: data (making a batch), move (handing it to the device), forward, backward, optimizer
(unscaling, norm, clipping, update, clearing gradients). `phase` is train or val; a profiler shows
both, as `train/forward`. Without a listener a region costs a test of one empty list. Torch-free.
"""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from types import SimpleNamespace
from typing import Any

listeners: list[Any] = []  # each has enter(name) and leave(name)
phase = "train"
_NOTHING = nullcontext()


def region(name: str) -> AbstractContextManager:
    """Returns a context that is the region `name`."""
    return within(name) if listeners else _NOTHING


@contextmanager
def within(name: str) -> Iterator[None]:
    """Opens the region `name` in the block; a decorator, too."""
    enter(name)
    try:
        yield
    finally:
        leave(name)


def enter(name: str) -> None:
    for listener in listeners:
        listener.enter(name)


def leave(name: str) -> None:
    for listener in reversed(listeners):
        listener.leave(name)


@contextmanager
def validation() -> Iterator[None]:
    """Marks the regions inside the block as validation's, not training's."""
    global phase
    phase = "val"
    try:
        yield
    finally:
        phase = "train"


_OF_MEGATRON = {"forward-compute": "forward", "backward-compute": "backward"}


def megatron_timer(name: str, log_level: int = 0) -> SimpleNamespace:
    """Returns a timer for megatron-core's `config.timers`: what it marks becomes our regions."""
    if label := _OF_MEGATRON.get(name):
        return SimpleNamespace(start=lambda **_: enter(label), stop=lambda: leave(label))
    return SimpleNamespace(start=lambda **_: None, stop=lambda: None)
