"""Time to target of weak scaling: a larger batch needs more samples, by the law of
analysis/common/convergence.py."""

from collections import defaultdict
from typing import Any

import numpy as np

from analysis.common import convergence
from analysis.common.convergence import CriticalBatch
from analysis.common.reasons import MISSING, Reason, of_cells
from analysis.common.statistics import Bounded
from analysis.common.table import Column, Table
from analysis.common.terminal import who
from analysis.logs.naming import name_of
from analysis.logs.record import SCHEDULE, SEVERAL_BATCHES, Record
from analysis.runs.fairness import Terms
from analysis.runs.judged import Run
from analysis.runs.ratio import Side
from base.errors import Answer, UsageError
from base.intervals import Interval

COLUMNS = [
    Column("target_samples", convergence.TIMES_SAMPLES, ".2f"),
    Column("target_samples_ci95", "interval of the samples", ".2f", seldom=True),
    Column("target_efficiency", convergence.EFFICIENCY, ".2f"),
    Column("target_efficiency_ci95", "interval to target", ".2f", seldom=True),
]
KEYS = ("target_samples", "target_efficiency")  # the columns that are never left out
SAME_BATCH = (  # a note of strong scaling
    "one batch needs as many samples on any GPUs: --critical-batch, --target-loss say nothing here"
)
RECENT = 0.1  # share of the samples so far whose losses are averaged


def add_to(table: Table, groups: dict[str, list[Run]], base: Side, terms: Terms) -> None:
    """Adds to a weak curve the samples and the efficiency to target, before its last column, and
    what is to be said of them. `groups` are the runs of its rows.

    Raises:
        UsageError: a critical batch and a loss to fit one are both stated.
    """
    notes: list[str] = []
    law = _law_of([run.record for runs in groups.values() for run in runs], terms, notes)
    for row in table.rows:
        samples, batch = Bounded(None, None), groups[row["run"]][0].record.global_batch
        if law.value:
            samples = law.value.samples_ratio(batch, base.record.global_batch)
        row |= _cells(row, row["gpus"] / base.gpus, samples)
        reason = law.reason or row["missing"].get("efficiency", "")
        empty = tuple(key for key in KEYS if row[key] is None)
        row["missing"] |= of_cells([Reason(MISSING, reason, empty)])["missing"]
        if doubt := row["doubtful"].get("efficiency"):
            row["doubtful"]["target_efficiency"] = doubt
    table.columns = [*table.columns[:-1], *COLUMNS, table.columns[-1]]
    if law.value:
        measured = "; measured between batches with repeated runs" if law.value.points else ""
        table.notes.append(f"{convergence.TIMES_SAMPLES}: {law.value.in_words}{measured}")
    table.notes += _sooner(table.rows, base.gpus) + notes


def _cells(
    row: dict[str, Any], times_gpus: float, samples: Bounded
) -> dict[str, float | list[float] | None]:
    """Returns the columns of a row on `times_gpus` times the baseline's GPUs. The efficiency to
    target is the row's efficiency over the ratio of samples."""
    efficiency, samples_span, span = row["efficiency"], samples.interval, None
    if efficiency is not None:
        efficiency = efficiency / samples.value if samples.value else None
    if samples_span and row["speedup_ci95"]:
        ends = Interval(*(end / times_gpus for end in row["speedup_ci95"]))
        span = ends.over(samples_span)
    return {
        "target_samples": samples.value,
        "target_samples_ci95": samples_span and list(samples_span),
        "target_efficiency": efficiency,
        "target_efficiency_ci95": span and list(span),
    }


def _sooner(rows: list[dict[str, Any]], base_gpus: int) -> list[str]:
    """Returns a line that says how many times sooner the most GPUs reach the target."""
    known = [row for row in rows if row["gpus"] > base_gpus and row["target_efficiency"]]
    if not known:
        return []
    row = max(known, key=lambda row: (row["gpus"], row["target_efficiency"]))
    times = row["gpus"] / base_gpus
    sooner = f"{times * row['target_efficiency']:.2g}"
    if row["target_efficiency_ci95"]:
        low, high = (times * end for end in row["target_efficiency_ci95"])
        sooner += f" ({low:.2g} to {high:.2g})"
    return [f"{row['run']}: {times:g} times the GPUs reach the target {sooner} times sooner"]


