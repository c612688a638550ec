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
    """One dict for each kind of event in the run; none where it neither saved nor loaded.

    bytes_per_param: a checkpoint's bytes where the log says none. share: the seconds that training
    waited for this kind, over all waiting and the logged steps."""
    events = events_of(record)
    config, _ = config_of(record)
    params = record.params or (config and config.n_params)
    stated = params * bytes_per_param if params and bytes_per_param else None
    trained_s = float(np.nansum(record.steps["step_s"])) * record.interval
    busy_s = trained_s + sum(event.blocked_s or 0.0 for event in events)
    kinds = [*KINDS, *sorted({event.kind for event in events} - set(KINDS))]
    found = []
    for kind in kinds:
        every = [event for event in events if event.kind == kind]
        if not every:
            continue
        done = [event for event in every if not event.problem]
        default = stated if kind != "export" else None
        sizes = [default if event.bytes is None else event.bytes for event in done]
        pairs = zip(sizes, [event.total_s for event in done], strict=True)
        rate = _median([size / s if size and s else None for size, s in pairs])
        ranks = _median([event.ranks for event in done]) or record.gpus
        waits = [event.blocked_s for event in every]
        found.append(
            {
                "run": name_of(record),
                "source": record.source,
                "event": kind,
                "n": len(done),
                "failed": len(every) - len(done),
                "problems": [f"{e.kind} of step {e.step}: {e.problem}" for e in every if e.problem],
                "ranks": ranks,
                "blocked_s": _median([event.blocked_s for event in done]),
                "total_s": _median([event.total_s for event in done]),
                "bytes": _median(sizes),
                "gb": _giga(_median(sizes)),
                "gb_per_s": _giga(rate),
                "gb_per_s_per_rank": _giga(rate / ranks) if rate and ranks else None,
                "share": sum(waits) / busy_s if trained_s > 0 and None not in waits else None,
            }
        )
    return found


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
        if not of_run:
            silent.append(name_of(record))
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
