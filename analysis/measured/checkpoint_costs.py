"""What saving and loading cost: seconds, bytes, GB/s, and the share of time that saving took."""

import math
from pathlib import Path
from typing import Any

import numpy as np

from analysis.common.table import Column, Table
from analysis.logs.load import load, name_of
from analysis.logs.model import config_of
from analysis.logs.parsing.checkpoint_lines import Event, scan
from analysis.logs.parsing.logfile import Log
from analysis.logs.readers import run_folder
from analysis.logs.record import Record
from base.errors import UsageError
from parallel.record.reader import read_csv
from parallel.record.schema import count

COLUMNS = ("event", "step", "blocked_s", "total_s", "bytes", "ranks")
KINDS = ("save", "export", "load")


def read_events(path: Path) -> list[Event]:
    """A run folder's checkpoints.csv; [] where the run wrote none. Rows cut short are left out.

    Raises:
        UsageError: it is damaged; it names the line.
    """
    try:
        rows = list(read_csv(path))
    except UsageError as error:
        if isinstance(error.__cause__, FileNotFoundError):
            return []
        raise
    names = rows[0][1] if rows else []
    if not set(COLUMNS) <= set(names):
        raise UsageError(f"{path}:1: expected columns {', '.join(COLUMNS)}")
    events = []
    for line_no, row in rows[1:]:
        if len(row) < len(names):
            continue  # the writer was killed
        cells = dict(zip(names, row, strict=False))
        try:
            step, ranks = (count(cells[n]) if cells[n] else None for n in ("step", "ranks"))
            numbers = [_amount(cells[n]) for n in ("blocked_s", "total_s", "bytes")]
        except ValueError as error:
            raise UsageError(f"{path}:{line_no}: {error}") from error
        events.append(Event(cells["event"], step, *numbers, ranks, cells.get("problem", "")))
    return events


def _amount(text: str) -> float | None:
    """Seconds or bytes; None where unknown. Raises: ValueError: negative, or no number."""
    value = float(text) if text else None
    if value is not None and not 0 <= value < math.inf:
        raise ValueError(f"{text[:40]!r} is out of range")
    return value


def events_of(record: Record) -> list[Event]:
    """The saves and loads of a run.

    Raises:
        UsageError: its checkpoints.csv is damaged.
    """
    if record.format == run_folder.FORMAT:
        return read_events(Path(record.source) / "checkpoints.csv")
    with Log(Path(record.source)) as log:
        return scan(log)


def rows(record: Record, bytes_per_param: float | None = None) -> list[dict[str, Any]]:
    """One dict for each kind of event in the run; none where it neither saved nor loaded."""
    events = events_of(record)
    config, _ = config_of(record)
    params = record.params or (config and config.n_params)
    stated = params * bytes_per_param if params and bytes_per_param else None
    trained_s = float(np.nansum(record.step_s)) * record.interval
    busy_s = trained_s + sum(event.blocked_s or 0.0 for event in events) if trained_s > 0 else None
    found = []
    for kind in [*KINDS, *sorted({event.kind for event in events} - set(KINDS))]:
        if every := [event for event in events if event.kind == kind]:
            size = stated if kind != "export" else None
            row = _row(every, size, record.gpus, busy_s)
            found.append({"run": name_of(record), "source": record.source, "event": kind} | row)
    return found


def _row(
    every: list[Event], stated: float | None, gpus: int | None, busy_s: float | None
) -> dict[str, Any]:
    """One kind of event: `stated` bytes where the log says none, the share of `busy_s` seconds."""
    done = [event for event in every if not event.problem]
    size = [stated if event.bytes is None else event.bytes for event in done]
    rate = _median(
        [b / e.total_s if b and e.total_s else None for b, e in zip(size, done, strict=True)]
    )
    ranks = _median([event.ranks for event in done]) or gpus
    lost = [event.blocked_s for event in every]
    return {
        "n": len(done),
        "failed": len(every) - len(done),
        "problems": [f"{e.kind} of step {e.step}: {e.problem}" for e in every if e.problem],
        "ranks": ranks,
        "blocked_s": _median([event.blocked_s for event in done]),
        "total_s": _median([event.total_s for event in done]),
        "bytes": _median(size),
        "gb": _giga(_median(size)),
        "gb_per_s": _giga(rate),
        "gb_per_s_per_rank": _giga(rate / ranks) if rate and ranks else None,
        "share": sum(lost) / busy_s if busy_s and None not in lost else None,
    }


def _median(values: list[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return float(np.median(known)) if known else None


def _giga(value: float | None) -> float | None:
    return None if value is None else value / 1e9


def table(
    records: list[Record], bytes_per_param: float | None = None
) -> tuple[Table, list[str], list[str]]:
    """The table of saves and loads, the names of the runs that have none, and what was refused."""
    found, silent, refused = [], [], []
    for record in records:
        try:
            of_run = rows(record, bytes_per_param)
        except UsageError as error:  # the others are still reported
            refused.append(str(error))
            continue
        found += of_run
        silent += [name_of(record)] * (not of_run)
    columns = [
        Column("run", "run"),
        Column("event", "event"),
        Column("n", "n", "d"),
        Column("failed", "failed", "d"),
        Column("ranks", "ranks", ".0f"),
        Column("blocked_s", "blocked s", ".4g"),
        Column("total_s", "total s", ".4g"),
        Column("gb", "GB", ".4g"),
        Column("gb_per_s", "GB/s", ".3g"),
        Column("gb_per_s_per_rank", "GB/s/rank", ".3g"),
        Column("share", "share of time", ".1%"),
    ]
    notes = ["medians over the events; the share counts waiting, over waiting and logged steps"]
    notes += [f"{row['run']}: {problem}" for row in found for problem in row["problems"]]
    if bytes_per_param and any(row["gb"] for row in found):
        notes.append(f"bytes of logs: {bytes_per_param:g} per parameter, as stated")
    return Table(columns, found, notes=notes), silent, refused


def report(paths: list[Path], bytes_per_param: float | None = None) -> Table:
    """The table of what is at the paths, for reports.

    Raises:
        UsageError: nothing could be read, or something could not.
    """
    shown, _, refused = table(load(paths)[0], bytes_per_param)
    if refused:
        raise UsageError("; ".join(refused))
    return shown
