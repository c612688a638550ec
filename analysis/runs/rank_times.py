"""Where each rank's time went, what it sent, and where a split's efficiency was lost."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from analysis.common.table import Column, Table, by_key
from analysis.logs.load import load_with_ranks
from analysis.logs.naming import name_of, tell_apart
from analysis.logs.rank_files import doubts_of_parts, parts_of
from analysis.logs.record import Record
from analysis.planner.messages import sent_bytes
from analysis.runs.baseline import baseline_of, fitting_baselines
from analysis.runs.fairness import scaling_of
from analysis.runs.judged import judged
from analysis.runs.ratio import Sides
from base.errors import Reading, UsageError
from parallel.config.resolve import check_setting
from parallel.config.run_spec import SETTINGS, RunSpec, assembled, settings_of
from parallel.measure import efficiencies
from parallel.measure.steady_time import steady_iterations
from parallel.record.ends import COMPLETE
from parallel.record.reader import Run, read_breakdown
from parallel.record.schema import CATEGORIES, EXPERT_MESSAGE_AXES, MESSAGE_AXES

WITHOUT = "no breakdown (the run had no --breakdown)"
NO_PARTS = "no breakdown (its log states no parts of a step)"


@dataclass
class Times:
    """The parts of a run's steps. `ranks`: {rank: its columns' means per step}, over `steps` steps.

    A column that is unknown in some window is None. A rank that its log does not state is None.
    """

    record: Record
    ranks: dict[int | None, dict[str, float | None]]
    steps: int
    notes: list[str] = field(default_factory=list)
    categories: tuple[str, ...] = (*CATEGORIES, *EXPERT_MESSAGE_AXES)

    @property
    def name(self) -> str:
        return name_of(self.record)

    @property
    def step_s(self) -> float:
        """Seconds per step, of the slowest rank."""
        return efficiencies.slowest(self.ranks, "elapsed_s")

    def mean(self, *columns: str) -> float:
        """Returns the mean over ranks of the sum of the columns."""
        return efficiencies.mean(self.ranks, *columns)


@dataclass(kw_only=True)
class Breakdown(Times):
    """The breakdown of a run of ours, which also says what each rank sent."""

    spec: RunSpec

    @property
    def run(self) -> Run:
        return self.record.own

    @property
    def complete(self) -> bool:
        return len(self.ranks) == self.spec.layout.world_size

    @property
    def unseen(self) -> str:
        """Returns why its shares say nothing of the run's efficiency, or ""."""
        gpu = (self.record.facts.get("host") or {}).get("gpu")
        return efficiencies.unseen(self.record.engine, gpu)

    @property
    def parts(self) -> dict[str, float]:
        """Returns the parts of a step, which add up to `step_s`."""
        return efficiencies.parts(self.spec.layout, self.ranks)


def of_log(record: Record) -> Times | None:
    """Returns what the steps of another program's run took in each part, behind the warm-up; None
    where its log states no parts."""
    parts = parts_of(record)
    if parts is None:
        return None
    kept = steady_iterations(parts.step_s.max(axis=0))
    seconds = {f"{name}_s": values[:, kept].mean(axis=1) for name, values in parts.parts.items()}
    elapsed_s = parts.step_s[:, kept].mean(axis=1)
    seconds |= {"elapsed_s": elapsed_s, "rest_s": elapsed_s - sum(seconds.values())}
    ranks = {
        rank: {name: float(values[place]) for name, values in seconds.items()}
        for place, rank in enumerate(parts.ranks)
    }
    notes = doubts_of_parts(record)
    return Times(record, ranks, len(kept), notes, categories=(*parts.parts, "rest"))


