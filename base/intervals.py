"""An interval between two numbers."""

import math
from collections.abc import Iterable
from typing import NamedTuple, Optional


class Interval(NamedTuple):
    """The positive numbers from low to high. Of predictions, low and high are arrays."""

    low: float
    high: float

    @staticmethod
    def around(intervals: Iterable[Optional["Interval"]]) -> Optional["Interval"]:
        """Returns the smallest interval that holds all of them; None where one is unknown."""
        members = list(intervals)
        if not members or None in members:
            return None
        return Interval(min(each.low for each in members), max(each.high for each in members))

    @property
    def middle(self) -> float:
        """Returns the geometric mean of low and high."""
        return math.sqrt(self.low * self.high)

    def with_value(self, value: float) -> "Interval":
        """Returns the interval, widened where it does not hold the value."""
        return Interval(min(self.low, value), max(self.high, value))

    def times(self, other: "Interval") -> "Interval":
        """Returns the interval of a number of this one times a number of the other."""
        return Interval(self.low * other.low, self.high * other.high)

    def over(self, other: "Interval") -> "Interval":
        """Returns the interval of a number of this one divided by a number of the other."""
        return Interval(self.low / other.high, self.high / other.low)

    def misses(self, other: "Interval") -> float:
        """Returns the share by which two intervals do not meet; 0 where they do."""
        return max(self.low / other.high - 1, other.low / self.high - 1, 0.0)
