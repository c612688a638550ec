"""The steady step time: after the warm-up that the data show, whatever spikes. Torch-free.

The trainer writes it into training_metrics.json, and every table takes it from the logs: one rule.
"""

import math
from dataclasses import dataclass
from functools import cache
from typing import NamedTuple

import numpy as np

from base.intervals import Interval
from parallel.measure.slower import OF_NORMAL
from parallel.measure.step_changes import FEWEST, NOTABLE, Change, Period, change_of, period_of

SPIKE_MADS = 5.0  # robust standard deviations above the median that make a step a spike
SPIKE_SHARE = 0.05  # and at least this share above it, or a very even run has "spikes" of noise
RISEN = 0.2  # how far step times may change before no single time is the run's
MIN_STEADY = 6  # the fewest points of which min and max bracket the median with 95 % confidence


class Window(NamedTuple):
    """A range of iterations to use: the first and the last, by the numbers in the log."""

    first: int
    last: int


@dataclass(frozen=True)
class Steady:
    """A steady step time. `ci95` is None where there are too few points for one.

    step_s: median seconds per iteration; n: how many logged iterations it is of; first: index of
    the first of them; spikes: how many of them are outliers above (evaluation, checkpoints).
    settled: False where the steps were still getting faster: the warm-up was not over.
    independent: how many independent iterations tell as much (`effective_size`).
    change, period: what the steps do beside noise (`step_changes`).
    single: False where they change by more than RISEN, so that no one time is the run's. Whoever
    states a window gets its time.
    """

    step_s: float
    n: int
    ci95: Interval | None
    first: int
    spikes: int
    settled: bool = True
    independent: float = math.inf
    change: Change | None = None
    period: Period | None = None
    single: bool = True


def spike_bound(step_s: np.ndarray) -> float:
    """Returns the seconds above which a step is a spike of these."""
    middle = float(np.median(step_s))
    mad = OF_NORMAL * float(np.median(np.abs(step_s - middle)))
    return middle + max(SPIKE_MADS * mad, SPIKE_SHARE * middle)


