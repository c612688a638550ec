"""What a run's step times do beside noise: a jump, a growth, a step in every so many that takes
longer. Torch-free.

All three are found from the step times alone. Their noise may follow itself and have outliers, so
times are clipped, and a change must explain more than noise that follows itself does.
`tests/tools/steady_campaign.py` counts false alarms and what is found.
"""

import math
from statistics import NormalDist
from typing import NamedTuple

import numpy as np

from parallel.measure.slower import OF_NORMAL

NOTABLE = 0.02  # a change or a period below this share is not worth a word
CLIP = 2.5  # spreads beside the median to which outliers are cut
FEWEST = 12  # a run of fewer steps has no change or period
SIDE = 4  # the fewest steps before and after a jump, and of a period's long ones
CORRELATIONS = (0.0, 0.2, 0.4, 0.6, 0.8, 0.9)  # of neighbours: those that are tried
# By how much a jump at the best place, or a line, must raise twice the logarithm of the likelihood.
# In 1 % of long runs of white noise a jump gains 13.0 (Andrews 1993, "Tests for parameter
# instability and structural change", table 1), a line 6.6; more where noise follows itself, and
# these are the campaign's.
JUMP_GAIN = 15.5
GROWTH_GAIN = 9.5
FITTED = 4  # so many steps of a run tell nothing: level, change, place and correlation
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

    @property
    def mean_s(self) -> float:
        """Returns the mean of all steps, long and usual ones."""
        return self.usual_s + (self.long_s - self.usual_s) / self.every


def change_of(times: np.ndarray, numbers: np.ndarray) -> Change | None:
    """Returns the jump or growth of step times, or None. numbers: their iterations.

    The noise is taken to follow itself by a correlation that nobody knows (AR 1). One level, a
    line, and a level before and after the best place are each fitted to the clipped times, each
    with the correlation that makes it likeliest: what correlated noise explains as well is no
    change. Where line and jump both gain enough, the likelier is the change.
    """
    n = len(times)
    if n < FEWEST:
        return None

    def has_sides(split: int) -> bool:  # else it is a few slow steps
        return max(SIDE, n // 20) <= min(split, n - split)

    clipped = _clipped(times)
    sums, splits = np.cumsum(clipped - clipped.mean())[:-1], np.arange(1, n)
    split = int(splits[np.argmax(sums**2 / (splits * (n - splits)))])
    if has_sides(split):  # beside the median alone, a far jump would be cut
        sides = [np.full(len(side), np.median(side)) for side in np.split(times, [split])]
        clipped = _clipped(times, np.concatenate(sides))
    if np.ptp(clipped) <= NOTABLE * clipped.min():
        return None
    clipped -= clipped.mean()
    place = np.arange(n) - (n - 1) / 2
    noise, splits = [], []  # of each correlation: what a level, a line and a jump leave; its place
    for rho in CORRELATIONS:
        level, line, rest = (_fresh(values, rho) for values in (np.ones(n), place, clipped))
        level /= math.sqrt(level @ level)
        line, rest = line - (line @ level) * level, rest - (rest @ level) * level
        norms = 1 + (1 - rho) ** 2 * np.arange(n - 2, -1, -1) - _onward(level, rho) ** 2
        jumps = _onward(rest, rho) ** 2 / norms
        explained = np.array([0.0, (rest @ line) ** 2 / (line @ line), jumps.max()])
        left = np.maximum(rest @ rest - explained, 1e-12 * (rest @ rest))
        noise.append(np.log(left) - math.log(1 - rho**2) / n)
        splits.append(int(np.argmax(jumps)) + 1)
    steady, growth, jump = (n - FITTED) * np.min(noise, axis=0)
    split = splits[np.argmin(noise, axis=0)[2]]
    is_jump = steady - jump > JUMP_GAIN and has_sides(split)
    is_growth = steady - growth > GROWTH_GAIN
    if is_jump and not (is_growth and growth < jump):
        before_s, after_s = (float(np.median(side)) for side in np.split(times, [split]))
        change = Change(before_s, after_s, int(numbers[split]))
    elif is_growth:
        line = (place @ clipped) / (place @ place) * place
        middle = float(np.median(times - line))
        change = Change(middle + float(line[0]), middle + float(line[-1]), None)
    else:
        return None
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
    clipped -= clipped.mean()
    squares = float(clipped @ clipped)
    if squares <= 0:
        return None
    fresh = _fresh(clipped, max(float(clipped[1:] @ clipped[:-1]) / squares, 0.0))
    total, squares = float(fresh.sum()), float(fresh @ fresh)
    place, interval = _places(numbers)
    periods = range(2, longest + 1)
    # Of each phase of each period, one behind the other: the number of steps and the sum of times.
    count = np.concatenate([np.bincount(place % every, minlength=every) for every in periods])
    total_of = np.concatenate([np.bincount(place % every, fresh, every) for every in periods])
    usable = (count >= SIDE) & (n - count >= SIDE)
    count = np.where(usable, count, n / 2)  # any number that divides
    rest, apart = n - count, total_of / count - (total - total_of) / (n - count)
    left = squares - total_of**2 / count - (total - total_of) ** 2 / rest
    t = apart / np.sqrt(np.maximum(left, 1e-12 * squares) / (n - 2) * (1 / count + 1 / rest))
    best = int(np.argmax(np.where(usable, t, 0.0)))
    bar = NormalDist().inv_cdf(1 - PERIOD_ERROR / len(count))
    if not usable[best] or math.sqrt((n - 2) * math.log1p(t[best] ** 2 / (n - 2))) <= bar:
        return None
    every, phase = [(every, phase) for every in periods for phase in range(every)][best]
    is_long = place % every == phase
    long_s, usual_s = times[is_long], times[~is_long]
    if np.quantile(long_s, 0.25, method="lower") <= np.quantile(usual_s, 0.75):
        return None
    first = int(numbers[np.argmax(is_long)])
    medians = float(np.median(usual_s)), float(np.median(long_s))
    found = Period(every * interval, first, *medians)
    return found if found.longer > NOTABLE else None


def _clipped(times: np.ndarray, level: np.ndarray | None = None) -> np.ndarray:
    """Returns the times with outliers cut to CLIP spreads beside their level, or their levels: all
    that lies between two of these stays. Without one it is the median."""
    levels = np.median(times) if level is None else level
    width = CLIP * OF_NORMAL * np.median(np.abs(times - levels))
    width = max(width, NOTABLE * abs(np.median(times)))  # of even times, more than nothing
    return np.clip(times, np.min(levels) - width, np.max(levels) + width)


def _fresh(values: np.ndarray, rho: float) -> np.ndarray:
    """Returns values less rho times the one before: independent ones with even noise, where each is
    correlated with its neighbours by rho."""
    return np.r_[math.sqrt(1 - rho**2) * values[0], values[1:] - rho * values[:-1]]


def _onward(fresh: np.ndarray, rho: float) -> np.ndarray:
    """Returns for each place from 1 on the products, summed, of these `_fresh` values and those of
    a step of 1 there: 1 at its place, 1 - rho behind it."""
    return rho * fresh[1:] + (1 - rho) * np.cumsum(fresh[::-1])[-2::-1]


def _places(numbers: np.ndarray) -> tuple[np.ndarray, int]:
    """Returns each entry's place in the run, counted in entries, and how many iterations lie
    between two: a log may have gaps, and an entry for every tenth iteration."""
    apart = np.diff(numbers)
    interval = int(np.median(apart)) if np.isfinite(apart).all() else 0
    if interval < 1:
        return np.arange(len(numbers)), 1
    return ((numbers - numbers[0]) // interval).astype(int), interval
