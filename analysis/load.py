"""Paths in, records out, for every command here: the readers' door and the flags for it."""

import argparse
import functools
import math
import os
from collections import defaultdict
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
    shown = distinct([own_name(r) for r in records], [Path(r.source) for r in records])
    for record, name in zip(records, shown, strict=True):
        record.extra["shown"] = name
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


def own_name(record: Record) -> str:
    """What the run calls itself, or the file's name."""
    return record.extra.get("run") or Path(record.source).name


def name_of(record: Record) -> str:
    """What a table calls the run: its own name, with folders where others have that name, too."""
    return record.extra.get("shown") or own_name(record)


def distinct(names: list[str], paths: list[Path]) -> list[str]:
    """Each run's name, or, where several have it, the end of its path that tells them apart."""
    groups: dict[str, list[int]] = defaultdict(list)
    for i, name in enumerate(names):
        groups[name].append(i)
    found = list(names)
    for name, members in groups.items():
        parts = {i: Path(os.path.abspath(paths[i])).parts for i in members}
        for depth in range(1, max(map(len, parts.values())) + 1):
            tails = {i: "/".join(parts[i][-depth:]) for i in members}
            if len(members) > 1 and (
                depth == max(map(len, parts.values())) or len(set(tails.values())) == len(members)
            ):
                for i, tail in tails.items():
                    found[i] = tail if tail.endswith("/" + name) else f"{name} ({tail})"
                break
    return found


def called(wanted: str, record: Record) -> bool:
    """Whether `--baseline wanted` may mean the run: by a name, its configuration's, or its path."""
    names = (name_of(record), own_name(record), record.extra.get("configuration"))
    return wanted in names or os.path.abspath(wanted) == os.path.abspath(record.source)


def chosen(wanted: str, names: list[tuple[str, str, Path]]) -> int:
    """Which of (shown name, own name, path) `--baseline wanted` means; it may be a path.

    Raises:
        UsageError: none or several, with the names to choose from.
    """
    path = os.path.abspath(wanted)
    fits = [
        i
        for i, (shown, own, where) in enumerate(names)
        if wanted in (shown, own) or path == os.path.abspath(where)
    ]
    exact = [i for i in fits if names[i][0] == wanted]
    if len(fits) != 1 and len(exact) != 1:
        known = ", ".join(names[i][0] for i in fits or range(len(names)))
        if not fits:
            raise UsageError(f"no run called {wanted!r}; there are: {known}")
        raise UsageError(f"--baseline {wanted} fits {len(fits)} runs: {known}; name one of these")
    return (exact if len(exact) == 1 else fits)[0]


def baseline_of(wanted: str, records: list[Record]) -> Record:
    """The one record that `--baseline wanted` means.

    Raises:
        UsageError: none or several, with the names to choose from.
    """
    names = [(name_of(r), own_name(r), Path(r.source)) for r in records]
    return records[chosen(wanted, names)]