def of_record(record: Record) -> Reading[Breakdown | None]:
    """Returns a run's breakdown, and one line for each thing that could not be read."""
    run, path = record.own, record.own.path
    if not (path / "breakdown").is_dir():
        return Reading(None, [f"{path}: {WITHOUT}"])
    try:
        spec = spec_of(run)
    except UsageError as error:
        return Reading(None, [str(error)])
    world_size = spec.layout.world_size
    windows, problems = read_breakdown(path, world_size)
    if not windows:
        return Reading(None, problems)
    (judged_run,) = judged([record])
    # Without a steady part, skip the first window if there are others.
    start = max([2, *record.steps["iteration"][judged_run.entries[:1]].astype(int).tolist()])
    last = min(rows[-1]["last_step"] for rows in windows.values())  # of a killed run they differ
    breakdown = Breakdown(record, {}, 0, spec=spec)
    if judged_run.unfit:
        breakdown.notes.append(judged_run.unfit)
    for rank, rows in windows.items():
        rows = [row for row in rows if row["last_step"] <= last]
        if not rows:
            problems.append(f"{path / 'breakdown'}: rank {rank} has no window that all have")
            continue
        breakdown.ranks[rank], breakdown.steps = efficiencies.means_of(rows, start)
    if problems:
        breakdown.notes.append(f"{len(breakdown.ranks)} of {world_size} ranks")
    if run.state != COMPLETE:
        breakdown.notes.append(f"the run is {run.state}")
    if run.missing:
        breakdown.notes.append(run.missing)
    return Reading(breakdown if breakdown.ranks else None, problems)


def spec_of(run: Run) -> RunSpec:
    """Returns a run's settings, its sizes and its split computed."""
    source, settings = run.path / "run.json", settings_of(run.facts)
    # Without the setting, the vocabulary was padded to a multiple of tp.
    earlier: dict[str, Any] = {"vocab_multiple": 1}
    if settings.get("engine") == "fsdp2":  # without the setting, it reduced once a step
        earlier["reduce_each_micro_batch"] = False
    settings = earlier | settings
    # Settings that only another version has are not needed here.
    stated = [name for name in SETTINGS if settings.get(name) is not None]
    try:
        if missing := {"grad_accum", "seq_len"} - {*stated}:
            raise UsageError(f"no {' and no '.join(sorted(missing))}")
        spec = assembled({name: check_setting(name, settings[name], "spec") for name in stated})
        if problems := spec.layout.problems(spec.model, spec.seq_len):
            raise UsageError("; ".join(problems))
    except UsageError as error:
        raise UsageError(f"{source}: not this version's settings ({error})") from error
    return spec


_TIMES = [
    *by_key(("run",)),
    Column("category", "part"),
    Column("slowest_s", "s/step, slowest rank", ".4g"),
    Column("rank", "rank", "d"),
    Column("mean_s", "mean of ranks", ".4g"),
    Column("spread_s", "spread", ".2g"),
    Column("share", "share", ".1%"),
]
_MESSAGES = [
    *by_key(("run", "axis")),
    Column("calls", "calls/step", "g"),
    Column("mb", "MB/step", ".4g"),
    Column("wire_mb", "MB sent/step", ".4g"),
    Column("formula", "formula"),
    Column("exposed_s", "exposed s, slowest rank", ".4g"),
    Column("mean_s", "mean of ranks", ".4g"),
]


def times(breakdowns: Iterable[Times]) -> Table:
    """Returns every category of every run: slowest rank, mean and spread over ranks, share of the
    step."""
    table = Table(_TIMES, [], "Time per step")
    for breakdown in breakdowns:
        table.notes += [f"{breakdown.name}: {note}" for note in breakdown.notes]
        for name in ("elapsed", *breakdown.categories):
            seconds = {rank: row[f"{name}_s"] for rank, row in breakdown.ranks.items()}
            if not any(seconds.values()):
                continue
            slowest, mean_s = max(seconds, key=seconds.__getitem__), breakdown.mean(f"{name}_s")
            row = {"run": breakdown.name, "category": "step" if name == "elapsed" else name}
            row |= {"slowest_s": seconds[slowest], "rank": slowest, "mean_s": mean_s}
            row["spread_s"] = seconds[slowest] - min(seconds.values())
            table.rows.append(row | {"share": mean_s / breakdown.mean("elapsed_s")})
    return table


