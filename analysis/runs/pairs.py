"""One side beside another: is B faster than A, or is it noise? A row a pair."""

from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from analysis.common.table import Column, Table
from analysis.logs.load import load
from analysis.logs.naming import name_of
from analysis.logs.record import Record
from analysis.runs.baseline import baseline_of, has_baseline
from analysis.runs.denominators import other_denominators
from analysis.runs.fairness import (
    ANY_COMMIT,
    CHANGED,
    changed_settings,
    changes,
    is_changed,
    other_kernels,
    other_libraries,
    scaling_of,
    unfair,
    unstated,
)
from analysis.runs.judged import Run, divided, judged
from analysis.runs.ratio import INTERVALS, STEPS, Side, side_of, times_ratio
from analysis.runs.repeats import by_configuration, group_with, named, unlike
from analysis.runs.shared_hosts import busy, shared_cores
from base.errors import Reading, UsageError, by_reason
from base.intervals import Interval
from parallel.measure.steady_time import MIN_STEADY, Window

COLUMNS = [
    Column("a", "A"),
    Column("b", "B"),
    Column("gpus", "B's GPUs", "d"),
    Column("n_b", "n", "d"),
    Column("unit", "of"),
    Column("ratio", "time A / time B", ".3f"),
    Column("ci95", "95 % interval"),
    Column("sentence", "verdict", long="below"),
]


@dataclass(frozen=True)
class Comparison:
    """How fast B is beside A: the time of A over the time of B, with a 95 % interval.

    `interval` is None where the noise is unknown; `unit` is what it was made of, n_a and n_b of
    them. `gpus` are A's and B's numbers of GPUs where they differ; `verdict` then gives the ratios
    of times and of GPU-seconds.
    """

    ratio: float
    interval: Interval | None
    unit: str
    n_a: int
    n_b: int
    gpus: tuple[int, int] | None = None

    @property
    def is_noise(self) -> bool | None:
        """Tells whether the interval includes equal times; None where the noise is unknown."""
        return None if self.interval is None else self.interval.low <= 1 <= self.interval.high

    @property
    def verdict(self) -> str:
        """Returns one sentence: how fast B is beside A, and whether noise explains it."""
        longer = 1 / self.ratio
        low, high = self.interval or (None, None)
        if self.gpus is not None:
            a, b = self.gpus
            times = f"on {b} GPUs instead of {a}, B takes {longer:.3f} of A's time per step"
            work = f"and {b / a / self.ratio:.3f} of its GPU-seconds"
            if self.interval is None:
                return f"{times} {work}; how much is noise is unknown"
            sentence = f"{times} ({1 / high:.3f} to {1 / low:.3f}) {work}"
            return f"{sentence}; the times are equal within noise" if self.is_noise else sentence
        if self.interval is None:
            return f"B takes {longer:.3f} of A's time; how much is noise is unknown"
        if self.is_noise:
            could = f"{low:.3f} to {high:.3f} times"
            return f"within noise: B is {self.ratio:.3f} times as fast as A but could be {could}"
        if self.ratio > 1:
            return f"B is faster: {self.ratio:.3f} times as fast as A ({low:.3f} to {high:.3f})"
        times = f"({1 / high:.3f} to {1 / low:.3f})"
        return f"B is slower: it takes {longer:.3f} times as long as A {times}"


@dataclass(frozen=True)
class Pair:
    """One A beside one B. `comparison` is None where there is none, and `doubts` say why."""

    a: str
    b: str
    comparison: Comparison | None
    doubts: list[str]
    values: list[str]  # the settings that tell B from A, with A's and B's values
    gpus: int | None = None  # B's

    def row(self) -> dict[str, Any]:
        """Returns plain data; `ratio` is the time of A over the time of B."""
        row = vars(self) | dict.fromkeys(("n_a", "n_b", "unit", "ratio", "ratio_ci95", "verdict"))
        comparison = row.pop("comparison")
        if comparison is not None:
            row |= {name: getattr(comparison, name) for name in ("n_a", "n_b", "unit", "ratio")}
            row["verdict"] = comparison.verdict
            if interval := comparison.interval:
                row["ratio_ci95"] = list(interval)
                row["ci95"] = f"{interval.low:.3f} .. {interval.high:.3f}"
        return row | {"sentence": "; ".join(filter(None, [row["verdict"], *self.doubts]))}


