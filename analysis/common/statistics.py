"""Statistics of repeated runs: the ratio of two configurations' times, as every table has it.

Runs are independent of each other, iterations are not: all iterations of a run share its cores, its
memory and the other load of the machine.
"""

import statistics
import warnings
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

CONFIDENCE = 0.95
FEW_REPEATS = 3  # below this many runs a side, the runs themselves tell no interval


class Estimate(NamedTuple):
    """A value and its 95 % interval."""

    value: float
    low: float
    high: float


def are_pairs(a: Sequence[int | None], b: Sequence[int | None]) -> bool:
    """Returns whether two sides' runs, by the numbers of their repeats, ran in turns: A B A B."""
    return bool(a) and list(a) == list(b) and None not in a and len(set(a)) == len(a)


def ratio_of_medians(a: Sequence[float], b: Sequence[float], paired: bool = False) -> Estimate:
    """Returns the median of a over the median of b, and `log_ratio`'s interval of it.

    Where noise is symmetric in logarithms, the ratio of medians and that of means are one number,
    so the interval is of both. It is widened where it does not hold the ratio of these medians.
    """
    value = statistics.median(a) / statistics.median(b)
    with np.errstate(over="ignore"):
        _, low, high = map(float, np.exp(log_ratio(a, b, paired)))
    return Estimate(value, min(low, value), max(high, value))


def log_ratio(a: Sequence[float], b: Sequence[float], paired: bool = False) -> Estimate:
    """Returns ln(a/b) of two sides' times, two or more runs each, with Student's t interval.

    `paired`: a[i] and b[i] ran one after the other (A B A B), so what drifts slowly cancels in each
    pair. Otherwise Welch's unequal variances (Welch 1947). Logarithms, because speeds differ by
    factors: the interval of a/b is then that of b/a inverted.
    """
    from scipy import stats  # slow to load: only where runs repeat

    x, y = np.log(a), np.log(b)
    mean = float(x.mean() - y.mean())
    if not (np.ptp(x - y) if paired else np.ptp(x) + np.ptp(y)):
        return Estimate(mean, mean, mean)  # t is 0 / 0
    with warnings.catch_warnings(action="ignore"):  # equal times are no loss of precision
        test = stats.ttest_rel(x, y) if paired else stats.ttest_ind(x, y, equal_var=False)
    return Estimate(mean, *map(float, test.confidence_interval(CONFIDENCE)))
