"""The performance section of a proposal for computing time: scaling by GPU and node, the laws that
fit it, what a number of tokens costs, what was measured, and how.

A number that no run states is `-` with the flag that gives it. Runs are compared by the rules of
every table (`scaling_curve.compared`); a law is fitted to the baseline and to the fastest
configuration of each larger size.
"""

import math
import statistics
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np

from analysis.common.reasons import DOUBT, MISSING, Reason, of_cells
from analysis.common.table import Column, Table, cell, chosen
from analysis.common.terminal import who
from analysis.logs.model import config_of
from analysis.logs.naming import name_of
from analysis.logs.record import Record
from analysis.runs import run_table, scaling_curve
from analysis.runs.fairness import Terms, batch_per_gpu, question_of, short_commit
from analysis.runs.judged import Run, results
from analysis.runs.ratio import Side
from analysis.runs.run_row import row_of
from analysis.runs.scaling_curve import Compared, compared
from analysis.runs.scaling_laws import LAWS, Bounded, Fit, fit, t_quantile
from analysis.runs.submissions import is_result, works
from base.errors import UsageError, by_reason
from base.intervals import Interval
from base.units import in_powers

FAR = 4.0  # times the largest measured size: the last size for which a law is taken at its word
OFF = 0.1  # a law that misses a size's median by more than this share does not describe it
NO_LIMIT = "no limit"
MEDIAN = math.sqrt(math.pi / 2)  # the error of a median over that of a mean, at most
CURVE = 40  # points of a law's curve in a picture


@dataclass(frozen=True)
class Request:
    """What a proposal asks: the tokens to train on, the GPUs to train on (`size`, None: the largest
    size that was measured), and what no log states. noise: a run's standard deviation, as a share
    of its time."""

    tokens: float
    size: int | None = None
    gpus_per_node: int | None = None
    gpu_watts: float | None = None
    noise: float | None = None
    machine: str | None = None
    libraries: str | None = None

    def per_node(self, records: list[Record]) -> int | None:
        """Returns the GPUs of a node: as it was asked, else the most that a run states."""
        stated = [self.gpus_per_node or 0]
        for record in records if not self.gpus_per_node else ():
            host = record.facts.get("host") or {}
            stated += [host.get("ranks_per_node") or 0, host.get("gpus_visible") or 0]
            stated.append((record.submission and record.submission.gpus_per_node) or 0)
        return max(stated) or None


class Part(NamedTuple):
    """Runs of one fixed work on several sizes. best: by N, the configuration of each size that the
    laws are fitted to, with its row of the curve. per_node: the GPUs of a node."""

    title: str
    compared: Compared
    best: dict[float, tuple[Side, dict[str, Any]]]
    fits: list[tuple[str, Fit | None, str]]  # a law's name, its fit, or why there is none
    per_node: int | None

    def nodes(self, gpus: int) -> int | None:
        """Returns the nodes that so many GPUs are on: a part of a node counts as one."""
        return math.ceil(gpus / self.per_node) if self.per_node else None

    @property
    def scaling(self) -> str:
        return self.compared.scaling

    @property
    def base(self) -> Side:
        return self.compared.base

    def runs(self) -> list[Run]:
        """Returns the runs of the configurations that the laws are fitted to."""
        return [run for side, _ in self.best.values() for run in self.compared.groups[side.name]]


def parts_of(
    records: list[Record], refused: list[str], terms: Terms, request: Request
) -> tuple[list[Part], list[tuple[str, str]]]:
    """Returns the parts of strong and of weak scaling, and the runs that are in none, with the
    reasons. Where no work has two sizes, the one part is the baseline's size alone."""
    laws = [terms.scaling] if terms.scaling else list(LAWS)
    submitted = [record for record in records if is_result(record)]
    others = [record for record in records if not is_result(record)]
    parts, left_out = [], []
    if submitted:
        runs, left_out = results(submitted, [] if others else refused, terms.window)
        found = [work for law in laws for work in works(runs, law)]
        parts = [_part(w.title, compared(w.records, [], w.terms(terms)), request) for w in found]
    if others:
        fair = [compared(others, refused, replace(terms, scaling=law)) for law in laws]
        parts += [_part(f"{one.scaling} scaling", one, request) for one in fair]
        left_out += fair[0].left_out
    several = [part for part in parts if len(part.best) > 1 and _is_stated(part)]
    parts = several or parts[:1]
    if not parts:
        raise UsageError("no series has two sizes with one global batch or one batch per GPU")
    used = {name_of(record) for part in parts for record in part.compared.records}
    return parts, [(name, reason) for name, reason in left_out if name not in used]


