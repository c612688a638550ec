"""How a model scales before it is run: the fastest layout of each GPU count, and where it bends."""

import itertools
import math
from dataclasses import replace
from typing import Any

import numpy as np

from analysis.common.convergence import EFFICIENCY, TIMES_SAMPLES, CriticalBatch, times_samples
from analysis.common.table import Column, Table
from analysis.planner import explain, fitting, ranking
from analysis.planner.columns import Columns
from analysis.planner.ranking import Question, Ranking
from base.errors import UsageError

KNEE = 0.9  # share of the tokens/s of a GPU that twice the GPUs must keep
BAND = {"kept": "efficiency", "worst": "low", "best": "high"}
TARGET_BAND = {"target_efficiency": EFFICIENCY, "target_low": "low", "target_high": "high"}


def table(ask: Question, weak: bool, critical: CriticalBatch | None = None) -> Table:
    """Returns a table of the fastest layout on the GPUs asked for, on half of them and so on, while
    one fits; `weak` halves the batch, too. Efficiency is the tokens/s of a GPU over those of the
    fewest; they err together. The critical batch says what larger batches add to the time to a
    target."""
    cluster = ask.cluster
    rankings, rows, batches, stopped_by = [], [], [], ""
    while not stopped_by:
        gpus, batch = ask.gpus, ask.global_batch
        try:
            ranked = ask.ranked()
            stopped_by = "" if len(ranked.order) else ranking.nothing_fits(ranked, ask.config, gpus)
        except UsageError as error:
            stopped_by = f"{gpus} GPUs: {error}"
        if not stopped_by:
            rankings.insert(0, ranked)
            batches.insert(0, batch)
            (row,) = ranking.rows_of(ranked, ranked.best[:1], ask.config, ask.gemms)
            rows.insert(0, row | {"per_gpu": row["tokens_per_s"] / row["gpus"]})
            stopped_by = "the GPUs or their batch are odd" if gpus % 2 or weak and batch % 2 else ""
        ask = replace(ask, gpus=gpus // 2, global_batch=batch // 2 if weak else batch)
    if len(rows) < 2:
        raise UsageError(f"--scale compares two counts of GPUs or more: {stopped_by}")
    steps = Columns.stack([ranked.steps.take(ranked.best[:1]) for ranked in rankings])
    covariance = cluster.fit.covariances(steps, cluster.machine_for(steps))
    for i, row in enumerate(rows):
        kept, factor = row["per_gpu"] / rows[0]["per_gpu"], _factor(covariance, 0, i)
        row |= {"kept": kept, "worst": kept / factor, "best": kept * factor}
    columns = [Column(key, heading, ".1%") for key, heading in BAND.items()]
    if critical and weak:
        columns.append(Column("target_samples", TIMES_SAMPLES, ".2f"))
        columns += [Column(key, heading, ".1%") for key, heading in TARGET_BAND.items()]
        _add_targets(rows, batches, critical)
    chosen = fitting.telling(covariance, min(ranking.TRIED, len(rows) - 1))
    counts = ", ".join(str(rows[i]["gpus"]) for i in chosen)
    notes = [
        f"predicted, not measured, for {cluster.name} ({cluster.source})",
        _knee(rankings, rows),
        *_time_to_target(rows, batches, covariance, critical),
        f"{counts} GPUs: measured first, they narrow the intervals of all counts the most",
        f"no fewer GPUs: {stopped_by}",
        *ranking.width_note(rows, cluster),
        *cluster.network_note(rows[-1]["gpus"]),
    ]
    layouts = ranking.table(rows, notes, "")
    return replace(layouts, columns=[Column("gpus", "GPUs", "d"), *layouts.columns[1:], *columns])


def _factor(covariance: np.ndarray, i: int, j: int) -> float:
    """Returns the factor by which the ratio of the times of two counts may be off."""
    variance = covariance[i, i] + covariance[j, j] - 2 * covariance[i, j]
    return float(np.exp(fitting.INTERVAL * np.sqrt(max(variance, 0.0))))


def _add_targets(rows: list[dict[str, Any]], batches: list[int], critical: CriticalBatch) -> None:
    """Adds to each row the samples to a target over those of the fewest GPUs, and the efficiency
    over that, as far as both intervals allow."""
    for row, batch in zip(rows, batches, strict=True):
        samples, span = critical.law_ratio(batch, batches[0])
        low, high = span or (samples, samples)
        row |= {"target_samples": samples, "target_efficiency": row["kept"] / samples}
        row |= {"target_low": row["worst"] / high, "target_high": row["best"] / low}


def _time_to_target(
    rows: list[dict[str, Any]],
    batches: list[int],
    covariance: np.ndarray,
    critical: CriticalBatch | None,
) -> list[str]:
    """Returns a line that says at which number of GPUs the time to a target stops falling: the
    first one whose double may take as long, within the interval of both predictions and of the
    critical batch."""
    if len(set(batches)) > 1 and critical is None:
        return ["time to target -: larger batches need more samples (--critical-batch B)"]
    values = [critical.value, *(critical.interval or ())] if critical else [math.inf]
    for i, (fewer, more) in enumerate(itertools.pairwise(rows)):
        steps = more["predicted_s"] / fewer["predicted_s"] * batches[i] / batches[i + 1]
        ratios = [steps * times_samples(batches[i + 1], batches[i], value) for value in values]
        factor = _factor(covariance, i, i + 1)
        low, high = min(ratios) / factor, max(ratios) * factor
        if high >= 1:
            line = f"{'may stop' if ratios[0] < 1 else 'stops'} falling at {fewer['gpus']} GPUs"
            break
    else:
        line = f"still falls at {more['gpus']} GPUs"
    beside = f"{ratios[0]:.2f} ({low:.2f} to {high:.2f}) of that on {fewer['gpus']}"
    notes = [f"time to target: {line}; {more['gpus']} take {beside}"]
    if critical:
        notes.append(f"{TIMES_SAMPLES}: {critical.in_words}")
    return notes


def _seconds_a_token(ranked: Ranking, row: dict[str, Any]) -> dict[str, float]:
    """Returns the seconds of the fastest layout, whose row it is, for a token of a GPU, by term."""
    tokens = row["predicted_s"] * row["per_gpu"]
    return {term: s / tokens for term, s in explain.seconds_of(ranked, ranked.best[0]).items()}


def _knee(rankings: list[Ranking], rows: list[dict[str, Any]]) -> str:
    """Returns a line that says after which number of GPUs the tokens/s of a GPU fall, and which
    part of the step grows there."""
    keeps = [b["per_gpu"] / a["per_gpu"] for a, b in zip(rows, rows[1:], strict=False)]
    i = next((i for i, kept in enumerate(keeps) if kept < KNEE), None)
    if i is None:
        return f"no knee: each doubling keeps {min(keeps):.1%} or more of the tokens/s of a GPU"
    fewer, more = (_seconds_a_token(rankings[n], rows[n]) for n in (i, i + 1))
    grown = {term: max(more[term] - fewer[term], 0.0) for term in more}
    cause = max(grown, key=grown.get)
    return (
        f"knee at {rows[i]['gpus']} GPUs: {rows[i + 1]['gpus']} keep {keeps[i]:.1%} of a GPU's"
        f" tokens/s; {grown[cause] / sum(grown.values()):.0%} of what grew is"
        f" {cause.replace('_', ' ')}"
    )
