"""The flags that every command on logs has: facts that a log leaves out, how a step is timed."""

import argparse
import functools
import math
from typing import Any

from analysis.logs.parsing.setting_names import (
    COUNTS,
    MODEL,
    MODEL_SIZES,
    MODEL_SWITCHES,
    MODEL_WORDS,
    NUMBERS,
    SETTING_WORDS,
    SETTINGS,
)
from base.errors import UsageError
from models.gpus import planning_gpu


def add_fact_flags(parser: argparse.ArgumentParser) -> None:
    """Add a flag for each fact that a log may leave out; what a log says itself stays."""
    keys = ", ".join((*SETTINGS, *MODEL))
    group = parser.add_argument_group(
        "facts that the logs leave out",
        f"NAME.toml beside a log gives them for that log alone; its keys: {keys}",
    )
    for name, text in (SETTINGS | MODEL_SIZES).items():
        kind = int if name in COUNTS | MODEL_SIZES else float if name in NUMBERS else str
        checked = kind if kind is str else functools.partial(_size, kind, name == "zero_stage")
        words = SETTING_WORDS.get(name)
        group.add_argument(
            flag_of(name),
            type=checked,
            choices=words,
            dest=f"fact_{name}",
            metavar=None if words else kind.__name__.upper(),
            help=text,
        )
    for name, (words, text) in MODEL_WORDS.items():
        group.add_argument(flag_of(name), choices=words, dest=f"fact_{name}", help=text)
    for name, text in MODEL_SWITCHES.items():
        yes_or_no = argparse.BooleanOptionalAction
        group.add_argument(flag_of(name), action=yes_or_no, dest=f"fact_{name}", help=text)


def flag_of(name: str) -> str:
    """The flag that gives a fact."""
    return "--steps" if name == "planned_steps" else "--" + name.replace("_", "-")


def facts_of(arguments: argparse.Namespace | None) -> dict[str, Any]:
    """The facts that were given as flags, by Record's names.

    Raises:
        UsageError: a card that does not exist, without a peak of its own.
    """
    given = {name: getattr(arguments, f"fact_{name}", None) for name in (*SETTINGS, *MODEL)}
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
