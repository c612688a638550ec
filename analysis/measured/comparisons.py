"""Whether B is faster than A or the difference is noise."""

import math
from collections import defaultdict
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from analysis.common.statistics import log_ratio
from analysis.common.table import Column, Table
from analysis.logs.load import load, name_of
from analysis.logs.record import Record
from analysis.logs.verdict import judge, step_times, timed
from analysis.measured.fairness import (
    ANY_COMMIT,
    CHANGED,
    LAYOUT,
    busy,
    by_configuration,
    differences,
    group_called,
    is_changed,
    named,
    other_kernels,
    scaling_of,
    shared_cores,
    unstated,
)
from base.errors import UsageError
from parallel.measure.steady_time import steady_iterations

RESAMPLES = 10_000
AT_ONCE = 2**20  # step times that are resampled at once: more would only take memory
RUNS, PAIRS = "runs", "pairs of runs"
BLOCKS, BLOCKS_OF_ENTRIES = "blocks of iterations", "blocks of entries"
# What is resampled -> what is counted.
COUNTED = {RUNS: "runs", PAIRS: "pairs", BLOCKS: "iterations", BLOCKS_OF_ENTRIES: "entries"}
TimedRun = tuple[Record, np.ndarray]  # a run and its steady step times
FEW_REPEATS = 3  # below this many runs a side, blocks of iterations are resampled instead


@dataclass(frozen=True)
class Comparison:
    """How much faster B is than A: time of A over time of B, less one, with a 95 % interval.

    low, high: None where the noise is unknown. gpus: A's and B's numbers of GPUs where they differ;
    `verdict` then gives the ratios of times and of GPU-seconds.
    """

    gain: float
    low: float | None
    high: float | None
    unit: str  # what was compared or resampled: a key of COUNTED
    n_a: int
    n_b: int
    gpus: tuple[int, int] | None = None

    @property
    def verdict(self) -> str:
        """One plain sentence."""
        if self.gpus is not None:
            return self._on_other_gpus()
        if self.low is None or self.high is None:
            return f"B takes {1 / (1 + self.gain):.3f} of A's time; how much is noise is unknown"
        if self.low <= 0 <= self.high:
            return (
                f"within noise: B is {self.gain:+.1%} but could be"
                f" {self.low:+.1%} to {self.high:+.1%}"
            )
        word = "faster" if self.gain > 0 else "slower"
        half = (self.high - self.low) / 2
        return f"B is {word} by {abs(self.gain):.1%} ± {half:.1%}"

    def _on_other_gpus(self) -> str:
        a, b = self.gpus
        time, seconds = 1 / (1 + self.gain), b / a / (1 + self.gain)
        ratio = f"on {b} GPUs instead of {a}, B takes {time:.3f} of A's time per step"
        work = f"and {seconds:.3f} of its GPU-seconds"
        if self.low is None or self.high is None:
            return f"{ratio} {work}; how much is noise is unknown"
        ratio += f" ({1 / (1 + self.high):.3f} to {1 / (1 + self.low):.3f}) {work}"
        is_noise = self.low <= 0 <= self.high
        return f"{ratio}; the times are equal within noise" if is_noise else ratio

    def as_dict(self) -> dict[str, Any]:
        """Plain data; `ratio` is the time of A over the time of B."""
        known = None not in (self.low, self.high)
        ci95 = [1 + self.low, 1 + self.high] if known else None
        ratio = {"ratio": 1 + self.gain, "ratio_ci95": ci95}
        return vars(self) | ratio | {"verdict": self.verdict}


def compare(
    a: list[np.ndarray], b: list[np.ndarray], seed: int = 0, paired: bool = False
) -> Comparison | None:
    """Compare two sides, each a list of runs, each its steady step times in seconds.

    With FEW_REPEATS runs or more on both sides: Student's t on the logarithms of the runs' medians,
    of pairs where `paired` (see statistics.py). With fewer: a percentile bootstrap (Efron 1979)
    on the ratio of medians. Iterations of one run follow each other and are not independent, so
    blocks of about sqrt(n) of them are drawn with replacement (Kuensch 1989). None where a side has
    too little to resample (a single number).
    """
    if min(len(a), len(b)) >= FEW_REPEATS:
        medians = [[float(np.median(run)) for run in side] for side in (a, b)]
        gains = (math.expm1(value) for value in log_ratio(*medians, paired))
        return Comparison(*gains, PAIRS if paired else RUNS, len(a), len(b))
    sides = [np.concatenate(side) for side in (a, b)]
    if min(map(len, sides)) < 2 * FEW_REPEATS:
        return None
    rng = np.random.default_rng(seed)
    drawn = [_block_medians(side, rng) for side in (a, b)]
    low, high = np.percentile(drawn[0] / drawn[1] - 1, [2.5, 97.5])
    gain = float(np.median(sides[0]) / np.median(sides[1]) - 1)
    return Comparison(gain, float(low), float(high), BLOCKS, *map(len, sides))


