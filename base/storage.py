"""Saved training state: its bytes, predicted, and how files and folders get to the disk. No torch.

An export of weights holds one number per parameter, 2 bytes in bf16. A checkpoint holds three fp32
numbers per parameter: the master weight and AdamW's two moments. The Jean Zay study's checkpoint of
181B has the same split: 0.34 TB of fp16 layer states and 2.0 TB of optimizer states, 2 + 12 bytes
per parameter. Padding and duplicates never count: a checkpoint holds every parameter once.
"""

import contextlib
import gzip
import json
import math
import os
import secrets
import shutil
import zlib
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from base.errors import NO_ROOM, OutputError, UsageError

MARKED_BYTES = 1 << 16  # the mark of a file's writer stands in its first bytes
BYTES = {"fp32": 4, "bf16": 2, "fp16": 2}  # per number
STATE_BYTES_PER_PARAM = 4 + 4 + 4  # fp32 master weight, AdamW's exp_avg and exp_avg_sq


def state_bytes(n_params: float) -> float:
    """Returns the bytes of the full state that training resumes from, without an export of
    weights."""
    return n_params * STATE_BYTES_PER_PARAM


def sync(path: Path) -> None:
    """Waits until a file's bytes, or a folder's list of names, are on the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def publish(aside: Path, path: Path) -> None:
    """Renames a file or folder that was written aside, beside `path`, to `path`; syncs the rename.

    The content must be on the disk already; a folder's list of names is synced here. What had the
    name before is replaced. A file is replaced at one instant. A folder is not: a process killed
    between the two renames leaves the old one as `.NAME.old` and the new one aside.
    """
    if not aside.is_dir():
        os.replace(aside, path)
        sync(path.parent)
        return
    sync(aside)
    old = path.with_name(f".{path.name}.old")
    shutil.rmtree(old, ignore_errors=True)  # of a process that was killed before it could
    if path.exists():
        path.rename(old)
    aside.rename(path)
    sync(path.parent)
    shutil.rmtree(old, ignore_errors=True)


@contextlib.contextmanager
def new_folder(folder: Path) -> Iterator[Path]:
    """Yields an empty folder beside `folder` that takes its name when the block ends, replacing an
    older one. After an exception nothing of it is left.

    Raises:
        UsageError: the system refuses to write (an OSError, here or in the block).
    """
    folder = folder.absolute()
    # One name, whoever writes: what a killed writer left is cleared by the next.
    aside = folder.with_name(f".{folder.name}.partial")
    try:
        shutil.rmtree(aside, ignore_errors=True)
        aside.mkdir(parents=True)
        yield aside
        publish(aside, folder)
    except OSError as error:
        raise UsageError(f"cannot write {folder}: {error.strerror or error}") from error
    finally:
        shutil.rmtree(aside, ignore_errors=True)


def write_synced(path: Path, text: str, mode: int = 0o666) -> None:
    """Replaces a small file by one that is on disk. `mode` says who may read it, less the umask."""
    # A random number: on another node a process with the same id may write the same file.
    aside = path.with_name(f".{path.name}.{secrets.randbits(64)}")
    try:
        with open(aside, "w", opener=lambda name, flags: os.open(name, flags, mode)) as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        publish(aside, path)
    finally:
        aside.unlink(missing_ok=True)


def as_json(content: Any) -> str:
    """Returns indented JSON, with null for NaN and infinities, which are not JSON."""
    return json.dumps(finite(content), indent=2, allow_nan=False) + "\n"


def finite(value: Any, digits: int = 17) -> Any:
    """Returns a value for JSON. Each float in it is rounded to `digits` significant digits (17 keep
    it as it is); None stands for one that is not finite."""
    if isinstance(value, dict):
        return {k: finite(v, digits) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [finite(v, digits) for v in value]
    if isinstance(value, float):
        return float(f"{value:.{digits}g}") if math.isfinite(value) else None
    return value


def write_json(path: Path, content: Any, mode: int = 0o666) -> None:
    """Writes a JSON file in the place of an older one, as `write_synced` does."""
    write_synced(path, as_json(content), mode)


class Written(NamedTuple):
    """Bytes that were written, and their CRC-32."""

    size: int
    crc32: int


def write_blocks(
    path: Path, blocks: Iterable[bytes | memoryview], tick: Callable[[], None] = lambda: None
) -> Written:
    """Writes blocks of bytes to a file that is on disk when this returns.

    A block is written while its checksum is computed, and earlier blocks are synced meanwhile. A
    single sync at the end would leave the disk idle until then, and take minutes without a tick. At
    most one write and one sync run at a time. The system reports each error once, so each result
    is asked for.
    """
    size = crc32 = 0
    writing = syncing = None
    with path.open("wb", buffering=0) as file, ThreadPoolExecutor() as pool:
        for block in blocks:
            if writing is not None:
                writing.result()
            writing = pool.submit(_write, file, memoryview(block))
            if syncing is None or syncing.done():
                if syncing is not None:
                    syncing.result()
                syncing = pool.submit(os.fsync, file.fileno())
            crc32 = zlib.crc32(block, crc32)
            size += len(block)
            tick()
        for pending in (writing, syncing):
            if pending is not None:
                pending.result()
        os.fsync(file.fileno())
    return Written(size, crc32)


def _write(file: BinaryIO, block: memoryview) -> None:
    """Writes all of a block, which the system may take in parts."""
    while len(block):
        block = block[file.write(block) :]


def file_crc32(path: Path, tick: Callable[[], None] = lambda: None) -> int:
    """Returns the CRC-32 of a file, and calls `tick` for every 8 MiB. A CRC finds accidents, not
    forgeries; SHA-256 would be slower than many disks."""
    crc32 = 0
    with path.open("rb") as file:
        while block := file.read(1 << 23):
            crc32 = zlib.crc32(block, crc32)
            tick()
    return crc32


def own_crc32(content: dict[str, Any]) -> int:
    """Returns the CRC-32 of a JSON object without its key `crc32`, which states this number."""
    body = {key: value for key, value in content.items() if key != "crc32"}
    return zlib.crc32(json.dumps(body, sort_keys=True).encode())


def check_output(path: Path, mark: str, force: bool = False, inputs: Iterable[Path] = ()) -> None:
    """Checks that a command may write a file. `mark` is text that each file of this writer has.

    Raises:
        UsageError: `path` is a folder, or in none that exists; it is an input; or another writer's
            file, which `force` alone lets it replace, and in no folder that is an input.
    """
    if not path.parent.is_dir():
        raise UsageError(f"cannot write {path}: no folder {path.parent}")
    if path.is_dir():
        raise UsageError(f"cannot write {path}: it is a folder: name a file")
    if not path.is_file():
        return  # new, or a device
    inputs = [file for file in inputs if file.exists()]
    if any(file.samefile(path) for file in inputs):
        raise UsageError(f"cannot write {path}: it is an input: name another file")
    ours, real = _has_mark(path, mark), path.resolve()
    if not force and not ours:
        raise UsageError(
            f"cannot write {path}: it exists, and this command did not write it: name another"
            " file, or replace it with --force"
        )
    if not ours and any(file.is_dir() and real.is_relative_to(file.resolve()) for file in inputs):
        raise UsageError(
            f"cannot write {path}: it is in a folder that is read, and this command did not write"
            " it: name another file"
        )


def _has_mark(path: Path, mark: str) -> bool:
    """Returns whether the mark is in a file's first MARKED_BYTES, unpacked where it is gzip."""
    opener = gzip.open if path.suffix == ".gz" else open
    try:
        with opener(path, "rb") as file:
            return mark.encode() in file.read(MARKED_BYTES)
    except (OSError, EOFError, zlib.error):  # unreadable, or no gzip: not ours
        return False


