"""What a run's step times do beside noise: a jump, a growth, a step in every so many that takes
longer. Torch-free.

All three are found from the step times alone. Their noise may follow itself and have outliers, so
times are clipped and tests count correlated steps as fewer.
`tests/tools/steady_campaign.py` counts false alarms and what is found.
"""

import math
from statistics import NormalDist
from typing import NamedTuple

import numpy as np

from parallel.measure.slower import SPREADS, spread

NOTABLE = 0.02  # a change or a period below this share is not worth a word
CLIP = 2.5  # spreads beside the median to which outliers are cut
FEWEST = 12  # a run of fewer steps has no change or period
SIDE = 4  # the fewest steps before and after a jump, and of a period's long ones
# Where no jump is, the largest F of all places but the outer 5 % exceeds this in 1 % of runs
# (Andrews 1993, "Tests for parameter instability and structural change", table 1).
JUMP_F = 13.0
GROWTH_F = SPREADS**2  # F of one slope is the square of its distance from 0 in standard deviations
# So many more steps would make a known correlation of one estimated; from the campaign.
FEW_STEPS = 60
LONGEST = 100  # the longest period that is looked for
PERIOD_ERROR = 0.002  # how often a run without a period may have one, over all that are tried
MOST = 100_000  # steps that are searched for a period, the last ones


class Change(NamedTuple):
    """Step times that do not stay: seconds before and after. `at` is the iteration from which a
    jump's later time holds; None for a growth (or decline), whose two times are its ends."""

    before_s: float
    after_s: float
    at: int | None


class Period(NamedTuple):
    """One step in `every` iterations takes `long_s`, as iteration `first` does; the others take
    `usual_s`."""

    every: int
    first: int
    usual_s: float
    long_s: float

    @property
    def longer(self) -> float:
        """Returns by which share the long steps are longer."""
        return self.long_s / self.usual_s - 1