def _block_medians(runs: list[np.ndarray], rng: np.random.Generator) -> np.ndarray:
    """Medians of RESAMPLES series made of blocks drawn, with replacement, from each run."""
    blocks = [max(1, int(round(len(x) ** 0.5))) for x in runs]
    starts = [
        rng.integers(0, len(x) - block + 1, (RESAMPLES, -(-len(x) // block)))
        for x, block in zip(runs, blocks, strict=True)
    ]
    rows = max(1, AT_ONCE // sum(map(len, runs)))
    medians = np.empty(RESAMPLES)
    for first in range(0, RESAMPLES, rows):
        pieces = []
        for x, block, begin in zip(runs, blocks, starts, strict=True):
            index = begin[first : first + rows, :, None] + np.arange(block)
            pieces.append(x[index.reshape(len(index), -1)[:, : len(x)]])
        medians[first : first + rows] = np.median(np.concatenate(pieces, axis=1), axis=1)
    return medians


def timed_runs(
    paths: list[Path],
    facts: dict[str, Any] | None = None,
    window: tuple[int, int] | None = None,
) -> tuple[list[TimedRun], list[str]]:
    """(the runs at the paths with their steady step times, one line for each run without any).

    Raises:
        UsageError: none has.
    """
    records, left_out = load(paths, facts)
    found = []
    for record in records:
        time = timed(record, window)
        judgement = judge(record, time)
        if judgement.unfit:
            left_out.append(f"{record.source}: {'; '.join(map(str, judgement.flags))}")
        elif time is None:
            left_out.append(f"{record.source}: no step was timed")
        else:
            x = step_times(record)
            steps = record.steps
            where = steady_iterations(x, steps["skipped"], steps["iteration"], window)
            found.append((record, x[where]))
    if not found:
        where = ", ".join(map(str, paths))
        raise UsageError("; ".join([f"{where}: nothing here was timed", *left_out]))
    return found, left_out


@dataclass(frozen=True)
class Verdict:
    """One A beside one B. `found` is None where they were not compared, and `doubts` say why."""

    a: str
    b: str
    found: Comparison | None
    doubts: list[str]
    differ: list[str]  # the settings that tell B from A
    values: list[str] = field(default_factory=list)  # the same with A's and B's values
    gpus: int | None = None  # B's

    def lines(self) -> list[str]:
        """For a terminal."""
        if self.found is None:
            return self.doubts
        found = self.found
        what = COUNTED[found.unit]
        other = "" if found.unit == PAIRS else f" and {found.n_b}"
        counts = f"{found.n_a}{other} {what}"
        sure = "" if found.low is None else "95 %, "
        lines = [f"{found.verdict} ({sure}{counts})"]
        if self.differ:
            lines.append(f"A is {self.a}, B is {self.b}; they differ in: {', '.join(self.values)}")
        return lines + self.doubts

    def as_dict(self) -> dict[str, Any]:
        known = self.found.as_dict() if self.found else {"verdict": None}
        said = {"differ": self.differ, "values": self.values, "doubts": self.doubts}
        return {"a": self.a, "b": self.b, "gpus": self.gpus} | said | known


# Record's fields that decide a step's time -> their words.
_FACTS = {name: name for name in (*LAYOUT, "zero_stage", "precision", "recompute")}
_FACTS |= {"gpus": "GPUs", "interval": "iterations per entry"}


def changes(a: Record, b: Record, settings: bool = True) -> dict[str, tuple[Any, Any]]:
    """Name -> (A's, B's value) of what both state and what differs; `settings`: run.json's details,
    too."""
    found = {name: (getattr(a, name), getattr(b, name)) for name in _FACTS}
    size = "model" if a.model and b.model else "params"
    found[size] = (getattr(a, size) or None, getattr(b, size) or None)
    found = {name: pair for name, pair in found.items() if None not in pair}
    mine, theirs = (_details(r.facts) for r in (a, b))
    for name in mine if settings else ():
        if name in theirs:
            found.setdefault(name, (mine[name], theirs[name]))
    return {name: pair for name, pair in found.items() if pair[0] != pair[1]}


def _details(facts: dict[str, Any]) -> dict[str, Any]:
    """Settings, versions and kernels of run.json, by name."""
    host, about = facts.get("host") or {}, {"kernels": facts.get("kernels")}
    about |= {"attention": facts.get("attention")}
    about |= {name: host.get(name) for name in ("cuda", "nccl", "driver")}
    known = {name: value for name, value in about.items() if value is not None}
    return (facts.get("spec") or {}) | (facts.get("versions") or {}) | known


def judged(
    a: list[TimedRun], b: list[TimedRun], any_commit: bool = False, scaling: str | None = None
) -> Verdict:
    """A beside B, if their work, machine and (unless `any_commit`) commit are the same.

    scaling: strong or weak; None takes what the runs are (fairness.py).
    """
    first, other = a[0][0], b[0][0]
    scaling = scaling or scaling_of([r for r, _ in (*a, *b)])
    names = [named(r) or name_of(r) for r in (first, other)]
    if names[0] == names[1]:
        names = [name_of(first), name_of(other)]
    if names[0] == names[1]:
        names = [first.source, other.source]
    told = changes(first, other)
    values = [f"{_FACTS.get(k, k)} {x} -> {y}" for k, (x, y) in told.items()]

    def refused(why: str) -> Verdict:
        return Verdict(*names, None, [why], list(told), values, other.gpus)

    for name, side in zip("AB", (a, b), strict=True):
        if mixed := list(dict.fromkeys(k for r, _ in side for k in changes(side[0][0], r, False))):
            said = ", ".join(_FACTS.get(k, k) for k in mixed)
            return refused(f"no comparison: {name}'s own {len(side)} runs differ in: {said}")
    unfair = dict.fromkeys(
        d for r, _ in (*a, *b) for d in differences(r, first, scaling, any_commit)
    )
    if unfair:
        return refused(f"invalid comparison: {'; '.join(unfair)}")
    order = [[r.repeat for r, _ in side] for side in (a, b)]
    paired = order[0] == order[1] and None not in order[0] and len(set(order[0])) == len(a)
    found = compare([x for _, x in a], [x for _, x in b], paired=paired)
    if found is None:
        return refused("no verdict: too few points on one side to say what noise is")
    if found.unit == BLOCKS and (first.running_average or other.running_average):
        found = replace(found, low=None, high=None)
    if found.unit == BLOCKS and max(r.interval for r, _ in (*a, *b)) > 1:
        found = replace(found, unit=BLOCKS_OF_ENTRIES)
    if "gpus" in told:
        found = replace(found, gpus=told["gpus"])
    return Verdict(*names, found, _doubts(a, b, found), list(told), values, other.gpus)


def _doubts(a: list[TimedRun], b: list[TimedRun], found: Comparison) -> list[str]:
    """What limits the verdict: noise, unfinished or oversubscribed runs, missing facts."""
    first, other = a[0][0], b[0][0]
    doubts = []
    if found.gpus is not None:
        if all(r.global_batch and r.seq_len for r in (first, other)):
            spent = [
                r.gpus
                * float(np.median([np.median(x) for _, x in side]))
                / (r.global_batch * r.seq_len)
                for r, side in ((first, a), (other, b))
            ]
            if (work := other.global_batch / first.global_batch) != 1:
                doubts.append(f"weak scaling: a step of B is {work:g} times A's work")
            doubts.append(f"GPU-seconds per token: A {spent[0]:.4g}, B {spent[1]:.4g}")
        else:
            doubts.append("GPU-seconds per token: - (no global batch or sequence length)")
    if open_ := unstated([first, other]):
        doubts.append(f"not stated on both sides, so not compared: {', '.join(open_)}")
    for name, record in (("A", first), ("B", other)):
        if record.running_average:
            doubts.append(f"{name} prints running averages: their noise is not its iterations'")
        elif record.interval > 1:
            doubts.append(
                f"{name}'s entries average {record.interval} iterations: the noise of one"
                " iteration is larger"
            )
    if found.unit in (BLOCKS, BLOCKS_OF_ENTRIES):
        doubts.append(
            "one or two runs a side: what changes from run to run is not in this interval"
        )
    ends = {name_of(r): judge(r, None) for r, _ in (*a, *b)}
    if stopped := [f"{name}: {j.verdict}" for name, j in ends.items() if j.verdict != "complete"]:
        doubts.append(f"not complete, its steps are counted all the same: {', '.join(stopped)}")
    if crowded := [name_of(r) for r, _ in (*a, *b) if r.oversubscribed]:
        doubts.append(f"oversubscribed, more ranks than cores: {', '.join(crowded)}")
    together = shared_cores([r for r, _ in (*a, *b)])
    doubts += [f"{name_of(r)}: {together[r.source]}" for r, _ in (*a, *b) if r.source in together]
    if any(is_changed(r) for r, _ in (*a, *b)):
        doubts.append(CHANGED)
    records = [r for r, _ in (*a, *b)]
    return doubts + busy(records) + other_kernels(records)


def of_study(runs: list[TimedRun], any_commit: bool = False) -> list[Verdict]:
    """Each configuration of a study beside the baseline's, in the order the names have; then at
    each number of GPUs the fastest beside the others, the faster first.

    Raises:
        UsageError: there is only one configuration.
    """
    groups = by_configuration(sorted(runs, key=lambda run: run[0].repeat or 0))
    if len(groups) < 2:
        raise UsageError(f"two things are compared, but there is only {next(iter(groups))}")
    wanted = next((b for r, _ in runs if (b := r.baseline)), None)
    start = group_called(wanted, groups) if wanted else None
    base = start or min(groups)
    how = any_commit, scaling_of([record for record, _ in runs])
    found = [judged(groups[base], groups[k], *how) for k in sorted(groups) if k != base]
    if wanted and not start:
        missing = f"the study's baseline {wanted} has no time here: {base} stands in for it"
        found = [replace(verdict, doubts=[*verdict.doubts, missing]) for verdict in found]
    middle = {k: np.median([np.median(x) for _, x in side]) for k, side in groups.items()}
    sizes: dict[int, list[str]] = defaultdict(list)
    for name in sorted(groups, key=middle.__getitem__):
        if gpus := groups[name][0][0].gpus:
            sizes[gpus].append(name)
    for _, (fastest, *others) in sorted(sizes.items()):
        found += [
            judged(groups[fastest], groups[k], *how) for k in others if base not in (fastest, k)
        ]
    return found


def table(verdicts: list[Verdict], any_commit: bool = False) -> Table:
    """One row per comparison; a note says where `any_commit` let commits differ."""
    rows = []
    for verdict in verdicts:
        found = verdict.found
        row = {
            "a": verdict.a,
            "b": verdict.b,
            "gpus": verdict.gpus,
            "verdict": "; ".join(verdict.doubts),
        }
        row |= dict.fromkeys(("n", "unit", "ratio", "ci95"))
        if found:
            row |= {"n": found.n_b, "unit": found.unit, "ratio": 1 + found.gain}
            row["verdict"] = "; ".join([found.verdict, *verdict.doubts])
            if found.low is not None:
                row["ci95"] = f"{1 + found.low:.3f} .. {1 + found.high:.3f}"
        rows.append(row)
    columns = [
        Column("a", "A"),
        Column("b", "B"),
        Column("gpus", "B's GPUs", "d"),
        Column("n", "n", "d"),
        Column("unit", "of"),
        Column("ratio", "time A / time B", ".3f"),
        Column("ci95", "95 % interval"),
        Column("verdict", "verdict", long="below"),
    ]
    notes = ["step times: median after the warm-up that the data show"]
    if len({verdict.a for verdict in verdicts}) > 1:
        notes.append(
            "below the rows of the baseline: the fastest on as many GPUs (A), and the others there"
            " in the order of their times"
        )
    if any_commit:
        notes.append(ANY_COMMIT)
    return Table(columns, rows, notes=notes)


def report(paths: list[Path]) -> Table:
    """The table of a study's configurations beside its baseline.

    Raises:
        UsageError: nothing could be read, or there is nothing to compare.
    """
    return table(of_study(timed_runs(paths)[0]))
