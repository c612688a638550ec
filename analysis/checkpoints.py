"""What saving and loading cost: seconds, bytes, GB/s, and the share of time that saving took.

    python -m analysis.checkpoints PATH... [--format markdown]

PATH is a run folder with checkpoints.csv, or a study; logs of other programs are not read. One row
for each run and event (save, load): how many, the median seconds that training waited (blocked) and
until the event was done (total), the median bytes, and bytes over total seconds, in all and for
each rank. The share is the waiting over the waiting and the logged steps together. Events that
failed (a full disk, a damaged file) are counted apart; of their times only the waiting counts.
`-` is unknown. Exits 2 when nothing could be read.
"""

import sys

from analysis.runs.views import command

main = command("checkpoints", __doc__)

if __name__ == "__main__":
    sys.exit(main())
