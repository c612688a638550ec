"""The laws of scaling: each gives back its own parameters, and its intervals hold what is true."""

import math

import numpy as np
import pytest

from analysis.runs.scaling_curve import karp_flatt
from analysis.runs.scaling_laws import AMDAHL, GUSTAFSON, LAWS, USL_STRONG, fit
from tests.tools.scaling_law_campaign import campaign, speedup

SIZES = (1.0, 2.0, 4.0, 8.0, 64.0)


def exact(law, scaling, parameters, sizes=SIZES, repeats=1):
    """The fit of times that follow the law without noise."""
    works = {n: n if scaling == "weak" else 1.0 for n in sizes}
    times = {n: [3.0 * works[n] / speedup(law, parameters, n)] * repeats for n in sizes}
    return fit(law, scaling, times).value


@pytest.mark.parametrize("share", [0.0, 0.05, 0.3])
def test_each_law_gives_back_its_own_parameters(share):
    for scaling, laws in LAWS.items():
        for law in laws:
            parameters = [share, 2e-4][: len(law.parameters)]
            found = exact(law, scaling, parameters)
            values = [found.parameter(i).value for i in range(len(parameters))]
            assert values == pytest.approx(parameters, abs=1e-9)
            for n in (2, 128, 1024):
                s = speedup(law, parameters, n)
                assert found.speedup(n).value == pytest.approx(s)
                work = n if scaling == "weak" else 1
                assert found.seconds(n).value == pytest.approx(3.0 * work / s)
    assert karp_flatt(1 / (share + (1 - share) / 8), 8) == pytest.approx(share)


def test_limit_and_peak_by_hand():
    """1 / 0.04 = 25; the square root of (1 - 0.05) / 0.0002 is 68.92."""
    found = exact(AMDAHL, "strong", [0.04])
    assert found.limit.value == pytest.approx(25) and found.peak is None
    found = exact(USL_STRONG, "strong", [0.05, 2e-4])
    assert found.peak.value == pytest.approx(68.92, abs=0.005) and found.limit is None
    assert exact(GUSTAFSON, "weak", [0.04]).limit is None


def test_the_interval_of_a_share_by_hand():
    """One GPU 1.0 and 1.2 s, two GPUs 0.6 and 0.5 s: the normal equations of the rows 1/t and
    (1 - 1/N)/t, and the end of the interval is t standard errors away."""
    times = {1.0: [1.0, 1.2], 2.0: [0.6, 0.5]}
    found = fit(AMDAHL, "strong", times).value
    z = np.array([[1.0, 0.0], [1 / 1.2, 0.0], [0.5 / 0.6, 0.5 / 0.6], [1.0, 1.0]])
    c = np.linalg.solve(z.T @ z, z.sum(axis=0))
    variance = np.sum((1 - z @ c) ** 2) / 2  # four runs, two unknowns
    covariance = variance * np.linalg.inv(z.T @ z)
    t = 4.302653  # Student's, two degrees of freedom
    high = found.parameter(0).interval.high
    difference = np.array([-high, 1.0])  # c1 - f c0 is t standard errors away from 0 there
    assert abs(difference @ c) == pytest.approx(t * np.sqrt(difference @ covariance @ difference))
    assert found.parameter(0).value == pytest.approx(max(c[1] / c[0], 0.0))
    assert found.parameter(0).interval.low == 0.0


def test_parameters_are_never_below_0_and_no_limit_is_infinite():
    """Times above linear: f would be -0.1."""
    found = fit(AMDAHL, "strong", {1.0: [1.0, 1.01], 2.0: [0.45, 0.451]}).value
    assert found.free_share == pytest.approx(-0.1, abs=0.02)
    assert found.parameter(0).value == 0 and found.limit.value == math.inf
    assert found.parameter(0).interval == (0, 0)
    assert found.speedup(8).value == pytest.approx(8)


def test_too_few_sizes_give_no_parameters_and_too_few_runs_no_interval():
    two = {1.0: [1.0], 2.0: [0.6]}
    none = fit(USL_STRONG, "strong", two)
    assert none.value is None and none.reason.startswith("two sizes cannot give contention sigma")
    exactly = fit(AMDAHL, "strong", two).value
    assert exactly.parameter(0).value == pytest.approx(0.2)  # 0.6 = f + (1 - f) / 2
    assert exactly.noise is None and exactly.parameter(0).interval is None
    known = fit(AMDAHL, "strong", two, noise=0.01).value
    low, high = known.parameter(0).interval
    # 2 S2 = 1.2 with 1 % in each time, f = 2 t2/t1 - 1: 1.2 x 1.96 x 0.01 x sqrt(2) either way
    assert [low, high] == pytest.approx([0.2 - 0.0333, 0.2 + 0.0333], abs=1e-3)


def test_95_percent_intervals_hold_the_truth_in_93_percent_of_1000_trials():
    for row in campaign(1000, seed=7):
        assert row["held"] >= 0.93 and row["n"] >= 950, row
