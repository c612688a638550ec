"""Where each rank's time went, what it sent, and where a split's efficiency was lost."""

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from analysis.common.table import Column, Table, by_key
from analysis.logs.load import load_own
from analysis.logs.naming import name_of, tell_apart
from analysis.logs.record import Record
from analysis.logs.step_time import timed
from analysis.planner.messages import sent_bytes
from analysis.runs.baseline import baseline_of, fitting_baselines
from analysis.runs.fairness import scaling_of, unfair
from analysis.runs.ratio import Side, against
from analysis.runs.shared_hosts import shared_cores
from base.errors import Reading, UsageError
from parallel.config.resolve import check_setting
from parallel.config.run_spec import SETTINGS, RunSpec, assembled, settings_of
from parallel.record.ends import COMPLETE
from parallel.record.reader import Run, read_breakdown
from parallel.record.schema import (
    CATEGORIES,
    EXPERT_BREAKDOWN_COLUMNS,
    EXPERT_MESSAGE_AXES,
    MESSAGE_AXES,
)

COLLECTIVE = tuple(axis for axis in (*MESSAGE_AXES, *EXPERT_MESSAGE_AXES) if axis != "pp")
COMPUTE = ("forward", "backward", "optimizer")
WITHOUT = "no breakdown (the run had no --breakdown)"


@dataclass
class Breakdown:
    """One run's breakdown. `ranks`: {rank: its columns' means per step}, over `steps` steps.

    A column that is unknown in some window is None.
    """

    spec: RunSpec
    record: Record
    ranks: dict[int, dict[str, float | None]]
    steps: int
    notes: list[str] = field(default_factory=list)

    @property
    def name(self) -> str:
        return name_of(self.record)

    @property
    def run(self) -> Run:
        return self.record.own

    @property
    def complete(self) -> bool:
        return len(self.ranks) == self.spec.layout.world_size

    @property
    def step_s(self) -> float:
        """Seconds per step, of the slowest rank."""
        return max(row["elapsed_s"] for row in self.ranks.values())

    def mean(self, *columns: str) -> float:
        """Returns the mean over ranks of the sum of the columns."""
        return sum(row[c] for row in self.ranks.values() for c in columns) / len(self.ranks)


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
    time = timed(record)
    # Without a steady part, skip the first window if there are others.
    start = 2 if time is None else max(2, int(record.steps["iteration"][time.first]))
    last = min(rows[-1]["last_step"] for rows in windows.values())  # of a killed run they differ
    breakdown = Breakdown(spec, record, {}, 0)
    for rank, rows in windows.items():
        rows = [row for row in rows if row["last_step"] <= last]
        if not rows:
            problems.append(f"{path / 'breakdown'}: rank {rank} has no window that all have")
            continue
        rows = [row for row in rows if row["first_step"] >= start] or rows[1:] or rows
        breakdown.steps = sum(row["last_step"] - row["first_step"] + 1 for row in rows)
        names = set(rows[0]) - {"rank", "first_step", "last_step", "transfer_s"}
        columns = {name: [row[name] for row in rows] for name in names}
        breakdown.ranks[rank] = dict.fromkeys(EXPERT_BREAKDOWN_COLUMNS, 0.0) | {
            name: None if None in column else sum(column) / breakdown.steps
            for name, column in columns.items()
        }
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
    *by_key(("run", "category")),
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


def times(breakdowns: Iterable[Breakdown]) -> Table:
    """Returns every category of every run: slowest rank, mean and spread over ranks, share of the
    step."""
    table = Table(_TIMES, [], "Time per step")
    for breakdown in breakdowns:
        table.notes += [f"{breakdown.name}: {note}" for note in breakdown.notes]
        for name in ("elapsed", *CATEGORIES, *EXPERT_MESSAGE_AXES):
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


# The coordinates that the ranks of one group share, in collectives along an axis.
_SHARED = {"tp": ("dp", "pp"), "dp": ("tp", "pp"), "embedding": ("tp", "dp")}


def _least_s(breakdown: Breakdown, axis: str) -> float:
    """Returns the mean over ranks of the seconds along an axis of the rank that waited least in
    each group of ranks that wait for each other."""
    groups: dict[tuple, list[float]] = defaultdict(list)
    for rank, row in breakdown.ranks.items():
        if axis != "embedding" or row["embedding_calls"]:
            layout = breakdown.spec.layout
            coords, n = layout.coords(rank), layout.ep * layout.etp
            shared = tuple(coords[a] for a in _SHARED.get(axis, ()))
            if axis in EXPERT_MESSAGE_AXES:  # who has the same experts, or the others of a copy
                shared = coords["pp"], rank % n if axis == "expert_dp" else rank // n
            groups[shared].append(row[f"{axis}_s"])
    return sum(len(seconds) * min(seconds) for seconds in groups.values()) / len(breakdown.ranks)


def parts(breakdown: Breakdown) -> dict[str, float]:
    """Returns seconds per step of a run's slowest rank, in parts that add up to it.

    bubble, pp: the mean over ranks. tp, dp, other communication (embedding, mixed, control and of
    experts): what the rank that waited least in each group spent in it, for the rest of its
    partners' time there is waiting for it; that waiting, and what the slowest rank's step exceeds
    the mean by, is load imbalance. compute: forward, backward, optimizer. other: the rest.
    """
    least = {axis: _least_s(breakdown, axis) for axis in COLLECTIVE}
    waiting_s = sum(breakdown.mean(f"{axis}_s") - least[axis] for axis in COLLECTIVE)
    seconds = {
        "compute": breakdown.mean(*(f"{name}_s" for name in COMPUTE)),
        "bubble": breakdown.mean("bubble_s"),
        "tp": least["tp"],
        "dp": least["dp"],
        "pp": breakdown.mean("pp_s"),
        "other communication": sum(least[a] for a in COLLECTIVE if a not in ("tp", "dp")),
        "imbalance": waiting_s + breakdown.step_s - breakdown.mean("elapsed_s"),
    }
    return seconds | {"other": breakdown.step_s - sum(seconds.values())}


