"""The views of every step: step times as a strip, losses and gradient norms beside the baseline."""

from pathlib import Path
from typing import Any

import numpy as np

from analysis.logs.load import name_of
from analysis.logs.record import Record
from analysis.logs.verdict import step_times, timed
from analysis.measured import loss_parity
from analysis.pages import altair_charts
from analysis.pages.section import Chart, Section
from parallel.record.reader import read_run

POINTS = 3000  # of all runs together
_CURVES = (
    ("loss", "loss (nats per token)", None),
    ("loss_diff", "|loss - baseline's|", loss_parity.LOSS_BAR),
    ("grad_norm", "gradient norm", None),
    ("grad_norm_diff", "gradient norm, relative difference", loss_parity.GRAD_NORM_BAR),
)


def views(records: list[Record], baseline: Record | None) -> list[Section]:
    """The strip of step times and the curves of loss and gradient norm, of the first runs."""
    logged = [record for record in records if len(record.steps)]
    shown = logged[: altair_charts.MOST]
    if not shown:
        return []
    each = max(6, POINTS // len(shown))
    apart = differences(records, baseline)
    rows = [row for record in shown for row in _steps(record, each, apart.get(record.source, {}))]
    notes = []
    if len(logged) > len(shown):
        notes.append(f"The first {len(shown)} of {len(logged)} runs are shown.")
    if thinned := sum(len(record.steps) > each for record in shown):
        notes.append(f"Of {thinned} long runs {each} steps each are shown, evenly spaced.")
    times = Section("Step times", list(notes))
    timed_rows = [row for row in rows if row.get("ratio") is not None]
    if timed_rows:
        caption = "A cell is a step, coloured by its time over the run's steady time. Faint:"
        caption += " warm-up, which is not counted."
        times.charts.append(Chart(altair_charts.strip(timed_rows), caption))
    curves = Section("Loss and gradient norm", list(notes))
    for key, title, bar in _CURVES:
        known = [row for row in rows if row.get(key) is not None]
        if known:
            curves.charts.append(
                Chart(altair_charts.lines(known, key, title, bar), _caption(known, key, bar))
            )
    return [section for section in (times, curves) if section.charts]


def _caption(rows: list[dict[str, Any]], key: str, bar: float | None) -> str:
    if bar is not None:
        worst = max(rows, key=lambda row: row[key])
        return f"Largest: {worst[key]:.1e}, of {worst['run']}. Dashed: the bar of parity, {bar:g}."
    last = {row["run"]: row[key] for row in rows}
    low, high = min(last, key=last.get), max(last, key=last.get)
    return f"At the last step: {last[low]:.4g} ({low}) to {last[high]:.4g} ({high})."


def _steps(
    record: Record, most: int, apart: dict[int, tuple[float, float]]
) -> list[dict[str, Any]]:
    """At most `most` of a run's entries, evenly spaced; `apart`: differences by iteration."""
    n = len(record.steps)
    chosen = np.unique(np.linspace(0, n - 1, min(n, most)).astype(int))
    time, seconds = timed(record), step_times(record)
    is_timed = time is not None and time.step_s > 0 and len(seconds) > 0
    rows: list[dict[str, Any]] = []
    for i in chosen:
        row: dict[str, Any] = {"run": name_of(record), "engine": record.engine or "unknown"}
        step = record.steps[i]
        row["iteration"] = float(step["iteration"])
        for key in ("loss", "grad_norm"):
            if np.isfinite(step[key]):
                row[key] = float(step[key])
        if is_timed and np.isfinite(seconds[i]):
            row |= {"step_s": float(seconds[i]), "ratio": float(seconds[i] / time.step_s)}
            row["warm_up"] = bool(i < time.first)
        if pair := apart.get(int(step["iteration"])):
            row["loss_diff"], row["grad_norm_diff"] = pair
        rows.append(row)
    for row, after in zip(rows, [*rows[1:], None], strict=True):
        row["next"] = after["iteration"] if after else row["iteration"] + 1
    return rows


def differences(
    records: list[Record], baseline: Record | None
) -> dict[str, dict[int, tuple[float, float]]]:
    """source -> step -> (loss, relative grad norm) difference, of the runs that can be compared."""
    runs = {r.source: read_run(Path(r.source)) for r in records if r.format == "run folder"}
    verdicts = loss_parity.verify(runs.values(), baseline and Path(baseline.source))
    by_path, steps = {run.path: run for run in runs.values()}, {}
    for source, run in runs.items():
        parity = verdicts[run.path]
        if parity.max_loss_diff is not None and parity.baseline not in (None, run.path):
            pairs = loss_parity.of_steps(run, by_path[parity.baseline])
            steps[source] = {step: (loss, norm) for step, loss, norm in pairs}
    return steps
