"""Finds the windows of steps that count against a rank while a run trains, as rank_judge.py
describes. Torch-free.
"""

from collections import defaultdict, deque
from collections.abc import Iterable
from statistics import median
from typing import Any

import numpy as np

from parallel.measure.rank_judge import (
    ENOUGH,
    LINK,
    NEED,
    NOBODY,
    STEPS,
    WINDOWS,
    Verdict,
    is_slow,
    latest_windows,
    verdict,
)
from parallel.measure.slower import OF_NORMAL, is_slower, spread
from parallel.record.schema import utc_now


class Judge:
    """The judge on rank 0: it remembers a run's windows and finds the ranks that are slow.

    stages: the pipeline stage of each rank. nodes: the name of each rank's node.
    """

    def __init__(self, stages: list[int], nodes: list[str]):
        self.groups = [np.flatnonzero(np.array(stages) == stage) for stage in sorted({*stages})]
        self.nodes = nodes
        self.rows: dict[tuple[str, int], deque] = defaultdict(lambda: deque(maxlen=WINDOWS))
        self.rests: deque[float] = deque(maxlen=40)  # of windows that count against nobody

    def window(self, times: np.ndarray, last: int) -> tuple[list[dict[str, Any]], list[Verdict]]:
        """Judges the window that ends with step `last`.

        times: seconds (ranks, STEPS, 3): computing, waiting for batches, the whole step. Where
        computing is NaN, waiting for batches alone is judged.

        Returns the rows of slow_ranks.csv, and the new verdicts: each slow rank is told once.
        """
        slow = {("compute", rank): excess for rank, *excess in self._longer(times, 0)}
        slow |= {("data", rank): excess for rank, *excess in self._longer(times, 1)}
        rest_share = _middle(1 - (times[:, :, 0] + times[:, :, 1]).max(0) / times[0, :, 2])
        if not slow and len(self.rests) >= ENOUGH:
            computing = max(1 - rest_share, 0.1)
            share = (rest_share - median(self.rests)) / computing
            if share > LINK:
                noise = spread(self.rests) / computing
                slow["link", NOBODY] = [share, noise * NEED**0.5]  # is_slow divides by sqrt(n)
        if not slow and np.isfinite(rest_share):
            self.rests.append(rest_share)
        rows, new = [], []
        for (kind, rank), (longer, noise) in slow.items():
            node = "" if rank == NOBODY else self.nodes[rank]
            row = {"time_utc": utc_now(), "first_step": last - STEPS + 1, "last_step": last}
            row |= {"kind": kind, "rank": rank, "node": node}
            rows.append(row | {"longer": float(longer), "noise": float(noise)})
            earlier = self.rows[kind, rank]
            was_slow = is_slow(earlier)
            earlier.append(rows[-1])
            if is_slow(earlier) and not was_slow:
                new.append(verdict(latest_windows(earlier)))
        return rows, new

    def _longer(self, times: np.ndarray, column: int) -> Iterable[tuple[int, float, float]]:
        """Yields (rank, share by which its seconds are too many, noise of that share).

        column: that of `times`, 0 for computing or 1 for waiting for batches.
        """
        for ranks in self.groups:
            own_s = times[ranks, :, column]
            if len(ranks) < 2 or np.isnan(own_s).any():
                continue
            usual = np.sort(own_s, axis=0)[(len(ranks) - 1) // 2]  # of two ranks, the faster
            longer = (own_s - usual) / (times[0, :, 2] if column == 1 else np.maximum(usual, 1e-9))
            shares = _middle(longer)
            usual_noise = OF_NORMAL * np.median(-shares[shares <= 0])  # of the faster half
            for index in np.flatnonzero(is_slower(shares, usual_noise)):
                yield int(ranks[index]), shares[index], spread(longer[index]) / STEPS**0.5


def _middle(values: np.ndarray) -> np.ndarray:
    """Returns the median over steps; np.median takes ten times as long, in every window."""
    return np.sort(values)[..., STEPS // 2]
