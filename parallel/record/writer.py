"""The writer of a run folder; schema.py says what is in one. Torch-free."""

import contextlib
import csv
import os
import shutil
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from mmap import ACCESS_READ, mmap
from pathlib import Path
from typing import Any, TextIO

from base.errors import UsageError, drop_output
from base.storage import as_json, write_json, write_synced
from parallel.record import ends, schema
from parallel.record.lock import FolderLock
from parallel.record.process import this_process
from parallel.record.reader import holds_attempt, read_json_if_whole, read_status


class Behind:
    """Makes calls on a thread of its own, in order: a shared file system or a console may take a
    line as long as a step. After a call that raised none is made, and each raises the same."""

    def __init__(self):
        self._thread, self._last = ThreadPoolExecutor(1), Future()
        self._last.set_result(None)

    def call(self, function: Callable, *arguments: Any) -> None:
        before = self._last
        if before.done():
            before.result()
        self._last = self._thread.submit(lambda: (before.result(), function(*arguments)))

    def wait(self, limit_s: float | None = None) -> None:
        """Waits until all calls are made. Raises what one raised, or TimeoutError."""
        self._last.result(limit_s)


class RunFolder:
    """The writer of a run folder. Rank 0 calls everything, and holds the folder's lock from `begin`
    to `close`; any rank may call `fail`."""

    def __init__(self, path: Path):
        self.path = Path(path)
        self.lock = FolderLock(self.path)
        self.behind = Behind()
        self._log: TextIO | None = None
        self._steps: TextIO | None = None
        self._columns = list(schema.STEP_COLUMNS)
        self._full: set[str] = set()  # the files of which the disk did not take the last line

    # --- beginning and ending ---

    def begin(self, facts: dict[str, Any], go_on: bool = False) -> Path | None:
        """Moves what an earlier attempt left aside, then writes run.json and the first status.

        With `go_on` nothing moves but the result of an attempt that was complete: this attempt
        continues the files of the one before. Returns where the earlier attempt (or its result)
        is now, if it moved.

        Raises:
            UsageError: the folder is no run's, another process writes it, or it cannot be written.
        """
        with self.locked():
            aside = self._keep_result() if go_on else self.set_aside()
            self._write_status(ends.RUNNING, "", "", 0)
            for name in (schema.MARKER, schema.METRICS, schema.TOLD):
                (self.path / name).unlink(missing_ok=True)
            shutil.rmtree(self.path / schema.HANGS, ignore_errors=True)
            self.update(facts)
            _end_line(self.path / schema.LOG)
            self._log = (self.path / schema.LOG).open("a", buffering=1)
            self._columns = [*schema.STEP_COLUMNS]
            if facts.get("routing"):
                self._columns += schema.EXPERT_COLUMNS
            steps = self.path / schema.STEPS
            if not (go_on and steps.exists() and "ended_unix_s" not in _first_line(steps)):
                self._columns += schema.CLOCK_COLUMNS
            self._steps = _open_rows(steps, self._columns)
        return aside

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """Makes the folder, and is its only writer inside the block; after it, too, if all went
        well."""
        try:
            if not self.lock.held:
                check_folder(self.path)
                self.path.mkdir(parents=True, exist_ok=True)
                self.lock.acquire()
            yield
        except BaseException as error:
            self.close()
            if not isinstance(error, OSError):
                raise
            text = f"cannot write run folder {self.path}: {error.strerror}"
            raise UsageError(text) from error

    def set_aside(self, also: Iterable[str] = ()) -> Path | None:
        """Moves what an earlier attempt left in the folder to attempts/<n>/, and the files `also`.

        What a job or a sweep writes beside the run (console.out, <jobid>.env ...) began before it
        and stays, and so does what somebody else put there.
        """
        was_held, aside = self.lock.held, None
        with self.locked():
            if holds_attempt(self.path):
                names = os.listdir(self.path)
                names = [n for n in names if n in also or schema.is_written_by_run(n)]
                aside = self._next_attempt(names)
                # These say what the rest is: after a kill it still is a run's, and moves on.
                last = (schema.MARKER, schema.RUN, schema.STATUS)
                for name in sorted(names, key=lambda name: (name in last, name)):
                    (self.path / name).rename(aside / name)
        if not was_held:
            self.close()
        return aside

    def _next_attempt(self, names: Iterable[str]) -> Path:
        """Returns the folder that gets these files: a new one, or the last where a process was
        killed while it moved an attempt there, whose status moves last."""
        attempts = self.path / "attempts"
        last = max((int(p.name) for p in attempts.glob("*") if p.name.isdigit()), default=0)
        aside = attempts / f"{last}"
        if not last or any((aside / name).exists() for name in (schema.STATUS, *names)):
            aside = attempts / f"{last + 1}"
        aside.mkdir(parents=True, exist_ok=True)
        return aside

    def _keep_result(self) -> Path | None:
        """Copies a complete attempt's facts, steps, status and result to attempts/<n>/."""
        if read_status(self.path).get("state") != ends.COMPLETE:
            return None
        names = (schema.RUN, schema.STEPS, schema.METRICS, schema.MARKER, schema.STATUS)
        aside = self._next_attempt(names)
        for name in names:
            with contextlib.suppress(FileNotFoundError):
                shutil.copy2(self.path / name, aside / name)
        return aside

    def complete(self, metrics: dict[str, Any], marker: str, remark: str = "") -> None:
        """Writes the metrics, the status that says complete, with a remark, and, last, the marker.

        Raises:
            UsageError: the folder was deleted.
            OSError: the disk did not take all of it; then the status says failed.
        """
        try:
            self.sync()
            write_json(self.path / schema.METRICS, metrics)
            self._write_status(ends.COMPLETE, "", remark, 0)
            write_synced(self.path / schema.MARKER, marker + "\n")
        except OSError as error:
            reason = f"{type(error).__name__}: {error} (rank 0)"
            self._write_status(ends.FAILED, ends.kind_of_error(error), reason, 0)
            (self.path / schema.MARKER).unlink(missing_ok=True)
            with contextlib.suppress(OSError):
                self.close()
            raise
        self.log(marker)
        self.close()

    def fail(self, kind: ends.Kind, reason: str, rank: int, is_cause: bool = False) -> None:
        """Records that the run failed. The first reason stays, for later ones follow from it; but
        is_cause: this one replaces a reason that only follows from another event.

        rank: -1 where the caller is no rank but what started the ranks. It leaves the status alone
        while a living process holds the folder.
        """
        with contextlib.suppress(Exception):  # there is a reason to fail already
            self.behind.wait(5.0)
        if rank == -1 and self.lock.is_held_by_another():
            return
        status = read_status(self.path)
        if is_cause and status.get("state") == ends.FAILED and status["kind"] in ends.CONSEQUENCES:
            self._write_status(ends.FAILED, kind, reason, status.get("rank", -1))
        elif self.path.is_dir() and status.get("state") in (None, ends.RUNNING):
            self._write_status(ends.FAILED, kind, reason, rank)
            with contextlib.suppress(OSError):  # the marker is not there, or nothing can be written
                (self.path / schema.MARKER).unlink()

    def interrupt(self, kind: ends.Kind, reason: str) -> None:
        """Records that the run was stopped and can go on."""
        self._check_there()
        self._write_status(ends.INTERRUPTED, kind, reason, 0)
        self.close()

    def close(self) -> None:
        """Closes the two growing files, when all their lines are written, and releases the lock."""
        with contextlib.ExitStack() as all_of_them:  # though one of them fails
            all_of_them.callback(self.lock.release)
            for stream in (self._log, self._steps):
                if stream is not None:
                    all_of_them.callback(stream.close)
            all_of_them.callback(self.behind.wait)
            self._log = self._steps = None

    def _write_status(self, state: str, kind: str, reason: str, rank: int) -> None:
        path = self.path / schema.STATUS
        status = {"state": state, "kind": kind, "reason": reason, "rank": rank}
        status |= {"time_utc": schema.utc_now(), **this_process()}
        try:
            write_json(path, status)
        except OSError as error:
            if state != ends.FAILED:
                raise
            _write_over(path, as_json(status), error)

    # --- while the run trains ---

    def update(self, facts: dict[str, Any]) -> None:
        """Replaces run.json."""
        self._check_there()
        write_json(self.path / schema.RUN, facts)

    def log(self, line: str) -> None:
        """Appends a line to train.log, behind."""
        if self._log is not None:
            self.behind.call(self._unless_full(schema.LOG)(self._log.write), line + "\n")

    def tell(self, line: str) -> None:
        """Prints a line; a lost console is noted in the log."""
        try:
            print(line, flush=True)
        except OSError as error:
            drop_output()  # nobody reads it any more, or its disk is full: the log has the lines
            self.log(f" the console takes no more lines: {error.strerror}")

    def note(self, line: str) -> None:
        """Says what was done with the folder, in its log and on the console."""
        self.log(f" {line}")
        self.tell(line)

    def step(self, row: dict[str, Any]) -> None:
        """Appends one optimizer step, which is over now, to steps.csv, behind; an unknown value is
        empty."""
        row = row | {"ended_unix_s": round(time.time(), 3)}
        self.behind.call(
            self._unless_full(schema.STEPS)(_write_row), self._steps, self._columns, row
        )

    def checkpoint(self, row: dict[str, Any]) -> None:
        """Appends one save, load or deletion to checkpoints.csv."""
        with self._unless_full(schema.CHECKPOINTS):
            append_rows(self.path / schema.CHECKPOINTS, schema.CHECKPOINT_COLUMNS, [row])

    def slow_ranks(self, rows: list[dict[str, Any]]) -> None:
        """Appends windows that count against a rank to slow_ranks.csv, behind; none: its header."""
        path, write = self.path / schema.SLOW_RANKS, self._unless_full(schema.SLOW_RANKS)
        self.behind.call(write(append_rows), path, schema.SLOW_COLUMNS, rows)

    @contextlib.contextmanager
    def _unless_full(self, name: str) -> Iterator[None]:
        """Keeps a line that a full disk does not take in its buffer, to be written with the next.

        Raises:
            OSError: the disk did not take the line before, either: training would go on unrecorded.
        """
        try:
            yield
            self._full.discard(name)
        except OSError as error:
            if error.errno not in ends.FULL or name in self._full:
                raise OSError(error.errno, error.strerror, str(self.path / name)) from error
            self._full.add(name)

    def sync(self) -> None:
        """Brings train.log and steps.csv to the disk, up to their last line.

        Raises:
            UsageError: the folder was deleted.
            OSError: as the disk has it.
        """
        self._check_there()
        self.behind.wait()
        for stream in (self._log, self._steps):
            stream.flush()
            os.fsync(stream.fileno())

    def _check_there(self) -> None:
        """Refuses a folder whose files are gone: a save may have made the folder again."""
        for name, stream in ((schema.LOG, self._log), (schema.STEPS, self._steps)):
            if stream is None:
                continue
            if not (self.path / name).exists() or os.fstat(stream.fileno()).st_nlink == 0:
                raise UsageError(
                    f"{self.path / name} was deleted while the run wrote it: the run has no record,"
                    " start it again"
                )


