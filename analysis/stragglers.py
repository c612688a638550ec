"""Which ranks were slow, in what, on which node; and which nodes were slow in several runs.

    python -m analysis.stragglers PATH... [--format markdown]

PATH is a run folder, or a folder of them. Every run on two or more ranks looks for slow ranks while
it trains and keeps the windows of five steps that count against one (slow_ranks.csv). One row for
each rank that was slow in three of four windows in a row: what it did longer than the other ranks
of its pipeline stage (compute: its own computing; data: waiting for its batches, as a share of a
step) and in how many windows from the first to the last. Kind link names no rank: steps took
longer than earlier in the run for another reason, the network or other work on the cores.
docs/breakdown-and-profile.md says how often a line is right. Exits 2 when nothing could be read.
"""

import sys

from analysis.common.table import show
from analysis.measured import slow_rank_tables
from analysis.measured.run_flags import parser_of
from base.errors import command_line, warn
from parallel.record.reader import find_runs


@command_line("analysis.stragglers")
def main(argv: list[str] | None = None) -> int:
    parser = parser_of("analysis.stragglers", __doc__, "table", paths="run folder or study")
    flags = parser.parse_args(argv)
    tables, problems = slow_rank_tables.report(find_runs(flags.paths))
    for line in problems:
        warn("analysis.stragglers", line)
    show(tables, flags.format, flags.columns)
    return 0


if __name__ == "__main__":
    sys.exit(main())
