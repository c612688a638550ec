"""Where each rank's time went, what it sent, and where a split's efficiency was lost.

    python -m analysis.breakdown PATH... [--pop] [--baseline NAME] [--scaling strong|weak]
    python -m analysis.breakdown PATH... --extrap FILE.jsonl [--force]

PATH is the folder of a run with `--breakdown`, or a folder of them. It may also be a log of another
program that has the parts of its steps; this gives the first table alone. Three tables, per step,
over the steps after the warm-up:

- the time of each part on its slowest rank, the mean over ranks, and the spread (slowest -
  fastest); the step's time is the slowest rank's;
- tensor-, pipeline- and data-parallel messages: calls, bytes, exposed and hidden time, and whether
  the bytes are those of the formula (analysis/planner/messages.py);
- the efficiency that each part lost against the baseline; or with --pop the tree of POP
  (pop-coe.eu), whose factors multiply to the efficiency of analysis.tflops. A factor below 0.8 is
  named, with the flags that act on it.

--extrap writes the seconds of every part by number of GPUs, in Extra-P's format.
parallel/measure/step_parts.py defines each part, efficiencies.py each factor. A rank without rows,
or a damaged file, is named; the others are still reported. Exits 2 when nothing could be read.
"""

import sys

from analysis.runs.views import command

main = command("breakdown", __doc__)

if __name__ == "__main__":
    sys.exit(main())