def messages(breakdowns: Iterable[Breakdown]) -> Table:
    """Returns every axis that sends: calls and bytes per step of the rank that sends most, and
    times."""
    table = Table(_MESSAGES, [], "Messages per step and rank")
    for breakdown in breakdowns:
        for axis in (*MESSAGE_AXES, *EXPERT_MESSAGE_AXES):
            senders = [row for row in breakdown.ranks.values() if row[f"{axis}_calls"]]
            if not senders:
                continue
            most = max(senders, key=lambda row: row[f"{axis}_wire_bytes"])
            exposed_s = [row[f"{axis}_s"] for row in senders]
            row = {"run": breakdown.name, "axis": axis, "calls": most[f"{axis}_calls"]}
            row |= {"mb": most[f"{axis}_bytes"] / 1e6, "wire_mb": most[f"{axis}_wire_bytes"] / 1e6}
            row |= {"exposed_s": max(exposed_s), "mean_s": sum(exposed_s) / len(senders)}
            row["formula"] = None if axis == "control" else agreement(breakdown, axis)
            table.rows.append(row)
    return table


def agreement(breakdown: Breakdown, axis: str) -> str | None:
    """Returns whether every rank sent along `axis` what the closed formula says: `equal`, or how
    not. Of ep and etp the sum over all ranks says it, for routers choose who receives how much."""
    formulas = {rank: sent_bytes(breakdown.spec, rank) for rank in breakdown.ranks}
    if axis in ("ep", "etp"):
        if not breakdown.complete:
            return None
        wanted = sum(by_axis.get(axis, 0.0) for by_axis in formulas.values())
        sent = breakdown.mean(f"{axis}_wire_bytes") * len(formulas)
        fits = abs(sent - wanted) <= 1e-6 * wanted
        return "equal" if fits else f"all ranks should send {wanted / 1e6:.4g} MB"
    for rank, row in breakdown.ranks.items():
        wanted = formulas[rank].get(axis, 0.0)
        if wanted is None:
            return None  # no formula is known
        if axis not in formulas[rank] and row[f"{axis}_bytes"]:
            return f"rank {rank} should send nothing"
        if abs(row[f"{axis}_wire_bytes"] - wanted) > 1e-6 * wanted:
            return f"rank {rank} should send {wanted / 1e6:.4g} MB"
    return "equal"


class Decomposed(NamedTuple):
    """A run whose efficiency is taken apart against its baseline's: the ratio of the scaling table,
    and the steady seconds per step that it is of."""

    run: Breakdown
    base: Breakdown
    efficiency: float
    step_s: float
    base_step_s: float


def decomposed(
    breakdowns: list[Breakdown], baseline: str | None, scaling: str
) -> Reading[list[Decomposed]]:
    """Returns the runs that have an efficiency against a baseline with a breakdown, and why the
    others have none, by their names. Times are those of every table; a breakdown says the shares.
    """
    records = [breakdown.record for breakdown in breakdowns]
    by_source = {breakdown.record.source: breakdown for breakdown in breakdowns}
    runs = {run.record.source: run for run in judged(records)}
    sides = Sides([*runs.values()], scaling, any_commit=False)
    named = baseline_of(baseline, records) if baseline else None
    compared, notes = [], []
    for breakdown, fitting in zip(breakdowns, fitting_baselines(records, named), strict=True):
        fits = [by_source[record.source] for record in fitting]
        if reason := _not_decomposed(breakdown, fits, baseline):
            if fits != [breakdown]:
                notes.append(f"{breakdown.name}: {reason}")
            continue
        run, base = (runs[side.record.source] for side in (breakdown, fits[0]))
        if run.time is None:
            notes.append(f"{breakdown.name}: no steady time")
            continue
        ratio = sides.ratio(run, base)
        notes += [f"{breakdown.name}: {reason}" for reason in ratio.reasons]
        if ratio.efficiency is not None:
            times = (sides.side(side).step_s for side in (run, base))
            compared.append(Decomposed(breakdown, fits[0], ratio.efficiency, *times))
    return Reading(compared, notes)


