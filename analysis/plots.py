"""Pictures of runs and logs, as PNG and SVG: speedup against GPUs, and bars of every split.

    python -m analysis.plots PATH... [--out FOLDER] [--baseline NAME]

The pictures are those of the offline page: scaling (speedup, weak: efficiency, against GPUs with
the ideal line and the name of the fastest run of each size), splits (the same as one bar a
configuration, the fastest first) and tflops (TFLOP/s per GPU). They go to PATH/plots (beside a
file; of several paths --out says where). Every file that is written is named, and so is every run
that a picture leaves out, with the reason. Exits 2 when there is nothing to draw.
"""

import struct
import sys
import textwrap
import zlib
from pathlib import Path
from typing import TYPE_CHECKING

from analysis.logs.load import load
from analysis.measured import run_table
from analysis.measured.fairness import by_configuration, scaling_of
from analysis.measured.run_flags import parser_of
from base.errors import UsageError, command_line, warn
from base.files import add_force_flag, named_folder
from base.storage import output

if TYPE_CHECKING:
    from analysis.pages.section import Chart

MARK = "GPT scaling study"  # in the pictures
WIDTH, LINE = 600, 90  # pixels of a chart, characters of its title's lines


def folder_for(paths: list[Path], out: Path | None) -> Path:
    """Where the pictures of runs go.

    Raises:
        UsageError: several paths and no --out.
    """
    if out is None and len(paths) > 1:
        raise UsageError(f"{len(paths)} paths: say with --out FOLDER where the pictures go")
    return out or (paths[0] if paths[0].is_dir() else paths[0].parent) / "plots"


def charts_of(paths: list[Path], baseline: str | None) -> "dict[str, Chart]":
    """The charts of the runs at paths by name; what they leave out is said on stderr.

    Raises:
        UsageError: nothing could be read, or nothing of it can be drawn.
    """
    from analysis.pages import run_views  # here: --help needs no charts

    records, left_out = load(paths)
    kind = scaling_of(records)
    rows = run_table.rows(records, baseline=baseline, kind=kind)
    for record, row in zip(records, rows, strict=True):
        drawn = {"tflops": row["tflops"] and row["gpus"], "scaling": row["efficiency"]}
        if missing := [name for name, value in drawn.items() if not value]:
            why = row["notes"] if row["verdict"] == "complete" else row["verdict"]
            if not (why or baseline or record.baseline):
                why = "no baseline is stated (--baseline NAME)"
            why = why or "a fact that it needs is not known"
            left_out.append(f"{row['run']}: not in {' and '.join(missing)}: {why}")
    groups = by_configuration(list(zip(records, rows, strict=True)))
    firsts = []  # the repeats of a configuration share their speedup
    for name, repeats in groups.items():
        first = max((row for _, row in repeats), key=lambda row: row["speedup"] or 0)
        firsts.append(first | {"run": name})
    compared = [row for row in firsts if row["efficiency"] is not None]  # of own cores
    charts = run_views.scaling_charts(compared, kind) | run_views.tflops_charts(firsts)
    if not charts:
        why = "no run here has a number of GPUs and a steady time: nothing to draw"
        raise UsageError("; ".join([why, *left_out]))
    for line in left_out:
        warn("analysis.plots", line)
    return charts


def save(chart: "Chart", folder: Path, name: str, force: bool = False) -> list[Path]:
    """Write NAME.png and NAME.svg, which say in themselves who drew them; the same data give the
    same bytes.

    Raises:
        UsageError: as `storage.output`; vl-convert-python is not installed.
    """
    from analysis.pages.page_html import library, rounded

    title = {"text": textwrap.wrap(chart.caption, LINE), "fontWeight": "normal"}
    spec = rounded(chart.spec) | {"width": WIDTH, "background": "white", "title": title}
    svg = library().vegalite_to_svg(spec)
    png = library().vegalite_to_png(spec, scale=2)
    text = b"tEXtSoftware\0" + MARK.encode()
    chunk = struct.pack(">I", len(text) - 4) + text + struct.pack(">I", zlib.crc32(text))
    header = 33  # bytes of the signature and of IHDR
    pictures = {
        "png": png[:header] + chunk + png[header:],
        "svg": f"<!-- {MARK} -->\n{svg}".encode(),
    }
    folder.mkdir(parents=True, exist_ok=True)
    for suffix, content in pictures.items():
        with output(folder / f"{name}.{suffix}", MARK, force) as file:
            file.write_bytes(content)
    return [folder / f"{name}.{suffix}" for suffix in pictures]


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
    for name, chart in charts_of(flags.paths, flags.baseline).items():
        print(*save(chart, folder, name, flags.force), sep="\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
