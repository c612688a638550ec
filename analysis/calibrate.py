"""Fit a cluster's constants: from a published table, or from this machine and its own runs.

    python -m analysis.calibrate --published FILE.csv... --cluster NAME [--calibrate-rows 20]
        [--network WORDS]
    python -m analysis.calibrate --here RUN_FOLDER... [--fit 5] --cluster NAME

--published fits at most --calibrate-rows rows of a table with the columns of logs/published, chosen
by their layouts, and the cluster's published all-reduces (logs/published/all_reduce.csv), and
reports the error on the others. --here measures a matrix product, memory and an
all-reduce (python -m parallel.microbench, in a process of its own), fits --fit of the run folders
and predicts the others. Both write analysis/planner/calibrations/NAME.toml, or --out FILE.
"""

if not __package__:
    import as_script

import sys
from pathlib import Path

from analysis.common.table import add_table_flags, show
from analysis.planner import calibrating
from analysis.planner.calibration import FOLDER, MARK
from analysis.planner.fitting import add_rows_flag
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
    source.add_argument(
        "--published", nargs="+", type=Path, metavar="FILE", help="published tables (CSV)"
    )
    source.add_argument(
        "--here", nargs="+", type=Path, metavar="RUN", help="run folders of this machine"
    )
    add("--cluster", required=True, metavar="NAME", help="what analysis.plan shall call it")
    add_rows_flag(parser)
    add("--fit", type=int, default=5, metavar="N", help="run folders to fit (default: 5)")
    add("--network", default="", metavar="WORDS", help='a node\'s network, as "8x HDR InfiniBand"')
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
    check_flags(arguments, calibrate_rows=(1, 10_000), fit=(1, 10_000))
    inputs = arguments.published or arguments.here
    check_output(out, MARK, arguments.force, inputs)  # before a minute of measuring
    if arguments.published:
        rows, network = arguments.calibrate_rows, arguments.network
        table = calibrating.from_published(inputs, rows, network, out)
    else:
        table = calibrating.from_host(inputs, arguments.fit, out)
    show([table], arguments.format, arguments.columns)
    print(f"wrote {out}", file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main())
