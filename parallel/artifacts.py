"""The run folder: what a run leaves behind, its one writer and its one reader. Torch-free.

run.json               the resolved settings, layout, versions, kernels, commit, host
launcher_metadata.json who started it, where, with what environment (secrets removed)
train.log              the console, in Megatron-LM's iteration lines
steps.csv              one row per optimizer step, in full precision
checkpoints.csv        one row per checkpoint saved, loaded or exported, or why it was not
checkpoints/           the checkpoints themselves (parallel/saved.py)
training_metrics.json  the summary (schema 2.0), when the run completed
RUN_COMPLETE.txt       only when it truly completed
breakdown/rank<r>.csv  with --breakdown: where the time went, one row per window of steps
breakdown/epochs.log   the same per epoch and rank, as it was printed
status.json            running, complete, interrupted (saved, to be gone on with) or failed, and why
attempts/<n>/          the files of earlier runs in the same folder; nothing is lost
.lock                  held by rank 0 while it writes here; it names its host and process
<jobid>.submitted      what the job was to run, before there is a run.json
<jobid>.state          how the job ended, once slurm.status has asked Slurm
<jobid>[.restart<n>].* what the job's script left: its log, environment, exit status ...
"""

import contextlib
import csv
import errno
import fcntl
import json
import math
import os
import platform
import re
import shutil
import sys
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, TextIO

from models.errors import UsageError
from models.files import below, parse_json
from models.storage import write_synced

STEP_COLUMNS = (
    "step",
    "step_s",
    "loss",
    "grad_norm",
    "lr",
    "loss_scale",
    "skipped",
    "tokens",
)
SCHEMA_VERSION = "1"  # of run.json
METRICS_VERSION = "2.0"  # of training_metrics.json
# A breakdown's rows; parallel/breakdown.py says what each is. Exclusive, they add up to elapsed_s.
AXES = ("tp", "dp", "pp", "embedding", "mixed", "control")
CATEGORIES = ("data", "move", "forward", "backward", "optimizer", *AXES, "bubble", "other")
_BREAKDOWN_COUNTS = (
    "rank",
    "first_step",
    "last_step",
    *(f"{a}_{c}" for a in AXES for c in ("calls", "bytes")),
)
BREAKDOWN_COLUMNS = (
    *("rank", "first_step", "last_step", "elapsed_s", "transfer_s"),
    *(f"{name}_s" for name in CATEGORIES),
    *(f"{axis}_{what}" for axis in AXES for what in ("calls", "bytes", "wire_bytes", "total_s")),
)
CHECKPOINT_COLUMNS = ("event", "step", "blocked_s", "total_s", "bytes", "ranks", "problem")
RUNNING, COMPLETE, INTERRUPTED, FAILED = "running", "complete", "interrupted", "failed"
PENDING = "pending"  # no file says so: a job was submitted, and no more
# What a run writes at the top of its folder, and what is moved to attempts/: nothing else ever is.
STATUS, MARKER, METRICS = "status.json", "RUN_COMPLETE.txt", "training_metrics.json"
_WRITTEN = frozenset(
    (
        *("run.json", STATUS, METRICS, MARKER, "launcher_metadata.json", "train.log"),
        *("steps.csv", "checkpoints.csv", "checkpoints", "breakdown", "profiles", "hang"),
    )
)
_ASIDE = re.compile(r"\.([\w.]+)\.\d+")  # write_synced's, of a writer that was killed
_LOCK = ".lock"
LOCK_WAIT_S = 120.0  # for another host's lock: above the lease of an NFS server, 90 s by default
# What jobs and sweeps write beside a run, and began to write before it.
_BESIDE = re.compile(
    r"\d+(\.restart\d+)?\.(submitted|state|skipped|exit|env|job|slurm|others|profiles|nccl|torchrun)"
    r"|.*\.(out|err)"
)
_NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)  # a file system may have none
FULL = (errno.ENOSPC, errno.EDQUOT)


def utc_now() -> str:
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def write_json(path: Path, content: Any, mode: int = 0o666) -> None:
    """Write JSON so that a reader sees the old file or the new one, never half of it, even after
    the machine lost its power; `mode` is who may read it, less the umask."""
    write_synced(path, _as_json(content), mode)


def _as_json(content: Any) -> str:
    return json.dumps(_finite(content), indent=2, allow_nan=False) + "\n"


def _finite(content: Any) -> Any:
    """`content` with null for NaN and infinities, which are not JSON."""
    if isinstance(content, dict):
        return {key: _finite(value) for key, value in content.items()}
    if isinstance(content, (list, tuple)):
        return [_finite(value) for value in content]
    if isinstance(content, float) and not math.isfinite(content):
        return None
    return content


