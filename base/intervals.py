"""An interval between two numbers."""

import math
from collections.abc import Iterable
from typing import NamedTuple, Optional


class Interval(NamedTuple):
    """From low to high, both above 0; of a prediction, arrays of them."""

    low: float
    high: float

    @staticmethod
    def around(intervals: Iterable[Optional["Interval"]]) -> Optional["Interval"]:
        """Returns the smallest interval that holds all of them; None where one is unknown."""
        known = list(intervals)
        if not known or None in known:
            return None
        return Interval(min(each.low for each in known), max(each.high for each in known))

    @property
    def middle(self) -> float:
        return math.sqrt(self.low * self.high)

    def times(self, other: "Interval") -> "Interval":
        return Interval(self.low * other.low, self.high * other.high)

    def over(self, other: "Interval") -> "Interval":
        return Interval(self.low / other.high, self.high / other.low)

    def misses(self, other: "Interval") -> float:
        """The share by which two intervals do not meet; 0 where they do."""
        return max(self.low / other.high - 1, other.low / self.high - 1, 0.0)
