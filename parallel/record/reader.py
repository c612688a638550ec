"""The reader of a run folder; schema.py says what is in one. Torch-free."""

import csv
import math
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from base.bounds import misfit
from base.errors import Reading, UsageError
from base.files import below, read_json, read_json_if_whole, shown
from parallel.record import schema
from parallel.record.ends import COMPLETE, FAILED, INTERRUPTED, PENDING, RUNNING, Kind, kind_of
from parallel.record.process import ran_here, runs_here

CLOCKS_APART_S = 3600.0  # by which a machine's clock may be set between two steps


@dataclass
class Run:
    """A run, as the reader found it in its folder.

    state: complete, failed, interrupted or running; pending where a job was submitted and nothing
    came of it yet. A run that says it is running, but whose process on this host is gone, failed.
    kind: one of ends.Kind where the run failed or was interrupted, else "".
    verdict: what slurm.status found, where Slurm was asked. It replaces the folder's own state: a
    node that died writes none.
    later: how a later job ended that started no run.
    status: status.json, {} where there is none.
    facts: run.json, or what the job was to run where it died before there was one.
    steps: one dict per optimizer step with STEP_COLUMNS, and with EXPERT_COLUMNS and CLOCK_COLUMNS
    where they are there, unknown values None; of a step that was run again after a kill, the last.
    written: the same of every row of steps.csv, in its order.
    metrics: training_metrics.json, empty when the run did not complete.
    missing: which steps have no row where they should have one, or have one and were not planned,
    in words. off_clock: how the times of steps contradict the times of day when they ended.
    """

    path: Path
    state: str
    reason: str
    facts: dict[str, Any]
    steps: list[dict[str, Any]] = field(default_factory=list)
    written: list[dict[str, Any]] = field(default_factory=list)
    status: dict[str, Any] = field(default_factory=dict)
    metrics: dict[str, Any] = field(default_factory=dict)
    kind: str = ""
    verdict: str = ""
    later: str = ""
    missing: str = ""
    off_clock: str = ""

    @property
    def name(self) -> str:
        return self.facts["run"]


# --- one run -------------------------------------------------------------------------------------


def read_run(path: Path) -> Run:
    """Reads one run folder.

    Raises:
        UsageError: no run.json, or a file that is damaged; it names the file and the line.
    """
    path = Path(path)
    if not has_run(path) and is_run_folder(path):
        return _read_job(path)
    facts, source = read_facts(path), path / schema.STATUS
    status = _status(source) if source.exists() else None
    end = _end_of(path, status)
    written = _read_steps(path / schema.STEPS)
    # After a kill, the steps since the last checkpoint are run again.
    steps = sorted({row["step"]: row for row in written}.values(), key=lambda row: row["step"])
    run = Run(path, end.state, end.reason, facts, steps, written, status or {}, kind=end.kind)
    run.off_clock = _off_clock(written, facts)
    planned = (facts.get("spec") or {}).get("steps")
    if facts.get("attempts") and planned is not None:  # an earlier one may have planned more
        run.steps = [step for step in steps if step["step"] <= planned]
    _ask_jobs(run)
    if run.state == COMPLETE:
        source = path / schema.METRICS
        run.metrics = schema.checked_metrics(read_json(source), facts, source)
    run.missing = _missing(run)
    return run


def read_facts(path: Path) -> dict[str, Any]:
    """Returns run.json of a folder."""
    return schema.checked_facts(read_json(path / schema.RUN), path / schema.RUN)


def read_status(path: Path) -> dict[str, Any]:
    """Returns the run's status.json, or an empty dict where there is none (or a damaged one).

    A run that failed or was interrupted always has a `kind`.
    """
    try:
        return _status(Path(path) / schema.STATUS)
    except UsageError:
        return {}


def _status(path: Path) -> dict[str, Any]:
    """Returns a status.json, with the kind of its end.

    Raises:
        UsageError: it is damaged, or there is none.
    """
    status = schema.checked(read_json(path), schema.STATUS_KEYS, path)
    if status.get("state") in (FAILED, INTERRUPTED) and status.get("kind") not in list(Kind):
        status["kind"] = kind_of(status.get("reason") or "")
    return status


class _End(NamedTuple):
    """How a run stands or ended; `kind` and `reason` are "" where nothing ended it."""

    state: str
    kind: str
    reason: str


