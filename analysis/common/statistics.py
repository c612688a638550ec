"""Statistics of repeated runs: their mean, its interval, the ratio of two configurations' times.

Runs are independent of each other, iterations are not: all iterations of a run share its cores, its
memory and the other load of the machine.
"""

import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

CONFIDENCE = 0.95


def student_t95(df: int) -> float:
    """The t that |T| of Student's t stays below in 95 % of cases; `df` >= 1."""
    from scipy.special import stdtrit  # 0.2 s to load: only where runs repeat

    return float(stdtrit(df, (1 + CONFIDENCE) / 2))


@dataclass(frozen=True)
class Spread:
    """n values: mean, sample standard deviation and the mean's 95 % interval (Student's t).

    stdev and ci95 are None for one value.
    """

    n: int
    mean: float
    stdev: float | None
    ci95: tuple[float, float] | None


def spread_of(values: Sequence[float]) -> Spread:
    """The spread of one value or more."""
    n, mean = len(values), statistics.fmean(values)
    if n < 2:
        return Spread(n, mean, None, None)
    stdev = statistics.stdev(values)
    half = student_t95(n - 1) * stdev / math.sqrt(n)
    return Spread(n, mean, stdev, (mean - half, mean + half))


def repeat_noise(groups: Iterable[Sequence[float]]) -> tuple[float | None, int]:
    """(least MAPE on runs that were identical, number of such runs); None where none was repeated.

    The best single prediction p of a group's values t minimises mean |p / t - 1|: one of them.
    """
    errors: list[float] = []
    for times in groups:
        if len(times) > 1:
            errors += min(([abs(p / t - 1) for t in times] for p in times), key=sum)
    return (statistics.fmean(errors), len(errors)) if errors else (None, 0)


def log_ratio(
    a: Sequence[float], b: Sequence[float], paired: bool = False
) -> tuple[float, float, float]:
    """(ln(a/b), low, high) of two sides' times, two or more runs each, at 95 % by Student's t.

    `paired`: a[i] and b[i] ran one after the other (A B A B), so what drifts slowly cancels in each
    pair. Otherwise Welch's unequal variances (Welch 1947), degrees of freedom rounded down.
    Logarithms, because speeds differ by factors: the interval of a/b is then that of b/a inverted.
    """
    x, y = [math.log(v) for v in a], [math.log(v) for v in b]
    if paired:
        found = spread_of([p - q for p, q in zip(x, y, strict=True)])
        assert found.ci95 is not None, "two pairs at least"
        return found.mean, *found.ci95
    middle = statistics.fmean(x) - statistics.fmean(y)
    u, v = statistics.variance(x) / len(x), statistics.variance(y) / len(y)
    if u + v == 0:
        return middle, middle, middle
    df = (u + v) ** 2 / (u**2 / (len(x) - 1) + v**2 / (len(y) - 1))
    half = student_t95(max(1, int(df))) * math.sqrt(u + v)
    return middle, middle - half, middle + half
