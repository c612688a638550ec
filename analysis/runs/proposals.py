"""The performance section of a proposal for computing time: scaling by GPU and node, the laws that
fit it, what a number of tokens costs, what was measured, and how.

A number that no run states is `-` with the flag that gives it. proposal_parts.py says which runs it
is about, by the rules of every table, proposal_costs.py what the tokens cost.
"""

import math
from dataclasses import replace

import numpy as np

from analysis.common.reasons import DOUBT, MISSING, Reason, of_cells
from analysis.common.table import Column, Table, chosen
from analysis.common.terminal import counted, who
from analysis.logs.record import Record
from analysis.runs import run_table, scaling_curve
from analysis.runs.fairness import Terms, question_of
from analysis.runs.proposal_costs import costs_of
from analysis.runs.proposal_parts import NO_NODES, Part, Request, parts_of, tokens_of_step
from analysis.runs.scaling_laws import Bounded, Fit
from analysis.runs.stated_facts import fact_lines
from base.errors import UsageError, by_reason
from parallel.config.layout import shown_axes

OFF = 0.1  # a law that misses a size's median by more than this share does not describe it
NO_LIMIT = "no limit"
CURVE = 40  # points of a law's curve in a picture


def tables(
    records: list[Record], refused: list[str], terms: Terms, request: Request
) -> tuple[list[Table], list[Part]]:
    """Returns the tables of a proposal, and the parts that a picture shows."""
    parts, left_out = parts_of(records, refused, terms, request)
    shown = []
    for part in parts:
        shown.append(_sizes(part, terms))
        if part.fits:
            shown.append(_laws(part, request))
    costs = costs_of(parts, request)
    shown += [costs, _measured(parts, left_out, request, terms)]
    shown.append(Table([], [], "Method", _method(parts, costs, request)))
    if question := question_of(records):
        shown[0].notes.insert(0, question)
    return shown, parts


# --- what was measured of each size --------------------------------------------------------------

_SIZES = [
    Column("gpus", "GPUs", "d"),
    Column("nodes", "nodes", "d"),
    Column("run", "configuration"),
    Column("n", "runs", "d"),
    Column("step_s", "s/iter", ".4g"),
    Column("spread", "spread of the runs", ".1%"),
    Column("tokens_per_s", "tokens/s", ".5g"),
    Column("speedup", "speedup", ".2f"),
    Column("speedup_ci95", "interval of the speedup", ".2f", seldom=True),
    Column("ideal", "ideal", ",.4g"),
    Column("efficiency", "efficiency", ".2f"),
]


def _sizes(part: Part, terms: Terms) -> Table:
    """Returns the table of a part's sizes, with what must be said of its runs."""
    rows = []
    for ratio, (side, curve_row) in part.best.items():
        tokens, reasons = tokens_of_step(part, side)
        nodes = part.nodes(side.gpus)
        reasons += [] if nodes else [NO_NODES]
        keys = ("run", "gpus", "n", "step_s", "spread", "speedup", "speedup_ci95", "efficiency")
        row = {key: curve_row[key] for key in keys} | {"nodes": nodes, "ideal": ratio}
        row["tokens_per_s"] = tokens and tokens / side.step_s
        cells = of_cells(reasons)
        rows.append(row | {group: curve_row[group] | cells[group] for group in cells})
    base = part.base
    against = f"{base.name} on {counted(base.gpus, 'GPUs')} ({part.compared.whose})"
    notes = scaling_curve.table(scaling_curve.Curve(rows, None), part.scaling, against).notes
    sides, shown = part.compared.sides, {row["run"] for row in rows}
    others = sorted(
        (name, side.gpus < base.gpus) for name, side in sides.items() if name not in shown
    )
    for smaller, words in enumerate(("slower at the same size", "on fewer GPUs than the baseline")):
        if names := [name for name, is_smaller in others if is_smaller == smaller]:
            notes.append(f"{words}, so not here: {who(names, len(sides))}")
    said = part.compared.notes(terms.any_commit)
    notes += [line for line in said if not line.startswith("left out")]
    return Table(_SIZES, rows, part.title[0].upper() + part.title[1:], notes)


# --- the laws ------------------------------------------------------------------------------------

_LAWS = [
    Column("run", "law"),
    Column("quantity", "quantity"),
    Column("value", "value", ",.4g"),
    Column("low", "95 % from", ",.4g"),
    Column("high", "to", ",.4g"),
]


