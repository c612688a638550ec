"""A cluster's constants, fitted to its runs."""

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np

from analysis.common.table import Column, Table
from analysis.planner import calibration, fitting
from analysis.planner.calibration import Calibration
from analysis.planner.runs import Runs
from analysis.planner.timemodel import Machine
from base.errors import UsageError
from models.gpus import planning_gpu
from parallel.config.axes import AXES
from parallel.config.layout_arrays import Array, Columns
from parallel.record.facts import cores, cpu_name

# A host CPU is no GPU: its peaks are measured, so efficiencies start at 1, and Python launches.
HERE_PRIORS = fitting.PRIORS | {
    "gemm": (0.7, 0.4),
    "sat": (8.0, 1.0),
    "attn": (0.4, 0.7),
    "mem": (0.5, 0.7),
    "launch": (1e-3, 1.0),
    "gap": (5e-4, 1.5),
    # Its all-reduces are measured in the size of a model's gradients, and hide behind nothing.
    "link": (0.9, 0.2),
    "exposed": (1.0, 0.2),
    "latency": (1e-3, 1.0),
    "step": (0.01, 1.0),
    "micro": (3e-3, 1.0),
    "engine": (2.2, 0.3),  # megatron-core layers beside plain ones
}
SPLIT = (*AXES, "micro_batch")
HERE_CORES = max(2, cores())  # each counts as a GPU; an all-reduce needs two


def measure_here(processes: int = HERE_CORES, timeout_s: float = 120.0) -> dict[str, float]:
    """FLOP/s, memory and all-reduce rates of this machine.

    Raises:
        UsageError: the micro-benchmark failed; with its last line.
    """
    command = [sys.executable, "-m", "parallel.microbench", "--processes", str(processes)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=timeout_s)
    if done.returncode:
        last = (done.stderr.strip().splitlines() or ["no output"])[-1]
        raise UsageError(f"parallel.microbench failed: {last}")
    return json.loads(done.stdout)


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


def here() -> Calibration:
    """This machine, measured; its fit is the priors.

    Raises:
        UsageError: the micro-benchmark failed.
    """
    measured = measure_here()
    rates = (measured[name] for name in ("flops", "memory_rate", "link", "link"))
    return Calibration(
        "this machine",
        "this machine",
        HERE_CORES,
        measured["memory_gb"],
        fitting.prior_fit(HERE_PRIORS),
        memory={"library_gb": 0.6, "fragments": 1.05},
        machine_override=Machine(*rates, cores=HERE_CORES),
        processor=cpu_name(),
    )


def fitted(runs: Runs, cluster: Calibration, count: int, out: Path) -> Table:
    """Fit at most `count` runs of a cluster that nobody has calibrated, write the calibration
    `out`, and report."""
    host = cluster.is_host
    priors = HERE_PRIORS if host else fitting.priors_of(planning_gpu(cluster.gpu).name)
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
