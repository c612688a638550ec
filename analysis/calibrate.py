"""Fit the constants of a cluster to its runs, or of this machine to its own.

    python -m analysis.calibrate --runs PATH... --cluster NAME [--calibrate-rows 20]
    python -m analysis.calibrate --runs PATH... --gpu-type CARD [--gpus-per-node 8]
        [--network WORDS] --cluster NAME
    python -m analysis.calibrate --here RUN_FOLDER... [--fit 5] --cluster NAME

--runs takes run folders, logs, and tables (CSV) with one run a row: its columns are called as the
settings of parallel.train (engine, gpus, tp, pp, micro_batch, global_batch, preset or n_layer,
hidden, n_head ..., precision), `step_s` is the seconds of a step, and `run` its name. The card and
the network are those of the cluster NAME of a clusters file, or the flags'. At most
--calibrate-rows runs are fitted, chosen by their layouts, and the others are predicted. --here
measures a matrix product, memory and an all-reduce (python -m parallel.microbench, in a process of
its own), fits --fit of the run folders and predicts the others. Both write
analysis/planner/calibrations/NAME.toml, or --out FILE.
"""

if not __package__:
    import as_script

import sys
from pathlib import Path

from analysis.common.table import add_table_flags, show
from analysis.planner import calibrating
from analysis.planner.calibration import FOLDER, MARK, uncalibrated
from analysis.planner.fitting import MAX_ROWS
from base.bounds import check_flags
from base.errors import Parser, command_line
from base.files import add_force_flag
from base.storage import check_output


@command_line("analysis.calibrate")
def main(argv: list[str] | None = None) -> int:
    """Fit, report, write."""
    parser = Parser(prog="python -m analysis.calibrate", description=__doc__)
    add = parser.add_argument
    source = parser.add_mutually_exclusive_group(required=True)
    paths = {"nargs": "+", "type": Path, "metavar": "PATH"}
    source.add_argument("--runs", **paths, help="run folders, logs and CSVs of the cluster")
    source.add_argument("--here", **paths, help="run folders of this machine")
    add("--cluster", required=True, metavar="NAME", help="what analysis.plan shall call it")
    add("--gpu-type", metavar="CARD", help="the card of --runs (default: the cluster's)")
    add("--gpus-per-node", type=int, default=8, metavar="N", help="with --gpu-type (default: 8)")
    add("--network", default="", metavar="WORDS", help='a node\'s network, as "8x HDR InfiniBand"')
    rows = f"runs of --runs to fit at most (default: {MAX_ROWS})"
    add("--calibrate-rows", type=int, default=MAX_ROWS, metavar="N", help=rows)
    add("--fit", type=int, default=5, metavar="N", help="run folders to fit (default: 5)")
    add(
        "--out",
        type=Path,
        metavar="FILE",
        help="the calibration (default: analysis/planner/calibrations/NAME.toml)",
    )
    add_force_flag(parser)
    add_table_flags(parser)
    arguments = parser.parse_args(argv)
    out = arguments.out or FOLDER / f"{arguments.cluster}.toml"
    bounds = {name: (1, 10_000) for name in ("calibrate_rows", "fit", "gpus_per_node")}
    check_flags(arguments, **bounds)
    paths = arguments.runs or arguments.here
    check_output(out, MARK, arguments.force, paths)  # before a minute of measuring
    if arguments.runs:
        where = (arguments.cluster, arguments.gpu_type, arguments.gpus_per_node)
        cluster = uncalibrated(*where, arguments.network)
        table = calibrating.from_runs(paths, cluster, arguments.calibrate_rows, out)
    else:
        table = calibrating.from_host(paths, arguments.fit, out)
    show([table], arguments.format, arguments.columns)
    print(f"wrote {out}", file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main())
