"""Pictures of runs and logs, as PNG and SVG.

    python -m analysis.plots PATH... [--out FOLDER] [--baseline NAME]
    python -m analysis.plots --out FOLDER               the published tables

TFLOP/s and speedup against GPUs.
The pictures go to PATH/plots (beside a file; of several paths --out says where). Where git tracks
PATH, --out must say where. Every file that is written is named, and so is every
run that a picture leaves out, with the reason. The speedup, weak where the runs share the batch per
GPU alone, has its ideal line and a point for every configuration, named after its split; a line
joins the points of an engine that has one at each size. Exits 2 when there is nothing to draw.
"""

if not __package__:
    import as_script

import os
import subprocess
import sys
from pathlib import Path

from base.errors import Parser, UsageError, command_line, warn
from base.files import ROOT, add_force_flag, named_folder

PUBLISHED = ROOT / "logs" / "plots"


def folder_for(paths: list[Path], out: Path | None) -> Path:
    """Where the pictures go.

    Raises:
        UsageError: no path or several and no --out; the folder is that of the published pictures;
            or git tracks what is drawn or files of the folder, and --out does not name it.
    """
    if not paths and out is None:
        raise UsageError("say with PATH what to draw, or with --out where the published tables go")
    if not paths:
        return out
    if out is None and len(paths) > 1:
        raise UsageError(f"{len(paths)} paths: say with --out FOLDER where the pictures go")
    path = paths[0]
    folder = out or (path if path.is_dir() else path.parent) / "plots"
    if os.path.realpath(folder) == os.path.realpath(PUBLISHED):  # a loop of links is no error here
        raise UsageError(f"{folder} holds the published tables' pictures: take another --out")
    for place in (path, folder) if out is None else ():
        if _tracked(place):
            raise UsageError(f"git tracks {place}: say with --out FOLDER where to write")
    return folder


def _tracked(path: Path) -> bool:
    """Whether git tracks a file, or one in a folder."""
    if not path.exists():
        return False
    here, name = (path, ".") if path.is_dir() else (path.parent, path.name)
    try:
        words = ["git", "--literal-pathspecs", "-C", str(here), "ls-files", "--", name]
        asked = subprocess.run(words, capture_output=True, stdin=subprocess.DEVNULL, check=False)
    except OSError:  # no git here
        return False
    return bool(asked.stdout)


@command_line("analysis.plots")
def main(argv: list[str] | None = None) -> int:
    """Draw the pictures and name the files."""
    parser = Parser(prog="python -m analysis.plots", description=__doc__)
    parser.add_argument("paths", nargs="*", type=Path, metavar="PATH", help="logs, runs, folders")
    parser.add_argument(
        "--out", type=named_folder, metavar="DIR", help="folder to write (default: PATH/plots)"
    )
    parser.add_argument("--baseline", metavar="NAME", help="the run to compare with; or its path")
    add_force_flag(parser)
    given = parser.parse_args(argv)
    folder, left_out = folder_for(given.paths, given.out), []
    if given.paths:
        from analysis.measured import run_pictures  # here: --help needs no numpy

        written, left_out = run_pictures.draw(given.paths, folder, given.baseline, given.force)
    elif given.baseline:
        raise UsageError("--baseline is of runs: say with PATH which")
    else:
        from analysis.published import published_pictures

        written = published_pictures.draw(folder, given.force)
    for line in left_out:
        warn("analysis.plots", line)
    print(*written, sep="\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
