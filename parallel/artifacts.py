"""The run folder: what a run leaves behind, its one writer and its one reader. Torch-free.

run.json               the resolved settings, layout, versions, kernels, commit, host
launcher_metadata.json who started it, where, with what environment (secrets removed)
train.log              the console, in Megatron-LM's iteration lines
steps.csv              one row per optimizer step, in full precision
training_metrics.json  the summary (schema 2.0), when the run completed
RUN_COMPLETE.txt       only when it truly completed
breakdown/rank<r>.csv  with --breakdown: where the time went, one row per window of steps
status.json            running, complete or failed, and why
attempts/<n>/          the files of earlier runs in the same folder; nothing is lost
"""

import csv
import json
import math
import os
import platform
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, TextIO

from models.errors import UsageError

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
RUNNING, COMPLETE, FAILED = "running", "complete", "failed"


def utc_now() -> str:
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def write_json(path: Path, content: Any) -> None:
    """Write JSON so that a reader sees the old file or the new one, never half of it."""
    aside = path.with_name(f".{path.name}.{os.getpid()}")
    aside.write_text(json.dumps(_finite(content), indent=2, allow_nan=False) + "\n")
    os.replace(aside, path)


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
    """The writer. Rank 0 calls everything; any rank may call `fail`."""

    def __init__(self, path: Path):
        self.path = Path(path)
        self._log: TextIO | None = None
        self._steps: TextIO | None = None

    def begin(self, facts: dict[str, Any]) -> None:
        """Move what an earlier attempt left aside, then write run.json and the first status.

        Raises:
            UsageError: the folder cannot be made or written.
        """
        try:
            self.set_aside()
            self._write_status(RUNNING, "", 0)
            self.update(facts)
            self._log = (self.path / "train.log").open("w", buffering=1)
            self._steps = (self.path / "steps.csv").open("w", buffering=1, newline="")
        except OSError as error:
            raise UsageError(f"cannot write run folder {self.path}: {error.strerror}") from error
        csv.writer(self._steps).writerow(STEP_COLUMNS)

    def set_aside(self) -> None:
        """Make the folder, and move what an earlier attempt left in it to attempts/<n>/."""
        self.path.mkdir(parents=True, exist_ok=True)
        earlier = [p for p in self.path.iterdir() if p.name != "attempts"]
        # What a job or a sweep writes beside us (console.out, <jobid>.env ...) began before us: it
        # stays.
        earlier = [p for p in earlier if p.suffix not in (".out", ".err")]
        earlier = [p for p in earlier if not p.name.split(".")[0].isdigit()]
        if earlier:
            attempts = self.path / "attempts"
            aside = attempts / str(len(list(attempts.glob("*"))) + 1)
            aside.mkdir(parents=True)
            for old in earlier:
                old.rename(aside / old.name)

    def update(self, facts: dict[str, Any]) -> None:
        """Replace run.json."""
        write_json(self.path / "run.json", facts)

    def launcher(self, metadata: dict[str, Any]) -> None:
        """Write launcher_metadata.json."""
        write_json(self.path / "launcher_metadata.json", metadata)

    def log(self, line: str) -> None:
        """Append a line to train.log."""
        if self._log is not None:
            self._log.write(line + "\n")

    def step(self, row: dict[str, Any]) -> None:
        """Append one optimizer step to steps.csv; an unknown value is empty."""
        values = [row[name] for name in STEP_COLUMNS]
        csv.writer(self._steps).writerow(map(_cell, values))

    def complete(self, metrics: dict[str, Any], marker: str) -> None:
        """Write the metrics, the marker and, last, the status that says complete."""
        write_json(self.path / "training_metrics.json", metrics)
        (self.path / "RUN_COMPLETE.txt").write_text(marker + "\n")
        self._write_status(COMPLETE, "", 0)
        self.close()

    def fail(self, reason: str, rank: int) -> None:
        """Say that the run failed. The first reason stays: later ones are its consequences."""
        if self.path.is_dir() and read_status(self.path).get("state") in (None, RUNNING):
            self._write_status(FAILED, reason, rank)
            (self.path / "RUN_COMPLETE.txt").unlink(missing_ok=True)

    def close(self) -> None:
        """Close the two growing files; what they hold is on disk already, line by line."""
        for stream in (self._log, self._steps):
            if stream is not None:
                stream.close()
        self._log = self._steps = None

    def _write_status(self, state: str, reason: str, rank: int) -> None:
        write_json(
            self.path / "status.json",
            {
                "state": state,
                "reason": reason,
                "rank": rank,
                "time_utc": utc_now(),
                "host": platform.node(),
                "pid": os.getpid(),
            },
        )


