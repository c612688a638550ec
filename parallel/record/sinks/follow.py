"""Write a run's curves while it trains: a process for each tool, so that no step waits. Torch-free.

Rank 0 starts the processes and does nothing more for them: they read what rank 0 writes into the
run folder, once a second. They end when the run does. A tool that fails says so in one line, and
the run goes on.
"""

import contextlib
import fcntl
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TextIO

from models.errors import printable
from models.files import ROOT
from parallel.record import schema
from parallel.record.reader import read_facts, read_status
from parallel.record.sinks import Writer, timed_back
from parallel.record.sinks.run_folder import Source, described

EVERY_S = 1.0
END_S = 30.0  # for a tool to end its run, after the last step
_MAIN = "from parallel.record.sinks.follow import main; main()"


class Followers:
    """The processes that write one run's curves, seen from rank 0.

    They end by themselves when rank 0's process is gone: their standard input is at its end then.
    """

    def __init__(self, folder: Path, tools: Sequence[str]):
        self._processes = []
        path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
        for tool in tools:
            try:
                process = subprocess.Popen(
                    [sys.executable, "-c", _MAIN, str(folder), tool],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.DEVNULL,
                    env=os.environ | {"PYTHONPATH": path, "CUDA_VISIBLE_DEVICES": ""},
                    start_new_session=True,  # Ctrl-C is for the ranks
                )
            except OSError as error:  # no memory for a process, say
                _say(folder, tool, error, sys.stderr)
            else:
                self._processes.append(process)

    def end(self) -> None:
        """Let them write the rest, and wait for that; not for ever."""
        for process in self._processes:
            process.stdin.close()
        for process in self._processes:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(END_S + 5.0)


def _say(folder: Path, tool: str, error: BaseException, console: TextIO) -> None:
    """One line on what went wrong, and what can be done about it later."""
    said = str(error).strip().splitlines()
    reason = f"{type(error).__name__}: {said[0]}" if said else type(error).__name__
    later = f"python -m analysis.sinks {folder} --{tool}"
    line = f"parallel.train: no more curves of {tool}: {reason}; the run goes on; later: {later}"
    print(printable(line), file=console, flush=True)


def follow(folder: Path, tool: str, wait: Callable[[float], bool]) -> None:
    """Write a run's points as they come, until `wait(seconds)` says that the run has ended.

    Raises: whatever the tool's library raises; UsageError: a file of the run folder is damaged.
    """
    facts = read_facts(folder)
    source, writer = Source(folder, facts), Writer(tool, described(facts), folder / schema.CURVES)
    writer.open()
    ended = False
    while not ended:
        ended = wait(EVERY_S)
        writer.write(timed_back(source.new(ended), time.time()))
    writer.close(read_status(folder).get("state", ""))


def main() -> None:
    """The process: FOLDER TOOL, ending at the end of standard input."""
    folder, tool = Path(sys.argv[1]), sys.argv[2]
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1):
        signal.signal(number, signal.SIG_IGN)  # they are for rank 0, whose end is waited for
    # What the libraries print goes to a file; the console gets our line alone.
    console = os.fdopen(os.dup(2), "w")
    status = 0
    try:
        own = folder / schema.CURVES / tool
        own.mkdir(parents=True, exist_ok=True)
        with (own / "tool.log").open("a") as log:
            os.dup2(log.fileno(), 2)
        lock = (own / ".lock").open("w")
        with contextlib.suppress(OSError):  # a file system without locks
            # The process of an attempt before may still write its last steps.
            fcntl.flock(lock, fcntl.LOCK_EX)

        def late(*_: Any) -> None:
            error = TimeoutError(f"not written to the end within {END_S:g} s")
            _say(folder, tool, error, console)
            os._exit(1)

        def wait(seconds: float) -> bool:
            if not select.select([0], [], [], seconds)[0]:
                return False
            signal.signal(signal.SIGALRM, late)
            signal.alarm(int(END_S))
            return True

        follow(folder, tool, wait)
    except Exception as error:  # a library raises what it likes
        _say(folder, tool, error, console)
        status = 1
    os._exit(status)  # a thread of a library that still waits for a server is not waited for
