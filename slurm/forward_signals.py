"""Run a command on a node of a job and pass signals on: python -m slurm.forward_signals COMMAND...

srun starts it in a job. Where Slurm tracks processes with cgroups, it signals only the process that
it started itself, not the ranks below torchrun. torchrun takes SIGUSR1 for its own end. So this
command sends SIGUSR1 to every rank, past torchrun, and SIGTERM to torchrun, which ends its ranks.
"""

import contextlib
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

from base.errors import command_line


def descendants(pid: int) -> list[int]:
    """Returns the processes that a process started, and those that they started."""
    children: dict[int, list[int]] = {}
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            parent = int((process / "stat").read_text().rpartition(")")[2].split()[1])
            children.setdefault(parent, []).append(int(process.name))
    processes = [pid]
    for process in processes:  # it grows as it is read
        processes += children.get(process, [])
    return processes[1:]


def hears(pid: int, number: int) -> bool:
    """Returns whether a process has a handler of its own for a signal."""
    with contextlib.suppress(OSError):
        caught = re.search(r"^SigCgt:\s*(\w+)", Path(f"/proc/{pid}/status").read_text(), re.M)
        return bool(caught and int(caught[1], 16) >> (number - 1) & 1)
    return False


@command_line("slurm.forward_signals")
def main(argv: list[str] | None = None) -> int:
    command = sys.argv[1:] if argv is None else argv
    if not command or command[0].startswith("-"):
        print(__doc__)
        return 0 if command in (["-h"], ["--help"]) else 2
    # What is ignored here is ignored by the command and its children, until they handle it.
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    try:
        child = subprocess.Popen(command)
    except OSError as error:
        print(f"slurm.forward_signals: {command[0]}: {error.strerror}", file=sys.stderr)
        return 127 if isinstance(error, FileNotFoundError) else 126

    def signal_ranks(*_) -> None:
        for pid in [pid for pid in descendants(child.pid) if hears(pid, signal.SIGUSR1)]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGUSR1)

    signal.signal(signal.SIGUSR1, signal_ranks)
    signal.signal(signal.SIGTERM, lambda *_: child.terminate())
    status = child.wait()
    return 128 - status if status < 0 else status


if __name__ == "__main__":
    sys.exit(main())
