"""How many samples a batch needs to reach a target: samples(B) = a (1 + B / B_c).

B is the global batch, B_c the critical batch, both in samples (McCandlish et al. 2018, "An
Empirical Model of Large-Batch Training", arXiv 1812.06162): far below B_c, twice the
batch takes half the steps; far above it, as many steps as before. a is left out of every ratio.
"""

import argparse
import math
import re
import statistics
import tomllib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import NamedTuple

import numpy as np

from analysis.common.statistics import Bounded, fieller, relative_least_squares, t_quantile
from analysis.common.table import cell
from base.errors import Answer
from base.intervals import Interval

# What MLPerf's reference runs needed; the file says where its numbers are from.
REFERENCE_FILE = Path(__file__).with_name("reference_convergence.toml")
# Headings of tables.
TIMES_SAMPLES, EFFICIENCY = "times the samples to target", "efficiency to target"
STATES = (
    "the critical batch in samples (84, or 70:100), or a benchmark of MLPerf (llama31_8b); it says"
    " how many samples each batch needs (docs/weak-scaling.md)"
)
_STATED = re.compile(r"(\d{1,12}(?:\.\d{1,6})?)(?::(\d{1,12}(?:\.\d{1,6})?))?")


class Point(NamedTuple):
    """What `runs` runs of one batch needed to reach a target: the mean of their samples, and their
    standard deviation (0 of a single run)."""

    batch: int
    runs: int
    mean: float
    deviation: float

    @property
    def variance(self) -> float:
        """Returns the variance of the mean, relative to it."""
        return (self.deviation / self.mean) ** 2 / self.runs


def point_of(batch: int, samples: Sequence[float]) -> Point:
    """Returns the point of runs of one batch, by the samples of each."""
    deviation = statistics.stdev(samples) if len(samples) > 1 else 0.0
    return Point(batch, len(samples), statistics.fmean(samples), deviation)


@dataclass(frozen=True)
class CriticalBatch:
    """B_c in samples, 0 where samples grow as the batch, infinite where they do not grow.

    interval: 95 %, None where it is not known. source: where it comes from, in words. points: what
    it was fitted to, and `off`, by which share the law is off at most.
    """

    value: float
    interval: Interval | None
    source: str
    points: tuple[Point, ...] = ()
    off: float = 0.0

    @property
    def in_words(self) -> str:
        span = " (its interval is not known)"
        if self.interval:
            low, high = (cell(end, ".3g") for end in self.interval)
            span = f" ({low} to {high})"
        words = f"a critical batch of {cell(self.value, '.3g')} samples{span}, {self.source}"
        if self.points:
            words += f", off by at most {self.off:.1%}"
        return f"1 + batch / critical batch, with {words}"

    def samples_ratio(self, batch: int, base: int) -> Bounded:
        """Returns the samples that `batch` needs over those of `base`.

        It is measured where runs of both differ among themselves, so that their noise is known
        (Welch 1947, of logarithms); else it is the law's.
        """
        if batch == base:
            return Bounded(1.0, None)
        points = {point.batch: point for point in self.points if point.deviation}
        if batch in points and base in points:
            return _measured_ratio(points[batch], points[base])
        return self.law_ratio(batch, base)

    def law_ratio(self, batch: int, base: int) -> Bounded:
        """Returns the ratio that the law gives."""
        critical = Bounded(self.value, self.interval)
        return critical.mapped(lambda end: times_samples(batch, base, end))


def times_samples(batch: int, base: int, critical: float) -> float:
    """Returns the samples of `batch` over those of `base` by the law."""
    return 1.0 if math.isinf(critical) else (critical + batch) / (critical + base)


def _measured_ratio(point: Point, base: Point) -> Bounded:
    """Returns the ratio of two means of runs, with Welch's interval of its logarithm."""
    value, variances = point.mean / base.mean, (point.variance, base.variance)
    freedom = sum(variances) ** 2 / sum(
        variance**2 / (each.runs - 1)
        for variance, each in zip(variances, (point, base), strict=True)
    )
    factor = math.exp(t_quantile(freedom) * math.sqrt(sum(variances)))
    return Bounded(value, Interval(value / factor, value * factor))


