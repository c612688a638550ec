"""Signals, which are handled while the main thread waits in a collective, too, and the deadline of
code that waits without a limit. Torch-free.
"""

import contextlib
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from typing import NoReturn

# They end a process without a handler. SIGINT is Ctrl-C's, which torchrun passes on to its ranks.
ENDING = (signal.SIGTERM, signal.SIGHUP, signal.SIGINT)
LISTENED = (*ENDING, signal.SIGUSR1)  # SIGUSR1: sent by Slurm before the time limit


class Interruption:
    """A request to stop the run: `signal` is the name of the signal, "" before one came."""

    def __init__(self) -> None:
        self.signal = ""
        self._fail: Callable[[str], None] | None = None  # None: signals are only kept
        self._grace_s: float | None = None
        self._lock = threading.Lock()
        self._kept: list[int] = []

    def attend(self, fail: Callable[[str], None], grace_s: float | None) -> None:
        """Acts on signals from now on, and on those that came before.

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
        """Acts on a signal, or keeps it until `attend` is called."""
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
    """Calls a function from another thread, unless the process ends or the timer is cancelled."""
    timer = threading.Timer(after_s, call)
    timer.daemon = True
    timer.start()
    return timer


def end_process(status: int, line: str) -> NoReturn:
    """Ends the process, from any thread, with a line for whoever reads it."""
    with contextlib.suppress(OSError, ValueError):
        print(f"parallel.train: {line}", file=sys.stderr, flush=True)
    os._exit(status)


@contextlib.contextmanager
def on_signals() -> Iterator[Interruption]:
    """Passes LISTENED, from a thread, to the yielded Interruption, which keeps them until `attend`
    is called. Under nohup SIGHUP stays ignored, and SIGINT in a shell's background.

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
    """Calls fail(reason) and ends the process with 1 where the block lasts longer: for code that
    waits in C++ without a limit of its own."""

    def end() -> None:
        fail(reason)
        end_process(1, reason)

    timer = _start_timer(limit_s, end)
    try:
        yield
    finally:
        timer.cancel()
