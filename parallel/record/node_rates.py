"""What preflights measured on each node of a study's jobs, and which node is slow. Torch-free.

<study>/preflights.csv has a row for each node of each preflight (parallel/node_check.py). A rate is
FLOP/s or bytes/s: the median over rounds, of the node's slowest rank. short: in words, what was
slow; empty where nothing was.
"""

import math
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from base.errors import UsageError
from base.files import read_toml
from models.gpus import peak_tflops
from parallel.record.reader import read_rows
from parallel.record.schema import utc_now
from parallel.record.writer import append_rows

FILE = "preflights.csv"
# Of a rank, of the ranks of a node, of pairs of nodes, of all nodes, of a node.
MEASURES = {"matmul": "matrix product", "copy": "copy", "in_node": "all-reduce in the node"}
MEASURES |= {"pair": "all-reduce with its neighbours", "all": "all-reduce over all nodes"}
MEASURES |= {"write": "write to the run's folder"}
COLUMNS = {**dict.fromkeys(("time_utc", "job", "run", "node"), str), "nodes": int, "ranks": int}
COLUMNS |= {**dict.fromkeys(MEASURES, float), "short": str}
SHARE = 0.1  # a node is slow when it lacks more than this ...
SPREADS = 3.0  # ... and more than so many spreads
ENOUGH = 3  # earlier preflights of a node


class Rank(NamedTuple):
    """What a rank measured: a rate for each round, by measure; a measure may be absent."""

    rank: int
    node: str
    rates: dict[str, list[float]]


class Report(NamedTuple):
    """Rows for preflights.csv, and lines for people."""

    rows: list[dict[str, Any]]
    lines: list[str]


def spread(values: np.ndarray) -> float:
    """1.4826 median absolute deviations: the standard deviation where values are normal."""
    return 1.4826 * float(np.median(np.abs(values - np.median(values))))


def is_short(ratio: float, noise: float) -> bool:
    """Whether a rate is too low; both as shares of what it is compared with."""
    return 1 - ratio > max(SHARE, SPREADS * noise)


def lacking(own: np.ndarray, others: np.ndarray) -> float:
    """The share that a rank's rates (rounds,) lack of the median of `others` (ranks, rounds); 0
    where it is not short. Rounds are compared one by one: what slows all ranks alike cancels."""
    ratios = own / np.median(others, axis=0)
    ratio = float(np.median(ratios))
    return 1 - ratio if is_short(ratio, spread(ratios)) else 0.0


def expected_flops(path: Path, precision: str) -> tuple[float, float]:
    """FLOP/s of a large matrix product by a cluster's calibration, and the fit's spread of log
    seconds; nan where it is of no known card."""
    content = read_toml(path, "calibration")
    try:
        peak = peak_tflops(content["gpu"], precision) or math.nan
        return peak * 1e12 * content["constants"]["gemm"], content["fit"]["sigma"]
    except (KeyError, TypeError) as error:
        raise UsageError(f"{path} is no calibration: no {error}") from error


def report(
    ranks: list[Rank],
    earlier: list[dict[str, Any]],
    job: str,
    run: str,
    expected: tuple[float, float] = (math.nan, 0.0),
) -> Report:
    """Compare ranks with each other, with earlier preflights of their nodes in jobs of the same
    size, and matrix products with (FLOP/s, spread) that are expected."""
    names = list(dict.fromkeys(rank.node for rank in ranks))
    facts = {"time_utc": utc_now(), "job": job, "run": run}
    facts |= {"nodes": len(names), "ranks": len(ranks)}
    same = [row for row in earlier if all(row[n] == facts[n] for n in ("nodes", "ranks"))]
    rows, lines = [], []
    for name in names:
        row, short = facts | {"node": name}, []
        for measure in MEASURES:
            own = [r for r in ranks if r.node == name and r.rates.get(measure)]
            if not own:
                row[measure] = None
                continue
            slowest = min(own, key=lambda rank: np.median(rank.rates[measure]))
            rates = np.array(slowest.rates[measure])
            row[measure] = rate = float(np.median(rates))
            others = _others(ranks, measure, slowest)
            before = [r[measure] for r in same if r["node"] == name and not r["short"]]
            than = _slower_than(rates, others, [b for b in before if b], measure, expected)
            where = f" on rank {slowest.rank}" if measure in ("matmul", "copy") else ""
            text = f"{MEASURES[measure]}{where}: {_shown(measure, rate)}, {than}"
            if than and measure == "all":  # no node's own
                lines += [text] if name == names[0] else []
            elif than:
                short.append(text)
        row["short"] = "; ".join(short)
        rows.append(row)
        if short:
            lines.append(f"node {name} is slow: {row['short']}")
    return Report(rows, lines)


def _others(ranks: list[Rank], measure: str, rank: Rank) -> np.ndarray:
    """The rates of the other ranks (ranks, rounds); of what belongs to a node, of other nodes."""
    alone = measure in ("matmul", "copy")
    others = [r for r in ranks if (r.rank != rank.rank if alone else r.node != rank.node)]
    rates = [r.rates[measure] for r in others if r.rates.get(measure)]
    return np.array([] if measure == "all" else rates)


def _slower_than(
    rates: np.ndarray,
    others: np.ndarray,
    before: list[float],
    measure: str,
    expected: tuple[float, float],
) -> str:
    """How much less than what these rates are, in words; "" where they are not short."""
    rate, texts = float(np.median(rates)), []
    if len(others) and (less := lacking(rates, others)):
        texts.append(f"{less:.0%} less than the others")
    if len(before) >= ENOUGH:
        usual = float(np.median(before))
        if is_short(rate / usual, math.hypot(spread(np.array(before)), spread(rates)) / usual):
            texts.append(f"{1 - rate / usual:.0%} less than in {len(before)} earlier preflights")
    flops, sigma = expected
    if measure == "matmul" and is_short(rate / flops, sigma):
        texts.append(f"{1 - rate / flops:.0%} less than the cluster's calibration")
    return " and ".join(texts)


def _shown(measure: str, rate: float) -> str:
    return f"{rate / 1e12:.3g} TFLOP/s" if measure == "matmul" else f"{rate / 1e9:.3g} GB/s"


def read(folder: Path) -> list[dict[str, Any]]:
    """The rows of a study's preflights.csv, unknown rates None; [] where there is none.

    Raises:
        UsageError: a line that is none.
    """
    return read_rows(folder / FILE, COLUMNS)


def add(folder: Path, rows: list[dict[str, Any]]) -> None:
    """Add rows to a study's preflights.csv."""
    append_rows(folder / FILE, COLUMNS, rows)
