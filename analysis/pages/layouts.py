"""The page of a plan: every possible layout, why it is refused, and its seconds and gigabytes."""

import numpy as np

from analysis.common.tables import Column, Table
from analysis.pages import charts
from analysis.pages.html import FIRST
from analysis.pages.section import Chart, Section
from analysis.planner import explain, ranking
from analysis.planner.calibration import Calibration
from models import memory
from models.config import GPTConfig
from parallel.config.layout import RECOMPUTE
from parallel.config.layout_arrays import Columns

POINTS = 1000  # of the chart of all layouts


def views(
    x: Columns,
    ranked: Table,
    cluster: Calibration,
    config: GPTConfig,
    precision: str,
    margin: float,
) -> list[Section]:
    """The plan in words, the marked layout's bars, the table of all layouts, and all as points.

    ranked: the table of `ranking.table`, whose columns and notes are taken. The ranked layouts come
    first, then those that another recompute policy beats, then those that do not fit, the smallest
    first.
    """
    _, used, order = ranking.rank(x, cluster, margin)
    limit = ranking.usable_bytes(x, cluster, margin)
    limit_gb = limit / memory.GB
    best, beaten_by = ranking.sifted(x, used, order)
    beaten = np.array(list(beaten_by), int)
    large = np.flatnonzero(used > limit)
    large = large[np.argsort(used[large], kind="stable")]
    every = np.concatenate([best, beaten, large])
    rows = ranking.rows_of(x, every, cluster, config, precision, margin)
    seconds, gigabytes = explain.by_part(x.take(every), cluster)
    place = {i: n for n, i in enumerate(best.tolist(), 1)}
    for n, (i, row) in enumerate(zip(every.tolist(), rows, strict=True)):
        row |= {"rank": place.get(i), "verdict": "fits", "why": None}
        if i in beaten_by:
            other = beaten_by[i]
            policy = RECOMPUTE[x.recompute[other]]
            said = f"recompute {policy} is no slower and needs no more memory: # {place[other]}"
            row |= {"verdict": "beaten", "why": said}
        elif used[i] > limit:
            part = max(gigabytes, key=lambda name: gigabytes[name][n])
            said = f"more than the {limit_gb:.1f} GB of a rank; the largest part: {_words(part)}"
            row |= {"verdict": "does not fit", "why": said, "tight": ""}
    parts: list[list[Column]] = []
    for values, unit, spec in ((seconds, "s", ".3f"), (gigabytes, "GB", ".2f")):
        parts.append([])
        for name, column in values.items():
            if column.any():
                key = f"{name.replace(' ', '_')}_{unit.lower()}"
                parts[-1].append(Column(key, f"{_words(name)} {unit}", spec))
                for row, value in zip(rows, column.tolist(), strict=True):
                    row[key] = value
    rank, *others = ranked.columns
    verdict = Column("verdict", "verdict"), Column("why", "why not ranked")
    columns = [rank, verdict[0], *others, verdict[1], *parts[0], *parts[1]]
    found = Table(columns, rows, notes=ranked.notes, missing=ranked.missing)
    also = f"; {len(beaten)} fit, but another recompute policy is no slower in no more memory"
    words = [
        f"{len(rows)} possible layouts: {len(best)} are ranked{also * bool(len(beaten))};"
        f" {len(large)} do not fit. All times and sizes are predicted, not measured.",
        "Conditions of the filter name columns as CSV does: verdict=fits tp<=4 micro_batch=1"
        f" predicted_s<50 {parts[1][0].key}<20.",
    ]
    return [
        Section("Plan", words),
        Section("The marked layout", charts=_of_one(*parts, limit_gb)),
        Section("Layouts", tables={"layouts": found}, long=("layouts",)),
        Section("Memory and time", charts=[_of_all(found, limit_gb)]),
    ]


def _words(name: str) -> str:
    return name.replace("_", " ")


def _of_one(seconds: list[Column], gigabytes: list[Column], limit_gb: float) -> list[Chart]:
    said = (
        "Of the layout that is marked in the table below: the first one, or the one that you click"
        " or mark with the arrows and Enter. {}. The table has the same numbers."
    )
    time = charts.parts_of_one(seconds, "predicted_s", "predicted seconds of a step")
    size = charts.parts_of_one(gigabytes, "memory_gb", "predicted GB", limit_gb)
    of_size = f"GB of the fullest rank by part; the dashed line is what it may use, {limit_gb:.1f}"
    return [
        Chart(time, "layouts", said.format("Seconds of a step by term"), 1),
        Chart(size, "layouts", said.format(of_size), 1),
    ]


def _of_all(found: Table, limit_gb: float) -> Chart:
    said = (
        f"GB and seconds of the first {POINTS} layouts that filter and sort leave; the table shows"
        f" {FIRST}. The dashed line is what a rank may use, {limit_gb:.1f} GB."
    )
    best = found.rows[0]
    if best["verdict"] == "fits":
        said += f" The fastest that fits: {best['predicted_s']:.4g} s, {best['memory_gb']:.1f} GB."
    engines = list(dict.fromkeys(row["engine"] for row in found.rows))
    keys = ("engine", *ranking.KEYS, "sequence_parallel")
    layout = {c.key: c.heading for c in found.columns if c.key in keys}
    spec = charts.memory_and_time(engines, layout, limit_gb)
    return Chart(spec, "layouts", said, POINTS)
