"""Why runs failed: by cause, with the line that proves it, and the node to leave out.

    python -m analysis.failures PATH... [--format json]

PATH is a job's output (slurm-123.out), a run, or a folder of them, also of runs that died before
their first step. One row for each cause: how many runs, and for one of them the line of its log
that proves it, the rank that failed first and its node, if the log names them. --format json has
all runs of a row (`failures`). A cause is the verdict of a run (docs/glossary.md). In place of
traceback it is the exception's name, disk, killed and the like.

The rank is the one in that line, or the first by torchrun's times, or the first task that srun says
has ended. The node is named by that line, by torchrun or srun for this rank, or by NCCL as it
starts (NCCL_DEBUG=INFO). A run that was stopped from outside (time limit, scancel) has no node.

A second table has the nodes that failed first in two runs or more. A node is to be left out if
chance alone would make some node first so often in less than one of twenty such folders. All nodes
of a run count as equally likely; if its log names only one, the nodes of all logs do. Failures of
several nodes at once do not count. Nor do those of rank 0, which does work that no other rank does,
such as saving, and collectives that timed out, because the ranks that wait print these. `-` is what
the log does not state. Exits 2 when nothing could be read.
"""

import sys

from analysis.runs.views import command

main = command("failures", __doc__)

if __name__ == "__main__":
    sys.exit(main())