def _end_of(path: Path, status: dict[str, Any] | None) -> _End:
    """Returns how a run stands, by its status.json and by what else is in its folder."""
    if status is None:
        return _End(FAILED, Kind.UNKNOWN, "no status.json")
    state = status.get("state", FAILED)
    if state not in (RUNNING, COMPLETE, INTERRUPTED, FAILED):
        raise UsageError(f"{path / schema.STATUS} is damaged: state cannot be {shown(state)}")
    missing = [name for name in (schema.MARKER, schema.METRICS) if not (path / name).exists()]
    if state == COMPLETE and missing:
        reason = f"status.json says complete, but {missing[0]} is missing"
        return _End(FAILED, Kind.UNKNOWN, reason)
    if state == RUNNING and ran_here(status) and not runs_here(status):
        return _End(FAILED, Kind.UNKNOWN, "the process is gone and left no word (killed?)")
    return _End(state, status.get("kind") or "", status.get("reason") or "")


def _missing(run: Run) -> str:
    """Returns which steps steps.csv should hold and does not, or "".

    A complete run has a row for each step from its first to the last that was planned, as many as
    its metrics count; another run has no gap.
    """
    recorded = [step["step"] for step in run.steps]
    planned = (run.facts.get("spec") or {}).get("steps")
    if recorded and planned is not None and recorded[-1] > planned:
        return f"{schema.STEPS} goes to step {recorded[-1]} of {planned}"
    first, last = (recorded[0], recorded[-1]) if recorded else (1, 0)
    if run.state == COMPLETE and planned is not None:
        last = max(last, planned)
        epochs = run.metrics.get("epochs")
        counts = [epoch.get("optimizer_steps") for epoch in epochs or [] if isinstance(epoch, dict)]
        if counts and not misfit(counts, [schema.COUNT]):
            first = min(first, last - sum(counts) + 1)
    edges = pairwise([first - 1, *recorded, last + 1])
    gaps = [
        str(last_row + 1) if next_row == last_row + 2 else f"{last_row + 1}-{next_row - 1}"
        for last_row, next_row in edges
        if next_row > last_row + 1
    ]
    if not gaps:
        return ""
    named = ", ".join(gaps[:5]) + (", ..." if len(gaps) > 5 else "")
    return f"{schema.STEPS} has {len(recorded)} of {last - first + 1} steps; missing: {named}"


# --- jobs ----------------------------------------------------------------------------------------


def is_run_folder(path: Path) -> bool:
    """Returns whether a run left something to read in a folder, be it only what it was to run."""
    return has_run(path) or _submitted(path) is not None


def has_run(path: Path) -> bool:
    return (path / schema.RUN).is_file()


def holds_attempt(path: Path) -> bool:
    """Returns whether a folder holds anything that a run wrote."""
    return path.is_dir() and any(map(schema.is_written_by_run, os.listdir(path)))


def job_ids(path: Path) -> list[int]:
    """Returns the Slurm jobs that ran or wait to run here (<jobid>.out, <jobid>.submitted ...), in
    order.

    A job that found nothing to do left <jobid>.skipped and does not count.
    """
    try:
        files = [name.split(".") for name in os.listdir(path) if name.split(".")[0].isdecimal()]
    except OSError:
        return []
    skipped = {int(parts[0]) for parts in files if parts[-1] == "skipped"}
    return sorted({int(parts[0]) for parts in files} - skipped)


def read_job_end(path: Path, job_id: int | str) -> dict[str, Any]:
    """Returns how a job ended, as slurm.status wrote it down (<jobid>.state): its keys are those of
    schema.JOB_END_KEYS, and `line`. An empty dict where there is none, or a damaged one."""
    end = read_json_if_whole(path / f"{job_id}.state")
    return {} if misfit(end, schema.JOB_END_KEYS) else end


def _submitted(path: Path) -> int | None:
    """Returns the last job that wrote what it was to run."""
    files = [p for p in path.glob("[0-9]*.submitted") if p.stem.isdecimal() and p.stat().st_size]
    return max((int(file.stem) for file in files), default=None)


def _read_job(path: Path) -> Run:
    """Returns a job that died before it had a run.json, or that has not started."""
    job = _submitted(path)
    source = path / f"{job}.submitted"
    facts = schema.checked_facts(read_json(source), source)
    run = Run(path, PENDING, f"job {job} was submitted", facts, status=read_status(path))
    end = read_job_end(path, job)
    if end.get("verdict"):
        _take_slurms_word(run, end)
    elif run.status:
        run.state, run.reason = FAILED, str(run.status.get("reason"))
        run.kind = run.status.get("kind") or Kind.UNKNOWN
    elif (path / f"{job}.out").exists():
        run.state, run.reason = RUNNING, f"job {job} has started"
    return run


def _ask_jobs(run: Run) -> None:
    """Takes what Slurm said of the ends of the run's jobs for the run's own state."""
    ran_by = str((run.facts.get("scheduler") or {}).get("job_id"))
    end = read_job_end(run.path, ran_by)
    if end.get("verdict") and (run.state in (RUNNING, FAILED) or end["verdict"] == "OOM"):
        _take_slurms_word(run, end)
    last = max(job_ids(run.path), default=0)
    if ran_by.isdecimal() and last > int(ran_by):
        if (end := read_job_end(run.path, last)).get("verdict"):
            run.later = f"job {last}, after this one: {end['verdict']}: {end.get('line')}"


