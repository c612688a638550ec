"""The page of a plan: every possible layout, why it is refused, and its seconds and gigabytes."""

import numpy as np

from analysis.common.table import Column, Table
from analysis.pages import altair_charts
from analysis.pages.section import Chart, Section
from analysis.planner import ranking
from analysis.planner.ranking import Ranking
from models.config import GPTConfig
from parallel.config import memory
from parallel.config.layout import RECOMPUTE

FIRST = 200  # rows of the table of each verdict
POINTS = 1000  # of the chart


def views(r: Ranking, ranked: Table, config: GPTConfig, precision: str) -> list[Section]:
    """The plan in words, memory against time, and the table. The ranked layouts come first, then
    those that another recompute policy beats, then those that do not fit, the smallest first.

    ranked: the table of `ranking.table`, whose columns and notes are taken.
    """
    x, best, limit_gb = r.x, r.best, r.limit / memory.GB
    beaten = np.array(list(r.beaten), int)
    large = np.flatnonzero(r.used > r.limit)
    large = large[np.argsort(r.used[large], kind="stable")]
    every = np.concatenate([best, beaten, large])
    rows = ranking.rows_of(r, every, config, precision)
    gigabytes = ranking.gigabytes_by_part(x.take(every), r.cluster)
    place = {layout: number for number, layout in enumerate(best.tolist(), 1)}
    for n, (i, row) in enumerate(zip(every.tolist(), rows, strict=True)):
        row |= {"rank": place.get(i), "verdict": "fits", "why": None}
        if i in r.beaten:
            policy, other = RECOMPUTE[x.recompute[r.beaten[i]]], place[r.beaten[i]]
            why = f"recompute {policy} is no slower and needs no more memory: # {other}"
            row |= {"verdict": "beaten", "why": why}
        elif r.used[i] > r.limit:
            part = max(gigabytes, key=lambda name: gigabytes[name][n]).replace("_", " ")
            why = f"more than the {limit_gb:.1f} GB of a rank; the largest part: {part}"
            row |= {"verdict": "does not fit", "why": why}
    rank, *others = ranked.columns
    columns = [rank, Column("verdict", "verdict"), *others, Column("why", "why not ranked")]
    sizes = len(best), len(beaten), len(large)
    starts = 0, len(best), len(best) + len(beaten)
    shown = [row for at, n in zip(starts, sizes, strict=True) for row in rows[at:][: min(n, FIRST)]]
    notes = list(ranked.notes)
    if len(shown) < len(rows):
        notes.insert(0, f"of each verdict the first {FIRST} layouts")
    table = Table(columns, shown, notes=notes, missing=ranked.missing)
    words = [
        f"{len(rows)} possible layouts: {len(best)} are ranked; {len(beaten)} fit, but another"
        f" recompute policy is no slower in no more memory; {len(large)} do not fit. All times and"
        " sizes are predicted, not measured."
    ]
    keys = ("engine", *ranking.KEYS, "sequence_parallel", "predicted_s", "memory_gb", "why")
    tips = {column.key: column.heading for column in columns if column.key in keys}
    points = [{k: row.get(k) for k in (*tips, "verdict")} for row in rows[:POINTS]]
    spec = altair_charts.memory_and_time(points, tips, limit_gb)
    caption = f"The first {POINTS} layouts. Dashed: what a rank may use, {limit_gb:.1f} GB."
    return [
        Section("Memory and time", words, charts=[Chart(spec, caption)]),
        Section("Layouts", tables={"layouts": table}),
    ]
