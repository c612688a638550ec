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

from analysis.common.table import show
from analysis.runs import rank_times
from analysis.runs.run_options import parser_of
from base.errors import command_line, warn


@command_line("analysis.breakdown")
def main(argv: list[str] | None = None) -> int:
    names = ("baseline", "scaling", "table")
    parser = parser_of("analysis.breakdown", __doc__, *names, paths="run folder or study")
    flags = parser.parse_args(argv)
    tables, problems = rank_times.report(flags.paths, flags.baseline, flags.scaling)
    warn("analysis.breakdown", *problems)
    show(tables, flags.format, flags.columns)  # last: a reader that goes away ends the command
    return 0


if __name__ == "__main__":
    sys.exit(main())
