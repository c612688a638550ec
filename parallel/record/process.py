"""Which process wrote a file, and whether it still runs. Torch-free."""

import os
import platform
from pathlib import Path
from typing import Any


def this_process() -> dict[str, Any]:
    """Returns what a later reader needs to find this process: host, pid and process_start."""
    pid = os.getpid()
    return {"host": platform.node(), "pid": pid, "process_start": process_start(pid)}


def process_start(pid: int) -> int | None:
    """Returns when a process started, in clock ticks after the host did.

    That tells a process from a later one with the same number. It is None where the process has
    ended, also as a zombie, and where there is no /proc.
    """
    fields = stat(pid)
    return None if not fields or fields[0] in "ZX" else int(fields[19])


def stat(pid: int) -> list[str] | None:
    """Returns /proc/<pid>/stat from its third field, the state, on; None where there is none."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None


def ran_here(writer: dict[str, Any]) -> bool:
    """Returns whether `writer`, as `this_process` described it, ran on this host."""
    pid = writer.get("pid")
    return writer.get("host") == platform.node() and type(pid) is int and 0 < pid < 1 << 31


def runs_here(writer: dict[str, Any]) -> bool:
    """Returns whether `writer` runs on this host now."""
    if not ran_here(writer):
        return False
    try:
        os.kill(writer["pid"], 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass  # it runs, as another user
    start = process_start(writer["pid"])
    if start is None:  # a zombie; or /proc is absent or unreadable
        return not Path(f"/proc/{writer['pid']}").exists()
    return writer.get("process_start") in (None, start)
