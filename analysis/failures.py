"""Why runs failed: by cause, with the line that proves it, and the node to leave out.

    python -m analysis.failures PATH... [--format json]

PATH is a job's output (slurm-123.out), a run, or a folder of them; also runs that died before their
first step. One row a cause: how many runs, and of one of them the line of its log that proves it,
the rank that failed first and its node, where the log names them. --format json has all runs of a
row (`failures`). A cause is the verdict of a run (docs/glossary.md); of a traceback, what was
raised, or disk, killed and the like.

The rank is the one in that line, or torchrun's first by its times, or the first task that srun says
has ended. The node is named by that line, by torchrun or srun for this rank, or by NCCL as it
starts (NCCL_DEBUG=INFO). What stopped a run from outside (time limit, scancel) has no node.

A second table has the nodes that failed first in two runs or more. One is to be left out where any
node would be first as often in less than one of twenty such folders, if the nodes of a run (where
its log names one alone: of all logs) were equally likely. Not counted are failures of several nodes
alike; of rank 0, which does what no other rank does, as saving; and collectives that timed out, for
the ranks that wait print these. `-` is what the log does not state. Exits 2 when nothing could be
read.
"""

import sys

from analysis.runs.views import command

main = command("failures", __doc__)

if __name__ == "__main__":
    sys.exit(main())
