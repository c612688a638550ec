"""The lock that leaves a run folder to one writer, and the one that makes commands wait for each
other. Torch-free."""

import contextlib
import errno
import fcntl
import functools
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TextIO

from base.errors import UsageError
from base.storage import as_json
from parallel.record.ends import RUNNING
from parallel.record.process import runs_here, this_process
from parallel.record.reader import read_json_if_whole, read_status
from parallel.record.schema import LOCK, utc_now

LOCK_WAIT_S = 120.0  # for another host's lock: above the lease of an NFS server, 90 s by default
# A file system may have no locks; NFS has none for a file that may only be read (EBADF).
_NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EBADF)


@contextlib.contextmanager
def one_at_a_time(path: Path) -> Iterator[None]:
    """Keeps all other processes out of blocks of the same file; one that comes later waits.

    Where the file system has no locks, a line says so once and nobody waits.

    Raises:
        OSError: the file cannot be made, or be read where another user made it.
    """
    try:
        file = path.open("a")
    except PermissionError:
        file = path.open()  # another user's, in a shared folder
    with file:
        try:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                _say_once(f"{path} is held by another command: waiting for it")
                fcntl.flock(file, fcntl.LOCK_EX)
        except OSError as error:
            if error.errno not in _NO_LOCKS:
                raise
            _say_once(
                f"{path} cannot be locked here ({error.strerror}): run one such command at a time"
            )
        yield


@functools.cache
def _say_once(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


class FolderLock:
    """An flock on the folder's `.lock`, which names its holder.

    An flock ends with its process. NFS, and Lustre mounted with flock, keep it across hosts. Where
    a file system has no locks, status.json names the writer: one that runs on this host is found,
    one on another host is taken for dead.
    """

    def __init__(self, folder: Path):
        self.folder = folder
        self._file: TextIO | None = None

    @property
    def held(self) -> bool:
        return self._file is not None

    def acquire(self) -> None:
        """Holds the lock until `release`.

        Raises:
            UsageError: another process writes the folder.
            OSError: the file system refuses.
        """
        process, path = this_process(), self.folder / LOCK
        file, holder = _flock(path)
        if file is None and holder.get("host", process["host"]) != process["host"]:
            # A file server keeps the lock of a host that died for a while, and a requeued run may
            # start before the server lets go of it.
            words = f"{self.folder} is locked by process {holder.get('pid')} on {holder['host']}"
            print(f"{words}: waiting up to {LOCK_WAIT_S:g} s for it", file=sys.stderr, flush=True)
            until = time.monotonic() + LOCK_WAIT_S
            while file is None and time.monotonic() < until:
                time.sleep(min(1.0, LOCK_WAIT_S / 10))
                file, holder = _flock(path)
        status = read_status(self.folder)
        running = status.get("state") == RUNNING and status.get("pid") != process["pid"]
        if file is not None and running and runs_here(status):
            file.close()
            file, holder = None, status
        if file is None:
            pid, host, since = (holder.get(key, "?") for key in ("pid", "host", "time_utc"))
            # A file server may keep the lock of a host that died.
            dead = f"; if {host} is dead, delete {path}" if host != process["host"] else ""
            raise UsageError(
                f"{self.folder} is being written by process {pid} on {host} since {since}: wait for"
                f" it, end it, or give another --out{dead}"
            )
        self._file = file
        file.truncate(0)
        file.write(as_json({**process, "time_utc": utc_now()}))
        file.flush()

    def release(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None

    def is_held_by_another(self) -> bool:
        """Returns whether another process that still runs holds the lock."""
        if self.held or not (self.folder / LOCK).exists():
            return False
        file, _ = _flock(self.folder / LOCK)
        if file is not None:
            file.close()
        return file is None


def _flock(path: Path) -> tuple[TextIO | None, dict[str, Any]]:
    """Returns (the locked file, {}), or (None, what the lock file says of its holder).

    Raises:
        OSError: it cannot be opened.
    """
    file = path.open("a+")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        file.close()
        return None, read_json_if_whole(path)
    except OSError as error:
        if error.errno not in _NO_LOCKS:
            file.close()
            raise
    return file, {}
