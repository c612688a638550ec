"""Pictures of the tables, as PNG and SVG.

    python -m analysis.plots                              the published tables, to logs/plots
    python -m analysis.plots PATH... [--out FOLDER] [--baseline NAME]

With paths: speedup, TFLOP/s and phases of these runs, to PATH/plots (beside a file; of several
paths --out says where). logs/plots is the published tables' alone. Every file that is written is
named, and so is every run that a picture leaves out, with the reason. The speedup has its ideal
line, a point for every run, a line through the medians of the sizes and, where a row is of
repeats, its spread from slowest to fastest. Exits 2 when there is nothing to draw.
"""

if not __package__:
    import as_script

import os
import sys
from pathlib import Path

from models.errors import Parser, UsageError, command_line, warn
from models.files import ROOT

PUBLISHED = ROOT / "logs" / "plots"


def folder_for(paths: list[Path], out: Path | None) -> Path:
    """Where the pictures go.

    Raises:
        UsageError: several paths and no --out, or runs' pictures where the published ones are.
    """
    if not paths:
        return out or Path("logs/plots")
    if out is None and len(paths) > 1:
        raise UsageError(f"{len(paths)} paths: say with --out FOLDER where the pictures go")
    path = paths[0]
    folder = out or (path if path.is_dir() else path.parent) / "plots"
    if os.path.realpath(folder) == os.path.realpath(PUBLISHED):  # a loop of links is no error here
        raise UsageError(f"{folder} holds the published tables' pictures: take another --out")
    return folder


@command_line("analysis.plots")
def main(argv: list[str] | None = None) -> int:
    """Draw the pictures and name the files."""
    parser = Parser(prog="python -m analysis.plots", description=__doc__)
    parser.add_argument("paths", nargs="*", type=Path, metavar="PATH", help="logs, runs, folders")
    parser.add_argument(
        "--out",
        type=Path,
        metavar="DIR",
        help="folder to write (default: PATH/plots; without paths logs/plots)",
    )
    parser.add_argument("--baseline", metavar="NAME", help="the run to compare with; or its path")
    arguments = parser.parse_args(argv)
    folder, left_out = folder_for(arguments.paths, arguments.out), []
    if arguments.paths:
        from analysis.measured import pictures  # here: --help needs no numpy

        written, left_out = pictures.draw(arguments.paths, folder, arguments.baseline)
    else:
        from analysis.published import pictures

        written = pictures.draw(folder)
    for line in left_out:
        warn("analysis.plots", line)
    print(*written, sep="\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