class RunFolder:
    """The writer. Rank 0 calls everything; any rank may call `fail`.

    Rank 0 holds `.lock` from `begin` to `close`. It is an flock, which ends with the process, and
    which NFS and Lustre (mounted with flock) keep across hosts. Where a file system has no locks, a
    writer on this host is found by its process; one on another host is taken for dead.
    """

    def __init__(self, path: Path):
        self.path = Path(path)
        self._log: TextIO | None = None
        self._steps: TextIO | None = None
        self._lock: TextIO | None = None

    def begin(self, facts: dict[str, Any], go_on: bool = False) -> Path | None:
        """Move what an earlier attempt left aside, then write run.json and the first status.

        With `go_on` nothing moves but the result of an attempt that was complete: this attempt
        continues the files of the one before. Returns where the earlier attempt (or its result)
        is now, if it moved.

        Raises:
            UsageError: the folder is no run's, another process writes it, or it cannot be written.
        """
        with self.locked():
            aside = self._keep_result() if go_on else self.set_aside()
            self._write_status(RUNNING, "", 0)
            for name in (MARKER, METRICS) if go_on else ():
                with contextlib.suppress(FileNotFoundError):
                    # Of an attempt that was not complete it is no result.
                    path = self.path / name
                    path.rename(aside / name) if aside is not None else path.unlink()
            self.update(facts)
            for name in ("train.log", "steps.csv"):
                _end_line(self.path / name)
            self._log = (self.path / "train.log").open("a", buffering=1)
            self._steps = (self.path / "steps.csv").open("a", buffering=1, newline="")
            if self._steps.tell() == 0:
                csv.writer(self._steps).writerow(STEP_COLUMNS)
        return aside

    def lock(self) -> None:
        """Make the folder, and be its only writer until `close`. A second time does nothing.

        Raises:
            UsageError: it holds what no run wrote, or another process writes it.
            OSError: as the disk has it.
        """
        if self._lock is not None:
            return
        check_folder(self.path)
        self.path.mkdir(parents=True, exist_ok=True)
        held, who = self._wait_for_lock()
        status = read_status(self.path)
        others = status.get("state") == RUNNING and status.get("pid") != os.getpid()
        if held is not None and others and _lives(status):
            held.close()
            held, who = None, status
        if held is None:
            host, dead = who.get("host", "?"), ""
            if host != platform.node():  # a file server may hold the lock of a host that died
                dead = f"; if {host} is dead, delete {self.path / _LOCK}"
            raise UsageError(
                f"{self.path} is being written by process {who.get('pid', '?')} on {host} since"
                f" {who.get('time_utc', '?')}: wait for it, end it, or give another --out{dead}"
            )
        self._lock = held
        held.truncate(0)
        held.write(_as_json({**_me(), "time_utc": utc_now()}))
        held.flush()

    def _wait_for_lock(self) -> tuple[TextIO | None, dict[str, Any]]:
        """`_flock`'s answer. A file server may hold the lock of a host that died for a while, and
        the run, requeued, is here before: a lock of another host is waited for."""
        said, until = False, time.monotonic() + LOCK_WAIT_S
        while True:
            held, who = _flock(self.path / _LOCK)
            here = who.get("host", platform.node()) == platform.node()
            if held is not None or here or time.monotonic() > until:
                return held, who
            if not said:
                print(
                    f"{self.path} is locked by process {who.get('pid', '?')} on"
                    f" {who.get('host', '?')}: waiting up to {LOCK_WAIT_S:g} s for it",
                    file=sys.stderr,
                    flush=True,
                )
            said = True
            time.sleep(min(1.0, LOCK_WAIT_S / 10))

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """Be the folder's only writer inside the block, and after it if it ends well.

        Raises:
            UsageError: another process writes it, or it cannot be made.
        """
        try:
            self.lock()
            yield
        except BaseException as error:
            self.close()
            if not isinstance(error, OSError):
                raise
            text = f"cannot write run folder {self.path}: {error.strerror}"
            raise UsageError(text) from error

    def set_aside(self, also: Iterable[str] = ()) -> Path | None:
        """Make the folder, and move what an earlier attempt left in it to attempts/<n>/, and the
        files `also`. What a job or a sweep writes beside us (console.out, <jobid>.env ...) began
        before us and stays, and so does what somebody else put there.

        Raises:
            UsageError: it holds what no run wrote, or another process writes it.
        """
        if held := self._lock is None:
            self.lock()
        try:
            names = {name for name in os.listdir(self.path) if _is_runs(name)}
            if not names:
                return None
            aside = self._next_attempt()
            for name in sorted(names | (set(also) & set(os.listdir(self.path)))):
                (self.path / name).rename(aside / name)
            return aside
        finally:
            if held:
                self.close()

    def _next_attempt(self) -> Path:
        attempts = self.path / "attempts"
        numbers = [int(p.name) for p in attempts.glob("*") if p.name.isdigit()]
        aside = attempts / str(max(numbers, default=0) + 1)
        aside.mkdir(parents=True)
        return aside

    def _keep_result(self) -> Path | None:
        """Copy to attempts/<n>/ what, beside the metrics, tells of an attempt that was complete."""
        if read_status(self.path).get("state") != COMPLETE:
            return None
        aside = self._next_attempt()
        for name in ("run.json", "steps.csv", STATUS):
            shutil.copy2(self.path / name, aside / name)
        return aside

    def update(self, facts: dict[str, Any]) -> None:
        """Replace run.json."""
        write_json(self.path / "run.json", facts)

    def launcher(self, metadata: dict[str, Any]) -> None:
        """Write launcher_metadata.json, for its owner alone."""
        write_json(self.path / "launcher_metadata.json", metadata, 0o600)

    def log(self, line: str) -> None:
        """Append a line to train.log."""
        if self._log is not None:
            with _disk_may_be_full():
                self._log.write(line + "\n")

    def sync(self) -> None:
        """Bring train.log and steps.csv to the disk, up to their last line.

        Raises:
            OSError: as the disk has it.
        """
        for stream in (self._log, self._steps):
            stream.flush()
            os.fsync(stream.fileno())

    def step(self, row: dict[str, Any]) -> None:
        """Append one optimizer step to steps.csv; an unknown value is empty."""
        values = [row[name] for name in STEP_COLUMNS]
        with _disk_may_be_full():
            csv.writer(self._steps).writerow(map(_cell, values))

    def checkpoint(self, row: dict[str, Any]) -> None:
        """Append one save, load or export to checkpoints.csv."""
        path = self.path / "checkpoints.csv"
        with _disk_may_be_full():
            _end_line(path)
            with path.open("a", newline="") as file:
                if file.tell() == 0:
                    csv.writer(file).writerow(CHECKPOINT_COLUMNS)
                csv.writer(file).writerow([row[name] for name in CHECKPOINT_COLUMNS])

    def epochs(self, lines: list[str]) -> None:
        """Write breakdown/epochs.log."""
        (self.path / "breakdown" / "epochs.log").write_text("\n".join(lines) + "\n")

    def saves(self) -> tuple[int, list[str]]:
        """How many saves checkpoints.csv tells of, and why the failed ones failed.

        Raises:
            UsageError: it is damaged; it names the file.
        """
        path = self.path / "checkpoints.csv"
        if not path.exists():
            return 0, []
        names, *lines = [cells for _, cells in read_csv(path)] or [[]]
        rows = [dict(zip(names, cells, strict=False)) for cells in lines]
        rows = [row for row in rows if row.get("event") == "save"]
        return len(rows), [row["problem"] for row in rows if row.get("problem")]

    def complete(self, metrics: dict[str, Any], marker: str, remark: str = "") -> None:
        """Write the metrics, the status that says complete, with a remark, and, last, the marker.

        Raises:
            OSError: the disk did not take all of it; then the status says failed.
        """
        try:
            self.sync()
            write_json(self.path / METRICS, metrics)
            self._write_status(COMPLETE, remark, 0)
            write_synced(self.path / MARKER, marker + "\n")
        except OSError as error:
            self._write_status(FAILED, f"{type(error).__name__}: {error} (rank 0)", 0)
            (self.path / MARKER).unlink(missing_ok=True)
            with contextlib.suppress(OSError):
                self.close()
            raise
        self.log(marker)
        self.close()

    def fail(self, reason: str, rank: int) -> None:
        """Say that the run failed. The first reason stays: later ones are its consequences.

        rank: -1 where no rank says so, but who started them; then a folder that a living process
        writes is not ours to judge.
        """
        if rank == -1 and self.is_written():
            return
        if self.path.is_dir() and read_status(self.path).get("state") in (None, RUNNING):
            self._write_status(FAILED, reason, rank)
            with contextlib.suppress(OSError):  # it is not there, or nothing can be written
                (self.path / MARKER).unlink()

    def is_written(self) -> bool:
        """Whether a process that still lives holds the folder's lock."""
        if self._lock is not None or not (self.path / _LOCK).exists():
            return False
        held, _ = _flock(self.path / _LOCK)
        if held is not None:
            held.close()
        return held is None

    def explain(self, reason: str) -> None:
        """Say why the run ended, where its ranks saw no more than a SIGTERM or a broken connection
        to one that was gone."""
        status = read_status(self.path)
        if status.get("state") == FAILED and is_consequence(str(status.get("reason"))):
            self._write_status(FAILED, reason, status.get("rank", -1))

    def interrupt(self, reason: str) -> None:
        """Say that the run was stopped, and can be gone on with."""
        self._write_status(INTERRUPTED, reason, 0)
        self.close()

    def close(self) -> None:
        """Close the two growing files, which are on disk line by line, and let go of the folder."""
        with contextlib.ExitStack() as all_of_them:  # though one of them fails
            for stream in (self._log, self._steps, self._lock):
                if stream is not None:
                    all_of_them.callback(stream.close)
            self._log = self._steps = self._lock = None

    def _write_status(self, state: str, reason: str, rank: int) -> None:
        path = self.path / STATUS
        status = {"state": state, "reason": reason, "rank": rank, "time_utc": utc_now(), **_me()}
        try:
            write_json(path, status)
        except OSError as error:
            if state != FAILED:
                raise
            _write_over(path, _as_json(status), error)


