"""What saving and loading cost: seconds, bytes, GB/s, and the share of time that saving took."""

from typing import Any, NamedTuple

import numpy as np

from analysis.common.statistics import median_of
from analysis.common.table import Column, Table, by_key
from analysis.logs.naming import name_of
from analysis.logs.record import Record
from base.errors import UsageError
from parallel.record.reader import read_checkpoints

_AMOUNTS = ("blocked_s", "total_s", "bytes", "ranks")
_SHOWN = [
    *by_key(("run", "event")),
    *by_key(("n", "failed"), "d"),
    Column("ranks", "ranks", ".0f"),
    Column("blocked_s", "blocked s", ".4g"),
    Column("total_s", "total s", ".4g"),
    Column("gb", "GB", ".4g"),
    Column("gb_per_s", "GB/s", ".3g"),
    Column("gb_per_s_per_rank", "GB/s/rank", ".3g"),
    Column("share", "share of time", ".1%"),
]


def rows(record: Record) -> list[dict[str, Any]]:
    """Returns one dict for each kind of event in the run folder; [] for a log, and where the run
    neither saved nor loaded.

    `share` is the seconds that training waited for this kind, over all waiting and the logged
    steps. Events that failed are counted apart; only their waiting counts with the others'.
    """
    events = read_checkpoints(record.own.path) if record.own else []
    trained_s = float(np.nansum(record.steps["step_s"]))
    busy_s = trained_s + sum(event["blocked_s"] or 0.0 for event in events)
    by_kind = []
    for kind in dict.fromkeys(event["event"] for event in events):
        alike = [event for event in events if event["event"] == kind]
        done = [event for event in alike if not event["problem"]]
        row = {"run": name_of(record), "source": record.source, "event": kind, "n": len(done)}
        row |= {name: median_of([event[name] for event in done]) for name in _AMOUNTS}
        row["failed"] = len(alike) - len(done)
        failed = (event for event in alike if event["problem"])
        row["problems"] = [f"{kind} of step {e['step']}: {e['problem']}" for e in failed]
        row["ranks"] = row["ranks"] or record.gpus
        row["gb"] = row["bytes"] and row["bytes"] / 1e9
        timed = (event for event in done if event["bytes"] and event["total_s"])
        rate = row["gb_per_s"] = median_of([e["bytes"] / e["total_s"] / 1e9 for e in timed])
        row["gb_per_s_per_rank"] = rate / row["ranks"] if rate and row["ranks"] else None
        waits = [event["blocked_s"] for event in alike]
        if trained_s > 0 and None not in waits:
            row["share"] = sum(waits) / busy_s
        by_kind.append(row)
    return by_kind


class Costs(NamedTuple):
    """The table of saves and loads, the names of the runs that have none, and what was refused."""

    table: Table
    silent: list[str]
    refused: list[str]


def table(records: list[Record]) -> Costs:
    """Returns the costs of the runs' saves and loads as a table, and the runs that have none."""
    shown = Table(_SHOWN, [])
    shown.notes = ["medians over the events; share of time: waiting over waiting and steps"]
    costs = Costs(shown, [], [])
    for record in records:
        try:
            events = rows(record)
        except UsageError as error:  # the others are still reported
            costs.refused.append(str(error))
            continue
        shown.rows += events
        shown.notes += [f"{row['run']}: {problem}" for row in events for problem in row["problems"]]
        if not events:
            costs.silent.append(name_of(record))
    return costs
