"""Signals, which are handled while the main thread waits in a collective too, and the watchdog,
which finds the rank that hangs. Torch-free.
"""

import contextlib
import faulthandler
import json
import linecache
import os
import re
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple, NoReturn

from base.files import ROOT
from base.storage import publish

# They end a process without a handler. SIGINT is Ctrl-C's, which torchrun passes on to its ranks.
ENDING = (signal.SIGTERM, signal.SIGHUP, signal.SIGINT)
LINGER_S = 2.0  # a rank that ends breaks the connections of those that have yet to read its verdict
LISTENED = (*ENDING, signal.SIGUSR1)  # SIGUSR1: sent by Slurm before the time limit


class Interruption:
    """The signal that asked the run to stop: `signal` is its name, "" before one came."""

    def __init__(self) -> None:
        self.signal = ""
        self._fail: Callable[[str], None] | None = None  # None: signals are only kept
        self._grace_s: float | None = None
        self._lock = threading.Lock()
        self._kept: list[int] = []

    def attend(self, fail: Callable[[str], None], grace_s: float | None) -> None:
        """Act on signals from now on, and on those that came before.

        SIGTERM, SIGHUP and SIGINT call `fail` with the signal's name and end the process with 128 +
        their number. Without `grace_s` they do so at once. With it they first set `signal`, and the
        run has that long to see it after a step, save and end by itself. SIGUSR1 only sets it.
        """
        with self._lock:
            self._fail, self._grace_s = fail, grace_s
            kept, self._kept = self._kept, []
        for number in kept:
            self._act(number)

    def receive(self, number: int) -> None:
        """Act on a signal, or keep it until `attend` is called."""
        with self._lock:
            if self._fail is None:
                self._kept.append(number)
                return
        self._act(number)

    def _act(self, number: int) -> None:
        name, grace_s = signal.Signals(number).name, self._grace_s
        if grace_s is not None:
            self.signal = self.signal or name
        if number not in ENDING:
            return

        def end() -> None:
            self._fail(name)
            os._exit(128 + number)

        if grace_s is None:
            end()
        _start_timer(grace_s, end)


def _start_timer(after_s: float, call: Callable[[], None]) -> threading.Timer:
    """Call a function from another thread, unless the process ends or the timer is cancelled."""
    timer = threading.Timer(after_s, call)
    timer.daemon = True
    timer.start()
    return timer


def _end(status: int, line: str) -> NoReturn:
    """End the process, from any thread, with a line for whoever reads it."""
    with contextlib.suppress(OSError, ValueError):
        print(f"parallel.train: {line}", file=sys.stderr, flush=True)
    os._exit(status)


@contextlib.contextmanager
def on_signals() -> Iterator[Interruption]:
    """Inside the block a thread passes LISTENED to the yielded Interruption, which keeps them until
    `attend` is called. Under nohup SIGHUP stays ignored, and SIGINT in a shell's background.

    A plain Python handler would wait until the main thread returns from C++, which it may never
    do when it waits for a rank that is dead. C writes the wakeup file descriptor at once.
    """
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    interruption = Interruption()

    def listen() -> None:
        while number := os.read(reader, 1):
            if number[0] in LISTENED:
                interruption.receive(number[0])
        os.close(reader)

    threading.Thread(target=listen, daemon=True, name="signals").start()
    # slurm.forward_signals has SIGUSR1 ignored by all that it starts, until a rank handles it.
    may_be_ignored = (signal.SIGHUP, signal.SIGINT)
    ignored = [n for n in may_be_ignored if signal.getsignal(n) is signal.SIG_IGN]
    handled = [n for n in LISTENED if n not in ignored]
    # The descriptor is set while each handler is: a signal between the two would be lost.
    old_descriptor = signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
    old_handlers = [signal.signal(number, lambda *_: None) for number in handled]
    try:
        yield interruption
    finally:
        for number, handler in zip(handled, old_handlers, strict=True):
            signal.signal(number, handler)
        signal.set_wakeup_fd(old_descriptor)
        os.close(writer)  # ends the listener


@contextlib.contextmanager
def deadline(limit_s: float, reason: str, fail: Callable[[str], None]) -> Iterator[None]:
    """Call fail(reason) and end the process with 1 where the block lasts longer: for code that
    waits in C++ without a limit of its own."""

    def end() -> None:
        fail(reason)
        _end(1, reason)

    timer = _start_timer(limit_s, end)
    try:
        yield
    finally:
        timer.cancel()