class BreakdownFile:
    """The writer of one rank's breakdown/rank<r>.csv; each row is on disk when it is written."""

    def __init__(self, folder: Path, rank: int):
        path = Path(folder) / "breakdown" / f"rank{rank}.csv"
        path.parent.mkdir(exist_ok=True)
        self._lines = path.open("w", buffering=1, newline="")
        csv.writer(self._lines).writerow(BREAKDOWN_COLUMNS)

    def write(self, row: dict[str, Any]) -> None:
        """Append one window; an unknown value is empty."""
        csv.writer(self._lines).writerow(map(_cell, (row[name] for name in BREAKDOWN_COLUMNS)))


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
            rows = _read_rows(file, BREAKDOWN_COLUMNS, _BREAKDOWN_COUNTS)
        except UsageError as error:
            problems.append(str(error))
            continue
        if rows:
            ranks[rank] = rows
        else:
            problems.append(f"{file}: no row")
    return ranks, problems


def read_status(path: Path) -> dict[str, Any]:
    """The run's status.json, or an empty dict where there is none (or half of one)."""
    try:
        return json.loads((Path(path) / "status.json").read_text())
    except (OSError, ValueError):
        return {}


@dataclass
class Run:
    """What the reader found in a run folder.

    state: complete, failed or running. A run that says it is running, but whose process on this
    host is gone, died without a word: it is failed, and `reason` says so.
    facts: run.json. steps: one dict per optimizer step with STEP_COLUMNS, unknown values None.
    metrics: training_metrics.json, empty when the run did not complete.
    """

    path: Path
    state: str
    reason: str
    facts: dict[str, Any]
    steps: list[dict[str, Any]] = field(default_factory=list)
    metrics: dict[str, Any] = field(default_factory=dict)

    @property
    def name(self) -> str:
        return self.facts["run"]


def read_run(path: Path) -> Run:
    """Read one run folder.

    Raises:
        UsageError: no run.json, or a file that is damaged; it names the file and the line.
    """
    path = Path(path)
    try:
        facts = json.loads((path / "run.json").read_text())
    except OSError as error:
        raise UsageError(f"{path / 'run.json'}: {error.strerror}") from error
    except ValueError as error:
        raise UsageError(f"{path / 'run.json'} is damaged: {error}") from error
    if not isinstance(facts, dict) or "run" not in facts:
        raise UsageError(f"{path / 'run.json'} is damaged: it names no run")
    status = read_status(path)
    state, reason = status.get("state", FAILED), status.get("reason", "no status.json")
    missing = [
        name for name in ("RUN_COMPLETE.txt", "training_metrics.json") if not (path / name).exists()
    ]
    if state == COMPLETE and missing:
        state, reason = FAILED, f"status.json says complete, but {missing[0]} is missing"
    if state == RUNNING and _is_gone(status):
        state, reason = FAILED, "the process is gone and left no word (killed?)"
    run = Run(path, state, reason, facts, _read_steps(path / "steps.csv"))
    if state == COMPLETE:
        try:
            run.metrics = json.loads((path / "training_metrics.json").read_text())
        except ValueError as error:
            raise UsageError(f"{path / 'training_metrics.json'} is damaged: {error}") from error
    return run


def _is_gone(status: dict[str, Any]) -> bool:
    """Whether the process that wrote a status ran on this host and no longer does."""
    if status.get("host") != platform.node() or not isinstance(status.get("pid"), int):
        return False
    try:
        os.kill(status["pid"], 0)
    except ProcessLookupError:
        return True
    except PermissionError:
        return False
    return False


def _read_steps(path: Path) -> list[dict[str, Any]]:
    if not path.exists():
        return []
    return _read_rows(path, STEP_COLUMNS, ("step", "skipped", "tokens"))


def _read_rows(
    path: Path, columns: tuple[str, ...], integers: tuple[str, ...]
) -> list[dict[str, Any]]:
    rows = []
    with path.open(newline="") as lines:
        reader = csv.reader(lines)
        header = next(reader, None)
        if header != list(columns):
            raise UsageError(f"{path}:1: expected columns {', '.join(columns)}")
        for row in reader:
            if len(row) != len(columns):
                # Only a killed writer leaves a short row, and only as the last one.
                if next(reader, None) is not None:
                    raise UsageError(f"{path}:{reader.line_num - 1}: {len(row)} columns")
                break
            try:
                rows.append(
                    {
                        name: None if text == "" else (int if name in integers else float)(text)
                        for name, text in zip(columns, row, strict=True)
                    }
                )
            except ValueError as error:
                raise UsageError(f"{path}:{reader.line_num}: {error}") from error
    return rows


def find_runs(paths: list[Path]) -> list[Path]:
    """The run folders at or below each path, in name order; earlier attempts are left out.

    Raises:
        UsageError: a path does not exist, or has no run folder at or below it.
    """
    found = []
    for path in map(Path, paths):
        if not path.exists():
            raise UsageError(f"{path}: no such folder")
        below = sorted(p.parent for p in path.rglob("run.json") if "attempts" not in p.parts)
        if not below:
            raise UsageError(f"{path}: no run folder here (a folder with run.json)")
        found += below
    return found
