"""Which ranks were slow, in what, on which node; which nodes were slow in several runs; and which
steps were slow, in which part.

    python -m analysis.stragglers PATH... [--format markdown]

PATH is a run folder, or a folder of them; or a log of another program that has the parts of its
steps, such as torchtitan's structured_logs. Every run on two or more ranks looks for slow ranks
while it trains, and keeps the windows of five steps that show one (slow_ranks.csv). One row for
each rank that was slow in three of four windows in a row: what it did longer than the other ranks
of its pipeline stage (compute: its own computing; data: waiting for its batches, as a share of a
step) and in how many windows. The kind link names no rank: steps took longer than earlier in the
run because of the network or other work on the cores. Slow steps have a row for each cause: how
many seconds longer than the median they take, and the part and the rank that make them slow, if the
parts show it. docs/breakdown-and-profile.md says how often a line is right. Exits 2 when nothing
could be read.
"""

import sys

from analysis.runs.views import command

main = command("stragglers", __doc__)

if __name__ == "__main__":
    sys.exit(main())
