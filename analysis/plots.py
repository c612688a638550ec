"""Pictures of runs and logs, as PNG and SVG: speedup against GPUs, and bars of every split.

    python -m analysis.plots PATH... [--out FOLDER] [--baseline NAME]

scaling is the speedup (weak: efficiency) against GPUs with the ideal line and the name of the
fastest run of each size, splits is the same as one bar a configuration, the fastest first, and
tflops is TFLOP/s per GPU. They go to PATH/plots (beside a file; of several paths --out says where).
Every file that is written is named, and so is every run that a picture leaves out, with the reason.
Exits 2 when there is nothing to draw.
"""

import sys
import textwrap
from pathlib import Path
from typing import TYPE_CHECKING, Any

from analysis.common.colours import GREY, of_engines
from analysis.logs.load import load
from analysis.logs.model import asked
from analysis.runs import drawn_rows, run_table
from analysis.runs.drawn_rows import Bars, Points
from analysis.runs.fairness import by_configuration, scaling_of
from analysis.runs.run_options import parser_of
from base.errors import UsageError, command_line, warn
from base.files import add_force_flag, named_folder
from base.storage import output

if TYPE_CHECKING:
    from matplotlib.figure import Figure

MARK = "GPT scaling study"  # in the pictures
LINE = 90  # characters of a title's lines


def drawn(paths: list[Path], baseline: str | None) -> dict[str, Points | Bars]:
    """What the pictures of the runs at paths show, by name; what they leave out is said on stderr.

    Raises:
        UsageError: nothing could be read, or nothing of it can be drawn.
    """
    records, left_out = load(paths)
    kind = scaling_of(records)
    rows = run_table.rows(records, baseline=baseline, kind=kind)
    for row in rows:
        drawn = {"tflops": row["tflops"] and row["gpus"], "scaling": row["efficiency"]}
        if missing := [name for name, value in drawn.items() if not value]:
            keys = {"tflops": "tflops", "scaling": "efficiency"}
            whys = dict.fromkeys(filter(None, (row["missing"].get(keys[name]) for name in missing)))
            why = "; ".join(whys) if row["verdict"] == "complete" else row["verdict"]
            why = why or asked(["gpus"])
            left_out.append(f"{row['run']}: not in {' and '.join(missing)}: {why}")
    groups = by_configuration(list(zip(records, rows, strict=True)))
    firsts = []  # the repeats of a configuration share their speedup
    for name, repeats in groups.items():
        known = [(row["speedup"] or 0, row["tflops"] is not None) for _, row in repeats]
        first = repeats[known.index(max(known))][1]
        firsts.append(first | {"run": name})
    compared = [row for row in firsts if row["efficiency"] is not None]  # of own cores
    pictures = {
        "scaling": drawn_rows.points(compared, kind),
        "splits": drawn_rows.ratios(compared, kind),
        "tflops": drawn_rows.tflops(firsts),
    }
    pictures = {name: picture for name, picture in pictures.items() if picture is not None}
    if not pictures:
        why = "nothing to draw: no run here has a speedup or TFLOP/s"
        raise UsageError("; ".join([why, *left_out]))
    for line in left_out:
        warn("analysis.plots", line)
    return pictures


def figure(picture: Points | Bars) -> "Figure":
    """The picture, drawn by matplotlib."""
    import matplotlib  # here: --help needs no drawing

    matplotlib.use("Agg")
    # The same data must give the same file: no time stamp, no random ids, text as text; and a $ in
    # a name begins no formula.
    settings = {"svg.hashsalt": "3d", "svg.fonttype": "none", "text.parse_math": False}
    matplotlib.rcParams.update(settings)
    from matplotlib.figure import Figure

    height = 1.6 + 0.24 * len(picture.rows) if isinstance(picture, Bars) else 4.2
    figure = Figure(figsize=(8, height), layout="constrained")
    axes = figure.subplots()
    colour_of = of_engines(row["engine"] for row in picture.rows)
    draw = _bars if isinstance(picture, Bars) else _points
    draw(axes, picture, colour_of)
    axes.set_axisbelow(True)
    handles = [matplotlib.patches.Patch(color=c, label=name) for name, c in colour_of.items()]
    figure.legend(handles=handles, loc="outside lower center", ncols=4)
    return figure


