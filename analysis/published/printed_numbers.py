"""Printed numbers as intervals: what their digits leave open, and what follows from several."""

import re
from statistics import median
from typing import NamedTuple

from base.intervals import Interval

AVERAGED = 0.002  # numbers that were averaged apart do not divide exactly
EXACT = 0.0008  # what single rows of an exact table miss by
MOST_AVERAGED = 0.02  # averaging explains no more
LARGEST = 1e30  # nothing that is measured is more, nor less than 1 over it; products stay finite
FEW = 8  # fewer rows do not show how far apart their numbers were averaged
_NUMBER = re.compile(
    r"^[~≈*_`\s$]*(?P<number>[+-]?(?:\d{1,3}(?:[,' _]\d{3})+|\d+)?(?:\.\d+)?)"
    r"(?P<power>[eE][+-]?\d+)?\s*(?P<unit>[a-zA-Zµ%]*)"
)
_RANGE = re.compile(r"\s*(?:-|–|to\b|/|,)\s*\d")  # 9.8-10.2, 8/16, 1,5: not one number
SECONDS = {"us": 1e-6, "µs": 1e-6, "ms": 1e-3, "s": 1.0, "sec": 1.0, "min": 60.0, "h": 3600.0}
BILLIONS = {"k": 1e-6, "m": 1e-3, "b": 1.0, "t": 1e3}


class Value(NamedTuple):
    """A printed number in our unit, its interval, and the heading and text of its cell."""

    number: float
    interval: Interval
    heading: str
    text: str


def read_value(
    text: str, heading: str, factor: float, units: dict[str, float], exact: bool = False
) -> Value | None:
    """Returns the positive number that a cell starts with, or None.

    The interval is half a unit of the last printed place below, and one whole above, since some
    publishers cut digits. An integer that ends in zeros may have been rounded to them. `~` leaves
    5 % below and 10 % above.

    Args:
        factor: to our unit, where the cell states none of `units` (unit -> factor).
        exact: a whole number is a count, with no rounding.
    """
    match = _NUMBER.match(text)
    if not match or not re.search(r"\d", match["number"]) or _RANGE.match(text[match.end(1) :]):
        return None
    digits = re.sub(r"[,' _]", "", match["number"])
    number = float(digits + (match["power"] or ""))
    if not 1 / LARGEST < number < LARGEST:
        return None
    power = float("1" + (match["power"] or ""))
    place = 10.0 ** -len(digits.partition(".")[2]) * power
    if "." not in digits:
        zeros = len(digits) - len(digits.rstrip("0"))
        if exact:
            place = 0.0
        elif zeros > 1:
            place = max(power, min(10.0**zeros * power, 0.01 * number))
    if re.match(r"[*_\s]*[~≈]", text):
        place = max(place, 0.1 * number)
    factor = units.get(match["unit"].lower(), factor)
    low, high = (number - place / 2) * factor, (number + place) * factor
    return Value(number * factor, Interval(low, high), heading, text)


class Agreement(NamedTuple):
    """The number on which most intervals agree, and the indices of those that do."""

    number: float
    indices: set[int]


def agreement(intervals: list[Interval], slack: float) -> Agreement:
    """Returns the number that most intervals include; those agree that include it or miss it by at
    most `slack`.

    Where not even half include one number, they were averaged apart: three times the usual miss is
    allowed, if that is little.
    """
    ends = sorted([(i.low, 0) for i in intervals] + [(i.high, 1) for i in intervals])
    depth = most = 0
    deepest = 0.0
    for end, is_high in ends:
        depth += -1 if is_high else 1
        if depth > most:
            most, deepest = depth, end
    around = [i for i in intervals if i.low <= deepest <= i.high]
    number = Interval(max(i.low for i in around), min(i.high for i in around)).middle
    misses = [interval.misses(Interval(number, number)) for interval in intervals]
    usual = 3 * median(misses)
    allowed = max(slack, usual) if usual < MOST_AVERAGED else slack
    return Agreement(number, {n for n, miss in enumerate(misses) if miss <= allowed})


def tolerance(misses: list[float]) -> float:
    """Returns the share by which rows may miss an identity beyond their digits, by the misses of
    the whole table."""
    usual = median(misses)
    if len(misses) < FEW or 0 < 3 * usual < MOST_AVERAGED:
        return max(3 * usual, 2.5 * AVERAGED) if 3 * usual < MOST_AVERAGED else 2.5 * AVERAGED
    return EXACT
