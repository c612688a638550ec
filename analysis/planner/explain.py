"""One layout explained: its predicted seconds term by term, its memory part by part."""

import re
from pathlib import Path

import numpy as np

from analysis.common import drawing
from analysis.common.colours import FIRST
from analysis.planner import timemodel
from analysis.planner.calibration import Calibration
from analysis.planner.ranking import HEADINGS, KEYS, gigabytes_by_part, policy, seconds_by_term
from analysis.planner.space import engine_of
from base.errors import UsageError
from parallel.config import memory
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
        if key in wanted:
            raise UsageError(f"--why: {key} is given twice")
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


def why(
    x: Columns, seconds: np.ndarray, used: np.ndarray, wanted: dict[str, int], limit: float
) -> tuple[int, str]:
    """(the fastest row that has the wanted settings and fits, or the fastest if none fits; of how
    many it was chosen, as a line, "" where it is the only one).

    Raises:
        UsageError: no layout has them.
    """
    match = np.ones(len(x), bool)
    for key, value in wanted.items():
        match &= getattr(x, key) == value
    rows = np.flatnonzero(match)
    if not len(rows):
        said = ", ".join(f"{k} {_word(k, v)}" for k, v in wanted.items())
        there = "; ".join(
            f"{k} {', '.join(_word(k, v) for v in np.unique(getattr(x, k)))}" for k in wanted
        )
        raise UsageError(f"--why: no possible layout has {said}; there are: {there}")
    n, fit = len(rows), rows[used[rows] <= limit]
    chosen = f"the fastest of {n} such layouts{f', {len(fit)} of which fit' * bool(len(fit))}\n"
    rows = fit if len(fit) else rows
    return int(rows[np.argmin(seconds[rows])]), chosen * (n > 1)


def by_part(
    x: Columns, cluster: Calibration
) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
    """(seconds by term, gigabytes by part) of layouts, (n,) each; compute is split into kernels and
    messages between tp and cp ranks."""
    terms, messages = seconds_by_term(x, cluster)
    kernels_s = terms.pop("compute") - sum(messages.values())
    return {"kernels": kernels_s} | messages | terms, gigabytes_by_part(x, cluster)


def explained(x: Columns, i: int, cluster: Calibration) -> tuple[dict, dict]:
    """`by_part` of one layout, as numbers."""
    seconds, gigabytes = by_part(x.take(np.array([i])), cluster)
    return tuple({k: v.item() for k, v in parts.items()} for parts in (seconds, gigabytes))


def exchange(x: Columns, i: int) -> str:
    """A line about what the cp ranks send each other; "" where there is one."""
    if x.cp[i] == 1:
        return ""
    gb = (timemodel.received(x) * x.n_micro * x.layers / x.pp)[i] / memory.GB
    how = "gathered before attention" if x.gathers[i] else "in a ring beside attention"
    return f"each cp rank receives {gb:.4g} GB of keys, values and their gradients a step, {how}\n"


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


def draw(
    time: dict[str, float],
    gigabytes: dict[str, float],
    title: str,
    path: Path,
    force: bool = False,
) -> None:
    """Both bar charts as a picture."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 4), layout="tight")
    for axis, values, unit in zip(
        figure.subplots(1, 2), (time, gigabytes), ("s", "GB"), strict=True
    ):
        ordered = sorted(values.items(), key=lambda item: item[1])
        axis.barh(*zip(*ordered, strict=True), color=FIRST)
        axis.set_xlabel(f"predicted {unit}, sum {sum(values.values()):.4g} {unit}")
    figure.suptitle(title)
    drawing.write(figure, path, 120, force)
