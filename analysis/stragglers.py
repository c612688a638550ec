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

from analysis.runs.views import command

main = command("stragglers", __doc__)

if __name__ == "__main__":
    sys.exit(main())
