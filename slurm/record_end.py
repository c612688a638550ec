"""Record in a run folder why its run ended. slurm/job.sh calls it.

    python -m slurm.record_end FOLDER ATTEMPT STATUS

ATTEMPT.end, where job.sh wrote one, holds the kind and the reason; else they come from the exit
status and the log, ATTEMPT.out. The first reason in the folder stays, except where a rank only saw
a SIGTERM or lost a peer. A run that is complete, or that was interrupted and saved, stays so.
"""

import os
import sys
from pathlib import Path

from base.errors import Parser, command_line
from parallel.record.ends import kind_of
from parallel.record.first_place import cause, killed_rank
from parallel.record.writer import RunFolder
from slurm.states import ran_by, read_end, tail


def record_end(folder: Path, attempt: str, status: int) -> None:
    """Writes why an attempt ended into status.json."""
    run, job = RunFolder(folder), os.environ.get("SLURM_JOB_ID")
    if job and (folder / "run.json").exists() and ran_by(folder) != int(job):
        return  # the folder holds an earlier job's run, which ended as it says
    noted, log = read_end(folder, attempt), tail(folder / f"{attempt}.out")
    failure = cause(log)
    exited = f"exit status {status}: {failure}" if failure else f"exit status {status}"
    kind, reason = noted or (kind_of(failure), exited)
    run.fail(kind, reason, rank=-1, is_cause=bool(noted or killed_rank(log)))


@command_line("slurm.record_end")
def main(argv: list[str] | None = None) -> int:
    parser = Parser(prog="python -m slurm.record_end", description=__doc__)
    parser.add_argument("folder", type=Path, metavar="FOLDER", help="the run folder")
    parser.add_argument("attempt", metavar="ATTEMPT", help="the job's id, with its restart")
    parser.add_argument("status", type=int, metavar="STATUS", help="the launch's exit status")
    arguments = parser.parse_args(argv)
    record_end(arguments.folder, arguments.attempt, arguments.status)
    return 0


if __name__ == "__main__":
    sys.exit(main())
