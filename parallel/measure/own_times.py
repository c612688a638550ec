"""What each step of each rank spends in its own computing, and waits for its batches; always on.

On a CPU the rank's own computing is the CPU time of its main thread: gloo works and waits on other
threads, and a thread that waits or has lost its core has none. On CUDA it is the forward passes,
between events in the compute stream that are read when the loop has synchronised as it always
does; collectives in a forward pass (tp, ZeRO-3) are in it. Every STEPS steps all ranks gather their
times, in host memory and behind the next step; then rank 0 judges (rank_judge.py). On GPUs this was
not tried yet.
"""

import os
import platform
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from parallel.config.layout import Layout
from parallel.measure import ranges
from parallel.measure.rank_judge import STEPS, Verdict
from parallel.measure.slow_windows import Judge


class OwnTimes:
    """A clock of one rank: every rank calls `begin` and `lap` around a step. A sole rank has none.

    gather: returns every rank's value on every rank, given this rank's.
    """

    def __init__(
        self, layout: Layout, device: torch.device, rank: int, gather: Callable[[str], list[str]]
    ):
        world = layout.world_size
        self.is_on, self._cuda = world > 1, device.type == "cuda"
        self._work: Any = None  # a gather that is under way
        self._last, self._times, self._events = 0, [], []
        if not self.is_on:
            return
        # The backend itself: a breakdown counts and times what goes through a ProcessGroup.
        self._gloo = dist.new_group(backend="gloo")._get_backend(torch.device("cpu"))
        node = os.environ.get("SLURMD_NODENAME") or platform.node()  # as Slurm calls it
        nodes = gather(node)
        stages = [layout.coords(each_rank)["pp"] for each_rank in range(world)]
        self._judge = Judge(stages, nodes) if rank == 0 else None
        self._all = torch.empty(world, STEPS, 3, dtype=torch.float64)
        if self._cuda:
            ranges.listeners.append(self)

    def enter(self, name: str) -> None:
        """Marks where a region begins or, as `leave`, ends: training's forward passes are timed."""
        if name == "forward" and ranges.phase == "train":
            self._events.append(torch.cuda.Event(enable_timing=True))
            self._events[-1].record()

    leave = enter

    def begin(self) -> None:
        self._began, self._events = time.thread_time(), []

    def lap(self, done: int, step_s: float, data_s: float) -> tuple[list[dict], list[Verdict]]:
        """Closes step `done`, step_s seconds long, data_s of them waiting for batches. Returns what
        rank 0 found in the window that was gathered last, as Judge.window does."""
        if not self.is_on:
            return [], []
        own_s = time.thread_time() - self._began
        judgement = self.judged()
        if self._cuda:
            pairs = zip(self._events[::2], self._events[1::2], strict=True)
            own_s = sum(first.elapsed_time(last) for first, last in pairs) / 1000
        self._times.append((own_s, data_s, step_s))
        if len(self._times) == STEPS:
            own_times = torch.tensor([self._times], dtype=torch.float64)
            self._work, self._last = self._gloo._allgather_base(self._all, own_times), done
            self._times = []
        return judgement

    def judged(self) -> tuple[list[dict], list[Verdict]]:
        """Returns what rank 0 finds in the window whose gather is under way; it ended during the
        step."""
        if self._work is None:
            return [], []
        self._work.wait()
        self._work = None
        return self._judge.window(self._all.numpy(), self._last) if self._judge else ([], [])