class BreakdownFile:
    """The file breakdown/rank<r>.csv of a rank, which is opened once and written behind. A run that
    goes on keeps its rows."""

    def __init__(self, folder: Path, rank: int, experts: bool = False):
        self.path = folder / "breakdown" / f"rank{rank}.csv"
        expert_columns = schema.EXPERT_BREAKDOWN_COLUMNS if experts else {}
        self._columns = [*schema.BREAKDOWN_COLUMNS, *expert_columns]
        self._file: TextIO | None = None
        self._behind = Behind()

    def write(self, row: dict[str, Any]) -> None:
        self._behind.call(self._write, row)

    def _write(self, row: dict[str, Any]) -> None:
        if self._file is None:
            self.path.parent.mkdir(exist_ok=True)
            self._file = _open_rows(self.path, self._columns)
        _write_row(self._file, self._columns, row)

    def close(self) -> None:
        """Closes the file when all rows are written. Raises OSError where the disk took one not."""
        self._behind.wait()
        if self._file is not None:
            self._file.close()


def check_folder(path: Path) -> None:
    """Refuses a folder that a run may not write into: only its own attempts are moved aside."""
    try:
        names = sorted(os.listdir(path))
    except FileNotFoundError:
        return
    except NotADirectoryError as error:
        raise UsageError(f"{path} is a file: name a folder for the run with --out") from error
    except OSError as error:
        raise UsageError(f"cannot read {path}: {error.strerror}") from error
    others = [name for name in names if not schema.may_stand_beside(name)]
    if others and not _has_our_mark(path):
        more = f" and {len(others) - 3} more" if len(others) > 3 else ""
        raise UsageError(
            f"{path} is no run folder of ours (it holds {', '.join(others[:3])}{more}) and is left"
            " as it is: name a new folder with --out"
        )


