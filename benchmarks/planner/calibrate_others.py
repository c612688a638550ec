"""Makes the calibrations of analysis/planner/calibrations that analysis.calibrate does not make.

    python -m benchmarks.planner.calibrate_others FILE.csv... --out FILE.toml [--network WORDS]
    python -m benchmarks.planner.calibrate_others RUNS... --out FILE.toml [--rows 8]

Of a published cluster, by tables in the words of their publishers. Of this machine's CPU
(2-core-cpu.toml), by runs: measures a matrix product, memory and an all-reduce (parallel.bench),
fits --rows of the runs and predicts the others.
"""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import psutil

from analysis.calibrate import Runs, fitted, read_runs, written
from analysis.common.table import Table, show
from analysis.planner import fitting
from analysis.planner.calibration import Calibration
from analysis.planner.fitting import MAX_ROWS
from analysis.planner.timemodel.machine import Machine
from base.errors import Parser, UsageError, command_line
from base.units import GIB
from benchmarks.planner.held_out import fit_some, memory_constants, scored
from benchmarks.planner.published_rows import read_rows
from models.gpus import network_rate, planning_gpu
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
HERE_CORES = max(2, cores())  # each counts as a GPU; an all-reduce needs two


def here() -> Calibration:
    """Returns this machine, measured; its fit is the priors."""
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command = [*torchrun, f"--nproc-per-node={HERE_CORES}", "-m", "parallel.bench"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    if done.returncode:
        raise UsageError(f"parallel.bench failed: {done.stderr.strip().rpartition(chr(10))[2]}")
    ranks = json.loads(done.stdout)
    best = {measure: max(rates) for measure, rates in ranks[0]["rates"].items()}
    link = best["all-reduce of 4 MiB"] * 2 * (len(ranks) - 1) / len(ranks)  # of the bus
    rates = best["fp32"], best["memory"], link, link
    return Calibration(
        name="this machine",
        gpu="this machine",
        gpus_per_node=HERE_CORES,
        gpu_memory_gb=psutil.virtual_memory().total / GIB,
        fit=fitting.prior_fit(HERE_PRIORS),
        memory={"library_gb": 0.6, "fragments": 1.05},
        machine_override=Machine(*rates, cores=HERE_CORES),
        processor=cpu_name(),
    )


def published(files: list[Path], network: str, out: Path) -> Table:
    """Fits a published cluster, writes its calibration `out`, and reports. network: "" takes the
    tables' own words."""
    rows = read_rows(files)
    index = scored(rows)
    if len(cards := np.unique(rows.gpu[index]).tolist()) != 1:
        raise UsageError(f"a calibration is of one card, not of {' and '.join(cards) or 'none'}")
    (card,) = cards
    fit, chosen = fit_some(rows, index, MAX_ROWS, card)
    per_node = int(rows.gpus_per_node[chosen[0]])
    network = network or str(rows.cluster[chosen[0]])
    sizes = rows.gpu_memory_gb[np.isfinite(rows.gpu_memory_gb)]
    peaks = np.flatnonzero(rows.fit & (rows.status == "ok"))
    peaks = peaks if rows.has_step_memory[peaks].sum() > 2 else peaks[:0]  # two are too few
    cluster = Calibration(
        name=card,
        gpu=card,
        gpus_per_node=per_node,
        gpu_memory_gb=float(sizes.max() if len(sizes) else planning_gpu(card).memory_gb),
        fit=fit,
        network=network if network_rate(network, per_node) else "",
        memory=memory_constants(rows, peaks, MAX_ROWS),
        flash=bool(np.median(rows.steps.flash[chosen])),
    )
    ids = [rows.ids[i] for i in index]
    runs = Runs(ids, rows.steps.take(index), rows.measured[index], np.ones(len(index)), [])
    predicted = fit.seconds(runs.steps, rows.machine.take(index))
    return written(runs, predicted, np.flatnonzero(np.isin(index, chosen)), cluster, out)


@command_line("calibrate_others")
def main(argv: list[str] | None = None) -> int:
    parser = Parser(description=__doc__.split("\n")[0])
    parser.add_argument("paths", nargs="+", type=Path, metavar="PATH")
    parser.add_argument("--network", default="", metavar="WORDS", help="default: the table's own")
    parser.add_argument("--rows", type=int, default=8, help="runs to fit at most (default: 8)")
    parser.add_argument("--out", type=Path, required=True, metavar="FILE.toml")
    arguments = parser.parse_args(argv)
    if all(path.suffix == ".csv" for path in arguments.paths):
        table = published(arguments.paths, arguments.network, arguments.out)
    else:
        machine = here()
        runs = read_runs(arguments.paths, machine.columns)
        table = fitted(runs, machine, HERE_PRIORS, arguments.rows, arguments.out)
    show([table], "text", None)
    return 0


if __name__ == "__main__":
    sys.exit(main())