def _take_slurms_word(run: Run, end: dict[str, Any]) -> None:
    """Takes state, kind and reason from the job's <jobid>.state: the run failed."""
    run.state, run.reason, run.verdict = FAILED, str(end.get("line")), str(end["verdict"])
    run.kind = end["kind"] if end.get("kind") in list(Kind) else kind_of(run.reason)


# --- files ---------------------------------------------------------------------------------------


def _read_steps(path: Path) -> list[dict[str, Any]]:
    """Returns the rows of steps.csv as they were written."""
    steps = read_rows(path, schema.STEP_COLUMNS, schema.EXPERT_COLUMNS | schema.CLOCK_COLUMNS)
    for step in steps:
        if step["step"] is None or not (step["step_s"] is None or 0 < step["step_s"] < math.inf):
            raise UsageError(
                f"{path}: step {step['step']} cannot have taken {step['step_s']} seconds"
            )
    return steps


def _off_clock(rows: list[dict[str, Any]], facts: dict[str, Any]) -> str:
    """Returns how the times of steps contradict when they ended, in words, or "". Older files say
    no ends.

    What is no training (validation, saves) stands between an end and the next step, so most steps
    follow the one before at once; no step takes longer than since the end of the one before.
    """
    gaps, spec = [], facts.get("spec") or {}
    for earlier, row in pairwise(rows):
        ends = earlier.get("ended_unix_s"), row.get("ended_unix_s")
        if row["step"] != earlier["step"] + 1 or None in (*ends, row["step_s"]):
            continue
        gaps.append((ends[1] - ends[0], row["step_s"]))
        if row["step_s"] > gaps[-1][0] + CLOCKS_APART_S:
            took = f"step {row['step']} took {row['step_s']:.4g} s by {schema.STEPS}"
            return f"{took}, where it ended {gaps[-1][0]:.4g} s after the one before"
    always = 1 in (spec.get("eval_interval"), spec.get("save_interval"))
    if len(gaps) < 4 or always:
        return ""
    beside_s = sorted(gap - 2 * step_s for gap, step_s in gaps)[len(gaps) // 4]
    if beside_s <= 0.01:
        return ""
    gap, step_s = (median(column) for column in zip(*gaps, strict=True))
    return f"{schema.STEPS} says {step_s:.4g} s a step, its steps end {gap:.4g} s apart"


def read_checkpoints(path: Path) -> list[dict[str, Any]]:
    """Returns one dict with CHECKPOINT_COLUMNS for each row of a folder's checkpoints.csv, unknown
    values None; [] where the run wrote none."""
    return read_rows(path / schema.CHECKPOINTS, schema.CHECKPOINT_COLUMNS)


class Saves(NamedTuple):
    """The saves in a folder's checkpoints.csv: how many, how many of them failed, and a remark:
    why the last of these failed, or why the file cannot be read."""

    total: int
    failed: int
    remark: str


def read_saves(path: Path) -> Saves:
    """Returns what a folder's checkpoints.csv says of saves. Where it is damaged a remark says so:
    the run's steps are whole."""
    try:
        problems = [row["problem"] for row in read_checkpoints(path) if row["event"] == "save"]
    except UsageError as error:
        return Saves(0, 0, str(error))
    failed, total = list(filter(None, problems)), len(problems)
    remark = f"{len(failed)} of {total} saves failed, the last: {failed[-1]}" if failed else ""
    return Saves(total, len(failed), remark)


def read_slow_ranks(folder: Path) -> list[dict[str, Any]]:
    """Returns the rows of a run's slow_ranks.csv; of steps that were run again, the last."""
    path = folder / schema.SLOW_RANKS
    if not path.exists():
        reason = "one rank, no step yet, or a run of an earlier version"
        raise UsageError(f"{folder}: no {schema.SLOW_RANKS}: {reason}")
    rows: dict[tuple[int, str, int], dict[str, Any]] = {}
    for number, row in enumerate(read_rows(path, schema.SLOW_COLUMNS), 2):
        if None in (row[name] for name in schema.SLOW_COLUMNS if name != "node"):
            raise UsageError(f"{path}:{number}: a value is missing")
        while rows and row["first_step"] <= (newest := next(reversed(rows)))[0] != row["last_step"]:
            del rows[newest]
        rows[row["last_step"], row["kind"], row["rank"]] = row
    return [rows[key] for key in sorted(rows)]


def read_breakdown(path: Path, world_size: int) -> Reading[dict[int, list[dict[str, Any]]]]:
    """Returns {rank: one dict per window with BREAKDOWN_COLUMNS}; one line per unusable file.

    A rank without a file, or with one that is damaged or has no row, is left out and named. A last
    row that is cut short, which a killed writer leaves, is left out alone.
    """
    folder = path / "breakdown"
    ranks: dict[int, list[dict[str, Any]]] = {}
    missing, problems = [], []
    for rank in range(world_size):
        file = folder / f"rank{rank}.csv"
        if not file.exists():
            missing.append(str(rank))
            continue
        try:
            ranks[rank] = read_windows(file)
        except UsageError as error:
            problems.append(str(error))
    if missing:
        problems.insert(0, f"{folder}: no rows of rank {', '.join(missing)}")
    return Reading(ranks, problems)


def read_windows(path: Path) -> list[dict[str, Any]]:
    """Returns the rows of one rank's breakdown, each a window of steps; of windows that a later
    attempt ran again, from an older checkpoint, its own.

    Raises:
        UsageError: there is none, or one has an unknown value, no time, or ends before it begins.
    """
    rows = read_rows(path, schema.BREAKDOWN_COLUMNS, schema.EXPERT_BREAKDOWN_COLUMNS)
    if not rows:
        raise UsageError(f"{path}: no row")
    for number, row in enumerate(rows, 1):
        unknown = [
            column for column, value in row.items() if value is None or not math.isfinite(value)
        ]
        if unknown or row["elapsed_s"] <= 0 or row["first_step"] > row["last_step"]:
            raise UsageError(f"{path}: row {number} is no window of steps {', '.join(unknown)}")
    kept: list[dict[str, Any]] = []
    for window in rows:
        while kept and kept[-1]["last_step"] >= window["first_step"]:
            kept.pop()
        kept.append(window)
    return kept


_Kinds = Mapping[str, Callable[[str], Any]]


def read_rows(path: Path, kinds: _Kinds, optional: _Kinds | None = None) -> list[dict[str, Any]]:
    """Returns one dict for each row of a CSV file, unknown values None; [] where there is no file.
    A last row that is cut short, which a killed writer leaves, is left out.

    kinds: a column -> what turns its text into a value. optional: the same of columns that may be
    absent.

    Raises:
        UsageError: it is damaged; it names the file and the line.
    """
    if not path.exists():
        return []
    rows, lines = [], _read_csv(path)
    _, header = next(lines, (1, []))
    if not kinds.keys() <= set(header):  # more columns are allowed: an earlier version wrote them
        raise UsageError(f"{path}:1: expected columns {', '.join(kinds)}")
    kinds = {**kinds, **{name: kind for name, kind in (optional or {}).items() if name in header}}
    for line_no, cells in lines:
        if len(cells) != len(header):
            # Only a killed writer leaves a short row, and only as the last one.
            if next(lines, None) is not None:
                raise UsageError(f"{path}:{line_no}: {len(cells)} columns")
            break
        row = dict(zip(header, cells, strict=True))
        try:
            values = {
                name: kind(row[name]) if row[name] or kind is str else None
                for name, kind in kinds.items()
            }
            rows.append(values)
        except ValueError as error:
            raise UsageError(f"{path}:{line_no}: {error}") from error
    return rows


def _read_csv(path: Path) -> Iterator[tuple[int, list[str]]]:
    """Yields (line number, cells) of each row."""
    try:
        with path.open(newline="") as lines:
            reader = csv.reader(lines)
            for row in reader:
                yield reader.line_num, row
    except OSError as error:
        raise UsageError(f"{path}: {error.strerror}") from error
    except (UnicodeDecodeError, csv.Error) as error:
        raise UsageError(f"{path} is damaged: {error}") from error


def find_runs(
    paths: list[Path], is_run: Callable[[Path], bool] = has_run, unread: list[str] | None = None
) -> list[Path]:
    """Returns the run folders at or below each path, in name order.

    Earlier attempts are left out, and unless `is_run` says otherwise jobs that died before there
    was a run. A folder that cannot be read is named in `unread`, which is filled, or on stderr.

    Raises:
        UsageError: a path does not exist, or has no run folder at or below it.
    """
    runs = []
    for top in map(Path, paths):
        if not top.exists():
            raise UsageError(f"{top}: no such folder")
        n_before = len(runs)
        for folder, problem in below(top, is_run, "attempts".__eq__):
            if problem and folder == top:
                raise UsageError(f"{top}: {problem}")
            if problem and unread is not None:
                unread.append(f"{folder}: {problem}")
            elif problem:
                print(f"{folder}: {problem}: left out", file=sys.stderr)
            elif folder.is_dir():
                runs.append(folder)
        if len(runs) == n_before:
            raise UsageError(f"{top}: no run folder here (a folder with run.json)")
    return runs