def lost(pair: Decomposed) -> dict[str, float]:
    """Returns the efficiency that a run lost against its baseline, in shares that add up to it.

    Efficiency is T0 n0 / (T n) (strong; weak: T0 / T), so 1 - efficiency is the share of the run's
    step that the baseline's, divided over the GPUs, does not explain. Each part is its share of the
    step less the baseline's own, times the efficiency. A negative share is a gain.
    """
    base_s = pair.base.parts
    return {
        name: seconds / pair.run.step_s - pair.efficiency * base_s[name] / pair.base.step_s
        for name, seconds in pair.run.parts.items()
    }


def losses(breakdowns: list[Breakdown], baseline: str | None, scaling: str | None) -> Table:
    """Returns the efficiency that every run lost beside its baseline, in its parts. `scaling` is
    strong or weak; None takes what the runs are."""
    scaling = scaling or scaling_of([breakdown.record for breakdown in breakdowns])
    compared, reasons = decomposed(breakdowns, baseline, scaling)
    notes = ["lost = 1 - efficiency = the sum of the columns after it; negative: a gain"]
    rows = []
    for pair in (pair for pair in compared if pair.run is not pair.base):
        row = {"run": pair.run.name, "gpus": pair.run.spec.gpus, "efficiency": pair.efficiency}
        row |= {"lost": 1 - pair.efficiency, "baseline": pair.base.name}
        rows.append(row | lost(pair))
    columns = [
        Column("run", "run"),
        Column("gpus", "gpus", "d"),
        *by_key(("efficiency", "lost", *breakdowns[0].parts) if rows else (), ".3f"),
        Column("baseline", "baseline"),
    ]
    return Table(columns, rows, f"Efficiency lost ({scaling} scaling)", notes + reasons)


def _not_decomposed(breakdown: Breakdown, fits: list[Breakdown], baseline: str | None) -> str:
    """Returns why a run has no one baseline with the breakdowns of all ranks, or ""."""
    wanted = baseline or breakdown.run.facts.get("baseline")
    if len(fits) > 1:
        return f"the baseline {wanted} fits {', '.join(fit.name for fit in fits)}"
    if not fits:
        return f"no breakdown of the baseline {wanted}" if wanted else "no baseline (--baseline)"
    if not (breakdown.complete and fits[0].complete):
        return "needs every rank"
    return ""


def breakdowns_of(records: list[Record]) -> Reading[list[Breakdown]]:
    """Returns the breakdowns of runs, and one line for each thing that could not be read."""
    readings = [of_record(record) for record in records]
    breakdowns = [reading.content for reading in readings if reading.content]
    return Reading(breakdowns, [line for reading in readings for line in reading.left_out])


def read(paths: list[Path]) -> Reading[list[Times]]:
    """Returns what the steps of the runs at the paths took, those of ours first, and one line for
    each thing that could not be read."""
    records, refused = load_with_ranks(paths)
    own_runs, problems = breakdowns_of([record for record in records if record.own])
    logs = {record.source: of_log(record) for record in records if not record.own}
    problems = refused + problems
    problems += [f"{source}: {NO_PARTS}" for source, parts in logs.items() if parts is None]
    runs = [*own_runs, *(parts for parts in logs.values() if parts)]
    if not runs:
        if len(problems) > 1 and all(line.endswith(WITHOUT) for line in problems):
            places = ", ".join(map(str, paths))
            problems = [f"{places}: none of {len(problems)} runs has a breakdown (--breakdown)"]
        raise UsageError("; ".join(problems))
    tell_apart([run.record for run in runs])  # only these are shown
    return Reading(runs, problems)


def breakdowns(runs: list[Times]) -> list[Breakdown]:
    """Returns those of the runs that are ours."""
    return [run for run in runs if isinstance(run, Breakdown)]
