"""The views of every step: step times as a strip, losses and gradient norms beside the baseline."""

from pathlib import Path
from typing import Any

import numpy as np

from analysis.logs.load import name_of
from analysis.logs.record import Record
from analysis.logs.verdict import step_times, timed
from analysis.measured import parity
from analysis.pages import charts
from analysis.pages.section import Chart, Group, Section, group
from parallel.record.reader import Run, read_run

POINTS = 3000  # of all runs together: 500 runs stay within the page's size
RUNS = 40  # that a chart of steps shows at once
_DIGITS = {"step_s": 5, "loss": 6, "grad_norm": 5, "loss_diff": 3, "grad_norm_diff": 3}


def views(records: list[Record], baseline: Record | None) -> list[Section]:
    """The strip of step times and the curves of loss and gradient norm."""
    logged = [record for record in records if len(record.iteration)]
    if not logged:
        return []
    each = max(6, POINTS // len(logged))
    apart = differences(records, baseline)
    groups = [_steps(r, each, apart.get(r.source, {})) for r in logged]
    thinned = sum(len(r.iteration) > each for r in logged)
    note = f" Of {thinned} long runs, {each} steps each are shown, evenly spaced." * bool(thinned)
    engines = list(dict.fromkeys(r.engine or "unknown" for r in logged))
    return [_strip(groups, note), _curves(groups, engines, note)]


def _strip(groups: list[Group], note: str) -> Section:
    one = Section("Step times", data={"steps": groups})
    if any("steady_s" in g["same"] for g in groups):
        said = (
            "Each cell is a step, coloured by its time over the run's steady time. Faint: warm-up,"
            " which is not counted. At most the first"
            f" {RUNS} runs that the filter leaves are shown.{note}"
        )
        one.charts.append(Chart(charts.strip(), "steps", said, RUNS))
    return one


def _curves(groups: list[Group], engines: list[str], note: str) -> Section:
    one = Section("Loss and gradient norm")
    for key, title, bar in (
        ("loss", "loss (nats per token)", None),
        ("loss_diff", "|loss - baseline's|", parity.LOSS_BAR),
        ("grad_norm", "gradient norm", None),
        ("grad_norm_diff", "gradient norm, relative difference", parity.GRAD_NORM_BAR),
    ):
        values = {
            g["same"]["run"]: [
                v for v in g["columns"].get(key, [g["same"].get(key)]) if v is not None
            ]
            for g in groups
        }
        if not any(values.values()):
            continue
        known = {run: v for run, v in values.items() if v}
        most = max(known, key=lambda run: max(known[run]) if bar else known[run][-1])
        if bar:
            said = f"Largest: {max(known[most]):.1e}, of {most}. The dashed line is the bar of"
            said += f" parity, {bar:g}. Steps without any difference have no point."
        else:
            least = min(known, key=lambda run: known[run][-1])
            said = f"Last {title} of {len(known)} runs: {known[least][-1]:.4g} ({least}) to"
            said += f" {known[most][-1]:.4g} ({most}).{note}"
        said += f" At most {RUNS} runs are shown."
        one.charts.append(Chart(charts.lines(key, title, engines, bar), "steps", said, RUNS))
    return one


def _steps(record: Record, most: int, apart: dict[int, tuple[float, float]]) -> Group:
    """At most `most` of a run's entries, evenly spaced, as columns; `apart` by iteration."""
    n = len(record.iteration)
    chosen = np.unique(np.linspace(0, n - 1, min(n, most)).astype(int))
    time, seconds = timed(record), step_times(record)
    rows = []
    for i in chosen:
        iteration = record.iteration[i]
        row: dict[str, Any] = {"iteration": iteration}
        for key in ("loss", "grad_norm"):
            values = getattr(record, key)
            row[key] = values[i] if len(values) else None
        if time is not None and time.step_s > 0 and len(seconds):
            row["step_s"] = seconds[i]
        if apart:
            row["loss_diff"], row["grad_norm_diff"] = apart.get(int(iteration), (None, None))
        rows.append({key: _short(key, value) for key, value in row.items()})
    rows = [row for row in rows if row["iteration"] is not None]
    same = {"run": name_of(record), "engine": record.engine or "unknown"}
    if time is not None and time.step_s > 0 and len(seconds):
        same |= {"steady_s": _short("step_s", time.step_s)}
        same |= {"steady_from": _short("iteration", record.iteration[time.first])}
    return group(rows, **same)


def _short(key: str, value: Any) -> Any:
    """A value with the digits that a chart can show; None where it is not finite."""
    if value is None or isinstance(value, str):
        return value
    if not np.isfinite(value):
        return None
    value = float(f"{value:.{_DIGITS.get(key, 12)}g}")
    return int(value) if value == int(value) else value


def differences(
    records: list[Record], baseline: Record | None
) -> dict[str, dict[int, tuple[float, float]]]:
    """source -> step -> (loss, relative grad norm) difference, of the runs that can be compared."""
    runs = {r.source: read_run(Path(r.source)) for r in records if r.format == "run folder"}
    verdicts = parity.verify(runs.values(), baseline and Path(baseline.source))
    found = {}
    for source, run in runs.items():
        base = runs.get(baseline.source) if baseline else _own_baseline(run, runs)
        if base is not None and base is not run and verdicts[run.path].max_loss_diff is not None:
            found[source] = {step: (a, b) for step, a, b in parity.of_steps(run, base)}
    return found


def _own_baseline(run: Run, runs: dict[str, Run]) -> Run | None:
    """The run beside it, of its study, that its run.json names."""
    for other in runs.values():
        beside = other.path.parent == run.path.parent
        same = other.facts.get("study") == run.facts.get("study")
        if beside and same and other.name == run.facts.get("baseline"):
            return other
    return None
