"""Progress bars of tqdm: `8%|8   | 12/150 [01:02<11:52,  5.16s/it]`. The rate is a running mean of
the last steps; the clock before it, in whole seconds, is of all steps so far.
"""

import re
from collections.abc import Iterator
from typing import NamedTuple

from analysis.logs.parsing.fields import number
from analysis.logs.parsing.logfile import Log

FINE = 100  # seconds, of which a whole one is 1 %
COUNT = (  # what stands behind a bar's description and its blocks
    rb"\|[^\r\n|]{0,900}\| (\d{1,9})/(\d{1,9}) \[(?:(\d{1,4}):)?(\d\d):(\d\d)<"
    rb"(?=[^\r\n\]]{1,40}(?:it/s|s/it)\])"
)


class Bar(NamedTuple):
    """A progress bar as it was drawn: its offset in the log, its steps and those it should reach,
    its clock, and what the description's group says of the epoch (0 where it has none)."""

    at: int
    steps: int
    planned: int
    elapsed_s: int
    epoch: int


def read_bars(log: Log, description: bytes) -> Iterator[Bar]:
    """Yields the progress bars of a log. Of several that stand at one count, one after the other,
    the first counts: the time of a later one is also that of saving or evaluating.

    description: a pattern for what stands before the bar's blocks; its one group, if any, is the
    epoch.
    """
    latest = None
    for at, match in log.matches(re.compile(description + COUNT)):
        *epoch, steps, planned, hours, minutes, seconds = (
            int(number(group or b"0")) for group in match.groups()
        )
        elapsed_s = 3600 * hours + 60 * minutes + seconds
        bar = Bar(at, steps, planned, elapsed_s, epoch[0] if epoch else 0)
        if latest is None or bar[1:3] != latest[1:3] or bar.epoch != latest.epoch:
            yield bar
            latest = bar