def _part(title: str, found: Compared, request: Request) -> Part:
    """Returns compared runs with the laws that fit them."""
    sides = list(found.sides.values())
    rows = scaling_curve.curve(sides, found.base, found.scaling).rows
    ordered = [found.sides[row["run"]] for row in rows]
    best = scaling_curve.fastest(ordered, rows, found.base)
    times = {ratio: side.seconds for ratio, (side, _) in best.items()}
    fits = []
    for law in LAWS[found.scaling] if best else ():
        fitted, reason = fit(law, found.scaling, times, request.noise)
        if fitted and fitted.parameter(0).value > 1:
            fitted, reason = None, "more GPUs are slower than the baseline, so no law has a limit"
        fits.append((law.name, fitted, reason))
    if not best:  # one size
        same = [pair for pair in zip(ordered, rows, strict=True) if pair[0].gpus == found.base.gpus]
        best = {1.0: min(same, key=lambda pair: (pair[1]["speedup"] is None, pair[0].step_s))}
    return Part(title, found, best, fits, request.per_node(found.records))


def _is_stated(part: Part) -> bool:
    """Tells whether the runs state what stays the same: of weak scaling, the batch per GPU."""
    records = part.compared.records
    return part.scaling == "strong" or all(batch_per_gpu(record) for record in records)


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
    costs = _costs(parts, request)
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
_NO_NODES = Reason(MISSING, "no run states the GPUs of a node (--gpus-per-node)", ("nodes",))


def _sizes(part: Part, terms: Terms) -> Table:
    """Returns the table of a part's sizes, with what must be said of its runs."""
    rows = []
    for ratio, (side, curve_row) in part.best.items():
        tokens, reasons = _tokens(part, side)
        nodes = part.nodes(side.gpus)
        reasons += [] if nodes else [_NO_NODES]
        keys = ("run", "gpus", "n", "step_s", "spread", "speedup", "speedup_ci95", "efficiency")
        row = {key: curve_row[key] for key in keys} | {"nodes": nodes, "ideal": ratio}
        row["tokens_per_s"] = tokens and tokens / side.step_s
        row["missing"] = curve_row["missing"] | of_cells(reasons)["missing"]
        rows.append(row | {"doubtful": curve_row["doubtful"] | of_cells(reasons)["doubtful"]})
    base = part.base
    notes = [
        f"against {base.name} on {base.gpus} GPUs ({part.compared.whose}); spread:"
        " (slowest - fastest) / median"
    ]
    if any(row["speedup_ci95"] for row in rows):
        notes.append(scaling_curve.INTERVALS)
    slower = sorted(set(part.compared.sides) - {row["run"] for row in rows})
    if slower:
        notes.append(
            f"slower at the same size, so not here: {who(slower, len(part.compared.sides))}"
        )
    said = part.compared.notes(terms.any_commit)
    notes += [line for line in said if not line.startswith("left out")]
    return Table(_SIZES, rows, part.title[0].upper() + part.title[1:], notes)


def _tokens(part: Part, side: Side) -> tuple[float | None, list[Reason]]:
    """Returns the tokens of a step of a configuration, and why they are unknown or in doubt."""
    run = part.compared.groups[side.name][0]
    row = row_of(run, None)
    reasons = [reason for reason in row.reasons if "tokens_per_s" in reason.columns]
    rate = row.values["tokens_per_s"]
    return rate and rate * run.time.step_s, reasons


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
        if fitted.free_share < 0:
            notes.append(f"{name}: the times are above linear by it, so its first parameter is 0")
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
            near = f"{name} is within {fitted.deviation:.1%} of each size's median"
            given = " (--noise)" if request.noise else ""
            notes.append(f"{near}; a run's noise by it is {fitted.noise:.2%}{given}")
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
        gpus = [end * part.base.gpus for end in (peak.value, *(peak.interval or ()))]
        at = Bounded(gpus[0], Interval(*gpus[1:]) if gpus[1:] else None)
        found.append(("GPUs of the highest speedup", at))
    for factor in (2, 4):
        n = factor * max(part.best)
        gpus = round(n * part.base.gpus)
        nodes = part.nodes(gpus)
        size = f"{gpus} GPUs" + (f" ({nodes} nodes)" if nodes else "")
        found.append((f"speedup on {size}, {factor} x the largest measured", fitted.speedup(n)))
    return found


