"""The steady step time finds the warm-up, stands spikes, and its interval covers the truth."""

import math

import numpy as np
import pytest

from parallel.steady import MIN_STEADY, median_ci95, steady, warmup_end


@pytest.mark.parametrize("warmup", [0, 1, 3, 10, 40])
def test_the_warmup_is_found_where_it_was_put(warmup):
    rng = np.random.default_rng(warmup)
    x = 1 + 0.01 * rng.standard_normal(100)
    x[:warmup] += np.linspace(4, 0.5, warmup)
    assert warmup <= warmup_end(x) <= warmup + 10
    assert steady(x).step_s == pytest.approx(1, abs=0.01)


def test_checkpoint_spikes_do_not_move_it_and_are_counted():
    rng = np.random.default_rng(1)
    x = 1 + 0.01 * rng.standard_normal(200)
    x[19::20] += 30
    time = steady(x)
    assert time.step_s == pytest.approx(1, abs=0.005)
    assert time.spikes in (9, 10)


def test_the_interval_covers_the_median_nineteen_times_in_twenty():
    rng = np.random.default_rng(2)
    for n in (6, 25, 200, 1500):
        inside = 0
        for _ in range(1000):
            low, high = median_ci95(rng.lognormal(size=n))
            inside += low <= 1.0 <= high
        assert inside >= 935  # 950 less two standard errors


@pytest.mark.parametrize("n", [6, 7, 10, 25, 100, 999])
def test_its_rank_is_the_largest_that_covers_95_percent(n):
    def coverage(k):  # P(k-th smallest <= median <= k-th largest), binomial(n, 1/2)
        return 1 - 2 * sum(math.comb(n, i) for i in range(k)) / 2**n

    low, high = median_ci95(np.arange(1, n + 1))
    assert low == n + 1 - high
    assert coverage(int(low) + 1) < 0.95 <= coverage(int(low))


def test_fewer_than_six_points_have_no_interval():
    assert median_ci95(np.ones(MIN_STEADY - 1)) is None
    assert median_ci95(np.arange(MIN_STEADY)) == (0, MIN_STEADY - 1)


def test_skipped_iterations_are_left_out_unless_all_were():
    x, skipped = np.array([1.0] * 10 + [5.0] * 10), np.array([0] * 10 + [1] * 10)
    assert steady(x, skipped).step_s == 1.0
    assert steady(x, np.ones(20)).n > 0


def test_a_window_is_in_the_logs_own_numbers():
    x, numbers = np.arange(10.0), np.arange(100, 110)
    time = steady(x, iteration=numbers, window=(103, 105))
    assert (time.step_s, time.n) == (4.0, 3)
    assert steady(x, iteration=numbers, window=(500, 600)) is None


def test_the_seed_rule_is_the_mean_of_all_in_whole_seconds():
    assert steady(np.array([200.0, 127.4, 126.9]), rule="seed").step_s == 151.0


def test_an_untimed_log_has_no_steady_time():
    assert steady(np.full(5, np.nan)) is None
    assert steady(np.empty(0)) is None
