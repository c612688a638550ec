"""What a rank holds in memory, and the load of the machine, while it trains."""

import operator
import resource
import time
from collections.abc import Callable
from typing import NamedTuple

import psutil
import torch

from parallel.record.facts import load_average

_NOT_WORK = ("idle", "iowait", "guest", "guest_nice")


def peak_memory(device: torch.device) -> dict[str, int]:
    """Returns the most bytes of this rank: allocated and reserved on CUDA, resident on CPU."""
    if device.type == "cuda":
        return {
            "allocated": torch.cuda.max_memory_allocated(device),
            "reserved": torch.cuda.max_memory_reserved(device),
        }
    return {"resident": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024}


def largest(peaks: list[dict[str, int]]) -> dict[str, int]:
    return {name: max(peak[name] for peak in peaks) for name in peaks[0]}


class Load:
    """A meter of what the ranks, and all of rank 0's machine, compute on CPU cores from here on.

    A rank that shares its core gets fewer CPU seconds in the same wall time. So does one that
    waits for other ranks: then the machine's CPU seconds say whether somebody else had the cores.
    """

    def __init__(self) -> None:
        self._start = _clocks()

    def facts(self, gather: Callable[[float], list[float]]) -> dict[str, float]:
        """Returns the part of run.json's `load` that is known at the end; every rank calls it.
        gather: returns every rank's value, given this rank's."""
        since_start = Clocks(*map(operator.sub, _clocks(), self._start))
        seconds = since_start._replace(cpu_s=sum(gather(since_start.cpu_s)))
        return {"end": load_average(), **seconds._asdict()}


class Clocks(NamedTuple):
    """Seconds: the wall clock, this rank's CPU time, and the busy time of all cores since the
    machine started, time that a hypervisor took (steal) included."""

    wall_s: float
    cpu_s: float
    machine_cpu_s: float


def _clocks() -> Clocks:
    """Returns what the clocks say now."""
    spent = psutil.cpu_times()._asdict()
    # A guest's time is in user time already.
    machine_s = sum(spent.values()) - sum(spent.get(kind, 0.0) for kind in _NOT_WORK)
    return Clocks(time.perf_counter(), time.process_time(), machine_s)
