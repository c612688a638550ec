"""Fit the constants of a cluster to its runs, or of this machine to its own.

    python -m analysis.calibrate --runs PATH... --cluster NAME [--calibrate-rows 20]
    python -m analysis.calibrate --runs PATH... --gpu-type CARD [--gpus-per-node 8]
        [--network WORDS] --cluster NAME
    python -m analysis.calibrate --runs PATH... --here --cluster NAME

--runs takes run folders, logs, and tables (CSV) with one run a row: its columns are called as the
settings of parallel.train (engine, gpus, tp, pp, micro_batch, global_batch, preset or n_layer,
hidden, n_head ..., precision), `step_s` is the seconds of a step, and `run` its name. The card and
the network are those of the cluster NAME of a clusters file, or the flags'. At most
--calibrate-rows runs are fitted, chosen by their layouts, and the others are predicted. With --here
the runs are of this machine's CPU: a matrix product, memory and an all-reduce are measured
(python -m parallel.microbench, in a process of its own). Writes
analysis/planner/calibrations/NAME.toml, or --out FILE.
"""

if not __package__:
    import as_script

import sys
from argparse import Namespace
from pathlib import Path

from analysis.common.table import add_table_flags, show
from analysis.planner import calibrating, calibration
from analysis.planner.calibration import Calibration
from analysis.planner.fitting import MAX_ROWS
from analysis.planner.runs import read_runs
from base.bounds import check_flags
from base.errors import Parser, UsageError, command_line
from base.files import add_force_flag
from base.storage import check_output


def _uncalibrated(arguments: Namespace) -> Calibration:
    """The cluster of the flags, by its card's data sheet."""
    if arguments.gpu_type:
        sheet = arguments.gpu_type, arguments.gpus_per_node, arguments.cluster
        cluster = calibration.from_data_sheet(*sheet)
    else:
        cluster = calibration.of_cluster(arguments.cluster)
    return cluster.with_network(arguments.network) if arguments.network else cluster


@command_line("analysis.calibrate")
def main(argv: list[str] | None = None) -> int:
    """Fit, report, write."""
    parser = Parser(prog="python -m analysis.calibrate", description=__doc__)
    add = parser.add_argument
    paths = {"nargs": "+", "type": Path, "metavar": "PATH", "required": True}
    add("--runs", **paths, help="run folders, logs and CSVs of the cluster")
    add("--here", action="store_true", help="the runs are of this machine, which is measured")
    add("--cluster", required=True, metavar="NAME", help="what analysis.plan shall call it")
    add("--gpu-type", metavar="CARD", help="the card of --runs (default: the cluster's)")
    add("--gpus-per-node", type=int, default=8, metavar="N", help="with --gpu-type (default: 8)")
    add("--network", default="", metavar="WORDS", help='a node\'s network, as "8x HDR InfiniBand"')
    rows = f"runs to fit at most (default: {MAX_ROWS})"
    add("--calibrate-rows", type=int, default=MAX_ROWS, metavar="N", help=rows)
    out = "the calibration (default: analysis/planner/calibrations/NAME.toml)"
    add("--out", type=Path, metavar="FILE", help=out)
    add_force_flag(parser)
    add_table_flags(parser)
    arguments = parser.parse_args(argv)
    check_flags(arguments, calibrate_rows=(1, 10_000), gpus_per_node=(1, 10_000))
    if arguments.here and (arguments.gpu_type or arguments.network):
        raise UsageError("--here is of a CPU: no --gpu-type and no --network with it")
    out = arguments.out or calibration.FOLDER / f"{arguments.cluster}.toml"
    check_output(out, calibration.MARK, arguments.force, arguments.runs)  # before measuring
    if arguments.here:
        runs = read_runs(arguments.runs, calibration.host_columns)
        cluster = calibrating.here()
    else:
        cluster = _uncalibrated(arguments)
        runs = read_runs(arguments.runs, cluster.columns)
    table = calibrating.fitted(runs, cluster, arguments.calibrate_rows, out)
    show([table], arguments.format, arguments.columns)
    print(f"wrote {out}", file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main())