def _has_our_mark(path: Path) -> bool:
    """Returns whether one of the files of a run is there as only our runs write it."""
    facts, status = read_json_if_whole(path / schema.RUN), read_json_if_whole(path / schema.STATUS)
    if {"run", "spec", "layout", "git"} <= facts.keys():
        return True
    return {"state", "reason", "rank", "time_utc", "host", "pid"} <= status.keys()


def _first_line(path: Path) -> str:
    with path.open() as lines:
        return lines.readline()


def append_rows(path: Path, columns: Iterable[str], rows: Iterable[dict[str, Any]]) -> None:
    """Appends rows to a CSV file, which gets its header where it is new."""
    with _open_rows(path, columns) as file:
        for row in rows:
            _write_row(file, columns, row)


def _open_rows(path: Path, columns: Iterable[str]) -> TextIO:
    """Returns a CSV file to append rows to, with its header where it is new."""
    _end_line(path)
    file = path.open("a", buffering=1, newline="")
    if file.tell() == 0:
        csv.writer(file).writerow(columns)
    return file


def _write_row(file: TextIO, columns: Iterable[str], row: dict[str, Any]) -> None:
    csv.writer(file).writerow(row[name] for name in columns)


def _end_line(path: Path) -> None:
    """Removes the half line that a killed writer left at the end of a file."""
    if not path.exists() or path.stat().st_size == 0:
        return
    with path.open("rb+") as file, mmap(file.fileno(), 0, access=ACCESS_READ) as content:
        end = content.rfind(b"\n") + 1
    os.truncate(path, end)


def _write_over(path: Path, text: str, cause: OSError) -> None:
    """Writes over a small file: a full disk has room for that, not for a new file.

    A run that fails writes this last. Where it cannot be written it is printed.
    """
    try:
        if cause.errno not in ends.FULL:
            raise cause
        with path.open("rb+") as file:
            file.write(text.encode())
            file.truncate()
            os.fsync(file.fileno())
    except OSError as error:
        print(f"cannot write {path}: {error.strerror}: {text}", file=sys.stderr, flush=True)
