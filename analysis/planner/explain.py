"""One layout explained: its predicted seconds term by term, its memory part by part."""

import re
from typing import NamedTuple

import numpy as np

from analysis.planner.ranking import (
    HEADINGS,
    KEYS,
    Ranking,
    message_seconds,
    policy,
)
from analysis.planner.space import engine_of
from base.errors import UsageError
from parallel.config.layout import RECOMPUTE
from parallel.config.layout_arrays import Columns

WORDS = {
    "recompute": {name: i for i, name in enumerate(RECOMPUTE)},
    "sequence_parallel": {"yes": 1, "no": 0, "1": 1, "0": 0},
}


def parse_layout(text: str) -> dict[str, int]:
    """Numbers of a text such as tp=8,pp=8,mbs=1; names as in the table or in a study.

    Raises:
        UsageError: an unknown name or a value that is none.
    """
    known = {*KEYS, "sequence_parallel"}
    by_heading = {heading.lower(): key for key, heading in HEADINGS.items()}
    wanted: dict[str, int] = {}
    for piece in filter(None, re.split(r"[,\s]+", text)):
        name, _, value = piece.partition("=")
        key = by_heading.get(name.lower(), name)
        if key not in known:
            raise UsageError(f"--why: unknown {key!r}; known: {', '.join(sorted(known))}")
        words = WORDS.get(key, {})
        if value in words:
            wanted[key] = words[value]
        elif value.isdecimal() and value.isascii() and key != "recompute":
            wanted[key] = int(value)
        else:
            allowed = ", ".join(words) or "a whole number"
            raise UsageError(f"--why: {key} cannot be {value!r}, only {allowed}")
    if not wanted:
        raise UsageError("--why: say which layout, as tp=8,pp=8,mbs=1")
    return wanted


def _word(key: str, value: int) -> str:
    return next((word for word, v in WORDS.get(key, {}).items() if v == value), str(int(value)))


class Chosen(NamedTuple):
    """A row, and of how many it was chosen, as a line: "" where it is the only one."""

    row: int
    line: str


def why(r: Ranking, wanted: dict[str, int]) -> Chosen:
    """The fastest row that has the wanted settings and fits, or the fastest if none fits.

    Raises:
        UsageError: no layout has them.
    """
    match = np.logical_and.reduce([getattr(r.x, key) == value for key, value in wanted.items()])
    rows = np.flatnonzero(match)
    if not len(rows):
        words = ", ".join(f"{k} {_word(k, v)}" for k, v in wanted.items())
        there = "; ".join(
            f"{k} {', '.join(_word(k, v) for v in np.unique(getattr(r.x, k)))}" for k in wanted
        )
        raise UsageError(f"--why: no possible layout has {words}; there are: {there}")
    n, fit = len(rows), rows[r.used[rows] <= r.limit]
    line = f"the fastest of {n} such layouts" + (f", {len(fit)} of which fit" if len(fit) else "")
    rows = fit if len(fit) else rows
    return Chosen(int(rows[np.argmin(r.seconds[rows])]), f"{line}\n" if n > 1 else "")


def seconds_of(r: Ranking, i: int) -> dict[str, float]:
    """Seconds of a row by term; compute is split into kernels and messages between tp and cp
    ranks."""
    terms = {name: float(values[i]) for name, values in r.terms.items()}
    messages = message_seconds(r.x.take([i]), r.cluster)
    messages = {name: values.item() for name, values in messages.items()}
    return {"kernels": terms.pop("compute") - sum(messages.values())} | messages | terms


def title(x: Columns, i: int) -> str:
    """The layout in one line."""
    return (
        f"{engine_of(x.zero_stage[i], x.fsdp2[i])}: tp {x.tp[i]} cp {x.cp[i]} pp {x.pp[i]} vpp"
        f" {x.vpp[i]} dp {x.dp[i]}, {policy(x, i)}, {x.n_micro[i]} micro-batches"
    )


def bars(values: dict[str, float], unit: str, width: int = 40) -> str:
    """One bar a line, longest first."""
    total = sum(values.values())
    longest = max(*values.values(), 1e-12)
    lines = [
        f"  {name.replace('_', ' '):<16} {value:>9.4g} {unit} {value / total:>5.1%}"
        f" {'#' * round(width * value / longest)}"
        for name, value in sorted(values.items(), key=lambda item: -item[1])
        if value > 0
    ]
    return "\n".join([*lines, f"  {'sum':<16} {total:>9.4g} {unit}"]) + "\n"
