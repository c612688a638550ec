"""One line on a run: what bounds it, why, and which other run is predicted to be faster."""

from dataclasses import replace
from typing import Any

from analysis.logs.naming import name_of
from analysis.logs.parsing.run_json import stated
from analysis.logs.record import Record
from analysis.planner.calibration import Calibration
from analysis.planner.runs import cluster_of, priced
from analysis.runs import rank_times
from analysis.runs.moves import moves
from parallel.config.run_spec import RunSpec
from parallel.measure.efficiencies import verdict
from parallel.measure.training_metrics import without_breakdown


def line_of(record: Record, cluster: str | None) -> str:
    """Returns what bounds a run of ours, by its own record, and what to try next, as predicted for
    the cluster, or for the data sheet of the run's card. "" where the run measured nothing of it,
    as a log of another program."""
    if record.own is None or not record.own.metrics:
        return ""
    if record.profiler:
        return f"{name_of(record)} was profiled: analysis.profile shows where its time went."
    breakdown, problems = rank_times.of_record(record)
    bound, reason = None, "; ".join(line for line in problems if rank_times.WITHOUT not in line)
    if breakdown and breakdown.complete:
        reason = breakdown.unseen
        bound = verdict(breakdown.spec.layout, breakdown.ranks)
    if bound is None or reason:
        return f"{name_of(record)}: {reason or without_breakdown(record.own.metrics)}."
    return f"{name_of(record)}: {bound}. {_next(record, breakdown.spec, bound.part, cluster)}"


def _next(record: Record, spec: RunSpec, part: str, cluster: str | None) -> str:
    """Returns the flags that act on the part, and the fastest run that they are predicted to make:
    its time with the planner's interval, beside what is predicted for this run."""
    found = [move for move in moves(spec, part) if move.spec.global_batch == spec.global_batch]
    if not found:
        return f"No flag of a run acts on {part} with this batch."
    flags = " or ".join(move.flags for move in found)
    place = cluster_of(record, cluster)
    if place.value is None:
        return f"Next: try {flags} (--predict CLUSTER says how fast that would be)."
    present = priced(record, place.value)
    if present.value is None:
        return f"Next: try {flags} (not predicted: {present.reason})."
    rows = [(move.flags, _row(record, move.spec, place.value)) for move in found]
    rows = [(name, row) for name, row in rows if row and row["fits"]]
    if not rows:
        return f"Next: try {flags} (none is predicted to fit)."
    name, best = min(rows, key=lambda pair: pair[1]["step_s"])
    if best["step_s"] >= present.value["step_s"]:
        return f"None of {flags} is predicted to be faster."
    return (
        f"Next: {name}, predicted {best['step_s']:.4g} s/iter ({best['low_s']:.4g} to"
        f" {best['high_s']:.4g} hold 80 %) where this run is predicted"
        f" {present.value['step_s']:.4g}, by {place.value.name}."
    )


def _row(record: Record, spec: RunSpec, cluster: Calibration) -> dict[str, Any] | None:
    """Returns the row in a plan of a run with these settings and all else of the record."""
    facts = record.facts | spec.as_facts()
    settings = {name: value for name, value in stated(facts).items() if value is not None}
    return priced(replace(record, facts=facts, **settings), cluster).value
