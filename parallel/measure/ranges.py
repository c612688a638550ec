"""The region of a step that runs now, for listeners: a profiler, a breakdown of time.

    with ranges.region("forward"): ...

Regions: data (making a batch), move (handing it to the device), forward, backward, optimizer
(unscaling, norm, clipping, update, clearing gradients). `phase` is train or val; a profiler shows
both, as `train/forward`. Without a listener a region costs a test of one empty list. Torch-free.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import wraps
from typing import Any, Protocol


class Listener(Protocol):
    def enter(self, name: str) -> None:
        """A region begins, inside those that are open."""

    def leave(self, name: str) -> None:
        """It ends."""


listeners: list[Listener] = []
phase = "train"
_NOTHING = nullcontext()


def region(name: str) -> AbstractContextManager:
    """A context that is the region `name`."""
    return _region(name) if listeners else _NOTHING


@contextmanager
def _region(name: str) -> Iterator[None]:
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


def timed(name: str, function: Callable) -> Callable:
    """`function` as a region."""

    @wraps(function)
    def within(*args: Any, **kwargs: Any) -> Any:
        with region(name):
            return function(*args, **kwargs)

    return within


@contextmanager
def validation() -> Iterator[None]:
    """Regions inside belong to validation, not to training."""
    global phase
    phase = "val"
    try:
        yield
    finally:
        phase = "train"


class MegatronTimers:
    """megatron-core's own hook (`config.timers`): its marks around compute become our regions."""

    _REGIONS = {"forward-compute": "forward", "backward-compute": "backward"}

    def __call__(self, name: str, log_level: int = 0) -> "_MegatronTimer":
        return _MegatronTimer(self._REGIONS.get(name))


class _MegatronTimer:
    def __init__(self, name: str | None):
        self._name = name

    def start(self, barrier: bool = False) -> None:
        if self._name:
            enter(self._name)

    def stop(self, barrier: bool = False) -> None:
        if self._name:
            leave(self._name)
