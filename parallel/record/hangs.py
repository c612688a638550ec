"""The watchdog, which finds the rank that hangs. Torch-free."""

import contextlib
import faulthandler
import json
import linecache
import os
import re
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

from base.files import ROOT
from base.storage import publish
from parallel.record.signals import end_process

LINGER_S = 2.0  # a rank that ends breaks the connections of those that have yet to read its verdict
Frame = tuple[str, int, str]  # file, line and function; a stack has its innermost frame first


class GpuWork(NamedTuple):
    """The work that a GPU has yet to do; None stands for unknown.

    busy: whether its stream is not done. unfinished: the number of groups in which NCCL has not
    done all that it was asked for. last_s: seconds since it was last asked.
    """

    busy: bool
    unfinished: int | None
    last_s: float | None


class Report(NamedTuple):
    """The place where a rank was when it had made no progress for too long. ticks: how far it got.
    waits: whether it waits for others."""

    rank: int
    ticks: int
    at: str
    waits: bool


_waiting: set[int] = set()  # the threads in a block of `waiting_for_others`


@contextlib.contextmanager
def waiting_for_others() -> Iterator[None]:
    """Marks this thread as waiting for other ranks in the block: its rank does not hang."""
    thread = threading.get_ident()
    _waiting.add(thread)
    try:
        yield
    finally:
        _waiting.discard(thread)


class Watchdog:
    """Ends the run when no rank makes progress for `limit_s`, with the rank that hangs, and where.

    When one rank hangs, all wait for it. So each rank that has not called `tick` for `limit_s`
    writes where it is (all its threads) into `folder` and waits for the others to do the same. The
    lowest of these ranks reads what they wrote and leaves the verdict for the others. A rank that
    wrote nothing hangs: it is stopped or dead. Else, of the ranks that do not wait for others, the
    one with the fewest ticks hangs; else, of all ranks. Before that nothing is written or sent.

    gpu: asks the rank's GPU, and leaves in a folder what NCCL recorded; None without a GPU.
    """

    def __init__(
        self,
        folder: Path,
        rank: int,
        world: int,
        limit_s: float,
        fail: Callable[[str], None],
        gpu: Callable[[Path], GpuWork] | None = None,
    ):
        self.folder, self.rank, self.world = folder, rank, world
        self.limit_s, self._fail, self._gpu = limit_s, fail, gpu
        self._ticks, self._last = 0, time.monotonic()
        self._stop = threading.Event()

    def tick(self) -> None:
        self._ticks += 1
        self._last = time.monotonic()

    def __enter__(self) -> "Watchdog":
        self.tick()
        threading.Thread(target=self._watch, daemon=True, name="watchdog").start()
        return self

    def __exit__(self, *_) -> None:
        self._stop.set()

    def _watch(self) -> None:
        """Ends the run, from a thread of its own, once no rank made progress for too long."""
        while not self._stop.wait(min(1.0, self.limit_s / 10)):
            if time.monotonic() - self._last < self.limit_s:
                continue
            seen = self._ticks
            report = self._report()
            # The others began to wait up to a step later than this rank.
            waited = self._stop.wait(max(1.0, self.limit_s / 4))
            if waited or self._ticks != seen:  # this rank made progress after all
                report.unlink(missing_ok=True)
                continue
            reason = self._verdict(report)
            self._fail(reason)
            time.sleep(LINGER_S)
            end_process(1, f"{reason} (stacks: {self.folder})")

    def _verdict(self, own_report: Path) -> str:
        """Returns what the first of the ranks that wrote a report finds in all of them. The others
        read it from there, for each of 1,024 ranks would open 1,024 files."""
        path = self.folder / "verdict.txt"
        files = sorted(self.folder.glob("rank-*.txt"))
        until = time.monotonic() + max(5.0, self.limit_s / 4)
        while files[0] != own_report and time.monotonic() < until:
            with contextlib.suppress(FileNotFoundError):
                return path.read_text()
            time.sleep(0.2)
        reports = [Report(**json.loads(file.read_text().splitlines()[0])) for file in files]
        reason = verdict(reports, self.world, self.limit_s)
        aside = self.folder / f"verdict-{self.rank}.partial"
        aside.write_text(reason)
        publish(aside, path)
        return reason

    def _report(self) -> Path:
        """Writes where this rank is, and returns the file."""
        frames, frame = [], sys._current_frames().get(threading.main_thread().ident)
        while frame is not None:
            frames.append((frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_name))
            frame = frame.f_back
        self.folder.mkdir(parents=True, exist_ok=True)
        path = self._write(frames, None)
        if self._gpu is not None:  # after a first report, for CUDA may not answer
            with contextlib.suppress(Exception):  # whatever it says, the run must end
                self._write(frames, self._gpu(self.folder))
        return path

    def _write(self, frames: list[Frame], gpu: GpuWork | None) -> Path:
        path = self.folder / f"rank-{self.rank:05d}.txt"
        aside = path.with_suffix(".partial")  # so that nobody reads half of it
        is_marked = threading.main_thread().ident in _waiting
        report = Report(self.rank, self._ticks, location(frames), waits(frames, gpu, is_marked))
        with aside.open("w") as file:
            print(json.dumps(report._asdict()), gpu or "", sep="\n", file=file, flush=True)
            faulthandler.dump_traceback(file)
        publish(aside, path)
        return path