def _write_over(path: Path, text: str, why: OSError) -> None:
    """Write a small file where it is: a full disk has room for that, not for a new one. This is
    the last word of a run that fails: who cannot write it says it."""
    try:
        if why.errno not in FULL:
            raise why
        with path.open("rb+") as file:
            file.write(text.encode())
            file.truncate()
            os.fsync(file.fileno())
    except OSError as error:
        print(f"cannot write {path}: {error.strerror}: {text}", file=sys.stderr, flush=True)


def _me() -> dict[str, Any]:
    """This process, so that another can tell whether it still lives."""
    pid = os.getpid()
    return {"host": platform.node(), "pid": pid, "process_start": _process_start(pid)}


def _process_start(pid: int) -> int | None:
    """When a process started, in clock ticks after the host did: a later process with its number
    started later. None of one that ended (a zombie has), and where there is no /proc."""
    try:
        state, *fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return None if state in "ZX" else int(fields[18])


def _flock(path: Path) -> tuple[TextIO | None, dict[str, Any]]:
    """(the locked file, {}), or (None, who holds the lock) as far as it says.

    Raises:
        OSError: it cannot be opened.
    """
    file = path.open("a+")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        file.close()
        return None, read_json(path)
    except OSError as error:
        if error.errno not in _NO_LOCKS:
            file.close()
            raise
    return file, {}


