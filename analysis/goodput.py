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

from analysis.runs.views import command

main = command("goodput", __doc__)

if __name__ == "__main__":
    sys.exit(main())