def lost(breakdown: Breakdown, base: Breakdown, scaling: str = "strong") -> dict[str, float]:
    """Returns the efficiency that a run lost against its baseline, in shares that add up to it.

    Efficiency is T0 n0 / (T n) (strong; weak: T0 / T), so 1 - efficiency is the share of the run's
    step that the baseline's, divided over the GPUs, does not explain. Each part is its seconds
    less the baseline's own, divided the same way, over the run's step time. A negative share is a
    gain.
    """
    ratio = 1.0
    if scaling == "strong":
        ratio = base.spec.layout.world_size / breakdown.spec.layout.world_size
    base_s = parts(base)
    return {
        name: (seconds - ratio * base_s[name]) / breakdown.step_s
        for name, seconds in parts(breakdown).items()
    }


def losses(breakdowns: list[Breakdown], baseline: str | None, scaling: str | None) -> Table:
    """Returns the efficiency that every run lost beside its baseline, in its parts. `scaling` is
    strong or weak; None takes what the runs are."""
    records = [breakdown.record for breakdown in breakdowns]
    scaling, partners = scaling or scaling_of(records), shared_cores(records)
    by_source = {breakdown.record.source: breakdown for breakdown in breakdowns}
    named = baseline_of(baseline, records) if baseline else None
    notes = ["lost = 1 - efficiency = the sum of the columns after it; negative: a gain"]
    rows = []
    for breakdown, fitting in zip(breakdowns, fitting_baselines(records, named), strict=True):
        fits = [by_source[record.source] for record in fitting]
        if fits == [breakdown]:
            continue
        if reason := _not_decomposed(breakdown, fits, baseline, scaling):
            notes.append(f"{breakdown.name}: {reason}")
            continue
        ratio = against(_side(breakdown, partners), _side(fits[0], partners), scaling)
        notes += [f"{breakdown.name}: {reason}" for reason in ratio.reasons]
        if (efficiency := ratio.efficiency) is not None:
            row = {"run": breakdown.name, "gpus": breakdown.spec.gpus, "efficiency": efficiency}
            row |= {"lost": 1 - efficiency, "baseline": fits[0].name}
            rows.append(row | lost(breakdown, fits[0], scaling))
    names = parts(breakdowns[0])
    columns = [
        Column("run", "run"),
        Column("gpus", "gpus", "d"),
        *by_key(("efficiency", "lost", *names) if rows else (), ".3f"),
        Column("baseline", "baseline"),
    ]
    return Table(columns, rows, f"Efficiency lost ({scaling} scaling)", notes)


def _side(breakdown: Breakdown, partners: dict[str, str]) -> Side:
    reason = partners.get(breakdown.record.source)
    shared = f"{breakdown.name} {reason}" if reason else ""
    return Side(breakdown.name, breakdown.spec.gpus, (breakdown.step_s,), shared=shared)


def _not_decomposed(
    breakdown: Breakdown, fits: list[Breakdown], baseline: str | None, scaling: str
) -> str:
    """Returns why a run's efficiency cannot be taken apart against the baseline that fits, or
    ""."""
    wanted = baseline or breakdown.run.facts.get("baseline")
    if len(fits) > 1:
        return f"the baseline {wanted} fits {', '.join(fit.name for fit in fits)}"
    if not fits:
        return f"no breakdown of the baseline {wanted}" if wanted else "no baseline (--baseline)"
    pair = (breakdown, fits[0])
    if not all(side.complete for side in pair):
        return "needs every rank"
    if unfinished := [side.name for side in pair if side.run.state != COMPLETE]:
        return f"no efficiency: {', '.join(unfinished)} did not complete"
    if reason := unfair([breakdown.record], fits[0].record, scaling):
        return reason
    if breakdown.record.oversubscribed:
        return "oversubscribed: more ranks than cores or GPUs"
    return ""


def breakdowns_of(records: list[Record]) -> Reading[list[Breakdown]]:
    """Returns the breakdowns of runs, and one line for each thing that could not be read."""
    readings = [of_record(record) for record in records]
    breakdowns = [reading.content for reading in readings if reading.content]
    return Reading(breakdowns, [line for reading in readings for line in reading.left_out])


def report(
    paths: list[Path], baseline: str | None = None, scaling: str | None = None
) -> Reading[list[Table]]:
    """Returns the tables of times, messages and lost efficiency of the runs at the paths, and one
    line for each thing that could not be read."""
    records, refused = load_own(paths)
    runs, problems = breakdowns_of(records)
    problems = refused + problems
    if not runs:
        if len(problems) > 1 and all(line.endswith(WITHOUT) for line in problems):
            places = ", ".join(map(str, paths))
            problems = [f"{places}: none of {len(problems)} runs has a breakdown (--breakdown)"]
        raise UsageError("; ".join(problems))
    tell_apart([run.record for run in runs])  # only these are shown
    return Reading([times(runs), messages(runs), losses(runs, baseline, scaling)], problems)
