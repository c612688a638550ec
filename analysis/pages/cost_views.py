"""Where time and memory went: each rank's parts of a step, efficiency lost, memory, wall clock."""

from typing import Any

from analysis.common.table import Column, Table
from analysis.logs.naming import name_of
from analysis.pages import charts
from analysis.pages.section import Chart, Section, Study
from analysis.planner.columns import columns_of
from analysis.planner.memory.peak import ALLOCATED, fullest
from analysis.runs import checkpoint_costs, gpu_hours, rank_times
from base.errors import UsageError
from base.units import GIB
from models.headroom import CONSTANTS
from parallel.record.schema import CATEGORIES, EXPERT_MESSAGE_AXES

_CLOCK = ("startup", "training", "evaluation", "checkpoint", "other")


def breakdown(study: Study) -> list[Section]:
    """Shows the tables of `analysis.breakdown`, and each rank's parts of a step as a bar."""
    runs, problems = rank_times.breakdowns_of(study.own)
    if not runs:
        return []
    bars = []
    for run in runs:
        for rank, row in sorted(run.ranks.items()):
            for name in (*CATEGORIES, *EXPERT_MESSAGE_AXES):
                if seconds := row[f"{name}_s"]:
                    bar = f"{run.name}; rank {rank}"
                    bars.append({"bar": bar, "part": name, "seconds": seconds})
    spec = charts.parts(bars, "seconds", "seconds per step")
    section = Section("Breakdown per rank", [p for p in problems if rank_times.WITHOUT not in p])
    section.tables = {"times": rank_times.times(runs), "messages": rank_times.messages(runs)}
    section.charts = [Chart(spec, f"One bar a rank; the first {charts.MOST} are shown.")]
    try:
        table = rank_times.losses(runs, study.baseline, study.kind)
    except UsageError as error:  # the baseline has no breakdown: the other views are still there
        return [section, Section("Efficiency lost", [str(error)])]
    return [section, Section("Efficiency lost", tables={"lost": table})]


def memory_view(study: Study) -> list[Section]:
    """Shows predicted GiB of the fullest stage by part, and the measured peak as a mark."""
    section = Section("Memory")
    rows, bars, marks = [], [], []
    for record in study.own:
        if record.peak_bytes is None:
            continue
        on_host = not (record.facts.get("host") or {}).get("gpu")
        try:
            spec = rank_times.spec_of(record.own)
        except UsageError:
            continue
        if spec.model.parts:  # no formula has their memory
            continue
        steps = columns_of(spec, flash=True, dropout=False)  # no model of ours has dropout
        sizes = fullest(steps.rows[0], ALLOCATED if on_host else CONSTANTS)
        parts = {part.replace("_", " "): size / GIB for part, size in sizes.items()}
        name, peak = name_of(record), record.peak_bytes / GIB
        rows.append({"run": name, "peak_gib": peak, "predicted_gib": sum(parts.values())} | parts)
        bars += [{"bar": name, "part": part, "gib": gib} for part, gib in parts.items() if gib]
        marks.append({"bar": name, "mark": peak})
    if not rows:
        return []
    columns = [Column("run", "run"), Column("peak_gib", "measured peak GiB", ".3g")]
    columns.append(Column("predicted_gib", "predicted GiB", ".3g"))
    notes = [
        "predicted: the fullest stage by analysis/planner/memory; on a CPU its tensors alone,"
        " while the measured resident memory holds Python and its libraries, too"
    ]
    section.tables["memory"] = Table(columns, rows, notes=notes)
    spec = charts.parts(bars, "gib", "GiB", marks[: charts.MOST])
    section.charts.append(Chart(spec, "Predicted GiB by part; the mark is the measured peak."))
    return [section]


def clock(study: Study) -> list[Section]:
    """Shows wall clock by part, energy, saves and loads, and runs that were started again."""
    section = Section("Wall clock, saves, restarts and energy")
    rows, again = [], []
    for record in study.own:
        summary = record.own.metrics.get("summary") or {}
        if wall_s := summary.get("total_wall_time_sec"):
            row: dict[str, Any] = {"run": name_of(record), "wall_s": wall_s}
            row |= {f"{part}_s": summary.get(f"{part}_time_sec") for part in _CLOCK}
            rows.append(row | {"energy_j": summary.get("energy_joules")})
        if attempts := record.facts.get("attempts"):
            reasons = [str(attempt.get("reason") or "no reason") for attempt in attempts]
            times = f"{name_of(record)} was started again {len(attempts)} times"
            again.append(f"{times}: {'; '.join(reasons)}")
    section.words = again
    if rows:
        columns = [Column("run", "run"), Column("wall_s", "wall clock s", ".4g")]
        columns += [Column(f"{part}_s", f"{part} s", ".4g", seldom=True) for part in _CLOCK]
        columns.append(Column("energy_j", "energy J", ".4g", seldom=True))
        section.tables["clock"] = Table(columns, rows, "Wall clock of complete runs")
    saves, _, damaged = checkpoint_costs.table(study.own)
    section.words += damaged
    if saves.rows:
        section.tables["saves"] = saves
    hours = gpu_hours.table(study.own, ask=False).content[0]
    if hours.rows:
        hours.title = "GPU-hours (analysis.goodput asks Slurm's accounting, too)"
        section.tables["goodput"] = hours
        bars = [
            {"bar": row["run"], "part": part, "hours": row[part]}
            for row in hours.rows[:-1]
            for part in gpu_hours.PARTS
            if row[part]
        ]
        section.charts.append(Chart(charts.parts(bars, "hours", "GPU-hours"), "GPU-hours."))
    return [section]
