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

from analysis.runs.views import command

main = command("checkpoints", __doc__)

if __name__ == "__main__":
    sys.exit(main())
