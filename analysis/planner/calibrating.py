"""A cluster's constants, fitted to a published table or to this machine's own runs."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np

from analysis.common.table import Column, Table
from analysis.planner import calibration, fitting
from analysis.planner.collectives import measured_on
from analysis.planner.rows import Rows, healthy, read_rows, split_of
from analysis.planner.runs import host_runs
from analysis.planner.timemodel import Machine
from analysis.planner.validate import error_columns, fit_some
from base.errors import UsageError
from models.gpus import check_network, network_rate, planning_gpu
from parallel.config.layout_arrays import Columns
from parallel.record.facts import cores

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


def _report(
    ids: list[str], x: Columns, measured: np.ndarray, predicted: np.ndarray, seen: np.ndarray
) -> Table:
    """One row a run, seconds measured beside predicted; `seen`: whether it was fitted, bool (n,).
    The note sums up the errors of the fitted runs and of the others."""
    error = predicted / measured - 1
    inside, others = (np.abs(error[mask & np.isfinite(error)]) for mask in (seen, ~seen))
    said = f"fitted runs: MAPE {np.mean(inside):.1%}, n = {len(inside)}"
    if len(others):
        said += f"; others: MAPE {np.mean(others):.1%}, n = {len(others)}"
        said += f", worst {np.max(others):.0%}"
    rows = [
        {
            "id": ids[i],
            **split_of(x, i),
            "measured_s": float(measured[i]),
            "predicted_s": float(predicted[i]),
            "error": float(error[i]),
            "fitted": "fitted" if seen[i] else "",
        }
        for i in range(len(ids))
    ]
    columns = [Column("id", "run"), *error_columns("s"), Column("fitted", "fitted")]
    return Table(columns, rows, notes=[said])


def from_published(paths: list[Path], count: int, network: str, out: Path) -> Table:
    """Fit at most `count` rows of published tables, write the calibration `out`, and report.

    network: words for a node's network; "" takes the table's own.

    Raises:
        UsageError: no row can be fitted, the rows are of several cards, or `network` has no rate.
    """
    rows = read_rows(paths)
    good = healthy(rows) & rows.fit & rows.steady & ~rows.guessed & np.isfinite(rows.measured)
    index = np.flatnonzero(good)
    if not len(index):
        raise UsageError("no row to fit")
    if len(cards := sorted({planning_gpu(rows.gpu[i]).name for i in index})) > 1:
        raise UsageError(f"rows of {' and '.join(cards)}: a calibration is of one card")
    fit, chosen = fit_some(rows, index, count)
    facts = _facts(rows, chosen, cards[0], network)
    x = rows.x.take(index)
    predicted = fit.seconds(x, rows.machine.take(index))
    ids, seen = [rows.ids[i] for i in index], np.isin(index, chosen)
    report = _report(ids, x, rows.measured[index], predicted, seen)
    said = report.notes[0] + _kept(fit)
    if (table := measured_on(rows.cluster_key[chosen[0]])) is not None:
        alone = rows.machine.take(chosen[:1])
        error = table.seconds(alone, fit.constants) / table.measured - 1
        said += f"; all-reduces: MAPE {np.mean(np.abs(error)):.0%}, n = {len(error)}"
    names = [rows.ids[i] for i in chosen]
    calibration.write(out, facts, fit, _memory_constants(rows, count), said, names)
    report.notes[0] = said
    return report


def _kept(fit: fitting.Fit) -> str:
    """What to add to a report where the runs moved no constant."""
    return "; constants: the priors, which explain these runs better than a fit" * fit.at_priors


def _memory_constants(rows: Rows, count: int) -> dict[str, float]:
    """Fitted to at most `count` rows with a published peak; two rows are too few."""
    ran = np.array(rows.status) == "ok"
    known = np.flatnonzero(rows.fit & ~rows.guessed & rows.has_step_memory & ran)
    known = known[: len(known) if len(known) > 2 else 0]
    chosen = known[fitting.choose(rows.x.take(known), count)]
    return fitting.fit_memory(rows.x.take(chosen), rows.memory_gb[chosen])[0]


def _facts(rows: Rows, chosen: np.ndarray, card: str, network: str) -> dict[str, Any]:
    """What a calibration file says of the cluster.

    Raises:
        UsageError: `network` states no rate.
    """
    gpus_per_node = rows.gpus_per_node[chosen[0]]
    said = network or rows.cluster[chosen[0]]
    known = network_rate(said, gpus_per_node) is not None
    if network:
        check_network(network, gpus_per_node, "--network")
    sizes = rows.gpu_memory_gb[np.isfinite(rows.gpu_memory_gb)]
    return {
        "gpu": card,
        "gpus_per_node": int(gpus_per_node),
        "gpu_memory_gb": float(sizes.max() if len(sizes) else planning_gpu(card).memory_gb),
        "network": said if known else "",
        "flash": bool(np.median(rows.x.flash[chosen])),
    }


def from_host(paths: list[Path], count: int, out: Path) -> Table:
    """Measure this machine, fit `count` of its runs, write the calibration `out`, and report.

    Raises:
        UsageError: too few runs, or the micro-benchmark failed.
    """
    runs = host_runs(paths)
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
    seen = np.isin(np.arange(len(runs.ids)), chosen)
    report = _report(runs.ids, runs.x, runs.measured, predicted, seen)
    facts = {
        "gpu": "this machine",
        "gpus_per_node": HERE_CORES,
        "gpu_memory_gb": measured["memory_gb"],
    }
    constants = {"library_gb": 0.6, "fragments": 1.05}
    names = [runs.ids[i] for i in chosen]
    report.notes[0] += _kept(fit)
    calibration.write(out, facts, fit, constants, report.notes[0], names, machine)
    report.notes += [f"left out {line}" for line in runs.left_out]
    return report
