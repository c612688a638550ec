"""Fit the constants of a cluster to its runs.

    python -m analysis.calibrate --runs PATH... --cluster NAME

The card and the network are those of the cluster NAME of a clusters file. At most 20 of the run
folders and logs are fitted, chosen by their layouts, and the others are predicted. Writes
analysis/planner/calibrations/NAME.toml, or --out FILE.
"""

import sys
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from analysis.common.table import Column, Table, add_table_flags, show
from analysis.logs.load import load
from analysis.logs.naming import name_of
from analysis.planner import calibration, fitting
from analysis.planner.calibration import Calibration
from analysis.planner.columns import Array, Columns
from analysis.planner.fitting import MAX_ROWS, priors_of
from analysis.planner.runs import Place, counted_row_of, threads_per_core
from analysis.planner.timemodel.machine import Machine
from analysis.runs.judged import judged
from base.errors import Parser, UsageError, command_line
from base.files import add_force_flag
from base.storage import check_output
from models.gpus import planning_gpu


@dataclass
class Runs:
    """Runs with a steady time. measured: seconds per step; crowd: threads that share a core;
    left_out: what has no time or lacks a fact, with the reason."""

    ids: list[str]
    steps: Columns
    measured: np.ndarray
    crowd: np.ndarray
    left_out: list[str]


def read_runs(paths: list[Path], place: Place) -> Runs:
    """Returns the runs of run folders and logs; place: as `row_of` takes it."""
    runs, (records, left_out) = [], load(paths)
    for run in judged(records):
        record, name = run.record, name_of(run.record)
        try:
            if not (run.is_fit and run.time.step_s > 0):
                raise ValueError(run.judgement.unfit or "no steady step time")
            crowding = max(1.0, threads_per_core(record) or 1.0)
            runs.append((name, counted_row_of(record, place), run.time.step_s, crowding))
        except ValueError as error:
            left_out.append(f"{name}: {error}")
    if not runs:
        raise UsageError("; ".join(["no run with a time and all its settings", *left_out]))
    ids, steps, seconds, crowd = zip(*runs, strict=True)
    return Runs(list(ids), Columns.stack(steps), np.array(seconds), np.array(crowd), left_out)


def _report(ids: list[str], measured: Array, predicted: Array, seen: Array) -> Table:
    """Returns a table with measured and predicted seconds, one row a run. `seen`, bool (n,), marks
    the fitted runs. The note sums up the errors of the fitted runs and of the others."""
    error = predicted / measured - 1
    inside, others = np.abs(error[seen]), np.abs(error[~seen])
    note = f"fitted runs: MAPE {np.mean(inside):.1%}, n = {len(inside)}"
    if len(others):
        note += f"; others: MAPE {np.mean(others):.1%}, n = {len(others)}"
        note += f", worst {np.max(others):.0%}"
    columns = [
        Column("id", "run"),
        Column("measured_s", "measured s", ".4g"),
        Column("predicted_s", "predicted s", ".4g"),
        Column("error", "error", "+.1%"),
        Column("fitted", "fitted"),
    ]
    cells = zip(ids, measured, predicted, error, np.where(seen, "fitted", ""), strict=True)
    rows = [dict(zip([column.key for column in columns], row, strict=True)) for row in cells]
    return Table(columns, rows, notes=[note])


def fitted(
    runs: Runs, cluster: Calibration, priors: dict[str, tuple[float, float]], count: int, out: Path
) -> Table:
    """Fits at most `count` runs of a cluster that nobody has calibrated, writes the calibration to
    `out` and returns the report."""
    machine = Machine.stack(
        [cluster.machine_for(runs.steps.take([i])) for i in range(len(runs.measured))]
    )
    chosen = fitting.choose(runs.steps, count, fitting.slopes(runs.steps, machine, priors))
    # Ranks that share a core take turns: each would take that much less time on a core of its own.
    seconds = runs.measured[chosen] / runs.crowd[chosen]
    fit = fitting.fit(runs.steps.take(chosen), machine.take(chosen), seconds, priors)
    predicted = fit.seconds(runs.steps, machine) * runs.crowd
    return written(runs, predicted, chosen, replace(cluster, fit=fit), out)


def written(runs: Runs, predicted: Array, chosen: Array, cluster: Calibration, out: Path) -> Table:
    """Writes the calibration of a cluster that was fitted on the runs `chosen`, int (m,); returns
    the report on all runs."""
    seen = np.isin(np.arange(len(runs.ids)), chosen)
    report = _report(runs.ids, runs.measured, predicted, seen)
    if cluster.fit.at_priors:
        report.notes[0] += "; constants: the priors, which explain these runs better than a fit"
    calibration.write(out, cluster, report.notes[0], [runs.ids[i] for i in chosen])
    report.notes += [f"left out {line}" for line in runs.left_out]
    return report


@command_line("analysis.calibrate")
def main(argv: list[str] | None = None) -> int:
    parser = Parser(prog="python -m analysis.calibrate", description=__doc__)
    add = parser.add_argument
    paths = {"nargs": "+", "type": Path, "metavar": "PATH", "required": True}
    add("--runs", **paths, help="run folders and logs of the cluster")
    add("--cluster", required=True, metavar="NAME", help="of clusters.toml")
    out = "the calibration (default: analysis/planner/calibrations/NAME.toml)"
    add("--out", type=Path, metavar="FILE", help=out)
    add_force_flag(parser)
    add_table_flags(parser)
    arguments = parser.parse_args(argv)
    out = arguments.out or calibration.FOLDER / f"{arguments.cluster}.toml"
    check_output(out, calibration.MARK, arguments.force, arguments.runs)
    cluster = calibration.of_cluster(arguments.cluster)
    priors = priors_of(planning_gpu(cluster.gpu).name)
    runs = read_runs(arguments.runs, cluster.columns)
    table = fitted(runs, cluster, priors, MAX_ROWS, out)
    show([table], arguments.format, arguments.columns)
    print(f"wrote {out}", file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main())