@contextlib.contextmanager
def output(
    path: Path, mark: str, force: bool = False, inputs: Iterable[Path] = ()
) -> Iterator[Path]:
    """Yields a name to write a command's output to; the file gets its own name when it is whole.

    Until then, and where writing fails, an older file stays as it was. A link's target is replaced,
    not the link; a device is written directly.

    Raises:
        UsageError: `check_output` refuses the file, or the system or the writer does.
        OutputError: the disk is full or broken.
    """
    check_output(path, mark, force, inputs)
    target = Path(os.path.realpath(path)) if path.is_symlink() else path
    is_device = target.exists() and not target.is_file()
    aside = target if is_device else target.with_name(f".{secrets.randbits(64)}.{target.name}")
    try:
        yield aside
        if not is_device:
            if target.exists():
                shutil.copymode(target, aside)
            os.replace(aside, target)
    except UsageError:
        raise
    except OSError as error:
        kind = OutputError if error.errno in NO_ROOM else UsageError
        raise kind(f"cannot write {path}: {error.strerror or error}") from error
    except ValueError as error:  # a suffix that the writer does not know
        raise UsageError(f"cannot write {path}: {error}") from error
    finally:
        if not is_device:
            with contextlib.suppress(OSError):  # a name that is too long
                aside.unlink(missing_ok=True)


def refuse_existing(folder: Path) -> None:
    """Refuses a folder that has content, and a file of that name.

    Raises:
        UsageError: there is one.
    """
    if folder.exists() and not (folder.is_dir() and not any(folder.iterdir())):
        raise UsageError(f"{folder} exists already: name a new folder")