def fitted(points: Iterable[Point], source: str) -> Answer[CriticalBatch]:
    """Returns the critical batch that fits points by least squares of relative errors, or why none
    does.

    Its interval is Fieller's, of a / b in samples = a + b B. The error of a point is what the law
    leaves (n - 2 degrees of freedom), and no less than the runs' own noise. Two batches leave no
    error, so their interval is from 0 to infinity: samples grow by no more than the batch.
    """
    points = tuple(sorted(points))
    if len(points) < 2:
        return Answer(None, f"{len(points)} batch of two that a critical batch needs")
    terms = np.array([[1, point.batch] for point in points]) / [[point.mean] for point in points]
    (a, b), covariance = relative_least_squares(terms)
    errors, interval = terms @ (a, b) - 1, Interval(0.0, math.inf)
    if spare := len(points) - 2:
        square = t_quantile(spare) ** 2 * errors @ errors / spare
        noise = statistics.fmean(point.variance for point in points)
        if noise:
            runs = sum(point.runs - 1 for point in points)
            square = max(square, noise * t_quantile(runs) ** 2)
        (aa, ab), (_, bb) = (square * covariance).tolist()
        interval = fieller(a, b, aa, ab, bb)
        if b < 0 and interval.high < math.inf:
            return Answer(None, "the samples to the target fall as the batch grows")
    value = math.inf if b <= 0 else max(float(a / b), 0.0)
    return Answer(CriticalBatch(value, interval, source, points, float(np.abs(errors).max())))


@cache
def reference_points() -> dict[tuple[str, str], tuple[Point, ...]]:
    """Returns MLPerf's reference convergence points by benchmark and round ("5.1"), as the file has
    them: the rounds ascend."""
    points = {}
    for series in tomllib.loads(REFERENCE_FILE.read_text())["series"]:
        columns = [series[name] for name in Point._fields]
        each = tuple(Point(*values) for values in zip(*columns, strict=True))
        points |= {(series["benchmark"], rounds): each for rounds in series["rounds"]}
    return dict(sorted(points.items(), key=lambda item: float(item[0][1])))


def _bare(benchmark: str) -> str:
    return re.sub(r"\W|_", "", benchmark.lower())


def of_benchmark(benchmark: str, mlperf_round: str = "") -> Answer[CriticalBatch]:
    """Returns the critical batch of MLPerf's benchmark in a round ("v5.1"), without one in the
    newest that has it; or why there is none."""
    wanted = mlperf_round.removeprefix("v")
    found = [
        named
        for named in reference_points()
        if _bare(named[0]) == _bare(benchmark) and wanted in ("", named[1])
    ]
    if not found:
        names = ", ".join(sorted({name for name, _ in reference_points()}))
        where = f"{benchmark or 'an unnamed benchmark'} {mlperf_round}".strip()
        return Answer(None, f"MLPerf's reference points have no {where}, but {names}")
    points, (name, newest) = reference_points()[found[-1]], found[-1]
    runs = f"{sum(point.runs for point in points)} reference runs"
    return fitted(points, f"fitted to {len(points)} batches and {runs} of MLPerf v{newest} {name}")


def stated(text: str) -> CriticalBatch:
    """Returns the critical batch that `84`, `70:100` or a benchmark of MLPerf states; it is an
    argparse `type`."""
    if match := _STATED.fullmatch(text):
        low, high = float(match[1]), float(match[2] or match[1])
        if not 0 < low <= high:
            raise argparse.ArgumentTypeError(f"{text!r} is no batch above 0, or LOW:HIGH")
        interval = Interval(low, high)
        return CriticalBatch(interval.middle, interval if match[2] else None, "which is stated")
    answer = of_benchmark(text)
    if answer.value is None:
        words = f"{text!r} is no number of samples, LOW:HIGH or benchmark"
        raise argparse.ArgumentTypeError(f"{words}: {answer.reason}")
    return answer.value