def warmup_end(step_s: np.ndarray) -> int:
    """Returns how many iterations at the start are warm-up.

    First the truncation that MSER chooses (White 1997, "An effective truncation heuristic for bias
    reduction in simulation output"): the number d of iterations to drop, up to half of all n, that
    minimises the standard error of the mean of the rest, sum of squares / (n - d)^2, with spikes
    cut to the bound that the last half sets. Then only up to the last of these iterations that is
    slow enough to be a spike of the rest, and not where three in four up to there are faster than
    the rest: a run that slows down later keeps its fast start, also one with spikes.
    """
    n = len(step_s)
    if n < 4:
        return int(n > 1)  # the first iteration compiles and allocates
    capped = np.minimum(step_s, spike_bound(step_s[n // 2 :]))
    remaining = np.arange(n, 0, -1)  # points that remain when 0, 1, ... are dropped
    total, squares = np.cumsum(capped[::-1])[::-1], np.cumsum(capped[::-1] ** 2)[::-1]
    error = (squares - total**2 / remaining) / remaining.astype(float) ** 2
    dropped = int(np.argmin(error[: n // 2 + 1]))
    start, rest = step_s[:dropped], step_s[dropped:]
    ends = np.flatnonzero(start > spike_bound(rest)) + 1
    fast = np.cumsum(start < float(np.median(rest)) / (1 + NOTABLE))
    ends = ends[(ends < FEWEST) | (4 * fast[ends - 1] < 3 * ends)]
    return int(ends[-1]) if len(ends) else 0


@cache
def _median_rank(n: int) -> int:
    """Returns the largest rank so that the rank-th smallest and the rank-th largest of n points
    bracket the median with 95 % confidence."""
    if n > 1000:  # the normal approximation: from here on that rank or the one before
        return math.floor(n / 2 - 0.98 * math.sqrt(n))
    # Of the 2^n ways in which points lie below the median or not: those with `rank` of them below,
    # and those with at most so many.
    rank, combinations, tail = 0, 1, 1
    while 2 * tail <= 0.05 * 2**n:
        rank += 1
        combinations = combinations * (n - rank + 1) // rank
        tail += combinations
    return max(rank, 1)


def effective_size(values: np.ndarray) -> float:
    """Returns how many independent values would tell the median as well as these n, in the order in
    which they came: n / (1 + 2 sum of rho_k), n at most.

    Whether the median's interval holds is a matter of how many values lie below the median, so
    rho_k is the autocorrelation of the signs of value less median, k apart: n for independent
    steps, few for a run that drifts. An outlier is a sign like any other. The sum is Geyer's
    initial monotone sequence (1992, "Practical Markov Chain Monte Carlo", section 3.3): the pairs
    rho_2m + rho_2m+1 up to the first that is not positive, none larger than the one before.
    """
    n = len(values)
    signs = np.sign(values - np.median(values))
    signs -= signs.mean()
    if not signs.any():
        return float(n)
    spectrum = np.fft.rfft(signs, 2 * n)  # padded, so that no lag wraps around
    covariances = np.fft.irfft(np.abs(spectrum) ** 2, 2 * n)[: n - n % 2]
    pairs = np.minimum.accumulate(covariances.reshape(-1, 2).sum(axis=1) / covariances[0])
    return n / max(2.0 * pairs[pairs > 0].sum() - 1.0, 1.0)


def median_ci95(values: np.ndarray, effective: float | None = None) -> Interval | None:
    """Returns a 95 % interval on the median that assumes no distribution; None below six points,
    whose range covers less.

    It goes from the k-th smallest to the k-th largest, with the largest k whose coverage is at
    least 95 %: the number of n independent points below the median is binomial(n, 1/2).

    `effective`: the `effective_size` of values that are not independent. The interval is between
    the quantiles that so many points would have.
    """
    n = len(values)
    size = n if effective is None else int(effective)
    if size < MIN_STEADY:
        return None
    rank = math.floor((_median_rank(size) - 0.5) * n / size + 0.5)
    ordered = np.sort(values)
    return Interval(float(ordered[rank - 1]), float(ordered[n - rank]))


def steady(
    step_s: np.ndarray,
    skipped: np.ndarray | None = None,
    iteration: np.ndarray | None = None,
    window: Window | None = None,
) -> Steady | None:
    """Returns the steady step time, by which every table here is made; None where nothing was
    timed.

    It is the median of `steady_iterations`: a spike (evaluation, checkpoint) moves it by one rank
    at most, and is counted. Its interval is `median_ci95`'s.

    `window`: inclusive, in the log's own iteration numbers, instead of dropping any.
    """
    step_s = np.asarray(step_s, dtype=float)
    indices = steady_iterations(step_s, skipped, iteration, window)
    if not len(indices):
        return None
    times = step_s[indices]
    numbers = (np.arange(len(step_s)) if iteration is None else np.asarray(iteration))[indices]
    change = change_of(times, numbers)
    earlier, later = change[:2] if change else (1.0, 1.0)
    is_far = max(earlier, later) > (1 + RISEN) * min(earlier, later)
    spikes = int(np.sum(times > spike_bound(times)))
    independent = effective_size(times)
    return Steady(
        step_s=float(np.median(times)),
        n=len(times),
        ci95=median_ci95(times, independent),
        first=int(indices[0]),
        spikes=spikes,
        settled=window is not None or later >= earlier,
        independent=independent,
        change=change,
        period=period_of(times, numbers),
        single=window is not None or not is_far,
    )


def steady_iterations(
    step_s: np.ndarray,
    skipped: np.ndarray | None = None,
    iteration: np.ndarray | None = None,
    window: Window | None = None,
) -> np.ndarray:
    """Returns the indices of the iterations that `steady` takes the median of; empty where nothing
    was timed.

    They are all of the window or, without one, those after the warm-up, less those that skipped the
    optimizer (an fp16 overflow) unless every one did.
    """
    step_s = np.asarray(step_s, dtype=float)
    kept = np.isfinite(step_s)
    if not kept.any():
        return np.empty(0, int)
    if window is not None:
        numbers = np.arange(len(step_s)) if iteration is None else np.asarray(iteration)
        return np.flatnonzero(kept & (numbers >= window.first) & (numbers <= window.last))
    index = np.flatnonzero(kept)
    if skipped is not None and len(skipped) == len(step_s):
        stepped = index[~(np.asarray(skipped, dtype=float)[index] > 0)]  # nan: not known to skip
        index = stepped if len(stepped) else index
    return index[warmup_end(step_s[index]) :]
