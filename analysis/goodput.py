"""Where a study's GPU-hours went: useful steps, and all that is not.

    python -m analysis.goodput logs/STUDY [--format markdown]

PATH is a study, or run folders. One row for each run, and their sum: hours queued, and GPU-hours
from the start of each job to its end: starting, useful steps, slower than the run's steady time,
evaluation, saving, steps repeated after a restart, ending, failed. The parts add up to the
GPU-hours of Slurm's accounting (sacct is asked once). Without accounting they add up to the time in
the run folders, from each program's start on. A second table has the nodes. Exits 2 when nothing
could be read.
"""

import sys

from analysis.runs.views import command

main = command("goodput", __doc__)

if __name__ == "__main__":
    sys.exit(main())
