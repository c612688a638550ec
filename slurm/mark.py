"""Say in a run folder why its run ended (the scripts do).

python -m slurm.mark FOLDER REASON LOG

The first reason stays, but that ranks were sent SIGTERM is no reason: the script knows whose it
was, or torchrun said in the log which rank had died before it ended the others. A run that is
complete stays complete, and one that was interrupted and saved stays so.
"""

import re
import sys
from pathlib import Path

from parallel.artifacts import RunFolder
from slurm.jobs import tail

SIGNAL = re.compile(r"Signal (?!15 )\d+ \(SIG\w+\) received by PID \d+")
ERROR = re.compile(r"^(?!\S*ChildFailedError)\S*Error: .*$", re.MULTILINE)


def main(argv: list[str] | None = None) -> int:
    folder, reason, log = sys.argv[1:] if argv is None else argv
    run = RunFolder(Path(folder))
    if reason.startswith("exit status"):
        text = tail(Path(log))
        seen = SIGNAL.search(text)
        reason += f": {seen[0]}" if seen else ""
        if seen:
            run.explain(reason)
        elif error := ERROR.search(text):
            reason += f": {error[0]}"
    else:
        run.explain(reason)
    run.fail(reason, rank=-1)
    return 0


if __name__ == "__main__":
    sys.exit(main())