# --- what the tokens cost ------------------------------------------------------------------------

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


def _costs(parts: list[Part], request: Request) -> Table:
    """Returns the table of hours and energy for the tokens: of each measured size, and of the
    size that is asked for, where that was not measured, by each law."""
    rows: dict[tuple[str, int], dict[str, Any]] = {}
    by_steps = False
    for part in parts:
        noise, quantile = _noise(part, request)
        for side, _ in part.best.values():
            tokens, reasons = _tokens(part, side)
            span = side.span
            if noise is not None:
                error = quantile * noise / math.sqrt(len(side.seconds))
                error *= MEDIAN if len(side.seconds) > 2 else 1.0
                span = Interval(side.step_s * math.exp(-error), side.step_s * math.exp(error))
            by_steps |= noise is None
            step = Bounded(side.step_s, span)
            energy = [_joules_per_token(run) for run in part.compared.groups[side.name]]
            given = (step, tokens, energy, request, reasons)
            rows[side.name, side.gpus] = _cost(side.name, part, side.gpus, *given)
    measured = {gpus for _, gpus in rows}
    size = request.size or max(measured)
    if size not in measured:
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
    own = "" if request.size else ", the largest that was measured (--size GPUS takes another)"
    notes += [_sentence(row, request, own) for row in ordered if row["gpus"] == size]
    title = f"Resources for {in_powers(request.tokens)} tokens"
    return Table(_COSTS, ordered, title, notes)


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
    name: str,
    part: Part,
    gpus: int,
    step: Bounded,
    tokens: float | None,
    energy: list[float | None],
    request: Request,
    reasons: list[Reason],
) -> dict[str, Any]:
    """Returns the row of what the tokens cost at a size. `tokens` are those of a step, `energy` the
    joules a token of each run."""
    row: dict[str, Any] = {"run": name, "gpus": gpus, "nodes": part.nodes(gpus)}
    reasons = [reason._replace(columns=("tokens_per_s", *_HOURS, *_ENDS)) for reason in reasons]
    if step.interval is None:
        text = "nothing tells the noise: repeat the run, or give --noise"
        reasons.append(Reason(MISSING, text, _ENDS))
    if not row["nodes"]:
        reasons.append(_NO_NODES._replace(columns=("nodes", "node_hours", "node_hours_ci95")))
    if tokens:
        row["tokens_per_s"] = tokens / step.value
        watts = request.gpu_watts
        if watts is None and energy and None not in energy:
            watts = statistics.median(energy) * row["tokens_per_s"] / gpus
        an_hour = {"days": 1 / 24, "gpu_hours": gpus, "node_hours": row["nodes"]}
        an_hour["kwh"] = watts and gpus * watts / 1000
        hours = np.array([step.value, *(step.interval or ())]) * request.tokens / tokens / 3600
        for key, amount in an_hour.items():
            if amount is not None:
                row[key], *ends = (hours * amount).tolist()
                row[f"{key}_ci95"] = ends or None
        if row.get("kwh") is None:
            text = "no run states its energy (--gpu-watts, of a GPU with its share of the node)"
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
    tokens, reasons = _tokens(part, part.base)
    work = n if part.scaling == "weak" else 1.0
    if n > FAR * max(part.best):
        times = n / max(part.best)
        text = f"extrapolated to {times:.3g} times the largest size that was measured"
        reasons = [*reasons, Reason(DOUBT, text)]
    rows = []
    for name, fitted, _ in part.fits:
        if fitted:
            step = fitted.seconds(n)
            name = f"{name} ({part.scaling}, predicted)"
            given = (step, tokens and tokens * work, [], request, reasons)
            rows.append(_cost(name, part, size, *given))
    return rows


