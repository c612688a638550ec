"""Fit the constants of a cluster to its runs.

    python -m analysis.calibrate --runs PATH... --cluster NAME [--calibrate-rows 20]
    python -m analysis.calibrate --runs PATH... --gpu-type CARD [--gpus-per-node 8]
        [--network WORDS] --cluster NAME

--runs takes run folders, logs, and tables (CSV) with one run a row: its columns are called as the
settings of parallel.train (engine, gpus, tp, pp, micro_batch, global_batch, preset or n_layer,
hidden, n_head ..., precision), `step_s` is the seconds of a step, and `run` its name. The card and
the network are those of the cluster NAME of a clusters file, or the flags'. At most
--calibrate-rows runs are fitted, chosen by their layouts, and the others are predicted. Writes
analysis/planner/calibrations/NAME.toml, or --out FILE.
"""

import sys
from pathlib import Path

from analysis.common.table import add_table_flags, show
from analysis.planner import calibrating, calibration
from analysis.planner.fitting import MAX_ROWS, priors_of
from analysis.planner.runs import read_runs
from base.bounds import check_flags
from base.errors import Parser, command_line
from base.files import add_force_flag
from base.storage import check_output
from models.gpus import planning_gpu


@command_line("analysis.calibrate")
def main(argv: list[str] | None = None) -> int:
    """Fit, report, write."""
    parser = Parser(prog="python -m analysis.calibrate", description=__doc__)
    add = parser.add_argument
    paths = {"nargs": "+", "type": Path, "metavar": "PATH", "required": True}
    add("--runs", **paths, help="run folders, logs and CSVs of the cluster")
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
    out = arguments.out or calibration.FOLDER / f"{arguments.cluster}.toml"
    check_output(out, calibration.MARK, arguments.force, arguments.runs)
    if arguments.gpu_type:
        sheet = arguments.gpu_type, arguments.gpus_per_node, arguments.cluster
        cluster = calibration.from_data_sheet(*sheet)
    else:
        cluster = calibration.of_cluster(arguments.cluster)
    if arguments.network:
        cluster = cluster.with_network(arguments.network)
    priors = priors_of(planning_gpu(cluster.gpu).name)
    runs = read_runs(arguments.runs, cluster.columns)
    table = calibrating.fitted(runs, cluster, priors, arguments.calibrate_rows, out)
    show([table], arguments.format, arguments.columns)
    print(f"wrote {out}", file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main())
