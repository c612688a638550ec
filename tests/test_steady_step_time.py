"""The steady step time finds the warm-up, stands spikes, and its interval covers the truth."""

import math
import re

import numpy as np
import pytest

from analysis.runs.ratio import Side, times_ratio
from base.files import ROOT
from parallel.measure.steady_time import (
    MIN_STEADY,
    Window,
    effective_size,
    median_ci95,
    steady,
    warmup_end,
)


@pytest.mark.parametrize("warmup", range(11))
def test_a_warmup_of_up_to_half_is_dropped_to_the_step(warmup):
    for n in (20, 21):
        for slow in (2.0, np.geomspace(8, 1.5, warmup)):
            x = np.ones(n)
            x[:warmup] = slow
            assert warmup_end(x) == warmup
    assert steady(np.r_[np.full(warmup, 2.0), np.ones(20)]).first == warmup
    assert warmup_end(np.r_[np.full(11, 2.0), np.ones(9)]) == 10  # never more than half


def test_a_run_of_one_to_three_steps_has_a_first_step_and_no_noise_to_judge_by():
    assert [warmup_end(np.ones(n)) for n in range(9)] == [0, 0, 1, 1, 0, 0, 0, 0, 0]


@pytest.mark.parametrize("seed", range(20))
def test_the_warmup_is_whites_truncation_as_far_as_it_is_slow(seed):
    """MSER: the d up to n/2 of least variance over what is left; slow: 5 robust deviations."""
    rng = np.random.default_rng(seed)
    n = int(rng.integers(10, 60))
    x = 1 + rng.uniform(0.1, 2) * np.exp(-np.arange(n) / rng.uniform(1, n / 4))
    x += 0.05 * rng.random(n)
    x[rng.integers(n // 2, n, seed % 4)] += 3  # spikes, which are cut to the last half's bound

    def bound(part):
        middle = np.median(part)
        robust = np.median(np.abs(part - middle)) / 0.6745  # the normal's 75 % point
        return middle + max(5 * robust, 0.05 * middle)

    cut = np.minimum(x, bound(x[n // 2 :]))
    white = min(range(n // 2 + 1), key=lambda d: np.var(cut[d:]) / (n - d))
    slow = [i + 1 for i in range(white) if x[i] > bound(x[white:])]
    assert warmup_end(x) == max(slow, default=0)


def test_a_spike_is_five_robust_deviations_above_and_a_twentieth():
    """The 75 % point of the normal is 0.6745: a MAD of 10 is a deviation of 10 / 0.6745 = 14.83."""
    noisy = [90.0, 100.0, 110.0] * 14
    for highest, spikes in ((174.0, 0), (174.2, 1)):
        assert steady(np.array([*noisy, highest]), window=Window(0, 100)).spikes == spikes
    for highest, spikes in ((105.0, 0), (105.1, 1)):
        assert steady(np.array([*[100.0] * 42, highest]), window=Window(0, 100)).spikes == spikes
        assert warmup_end(np.array([*[highest] * 4, *[100.0] * 42])) == 4 * spikes


def test_a_run_that_gets_two_percent_faster_says_that_the_warmup_is_not_over():
    for later, settled in ((0.985, True), (0.975, False), (1.1, True)):
        x = np.r_[np.ones(10), np.full(10, later)]
        assert steady(x).settled is steady(10 * x).settled is steady(x / 10).settled is settled
        assert steady(x, window=Window(0, 30)).settled  # whoever states a window knows better
        assert steady(x[4:15]).settled  # eleven points are too few
        assert steady(x[4:16]).settled is settled
    order = [3, 8, 0, 6, 1, 9, 4, 7, 2, 5]
    noisy = np.r_[np.linspace(0.9, 1.1, 10)[order], np.linspace(0.87, 1.07, 10)[order]]
    assert steady(noisy).settled  # 3 % faster, which is less than its noise


def test_a_change_of_more_than_a_fifth_leaves_no_single_time_but_in_a_window():
    for later, single in ((1.19, True), (1.21, False), (0.82, False), (0.84, True)):
        x = np.r_[np.ones(18), np.full(12, later)]
        time = steady(x)
        assert time.change == (1.0, later, 18) and time.single is single
        assert steady(x, window=Window(0, 30)).single
    assert steady(np.r_[np.ones(5), np.full(5, 2.0)]).change is None  # too few


def test_a_far_change_is_told_also_where_noise_is_rough():
    rough = np.array([0.9, 1.1, 0.95, 1.2, 0.8, 1.05, 1, 0.92, 1.1])
    for factor, changed in ((1.6, True), (1.1, False), (0.9, False)):
        time = steady(np.r_[rough, factor * rough])
        assert (time.change is not None) is changed


def test_the_interval_covers_the_median_nineteen_times_in_twenty():
    rng = np.random.default_rng(2)
    for n in (6, 25, 200, 1500):
        inside = 0
        for _ in range(1000):
            low, high = median_ci95(rng.lognormal(size=n))
            inside += low <= 1.0 <= high
        assert inside >= 935  # 950 less two standard errors


def runs_that_drift(correlation, n, count, seed=0):
    """Step times of runs, (count, n): 3 % of noise whose next step has so much of the last one's
    (AR 1). Its sum of correlations makes n (1 - correlation) / (1 + correlation) independent."""
    rng = np.random.default_rng(seed)
    noise = rng.normal(size=(n, count))
    for i in range(1, n):
        noise[i] = correlation * noise[i - 1] + math.sqrt(1 - correlation**2) * noise[i]
    return np.exp(0.03 * noise.T)


def documented():
    """The rows of the table in docs/results.md: share of the last step's noise, steps, shares of
    pairs without a verdict and of the others that hold 1, now and with all steps as independent."""
    section = (ROOT / "docs" / "results.md").read_text().split("## How sure a step time is")[1]
    rows = re.findall(r"^\| ([\d. |]+) \|$", section.split("##")[0], re.MULTILINE)
    return [tuple(map(float, row.split(" | "))) for row in rows]


@pytest.mark.parametrize(("correlation", "n", "silent", "covered", "before"), documented())
def test_the_ratio_of_equal_runs_may_be_one_also_where_steps_follow_each_other(
    correlation, n, silent, covered, before
):
    """In 300 pairs, which may differ from the page's by three standard errors."""
    runs = runs_that_drift(correlation, int(n), 600)
    times = [steady(run, window=Window(0, int(n))) for run in runs]
    independent = [median_ci95(run) for run in runs]
    shares = []
    for intervals in ([time.ci95 for time in times], independent):
        sides = [Side("", 1, (t.step_s,), i) for t, i in zip(times, intervals, strict=True)]
        ratios = [times_ratio(a, b) for a, b in zip(sides[::2], sides[1::2], strict=True)]
        known = [ratio.interval for ratio in ratios if ratio.interval]
        holds = [interval.low <= 1 <= interval.high for interval in known]
        shares += [(1 - len(known) / 300, 300), (np.mean(holds), len(known))]
    wanted = (silent, covered, 0.0, before)
    for (share, count), on_page in zip(shares, wanted, strict=True):
        error = math.sqrt(max(on_page * (1 - on_page), 0.01) / count)
        assert share == pytest.approx(on_page, abs=3 * error)
    assert covered >= 0.9 or n < 50


def test_steps_that_follow_each_other_count_as_fewer():
    independent = np.random.default_rng(0).lognormal(size=1000)
    assert effective_size(independent) > 700
    for correlation, wanted in ((0.6, 250), (0.9, 53)):
        found = np.median([effective_size(run) for run in runs_that_drift(correlation, 1000, 40)])
        assert wanted < found < 2 * wanted  # signs follow each other less than the times do
    spiked = independent.copy()
    spiked[independent > 3] *= 100
    assert effective_size(spiked) == effective_size(independent)
    assert effective_size(np.arange(20.0)) < 4 and effective_size(np.ones(20)) == 20
    # By hand: the signs + + + - - - have 6, 3, 0 and -3 as sums of products, a lag apart.
    assert effective_size(np.array([3.0, 2, 4, 1, 0, 1])) == pytest.approx(6 / (2 * 1.5 - 1))
    assert [effective_size(np.arange(n)) for n in (1, 2)] == [1, 2]


def test_an_interval_of_fewer_points_is_between_their_quantiles():
    values = np.arange(1.0, 101.0)
    for effective, wanted in ((100, (40, 61)), (25, (30, 71)), (6.9, (8, 93)), (5.9, None)):
        assert median_ci95(values, effective) == wanted


@pytest.mark.parametrize("n", [*range(6, 30), 100, 999, 1000, 1001, 1500, 2501])
def test_its_rank_is_the_largest_that_covers_95_percent_above_a_thousand_steps_or_one_less(n):
    low, high = median_ci95(np.arange(1, n + 1))
    assert low == n + 1 - high

    def outside(k):  # 2^n times P(the median is outside of k-th smallest .. largest), binomial
        return 2 * sum(math.comb(n, i) for i in range(k))

    k = int(low)
    assert 20 * outside(k) <= 2**n < 20 * outside(k + (2 if n > 1000 else 1))
    assert median_ci95(np.ones(MIN_STEADY - 1)) is None


def test_skipped_iterations_are_left_out_unless_all_were():
    x, skipped = np.array([1.0] * 10 + [5.0] * 10), np.array([0] * 10 + [1] * 10)
    assert steady(x, skipped).step_s == 1.0
    assert steady(x, np.ones(20)).n > 0
    assert steady(x, np.full(20, np.nan)).n == 20  # the log does not say
    assert steady(x, np.ones(3)).n == 20  # nor for which iterations these are
    assert steady(np.r_[np.nan, x, np.inf]).n == 20  # what has no time is left out


def test_of_times_that_no_step_has_nothing_is_steady():
    """A log that states the mean of the run alone has iterations without times."""
    assert steady(np.empty(0), iteration=np.arange(5.0), window=Window(0, 0)) is None


def test_a_window_is_in_the_logs_own_numbers():
    x, numbers = np.arange(10.0), np.arange(100, 110)
    time = steady(x, iteration=numbers, window=Window(103, 105))
    assert (time.step_s, time.n, time.first) == (4.0, 3, 3)
    assert steady(x, window=Window(3, 5)) == time  # from 0 where the log has no numbers
    assert steady(x, np.ones(10), numbers, Window(103, 105)) == time
    assert steady(x, iteration=numbers, window=Window(500, 600)) is None
    assert steady(np.full(5, np.nan)) is steady(np.empty(0)) is None  # an untimed log
