"""The options that every command on logs has: facts that a log leaves out, how a step is timed."""

import argparse
import re
from typing import Any

from analysis.logs.facts import FACTS
from base.bounds import Bounds, Count, Words
from base.errors import UsageError
from models.gpus import planning_gpu
from parallel.measure.steady_time import Window


def add_fact_options(parser: argparse.ArgumentParser) -> None:
    """Adds a flag for each fact that a log may leave out. What a log says itself is kept."""
    group = parser.add_argument_group(
        "facts that the logs leave out",
        f"NAME.toml beside a log gives them for that log alone; its keys: {', '.join(FACTS)}",
    )
    for name, fact in FACTS.items():
        allowed = fact.allowed
        if allowed is bool:
            options: dict[str, Any] = {"action": argparse.BooleanOptionalAction}
        elif isinstance(allowed, Words):
            options = {"choices": allowed}
        else:
            value_type = {Count: int, Bounds: float}.get(type(allowed), str)
            options = {"type": value_type, "metavar": value_type.__name__.upper()}
        group.add_argument(flag_of(name), dest=f"fact_{name}", help=fact.help, **options)


def flag_of(name: str) -> str:
    """Returns the flag that gives a fact, by Record's name of the fact."""
    return "--steps" if name == "planned_steps" else "--" + name.replace("_", "-")


def facts_of(arguments: argparse.Namespace | None) -> dict[str, Any]:
    """Returns the facts that were given as flags, by Record's names.

    Raises:
        UsageError: a number out of its bounds; an unknown card without a peak of its own.
    """
    flags = {name: getattr(arguments, f"fact_{name}", None) for name in FACTS}
    facts = {name: value for name, value in flags.items() if value is not None}
    for name, value in facts.items():
        allowed = FACTS[name].allowed
        if isinstance(allowed, Bounds) and (problem := allowed.problem(flag_of(name), value)):
            raise UsageError(problem)
    if "gpu_type" in facts and "peak_tflops" not in facts:
        try:
            planning_gpu(facts["gpu_type"])
        except UsageError as error:
            raise UsageError(f"{error}; for MFU alone give --peak-tflops, too") from error
    return facts


def add_time_options(parser: argparse.ArgumentParser) -> None:
    """Adds the flag that says of which iterations the step time is taken."""
    parser.add_argument(
        "--window",
        type=parse_window,
        metavar="FIRST:LAST",
        help="iterations to use, by the numbers in the log",
    )


def parse_window(text: str) -> Window:
    """Returns the two iteration numbers of `FIRST:LAST`; it is an argparse `type`."""
    match = re.fullmatch(r"(\d{1,15}):(\d{1,15})", text)
    if not match or int(match[1]) > int(match[2]):
        raise argparse.ArgumentTypeError(f"{text!r} is not FIRST:LAST")
    return Window(int(match[1]), int(match[2]))
