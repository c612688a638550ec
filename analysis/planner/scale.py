"""How a model scales before it is run: the fastest layout of each GPU count, and where it bends."""

from dataclasses import replace
from typing import Any

import numpy as np

from analysis.common.table import Column, Table
from analysis.planner import explain, fitting, ranking
from analysis.planner.columns import Columns
from analysis.planner.ranking import Question, Ranking
from base.errors import UsageError

KNEE = 0.9  # share of the tokens/s of a GPU that twice the GPUs must keep
BAND = {"kept": "efficiency", "worst": "low", "best": "high"}


def table(ask: Question, weak: bool) -> Table:
    """Returns a table of the fastest layout on the GPUs asked for, on half of them and so on, while
    one fits; `weak` halves the batch, too. Efficiency is the tokens/s of a GPU over those of the
    fewest; they err together."""
    cluster = ask.cluster
    rankings, rows, stopped_by = [], [], ""
    while not stopped_by:
        gpus, batch = ask.gpus, ask.global_batch
        try:
            ranked = ask.ranked()
            stopped_by = "" if len(ranked.order) else ranking.nothing_fits(ranked, ask.config, gpus)
        except UsageError as error:
            stopped_by = f"{gpus} GPUs: {error}"
        if not stopped_by:
            rankings.insert(0, ranked)
            (row,) = ranking.rows_of(ranked, ranked.best[:1], ask.config, ask.gemms)
            rows.insert(0, row | {"per_gpu": row["tokens_per_s"] / row["gpus"]})
            stopped_by = "the GPUs or their batch are odd" if gpus % 2 or weak and batch % 2 else ""
        ask = replace(ask, gpus=gpus // 2, global_batch=batch // 2 if weak else batch)
    if len(rows) < 2:
        raise UsageError(f"--scale compares two counts of GPUs or more: {stopped_by}")
    steps = Columns.stack([ranked.steps.take(ranked.best[:1]) for ranked in rankings])
    shared = cluster.fit.shared(steps, cluster.machine_for(steps))
    covariance = cluster.fit.sigma**2 * fitting.likeness(steps) + shared @ shared.T
    variances = np.diag(covariance) + covariance[0, 0] - 2 * covariance[0]
    factors = np.exp(fitting.INTERVAL * np.sqrt(np.maximum(variances, 0.0)))
    for row, factor in zip(rows, factors, strict=True):
        kept = row["per_gpu"] / rows[0]["per_gpu"]
        row |= {"kept": kept, "worst": kept / factor, "best": kept * factor}
    chosen = fitting.telling(covariance, min(ranking.TRIED, len(rows) - 1))
    counts = ", ".join(str(rows[i]["gpus"]) for i in chosen)
    notes = [
        f"predicted, not measured, for {cluster.name} ({cluster.source})",
        _knee(rankings, rows),
        f"{counts} GPUs: measured first, they narrow the intervals of all counts the most",
        f"no fewer GPUs: {stopped_by}",
        *ranking.width_note(rows, cluster),
        *cluster.network_note(rows[-1]["gpus"]),
    ]
    layouts = ranking.table(rows, notes, "")
    band = [Column(key, heading, ".1%") for key, heading in BAND.items()]
    return replace(layouts, columns=[Column("gpus", "GPUs", "d"), *layouts.columns[1:], *band])


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
