"""Say in a run folder why its run ended: python -m slurm.mark FOLDER REASON (the scripts do).

The first reason stays, and a run that is complete stays complete.
"""

import sys
from pathlib import Path

from parallel.artifacts import RunFolder


def main(argv: list[str] | None = None) -> int:
    folder, reason = sys.argv[1:] if argv is None else argv
    RunFolder(Path(folder)).fail(reason, rank=-1)
    return 0


if __name__ == "__main__":
    sys.exit(main())
