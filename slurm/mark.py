"""Say in a run folder why its run ended: python -m slurm.mark FOLDER REASON (the scripts do).

The first reason stays, but that ranks were sent SIGTERM is no reason: the script knows whose it
was. A run that is complete stays complete, and one that was interrupted and saved stays so.
"""

import sys
from pathlib import Path

from parallel.artifacts import RunFolder


def main(argv: list[str] | None = None) -> int:
    folder, reason = sys.argv[1:] if argv is None else argv
    run = RunFolder(Path(folder))
    if not reason.startswith("exit status"):
        run.explain(reason)
    run.fail(reason, rank=-1)
    return 0


if __name__ == "__main__":
    sys.exit(main())
