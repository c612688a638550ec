"""Pictures of runs and logs, as PNG and SVG: speedup against GPUs, and bars of every split.

    python -m analysis.plots PATH... [--out FOLDER] [--baseline NAME]

`scaling` is the speedup (weak: efficiency) against GPUs, with the ideal line and the name of the
fastest run of each size. `splits` has the same as one bar for each configuration, the fastest
first. `tflops` is TFLOP/s per GPU. They go to PATH/plots (beside PATH if it is a file; several
paths need --out). The command names every file that it writes, and every run that a picture leaves
out, with the reason.
Exits 2 when there is nothing to draw.
"""

import sys
from pathlib import Path
from typing import TYPE_CHECKING

from analysis.logs.load import load
from analysis.logs.model import asked
from analysis.runs import run_table
from analysis.runs.fairness import Terms, scaling_of
from analysis.runs.repeats import by_configuration
from analysis.runs.run_options import parser_of
from base.errors import UsageError, command_line, warn
from base.files import add_force_flag, named_folder
from base.storage import output

if TYPE_CHECKING:
    from analysis.pages.section import Chart


def drawn(paths: list[Path], baseline: str | None) -> "dict[str, Chart]":
    """Returns the charts of the runs at paths by name; says on stderr which runs they leave out."""
    from analysis.pages import charts  # here: --help needs no charts

    records, left_out = load(paths)
    kind = scaling_of(records)
    rows = run_table.rows(records, terms=Terms(baseline, kind))
    for row in rows:
        values = {"tflops": row["tflops"] and row["gpus"], "efficiency": row["efficiency"]}
        if missing := [column for column, value in values.items() if not value]:
            reasons = dict.fromkeys(filter(None, map(row["missing"].get, missing)))
            reason = "; ".join(reasons) if row["verdict"] == "complete" else row["verdict"]
            names = " and ".join(missing).replace("efficiency", "scaling")
            left_out.append(f"{row['run']}: not in {names}: {reason or asked(['gpus'])}")
    groups = by_configuration(list(zip(records, rows, strict=True)))
    firsts = []  # the repeats of a configuration share their speedup
    for name, repeats in groups.items():
        ratios = [(row["speedup"] or 0, row["tflops"] is not None) for _, row in repeats]
        first = repeats[ratios.index(max(ratios))][1]
        firsts.append(first | {"run": name})
    compared = [row for row in firsts if row["efficiency"] is not None]  # of own cores
    pictures = charts.scaling(compared, kind) | charts.tflops(firsts)
    if not pictures:
        reason = "nothing to draw: no run here has a speedup or TFLOP/s"
        raise UsageError("; ".join([reason, *left_out]))
    warn("analysis.plots", *left_out)
    return pictures


@command_line("analysis.plots")
def main(argv: list[str] | None = None) -> int:
    parser = parser_of("analysis.plots", __doc__, "baseline", paths="logs, runs, folders")
    parser.add_argument(
        "--out", type=named_folder, metavar="DIR", help="folder to write (default: PATH/plots)"
    )
    add_force_flag(parser)
    flags = parser.parse_args(argv)
    first, *more_paths = flags.paths
    if flags.out is None and more_paths:
        raise UsageError(f"{len(flags.paths)} paths: say with --out FOLDER where the pictures go")
    folder = flags.out or (first if first.is_dir() else first.parent) / "plots"
    charts = drawn(flags.paths, flags.baseline)
    from analysis.pages.charts import MARK, pictures

    folder.mkdir(parents=True, exist_ok=True)
    for name, chart in charts.items():
        for suffix, content in pictures(chart).items():
            with output(folder / f"{name}.{suffix}", MARK, flags.force) as file:
                file.write_bytes(content)
            print(folder / f"{name}.{suffix}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
