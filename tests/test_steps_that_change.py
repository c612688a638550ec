"""A jump, a growth and a period are found from step times alone, and seldom where none is."""

import numpy as np
import pytest

from parallel.measure.steady_time import Window, steady
from parallel.measure.step_changes import change_of, period_of
from tests.tools import steady_campaign

NOISE = np.random.default_rng(7).normal(size=400)


def found(times, finder, first=1, interval=1):
    return finder(times, first + interval * np.arange(len(times)))


def test_a_jump_is_told_with_its_iteration_and_both_times():
    times = 10 + 0.1 * NOISE[:100]
    assert found(times, change_of) is None
    times[60:] += 1
    change = found(times, change_of, first=501, interval=10)
    assert change.at == 501 + 600
    assert (change.before_s, change.after_s) == pytest.approx((10, 11), abs=0.05)
    times[60:] -= 2
    assert found(times, change_of).after_s == pytest.approx(9, abs=0.05)
    time = steady(np.r_[times], window=Window(0, 59))
    assert time.change is None and time.step_s == pytest.approx(10, abs=0.05)


def test_a_growth_has_no_place():
    change = found(np.linspace(10, 12, 100) + 0.1 * NOISE[:100], change_of)
    assert change.at is None
    assert (change.before_s, change.after_s) == pytest.approx((10, 12), abs=0.1)


@pytest.mark.parametrize("place", (4, 5, 10, 16))
def test_a_far_jump_is_no_outlier_also_near_an_end_of_a_short_run(place):
    times = 1 + 0.02 * NOISE[:20]
    times[place:] += 0.5
    assert found(times, change_of, first=0).at == place


def test_a_wave_of_noise_that_follows_itself_is_no_jump_and_one_beyond_it_is():
    noise = np.zeros(50)
    for i in range(1, 50):
        noise[i] = 0.8 * noise[i - 1] + 0.02 * NOISE[i]
    assert found(1 + noise, change_of) is None
    assert found(1 + noise + 0.15 * (np.arange(50) >= 20), change_of).at == 21


@pytest.mark.parametrize("scale", (1e-3, 1.0, 1e3))
def test_a_change_below_two_percent_and_one_that_outliers_make_is_none(scale):
    for later, is_change in ((1.019, False), (1.021, True), (0.979, True)):
        times = scale * np.r_[np.ones(20), np.full(20, later)]
        assert (found(times, change_of) is not None) is is_change
    times = scale * (1 + 0.01 * NOISE[:40])
    times[30:33] *= 50
    assert found(times, change_of) is None
    assert found(np.ones(40), change_of) is found(np.ones(40), period_of) is None


@pytest.mark.parametrize("every", (2, 3, 10, 50))
def test_a_period_is_told_with_its_length_and_its_first_step(every):
    times = 1 + 0.01 * NOISE
    assert found(times, period_of) is None
    times[every - 1 :: every] *= 1.05
    period = found(times, period_of)
    assert (period.every, period.first) == (every, every)
    assert period.longer == pytest.approx(0.05, abs=0.01)
    period = found(times, period_of, first=1000, interval=10)
    assert (period.every, period.first) == (10 * every, 1000 + 10 * (every - 1))


def test_a_period_is_counted_in_iterations_also_where_some_are_left_out():
    numbers = np.delete(np.arange(1, 401), [4, 5, 77, 150, 151, 152, 300])
    times = 1 + 0.01 * NOISE[: len(numbers)] + 0.05 * (numbers % 20 == 0)
    period = period_of(times, numbers)
    assert (period.every, period.first) == (20, 20)


def test_three_long_steps_and_outliers_are_no_period():
    times = 1 + 0.01 * NOISE[:60]
    times[[15, 30, 45]] *= 1.5
    assert found(times, period_of) is None
    times = np.exp(0.02 * np.random.default_rng(1).standard_t(2, size=300))
    assert found(times, period_of) is None


def test_steps_without_numbers_and_of_one_number_have_places_of_their_own():
    times = 1 + 0.05 * (np.arange(40) % 5 == 0)
    assert period_of(times, np.zeros(40)).every == 5
    assert period_of(times, np.arange(40.0)[::-1]).every == 5


@pytest.mark.parametrize("n", (50, 200))
def test_false_alarms_are_seldom_and_changes_found_as_on_the_page(n):
    """100 runs of each kind; docs/results.md has the table of 1,000."""
    for row in steady_campaign.rows(100, (n,)):
        assert row["false_change"] <= 0.04 and row["false_period"] <= 0.04, row
        if n == 200 and row["noise"] != "heavy-tailed":
            assert min(row["jump"], row["growth"]) >= 0.95 and row["period"] >= 0.85, row
