"""Statistics of repeated runs: the ratio of two configurations' times.

Runs are independent of each other, iterations are not: all iterations of a run share its cores, its
memory and the other load of the machine.
"""

import warnings
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

CONFIDENCE = 0.95


class Estimate(NamedTuple):
    """A value and its 95 % interval."""

    value: float
    low: float
    high: float


def log_ratio(a: Sequence[float], b: Sequence[float], paired: bool = False) -> Estimate:
    """ln(a/b) of two sides' times, two or more runs each, with Student's t interval.

    `paired`: a[i] and b[i] ran one after the other (A B A B), so what drifts slowly cancels in each
    pair. Otherwise Welch's unequal variances (Welch 1947). Logarithms, because speeds differ by
    factors: the interval of a/b is then that of b/a inverted.
    """
    from scipy import stats  # slow to load: only where runs repeat

    x, y = np.log(a), np.log(b)
    middle = float(x.mean() - y.mean())
    if not (np.ptp(x - y) if paired else np.ptp(x) + np.ptp(y)):
        return Estimate(middle, middle, middle)  # t is 0 / 0
    with warnings.catch_warnings(action="ignore"):  # equal times are no loss of precision
        test = stats.ttest_rel(x, y) if paired else stats.ttest_ind(x, y, equal_var=False)
    return Estimate(middle, *map(float, test.confidence_interval(CONFIDENCE)))
