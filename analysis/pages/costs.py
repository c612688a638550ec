"""The view of what a run spent beside its steps: wall clock by part, saves, restarts, energy."""

from pathlib import Path
from typing import Any

from analysis.common.tables import Column, Table
from analysis.common.terminal import who
from analysis.logs.load import name_of
from analysis.logs.readers import run_folder
from analysis.logs.record import Record
from analysis.measured import checkpoints
from analysis.pages import charts
from analysis.pages.section import Chart, Section, group
from parallel.record.reader import read_run

RUNS = 40  # that the chart shows at once
_PARTS = ("startup", "training", "evaluation", "checkpoint", "other")


def view(records: list[Record]) -> Section:
    """Tables of the wall clock and its energy, of saves and loads, and of runs that were started
    again; nothing where no run has one of them."""
    one = Section("Wall clock, saves, restarts and energy")
    clock = [_clock(r) for r in records if r.format == run_folder.FORMAT]
    clock = [row for row in clock if row]
    if clock:
        one.tables["clock"] = _clock_table(clock)
        _draw(one, clock, {name_of(r): r.engine or "unknown" for r in records})
    saves, _, damaged = checkpoints.table(records)
    one.words += damaged
    if saves.rows:
        one.tables["saves"] = Table(saves.columns, saves.rows, "Saves and loads", saves.notes)
    again = [row for record in records for row in _restarts(record)]
    if again:
        columns = [
            Column("run", "run"),
            Column("restarts", "restarts", "d"),
            Column("why", "why the attempts before ended"),
        ]
        one.tables["restarts"] = Table(columns, again, "Runs that were started again")
    elif clock or saves.rows:
        one.words.append("No run was started again.")
    return one


def _clock(record: Record) -> dict[str, Any]:
    """A complete run's seconds by part and its energy, as training_metrics.json has them."""
    summary = read_run(Path(record.source)).metrics.get("summary") or {}
    if summary.get("total_wall_time_sec") is None:
        return {}
    found = {"run": name_of(record), "wall_s": summary["total_wall_time_sec"]}
    found |= {f"{part}_s": summary.get(f"{part}_time_sec") for part in _PARTS}
    energy, tokens = summary.get("energy_joules"), (record.facts.get("work") or {}).get("tokens")
    return found | {
        "energy_j": energy,
        "j_per_token": energy / tokens if energy is not None and tokens else None,
        "energy_source": summary.get("energy_source"),
    }


def _clock_table(rows: list[dict[str, Any]]) -> Table:
    columns = [
        Column("run", "run"),
        Column("wall_s", "wall clock s", ".4g"),
        *(Column(f"{part}_s", f"{part} s", ".4g", seldom=True) for part in _PARTS),
        Column("energy_j", "energy J", ".4g"),
        Column("j_per_token", "J/token", ".3g", seldom=True),
        Column("energy_source", "counter of energy"),
    ]
    notes = []
    if without := [r["run"] for r in rows if r["training_s"] is None]:
        which = who(without, len(rows))
        notes.append(f"an older version wrote the wall clock alone, without its parts: {which}")
    silent: dict[str, list[str]] = {}
    for row in rows:
        if row["energy_j"] is None:
            silent.setdefault(row["energy_source"] or "not recorded", []).append(row["run"])
    for why, runs in silent.items():
        notes.append(f"energy -: {why}: {who(runs, len(rows))}")
    return Table(columns, rows, "Wall clock and energy of complete runs", notes)


def _draw(one: Section, rows: list[dict[str, Any]], engines: dict[str, str]) -> None:
    data = [
        {"run": row["run"], "part": part, "order": i, "seconds": row[f"{part}_s"]}
        for row in rows
        for i, part in enumerate(_PARTS)
        if row[f"{part}_s"]
    ]
    if not data:
        return
    least = min(rows, key=lambda r: (r["training_s"] or 0) / r["wall_s"])
    one.data["clock_parts"] = [group(data)]
    said = (
        f"Seconds of the wall clock by part. Training's share is smallest in {least['run']}:"
        f" {(least['training_s'] or 0) / least['wall_s']:.0%}. At most {RUNS} runs are shown."
    )
    used = [part for part in _PARTS if any(row["part"] == part for row in data)]
    spec = charts.parts("run", "seconds", "seconds of the wall clock", "part", used)
    one.charts.append(Chart(spec, "clock_parts", said, RUNS))


def _restarts(record: Record) -> list[dict[str, Any]]:
    attempts = record.facts.get("attempts") or []
    n = max(record.restarts, len(attempts))
    if not n:
        return []
    why = "; ".join(
        f"{a.get('reason') or 'no reason recorded'} ({a.get('steps') or 0} steps)" for a in attempts
    )
    return [{"run": name_of(record), "restarts": n, "why": why or "the log does not say"}]
