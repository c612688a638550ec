"""A cluster's constants, fitted to its runs."""

from dataclasses import replace
from pathlib import Path

import numpy as np

from analysis.common.table import Column, Table
from analysis.planner import calibration, fitting
from analysis.planner.calibration import Calibration
from analysis.planner.runs import Runs
from analysis.planner.timemodel import Machine
from parallel.config.axes import AXES
from parallel.config.layout_arrays import Array, Columns

SPLIT = (*AXES, "micro_batch")


def _report(ids: list[str], x: Columns, measured: Array, predicted: Array, seen: Array) -> Table:
    """One row a run, seconds measured beside predicted; `seen`: whether it was fitted, bool (n,).
    The note sums up the errors of the fitted runs and of the others."""
    error = predicted / measured - 1
    inside, others = np.abs(error[seen]), np.abs(error[~seen])
    note = f"fitted runs: MAPE {np.mean(inside):.1%}, n = {len(inside)}"
    if len(others):
        note += f"; others: MAPE {np.mean(others):.1%}, n = {len(others)}"
        note += f", worst {np.max(others):.0%}"
    values = {name: getattr(x, name) for name in SPLIT}
    values |= {"measured_s": measured, "predicted_s": predicted, "error": error}
    values |= {"fitted": np.where(seen, "fitted", "")}
    rows = [
        {"id": run} | {name: column[i].item() for name, column in values.items()}
        for i, run in enumerate(ids)
    ]
    columns = [
        Column("id", "run"),
        *(Column(name, name, "d") for name in SPLIT),
        Column("measured_s", "measured s", ".4g"),
        Column("predicted_s", "predicted s", ".4g"),
        Column("error", "error", "+.1%"),
        Column("fitted", "fitted"),
    ]
    return Table(columns, rows, notes=[note])


def fitted(
    runs: Runs, cluster: Calibration, priors: dict[str, tuple[float, float]], count: int, out: Path
) -> Table:
    """Fit at most `count` runs of a cluster that nobody has calibrated, write the calibration
    `out`, and report."""
    machine = Machine.stack(
        [cluster.machine_for(runs.x.take([i])) for i in range(len(runs.measured))]
    )
    chosen = fitting.choose(runs.x, count, fitting.slopes(runs.x, machine, priors))
    # Ranks that share a core take turns: each would take that much less time on a core of its own.
    seconds = runs.measured[chosen] / runs.crowd[chosen]
    fit = fitting.fit(runs.x.take(chosen), machine.take(chosen), seconds, priors)
    predicted = fit.seconds(runs.x, machine) * runs.crowd
    return written(runs, predicted, chosen, replace(cluster, fit=fit), out)


def written(runs: Runs, predicted: Array, chosen: Array, cluster: Calibration, out: Path) -> Table:
    """The report of a cluster's fit on the runs `chosen`, after the calibration was written."""
    seen = np.isin(np.arange(len(runs.ids)), chosen)
    report = _report(runs.ids, runs.x, runs.measured, predicted, seen)
    if cluster.fit.at_priors:
        report.notes[0] += "; constants: the priors, which explain these runs better than a fit"
    calibration.write(out, cluster, report.notes[0], [runs.ids[i] for i in chosen])
    report.notes += [f"left out {line}" for line in runs.left_out]
    return report
