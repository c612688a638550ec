"""Intervals of repeats against printed tables and sums made by hand."""

import math

import pytest

from analysis.common.statistics import log_ratio
from benchmarks.planner.held_out import repeat_noise


def test_the_noise_of_repeats_is_the_least_error_of_one_number():
    """1, 2, 4: predicting 2 errs by 1, 0 and 1/2; predicting 1 by 0, 1/2, 3/4: the least."""
    assert repeat_noise([[1.0, 2.0, 4.0]]) == pytest.approx(1.25 / 3)
    assert repeat_noise([[1.0], [2.0, 2.0], [1.0, 2.0]]) == pytest.approx(0.5 / 4)
    assert repeat_noise([[1.0], [2.0]]) is repeat_noise([]) is None
    # Jean Zay's four identical 52B runs, seconds: no single number is nearer than 21.6 %.
    assert repeat_noise([[129, 217, 125, 225]]) == pytest.approx(0.2160, abs=1e-4)


def test_pairs_are_a_t_interval_of_their_own_ratios():
    """ln ratios 1, 2, 3 whatever both drift by."""
    drift = [1.0, 50.0, 9.0]
    a = [d * math.exp(k) for d, k in zip(drift, (1, 2, 3), strict=True)]
    assert log_ratio(a, drift, paired=True) == pytest.approx((2, 2 - 2.484, 2 + 2.484), abs=1e-3)


def test_unpaired_sides_are_welchs():
    """ln times 0, 1, 2 and 0, 2, 4, 6: variances of the means 1/3 and 5/3, 4.08 degrees of freedom,
    t of them is 2.756, times sqrt(2) is 3.898."""
    a, b = ([math.exp(v) for v in side] for side in ((0, 1, 2), (0, 2, 4, 6)))
    assert log_ratio(a, b) == pytest.approx((-2, -2 - 3.898, -2 + 3.898), abs=1e-3)
    assert log_ratio(b, a) == pytest.approx((2, 2 - 3.898, 2 + 3.898), abs=1e-3)
    same = pytest.approx(math.log(0.5))
    assert log_ratio([1.0, 1.0], [2.0, 2.0]) == (same, same, same)
    # One side without variance: the other's degrees of freedom, 1 of two runs.
    middle, low, high = log_ratio([1.0, 1.0], [1.0, math.exp(2)])
    assert (middle, high - low) == pytest.approx((-1, 2 * 12.706), abs=2e-3)
