"""Arithmetic with the intervals that printed digits leave open."""

import math
from statistics import median

from analysis.published.headings import Value

Interval = tuple[float, float]
AVERAGED = 0.002  # numbers that were averaged apart do not divide exactly
MOST_APART = 0.02  # averaging explains no more


def span_of(value: Value | None) -> Interval | None:
    return None if value is None or value.low <= 0 else (value.low, value.high)


def product_of(*spans: Interval | None) -> Interval | None:
    if None in spans:
        return None
    return (math.prod(s[0] for s in spans), math.prod(s[1] for s in spans))


def ratio_of(one: Interval | None, other: Interval | None) -> Interval | None:
    return None if one is None or other is None else (one[0] / other[1], one[1] / other[0])


def apart(one: Interval, other: Interval) -> float:
    """By what share two intervals miss each other; 0 where they meet."""
    return max(one[0] / other[1] - 1, other[0] / one[1] - 1, 0.0)


def middle(span: Interval) -> float:
    return math.sqrt(span[0] * span[1])


def common(spans: list[Interval]) -> tuple[float, set[int]]:
    """(a point that lies in most of the intervals, which intervals hold it)."""
    ends = sorted([(low, 0) for low, _ in spans] + [(high, 1) for _, high in spans])
    depth = most = 0
    point = 0.0
    for value, is_end in ends:
        depth += -1 if is_end else 1
        if depth > most:
            most, point = depth, value
    held = {i for i, (low, high) in enumerate(spans) if low <= point <= high}
    if held:
        low, high = max(spans[i][0] for i in held), min(spans[i][1] for i in held)
        point = math.sqrt(low * high)
    return point, held


def tolerance(misses: list[float]) -> float:
    """The tolerance beyond the digits: none where most rows need none, else what most show."""
    if not misses or median(misses) == 0:
        return 0.0
    typical = median(misses)
    return max(3 * typical, 2.5 * AVERAGED) if typical < MOST_APART / 3 else 0.0
