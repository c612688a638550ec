"""The calibration of this machine's CPU: analysis/planner/calibrations/2-core-cpu.toml.

    python -m benchmarks.planner.calibrate_here RUNS... --out FILE.toml [--rows 8]

Measures a matrix product, memory and an all-reduce (parallel.bench), fits --rows of
the runs and predicts the others.
"""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil

from analysis.calibrate import fitted
from analysis.common.table import show
from analysis.planner import fitting
from analysis.planner.calibration import Calibration, host_columns
from analysis.planner.runs import read_runs
from analysis.planner.timemodel.machine import Machine
from base.errors import Parser, UsageError, command_line
from base.units import GIB
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


def measure_here(processes: int = HERE_CORES, timeout_s: float = 120.0) -> list[dict[str, Any]]:
    """What each rank has measured on this machine.

    Raises:
        UsageError: the micro-benchmark failed; with its last line.
    """
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command = [*torchrun, f"--nproc-per-node={processes}", "-m", "parallel.bench"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=timeout_s)
    if done.returncode:
        last = (done.stderr.strip().splitlines() or ["no output"])[-1]
        raise UsageError(f"parallel.bench failed: {last}")
    return json.loads(done.stdout)


def here() -> Calibration:
    """This machine, measured; its fit is the priors.

    Raises:
        UsageError: the micro-benchmark failed.
    """
    ranks = measure_here()
    best = {measure: max(rates) for measure, rates in ranks[0]["rates"].items()}
    link = best["all-reduce of 4 MiB"] * 2 * (len(ranks) - 1) / len(ranks)  # of the bus
    rates = best["fp32"], best["memory"], link, link
    return Calibration(
        "this machine",
        "this machine",
        HERE_CORES,
        psutil.virtual_memory().total / GIB,
        fitting.prior_fit(HERE_PRIORS),
        memory={"library_gb": 0.6, "fragments": 1.05},
        machine_override=Machine(*rates, cores=HERE_CORES),
        processor=cpu_name(),
    )


@command_line("calibrate_here")
def main(argv: list[str] | None = None) -> int:
    parser = Parser(description=__doc__.split("\n")[0])
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUNS")
    parser.add_argument("--rows", type=int, default=8, help="runs to fit at most (default: 8)")
    parser.add_argument("--out", type=Path, required=True, metavar="FILE.toml")
    arguments = parser.parse_args(argv)
    runs = read_runs(arguments.runs, host_columns)
    table = fitted(runs, here(), HERE_PRIORS, arguments.rows, arguments.out)
    show([table], "text", None)
    return 0


if __name__ == "__main__":
    sys.exit(main())
