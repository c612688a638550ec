"""Pictures of runs and logs, as PNG and SVG: TFLOP/s and speedup against GPUs.

    python -m analysis.plots PATH... [--out FOLDER] [--baseline NAME]

The pictures go to PATH/plots (beside a file; of several paths --out says where). Every file that is
written is named, and so is every run that a picture leaves out, with the reason. The speedup, weak
where the runs share the batch per GPU alone, has its ideal line and a point for every
configuration, named after its split; a line joins the points of an engine that has one at each
size. Where runs of a picture differ in precision, their names end with it. Exits 2 when there is
nothing to draw.
"""

import statistics
import sys
from collections import defaultdict
from pathlib import Path
from typing import Any

from analysis.common import drawing
from analysis.logs.load import load
from analysis.logs.record import Record
from analysis.measured import run_table
from analysis.measured.fairness import by_configuration, scaling_of
from analysis.measured.run_flags import parser_of
from base.errors import UsageError, command_line, warn
from base.files import add_force_flag, named_folder
from models.flops import DEFAULT_CONVENTION
from parallel.config.axes import AXES

Row = dict[str, Any]  # of `run_table.rows`, with the configuration's name, its split and baseline


def folder_for(paths: list[Path], out: Path | None) -> Path:
    """Where the pictures of runs go.

    Raises:
        UsageError: several paths and no --out.
    """
    if out is None and len(paths) > 1:
        raise UsageError(f"{len(paths)} paths: say with --out FOLDER where the pictures go")
    return out or (paths[0] if paths[0].is_dir() else paths[0].parent) / "plots"


def draw(paths: list[Path], folder: Path, baseline: str | None, force: bool = False) -> list[Path]:
    """The pictures written to a folder; what a picture leaves out is said on stderr.

    Raises:
        UsageError: nothing could be read, or nothing of it can be drawn.
    """
    records, left_out = load(paths)
    groups = by_configuration([(record,) for record in records])
    name_by = {id(run[0]): name for name, repeats in groups.items() for run in repeats}
    rows = run_table.rows(records, baseline=baseline)
    for record, row in zip(records, rows, strict=True):
        row |= {"engine": record.engine or "unknown", "configuration": name_by[id(record)]}
        row |= {"split": _split(record), "baseline": baseline or record.baseline}
    measured = [row for row in rows if row["tflops"] and row["gpus"]]
    compared = [row for row in rows if row["speedup"] and row["efficiency"]]  # of own cores
    for row in rows:
        pictures = {"tflops": measured, "speedup": compared}
        if missing := [name for name, drawn in pictures.items() if row not in drawn]:
            left_out.append(f"{row['run']}: not in {' and '.join(missing)}: {_why_not(row)}")
    figures = {}
    if measured:
        points = _points(measured, "tflops")
        figures["tflops"] = drawing.tflops(points, "TFLOP/s per GPU", DEFAULT_CONVENTION)
    if compared:
        figures["speedup"] = _speedups(compared, scaling_of(records) == "weak")
    if not figures:
        why = "no run here has a number of GPUs and a steady time: nothing to draw"
        raise UsageError("; ".join([why, *left_out]))
    for line in left_out:
        warn("analysis.plots", line)
    written = [drawing.save(figure, folder, name, force) for name, figure in figures.items()]
    return sum(written, [])


def _split(record: Record) -> str:
    """What of a run is split or sharded, as "tp2 dp4 zero1"; "" where nothing is or is known."""
    sizes = {axis: getattr(record, axis) or 1 for axis in AXES}
    words = [f"{axis}{size}" for axis, size in sizes.items() if size > 1]
    if (record.facts.get("layout") or {}).get("sequence_parallel"):
        words.append("sp")
    if words and record.zero_stage:
        words.append(f"zero{record.zero_stage}")
    return " ".join(words)


def _points(rows: list[Row], y: str) -> list[drawing.Point]:
    """The rows as points that are named after their split, and their precision if it differs."""
    points = [drawing.Point(row["gpus"], row[y], row["engine"], row["split"]) for row in rows]
    precisions = [row["precision"] or "?" for row in rows]
    if len(set(precisions)) < 2:
        return points
    pairs = zip(points, precisions, strict=True)
    return [point._replace(split=f"{point.split} {name}".strip()) for point, name in pairs]


def _speedups(rows: list[Row], weak: bool) -> Any:
    """The speedup of each configuration, which its rows share, and what its repeats span."""
    alike: dict[str, list[Row]] = defaultdict(list)
    for row in rows:
        alike[row["configuration"]].append(row)
    points = []
    firsts = _points([repeats[0] for repeats in alike.values()], "speedup")
    for point, repeats in zip(firsts, alike.values(), strict=True):
        times = [row["step_s"] for row in repeats]
        if len(times) > 1:
            base = point.y * statistics.median(times)
            point = point._replace(low=base / max(times), high=base / min(times))
        points.append(point)
    first = rows[0]
    start = round(first["gpus"] * first["efficiency"] / first["speedup"])  # the baseline's GPUs
    return drawing.speedup(points, "Weak scaling" if weak else "Strong scaling", start, weak)


def _why_not(row: Row) -> str:
    """Why a row of the scaling table is not in a picture."""
    why = row["notes"] if row["verdict"] == "complete" else row["verdict"]
    if not (why or row["baseline"]):
        why = "no baseline is stated (--baseline NAME)"
    return why or "a fact that it needs is not known"


@command_line("analysis.plots")
def main(argv: list[str] | None = None) -> int:
    """Draw the pictures and name the files."""
    parser = parser_of("analysis.plots", __doc__, "baseline", paths="logs, runs, folders")
    parser.add_argument(
        "--out", type=named_folder, metavar="DIR", help="folder to write (default: PATH/plots)"
    )
    add_force_flag(parser)
    flags = parser.parse_args(argv)
    folder = folder_for(flags.paths, flags.out)
    written = draw(flags.paths, folder, flags.baseline, flags.force)
    print(*written, sep="\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