def _is_runs(name: str) -> bool:
    """Whether a name at the top of a run folder is one that a run writes."""
    return name in _WRITTEN or bool((aside := _ASIDE.fullmatch(name)) and aside[1] in _WRITTEN)


def holds_attempt(path: Path) -> bool:
    """Whether a folder holds anything that a run wrote."""
    return path.is_dir() and any(_is_runs(name) for name in os.listdir(path))


def check_folder(path: Path) -> None:
    """Refuse a folder that a run may not write into: only its own attempts are moved aside.

    Raises:
        UsageError: it is there, is not empty, and no run of ours wrote it; or it is no folder.
    """
    if path.exists() and not path.is_dir():
        raise UsageError(f"{path} is a file: name a folder for the run with --out")
    try:
        names = sorted(os.listdir(path))
    except FileNotFoundError:
        return
    except OSError as error:
        raise UsageError(f"cannot read {path}: {error.strerror}") from error
    beside = [n for n in names if n in ("attempts", _LOCK) or _BESIDE.fullmatch(n)]
    others = [n for n in names if n not in beside and not _ASIDE.fullmatch(n)]
    if others and not _has_our_mark(path):
        more = f" and {len(others) - 3} more" if len(others) > 3 else ""
        raise UsageError(
            f"{path} is no run folder of ours (it holds {', '.join(others[:3])}{more}) and is left"
            " as it is: name a new folder with --out"
        )


def _has_our_mark(path: Path) -> bool:
    """Whether one of the files of a run is there as only our runs write it."""
    facts, status = read_json(path / "run.json"), read_json(path / STATUS)
    if {"run", "spec", "layout", "git"} <= facts.keys():
        return True
    if {"state", "reason", "rank", "time_utc", "host", "pid"} <= status.keys():
        return True
    try:
        with (path / "steps.csv").open("rb") as steps:
            return steps.readline(1000).strip() == ",".join(STEP_COLUMNS).encode()
    except OSError:
        return False


class BreakdownFile:
    """The writer of one rank's breakdown/rank<r>.csv; each row is on disk when it is written."""

    def __init__(self, folder: Path, rank: int):
        self._path = Path(folder) / "breakdown" / f"rank{rank}.csv"
        self._path.parent.mkdir(exist_ok=True)
        _end_line(self._path)  # a run that goes on keeps its rows
        with self._path.open("a", newline="") as lines:
            if lines.tell() == 0:
                csv.writer(lines).writerow(BREAKDOWN_COLUMNS)

    def write(self, row: dict[str, Any]) -> None:
        """Append one window; an unknown value is empty."""
        with self._path.open("a", newline="") as lines:
            csv.writer(lines).writerow(map(_cell, (row[name] for name in BREAKDOWN_COLUMNS)))


def _cell(value: Any) -> Any:
    return "" if value is None else repr(value) if isinstance(value, float) else value