# A rank waits for others where a file of its stack has one of these in its path, or ...
_WAITING = ("torch/distributed/", "deepspeed/comm/", "torch/autograd/graph.py", "torch/cuda/")
# ... where its innermost line reads from a GPU what a collective has yet to finish.
_READING = re.compile(r"\bfloat\(|\.(item|tolist|cpu|synchronize)\(")


def waits(frames: list[Frame], gpu: GpuWork | None = None, is_marked: bool = False) -> bool:
    """Returns whether a rank with this stack waits for others: in a collective, for the GPU, or in
    a block of `waiting_for_others` (is_marked).

    A launch blocks, wherever it is, once the GPU's queue is full, and `.item()` waits for whatever
    the GPU does. So where the GPU is busy, NCCL alone decides: the rank waits for others if NCCL
    has unfinished work, or if that is not known.
    """
    if gpu is not None and gpu.busy:
        return gpu.unfinished != 0
    is_reading = False
    if frames:
        file, line, _ = frames[0]
        is_reading = bool(_READING.search(linecache.getline(file, line)))
    in_collective = any(sign in file for file, _, _ in frames for sign in _WAITING)
    return is_marked or is_reading or in_collective


def location(frames: list[Frame]) -> str:
    """Returns where a stack is: its innermost line, and the innermost one of ours."""
    root = str(ROOT) + os.sep
    # By room, for the virtual environment, with torch in it, may lie inside the repository too.
    own_folders = tuple(os.path.join(root, room, "") for room in ("parallel", "models"))
    inside = [frame for frame in frames if frame[0].startswith(own_folders)]
    nearest = dict.fromkeys([*frames[:1], *inside[:1]])
    return ", in ".join(f"{file.removeprefix(root)}:{line} {name}" for file, line, name in nearest)


def verdict(reports: list[Report], world: int, limit_s: float) -> str:
    """Returns which rank hangs, and where, from what the ranks that still answer wrote."""
    silent = sorted(set(range(world)) - {report.rank for report in reports})
    places = "; ".join(f"rank {report.rank} is at {report.at}" for report in reports[:8])
    head = f"no progress for {limit_s:g} s"
    if silent:
        names = ", ".join(map(str, silent[:8])) + (" ..." if len(silent) > 8 else "")
        return f"{head}: rank {names} hangs and does not answer (stopped?); {places}"
    busy = [report for report in reports if not report.waits]
    if busy and len(busy) < len(reports):
        ticks = min(report.ticks for report in busy)
        hanging = [report for report in busy if report.ticks == ticks][:8]
        lines = (f"rank {report.rank} hangs at {report.at}" for report in hanging)
        return f"{head}: {'; '.join(lines)}"
    last = min(reports, key=lambda report: report.ticks)
    if any(report.ticks > last.ticks for report in reports):
        return f"{head}: rank {last.rank} is furthest behind, at {last.at}; {places}"
    return f"{head}; {places}"
