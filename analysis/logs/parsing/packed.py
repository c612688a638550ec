"""Gzipped logs: inflated to a file aside, for a gzip of 3 MB may hold 3 GB."""

import gzip
import os
import stat
import tempfile
import zlib
from pathlib import Path
from typing import IO

from analysis.logs.record import Refusal

MOST = 1 << 30  # bytes that a gzipped log may hold
_GZIP, _ZIP, _TAR, _TAR_AT = b"\x1f\x8b", (b"PK\x03\x04", b"PK\x05\x06"), b"ustar", 257


def open_log(path: Path) -> IO[bytes]:
    """A log's bytes as a file that can be read at any offset; of what is gzipped, what it inflates
    to, in a file that has no name and is gone when it is closed.

    Raises:
        OSError: it cannot be read.
        Refusal: no file, an archive of files, damaged, or of more than MOST bytes.
    """
    if not stat.S_ISREG(os.stat(path).st_mode):  # a pipe would be waited for for ever
        raise Refusal(str(path), "not a regular file")
    file: IO[bytes] = path.open("rb", buffering=0)
    try:
        if _head(file).startswith(_GZIP):
            with file, gzip.GzipFile(fileobj=file) as stream:
                file = tempfile.TemporaryFile(buffering=0)
                while block := stream.read(1 << 20):
                    file.write(block)
                    if file.tell() > MOST:
                        why = f"more than {MOST >> 20} MiB: unpack it to a plain file"
                        raise Refusal(str(path), why)
        head = _head(file)
        if head.startswith(_ZIP) or head[_TAR_AT:] == _TAR:
            raise Refusal(str(path), "an archive of files: unpack it and name its folder")
    except BaseException as error:
        file.close()
        if isinstance(error, EOFError | zlib.error | gzip.BadGzipFile):
            raise Refusal(str(path), f"cannot be unpacked: {error}") from error
        raise
    return file


def _head(file: IO[bytes]) -> bytes:
    file.seek(0)
    head = file.read(_TAR_AT + len(_TAR))
    file.seek(0)
    return head
