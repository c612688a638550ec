"""What saving and loading cost: seconds, bytes, GB/s, and the share of time that saving took.

    python -m analysis.checkpoints PATH... [--bytes-per-param B] [--format markdown]

PATH is a run folder (its checkpoints.csv is read), a study, or a log of Megatron-LM,
Megatron-DeepSpeed, DeepSpeed, GPT-NeoX, torchtitan or fairseq. One row for each run and kind of
event: how many, the median seconds that training waited (blocked) and until it was on disk
(total), the median bytes, and bytes over total seconds, in all and for each rank. The share is the
waiting over the waiting and the logged steps together. Those that failed (a full disk, a damaged
file) are counted apart; only their waiting counts with the others'.

No log says its bytes: `--bytes-per-param 14` states them for checkpoints of 2 bytes of weights and
12 of fp32 state, where the number of parameters is known. What is not known prints `-`.
A published table (a CSV with a column save_ms, as logs/published/seed003_checkpoint_save.csv) is
printed with what its rows give. Exits 2 when nothing could be read.
"""

import argparse
import math
import sys
from pathlib import Path
from typing import Any

if not __package__:  # run as a script: find the rooms, not analysis/ itself
    sys.path[0] = str(Path(__file__).resolve().parent.parent)

import numpy as np

from analysis.load import add_fact_flags, load, name_of
from analysis.readers import run_folder
from analysis.readers._checkpoints import Event, scan
from analysis.readers._log import Log
from analysis.records import Record
from analysis.tables import FORMAT_HELP, FORMATS, Column, Table, emphasise
from analysis.tflops import config_of
from models.bounds import Bounds, check_flags
from models.errors import Parser, UsageError, command_line, warn
from parallel.artifacts import read_csv, whole

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
            continue  # of a writer that was killed
        cells = dict(zip(names, row, strict=False))
        try:
            step, ranks = (whole(cells[n]) if cells[n] else None for n in ("step", "ranks"))
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
    config = config_of(record)
    params = record.params or (config and config.n_params)
    stated = params * bytes_per_param if params and bytes_per_param else None
    trained_s = float(np.nansum(record.step_s)) * record.interval
    waited_s = sum(event.blocked_s or 0.0 for event in events)
    found = []
    for kind in [*KINDS, *sorted({event.kind for event in events} - set(KINDS))]:
        every = [event for event in events if event.kind == kind]
        mine = [event for event in every if not event.problem]
        if not every:
            continue
        full = stated if kind != "export" else None
        size = [full if event.bytes is None else event.bytes for event in mine]
        rates = [
            b / e.total_s if b and e.total_s else None for b, e in zip(size, mine, strict=True)
        ]
        ranks = _median([event.ranks for event in mine]) or record.gpus
        rate = _median(rates)
        lost = [event.blocked_s for event in every]
        known = trained_s > 0 and None not in lost
        found.append(
            {
                "run": name_of(record),
                "source": record.source,
                "event": kind,
                "n": len(mine),
                "failed": len(every) - len(mine),
                "problems": [f"{kind} of step {e.step}: {e.problem}" for e in every if e.problem],
                "ranks": ranks,
                "blocked_s": _median([event.blocked_s for event in mine]),
                "total_s": _median([event.total_s for event in mine]),
                "bytes": _median(size),
                "gb": _giga(_median(size)),
                "gb_per_s": _giga(rate),
                "gb_per_s_per_rank": _giga(rate / ranks) if rate and ranks else None,
                "share": sum(lost) / (trained_s + waited_s) if known else None,
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


@command_line("analysis.checkpoints")
def main(argv: list[str] | None = None) -> int:
    """Print the table of what is at the paths."""
    parser = Parser(
        prog="python -m analysis.checkpoints",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("paths", nargs="+", type=Path, metavar="PATH", help="run, log, folder, CSV")
    parser.add_argument(
        "--bytes-per-param", type=float, metavar="B", help="of a checkpoint in logs"
    )
    add_fact_flags(parser)
    parser.add_argument("--format", choices=FORMATS, default="text", help=FORMAT_HELP)
    arguments = parser.parse_args(argv)
    check_flags(arguments, bytes_per_param=Bounds(0, 1000, above=True))
    published = [path for path in arguments.paths if path.suffix == ".csv"]
    others = [path for path in arguments.paths if path not in published]
    tables = []
    if published:
        from analysis.published import checkpoints

        tables += [checkpoints(path) for path in published]
    if others:
        records, refused = load(others, arguments)
        shown, silent, damaged = table(records, arguments.bytes_per_param)
        for line in refused + damaged:
            warn("analysis.checkpoints", line)
        if silent:
            warn("analysis.checkpoints", f"no checkpoint in {', '.join(silent)}")
        tables.append(shown)
    for shown in tables:
        text = shown.render(arguments.format)
        print(emphasise(text) if arguments.format == "text" else text, end="")
    return 0


if __name__ == "__main__":
    sys.exit(main())