def _sentence(row: dict[str, Any], request: Request, own: str) -> str:
    """Returns what a chosen size costs, in words."""
    size = f"{row['gpus']} GPUs" + (f" on {row['nodes']} nodes" if row["nodes"] else "")
    amounts = []
    for key, unit in zip(_HOURS, ("days", "GPU-hours", "node-hours", "kWh"), strict=True):
        if row.get(key) is not None:
            span = row.get(f"{key}_ci95")
            text = f"{cell(row[key], ',.4g')} {unit}"
            amounts.append(
                text + (f" ({cell(span[0], ',.4g')} to {cell(span[1], ',.4g')})" if span else "")
            )
    cost = ", ".join(amounts) or "unknown hours"
    doubt = row["doubtful"].get("days")
    source = f"by {row['run']}" + (f"; in doubt: {doubt}" if doubt else "")
    return f"{in_powers(request.tokens)} tokens on {size}{own}: {cost}; {source}"


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

_RUNS = """run gpus tp cp pp ep dp micro_batch global_batch precision steps step_s steady_ci95
    verdict reasons""".split()


def _measured(
    parts: list[Part], left_out: list[tuple[str, str]], request: Request, terms: Terms
) -> Table:
    """Returns the runs behind the numbers, with their machine, libraries and commit."""
    runs = {run.record.source: run.record for part in parts for run in part.runs()}
    records = list(runs.values())
    of_runs = run_table.of_records(records, None, replace(terms, baseline=None))
    has = {column.key for column in of_runs.columns}
    (shown,) = chosen([of_runs], [key for key in _RUNS if key in has])
    machine = request.machine and (lambda record: request.machine)
    libraries = request.libraries and (lambda record: request.libraries)
    notes = [
        *_by_value("machine", records, machine or _machine, "--machine"),
        *_by_value("processor", records, lambda record: record.gpu_type, "--gpu-type"),
        *_by_value("program", records, lambda record: record.engine or record.format, "--engine"),
        *_by_value("libraries", records, libraries or _libraries, "--libraries"),
        *_by_value("commit", records, lambda r: short_commit(r.commit or ""), "--commit"),
        *_by_value("model", records, _model, "--params"),
        *_by_value("precision", records, lambda record: record.precision, "--precision"),
        *_by_value("tokens of a sequence", records, lambda r: r.seq_len, "--seq-len"),
        *(f"left out: {line}" for line in by_reason(left_out)),
    ]
    return replace(shown, title="What was measured", notes=notes, doubts=[])


def _by_value(
    label: str, records: list[Record], value_of: Callable[[Record], Any], flag: str
) -> list[str]:
    """Returns a line: the values of a fact, each with the runs that have it, or the flag that gives
    it."""
    runs: dict[str, list[str]] = defaultdict(list)
    for record in records:
        value = value_of(record)
        runs[str(value) if value else f"- (no log states it: {flag})"].append(name_of(record))
    stated = "; ".join(
        value if len(runs) == 1 else f"{value}: {who(names, len(records))}"
        for value, names in runs.items()
    )
    return [f"{label}: {stated}"]


def _machine(record: Record) -> str | None:
    """Returns the host that a run of ours states, or the system of an MLPerf result."""
    if record.submission:
        return record.submission.system
    host = record.facts.get("host") or {}
    cores = f"{host['cores']} cores of " if host.get("cores") else ""
    card = f", {host['gpus_visible']} x {host['gpu']}" if host.get("gpu") else ""
    return f"{cores}{host['cpu']}{card}" if host.get("cpu") else None


def _libraries(record: Record) -> str | None:
    versions = (record.facts.get("versions") or {}).items()
    host = record.facts.get("host") or {}
    named = [*versions, *((name, host.get(name)) for name in ("cuda", "nccl", "driver"))]
    return ", ".join(f"{name} {version}" for name, version in named if version) or None


def _model(record: Record) -> str | None:
    """Returns the size of the model, and its blocks where the log states them."""
    config = config_of(record).value
    params = record.params or (config and config.n_params)
    sizes = [f"{record.model[k]} {word}" for k, word in _SHAPE.items() if k in record.model]
    if params:
        size = f"{params / 1e9:.4g}B" if params >= 1e9 else f"{params / 1e6:.4g}M"
        sizes.insert(0, f"{size} parameters")
    return ", ".join(sizes) or None


_SHAPE = {"n_layer": "layers", "hidden": "hidden", "n_head": "heads"}


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
