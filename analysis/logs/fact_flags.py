"""The flags that every command on logs has: facts that a log leaves out, how a step is timed."""

import argparse
import functools
import math
from typing import Any

from analysis.logs.parsing.setting_names import FACTS
from base.errors import UsageError
from models.gpus import planning_gpu


def add_fact_flags(parser: argparse.ArgumentParser) -> None:
    """Add a flag for each fact that a log may leave out; what a log says itself stays."""
    group = parser.add_argument_group(
        "facts that the logs leave out",
        f"NAME.toml beside a log gives them for that log alone; its keys: {', '.join(FACTS)}",
    )
    for name, (kind, text) in FACTS.items():
        if kind is bool:
            takes: dict[str, Any] = {"action": argparse.BooleanOptionalAction}
        elif isinstance(kind, tuple):
            takes = {"choices": kind}
        elif kind is str:
            takes = {"metavar": "STR"}
        else:
            checked = functools.partial(_size, kind, name == "zero_stage")
            takes = {"type": checked, "metavar": kind.__name__.upper()}
        group.add_argument(flag_of(name), dest=f"fact_{name}", help=text, **takes)


def flag_of(name: str) -> str:
    """The flag that gives a fact."""
    return "--steps" if name == "planned_steps" else "--" + name.replace("_", "-")


def facts_of(arguments: argparse.Namespace | None) -> dict[str, Any]:
    """The facts that were given as flags, by Record's names.

    Raises:
        UsageError: a card that does not exist, without a peak of its own.
    """
    given = {name: getattr(arguments, f"fact_{name}", None) for name in FACTS}
    facts = {name: value for name, value in given.items() if value is not None}
    if "gpu_type" in facts and "peak_tflops" not in facts:
        try:
            planning_gpu(facts["gpu_type"])
        except UsageError as error:
            raise UsageError(f"{error}; another card needs --peak-tflops") from error
    return facts


def _size(kind: type, may_be_zero: bool, text: str) -> float:
    """A number above 0 (or, with `may_be_zero`, at least 0); argparse's `type`."""
    try:
        value = kind(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number") from None
    if not (0 < value < math.inf or (may_be_zero and value == 0)):
        raise argparse.ArgumentTypeError(f"{text} is not above 0")
    return value


def add_time_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags for how a step time is taken."""
    parser.add_argument(
        "--window",
        type=parse_window,
        metavar="FIRST:LAST",
        help="iterations to use, by the numbers in the log",
    )


def parse_window(text: str) -> tuple[int, int]:
    """`FIRST:LAST` as two iteration numbers; argparse's `type`."""
    first, colon, last = text.partition(":")
    try:
        if not colon or int(first) > int(last):
            raise ValueError
        return int(first), int(last)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not FIRST:LAST") from None
