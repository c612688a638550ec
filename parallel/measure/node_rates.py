"""What parallel/bench.py measured on each rank, and which nodes are slow. Torch-free.

<study>/preflights.csv has a row for each node of each preflight. A rate is FLOP/s or bytes/s: the
median over rounds, of the node's slowest rank. short: in words, what was slow; empty where nothing
was.
"""

import math
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from base.errors import UsageError
from base.files import read_toml
from models.gpus import peak_tflops
from parallel.measure.slower import is_slower, spread
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
IN_NODE = "in the node"  # ends the name of what the ranks of a node do, not all
ENOUGH = 3  # earlier preflights of a node
UNKNOWN = (math.nan, 0.0)  # what is expected, and its spread


class RankRates(NamedTuple):
    """The rates that a rank measured, in FLOP/s or bytes/s: one for each round, by measure.

    A measure may be absent: only the first rank of a node has the all-reduce in the node, only rank
    0 that over all nodes. place: the node, and the GPU or the rank."""

    rank: int
    node: str
    place: str
    rates: dict[str, list[float]]


class Slowest(NamedTuple):
    """The rank with the lowest rate of a measure. short says in words by how much that is too low;
    it is "" where the rate is no lower than the others' rates vary."""

    rank: RankRates
    rate: float
    short: str


class Report(NamedTuple):
    """A preflight's rows for preflights.csv, and its lines for people."""

    rows: list[dict[str, Any]]
    lines: list[str]


def expected_flops(path: Path, precision: str) -> tuple[float, float]:
    """Returns the FLOP/s of a large matrix product by a cluster's calibration, and the fit's spread
    of log seconds; nan where it is of no known card."""
    content = read_toml(path, "calibration")
    try:
        peak = peak_tflops(content["gpu"], precision) or math.nan
        return peak * 1e12 * content["constants"]["gemm"], content["fit"]["sigma"]
    except (KeyError, TypeError) as error:
        raise UsageError(f"{path} is no calibration: no {error}") from error


def slowest(
    measure: str,
    own: list[RankRates],
    ranks: list[RankRates],
    earlier_rates: list[float] | None = None,
    expected: tuple[float, float] = UNKNOWN,
) -> Slowest:
    """Returns the slowest of the ranks `own`, compared with all `ranks` that have the measure.

    Rounds of ranks are compared one by one: what slows all ranks alike cancels. earlier_rates: of
    preflights before. expected: a rate and its spread.
    """
    rank = min(own, key=lambda measured: median(measured.rates[measure]))
    rates = rank.rates[measure]
    rate = median(rates)
    # (ratio of its rate to another, noise of that ratio, the other in words)
    comparisons = [(rate / expected[0], expected[1], "the cluster's calibration")]
    others = [reference.rates[measure] for reference in ranks if reference is not rank]
    if others:
        by_round = zip(rates, zip(*others, strict=True), strict=True)
        ratios = [own_rate / median(other_rates) for own_rate, other_rates in by_round]
        comparisons.append((median(ratios), spread(ratios), "the others"))
    if earlier_rates and len(earlier_rates) >= ENOUGH:
        usual_rate = median(earlier_rates)
        noise = math.hypot(spread(earlier_rates), spread(rates)) / usual_rate
        comparisons.append(
            (rate / usual_rate, noise, f"in {len(earlier_rates)} earlier preflights")
        )
    words = (
        f"{1 - ratio:.0%} less than {reference}"
        for ratio, noise, reference in comparisons
        if is_slower(1 - ratio, noise)
    )
    return Slowest(rank, rate, " and ".join(words))


def report(
    ranks: list[RankRates],
    earlier: list[dict[str, Any]],
    job: str,
    run: str,
    expected: tuple[float, float] = UNKNOWN,
) -> Report:
    """Returns what preflights.csv and people get: ranks compared with each other, with earlier
    preflights of their nodes, and matrix products with (FLOP/s, spread) that are expected.

    Earlier preflights count where they had as many nodes and ranks and found nothing slow.
    """
    nodes = list(dict.fromkeys(rank.node for rank in ranks))
    facts = {"time_utc": utc_now(), "job": job, "run": run, "short": ""}
    facts |= {"nodes": len(nodes), "ranks": len(ranks)}
    must_match = ("node", "nodes", "ranks", "short")  # short is "" in `facts`: nothing was slow
    rows: list[dict[str, Any]] = []
    lines: list[str] = []
    lines_of_all_nodes: list[str] = []
    for node in nodes:
        row = {**facts, "node": node, **dict.fromkeys(MEASURES)}
        reasons: list[str] = []
        alike = [old for old in earlier if all(old[name] == row[name] for name in must_match)]
        for measure, words in MEASURES.items():
            measured = [rank for rank in ranks if measure in rank.rates]
            own = [rank for rank in measured if rank.node == node]
            if not own:
                continue
            usual_rates = [old[measure] for old in alike if old[measure]]
            wanted = expected if measure == "matmul" else UNKNOWN
            worst = slowest(measure, own, measured, usual_rates, wanted)
            row[measure] = worst.rate
            if worst.short:
                texts = lines_of_all_nodes if measure == "all" else reasons
                unit, size = ("TFLOP/s", 1e12) if measure == "matmul" else ("GB/s", 1e9)
                rate = f"{worst.rate / size:.3g} {unit}"
                texts.append(f"{words}: {rate} on rank {worst.rank.rank}, {worst.short}")
        rows.append(row | {"short": "; ".join(reasons)})
        if reasons:
            lines.append(f"node {node} is slow: {rows[-1]['short']}")
    return Report(rows, lines + lines_of_all_nodes)
