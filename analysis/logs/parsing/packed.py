"""Logs that are no plain files: gzipped, members of a tar or zip, streams. Each is copied aside to
be read at any place, and has an end: a gzip of 3 MB may hold 3 GB, and a stream need not end.
"""

import gzip
import io
import os
import stat
import tarfile
import tempfile
import zipfile
import zlib
from collections.abc import Callable
from functools import lru_cache, partial
from pathlib import Path
from typing import IO

from analysis.logs.record import Refusal

MOST = 1 << 30  # bytes of a log that is no plain file
STDIN = Path("/dev/stdin")
_STREAMS = ("/dev/stdin", "/dev/fd/", "/proc/self/fd/")  # a shell's pipe, and `<(...)`
_GZIP, _ZIP, _TAR, _TAR_AT = b"\x1f\x8b", (b"PK\x03\x04", b"PK\x05\x06"), b"ustar", 257
_DAMAGED = (EOFError, zlib.error, tarfile.TarError, zipfile.BadZipFile, gzip.BadGzipFile)
# Of an encrypted member, and of one that is compressed as no module of Python can.
_CLOSED = (RuntimeError, NotImplementedError)


def open_log(path: Path) -> IO[bytes]:
    """A log's bytes, of a file, a stream or `ARCHIVE/MEMBER`, as a file that can be read at any
    offset; of what is gzipped, what it inflates to.

    Raises:
        OSError: it cannot be read.
        Refusal: no file, an archive of files, damaged, or of more than MOST bytes.
    """
    try:
        file = _inflated(path, _raw(path))
        if not _is_archive(file):
            return file
    except (*_DAMAGED, *_CLOSED) as error:
        raise Refusal(str(path), f"cannot be unpacked: {error}") from error
    file.close()
    raise Refusal(str(path), "an archive in a stream or in another archive: unpack it")


def files_in(path: Path) -> list[Path] | None:
    """The files in a tar or zip, each as `ARCHIVE/MEMBER`, in name order; None of no archive.

    Raises:
        Refusal: it is damaged.
    """
    try:
        if not stat.S_ISREG(os.stat(path).st_mode):
            return None
        with path.open("rb") as file:
            packed = file.read(2) == _GZIP
            file.seek(0)
            if not _is_archive(gzip.GzipFile(fileobj=file) if packed else file):
                return None
        return sorted(path / name for name in _openers_of(path))
    except _DAMAGED as error:
        raise Refusal(str(path), f"cannot be unpacked: {error}") from error
    except (OSError, ValueError):
        return None  # who opens it will say so


def _raw(path: Path) -> IO[bytes]:
    """The bytes as they are stored."""
    try:
        mode = os.stat(path).st_mode
    except NotADirectoryError:
        archive = next(above for above in path.parents if above.is_file())
        if (opener := _openers_of(archive).get(str(path.relative_to(archive)))) is None:
            raise
        with opener() as stream:
            return _copied(path, stream)
    if stat.S_ISREG(mode):
        return path.open("rb", buffering=0)
    # A pipe that was made by name may have no writer, and would be waited for for ever.
    if not (stat.S_ISFIFO(mode) and str(path).startswith(_STREAMS)):
        raise Refusal(str(path), "not a regular file")
    with path.open("rb") as stream:
        return _copied(path, stream)


def _inflated(path: Path, file: IO[bytes]) -> IO[bytes]:
    packed = file.read(2) == _GZIP
    file.seek(0)
    if not packed:
        return file
    with file, gzip.GzipFile(fileobj=file) as stream:
        return _copied(path, stream)


def _is_archive(file: IO[bytes]) -> bool:
    head = file.read(_TAR_AT + len(_TAR))
    file.seek(0)
    return head.startswith(_ZIP) or head[_TAR_AT:] == _TAR


def _copied(path: Path, stream: IO[bytes]) -> IO[bytes]:
    """A copy in a file that has no name and is gone when it is closed."""
    copy, size = tempfile.TemporaryFile(buffering=0), 0
    try:
        while block := stream.read(1 << 20):
            size += len(block)
            if size > MOST:
                raise Refusal(str(path), f"more than {MOST >> 20} MiB: unpack it to a plain file")
            copy.write(block)
    except BaseException:
        copy.close()
        raise
    copy.seek(0)
    return copy


def _openers_of(archive: Path) -> dict[str, Callable[[], IO[bytes]]]:
    about = archive.stat()
    return _openers(archive, about.st_mtime_ns, about.st_size, os.getpid())


class _Kept(io.FileIO):
    """A file that is closed when nobody has it any more."""

    def __del__(self) -> None:
        self.close()


@lru_cache(maxsize=1)  # its members are read one after another; a process has offsets of its own
def _openers(path: Path, _mtime: int, _size: int, _pid: int) -> dict[str, Callable[[], IO[bytes]]]:
    """The name of each file in an archive -> how to open it."""
    with _inflated(path, path.open("rb", buffering=0)) as opened:
        file = _Kept(os.dup(opened.fileno()))
    zipped = file.read(2) == _ZIP[0][:2]
    file.seek(0)
    if zipped:
        archive = zipfile.ZipFile(file)
        inside = {
            m.filename: partial(archive.open, m) for m in archive.infolist() if not m.is_dir()
        }
    else:
        tar = tarfile.open(fileobj=file, mode="r:")
        inside = {m.name: partial(tar.extractfile, m) for m in tar if m.isreg()}
    return {str(Path(name.lstrip("/"))): opener for name, opener in inside.items()}
