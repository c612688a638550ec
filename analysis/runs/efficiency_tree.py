"""POP's tree of efficiencies, by what each rank measured, and which setting acts on its worst part.

parallel/measure/efficiencies.py defines the factors. Efficiency is that of every table of scaling:

    efficiency = parallel x computation scaling / the baseline's parallel
"""

from analysis.common.table import Column, Table, by_key
from analysis.runs.fairness import scaling_of
from analysis.runs.moves import moves
from analysis.runs.rank_times import Breakdown, Decomposed, decomposed
from parallel.measure.efficiencies import GOOD, SENT, efficiencies

_FACTORS = ("load_balance", "serialisation", "transfer", "orchestration", "computation_scaling")
NO_MOVE = "no flag of a run acts on it (analysis.stragglers names slow ranks)"
_NOTES = [
    "parallel = load balance x serialisation x transfer x orchestration; efficiency = parallel x"
    " computation scaling / the baseline's parallel",
    "not told apart: ranks that wait for each other by turns within a step are in transfer; on a"
    " GPU, gaps between kernels, and what hidden messages slow, are in computing",
]


def computation_scaling(pair: Decomposed, scaling: str) -> float:
    """Returns the useful seconds of all ranks of the baseline over those of the run; of weak
    scaling those of a rank."""
    useful, base_useful = (
        side.parts["compute"] / side.step_s * step_s
        for side, step_s in ((pair.run, pair.step_s), (pair.base, pair.base_step_s))
    )
    gpus = pair.run.spec.gpus / pair.base.spec.gpus if scaling == "strong" else 1
    return base_useful / (useful * gpus)


def table(breakdowns: list[Breakdown], baseline: str | None, scaling: str | None) -> Table:
    """Returns the tree of every run. What needs a baseline is unknown where there is none."""
    scaling = scaling or scaling_of([breakdown.record for breakdown in breakdowns])
    compared, reasons = decomposed(breakdowns, baseline, scaling)
    pairs = {pair.run.record.source: pair for pair in compared}
    rows, advice = [], []
    for breakdown in breakdowns:
        factors = efficiencies(breakdown.spec.layout, breakdown.ranks)
        if factors is None or not breakdown.complete or breakdown.unseen:
            reason = "no rank computed" if factors is None else "needs every rank"
            reason = breakdown.unseen or reason
            reasons.append(f"{breakdown.name}: {reason}")
            continue
        row = {"run": breakdown.name, "gpus": breakdown.spec.gpus, "parallel": factors.parallel}
        row |= factors._asdict()
        if pair := pairs.get(breakdown.record.source):
            base = efficiencies(pair.base.spec.layout, pair.base.ranks)
            row |= {"efficiency": pair.efficiency, "base": pair.base.name}
            row["base_parallel"] = base and base.parallel
            row["computation_scaling"] = computation_scaling(pair, scaling)
        low = {name: row[name] for name in _FACTORS if row.get(name, 1.0) < GOOD}
        row["low"] = ", ".join(name.replace("_", " ") for name in low) or None
        rows.append(row)
        advice += [f"{breakdown.name}: {_advice(breakdown, name, low[name])}" for name in low]
    columns = [
        Column("run", "run"),
        Column("gpus", "gpus", "d"),
        *by_key(("efficiency", "parallel"), ".3f"),
        *(Column(name, name.replace("_", " "), ".3f") for name in _FACTORS),
        Column("base_parallel", "baseline's parallel", ".3f"),
        Column("base", "baseline"),
        Column("low", f"below {GOOD:g}"),
    ]
    notes = [*_NOTES, *dict.fromkeys(reasons), *advice]
    return Table(columns, rows, f"POP's efficiencies ({scaling} scaling)", notes)


def part_of(factor: str, parts: dict[str, float]) -> str:
    """Returns the part of a step that makes a factor low."""
    match factor:
        case "transfer":
            return max(SENT, key=parts.__getitem__)
        case "serialisation":
            return max(("bubble", "imbalance"), key=parts.__getitem__)
    names = {"load_balance": "imbalance", "orchestration": "other"}
    return names.get(factor, "compute")


def _advice(breakdown: Breakdown, factor: str, value: float) -> str:
    """Returns the fact that a factor is low, and the flags that act on it."""
    parts, words = breakdown.parts, factor.replace("_", " ")
    part = part_of(factor, parts)
    fact = f"{part} takes {parts[part] / breakdown.step_s:.0%} of a step"
    if factor == "computation_scaling":
        fact = f"the ranks compute {1 / value:.3g} times as long as the baseline's for as much work"
    flags = [move.flags for move in moves(breakdown.spec, part)]
    return f"{words} {value:.2f}: {fact}; {'try ' + ' or '.join(flags) if flags else NO_MOVE}"