class GpuWork(NamedTuple):
    """What a GPU has yet to do. busy: its stream is not done. unfinished: the groups in which NCCL
    has not done all that it was asked for. last_s: how long ago it was last asked. None: unknown.
    """

    busy: bool
    unfinished: int | None
    last_s: float | None


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
        while not self._stop.wait(min(1.0, self.limit_s / 10)):
            if time.monotonic() - self._last < self.limit_s:
                continue
            seen = self._ticks
            mine = self._report()
            # The others began to wait up to a step later than this rank.
            waited = self._stop.wait(max(1.0, self.limit_s / 4))
            if waited or self._ticks != seen:  # it made progress after all
                mine.unlink(missing_ok=True)
                continue
            reason = self._verdict(mine)
            self._fail(reason)
            time.sleep(LINGER_S)
            _end(1, f"{reason} (stacks: {self.folder})")

    def _verdict(self, mine: Path) -> str:
        """The first of the ranks that wrote a report reads them all, the others what it found: each
        of 1,024 ranks would open 1,024 files."""
        path = self.folder / "verdict.txt"
        files = sorted(self.folder.glob("rank-*.txt"))
        until = time.monotonic() + max(5.0, self.limit_s / 4)
        while files[0] != mine and time.monotonic() < until:
            with contextlib.suppress(FileNotFoundError):
                return path.read_text()
            time.sleep(0.2)
        reports = [json.loads(file.read_text().splitlines()[0]) for file in files]
        reason = verdict(reports, self.world, self.limit_s)
        aside = self.folder / f"verdict-{self.rank}.partial"
        aside.write_text(reason)
        publish(aside, path)
        return reason

    def _report(self) -> Path:
        """Write where this rank is; atomically, so that nobody reads half of it."""
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

    def _write(self, frames: list[tuple[str, int, str]], gpu: GpuWork | None) -> Path:
        path = self.folder / f"rank-{self.rank:05d}.txt"
        aside = path.with_suffix(".partial")
        report = {"rank": self.rank, "ticks": self._ticks, "at": _location(frames)}
        report |= {"waits": _waits(frames, gpu), "gpu": gpu and gpu._asdict()}
        with aside.open("w") as file:
            print(json.dumps(report), file=file, flush=True)
            faulthandler.dump_traceback(file)
        publish(aside, path)
        return path


# A rank waits for others where a file of its stack has one of these in its path, or ...
_WAITING = ("torch/distributed/", "deepspeed/comm/", "torch/autograd/graph.py", "torch/cuda/")
# ... where its innermost line reads from a GPU what a collective has yet to finish.
_READING = re.compile(r"\bfloat\(|\.(item|tolist|cpu|synchronize)\(")


def _waits(frames: list[tuple[str, int, str]], gpu: GpuWork | None = None) -> bool:
    """Whether a rank with this stack (innermost first) waits for others: in a collective, for the
    GPU, or in parallel/ranks.py's `wait_for_others`.

    A launch blocks, wherever it is, once the GPU's queue is full, and `.item()` waits for whatever
    the GPU does. So a busy GPU waits for others unless NCCL has nothing to finish.
    """
    if gpu is not None and gpu.busy:
        return gpu.unfinished != 0
    named = any(name == "wait_for_others" for _, _, name in frames)
    reads = frames and _READING.search(linecache.getline(*frames[0][:2]))
    return bool(named or reads or any(sign in file for file, _, _ in frames for sign in _WAITING))


def _location(frames: list[tuple[str, int, str]]) -> str:
    """Where a stack (innermost first) is: its innermost line, and the innermost one of ours."""
    root = str(ROOT) + os.sep
    # By room, for the virtual environment, with torch in it, may lie inside the repository too.
    ours = tuple(os.path.join(root, room, "") for room in ("parallel", "models"))
    inside = [frame for frame in frames if frame[0].startswith(ours)]
    nearest = dict.fromkeys([*frames[:1], *inside[:1]])
    return ", in ".join(f"{file.removeprefix(root)}:{at} {name}" for file, at, name in nearest)


def verdict(reports: list[dict], world: int, limit_s: float) -> str:
    """Which rank hangs, and where, from what the ranks that still answer wrote."""
    silent = sorted(set(range(world)) - {r["rank"] for r in reports})
    waiting = "; ".join(f"rank {r['rank']} is at {r['at']}" for r in reports[:8])
    head = f"no progress for {limit_s:g} s"
    if silent:
        names = ", ".join(map(str, silent[:8])) + (" ..." if len(silent) > 8 else "")
        return f"{head}: rank {names} hangs and does not answer (stopped?); {waiting}"
    busy = [r for r in reports if not r["waits"]]
    if busy and len(busy) < len(reports):
        busy = [r for r in busy if r["ticks"] == min(b["ticks"] for b in busy)]
        return f"{head}: " + "; ".join(f"rank {r['rank']} hangs at {r['at']}" for r in busy[:8])
    if len({r["ticks"] for r in reports}) > 1:
        last = min(reports, key=lambda r: r["ticks"])
        return f"{head}: rank {last['rank']} is furthest behind, at {last['at']}; {waiting}"
    return f"{head}; {waiting}"
