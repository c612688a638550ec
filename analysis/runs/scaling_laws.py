"""The laws of scaling, fitted to measured times: the serial share of Amdahl and of Gustafson, and
the contention and coherency of the Universal Scalability Law.

    Amdahl 1967, strong       S = 1 / (f + (1 - f) / N)
    Gustafson 1988, weak      S = N - f (N - 1)
    Gunther 1993 (USL)        S = N / (1 + sigma (N - 1) + kappa N (N - 1))

N is GPUs over the baseline's GPUs. S is the speedup against the baseline; in weak scaling, where
the work grows N-fold, the scaled speedup. Under each law the time of a step (Gustafson: its
inverse) is a sum of terms in N with a coefficient each: the baseline's time, and that time times a
parameter. So the fit is linear least squares over all repeats. A run's noise is a share of its
time, so each run's terms are divided by its measured value. A parameter, a speedup and a limit are
ratios of two such sums; Fieller's theorem (1954) gives their 95 % intervals by Student's t, with
the noise that the fit leaves over its degrees of freedom. Of an interval that part counts in which
no parameter is below 0. The intervals see noise and how far the law is off; they do not see what
changes beyond the measured sizes.
"""

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from analysis.common.statistics import Bounded, fieller, relative_least_squares, t_quantile
from base.errors import Answer
from base.intervals import Interval


class Law(NamedTuple):
    """A law: its parameters' names, each from 0, and its terms in N, (n,) -> (n, 1 + parameters).
    is_rate: the terms make the inverse of a step's time."""

    name: str
    parameters: tuple[str, ...]
    terms: Callable[[np.ndarray], list[np.ndarray]]
    is_rate: bool = False


AMDAHL = Law("Amdahl's law", ("serial share f",), lambda n: [1 / n, 1 - 1 / n])
GUSTAFSON = Law("Gustafson's law", ("serial share f",), lambda n: [n / n, 1 / n - 1], True)
_USL, _SIGMA_KAPPA = "Universal Scalability Law", ("contention sigma", "coherency kappa")
USL_STRONG = Law(_USL, _SIGMA_KAPPA, lambda n: [1 / n, 1 - 1 / n, n - 1])
USL_WEAK = Law(_USL, _SIGMA_KAPPA, lambda n: [n / n, n - 1, n * (n - 1)])
LAWS = {"strong": (AMDAHL, USL_STRONG), "weak": (GUSTAFSON, USL_WEAK)}


@dataclass(frozen=True)
class Fit:
    """A law fitted to runs.

    coefficients: of the law's terms, with no parameter below 0; `free`: without that bound.
    covariance: of `free`, over the square of the noise. noise: the standard deviation of a run, as
    a share of its time; None where nothing tells it. quantile: of Student's t, two-sided.
    deviation: the largest share by which a size's median time is off the law.
    """

    law: Law
    scaling: str
    coefficients: np.ndarray
    free: np.ndarray
    covariance: np.ndarray
    noise: float | None
    quantile: float
    deviation: float

    def terms(self, n: float) -> np.ndarray:
        """Returns the law's terms at N."""
        return np.array([term[0] for term in self.law.terms(np.array([float(n)]))])

    @property
    def free_share(self) -> float:
        """Returns the first parameter without its bound: below 0 where times are above linear."""
        return round(float(self.free[1] / self.free[0]), 12)  # 0 is not -1e-17

    @property
    def negative(self) -> list[str]:
        """Returns the parameters that would be below 0 without their bound, which keeps them there
        and makes an interval that ends at 0 say little."""
        shares = zip(self.law.parameters, self.free[1:] / self.free[0], strict=True)
        return [name for name, share in shares if round(float(share), 12) < 0]

    def parameter(self, index: int) -> Bounded:
        """Returns a parameter of the law, 0 or more."""
        unit = np.eye(len(self.free))
        return self._ratio(unit[1 + index], unit[0])

    def speedup(self, n: float) -> Bounded:
        """Returns the speedup at N; its interval is of what one run there would show."""
        first, terms = np.eye(len(self.free))[0], self.terms(n)
        found = self._ratio(terms, first, of_a_run=True)
        if self.law.is_rate:  # S = N rate(N) / rate(1)
            found = found.mapped(lambda rate: rate * n)
        else:
            found = _inverse(found, n if self.scaling == "weak" else 1.0)
        if found.interval is None:
            return found
        # No law is above linear; its runs are by their noise, twice: there, and at the baseline.
        most = n / max(1 - self.quantile * self.noise * math.sqrt(2), 1e-9)
        low, high = found.interval
        return Bounded(found.value, Interval(low, max(min(high, most), found.value)))

    def seconds(self, n: float) -> Bounded:
        """Returns the seconds of a step at N; the interval is of what one run there would show."""
        terms, interval = self.terms(n), None
        value = float(terms @ self.coefficients)
        if self.noise is not None:
            step = self.quantile * self.noise
            half = step * math.sqrt(terms @ self.covariance @ terms + value**2)
            middle = float(terms @ self.free)
            low, high = max(middle - half, 0.0), middle + half
            first, ideal = self.free[0], float(self.free[0] * terms[0])  # no law is above linear
            slack = step * terms[0] * math.sqrt(self.covariance[0, 0] + first**2)
            if self.law.is_rate:
                high = min(high, ideal + slack)
            else:
                low = max(low, ideal - slack)
            interval = Interval(low, high).with_value(value)
        found = Bounded(value, interval)
        return _inverse(found, 1.0) if self.law.is_rate else found

    @property
    def limit(self) -> Bounded | None:
        """Returns the speedup at infinity of Amdahl's law; None of a law that has none."""
        return _inverse(self.parameter(0), 1.0) if self.law is AMDAHL else None

    @property
    def peak(self) -> Bounded | None:
        """Returns the N of the USL's highest speedup, sqrt((1 - sigma) / kappa), infinite where
        kappa is 0; None of another law."""
        if len(self.law.parameters) < 2:
            return None
        first, sigma, kappa = np.eye(3)
        square = self._ratio(kappa, first - sigma)
        return _inverse(square, 1.0).mapped(math.sqrt)

    def _ratio(self, above: np.ndarray, below: np.ndarray, of_a_run: bool = False) -> Bounded:
        """Returns the ratio of two sums of coefficients and what of Fieller's interval is not below
        0. `of_a_run` adds the noise of one run to the numerator."""
        value = float(above @ self.coefficients) / float(below @ self.coefficients)
        if self.noise is None:
            return Bounded(value, None)
        a, b = float(above @ self.free), float(below @ self.free)
        square = (self.quantile * self.noise) ** 2
        aa, ab, bb = (
            float(x @ self.covariance @ y)
            for x, y in ((above, above), (above, below), (below, below))
        )
        aa += a**2 if of_a_run else 0.0
        interval = fieller(a, b, square * aa, square * ab, square * bb)
        return Bounded(value, interval.with_value(value))  # a bound may keep it outside


