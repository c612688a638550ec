"""Statistics of repeated runs: the ratio of two configurations' times, as every table has it, and
what the fits of laws share.

Runs are independent of each other, iterations are not: all iterations of a run share its cores, its
memory and the other load of the machine.
"""

import math
import statistics
import warnings
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from base.intervals import Interval

CONFIDENCE = 0.95
FEW_REPEATS = 3  # below this many runs a side, the runs themselves tell no interval


class Estimate(NamedTuple):
    """A value and its 95 % interval."""

    value: float
    low: float
    high: float


def median_of(values: Sequence[float | None] | np.ndarray) -> float | None:
    """Returns the median of the finite values; None where there are none."""
    numbers = np.asarray(values, float)
    numbers = numbers[np.isfinite(numbers)]
    return float(np.median(numbers)) if len(numbers) else None


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
    return Estimate(value, *Interval(low, high).with_value(value))


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


class Bounded(NamedTuple):
    """A value and its 95 % interval, None where the noise is not known; `high` may be infinite."""

    value: float
    interval: Interval | None

    def mapped(self, function: Callable[[float], float]) -> "Bounded":
        """Returns what a function that only rises, or only falls, makes of the value and ends."""
        ends = self.interval and Interval(*sorted(map(function, self.interval)))
        return Bounded(function(self.value), ends)


def relative_least_squares(terms: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Returns the coefficients that make each row's sum nearest to 1, and their covariance over the
    square of the noise."""
    scale = np.linalg.norm(terms, axis=0)  # terms of thousands of GPUs differ by powers of ten
    inverse = np.linalg.pinv(terms / scale)
    return inverse.sum(axis=1) / scale, inverse @ inverse.T / np.outer(scale, scale)


def fieller(a: float, b: float, aa: float, ab: float, bb: float) -> Interval:
    """Returns what of Fieller's interval (1954) of a / b is not below 0. aa, ab and bb are the
    variances of both and their covariance, times the square of Student's t."""
    # All r for which |a - r b| is within t standard errors: p r^2 - 2 q r + c <= 0.
    p, q, c = b**2 - bb, a * b - ab, a**2 - aa
    end = q + math.sqrt(max(q**2 - p * c, 0.0))
    high = max(end / p, 0.0) if p > 0 else math.inf
    return Interval(max(c, 0.0) / end if end > 0 else 0.0, high)


def t_quantile(degrees: float) -> float:
    """Returns Student's t below which, and above whose negative, CONFIDENCE of all values lie."""
    from scipy.special import stdtrit  # slow to load

    return float(stdtrit(min(degrees, 1e9), (1 + CONFIDENCE) / 2))