def timed_runs(
    paths: list[Path], facts: dict[str, Any] | None = None, window: Window | None = None
) -> Reading[list[Run]]:
    """Returns the runs at the paths that have a steady step time, and one line for each run without
    one."""
    records, left_out = load(paths, facts)
    runs, untimed = divided(judged(records, window), _no_time)
    left_out += [f"{run.record.source}: {reason}" for run, reason in untimed]
    if not runs:
        places = ", ".join(map(str, paths))
        raise UsageError("; ".join([f"{places}: nothing here was timed", *left_out]))
    return Reading(runs, left_out)


def _no_time(run: Run) -> str:
    """Returns why a run's time cannot be compared, or ""."""
    if run.unfit:
        return run.unfit
    if run.record.mean_of:
        alone = f"its time is {run.record.mean_of} alone, so its noise is unknown"
        return f"{alone}: analysis.scaling compares such times"
    return "" if run.time and run.time.step_s > 0 else "no step was timed"


def compared(side_a: Side, side_b: Side) -> Comparison | None:
    """Returns A's time over B's with its interval. Returns None where a side has too few
    independent steps to say what noise is."""
    value, interval, unit = times_ratio(side_b, side_a)
    by_steps = unit == STEPS
    if by_steps and not (side_a.has_noise and side_b.has_noise):
        return None
    n_a, n_b = (side.steps if by_steps else len(side.seconds) for side in (side_a, side_b))
    return Comparison(value, interval, unit, n_a, n_b)


def pair_of(
    runs_a: list[Run], runs_b: list[Run], any_commit: bool = False, scaling: str | None = None
) -> Pair:
    """Returns A beside B, if their work, machine and (unless `any_commit`) commit are the same.

    `scaling` is strong or weak; None takes what the runs are (fairness.py).
    """
    records = [run.record for run in (*runs_a, *runs_b)]
    first, second = runs_a[0].record, runs_b[0].record
    values = changed_settings(first, second)
    name_a, name_b = _names(first, second)

    def refused(*reasons: str) -> Pair:
        return Pair(name_a, name_b, None, [*reasons], values=values, gpus=second.gpus)

    for name, side in (("A", runs_a), ("B", runs_b)):
        differing = dict.fromkeys(
            setting for run in side for setting in unlike(side[0].record, run.record, any_commit)
        )
        if differing:
            listed = ", ".join(differing)
            return refused(f"no comparison: {name}'s own {len(side)} runs differ in: {listed}")
    scaling = scaling or scaling_of(records)
    if reason := unfair(records, first, scaling, any_commit):
        return refused(reason)
    comparison = compared(side_of(runs_a), side_of(runs_b))
    if comparison is None:
        reason = f"no verdict: too few points to say what noise is: {_points(runs_a, runs_b)}"
        return refused(reason, *_of_times([*runs_a, *runs_b]))
    comparison = replace(comparison, gpus=changes(first, second).get("gpus"))
    doubts = _doubts(runs_a, runs_b, comparison)
    return Pair(name_a, name_b, comparison, doubts, values=values, gpus=second.gpus)


def _points(a: list[Run], b: list[Run]) -> str:
    """Returns how many steps the sides' runs without an interval have, in words."""
    counts = []
    for run in (*a, *b):
        if not run.time.ci95:
            count = f"{name_of(run.record)} has {run.time.n} steps after the warm-up"
            if run.time.n >= MIN_STEADY:
                count += f", which count as {run.time.independent:.1f} independent ones"
            counts.append(count)
    return f"{'; '.join(dict.fromkeys(counts))} ({MIN_STEADY} needed)"


def _of_times(runs: list[Run]) -> list[str]:
    """Returns the doubts about the runs' times, with the runs' names."""
    return by_reason((name_of(run.record), doubt) for run in runs for doubt in run.time_doubts)


def _names(a: Record, b: Record) -> tuple[str, str]:
    """Returns the shortest names that tell the two apart."""
    names: tuple[Callable[[Record], str], ...] = (lambda r: named(r) or name_of(r), name_of)
    for name in names:
        if name(a) != name(b):
            return name(a), name(b)
    return a.source, b.source