def _inverse(found: Bounded, above: float) -> Bounded:
    """Returns `above` divided by a value that is not below 0."""
    return found.mapped(lambda end: above / end if end else math.inf)


def fit(
    law: Law, scaling: str, times: dict[float, Sequence[float]], noise: float | None = None
) -> Answer[Fit]:
    """Returns a law fitted to the seconds of a step of each size's repeats, by N; or why it cannot
    be. `noise` is a run's standard deviation as a share of its time, where that is known."""
    unknowns, sizes = 1 + len(law.parameters), sorted(times)
    if len(sizes) < unknowns:
        names = " and ".join(law.parameters)
        count = {1: "one size", 2: "two sizes"}.get(len(sizes), f"{len(sizes)} sizes")
        return Answer(
            None, f"{count} cannot give {names} beside the baseline's time: measure {unknowns}"
        )
    n = np.repeat(np.array(sizes, float), [len(times[size]) for size in sizes])
    seconds = np.concatenate([np.asarray(times[size], float) for size in sizes])
    measured = 1 / seconds if law.is_rate else seconds
    terms = np.stack(law.terms(n), axis=1) / measured[:, None]
    free, covariance = relative_least_squares(terms)
    spare = len(seconds) - unknowns
    quantile = 0.0
    if noise is None and spare:
        noise = float(np.sqrt(np.sum((1 - terms @ free) ** 2) / spare))
        quantile = t_quantile(spare)
    elif noise is not None:
        quantile = t_quantile(math.inf)
    coefficients = _bounded(terms)
    by_law = np.stack(law.terms(np.array(sizes, float)), axis=1) @ coefficients
    medians = np.array([np.median(times[size]) for size in sizes])
    off = by_law * medians if law.is_rate else medians / by_law
    found = Fit(
        law,
        scaling,
        coefficients=coefficients,
        free=free,
        covariance=covariance,
        noise=noise,
        quantile=quantile,
        deviation=float(np.max(np.abs(off - 1))),
    )
    return Answer(found)


def _bounded(terms: np.ndarray) -> np.ndarray:
    """Returns the coefficients that make each row's sum nearest to 1, none below 0: the best of
    those with some parameters at 0."""
    best, least = np.zeros(terms.shape[1]), math.inf
    for kept in itertools.product((True, False), repeat=terms.shape[1] - 1):
        columns = np.flatnonzero([True, *kept])
        values, _ = relative_least_squares(terms[:, columns])
        squares = float(np.sum((1 - terms[:, columns] @ values) ** 2))
        if (values >= 0).all() and squares < least:
            least, best = squares, np.zeros(terms.shape[1])
            best[columns] = values
    return best
