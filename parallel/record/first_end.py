"""Which rank ended first, and how, as the processes of this node show it. A rank that is killed, or
leaves without a word, writes no reason, and its peers see a broken connection or their launcher's
SIGTERM. Torch-free.
"""

import contextlib
import os
import platform
import select
import signal
import threading
import zlib
from collections.abc import Sequence
from pathlib import Path

from parallel.record.ends import End, Kind
from parallel.record.process import stat

_PID_BITS = 22  # Linux has no larger process number
_ASKED = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)  # the launcher's own, or a user's


def process_number() -> int:
    """Returns a number below 2**54 that tells this process from those of other hosts, too: bits of
    the host's name, then the pid."""
    return zlib.crc32(platform.node().encode()) << _PID_BITS | os.getpid()


class Siblings:
    """Watches the ranks that this rank's launcher started on this node. Linux alone tells how a
    process that is not our child ended, and only until its launcher has asked.

    numbers: each rank's `process_number`. rank: this process's own.
    """

    def __init__(self, numbers: Sequence[int], rank: int):
        self._has_end = threading.Event()
        self._end: End | None = None
        self._oom_kills = _oom_kills()
        watched: dict[int, tuple[int, int]] = {}  # descriptor of a process -> its rank, its pid
        this_host = process_number() >> _PID_BITS
        for sibling, number in enumerate(numbers):
            host, pid = divmod(number, 1 << _PID_BITS)
            fields = stat(pid) if sibling != rank and host == this_host else None
            if fields and int(fields[1]) == os.getppid():  # its parent is our launcher
                with contextlib.suppress(OSError, AttributeError):  # an older kernel
                    watched[os.pidfd_open(pid)] = sibling, pid
        threading.Thread(target=self._watch, args=(watched,), daemon=True, name="siblings").start()

    def first_end(self, wait_s: float) -> End | None:
        """Returns how the first of them ended without a word; None where none did within `wait_s`
        seconds."""
        self._has_end.wait(wait_s)
        return self._end

    def _watch(self, watched: dict[int, tuple[int, int]]) -> None:
        """Waits until every process has ended, and keeps the first end that `_how_ended` gives.
        watched: descriptor of a process -> its rank, its pid."""
        poll = select.poll()
        for descriptor in watched:
            poll.register(descriptor, select.POLLIN)
        while watched:
            for descriptor, _ in poll.poll():
                end = self._how_ended(*watched.pop(descriptor))
                poll.unregister(descriptor)
                os.close(descriptor)
                if end and self._end is None:
                    self._end = end
                    self._has_end.set()

    def _how_ended(self, rank: int, pid: int) -> End | None:
        """Returns the end by the process's exit status; None where it was asked to end, or its
        status is gone."""
        fields = stat(pid)
        if not fields or fields[0] != "Z":
            return None
        status, number = divmod(int(fields[49]), 256)
        number &= 127  # the highest bit says that there is a core file
        if number in _ASKED or status in [128 + asked for asked in _ASKED]:
            return None
        if not number:
            reason = f"rank {rank} ended with exit status {status} and gave no reason"
            return End(Kind.UNKNOWN, reason)
        names = {member.value: member.name for member in signal.Signals}
        reason = f"rank {rank} was killed: {names.get(number, f'Signal {number}')}"
        if number == signal.SIGKILL and _oom_kills() > self._oom_kills:
            return End(Kind.MEMORY, f"{reason}, and the kernel killed for lack of memory")
        return End(Kind.KILLED, reason)


def _oom_kills() -> int:
    """Returns how many processes this machine's kernel has killed because memory ran out."""
    with contextlib.suppress(OSError, ValueError):
        for line in Path("/proc/vmstat").read_text().splitlines():
            if line.startswith("oom_kill "):
                return int(line.split()[1])
    return 0
