"""Ranges of the numbers that a user may give. Each is stated beside its setting; this checks it."""

import argparse
from dataclasses import dataclass

from base.errors import UsageError


@dataclass(frozen=True)
class Bounds:
    """From `least` to `most`. Both are allowed, unless `above` or `below` excludes its end."""

    least: float
    most: float
    above: bool = False
    below: bool = False

    def problem(self, name: str, value: float) -> str:
        """What is wrong with the value, with the bounds; "" when it is within (NaN never is)."""
        within = self.least < value if self.above else self.least <= value
        if within and (value < self.most if self.below else value <= self.most):
            return ""
        least = f"above {self.least:g}" if self.above else f"at least {_plain(self.least)}"
        most = f"below {self.most:g}" if self.below else f"at most {_plain(self.most)}"
        return f"{name} must be {least} and {most}, not {_plain(value)}"


def _plain(value: float) -> str:
    whole = isinstance(value, float) and value.is_integer() and abs(value) < 1e15
    text = f"{value:.0f}" if whole else str(value)
    return text if len(text) <= 24 else f"{text[:12]}... ({len(text)} digits)"


def check_flags(arguments: argparse.Namespace, **bounds: tuple[float, float] | Bounds) -> None:
    """Refuse a flag's number out of its bounds. None, a flag that was not given, is skipped.

    Raises:
        UsageError: it names the flag, the bounds and the number.
    """
    for name, given in bounds.items():
        value = getattr(arguments, name, None)
        allowed = given if isinstance(given, Bounds) else Bounds(*given)
        flag = "--" + name.replace("_", "-")
        if value is not None and (problem := allowed.problem(flag, value)):
            raise UsageError(problem)