def change_of(times: np.ndarray, numbers: np.ndarray) -> Change | None:
    """Returns the jump or growth of step times, or None. numbers: their iterations.

    The best step function and the straight line are fitted to the clipped times. Each one's F, the
    noise that it explains over what it leaves, is divided by (1 + rho) / (1 - rho), with rho the
    correlation of neighbours in what is left: of correlated noise (AR 1) a mean is so much less
    sure. A short run estimates rho badly, so its bars are higher, by `FEW_STEPS` over its length.
    Where both pass, the one that leaves less noise is the change.
    """
    n = len(times)
    if n < FEWEST:
        return None
    clipped = _clipped(times)
    clipped = clipped - clipped.mean()
    total = float(clipped @ clipped)
    if total <= 0:
        return None
    splits = np.arange(1, n)
    sums = np.cumsum(clipped)[:-1]
    split = int(splits[np.argmax(sums**2 / splits + sums**2 / (n - splits))])
    has_sides = max(SIDE, n // 20) <= min(split, n - split)  # else it is a few slow steps
    is_later = np.arange(n) >= split
    step = np.where(is_later, clipped[split:].mean(), clipped[:split].mean())
    place = np.arange(n) - (n - 1) / 2
    line = float(place @ clipped) / float(place @ place) * place
    found = []
    for fit, fitted, bar in ((step, 4, JUMP_F), (line, 3, GROWTH_F)):
        rest = clipped - fit
        left = max(float(rest @ rest), 1e-12 * total)
        rho = (n * _neighbours(rest) + 1) / (n - fitted)  # the estimate is too low by about so much
        rho = min(max(rho, 0.0), 0.95)
        f = (total - left) / left * (n - fitted) * (1 - rho) / (1 + rho)
        if f > bar * (1 + FEW_STEPS / n) and (has_sides or fit is line):
            found.append((left, fit is step))
    if not found:
        return None
    if min(found)[1]:
        before_s, after_s = (float(np.median(times[side])) for side in (~is_later, is_later))
        change = Change(before_s, after_s, int(numbers[split]))
    else:
        middle = float(np.median(times - line))
        change = Change(middle + float(line[0]), middle + float(line[-1]), None)
    low, high = sorted(change[:2])
    return change if high > (1 + NOTABLE) * low else None


def period_of(times: np.ndarray, numbers: np.ndarray) -> Period | None:
    """Returns the period of step times that stands out most, or None. numbers: their iterations.

    The times are folded over each period from 2 on that has SIDE long steps, up to LONGEST; the
    mean at each phase is compared with that of the rest (a t, as the normal's distance: Wallace
    1959, "Bounds on normal approximations to Student's t"). The bar is that of PERIOD_ERROR over
    the number of phases that are tried (Bonferroni). Before, the part of a time that follows from
    the one before (AR 1) is taken off, so that slow waves are no period. Of the long steps, three
    in four must be among the longest quarter of the rest: a few outliers are no period.
    """
    times, numbers = times[-MOST:], numbers[-MOST:]
    n = len(times)
    longest = min(LONGEST, n // SIDE)
    if n < FEWEST:
        return None
    clipped = _clipped(times)
    clipped = clipped - clipped.mean()
    fresh = clipped.copy()
    fresh[1:] -= max(_neighbours(clipped), 0.0) * clipped[:-1]
    total, squares = float(fresh.sum()), float(fresh @ fresh)
    if squares <= 0:
        return None
    place, interval = _places(numbers)
    tried = sum(range(2, longest + 1))
    bar = NormalDist().inv_cdf(1 - PERIOD_ERROR / tried)
    best = (0.0, 0, 0)  # t, period, phase
    for period in range(2, longest + 1):
        phase = place % period
        count = np.bincount(phase, minlength=period)
        total_of = np.bincount(phase, fresh, minlength=period)
        usable = (count >= SIDE) & (n - count >= SIDE)
        count = np.where(usable, count, n / 2)  # any number that divides
        rest, apart = n - count, total_of / count - (total - total_of) / (n - count)
        left = squares - total_of**2 / count - (total - total_of) ** 2 / rest
        t = apart / np.sqrt(np.maximum(left, 1e-12 * squares) / (n - 2) * (1 / count + 1 / rest))
        t = np.where(usable, t, 0.0)
        longest_phase = int(np.argmax(t))
        best = max(best, (float(t[longest_phase]), period, longest_phase))
    t, every, phase = best
    if math.sqrt((n - 2) * math.log1p(t**2 / (n - 2))) <= bar:
        return None
    is_long = place % every == phase
    long_s, usual_s = times[is_long], times[~is_long]
    if np.quantile(long_s, 0.25, method="lower") <= np.quantile(usual_s, 0.75):
        return None
    first = int(numbers[np.argmax(is_long)])
    medians = float(np.median(usual_s)), float(np.median(long_s))
    found = Period(every * interval, first, *medians)
    return found if found.longer > NOTABLE else None


def _clipped(times: np.ndarray) -> np.ndarray:
    """Returns the times with outliers cut to CLIP spreads beside the median."""
    middle = float(np.median(times))
    width = max(CLIP * spread(times), NOTABLE * abs(middle))  # of even times, more than nothing
    return np.clip(times, middle - width, middle + width)


def _neighbours(values: np.ndarray) -> float:
    """Returns the correlation of values around 0 with those before them."""
    squares = float(values @ values)
    return float(values[1:] @ values[:-1]) / squares if squares > 0 else 0.0


def _places(numbers: np.ndarray) -> tuple[np.ndarray, int]:
    """Returns each entry's place in the run, counted in entries, and how many iterations lie
    between two: a log may have gaps, and an entry for every tenth iteration."""
    apart = np.diff(numbers)
    interval = int(np.median(apart)) if np.isfinite(apart).all() else 0
    if interval < 1:
        return np.arange(len(numbers)), 1
    return ((numbers - numbers[0]) // interval).astype(int), interval
