"""Where a study's GPU-hours went: useful steps, and all that is not.

    python -m analysis.goodput logs/STUDY [--format markdown]

PATH is a study, or run folders. One row a run, and their sum: hours queued, and GPU-hours from the
start of each job to its end: starting, useful steps, slower than the run's own steady time,
evaluation, saving, steps repeated after a restart, ending, failed. The parts add up to what Slurm's
accounting says that the jobs held (sacct is asked once). Where no accounting answers they add up to
what the run folders know, from each program's start on. A second table has the nodes. Exits 2 when
nothing could be read.
"""

import sys

from analysis.common.table import show
from analysis.runs import gpu_hours
from analysis.runs.run_options import load_runs, parser_of
from base.errors import UsageError, command_line


@command_line("analysis.goodput")
def main(argv: list[str] | None = None) -> int:
    parser = parser_of("analysis.goodput", __doc__, "table", paths="study or run folder")
    flags = parser.parse_args(argv)
    tables, refused = gpu_hours.table(load_runs("analysis.goodput", flags))
    if not any(table.rows for table in tables):
        raise UsageError("; ".join(refused) or "these are no run folders of this repository")
    show([table for table in tables if table.rows], flags.format, flags.columns)
    return 0


if __name__ == "__main__":
    sys.exit(main())