def read_breakdown(
    path: Path, world_size: int
) -> tuple[dict[int, list[dict[str, Any]]], list[str]]:
    """({rank: one dict per window with BREAKDOWN_COLUMNS}, one line per file that is no use).

    A rank without a file, or with one that is damaged or has no row, is left out and named. A last
    row that is cut short, which a killed writer leaves, is left out alone.
    """
    folder = Path(path) / "breakdown"
    ranks: dict[int, list[dict[str, Any]]] = {}
    problems = []
    missing = [r for r in range(world_size) if not (folder / f"rank{r}.csv").exists()]
    if missing:
        problems.append(f"{folder}: no rows of rank {', '.join(map(str, missing))}")
    for rank in sorted(set(range(world_size)) - set(missing)):
        file = folder / f"rank{rank}.csv"
        try:
            rows = _last_told(_read_windows(file))
        except UsageError as error:
            problems.append(str(error))
            continue
        if rows:
            ranks[rank] = rows
        else:
            problems.append(f"{file}: no row")
    return ranks, problems


def _read_windows(path: Path) -> list[dict[str, Any]]:
    rows = _read_rows(path, BREAKDOWN_COLUMNS, _BREAKDOWN_COUNTS)
    for number, row in enumerate(rows, 1):
        for name, value in row.items():
            open_end = value is None and name.endswith("_total_s")
            if not open_end and (value is None or not math.isfinite(value)):
                raise UsageError(f"{path}: row {number}: {name} cannot be {value}")
        if not (row["elapsed_s"] > 0 and row["first_step"] <= row["last_step"]):
            raise UsageError(f"{path}: row {number} is no window of steps")
    return rows


@contextlib.contextmanager
def _disk_may_be_full() -> Iterator[None]:
    """A line that a full disk does not take stays in its buffer, and training goes on; it is
    written with a later one, or the end of the run fails for it."""
    try:
        yield
    except OSError as error:
        if error.errno not in FULL:
            raise