def _bars(axes: Any, picture: Bars, colour_of: dict[str, str]) -> None:
    """One bar a row with its text; a thin line is its interval, a tick the ideal."""
    names = [row["bar"] for row in picture.rows]
    values = [row[picture.key] for row in picture.rows]
    axes.barh(names, values, color=[colour_of[row["engine"]] for row in picture.rows], alpha=0.85)
    axes.hlines(names, [r["low"] for r in picture.rows], [r["high"] for r in picture.rows], "black")
    for row in picture.rows:
        if row["ideal"] is not None:
            axes.plot(row["ideal"], row["bar"], "|", color="black", markersize=10)
        where = {"xytext": (5, 0), "textcoords": "offset points", "va": "center"}
        axes.annotate(row["text"], (row["end"], row["bar"]), fontsize=8, **where)
    axes.invert_yaxis()
    axes.set_xlim(0, 1.5 * max(row["end"] for row in picture.rows))  # room for the texts
    axes.grid(axis="x", alpha=0.3)
    axes.figure.suptitle(textwrap.fill(picture.caption, LINE), fontsize=9)
    axes.set_xlabel(picture.title)


def _points(axes: Any, picture: Points, colour_of: dict[str, str]) -> None:
    """A value against GPUs, both logarithmic, with the ideal line and names of the fastest."""
    line = [[row[name] for row in picture.ideal] for name in ("gpus", picture.key)]
    axes.plot(*line, "--", color=GREY)
    for row in picture.rows:
        axes.plot(row["gpus"], row[picture.key], "o", color=colour_of[row["engine"]], alpha=0.8)
    for row in picture.named:
        where = {"xytext": (7, 0), "textcoords": "offset points", "va": "center"}
        axes.annotate(row["run"], (row["gpus"], row[picture.key]), fontsize=8, **where)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log", base=2)
    axes.margins(x=0.3, y=0.1)  # room for the names
    sizes = sorted({row["gpus"] for row in picture.rows})
    axes.set_xticks(sizes, [f"{size:g}" for size in sizes])
    axes.yaxis.set_major_formatter("{x:g}")
    axes.grid(alpha=0.3)
    words = f"The fastest run of each number of GPUs has its name. Dashed: ideal {picture.key}."
    axes.figure.suptitle(words, fontsize=9)
    axes.set_xlabel("GPUs")
    axes.set_ylabel(picture.key)


def save(figure: "Figure", folder: Path, name: str, force: bool = False) -> list[Path]:
    """Write NAME.png and NAME.svg, which say in themselves who drew them; the same data give the
    same bytes.

    Raises:
        UsageError: as `storage.output`.
    """
    about = {"png": {"Software": MARK}, "svg": {"Creator": MARK, "Date": None}}
    folder.mkdir(parents=True, exist_ok=True)
    for kind, metadata in about.items():
        with output(folder / f"{name}.{kind}", MARK, force) as file:
            figure.savefig(file, dpi=144, metadata=metadata)
    return [folder / f"{name}.{kind}" for kind in about]


@command_line("analysis.plots")
def main(argv: list[str] | None = None) -> int:
    parser = parser_of("analysis.plots", __doc__, "baseline", paths="logs, runs, folders")
    parser.add_argument(
        "--out", type=named_folder, metavar="DIR", help="folder to write (default: PATH/plots)"
    )
    add_force_flag(parser)
    flags = parser.parse_args(argv)
    first, *others = flags.paths
    if flags.out is None and others:
        raise UsageError(f"{len(flags.paths)} paths: say with --out FOLDER where the pictures go")
    folder = flags.out or (first if first.is_dir() else first.parent) / "plots"
    for name, picture in drawn(flags.paths, flags.baseline).items():
        print(*save(figure(picture), folder, name, flags.force), sep="\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
