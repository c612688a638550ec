"""May I believe this run? Its verdict with the line that proves it, and its steady step time."""

import math
from dataclasses import dataclass

import numpy as np

SPIKE_MADS = 5.0  # robust standard deviations above the median that make a step a spike
SPIKE_SHARE = 0.05  # and at least this share above it, or a very even run has "spikes" of noise
MIN_STEADY = 6  # the fewest points of which min and max bracket the median with 95 % confidence


@dataclass(frozen=True)
class Steady:
    """A steady step time. `ci95` is None where there are too few points for one.

    step_s: median seconds per iteration; n: how many logged iterations it is of; first: index of
    the first of them; spikes: how many of them are outliers above (evaluation, checkpoints).
    settled: False when the step time still fell in the last half, so the warm-up was not over.
    """

    step_s: float
    n: int
    ci95: tuple[float, float] | None
    first: int
    spikes: int
    settled: bool = True


def _spike_bound(step_s: np.ndarray) -> float:
    middle = float(np.median(step_s))
    mad = 1.4826 * float(np.median(np.abs(step_s - middle)))
    return middle + max(SPIKE_MADS * mad, SPIKE_SHARE * middle)


def warmup_end(step_s: np.ndarray) -> int:
    """How many iterations at the start are warm-up: the truncation that MSER chooses.

    White 1997, "An effective truncation heuristic for bias reduction in simulation output": drop
    the d first points that minimise the standard error of the mean of the rest, sum of squares /
    (n - d)^2. Spikes are cut to the bound that the run's last half sets, so that a checkpoint
    near the end does not count as noise that only a longer warm-up could outweigh. At most half
    of the points are ever dropped: n // 2 means that the run may not have settled at all.
    """
    n = len(step_s)
    if n < 4:
        return min(1, n - 1) if n > 1 else 0  # the first iteration compiles and allocates
    x = np.minimum(step_s, _spike_bound(step_s[n // 2 :]))
    left = np.arange(n, 0, -1)  # points that remain when d = 0, 1, ... are dropped
    total, squares = np.cumsum(x[::-1])[::-1], np.cumsum(x[::-1] ** 2)[::-1]
    error = (squares - total**2 / left) / left.astype(float) ** 2
    return int(np.argmin(np.maximum(error[: n // 2 + 1], 0.0).round(18)))


def median_ci95(x: np.ndarray) -> tuple[float, float] | None:
    """A 95 % interval on the median that assumes no distribution, from order statistics.

    The number of n independent points below the median is binomial(n, 1/2); the interval is from
    the k-th smallest to the k-th largest with the largest k whose coverage is at least 95 %.
    None below six points: even the whole range then covers less than 95 %.
    """
    n = len(x)
    if n < MIN_STEADY:
        return None
    if n > 1000:  # the normal approximation, exact to a rank from here on
        k = int(math.floor(n / 2 - 0.98 * math.sqrt(n)))
    else:
        tail, k = 0, 0
        while (tail := tail + math.comb(n, k)) * 2 <= 0.05 * 2**n:
            k += 1
    k = max(k, 1)
    ordered = np.sort(x)
    return float(ordered[k - 1]), float(ordered[n - k])


def steady(
    step_s: np.ndarray,
    skipped: np.ndarray | None = None,
    window: tuple[int, int] | None = None,
) -> Steady | None:
    """THE steady step time, by which every table here is made; None where nothing was timed.

    1. Iterations without a time are left out, and so are those that skipped the optimizer (an
       fp16 overflow), unless every one did. 2. The warm-up is found by `warmup_end` and dropped.
    3. The median of the rest: spikes move it by a rank at most, and are counted. 4. Its interval
    is `median_ci95`'s. `window` (first, last), 0-based and inclusive as logged, replaces 1 and 2.
    """
    step_s = np.asarray(step_s, dtype=float)
    if window is not None:
        x = step_s[window[0] : window[1] + 1]
        x, first, settled = x[np.isfinite(x)], window[0], True
    else:
        kept = np.isfinite(step_s)
        if skipped is not None and len(skipped) == len(step_s):
            stepped = kept & ~(np.nan_to_num(np.asarray(skipped, dtype=float)) > 0)
            kept = stepped if stepped.any() else kept
        where = np.flatnonzero(kept)
        x = step_s[where]
        drop = warmup_end(x)
        first = int(where[drop]) if len(where) else 0
        settled = len(x) < 12 or drop < len(x) // 2 or _flat(x[drop:])
        x = x[drop:]
    if not len(x):
        return None
    spikes = int(np.sum(x > _spike_bound(x)))
    return Steady(float(np.median(x)), len(x), median_ci95(x), first, spikes, settled)


def _flat(x: np.ndarray) -> bool:
    """Whether the second half's median lies within the first half's interval."""
    half = len(x) // 2
    interval = median_ci95(x[:half])
    return interval is None or interval[0] <= float(np.median(x[half:]))
