"""What saving and loading cost: seconds, bytes, GB/s, and the share of time that saving took.

    python -m analysis.checkpoints PATH... [--format markdown]

PATH is a run folder (its checkpoints.csv is read) or a study; of other programs' logs nothing is
read. One row for each run and kind of event: how many, the median seconds that training waited
(blocked) and until it was on disk (total), the median bytes, and bytes over total seconds, in all
and for each rank. The share is the waiting over the waiting and the logged steps together. Those
that failed (a full disk, a damaged file) are counted apart; only their waiting counts with the
others'. What is not known prints `-`. Exits 2 when nothing could be read.
"""

import sys

from analysis.common.table import show
from analysis.runs import checkpoint_costs
from analysis.runs.run_options import load_runs, parser_of
from base.errors import command_line, warn


@command_line("analysis.checkpoints")
def main(argv: list[str] | None = None) -> int:
    parser = parser_of("analysis.checkpoints", __doc__, "table", paths="run, log, folder")
    flags = parser.parse_args(argv)
    costs = checkpoint_costs.table(load_runs("analysis.checkpoints", flags))
    warn("analysis.checkpoints", *costs.refused)
    if costs.silent:
        warn("analysis.checkpoints", f"no checkpoints.csv with a row in {', '.join(costs.silent)}")
    show([costs.table], flags.format, flags.columns)
    return 0


if __name__ == "__main__":
    sys.exit(main())
