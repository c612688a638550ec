"""What is not known of a step that is predicted, and how wide its 80 % interval is for it.

The errors of a publisher's rows go together, so a row says little of the next publisher's. The
widths are those that held for publishers that had no part in choosing them: `spread` grows with
all that is unknown of the case, and a factor makes four of five rows of a further publisher fall
inside. `widths.toml` has the numbers, and benchmarks/planner/interval_errors.py how they follow
from the errors: a scale by the interval score (Gneiting and Raftery 2007, section 6.2), and
conformal prediction over groups (Dunn, Wasserman and Ramdas 2022; Lee, Barber and Willett 2023).
"""

from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from analysis.planner.columns import FAMILIES, Array, Columns
from analysis.planner.timemodel.layer import host_share
from analysis.planner.timemodel.machine import Machine
from base.files import read_toml

FILE = Path(__file__).parent / "widths.toml"
HOST = 0.1  # share of a layer's time from which on the host may be its limit
# What may be unknown -> how a note says it.
UNKNOWN = {
    "model": "no fitted run is of this model",
    "experts": "it has experts",
    "moved": "constants were fitted on other models than these experts",
    "fp8": "GEMMs in fp8 or less",
    "card": "fewer than two publishers measured this card",
    "engine": "fewer than two publishers measured this engine",
    "host": "the host that launches kernels is or may be the limit",
}


class Scale(NamedTuple):
    """What deviations are multiplied by, and the publishers and rows behind it."""

    factor: float
    publishers: int
    rows: int


class Widths(NamedTuple):
    """What `widths.toml` states. unknown: log seconds by what is unknown; cards and engines: those
    that two publishers or more measured."""

    unknown: dict[str, float]
    without_runs: Scale
    with_runs: Scale
    cards: frozenset[str]
    engines: frozenset[str]


@cache
def widths() -> Widths:
    """Returns the committed widths."""
    stated = read_toml(FILE, "widths of intervals")
    scales = {name: Scale(**stated[name]) for name in ("without_runs", "with_runs")}
    names = {name: frozenset(stated[name]) for name in ("cards", "engines")}
    return Widths(unknown=stated["unknown"], **scales, **names)


def models_of(steps: Columns) -> list[str]:
    """Returns what the runs of a row's model teach of: its layers and their width, its experts, and
    whether its GEMMs run in fp8 or less."""
    names = zip(steps.layers.tolist(), steps.hidden.tolist(), steps.experts, steps.fp8, strict=True)
    return [
        f"{layers} x {hidden}{f', {experts} experts' if experts else ''}{', fp8' if fp8 else ''}"
        for layers, hidden, experts, fp8 in names
    ]


def unknown(
    steps: Columns, machine: Machine, fit: Any, cards: frozenset[str], engines: frozenset[str]
) -> dict[str, Array]:
    """Returns what is not known of each row, {name of UNKNOWN: bool (n,)}. Runs of a model on a
    cluster tell of its experts, precision, card and engine, but not of a host that may be the
    limit. fit: a `fitting.Fit`; cards, engines: those that count as measured."""
    new_model = ~np.isin(models_of(steps), list(fit.models))
    new_experts = new_model & (steps.experts > 0)
    no_runs = np.full(len(steps), fit.n == 0)
    family = np.array(FAMILIES)[steps.family]
    host = host_share(steps, machine, fit.constants) > HOST
    return {
        "model": new_model,
        "experts": new_experts,
        "moved": new_experts & ~no_runs,
        "fp8": new_model & steps.fp8,
        "card": no_runs & (fit.card not in cards),
        "engine": no_runs & ~np.isin(family, list(engines)),
        "host": host & np.isinf(machine.cores),  # of a host CPU, all time is the host's
    }


def widened(variance: Array, unknown: dict[str, Array], sizes: dict[str, float]) -> Array:
    """Returns the variance, (n,), or covariance, (n, n), that a fit states of log seconds, with the
    square of the size of all that is unknown added. Rows of which the same is unknown err
    together."""
    for name, is_unknown in unknown.items():
        together = np.outer(is_unknown, is_unknown) if variance.ndim == 2 else is_unknown
        variance = variance + sizes[name] ** 2 * together
    return variance
