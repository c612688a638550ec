"""Paths in, records out, for every command here: the readers' door and the flags for it."""

import argparse
import functools
import math
from pathlib import Path

from analysis.readers import read_all
from analysis.readers._settings import INTEGERS, MODEL_SIZES, SETTINGS
from analysis.records import Record
from models.errors import UsageError


def add_fact_flags(parser: argparse.ArgumentParser) -> None:
    """A flag for each fact that a log may leave out; what a log says itself stays."""
    group = parser.add_argument_group("facts that the logs leave out")
    for name in (*SETTINGS, *MODEL_SIZES):
        kind = int if name in (*INTEGERS, *MODEL_SIZES) else float if name == "params" else str
        flag = "--" + name.replace("_", "-")
        checked = kind if kind is str else functools.partial(_size, kind, name == "zero_stage")
        group.add_argument(flag, type=checked, dest=f"fact_{name}", metavar=kind.__name__.upper())


def _size(kind: type, may_be_zero: bool, text: str) -> float:
    """A number above 0 (or, `may_be_zero`, not below it); argparse's `type`."""
    try:
        value = kind(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number") from None
    if not (0 < value < math.inf or (may_be_zero and value == 0)):
        raise argparse.ArgumentTypeError(f"{text} is not above 0")
    return value


def load(
    paths: list[Path], arguments: argparse.Namespace | None = None
) -> tuple[list[Record], list[str]]:
    """Every run at or below the paths, and one line for each thing that was refused.

    Raises:
        UsageError: nothing at all could be read.
    """
    flags = {
        name: value
        for name in (*SETTINGS, *MODEL_SIZES)
        if (value := getattr(arguments, f"fact_{name}", None)) is not None
    }
    records, refusals = read_all(paths, flags)
    for record in records:
        _multiply_out(record)
    refused = [str(refusal) for refusal in refusals]
    if not records:
        raise UsageError("; ".join(refused) or "nothing to read")
    return records, refused


def _multiply_out(record: Record) -> None:
    """gpus = tp x pp x dp x cp, where one of gpus and dp is open."""
    tp, pp, dp, cp = record.tp, record.pp, record.dp, record.extra.get("cp") or 1
    if record.gpus is None and tp and pp and dp:
        record.gpus = tp * pp * dp * cp
        record.origin["gpus"] = record.origin.get("dp", "log")
    elif dp is None and record.gpus and tp and pp and record.gpus % (tp * pp * cp) == 0:
        record.dp = record.gpus // (tp * pp * cp)
        record.origin["dp"] = record.origin.get("gpus", "log")


def name_of(record: Record) -> str:
    """What a table calls the run: its own name, or the file's."""
    return record.extra.get("run") or Path(record.source).name