def _law_of(records: list[Record], terms: Terms, notes: list[str]) -> Answer[CriticalBatch]:
    """Returns the critical batch of runs: as it is stated, fitted to their losses, or that of their
    benchmark; or why it is not known. What else is to be said goes to `notes`."""
    if terms.critical_batch and terms.target_loss is not None:
        raise UsageError("--critical-batch and --target-loss are two answers: give one")
    if not all(record.global_batch for record in records):
        return Answer(None, "not every log states its global batch (--global-batch)")
    if terms.critical_batch:
        return Answer(terms.critical_batch)
    abouts = [record.submission for record in records]
    results = {(about.benchmark, about.round) if about else ("", "") for about in abouts}
    benchmark, mlperf_round = results.pop()
    if terms.target_loss is not None:
        law = _fitted(records, terms.target_loss, notes)
    elif results or not benchmark:
        law = Answer(None, "no critical batch is known: --target-loss NATS fits one to your runs")
    elif not mlperf_round:
        law = Answer(None, "the path names no round of MLPerf, as training_results_v5.1 does")
    else:
        law = convergence.of_benchmark(benchmark, mlperf_round)
    return law if law.value else Answer(None, f"{law.reason} (or --critical-batch B)")


def _fitted(records: list[Record], loss: float, notes: list[str]) -> Answer[CriticalBatch]:
    """Returns the critical batch that fits the samples at which runs reached a loss."""
    samples: dict[int, list[float]] = defaultdict(list)
    early, never, changed = [], [], []
    for record in records:
        doubted = record.doubts.keys() & {SCHEDULE, SEVERAL_BATCHES, "restart"}
        is_micro = np.isfinite(record.steps["micro_s"]).any()
        if doubted or is_micro or record.epochs or record.per_epoch:
            changed.append(name_of(record))
        elif first_loss(record) <= loss:
            early.append(name_of(record))
        elif reached := samples_to(record, loss):
            samples[record.global_batch].append(reached)
        else:
            never.append(name_of(record))
    target = f"a loss of {loss:g} (the mean over the last {RECENT:.0%} of the samples so far)"
    if early:
        words = f"below {target} at their first entry, which does not say when they reached it"
        notes.append(f"{words}: {who(early, len(records))}")
    if never:
        notes.append(f"never reached {target}: {who(never, len(records))}")
    if changed:
        words = "not fitted, for these are not the steps of one batch and schedule, in their order"
        notes.append(f"{words}: {who(changed, len(records))}")
    points = [convergence.point_of(batch, each) for batch, each in samples.items()]
    runs = sum(point.runs for point in points)
    law = convergence.fitted(points, f"fitted to {len(points)} batches and {runs} runs at {target}")
    return law if law.value else Answer(None, f"{law.reason}, at {target}")


def first_loss(record: Record) -> float:
    """Returns the first loss that a run states; NaN where it states none."""
    losses = record.steps["loss"]
    return float(next(iter(losses[np.isfinite(losses)]), np.nan))


def samples_to(record: Record, loss: float) -> float | None:
    """Returns the samples with which a run's loss, averaged over the last tenth of the samples so
    far, first was at or below one; None where it never was. A window that grows with the samples is
    late by the same share in every run."""
    steps = record.steps
    is_known = np.isfinite(steps["loss"])
    start = np.minimum(steps["iteration"][:1] - 1, 0.0)  # some programs count from 0
    samples = np.cumsum(record.batches * np.diff(steps["iteration"], prepend=start))[is_known]
    sums = np.concatenate([[0.0], np.cumsum(steps["loss"][is_known])])
    first = np.searchsorted(samples, (1 - RECENT) * samples, side="right")
    last = np.arange(len(samples)) + 1
    means = (sums[last] - sums[first]) / (last - first)
    reached = np.flatnonzero(means <= loss)
    return float(samples[reached[0]]) if len(reached) else None
