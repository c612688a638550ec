"""Strong and weak scaling curves over repeats, against a baseline of any number of GPUs.

    python -m analysis.scaling PATH... [--baseline NAME] [--scaling strong|weak]

The baseline is --baseline, else the study's, else the run on the fewest GPUs. One row for each
configuration: the median over its repeats with their spread, speedup, efficiency and Karp and
Flatt's serial share; below, the serial share that Amdahl's law (strong) or Gustafson's (weak) fits
to all rows. A run whose work is not the baseline's, or whose commit is not (unless --any-commit),
is left out of the fit and says what differs.

Weak scaling also has the efficiency to a target, because a larger batch needs more samples: for
MLPerf's benchmarks by its reference points, else by --critical-batch or --target-loss.

PATH may be a tree of MLPerf training results (.../SUBMITTER/results/SYSTEM/BENCHMARK/result_0.txt).
Then it prints a table of every result and, for each submitter, benchmark and card, a strong-scaling
table for each global batch, and a weak-scaling table for each batch per GPU, that two sizes share.
Exits 2 when nothing could be read.
"""

import sys

from analysis.runs.views import command

main = command("scaling", __doc__)

if __name__ == "__main__":
    sys.exit(main())
