"""Where each rank's time went, what it sent, and where a split's efficiency was lost.

    python -m analysis.breakdown PATH... [--baseline NAME] [--scaling strong|weak]

PATH is a run folder of a run with `--breakdown`, or a folder of them. Three tables, per step, over
the windows after the warm-up:

- every category's time on its slowest rank, the mean over ranks, and the spread (slowest -
  fastest); the step's time is the slowest rank's;
- tensor-, pipeline- and data-parallel messages: calls, bytes, exposed and hidden time, and whether
  the bytes are those of the closed formula (analysis/planner/messages.py);
- the efficiency that was lost against the baseline, decomposed.

parallel/measure/step_parts.py says what each category means. A rank without rows, or a damaged
file, is named; the others are still reported. Exits 2 when nothing could be read.
"""

import sys

from analysis.runs.views import command

main = command("breakdown", __doc__)

if __name__ == "__main__":
    sys.exit(main())
