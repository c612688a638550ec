"""Logs that are no plain files: gzipped ones and streams. Each is copied aside to be read at any
place, and has an end: a gzip of 3 MB may hold 3 GB, and a stream need not end.
"""

import gzip
import os
import stat
import tempfile
import zlib
from contextlib import ExitStack
from pathlib import Path
from typing import IO

from analysis.logs.record import Refusal

MOST = 1 << 30  # bytes of a log that is no plain file
STDIN = Path("/dev/stdin")
_STREAMS = ("/dev/stdin", "/dev/fd/", "/proc/self/fd/")  # a shell's pipe, and `<(...)`
_GZIP, _ZIP, _TAR, _TAR_AT = b"\x1f\x8b", (b"PK\x03\x04", b"PK\x05\x06"), b"ustar", 257


def open_log(path: Path) -> IO[bytes]:
    """Returns a log, which may be a stream, as a file that can be read at any offset. A gzipped one
    is inflated.

    Raises:
        OSError: it cannot be read.
        Refusal: no file, an archive of files, damaged, or of more than MOST bytes.
    """
    mode = os.stat(path).st_mode
    # A pipe that was made by name may have no writer, and would be waited for for ever.
    if not stat.S_ISREG(mode) and not (stat.S_ISFIFO(mode) and str(path).startswith(_STREAMS)):
        raise Refusal(str(path), "not a regular file")
    file: IO[bytes] = path.open("rb", buffering=0)
    if not stat.S_ISREG(mode):
        file = _copied(path, file)
    head = _head(file)
    if head.startswith(_GZIP):
        try:
            with file, gzip.GzipFile(fileobj=file) as stream:
                file = _copied(path, stream)
        except (EOFError, zlib.error, gzip.BadGzipFile) as error:
            raise Refusal(str(path), f"cannot be unpacked: {error}") from error
        head = _head(file)
    if head.startswith(_ZIP) or head[_TAR_AT:] == _TAR:
        file.close()
        raise Refusal(str(path), "an archive of files: unpack it and name its folder")
    return file


def _head(file: IO[bytes]) -> bytes:
    """Returns the first bytes of a file, as many as tell what kind of file it is."""
    head = file.read(_TAR_AT + len(_TAR))
    file.seek(0)
    return head


def _copied(path: Path, stream: IO[bytes]) -> IO[bytes]:
    """Returns a copy of a stream, in a file that has no name and is gone when it is closed."""
    with ExitStack() as open_files:
        copy = open_files.enter_context(tempfile.TemporaryFile(buffering=0))
        while copy.tell() <= MOST and (block := stream.read(1 << 20)):
            copy.write(block)
        if copy.tell() > MOST:
            raise Refusal(str(path), f"more than {MOST >> 20} MiB: unpack it to a plain file")
        copy.seek(0)
        open_files.pop_all()
        return copy
