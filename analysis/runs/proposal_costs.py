"""What a number of tokens costs at each size: days, GPU-hours, node-hours and kWh."""

import math
import statistics
from typing import Any

import numpy as np

from analysis.common.reasons import DOUBT, MISSING, Reason, of_cells
from analysis.common.table import Column, Table
from analysis.runs.judged import Run
from analysis.runs.proposal_parts import NO_NODES, Part, Request, tokens_of_step
from analysis.runs.scaling_laws import Bounded, t_quantile
from base.errors import UsageError
from base.intervals import Interval
from base.units import in_powers

FAR = 4.0  # times the largest measured size: the last size for which a law is taken at its word
MEDIAN = math.sqrt(math.pi / 2)  # the error of a median over that of a mean, at most
_HOURS = ("days", "gpu_hours", "node_hours", "kwh")
_ENDS = tuple(f"{key}_ci95" for key in _HOURS)
_COSTS = [
    Column("gpus", "GPUs", "d"),
    Column("nodes", "nodes", "d"),
    Column("run", "from"),
    Column("tokens_per_s", "tokens/s", ".5g"),
    *(
        column
        for key, heading in zip(_HOURS, ("days", "GPU-hours", "node-hours", "kWh"), strict=True)
        for column in (
            Column(key, heading, ",.4g"),
            Column(f"{key}_ci95", f"interval of {heading}", ",.4g", seldom=key == "kwh"),
        )
    ),
]


def costs_of(parts: list[Part], request: Request) -> Table:
    """Returns the table of hours and energy for the tokens: of each measured size, and of the
    size that is asked for, where that was not measured, by each law."""
    rows: dict[tuple[str, int], dict[str, Any]] = {}
    by_steps = False
    for part in parts:
        noise, quantile = _noise(part, request)
        for side, _ in part.best.values():
            tokens, reasons = tokens_of_step(part, side)
            span = side.span
            if noise is not None:
                error = quantile * noise / math.sqrt(len(side.seconds))
                error *= MEDIAN if len(side.seconds) > 2 else 1.0
                span = Interval(side.step_s * math.exp(-error), side.step_s * math.exp(error))
            by_steps |= noise is None
            row = {"run": side.name, "gpus": side.gpus, "nodes": part.nodes(side.gpus)}
            energy = [_joules_per_token(run) for run in part.compared.groups[side.name]]
            step = Bounded(side.step_s, span)
            rows[side.name, side.gpus] = _cost(row, step, tokens, energy, request, reasons)
    measured = {gpus for _, gpus in rows}
    size = request.size
    if size and size not in measured:
        found = [(part, row) for part in parts for row in _predicted(part, size, request)]
        if not found:
            raise UsageError(
                f"--size {size} was not measured, and no law that begins below it fits the sizes"
                f" {', '.join(map(str, sorted(measured)))}"
            )
        rows |= {(f"{part.title}, {row['run']}", size): row for part, row in found}
    ordered = sorted(rows.values(), key=lambda row: row["gpus"])
    notes = ["hours are those of training steps alone; a part of a node counts as a whole one"]
    if by_steps:
        notes.append(
            "intervals of measured sizes are of the steps of a run, without what changes from run"
            " to run: repeat runs, or give --noise"
        )
    return Table(_COSTS, ordered, f"Resources for {in_powers(request.tokens)} tokens", notes)


def _noise(part: Part, request: Request) -> tuple[float | None, float]:
    """Returns a run's standard deviation as a share of its time, by what repeats differ, and the
    quantile of Student's t that goes with it; None where nothing was repeated."""
    if request.noise:
        return request.noise, t_quantile(math.inf)
    logs = [np.log(side.seconds) for side, _ in part.best.values() if len(side.seconds) > 1]
    spare = sum(len(values) - 1 for values in logs)
    if not spare:
        return None, 0.0
    squares = sum(float(np.sum((values - values.mean()) ** 2)) for values in logs)
    return math.sqrt(squares / spare), t_quantile(spare)


def _cost(
    row: dict[str, Any],
    step: Bounded,
    tokens: float | None,
    energy: list[float | None],
    request: Request,
    reasons: list[Reason],
) -> dict[str, Any]:
    """Returns the row with what the tokens cost on its GPUs and nodes. `tokens` are those of a
    step, `energy` the joules a token of each run."""
    gpus, nodes = row["gpus"], row["nodes"]
    reasons = [reason._replace(columns=("tokens_per_s", *_HOURS, *_ENDS)) for reason in reasons]
    if step.interval is None:
        text = "nothing tells the noise: repeat the run, or give --noise"
        reasons.append(Reason(MISSING, text, _ENDS))
    if not nodes:
        reasons.append(NO_NODES._replace(columns=("nodes", "node_hours", "node_hours_ci95")))
    if tokens:
        row["tokens_per_s"] = tokens / step.value
        watts = request.gpu_watts
        if watts is None and energy and None not in energy:
            watts = statistics.median(energy) * row["tokens_per_s"] / gpus
        an_hour = {"days": 1 / 24, "gpu_hours": gpus, "node_hours": nodes}
        an_hour["kwh"] = watts and gpus * watts / 1000
        hours = np.array([step.value, *(step.interval or ())]) * request.tokens / tokens / 3600
        for key, amount in an_hour.items():
            if amount is not None:
                row[key], *ends = (hours * amount).tolist()
                row[f"{key}_ci95"] = ends or None
        if "kwh" not in row:
            text = "no run states its energy" if energy else "the energy there was not measured"
            text += " (--gpu-watts, of a GPU with its share of the node)"
            reasons.append(Reason(MISSING, text, ("kwh",)))
    return row | of_cells(reasons)


def _joules_per_token(run: Run) -> float | None:
    """Returns the joules that all GPUs of a run of ours took for a token, where it measured them;
    None of a run that was started again, whose meter saw its last attempt alone."""
    record = run.record
    own = record.own
    summary = (own.metrics.get("summary") or {}) if own else {}
    seen = (record.facts.get("host") or {}).get("gpus_visible_to_rank_0")
    joules = summary.get("energy_joules")
    if not (joules and seen) or record.facts.get("attempts"):
        return None
    tokens = sum(row["tokens"] or 0 for row in own.steps)
    return joules * record.gpus / min(seen, record.gpus) / tokens if tokens else None


def _predicted(part: Part, size: int, request: Request) -> list[dict[str, Any]]:
    """Returns the rows of a size that was not measured, one for each law that was fitted."""
    n = size / part.base.gpus
    if n < 1:
        return []
    tokens, reasons = tokens_of_step(part, part.base)
    work = n if part.scaling == "weak" else 1.0
    if n > FAR * max(part.best):
        times = n / max(part.best)
        text = f"extrapolated to {times:.3g} times the largest size that was measured"
        reasons = [*reasons, Reason(DOUBT, text)]
    rows = []
    for name, fitted, _ in part.fits:
        if fitted:
            row = {"run": f"{name} ({part.scaling}, predicted)", "gpus": size}
            row["nodes"] = part.nodes(size)
            of_step = tokens and tokens * work
            rows.append(_cost(row, fitted.seconds(n), of_step, [], request, reasons))
    return rows
