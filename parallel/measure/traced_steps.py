"""The intervals of a few steps of a run with `--breakdown`, on the clock of rank 0.

Between two steps the ranks compare their clocks; then three steps are recorded, mark by mark as the
breakdown makes them; then the clocks are compared again and each rank writes
breakdown/trace_rank<r>.json.gz (parallel/record/trace_file.py). Of all this the time of a step has
only the keeping of the marks in it.

The processes of one machine have one clock (Linux: CLOCK_MONOTONIC), which needs no comparison. A
rank of another machine than rank 0's sends rank 0 a message and gets rank 0's time back; its own
clock is taken to have shown the middle of the round trip then. Half of the shortest of several
round trips is the most that this can be wrong. The offset is the mean of the one before and the one
after the steps. Half of what they differ by, which is drift of the clocks, is added to the error.

On CUDA the times are of events in the compute stream; the host's time of the first event is taken
while it is waited for, and half of that wait is added to the error.
"""

import os
import time
import uuid
import zlib
from collections import defaultdict
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from parallel.config.layout import Layout
from parallel.record import trace_file
from parallel.record.trace_file import Interval

STEPS, AFTER = 3, 10  # how many steps are recorded, after how many that this attempt made
ROUND_TRIPS = 16


class Offset(NamedTuple):
    """A clock's seconds minus rank 0's, and the most that this may be wrong."""

    seconds: float
    error_s: float


class TracedSteps:
    """One rank's recording. first: steps that are done before this attempt; last: when it ends."""

    def __init__(self, layout: Layout, rank: int, device: torch.device, first: int, last: int):
        before = max(0, min(AFTER, last - first - STEPS))
        self.begins, self.ends = first + before, min(first + before + STEPS, last)
        self.layout, self.rank, self.stage = layout, rank, layout.coords(rank)["pp"]
        self._group = None  # all ranks, over gloo: messages between hosts, whatever the GPUs use
        if device.type == "cuda" and layout.world_size > 1:
            self._group = dist.new_group(backend="gloo")
        self._compared: list[Offset] = []
        # (kind, start, end, whether the region was closed then, step), by this rank's clock
        self._marks: list[tuple[str, float, float, bool, int]] = []
        self._began_error_s = 0.0

    def is_on(self, done: int) -> bool:
        """Whether the step after which `done` are done is recorded."""
        return self.begins < done <= self.ends

    def compare_clocks(self) -> float:
        """Compare with rank 0, which all ranks do at once; the largest error that this rank knows:
        rank 0 knows all, the others their own."""
        self._compared.append(compare_clocks(self.rank, self.layout.world_size, self._group))
        return self._compared[-1].error_s

    def begin(self, error_s: float) -> None:
        """A stretch of steps begins; its first moment is known to `error_s`."""
        self._began_error_s = max(self._began_error_s, error_s)

    def add(self, kind: str, start_s: float, end_s: float, closed: bool, step: int) -> None:
        """Keep one interval, by this rank's clock. closed: its region ends, and is not paused."""
        self._marks.append((kind, start_s, end_s, closed, step))

    def intervals(self) -> list[Interval]:
        """What was kept, on rank 0's clock. The how-manieth forward and backward of a step count as
        micro-batches."""
        found, offset_s = [], self.clock()["offset_s"]
        done: dict[tuple[str, int], int] = defaultdict(int)
        for kind, start_s, end_s, closed, step in self._marks:
            counts = kind in ("forward", "backward")
            micro = done[kind, step] if counts else None
            done[kind, step] += closed and counts
            span = start_s - offset_s, end_s - offset_s
            if end_s > start_s:
                found.append(Interval(self.stage, kind, micro, *span, rank=self.rank, step=step))
        return found

    def clock(self) -> dict[str, float]:
        """What the file says of the clock."""
        first, last = self._compared[0], self._compared[-1]
        drift_s = last.seconds - first.seconds
        error_s = max(first.error_s, last.error_s) if self.rank else 0.0
        return {
            "offset_s": (first.seconds + last.seconds) / 2,
            "error_s": error_s + abs(drift_s) / 2 + self._began_error_s,
            "drift_s": drift_s,
        }

    def write(self, folder: Path) -> None:
        """Write the file."""
        steps = list(range(self.begins + 1, self.ends + 1))
        about: dict[str, Any] = {"rank": self.rank, "steps": steps, "clock": self.clock()}
        trace_file.write(trace_file.file_of(folder, self.rank), self.intervals(), about)


def compare_clocks(rank: int, world: int, group: Any = None) -> Offset:
    """This rank's clock against rank 0's. Rank 0 gets the largest error of all ranks."""
    message = torch.zeros(1, dtype=torch.float64)
    if rank == 0:
        largest = 0.0
        for other in range(1, world):
            dist.recv(message, other, group=group)
            is_same = float(message) == clock_name()
            message[0] = is_same
            dist.send(message, other, group=group)
            for _ in range(0 if is_same else ROUND_TRIPS):
                dist.recv(message, other, group=group)
                message[0] = time.perf_counter()
                dist.send(message, other, group=group)
            if not is_same:
                dist.recv(message, other, group=group)
                largest = max(largest, float(message))
        return Offset(0.0, largest)
    message[0] = clock_name()
    dist.send(message, 0, group=group)
    dist.recv(message, 0, group=group)
    if message:
        return Offset(0.0, 0.0)
    best = Offset(0.0, float("inf"))
    for _ in range(ROUND_TRIPS):
        before = time.perf_counter()
        dist.send(message, 0, group=group)
        dist.recv(message, 0, group=group)
        after = time.perf_counter()
        if (after - before) / 2 < best.error_s:
            best = Offset((before + after) / 2 - float(message), (after - before) / 2)
    message[0] = best.error_s
    dist.send(message, 0, group=group)
    return best


def clock_name() -> float:
    """A whole number that processes share whose time.perf_counter() is the same clock."""
    try:
        kernel = Path("/proc/sys/kernel/random/boot_id").read_text()
        name = kernel + os.readlink("/proc/self/ns/time")  # a container may have its own time
    except OSError:
        name = f"{uuid.uuid4()}"  # not Linux: compare
    return float(zlib.crc32(name.encode()))
