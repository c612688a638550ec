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
    records = [run.record for runs in groups.values() for run in runs]
    notes: list[str] = []
    law = _law_of(records, terms, notes)
    for row in table.rows:
        batch, samples, reason = groups[row["run"]][0].record.global_batch, None, law.reason
        if not (batch and base.record.global_batch):
            reason = "the log does not state the global batch (--global-batch)"
        elif law.value:
            samples = law.value.samples_ratio(batch, base.record.global_batch)
            reason = row["missing"].get("efficiency", "")
        row |= _cells(row, row["gpus"] / base.gpus, samples)
        empty = tuple(key for key in KEYS if row[key] is None)
        row["missing"] |= of_cells([Reason(MISSING, reason, empty)])["missing"]
    table.columns = [*table.columns[:-1], *COLUMNS, table.columns[-1]]
    if law.value:
        table.notes.append(
            f"{convergence.TIMES_SAMPLES}: by 1 + batch / critical batch, with"
            f" {law.value.in_words}; measured between two batches whose runs were repeated"
        )
        table.notes += _sooner(table.rows, base.gpus)
    table.notes += notes


def _law_of(records: list[Record], terms: Terms, notes: list[str]) -> Answer[CriticalBatch]:
    """Returns the critical batch of runs: as it is stated, fitted to their losses, or that of their
    benchmark; or why it is not known. What else is to be said goes to `notes`."""
    if terms.critical_batch and terms.target_loss is not None:
        raise UsageError("--critical-batch and --target-loss are two answers: give one")
    if terms.critical_batch:
        return Answer(terms.critical_batch)
    abouts = [record.submission for record in records]
    results = {about and (about.benchmark, about.round) for about in abouts}
    if terms.target_loss is not None:
        answer = _fitted(records, terms.target_loss, notes)
    elif len(results) > 1 or None in results:
        loss = "or --target-loss NATS where runs of two batches reached one"
        return Answer(None, f"the critical batch is not known (--critical-batch B, {loss})")
    else:
        ((benchmark, mlperf_round),) = results
        answer = Answer(None, "the path names no round of MLPerf, as training_results_v5.1 does")
        if mlperf_round:
            answer = convergence.of_benchmark(benchmark, mlperf_round)
    return answer if answer.value else Answer(None, f"{answer.reason} (or --critical-batch B)")


def _fitted(records: list[Record], loss: float, notes: list[str]) -> Answer[CriticalBatch]:
    """Returns the critical batch that fits the samples at which runs reached a loss."""
    samples: dict[int, list[float]] = defaultdict(list)
    never, changed = [], []
    for record in records:
        reached = samples_to(record, loss)
        doubted = record.doubts.keys() & {SCHEDULE, SEVERAL_BATCHES}
        if doubted or record.epochs or record.per_epoch or not record.global_batch:
            changed.append(name_of(record))
        elif reached is None:
            never.append(name_of(record))
        else:
            samples[record.global_batch].append(reached)
    target = f"a loss of {loss:g} (the mean over the last {RECENT:.0%} of the samples so far)"
    if never:
        notes.append(f"never reached {target}: {who(never, len(records))}")
    if changed:
        words = "not fitted, for their steps are not of one known batch and schedule"
        notes.append(f"{words}: {who(changed, len(records))}")
    points = [convergence.point_of(batch, each) for batch, each in samples.items()]
    runs = sum(point.runs for point in points)
    law = convergence.fitted(points, f"fitted to {len(points)} batches and {runs} runs at {target}")
    return law if law.value else Answer(None, f"{law.reason}, at {target}")


def samples_to(record: Record, loss: float) -> float | None:
    """Returns the samples with which a run's loss, averaged over the last tenth of the samples so
    far, first was at or below one; None where it never was. A window that grows with the samples is
    late by the same share in every run."""
    steps = record.steps
    added = record.batches * np.diff(steps["iteration"], prepend=0.0)
    is_known = np.isfinite(steps["loss"])
    samples = np.cumsum(np.where(added > 0, added, 0.0))[is_known]
    sums = np.concatenate([[0.0], np.cumsum(steps["loss"][is_known])])
    first = np.searchsorted(samples, (1 - RECENT) * samples, side="right")
    last = np.arange(len(samples)) + 1
    means = (sums[last] - sums[first]) / (last - first)
    reached = np.flatnonzero(means <= loss)
    return float(samples[reached[0]]) if len(reached) else None


def _cells(
    row: dict[str, Any], times_gpus: float, samples: Bounded | None
) -> dict[str, float | list[float] | None]:
    """Returns the columns of a row on `times_gpus` times the baseline's GPUs. The efficiency to
    target is the row's efficiency over the ratio of samples."""
    cells = dict.fromkeys(column.key for column in COLUMNS)
    if samples is None:
        return cells
    cells["target_samples"] = samples.value
    if samples.interval:
        cells["target_samples_ci95"] = list(samples.interval)
    if row["efficiency"] is not None:
        cells["target_efficiency"] = row["efficiency"] / samples.value
    if samples.interval and row["speedup_ci95"]:
        efficiency = Interval(*(end / times_gpus for end in row["speedup_ci95"]))
        cells["target_efficiency_ci95"] = list(efficiency.over(samples.interval))
    return cells


def _sooner(rows: list[dict[str, Any]], base_gpus: int) -> list[str]:
    """Returns how many times sooner the most GPUs reach the target, where that is known."""
    row = max(rows, key=lambda row: (row["gpus"], row["target_efficiency"] or 0.0))
    times = row["gpus"] / base_gpus
    if times <= 1 or not row["target_efficiency"]:
        return []
    sooner = f"{times * row['target_efficiency']:.2g}"
    if row["target_efficiency_ci95"]:
        low, high = (times * end for end in row["target_efficiency_ci95"])
        sooner += f" ({low:.2g} to {high:.2g})"
    return [f"{row['run']}: {times:g} times the GPUs reach the target {sooner} times sooner"]
