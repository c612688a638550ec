"""When a rank of a run is slow, and in what: computing, loading data, or neither. Python alone.

own_times.py gathers, for windows of STEPS steps, what each rank's step spent in its own computing
and in waiting for its batches. A window counts against a rank

compute   when it computes longer than the other ranks of its pipeline stage, by a share of their
          time,
data      when it waits longer for batches than they, by a share of a step,

and slower.py says that this share stands out of its spread over the faster half of the ranks. It
counts as

link      when neither holds on any rank and a step takes longer for as much computing than in
          earlier windows, by more than LINK: the network, or other work on the cores. No rank is
          named.

Steps are compared one by one, so what slows all ranks alike cancels. A rank is slow when NEED of
WINDOWS windows in a row count against it and their mean stands out of the mean's noise. The noise
of a window is the robust spread over its steps, divided by sqrt(STEPS). The noise of the mean of n
windows is that of one, divided by sqrt(n). Of a link, the noise is the spread over earlier windows,
and three windows do not lower it: other work on the cores lasts for many steps. A stage's only rank
is compared with nobody.
"""

import math
from collections import defaultdict
from collections.abc import Iterable
from statistics import mean, median
from typing import Any, NamedTuple

from parallel.measure.slower import is_slower

STEPS, NEED, WINDOWS = 5, 3, 4
LINK = 0.25  # of a step; the other bars are those of slower.py
ENOUGH = 4  # earlier windows, to know how long a step takes for what is neither
NOBODY = -1  # the rank of a window that counts as link

_WORDS = {"compute": "computes", "data": "waits for data"}


class Verdict(NamedTuple):
    """A rank that was slow in `n` of `windows` windows, steps `first` to `last`.

    longer: the median of the shares by which it took longer: shares of the others' computing
    (compute), or of a step (data, link).
    """

    kind: str
    rank: int
    node: str
    longer: float
    n: int
    windows: int
    first: int
    last: int

    def __str__(self) -> str:
        windows = f"in {self.n} of {self.windows} windows (steps {self.first}-{self.last})"
        if self.kind == "link":
            return (
                f"slow link: a step takes {self.longer:.0%} longer on no rank's own account (the"
                f" network, or other work on the cores), {windows}"
            )
        base = " of a step" if self.kind == "data" else ""
        words = f"{_WORDS[self.kind]} {self.longer:.0%}{base} longer"
        return f"slow rank: rank {self.rank} on node {self.node} {words}, {windows}"


def verdict(rows: list[dict[str, Any]]) -> Verdict:
    """Returns what rows of one kind and rank say together."""
    first, last = rows[0]["first_step"], max(row["last_step"] for row in rows)
    longer = median(row["longer"] for row in rows)
    windows = round((last - first + 1) / STEPS)
    kind, rank, node = (rows[-1][name] for name in ("kind", "rank", "node"))
    return Verdict(kind, rank, node, longer, len(rows), windows, first, last)


def latest_windows(rows: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """Returns the rows that are among the last WINDOWS windows."""
    rows = list(rows)
    return [row for row in rows if row["last_step"] > rows[-1]["last_step"] - WINDOWS * STEPS]


def is_slow(rows: Iterable[dict[str, Any]]) -> bool:
    """Returns whether rows of one kind and rank are a verdict at the last of them."""
    latest = latest_windows(rows) if rows else []
    if len(latest) < NEED:
        return False
    noise = math.hypot(*(row["noise"] for row in latest)) / len(latest)
    return is_slower(mean(row["longer"] for row in latest), noise)


def verdicts(rows: Iterable[dict[str, Any]]) -> list[Verdict]:
    """Returns who was slow in a run, by the rows of all of its windows, the longest first."""
    by_rank: dict[tuple[str, int, str], list[dict[str, Any]]] = defaultdict(list)
    for row in rows:  # a restart may have other nodes
        by_rank[row["kind"], row["rank"], row["node"]].append(row)
    slow = [
        verdict(rows)
        for rows in by_rank.values()
        if any(is_slow(rows[max(0, end - WINDOWS) : end]) for end in range(NEED, len(rows) + 1))
    ]
    return sorted(slow, key=lambda verdict: -verdict.n)
