"""A cluster's constants, fitted to its runs."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np

from analysis.common.table import Column, Table
from analysis.planner import calibration, fitting
from analysis.planner.calibration import Calibration, host_columns
from analysis.planner.runs import Runs, read_runs
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
    rows = [
        {
            "id": ids[i],
            **{name: int(getattr(x, name)[i]) for name in SPLIT},
            "measured_s": float(measured[i]),
            "predicted_s": float(predicted[i]),
            "error": float(error[i]),
            "fitted": "fitted" if seen[i] else "",
        }
        for i in range(len(ids))
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


def from_runs(paths: list[Path], cluster: Calibration, count: int, out: Path) -> Table:
    """Fit at most `count` runs of a cluster that nobody has calibrated, write the calibration
    `out`, and report.

    paths: run folders, logs, or tables (CSV) as `read_runs` takes them.

    Raises:
        UsageError: no run has a time and all its settings.
    """
    runs = read_runs(paths, cluster.columns)
    machines = [cluster.machine_for(runs.x.take([i])) for i in range(len(runs.ids))]
    machine = Machine.stack(machines)
    priors = fitting.priors_of(planning_gpu(cluster.gpu).name)
    chosen = fitting.choose(runs.x, count, fitting.slopes(runs.x, machine, priors))
    fit = fitting.fit(runs.x.take(chosen), machine.take(chosen), runs.measured[chosen], priors)
    facts = {
        "gpu": cluster.gpu,
        "gpus_per_node": cluster.gpus_per_node,
        "gpu_memory_gb": cluster.gpu_memory_gb,
        "network": cluster.network,
        "flash": cluster.flash,
    }
    predicted = fit.seconds(runs.x, machine)
    return written(runs, predicted, chosen, fit, facts, cluster.memory, out)


def from_host(paths: list[Path], count: int, out: Path) -> Table:
    """Measure this machine, fit `count` of its runs, write the calibration `out`, and report.

    Raises:
        UsageError: too few runs, or the micro-benchmark failed.
    """
    runs = read_runs(paths, host_columns)
    if len(runs.ids) <= count:
        raise UsageError(f"{len(runs.ids)} runs with a time: {count} to fit and no other")
    measured = measure_here()
    rates = (measured[name] for name in ("flops", "memory_rate", "link", "link"))
    machine = Machine(*rates, False, HERE_CORES)
    chosen = fitting.choose(runs.x, count, fitting.slopes(runs.x, machine, HERE_PRIORS))
    # Ranks that share a core take turns: each would take that much less time on a core of its own.
    seconds = runs.measured[chosen] / runs.crowd[chosen]
    fit = fitting.fit(runs.x.take(chosen), machine, seconds, HERE_PRIORS)
    predicted = fit.seconds(runs.x, machine) * runs.crowd
    facts = {
        "gpu": "this machine",
        "processor": cpu_name(),
        "gpus_per_node": HERE_CORES,
        "gpu_memory_gb": measured["memory_gb"],
    }
    constants = {"library_gb": 0.6, "fragments": 1.05}
    return written(runs, predicted, chosen, fit, facts, constants, out, machine)


def written(
    runs: Runs,
    predicted: Array,
    chosen: Array,
    fit: fitting.Fit,
    facts: dict[str, Any],
    constants: dict[str, float],
    out: Path,
    machine: Machine | None = None,
) -> Table:
    """The report of a fit on the runs `chosen`, after its calibration was written."""
    seen = np.isin(np.arange(len(runs.ids)), chosen)
    report = _report(runs.ids, runs.x, runs.measured, predicted, seen)
    if fit.at_priors:
        report.notes[0] += "; constants: the priors, which explain these runs better than a fit"
    names = [runs.ids[i] for i in chosen]
    calibration.write(out, facts, fit, constants, report.notes[0], names, machine)
    report.notes += [f"left out {line}" for line in runs.left_out]
    return report
