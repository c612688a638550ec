"""What preflights measured on each node of a study's jobs, and which node is slow. Torch-free.

<study>/preflights.csv has a row for each node of each preflight (parallel/node_check.py). A rate is
FLOP/s or bytes/s: the median over rounds, of the node's slowest rank. short: in words, what was
slow; empty where nothing was.
"""

import math
from collections.abc import Collection
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from base.errors import UsageError
from base.files import read_toml
from models.gpus import peak_tflops
from parallel.record.schema import utc_now

FILE = "preflights.csv"
MEASURES = {
    "matmul": "matrix product",
    "copy": "copy",
    "in_node": "all-reduce in the node",
    "all": "all-reduce over all nodes",
    "write": "write to the run's folder",
}
COLUMNS = {**dict.fromkeys(("time_utc", "job", "run", "node"), str), "nodes": int, "ranks": int}
COLUMNS |= {**dict.fromkeys(MEASURES, float), "short": str}
SHARE = 0.1  # a node is slow when it lacks more than this ...
SPREADS = 3.0  # ... and more than so many spreads
ENOUGH = 3  # earlier preflights of a node
UNKNOWN = (math.nan, 0.0)  # what is expected, and its spread


class Rank(NamedTuple):
    """What a rank measured: a rate for each round, by measure; a measure may be absent. Of the
    all-reduce in a node the node's first rank has it, of that over all nodes rank 0."""

    rank: int
    node: str
    rates: dict[str, list[float]]


class Report(NamedTuple):
    """Rows for preflights.csv, and lines for people."""

    rows: list[dict[str, Any]]
    lines: list[str]


def spread(values: Collection[float]) -> float:
    """1.4826 median absolute deviations: the standard deviation where values are normal."""
    middle = median(values)
    return 1.4826 * float(median(abs(value - middle) for value in values))


def expected_flops(path: Path, precision: str) -> tuple[float, float]:
    """FLOP/s of a large matrix product by a cluster's calibration, and the fit's spread of log
    seconds; nan where it is of no known card.

    Raises:
        UsageError: it is no calibration.
    """
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
    expected: tuple[float, float] = UNKNOWN,
) -> Report:
    """Compare ranks with each other, with earlier preflights of their nodes in jobs of the same
    size, and matrix products with (FLOP/s, spread) that are expected."""
    nodes = list(dict.fromkeys(rank.node for rank in ranks))
    facts = {"time_utc": utc_now(), "job": job, "run": run, "short": ""}
    facts |= {"nodes": len(nodes), "ranks": len(ranks)}
    rows, lines, of_no_node = [], [], []
    for node in nodes:
        row, short = {**facts, "node": node, **dict.fromkeys(MEASURES)}, []
        same = ("node", "nodes", "ranks", "short")
        before = [of for of in earlier if all(of[name] == row[name] for name in same)]
        for measure, words in MEASURES.items():
            measured = [rank for rank in ranks if measure in rank.rates]
            own = [rank for rank in measured if rank.node == node]
            if not own:
                continue
            slowest = min(own, key=lambda rank: median(rank.rates[measure]))
            others = [rank.rates[measure] for rank in measured if rank is not slowest]
            rates = slowest.rates[measure]
            row[measure] = median(rates)
            usual = [of[measure] for of in before if of[measure]]
            less = _less(rates, others, usual, expected if measure == "matmul" else UNKNOWN)
            if less:
                texts = of_no_node if measure == "all" else short
                shown = _shown(measure, row[measure])
                texts.append(f"{words}: {shown} on rank {slowest.rank}, {less}")
        rows.append(row | {"short": "; ".join(short)})
        if short:
            lines.append(f"node {node} is slow: {rows[-1]['short']}")
    return Report(rows, lines + of_no_node)


def _less(
    rates: list[float],
    others: list[list[float]],
    before: list[float],
    expected: tuple[float, float],
) -> str:
    """By how much these rates are too low, and compared with what; "" where they are not.

    Rounds of ranks are compared one by one: what slows all ranks alike cancels.
    """
    rate = median(rates)
    comparisons = [(rate / expected[0], expected[1], "the cluster's calibration")]
    if others:
        usual = map(median, zip(*others, strict=True))
        ratios = [own / other for own, other in zip(rates, usual, strict=True)]
        comparisons.append((median(ratios), spread(ratios), "the others"))
    if len(before) >= ENOUGH:
        usual = median(before)
        noise = math.hypot(spread(before), spread(rates)) / usual
        comparisons.append((rate / usual, noise, f"in {len(before)} earlier preflights"))
    return " and ".join(
        f"{1 - ratio:.0%} less than {than}"
        for ratio, noise, than in comparisons
        if 1 - ratio > max(SHARE, SPREADS * noise)
    )


def _shown(measure: str, rate: float) -> str:
    return f"{rate / 1e12:.3g} TFLOP/s" if measure == "matmul" else f"{rate / 1e9:.3g} GB/s"
