"""The view of every step: its time, its loss and gradient norm, and those beside the baseline's."""

import math
from collections.abc import Iterator
from typing import Any

import numpy as np

from analysis.common import colours
from analysis.logs.naming import name_of
from analysis.logs.record import Record
from analysis.logs.step_time import steady_entries, step_times
from analysis.pages import charts
from analysis.pages.section import Chart, Section, Study
from analysis.runs import loss_parity
from analysis.runs.loss_parity import StepDifference

POINTS = 3000  # of all runs together
_CURVES = (
    ("step_s", "seconds per step, after the warm-up", None),
    ("loss", "loss (nats per token)", None),
    ("loss_diff", "|loss - baseline's|", loss_parity.LOSS_BAR),
    ("grad_norm", "gradient norm", None),
    ("grad_norm_diff", "gradient norm, relative difference", loss_parity.GRAD_NORM_BAR),
)


def every_step(study: Study) -> list[Section]:
    """Draws step time, loss and gradient norm of the first runs against the iteration."""
    logged = [record for record in study.records if len(record.steps)]
    chosen = logged[: charts.MOST]
    if not chosen:
        return []
    per_run = max(6, POINTS // len(chosen))
    gaps = differences(study.records, study.base)
    rows = [
        row for record in chosen for row in _steps(record, per_run, gaps.get(record.source, {}))
    ]
    section = Section("Every step")
    for key, title, bar in _CURVES:
        if stated := [row for row in rows if row.get(key) is not None]:
            spec = charts.lines(stated, key, title, bar, study.palette)
            section.charts.append(Chart(spec, _caption(stated, key, bar)))
    if len(logged) > len(chosen):
        section.words.append(f"The first {len(chosen)} of {len(logged)} runs are shown.")
    if thinned := sum(len(record.steps) > per_run for record in chosen):
        words = f"Of {thinned} long runs {per_run} steps each are shown, evenly spaced."
        section.words.append(words)
    return [section] if section.charts else []


def _caption(rows: list[dict[str, Any]], key: str, bar: float | None) -> str:
    """Says the largest value beside the bar, or without one the range of the last values."""
    if bar is not None:
        worst = max(rows, key=lambda row: row[key])
        return f"Largest: {worst[key]:.1e}, of {worst['run']}. Dashed: the bar of parity, {bar:g}."
    last = {row["run"]: row[key] for row in rows}
    low, high = min(last, key=last.get), max(last, key=last.get)
    return f"At the last step: {last[low]:.4g} ({low}) to {last[high]:.4g} ({high})."


def _steps(record: Record, most: int, apart: dict[int, StepDifference]) -> Iterator[dict[str, Any]]:
    """Yields at most `most` of a run's entries, evenly spaced. `apart` has the differences from the
    baseline by iteration."""
    n = len(record.steps)
    steady, seconds = steady_entries(record), step_times(record)
    for i in np.unique(np.linspace(0, n - 1, min(n, most)).astype(int)):
        step = record.steps[i]
        row = {"run": name_of(record), "engine": colours.label(record.engine)}
        row |= {key: float(step[key]) for key in ("iteration", "loss", "grad_norm")}
        if len(steady) and i >= steady[0] and len(seconds):
            row["step_s"] = float(seconds[i])
        if pair := apart.get(int(step["iteration"])):
            row |= {"loss_diff": pair.loss, "grad_norm_diff": pair.grad_norm}
        yield {k: v for k, v in row.items() if isinstance(v, str) or math.isfinite(v)}


def differences(
    records: list[Record], baseline: Record | None
) -> dict[str, dict[int, StepDifference]]:
    """Returns the differences from the baseline by source and step, of runs that can be
    compared."""
    verdicts, steps = loss_parity.verify(records, baseline), {}
    for record in records:
        parity = verdicts.get(record.source)
        if parity and parity.max_loss_diff is not None and parity.baseline is not record.own:
            pairs = loss_parity.of_steps(record.own, parity.baseline)
            steps[record.source] = {pair.step: pair for pair in pairs}
    return steps