def _last_told(windows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Windows without those that an attempt which went on from an older checkpoint ran again."""
    kept: list[dict[str, Any]] = []
    for window in windows:
        while kept and kept[-1]["last_step"] >= window["first_step"]:
            kept.pop()
        kept.append(window)
    return kept


def _end_line(path: Path) -> None:
    """Take away the half line that a killed writer left at the end of a file."""
    if not path.exists():
        return
    with path.open("rb+") as file:
        at = file.seek(0, os.SEEK_END)
        while at > 0:
            first = max(0, at - 4096)
            file.seek(first)
            if (newline := file.read(at - first).rfind(b"\n")) >= 0:
                at = first + newline + 1
                break
            at = first
        file.truncate(at)


# What a rank sees of another's end, or of its launcher's; and what a script sees of the run's.
_CONSEQUENCE = re.compile(
    r"SIGTERM|exit status \d+(?!.*: )"
    r"|.*(?:Connection (?:reset|closed)|Broken pipe|ncclRemoteError|Failed to recv)"
)


def is_consequence(reason: str) -> bool:
    """Whether a reason tells only that another process was gone, and not why."""
    return bool(_CONSEQUENCE.match(reason))


def read_status(path: Path) -> dict[str, Any]:
    """The run's status.json, or an empty dict where there is none (or a damaged one)."""
    path = Path(path) / "status.json"
    try:
        return _checked(_json_object(path), _STATUS, path)
    except UsageError:
        return {}


def job_ids(path: Path) -> list[int]:
    """The Slurm jobs that ran or wait to run here (<jobid>.out, <jobid>.submitted ...), in order.

    A job that found nothing to do left <jobid>.skipped and does not count.
    """
    try:
        parts = [name.split(".") for name in os.listdir(path)]
    except OSError:
        return []
    jobs = {int(first) for first, *_ in parts if first.isdigit()}
    return sorted(jobs - {int(p[0]) for p in parts if p[0].isdigit() and p[-1] == "skipped"})


def read_json(path: Path) -> dict[str, Any]:
    """A small JSON file; an empty dict where there is none (or half of one)."""
    try:
        return _json_object(path)
    except UsageError:
        return {}


def _json_object(path: Path) -> dict[str, Any]:
    """Raises: UsageError: unreadable, no JSON or no object; it names the file."""
    try:
        content = parse_json(path.read_text())
    except OSError as error:
        raise UsageError(f"{path}: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise UsageError(f"{path} is damaged: {error}") from error
    if not isinstance(content, dict):
        raise UsageError(f"{path} is damaged: it holds {_shown(content)}, no object")
    return content


# What readers rely on: section -> key -> its kind. A number stands for whole numbers from it on;
# null says that the writer did not know, and a key may be absent. The key "" is the file itself.
_Kinds = dict[str, dict[str, type | int]]
_SIZES = ("n_layer", "hidden", "n_head", "vocab_size", "max_seq_len", "ffn_hidden", "n_params")
_SPLIT = ("dp", "tp", "pp", "vpp", "micro_batch", "n_micro", "world_size", "global_batch")
_NAMES = ("run", "study", "configuration", "baseline", "started_utc", "go_on")
_FACTS: _Kinds = {
    "": dict.fromkeys(_NAMES, str) | {"repeat": 0, "attempts": list},
    "spec": dict.fromkeys(("engine", "preset", "precision"), str)
    | dict.fromkeys(("gpus", "seq_len", "threads"), 1)
    | {"steps": 0},
    "layout": dict.fromkeys(_SPLIT, 1)
    | {"zero_stage": 0, "recompute": str, "offload": str, "sequence_parallel": bool},
    "model": dict.fromkeys(_SIZES, 1),
    "data": {"sha256": str},
    "host": dict.fromkeys(("hostname", "cpu", "gpu"), str)
    | {"cores": 1, "ranks_per_node": 1, "gpus_visible": 0},
    "git": {"commit": str, "code": str, "dirty": bool},
    "profiler": {"tool": str},
    "scheduler": {"job_id": str},
    "work": {},
}
_STATUS: _Kinds = {"": dict.fromkeys(("state", "reason", "host", "time_utc"), str) | {"pid": 1}}
_METRICS: _Kinds = {"": {"epochs": list}, "hardware": {"world_size": 1}}
_LARGEST = 2**53  # whole numbers below it are exact in every reader's arithmetic


def _checked(content: dict[str, Any], kinds: _Kinds, path: Path) -> dict[str, Any]:
    """`content`, whose values are of `kinds`.

    Raises:
        UsageError: one is not; it names the file and the key.
    """
    for section, keys in kinds.items():
        part = content if not section else content.get(section)
        if part is None:
            continue
        if not isinstance(part, dict):
            raise UsageError(f"{path} is damaged: {section} cannot be {_shown(part)}")
        for key, kind in keys.items():
            if not _is(part.get(key), kind):
                name = f"{section}.{key}" if section else key
                raise UsageError(f"{path} is damaged: {name} cannot be {_shown(part[key])}")
    return content


def _is(value: Any, kind: type | int) -> bool:
    if value is None:
        return True
    if isinstance(kind, int):
        whole = isinstance(value, int) and not isinstance(value, bool)
        return whole and kind <= value < _LARGEST
    return isinstance(value, kind) and (kind is not str or value.isprintable())


def _shown(value: Any) -> str:
    """A value in a message, in a few characters."""
    text = ascii(value)
    return text if len(text) <= 40 else f"{text[:37]}..."


def is_run_folder(path: Path) -> bool:
    """Whether a run left something to read in a folder, be it only what it was to run."""
    return (path / "run.json").is_file() or _submitted(path) is not None


def _submitted(path: Path) -> int | None:
    """The last job that left word of what it was to run."""
    names = (p.name.split(".")[0] for p in path.glob("[0-9]*.submitted") if p.stat().st_size)
    return max((int(name) for name in names if name.isdigit()), default=None)


@dataclass
class Run:
    """What the reader found in a run folder.

    state: complete, failed, interrupted or running; pending where a job was submitted and nothing
    came of it yet. A run that says it is running, but whose process on this host is gone, died
    without a word: it is failed, and `reason` says so.
    verdict: the kind of failure, where Slurm was asked (slurm.status); its word is the last one,
    for a dead node leaves none in the folder.
    later: what became of a later job that came to no run.
    facts: run.json, or what the job was to run where it died before there was one.
    steps: one dict per optimizer step with STEP_COLUMNS, unknown values None; of a step
    that was run again after a kill, the last.
    metrics: training_metrics.json, empty when the run did not complete.
    missing: which steps have no row where they should have one, in words.
    """

    path: Path
    state: str
    reason: str
    facts: dict[str, Any]
    steps: list[dict[str, Any]] = field(default_factory=list)
    metrics: dict[str, Any] = field(default_factory=dict)
    verdict: str = ""
    later: str = ""
    missing: str = ""

    @property
    def name(self) -> str:
        return self.facts["run"]


def read_run(path: Path) -> Run:
    """Read one run folder.

    Raises:
        UsageError: no run.json, or a file that is damaged; it names the file and the line.
    """
    path = Path(path)
    source = path / "run.json"
    if not source.is_file() and is_run_folder(path):
        return _read_job(path)
    facts = _checked(_json_object(source), _FACTS, source)
    if not facts.get("run"):
        raise UsageError(f"{source} is damaged: it names no run")
    if facts.get("schema_version", SCHEMA_VERSION) != SCHEMA_VERSION:
        raise UsageError(
            f"{source}: schema_version {_shown(facts['schema_version'])} is not known"
            f" ({SCHEMA_VERSION!r} is)"
        )
    _check_split(facts.get("spec") or {}, facts.get("layout") or {}, source)
    said = path / "status.json"
    status = _checked(_json_object(said), _STATUS, said) if said.exists() else {}
    state, reason = status.get("state", FAILED), status.get("reason", "no status.json")
    if state not in (RUNNING, COMPLETE, INTERRUPTED, FAILED):
        raise UsageError(f"{said} is damaged: state cannot be {_shown(state)}")
    missing = [
        name for name in ("RUN_COMPLETE.txt", "training_metrics.json") if not (path / name).exists()
    ]
    if state == COMPLETE and missing:
        state, reason = FAILED, f"status.json says complete, but {missing[0]} is missing"
    if state == RUNNING and _is_gone(status):
        state, reason = FAILED, "the process is gone and left no word (killed?)"
    run = Run(path, state, reason or "", facts, _read_steps(path / "steps.csv"))
    _ask_jobs(run)
    if run.state == COMPLETE:
        run.metrics = _json_object(path / "training_metrics.json")
        _check_metrics(run)
    run.missing = _missing(run)
    return run


def _check_split(spec: dict[str, Any], layout: dict[str, Any], path: Path) -> None:
    """Refuse numbers of a split that disagree: one of them is not what the run had.

    Raises:
        UsageError: it names the file and the numbers.
    """
    stated = spec | {"world_size": spec.get("gpus")}
    for name in sorted(stated.keys() & layout.keys()):
        if None not in (stated[name], layout[name]) and stated[name] != layout[name]:
            raise UsageError(
                f"{path} is damaged: {name} {_shown(stated[name])} in spec,"
                f" {_shown(layout[name])} in layout"
            )
    for product, factors in (
        ("world_size", ("dp", "tp", "pp")),
        ("global_batch", ("dp", "micro_batch", "n_micro")),
    ):
        known = [layout.get(name) for name in (product, *factors)]
        if None not in known and known[0] != math.prod(known[1:]):
            said = " x ".join(f"{name} {layout[name]}" for name in factors)
            raise UsageError(f"{path} is damaged: {product} {known[0]} in layout is not {said}")


def _missing(run: Run) -> str:
    """Which steps steps.csv should hold and does not, or "".

    A complete run has a row for each step from its first to the last that was planned, as many as
    its metrics count; another run has no gap.
    """
    there = [step["step"] for step in run.steps]
    planned = (run.facts.get("spec") or {}).get("steps")
    first, last = (there[0], there[-1]) if there else (1, 0)
    if run.state == COMPLETE and planned is not None:
        last = max(last, planned)
        epochs = run.metrics.get("epochs")
        counts = [e.get("optimizer_steps") for e in epochs or [] if isinstance(e, dict)]
        if counts and all(_is(n, 0) and n is not None for n in counts):
            first = min(first, last - sum(counts) + 1)
    gaps, expected = [], first
    for step in [*there, last + 1]:
        if step > expected:
            gaps.append(str(expected) if step == expected + 1 else f"{expected}-{step - 1}")
        expected = step + 1
    if not gaps:
        return ""
    shown = ", ".join(gaps[:5]) + ", ..." * (len(gaps) > 5)
    return f"steps.csv has {len(there)} of {last - first + 1} steps; missing: {shown}"


def _check_metrics(run: Run) -> None:
    """Refuse metrics of a schema that is not known, or of another number of ranks.

    Raises:
        UsageError: it names the file and both values.
    """
    path = run.path / "training_metrics.json"
    _checked(run.metrics, _METRICS, path)
    version = run.metrics.get("schema_version", METRICS_VERSION)
    if version != METRICS_VERSION:
        raise UsageError(
            f"{path}: schema_version {_shown(version)} is not known ({METRICS_VERSION!r} is)"
        )
    ranks = (run.metrics.get("hardware") or {}).get("world_size")
    started = (run.facts.get("layout") or {}).get("world_size")
    if None not in (ranks, started) and ranks != started:
        raise UsageError(f"{path}: {ranks} ranks, but run.json started {started}")


def _read_job(path: Path) -> Run:
    """A job that died before it had a run.json, or that has not started."""
    job = _submitted(path)
    source = path / f"{job}.submitted"
    facts = _checked(_json_object(source), _FACTS, source)
    if not facts.get("run"):
        raise UsageError(f"{source} is damaged: it names no run")
    status, end = read_status(path), read_json(path / f"{job}.state")
    run = Run(path, PENDING, f"job {job} was submitted", facts)
    if end.get("verdict"):
        run.state, run.reason, run.verdict = FAILED, str(end.get("line")), str(end["verdict"])
    elif status:
        run.state, run.reason = FAILED, str(status.get("reason"))
    elif (path / f"{job}.out").exists():
        run.state, run.reason = RUNNING, f"job {job} has started"
    return run


def _ask_jobs(run: Run) -> None:
    """Let what Slurm said of the run's jobs have the last word."""
    scheduler = run.facts.get("scheduler")
    ran_by = str(scheduler.get("job_id")) if isinstance(scheduler, dict) else ""
    end = read_json(run.path / f"{ran_by}.state")
    if end.get("verdict") and (run.state in (RUNNING, FAILED) or end["verdict"] == "OOM"):
        run.state, run.reason, run.verdict = FAILED, str(end.get("line")), str(end["verdict"])
    last = max(job_ids(run.path), default=0)
    if ran_by.isdigit() and last > int(ran_by):
        end = read_json(run.path / f"{last}.state")
        if end.get("verdict"):
            run.later = f"job {last}, after this one: {end['verdict']}: {end.get('line')}"


def _is_gone(status: dict[str, Any]) -> bool:
    """Whether the process that wrote a status ran on this host and no longer does."""
    return _is_here(status) and not _lives(status)


def _is_here(status: dict[str, Any]) -> bool:
    pid = status.get("pid")
    return status.get("host") == platform.node() and type(pid) is int and 0 < pid < 1 << 31


def _lives(status: dict[str, Any]) -> bool:
    """Whether the process that wrote a status runs on this host: no zombie, and no later process
    that was given its number."""
    if not _is_here(status):
        return False
    try:
        os.kill(status["pid"], 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass  # another user's
    start = _process_start(status["pid"])
    if start is None:  # a zombie; or /proc is not there, or not for us to read
        return not Path(f"/proc/{status['pid']}").exists()
    return status.get("process_start") in (None, start)


def _read_steps(path: Path) -> list[dict[str, Any]]:
    if not path.exists():
        return []
    steps = _read_rows(path, STEP_COLUMNS, ("step", "skipped", "tokens"))
    for step in steps:
        if step["step"] is None or not (step["step_s"] is None or 0 < step["step_s"] < math.inf):
            raise UsageError(
                f"{path}: step {step['step']} cannot have taken {step['step_s']} seconds"
            )
    # After a kill, the steps since the last checkpoint are run again.
    return sorted({step["step"]: step for step in steps}.values(), key=lambda step: step["step"])


def _read_rows(
    path: Path, columns: tuple[str, ...], integers: tuple[str, ...]
) -> list[dict[str, Any]]:
    rows = []
    lines = read_csv(path)
    line_no, header = next(lines, (1, None))
    if header != list(columns):
        raise UsageError(f"{path}:1: expected columns {', '.join(columns)}")
    for line_no, row in lines:
        if len(row) != len(columns):
            # Only a killed writer leaves a short row, and only as the last one.
            if next(lines, None) is not None:
                raise UsageError(f"{path}:{line_no}: {len(row)} columns")
            break
        try:
            rows.append(
                {
                    name: None if text == "" else (whole if name in integers else float)(text)
                    for name, text in zip(columns, row, strict=True)
                }
            )
        except ValueError as error:
            raise UsageError(f"{path}:{line_no}: {error}") from error
    return rows


def read_csv(path: Path) -> Iterator[tuple[int, list[str]]]:
    """(line number, cells) of each row.

    Raises:
        UsageError: it cannot be read, or is no text; it names the file.
    """
    try:
        with path.open(newline="") as lines:
            reader = csv.reader(lines)
            for row in reader:
                yield reader.line_num, row
    except OSError as error:
        raise UsageError(f"{path}: {error.strerror}") from error
    except (UnicodeDecodeError, csv.Error) as error:
        raise UsageError(f"{path} is damaged: {error}") from error


def whole(text: str) -> int:
    """A whole number that is not negative. Raises: ValueError: it is none, or too large."""
    value = int(text)
    if not 0 <= value < _LARGEST:
        raise ValueError(f"{text[:40]!r} is out of range")
    return value


def find_runs(paths: list[Path]) -> list[Path]:
    """The run folders at or below each path, in name order; earlier attempts are left out, and
    jobs that died before there was a run. A folder that cannot be read is named on stderr.

    Raises:
        UsageError: a path does not exist, or has no run folder at or below it.
    """
    found = []
    for path in map(Path, paths):
        here = []
        for place, why in below(path, _has_run, "attempts".__eq__):
            if why and place == path:
                gone = why == os.strerror(errno.ENOENT)
                raise UsageError(f"{path}: {'no such folder' if gone else why}")
            if why:
                print(f"{place}: {why}: left out", file=sys.stderr)
            elif place.is_dir():
                here.append(place)
        if not here:
            raise UsageError(f"{path}: no run folder here (a folder with run.json)")
        found += here
    return found


def _has_run(path: Path) -> bool:
    return (path / "run.json").is_file()
