"""One layout explained: its predicted seconds term by term, its memory part by part."""

import re
from typing import NamedTuple

import numpy as np

from analysis.planner.columns import Columns
from analysis.planner.ranking import HEADINGS, KEYS, Ranking, message_seconds, policy
from analysis.planner.space import engine_of
from base.errors import UsageError
from parallel.config.layout import EXPERT_AXES, OFFLOAD, RECOMPUTE

WORDS = {"recompute": RECOMPUTE, "sequence_parallel": ("no", "yes"), "offload": OFFLOAD}


class Chosen(NamedTuple):
    """A row, and of how many it was chosen, as a line: "" where it is the only one."""

    row: int
    line: str


def chosen_row(ranked: Ranking, layout: str) -> Chosen:
    """Returns the fastest row that has the settings of a text such as tp=8,pp=8,mbs=1. One that
    fits goes first. Names are those of the table or of a study."""
    keys = {heading.lower(): key for key, heading in HEADINGS.items()}
    pieces = [piece.partition("=") for piece in filter(None, re.split(r"[,\s]+", layout))]
    wanted = {keys.get(name.lower(), name): value for name, _, value in pieces}
    names = {*KEYS, "sequence_parallel", "shards", "offload"}
    if ranked.steps.experts.any():
        names |= {*EXPERT_AXES}
    if unknown := wanted.keys() - names:
        possible_names = ", ".join(sorted(names))
        raise UsageError(f"--why: unknown {', '.join(sorted(unknown))!r}; known: {possible_names}")
    if not wanted:
        raise UsageError("--why: say which layout, as tp=8,pp=8,mbs=1")
    texts = {key: _texts(ranked.steps, key) for key in wanted}
    match = np.logical_and.reduce([texts[key] == value for key, value in wanted.items()])
    rows = np.flatnonzero(match)
    if not len(rows):
        words = ", ".join(f"{key} {value}" for key, value in wanted.items())
        values = {k: sorted(set(texts[k]), key=lambda text: (len(text), text)) for k in wanted}
        possible = "; ".join(f"{k} {', '.join(texts)}" for k, texts in values.items())
        raise UsageError(f"--why: no possible layout has {words}; there are: {possible}")
    n, fit = len(rows), rows[ranked.used[rows] <= ranked.limit]
    line = f"the fastest of {n} such layouts" + (f", {len(fit)} of which fit" if len(fit) else "")
    rows = fit if len(fit) else rows
    return Chosen(int(rows[np.argmin(ranked.seconds[rows])]), f"{line}\n" if n > 1 else "")


def _texts(steps: Columns, key: str) -> np.ndarray:
    """Returns a column as the table shows it, str (n,)."""
    values = getattr(steps, key).astype(int)
    return np.array(WORDS[key])[values] if key in WORDS else values.astype(str)


def seconds_of(ranked: Ranking, i: int) -> dict[str, float]:
    """Returns the seconds of a row by term of the step; the term of compute is split into kernels
    and the messages between tp, cp and ep ranks."""
    terms = {name: float(values[i]) for name, values in ranked.terms.items()}
    messages = message_seconds(ranked, [i])
    messages = {name: values.item() for name, values in messages.items()}
    return {"kernels": terms.pop("compute") - sum(messages.values())} | messages | terms


def title(steps: Columns, i: int) -> str:
    """Returns the layout of row `i` in one line."""
    step = steps.rows[i]
    ends = f" (layers: first {step.first_layers}, last {step.last_layers})"
    ends = ends if step.first_layers else ""
    experts = f" ep {step.ep} etp {step.etp}" if step.experts else ""
    return (
        f"{engine_of(step.zero_stage, step.fsdp2)}: tp {step.tp} cp {step.cp} pp {step.pp} vpp"
        f" {step.vpp}{ends} dp {step.dp}{experts}, {policy(steps, i)}, {step.n_micro} micro-batches"
    )


def bars(values: dict[str, float], unit: str, width: int = 40) -> str:
    """Returns one bar a line, longest first."""
    total = sum(values.values())
    longest = max(*values.values(), 1e-12)
    lines = [
        f"  {name.replace('_', ' '):<16} {value:>9.4g} {unit} {value / total:>5.1%}"
        f" {'#' * round(width * value / longest)}"
        for name, value in sorted(values.items(), key=lambda item: -item[1])
        if value > 0
    ]
    return "\n".join([*lines, f"  {'sum':<16} {total:>9.4g} {unit}"]) + "\n"