def _doubts(a: list[Run], b: list[Run], comparison: Comparison) -> list[str]:
    """Returns what limits the verdict: noise, unfinished or oversubscribed runs, missing facts."""
    runs = [*a, *b]
    records = [run.record for run in runs]
    first, second = a[0].record, b[0].record
    doubts = _of_times(runs)
    if comparison.gpus and first.global_batch and second.global_batch:
        if (work_ratio := second.global_batch / first.global_batch) != 1:
            doubts.append(f"weak scaling: a step of B is {work_ratio:g} times A's work")
    if unknown := unstated([first, second]):
        doubts.append(f"not stated on both sides, so not compared: {', '.join(unknown)}")
    for name, record in (("A", first), ("B", second)):
        if record.running_average:
            doubts.append(f"{name} prints running averages: their noise is not its iterations'")
        elif record.interval > 1:
            average = f"{name}'s entries average {record.interval} iterations"
            doubts.append(f"{average}: the noise of one iteration is larger")
    if comparison.unit == STEPS:
        doubts.append("one or two runs a side: too few to tell what changes from run to run")
    ends = {name_of(run.record): run.judgement.verdict for run in runs}
    if stopped := [f"{name}: {end}" for name, end in ends.items() if end != "complete"]:
        doubts.append(f"not complete, its steps are counted all the same: {', '.join(stopped)}")
    if crowded := [name_of(record) for record in records if record.oversubscribed]:
        doubts.append(f"oversubscribed, more ranks than cores: {', '.join(crowded)}")
    partners = shared_cores(records)
    doubts += [f"{name_of(r)}: {partners[r.source]}" for r in records if r.source in partners]
    if any(map(is_changed, records)):
        doubts.append(CHANGED)
    doubts += busy(records) + other_kernels(records) + other_libraries(records)
    return doubts + other_denominators(records)


def of_study(runs: list[Run], any_commit: bool = False) -> list[Pair]:
    """Returns each configuration of a study beside the baseline's, in the order the names have.
    Then follows, at each number of GPUs, the fastest beside the others, the faster first."""
    groups = by_configuration(sorted(runs, key=lambda run: run.record.repeat or 0))
    if len(groups) < 2:
        raise UsageError(f"two things are compared, but there is only {next(iter(groups))}")
    records = [run.record for run in runs]
    wanted = next((record.baseline for record in records if record.baseline), None)
    start = None
    if wanted and has_baseline(wanted, records):
        start = group_with(baseline_of(wanted, records), groups)
    base = start or min(groups)
    names = [(base, name) for name in sorted(groups) if name != base]
    beside_base = len(names)
    sizes: dict[int, list[str]] = defaultdict(list)
    step_s = {name: side_of(repeats).step_s for name, repeats in groups.items()}
    for name in sorted(groups, key=step_s.__getitem__):
        if gpus := groups[name][0].record.gpus:
            sizes[gpus].append(name)
    for _, (fastest, *slower) in sorted(sizes.items()):
        names += [(fastest, name) for name in slower if base not in (fastest, name)]
    scaling = scaling_of(records)
    pairs = [
        replace(pair_of(groups[a], groups[b], any_commit, scaling), a=a, b=b) for a, b in names
    ]
    if wanted and not start:
        missing = f"the study's baseline {wanted} has no time here: {base} stands in for it"
        for number in range(beside_base):
            pairs[number].doubts.append(missing)
    return pairs


def table(pairs: list[Pair], any_commit: bool) -> Table:
    """Returns one row a pair; a note says where `any_commit` let commits differ."""
    notes = ["step times: median after the warm-up that the data show"]
    if len({pair.a for pair in pairs}) > 1:
        notes.append(
            "below the rows of the baseline, A is the fastest run on as many GPUs as B; B are the"
            " others, the fastest first"
        )
    if any(pair.comparison and pair.comparison.unit == STEPS for pair in pairs):
        notes.append(INTERVALS)
    if any_commit:
        notes.append(ANY_COMMIT)
    return Table(COLUMNS, [pair.row() for pair in pairs], notes=notes)
