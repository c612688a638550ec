"""Calibrations of published clusters: what analysis/planner/calibrations holds of them.

    python -m benchmarks.planner.published_clusters FILE.csv... --out FILE.toml [--network WORDS]

As `analysis.calibrate --runs`, for tables in the words of their publishers.
"""

import sys
from pathlib import Path

import numpy as np

from analysis.calibrate import written
from analysis.common.table import show
from analysis.planner.calibration import Calibration
from analysis.planner.fitting import MAX_ROWS
from analysis.planner.runs import Runs
from base.errors import Parser, UsageError, command_line
from benchmarks.planner.held_out import fit_some, memory_constants, scored
from benchmarks.planner.published_rows import read_rows
from models.gpus import network_rate, planning_gpu


@command_line("published_clusters")
def main(argv: list[str] | None = None) -> int:
    parser = Parser(description=__doc__.split("\n")[0])
    parser.add_argument("files", nargs="+", type=Path, metavar="FILE.csv")
    parser.add_argument("--network", default="", metavar="WORDS", help="default: the table's own")
    parser.add_argument("--out", type=Path, required=True, metavar="FILE.toml")
    arguments = parser.parse_args(argv)
    rows = read_rows(arguments.files)
    index = scored(rows)
    if len(cards := sorted({rows.gpu[i] for i in index})) != 1:
        raise UsageError(f"a calibration is of one card, not of {' and '.join(cards) or 'none'}")
    fit, chosen = fit_some(rows, index, MAX_ROWS, cards[0])
    per_node = int(rows.gpus_per_node[chosen[0]])
    network = arguments.network or rows.cluster[chosen[0]]
    sizes = rows.gpu_memory_gb[np.isfinite(rows.gpu_memory_gb)]
    peaks = np.flatnonzero(rows.fit & (np.array(rows.status) == "ok"))
    peaks = peaks if rows.has_step_memory[peaks].sum() > 2 else peaks[:0]  # two are too few
    cluster = Calibration(
        cards[0],
        cards[0],
        per_node,
        float(sizes.max() if len(sizes) else planning_gpu(cards[0]).memory_gb),
        fit,
        network if network_rate(network, per_node) else "",
        memory=memory_constants(rows, peaks, MAX_ROWS),
        flash=bool(np.median(rows.x.flash[chosen])),
    )
    ids = [rows.ids[i] for i in index]
    runs = Runs(ids, rows.x.take(index), rows.measured[index], np.ones(len(index)), [])
    predicted = fit.seconds(runs.x, rows.machine.take(index))
    places = np.flatnonzero(np.isin(index, chosen))
    report = written(runs, predicted, places, cluster, arguments.out)
    show([report], "text", None)
    return 0


if __name__ == "__main__":
    sys.exit(main())
