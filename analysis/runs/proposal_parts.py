"""Which runs a proposal is about: the work, strong or weak, that they share on several sizes, and
the laws that fit it."""

import math
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from analysis.common.reasons import MISSING, Reason
from analysis.logs.naming import name_of
from analysis.logs.record import Record
from analysis.runs import scaling_curve
from analysis.runs.fairness import Terms, batch_per_gpu
from analysis.runs.judged import Run, results
from analysis.runs.ratio import Side
from analysis.runs.run_row import row_of
from analysis.runs.scaling_curve import Compared, compared
from analysis.runs.scaling_laws import LAWS, Fit, fit
from analysis.runs.submissions import is_result, works
from base.errors import UsageError

NO_NODES = Reason(MISSING, "no run states the GPUs of a node (--gpus-per-node)", ("nodes",))


@dataclass(frozen=True)
class Request:
    """What a proposal asks: the tokens to train on, a size in GPUs beside those that were measured,
    and what no log states. noise: a run's standard deviation, as a share
    of its time."""

    tokens: float
    size: int | None = None
    gpus_per_node: int | None = None
    gpu_watts: float | None = None
    noise: float | None = None
    machine: str | None = None
    libraries: str | None = None

    def per_node(self, records: list[Record]) -> int | None:
        """Returns the GPUs of a node: as it was asked, else the most that a run states."""
        stated = [self.gpus_per_node or 0]
        for record in records if not self.gpus_per_node else ():
            host = record.facts.get("host") or {}
            stated += [host.get("ranks_per_node") or 0, host.get("gpus_visible") or 0]
            stated.append((record.submission and record.submission.gpus_per_node) or 0)
        return max(stated) or None


class Part(NamedTuple):
    """Runs of one fixed work on several sizes. best: by N, the configuration of each size that the
    laws are fitted to, with its row of the curve. per_node: the GPUs of a node."""

    title: str
    compared: Compared
    best: dict[float, tuple[Side, dict[str, Any]]]
    fits: list[tuple[str, Fit | None, str]]  # a law's name, its fit, or why there is none
    per_node: int | None

    def nodes(self, gpus: int) -> int | None:
        """Returns the nodes that so many GPUs are on: a part of a node counts as one."""
        return math.ceil(gpus / self.per_node) if self.per_node else None

    @property
    def scaling(self) -> str:
        return self.compared.scaling

    @property
    def base(self) -> Side:
        return self.compared.base

    def runs(self) -> list[Run]:
        """Returns the runs of the configurations that the laws are fitted to."""
        return [run for side, _ in self.best.values() for run in self.compared.groups[side.name]]


def parts_of(
    records: list[Record], refused: list[str], terms: Terms, request: Request
) -> tuple[list[Part], list[tuple[str, str]]]:
    """Returns the parts of strong and of weak scaling, and the runs that are in none, with the
    reasons. Where no work has two sizes, the one part is the baseline's size alone."""
    laws = [terms.scaling] if terms.scaling else list(LAWS)
    submitted = [record for record in records if is_result(record)]
    others = [record for record in records if not is_result(record)]
    parts, left_out = [], []
    if submitted:
        runs, left_out = results(submitted, [] if others else refused, terms.window)
        parts = [
            _part(work.title, compared(work.records, [], work.terms(terms)), request)
            for work in works(runs, terms.scaling)
        ]
    if others:
        fair = [compared(others, refused, replace(terms, scaling=law)) for law in laws]
        parts += [_part(f"{one.scaling} scaling", one, request) for one in fair]
        left_out += fair[0].left_out
    several = [
        part
        for part in parts
        if len(part.best) > 1
        # Of weak scaling, the runs must state what stays the same.
        and (part.scaling == "strong" or all(map(batch_per_gpu, part.compared.records)))
    ]
    parts = several or parts[:1]
    if not parts:
        raise UsageError("no series has two sizes with one global batch or one batch per GPU")
    used = {name_of(record) for part in parts for record in part.compared.records}
    return parts, [(name, reason) for name, reason in left_out if name not in used]


def _part(title: str, found: Compared, request: Request) -> Part:
    """Returns compared runs with the laws that fit them."""
    sides = list(found.sides.values())
    rows = scaling_curve.curve(sides, found.base, found.scaling).rows
    ordered = [found.sides[row["run"]] for row in rows]
    best = scaling_curve.fastest(ordered, rows, found.base)
    times = {ratio: side.seconds for ratio, (side, _) in best.items()}
    fits = []
    for law in LAWS[found.scaling] if best else ():
        fitted, reason = fit(law, found.scaling, times, request.noise)
        if fitted and fitted.parameter(0).value > 1:
            fitted, reason = None, "more GPUs are slower than the baseline, so no law has a limit"
        fits.append((law.name, fitted, reason))
    if not best:  # one size
        same = [pair for pair in zip(ordered, rows, strict=True) if pair[0].gpus == found.base.gpus]
        best = {1.0: min(same, key=lambda pair: (pair[1]["speedup"] is None, pair[0].step_s))}
    return Part(title, found, best, fits, request.per_node(found.records))


def tokens_of_step(part: Part, side: Side) -> tuple[float | None, list[Reason]]:
    """Returns the tokens of a step of a configuration, and why they are unknown or in doubt."""
    run = part.compared.groups[side.name][0]
    row = row_of(run, None)
    reasons = [reason for reason in row.reasons if "tokens_per_s" in reason.columns]
    rate = row.values["tokens_per_s"]
    return rate and rate * run.time.step_s, reasons