def _laws(part: Part, request: Request) -> Table:
    """Returns the table of the laws' parameters, limits and the next two doublings."""
    rows, notes = [], [f"N counts GPUs in units of the baseline's {part.base.gpus}"]
    for name, fitted, reason in part.fits:
        if fitted is None:
            notes.append(f"{name}: {reason}")
            continue
        reasons = []
        for parameter in fitted.negative:
            why = "the times bend the other way than it allows"
            if parameter == fitted.law.parameters[0]:
                why = "the times are above linear by it"
            notes.append(f"{name}: {why}, so {parameter} is 0, and an end of 0 says no more")
        if fitted.deviation > OFF:
            text = f"{fitted.deviation:.0%} off a measured time, so it does not describe it"
            reasons.append(Reason(DOUBT, text, ("value",)))
        if fitted.noise is None:
            text = "as many runs as unknowns tell no noise: repeat a size, or give --noise"
            reasons.append(Reason(MISSING, text, ("low", "high")))
        for quantity, found in _quantities(part, fitted):
            low, high = found.interval or (None, None)
            row = {"run": name, "quantity": quantity, **of_cells(reasons)}
            ends = {"value": found.value, "low": low, "high": high}
            rows.append(row | {k: NO_LIMIT if v == math.inf else v for k, v in ends.items()})
        if fitted.noise is not None:
            near = f"is within {fitted.deviation:.1%} of each size's median"
            if len(part.best) == len(fitted.free) and not fitted.negative:
                near = f"is fixed by {len(part.best)} sizes, so nothing tests it, and its intervals"
                near += " hold the noise of runs alone"
            given = " (--noise)" if request.noise else ""
            notes.append(f"{name} {near}; a run's noise by it is {fitted.noise:.2%}{given}")
    gpus = max(side.gpus for side, _ in part.best.values())
    notes.append(
        f"nothing was measured beyond {gpus} GPUs: speedups there are extrapolated, with the"
        " interval of what one run would show if the law went on"
    )
    return Table(_LAWS, rows, f"Laws of {part.title}", notes)


def _quantities(part: Part, fitted: Fit) -> list[tuple[str, Bounded]]:
    """Returns what is printed of a fitted law, in words, with its value."""
    found = [(name, fitted.parameter(i)) for i, name in enumerate(fitted.law.parameters)]
    if fitted.limit:
        found.append(("speedup on infinitely many GPUs", fitted.limit))
    if peak := fitted.peak:
        found.append(("GPUs of the highest speedup", peak.mapped(lambda n: n * part.base.gpus)))
    for factor in (2, 4):
        n = factor * max(part.best)
        gpus = round(n * part.base.gpus)
        nodes = part.nodes(gpus)
        size = counted(gpus, "GPUs") + (f" ({counted(nodes, 'nodes')})" if nodes else "")
        found.append((f"speedup on {size}, {factor} x the largest measured", fitted.speedup(n)))
    return found


# --- the picture ---------------------------------------------------------------------------------


def drawn(parts: list[Part]) -> tuple[list[dict], list[dict], dict[int, str]]:
    """Returns the points, the laws' curves and the words of the ticks of the parts' picture."""
    points, curves, nodes = [], [], {}
    for part in parts:
        for ratio, (side, row) in part.best.items():
            work = ratio if part.scaling == "weak" else 1.0
            ends = (work * part.base.step_s / row[key] for key in ("slowest_s", "fastest_s"))
            spans = zip(("low", "high"), ends, strict=True)
            point = {"run": side.name, "scaling": part.scaling, "gpus": side.gpus}
            points.append(point | {"speedup": row["speedup"], **dict(spans)})
            nodes[side.gpus] = part.nodes(side.gpus)
        for name, fitted, _ in part.fits:
            if fitted:
                for n in np.geomspace(1, 4 * max(part.best), CURVE):
                    row = {"law": name, "scaling": part.scaling, "gpus": n * part.base.gpus}
                    curves.append(row | {"speedup": fitted.speedup(n).value})
    if len(points) < 2:
        raise UsageError("--plot: nothing to draw: no two sizes have a speedup")
    words = {n: f"{n:,}" + (f" ({nodes[n]:,})" if nodes[n] else "") for n in sorted(nodes)}
    return points, curves, words


# --- what was measured, and how ------------------------------------------------------------------

_RUNS = "micro_batch global_batch precision steps step_s steady_ci95 verdict reasons".split()


def _measured(
    parts: list[Part], left_out: list[tuple[str, str]], request: Request, terms: Terms
) -> Table:
    """Returns the runs behind the numbers, with their machine, libraries and commit."""
    runs = {run.record.source: run.record for part in parts for run in part.runs()}
    records = list(runs.values())
    of_runs = run_table.of_records(records, None, replace(terms, baseline=None))
    (shown,) = chosen([of_runs], ["run", "gpus", *shown_axes(of_runs.rows), *_RUNS])
    notes = [*fact_lines(records, request), *(f"left out: {line}" for line in by_reason(left_out))]
    return replace(shown, title="What was measured", notes=notes, doubts=[])


def _method(parts: list[Part], costs: Table, request: Request) -> list[str]:
    """Returns five sentences that say how the numbers were made."""
    same = {
        "strong": "the global batch (strong scaling)",
        "weak": "the batch of a GPU (weak scaling)",
    }
    kept = " or ".join(dict.fromkeys(same[part.scaling] for part in parts))
    energy = "kWh are those that the GPUs alone counted"
    if request.gpu_watts:
        energy = f"kWh are by {request.gpu_watts:g} W a GPU"
    elif all(row.get("kwh") is None for row in costs.rows):
        energy = "no energy was measured"
    return [
        "The time of a run is the median of its steps after the warm-up that the data show; that of"
        " a configuration is the median of its repeats.",
        f"Speedup is against the baseline with {kept} kept, weak speedup scaled by the work; runs"
        " whose model, precision, code or processor differs are left out and named.",
        "Each law is fitted by least squares of relative errors to all runs of the baseline and of"
        " the fastest configuration of each larger size, with no parameter below 0.",
        "Intervals hold 95 % by Fieller's theorem with Student's t: they hold the noise of runs and"
        " how far the law is off, and nothing that changes beyond the measured sizes.",
        "Hours are the tokens over the tokens/s of training steps, without start-up, evaluation,"
        f" checkpoints and failures; {energy}.",
    ]
