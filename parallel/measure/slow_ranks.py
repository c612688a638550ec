"""Which rank of a run is slow, and in what: computing, loading data, or neither. Torch-free.

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
from pathlib import Path
from statistics import mean, median
from typing import Any, NamedTuple

from base.errors import UsageError
from parallel.measure.slower import is_slower
from parallel.record.ends import RUNNING
from parallel.record.reader import read_rows, read_run
from parallel.record.schema import SLOW_COLUMNS, SLOW_RANKS

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


# --- afterwards ----------------------------------------------------------------------------------


def read(folder: Path) -> list[dict[str, Any]]:
    """Returns the rows of a run's slow_ranks.csv; of steps that were run again, the last."""
    path = folder / SLOW_RANKS
    if not path.exists():
        reason = "one rank, no step yet, or a run of an earlier version"
        raise UsageError(f"{folder}: no {SLOW_RANKS}: {reason}")
    rows: dict[tuple[int, str, int], dict[str, Any]] = {}
    for number, row in enumerate(read_rows(path, SLOW_COLUMNS), 2):
        if None in (row[name] for name in SLOW_COLUMNS if name != "node"):
            raise UsageError(f"{path}:{number}: a value is missing")
        while rows and row["first_step"] <= (newest := next(reversed(rows)))[0] != row["last_step"]:
            del rows[newest]
        rows[row["last_step"], row["kind"], row["rank"]] = row
    return [rows[key] for key in sorted(rows)]


def verdicts(folder: Path) -> list[Verdict]:
    """Returns who was slow in a run, the longest first."""
    by_rank: dict[tuple[str, int, str], list[dict[str, Any]]] = defaultdict(list)
    for row in read(folder):  # a restart may have other nodes
        by_rank[row["kind"], row["rank"], row["node"]].append(row)
    slow = [
        verdict(rows)
        for rows in by_rank.values()
        if any(is_slow(rows[max(0, end - WINDOWS) : end]) for end in range(NEED, len(rows) + 1))
    ]
    return sorted(slow, key=lambda verdict: -verdict.n)


def slow_nodes(path: Path) -> list[tuple[str, str, str, str]]:
    """Returns (node, evidence, run, time of the first window) of each rank that was slow in at
    least half of a run's steps, of a running one all that it is to do; none where the run folder
    has no slow_ranks.csv."""
    if not (path / SLOW_RANKS).exists():
        return []
    slow = [verdict for verdict in verdicts(path) if verdict.kind != "link"]
    if not slow:
        return []
    run = read_run(path)
    planned = (run.facts.get("spec") or {}).get("steps")
    steps = planned if run.state == RUNNING and planned else len(run.steps)
    began = {(row["rank"], row["node"]): row["time_utc"] for row in reversed(read(path))}
    return [
        (verdict.node, str(verdict), run.name, began[verdict.rank, verdict.node])
        for verdict in slow
        if verdict.n * STEPS >= steps / 2
    ]
