"""Signals, heard even while the main thread waits inside a collective, and the watchdog that says
which rank hangs, and where. Torch-free.
"""

import contextlib
import faulthandler
import json
import linecache
import os
import re
import shutil
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NoReturn

ENDING = (signal.SIGTERM, signal.SIGHUP)  # what ends a process that does not listen ...
LISTENED = (*ENDING, signal.SIGUSR1)  # ... and what Slurm is asked to send before the limit


class Interruption:
    """What asked the run to stop: `signal` is its name, "" while nothing has."""

    def __init__(self) -> None:
        self.signal = ""
        self._say: Callable[[str], None] | None = None  # None: nobody attends yet
        self._grace_s: float | None = None
        self._lock = threading.Lock()
        self._heard: list[int] = []

    def attend(self, say: Callable[[str], None], grace_s: float | None) -> None:
        """From now on SIGTERM and SIGHUP run say("SIGTERM") and end the process with 128 + their
        number: at once, or, with `grace_s`, that long after, for the run to notice `signal` at
        the next step, save and leave by itself. SIGUSR1 is noticed with `grace_s`, and ends nothing
        by force. What came before now is acted on now.
        """
        with self._lock:
            self._say, self._grace_s = say, grace_s
            heard, self._heard = self._heard, []
        for number in heard:
            self._act(number)

    def hear(self, number: int) -> None:
        """A signal came."""
        with self._lock:
            if self._say is None:
                self._heard.append(number)
                return
        self._act(number)

    def _act(self, number: int) -> None:
        name, grace_s = signal.Signals(number).name, self._grace_s
        if grace_s is not None:
            self.signal = self.signal or name
        if number not in ENDING:
            return

        def end() -> None:
            self._say(name)
            os._exit(128 + number)

        if grace_s is None:
            end()
        timer = threading.Timer(grace_s, end)
        timer.daemon = True
        timer.start()


def _end(status: int, line: str) -> NoReturn:
    """End the process, from any thread, with a line for whoever reads it."""
    with contextlib.suppress(OSError, ValueError):
        print(f"parallel.train: {line}", file=sys.stderr, flush=True)
    os._exit(status)


@contextlib.contextmanager
def on_signals() -> Iterator[Interruption]:
    """Inside the block, SIGTERM, SIGHUP and SIGUSR1 are heard, on another thread, by the yielded
    Interruption, which keeps them until somebody attends to it. Under nohup SIGHUP stays ignored.

    A plain Python handler would wait until the main thread returns from C++, which it may never
    do when the peer it waits for is dead; the wakeup file descriptor is written by C at once.
    """
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    asked = Interruption()

    def listen() -> None:
        while number := os.read(reader, 1):
            if number[0] in LISTENED:
                asked.hear(number[0])
        os.close(reader)

    threading.Thread(target=listen, daemon=True, name="signals").start()
    handled = [n for n in LISTENED if signal.getsignal(n) is not signal.SIG_IGN]
    old_handlers = [signal.signal(number, lambda *_: None) for number in handled]
    old_descriptor = signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
    try:
        yield asked
    finally:
        signal.set_wakeup_fd(old_descriptor)
        for number, handler in zip(handled, old_handlers, strict=True):
            signal.signal(number, handler)
        os.close(writer)  # ends the listener


@contextlib.contextmanager
def deadline(limit_s: float, reason: str, say: Callable[[str], None]) -> Iterator[None]:
    """Says `reason` and ends the process with 1 where the block lasts longer: for what waits in C++
    without a limit of its own."""

    def end() -> None:
        say(reason)
        _end(1, reason)

    timer = threading.Timer(limit_s, end)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


class Watchdog:
    """Ends the run when no rank gets on for `limit_s`, saying which one hangs, and where.

    When one rank hangs, all wait for it. So each rank that has not called `tick` for `limit_s`
    writes where it is (all its threads) into `folder`, waits a while for the others to do the same
    and reads them: a rank that wrote nothing is stopped or dead; else, of those that do not wait
    for others, it is the one that got on least; else, of all. Until then nothing is written or
    sent.
    """

    def __init__(
        self, folder: Path, rank: int, world: int, limit_s: float, say: Callable[[str], None]
    ):
        self.folder, self.rank, self.world = folder, rank, world
        self.limit_s, self._say = limit_s, say
        self._ticks, self._last = 0, time.monotonic()
        self._stop = threading.Event()

    def tick(self) -> None:
        """This rank got on."""
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
            # The others began to wait up to a step later than we did.
            waited = self._stop.wait(max(1.0, self.limit_s / 4))
            if waited or self._ticks != seen:  # it went on after all
                mine.unlink(missing_ok=True)
                continue
            reason = verdict(_reports(self.folder), self.world, self.limit_s)
            self._say(reason)
            _end(1, f"{reason} (stacks: {self.folder})")

    def _report(self) -> Path:
        """Write where this rank is; atomically, so that nobody reads half of it."""
        frames, frame = [], sys._current_frames().get(threading.main_thread().ident)
        while frame is not None:
            frames.append((frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_name))
            frame = frame.f_back
        self.folder.mkdir(parents=True, exist_ok=True)
        path = self.folder / f"rank-{self.rank:05d}.txt"
        aside = path.with_suffix(".partial")
        told = {"rank": self.rank, "ticks": self._ticks, "at": _place(frames)}
        with aside.open("w") as file:
            print(json.dumps(told | {"waits": _waits(frames)}), file=file, flush=True)
            faulthandler.dump_traceback(file)
        aside.rename(path)
        return path


# Where one waits for others: a file that has one of these, or ...
_WAITING = ("torch/distributed/", "deepspeed/comm/", "torch/autograd/graph.py", "torch/cuda/")
# ... the innermost line, where it reads from a GPU what a collective has yet to finish.
_READING = re.compile(r"\bfloat\(|\.(item|tolist|cpu|synchronize)\(")


def _waits(frames: list[tuple[str, int, str]]) -> bool:
    """Whether a stack (innermost first) is where one waits for others: in a collective, for the
    GPU, or in parallel/checkpointer.py's `wait_for_others`."""
    named = any(name == "wait_for_others" for _, _, name in frames)
    reads = frames and _READING.search(linecache.getline(*frames[0][:2]))
    return bool(named or reads or any(sign in file for file, _, _ in frames for sign in _WAITING))


def _place(frames: list[tuple[str, int, str]]) -> str:
    """Where a stack (innermost first) is: its innermost line, and the innermost one of ours."""
    root = str(Path(__file__).resolve().parent.parent) + os.sep
    # By room, for the virtual environment, with torch in it, may lie inside the repository too.
    ours = [f for f in frames if f[0].startswith((root + "parallel/", root + "models/"))]
    shown = dict.fromkeys([frames[0], *ours[:1]] if frames else [])
    return ", in ".join(f"{file.removeprefix(root)}:{at} {name}" for file, at, name in shown)


def _reports(folder: Path) -> list[dict]:
    return [json.loads(p.open().readline()) for p in sorted(folder.glob("rank-*.txt"))]


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


def forget(folder: Path) -> None:
    """Remove the reports of an earlier attempt."""
    shutil.rmtree(folder, ignore_errors=True)
