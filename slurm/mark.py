"""Say in a run folder why its run ended (the scripts do).

python -m slurm.mark FOLDER REASON LOG

The first reason stays, but that ranks were sent SIGTERM, or lost a peer, is no reason: the script
knows whose it was, or torchrun said in the log which rank had died before it ended the others. A
run that is complete stays complete, and one that was interrupted and saved stays so.
"""

import argparse
import os
import sys
from pathlib import Path

from models.errors import Parser, command_line
from parallel.artifacts import RunFolder
from slurm.jobs import cause, killed_rank, ran_by, tail


@command_line("slurm.mark")
def main(argv: list[str] | None = None) -> int:
    parser = Parser(
        prog="python -m slurm.mark",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("folder", type=Path, metavar="FOLDER")
    parser.add_argument("reason", metavar="REASON")
    parser.add_argument("log", type=Path, metavar="LOG")
    arguments = parser.parse_args(argv)
    run, reason = RunFolder(arguments.folder), arguments.reason
    job = os.environ.get("SLURM_JOB_ID")
    if job and (run.path / "run.json").exists() and ran_by(run.path) != int(job):
        return 0  # what is there is an earlier job's, which ended as it says; our log tells of us
    if reason.startswith("exit status"):
        text = tail(arguments.log)
        reason = ": ".join(filter(None, (reason, cause(text))))
        if killed_rank(text):
            run.explain(reason)
    else:
        run.explain(reason)
    run.fail(reason, rank=-1)
    return 0


if __name__ == "__main__":
    sys.exit(main())
