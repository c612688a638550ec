"""Is B faster than A, or is it noise?

    python -m analysis.compare A B [--format json]       A, B: a log, a run, or a folder of repeats
    python -m analysis.compare STUDY        each configuration with its baseline, and with the
                                            fastest on as many GPUs

With three repeats or more on both sides the unit is the run, and where a study ran them A B A B
the pair of neighbours; with fewer it is a block of steady iterations within the runs, which cannot
see what changes from one run to the next, and says so. The ratio is that of the medians, as in all
tables. The verdict is plain: B is x times as fast, takes x times as long, or is within noise. On
another number of GPUs nothing is faster as such: the ratio of times and of GPU-seconds is given.
What differs, what no log states and what makes the noise unknown (running
averages) is said. Runs whose fixed work differs, or whose commit does (unless --any-commit),
are not compared: exit 1. Exits 2 when nothing could be read.
"""

import math
import statistics
import sys
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from analysis.common.statistics import FEW_REPEATS, are_pairs, ratio_of_medians
from analysis.common.table import Column, Table, show
from analysis.logs.fact_options import facts_of
from analysis.logs.load import baseline_of, has_baseline, load, name_of
from analysis.logs.record import Record
from analysis.logs.verdict import judge, step_times, time_doubts, timed
from analysis.runs.fairness import (
    ANY_COMMIT,
    CHANGED,
    WORDS,
    busy,
    by_configuration,
    changes,
    differences,
    group_with,
    is_changed,
    named,
    other_kernels,
    other_libraries,
    question_of,
    scaling_of,
    shared_cores,
    unlike,
    unstated,
)
from analysis.runs.run_options import parser_of
from base.errors import Reading, UsageError, by_reason, command_line, warn
from parallel.measure.steady_time import MIN_STEADY, Window, steady_iterations

RESAMPLES = 10_000
RUNS, PAIRS, BLOCKS = "runs", "pairs of runs", "blocks of iterations"  # what is resampled
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


class TimedRun(NamedTuple):
    """A run, its steady step times in seconds, and what is doubtful about them."""

    record: Record
    step_s: np.ndarray
    doubts: Sequence[str] = ()


@dataclass(frozen=True)
class Comparison:
    """How fast B is beside A: the time of A over the time of B, with a 95 % interval.

    low, high: None where the noise is unknown. gpus: A's and B's numbers of GPUs where they differ;
    `verdict` then gives the ratios of times and of GPU-seconds.
    """

    ratio: float
    low: float | None
    high: float | None
    unit: str  # what was compared or resampled
    n_a: int
    n_b: int
    gpus: tuple[int, int] | None = None

    @property
    def is_noise(self) -> bool | None:
        """Whether the interval holds equal times; None where the noise is unknown."""
        return None if self.low is None or self.high is None else self.low <= 1 <= self.high

    @property
    def verdict(self) -> str:
        """One plain sentence."""
        if self.gpus is not None:
            a, b = self.gpus
            time, seconds = 1 / self.ratio, b / a / self.ratio
            ratio = f"on {b} GPUs instead of {a}, B takes {time:.3f} of A's time per step"
            work = f"and {seconds:.3f} of its GPU-seconds"
            if self.is_noise is None:
                return f"{ratio} {work}; how much is noise is unknown"
            ratio += f" ({1 / self.high:.3f} to {1 / self.low:.3f}) {work}"
            return f"{ratio}; the times are equal within noise" if self.is_noise else ratio
        if self.is_noise is None:
            return f"B takes {1 / self.ratio:.3f} of A's time; how much is noise is unknown"
        if self.is_noise:
            could = f"{self.low:.3f} to {self.high:.3f} times"
            return f"within noise: B is {self.ratio:.3f} times as fast as A but could be {could}"
        if self.ratio > 1:
            interval = f"({self.low:.3f} to {self.high:.3f})"
            return f"B is faster: {self.ratio:.3f} times as fast as A {interval}"
        interval = f"({1 / self.high:.3f} to {1 / self.low:.3f})"
        return f"B is slower: it takes {1 / self.ratio:.3f} times as long as A {interval}"


def compare(
    a: list[np.ndarray], b: list[np.ndarray], seed: int = 0, paired: bool = False
) -> Comparison | None:
    """Compare two sides, each a list of runs, each its steady step times in seconds.

    The ratio is that of each side's median over its runs of their medians. With FEW_REPEATS runs or
    more on both sides, its interval is `ratio_of_medians`', of pairs where `paired`. With fewer it
    is a percentile bootstrap (Efron 1979). Iterations of one run follow each other and are not
    independent, so blocks of about sqrt(n) of them are drawn with replacement (Kuensch 1989). None
    where a side has too little to resample (a single number).
    """
    medians = [[float(np.median(run)) for run in side] for side in (a, b)]
    if min(len(a), len(b)) >= FEW_REPEATS:
        unit = PAIRS if paired else RUNS
        return Comparison(*ratio_of_medians(*medians, paired), unit, len(a), len(b))
    points = [sum(map(len, side)) for side in (a, b)]
    if min(points) < MIN_STEADY:
        return None
    rng = np.random.default_rng(seed)
    drawn = [_block_medians(side, rng) for side in (a, b)]
    low, high = map(float, np.percentile(drawn[0] / drawn[1], [2.5, 97.5]))
    ratio = statistics.median(medians[0]) / statistics.median(medians[1])
    return Comparison(ratio, min(low, ratio), max(high, ratio), BLOCKS, *points)


def _block_medians(runs: list[np.ndarray], rng: np.random.Generator) -> np.ndarray:
    """RESAMPLES times the median over runs of the median of blocks drawn, with replacement, from
    each."""
    medians = []
    rows = max(1, 2**20 // sum(map(len, runs)))  # all at once would take gigabytes for long runs
    for i in range(0, RESAMPLES, rows):
        series = []
        for x in runs:
            blocks = np.lib.stride_tricks.sliding_window_view(x, round(len(x) ** 0.5))
            shape = min(rows, RESAMPLES - i), math.ceil(len(x) / blocks.shape[1])
            blocks = blocks[rng.integers(0, len(blocks), shape)]
            series.append(np.median(blocks.reshape(len(blocks), -1)[:, : len(x)], axis=1))
        medians.append(np.median(series, axis=0))
    return np.concatenate(medians)


def timed_runs(
    paths: list[Path], facts: dict[str, Any] | None = None, window: Window | None = None
) -> Reading[list[TimedRun]]:
    """The runs at the paths with their steady step times; one line for each run without any.

    Raises:
        UsageError: none has.
    """
    records, left_out = load(paths, facts)
    runs = []
    for record in records:
        time = timed(record, window)
        judgement = judge(record, time)
        if judgement.unfit:
            left_out.append(f"{record.source}: {'; '.join(map(str, judgement.flags))}")
        elif record.mean_of:
            alone = f"its time is {record.mean_of} alone, so its noise is unknown"
            left_out.append(f"{record.source}: {alone}: analysis.scaling compares such times")
        elif time is None:
            left_out.append(f"{record.source}: no step was timed")
        else:
            x, steps = step_times(record), record.steps
            steady = steady_iterations(x, steps["skipped"], steps["iteration"], window)
            runs.append(TimedRun(record, x[steady], time_doubts(record, time)))
    if not runs:
        where = ", ".join(map(str, paths))
        raise UsageError("; ".join([f"{where}: nothing here was timed", *left_out]))
    return Reading(runs, left_out)


@dataclass(frozen=True)
class Verdict:
    """One A beside one B. `comparison` is None where there is none, and `doubts` say why."""

    a: str
    b: str
    comparison: Comparison | None
    doubts: list[str]
    values: list[str]  # the settings that tell B from A, with A's and B's values
    gpus: int | None = None  # B's

    def row(self) -> dict[str, Any]:
        """Plain data; `ratio` is the time of A over the time of B."""
        row = vars(self) | dict.fromkeys(("n_a", "n_b", "unit", "ratio", "ratio_ci95", "verdict"))
        del row["comparison"]
        if (c := self.comparison) is not None:
            row |= {"n_a": c.n_a, "n_b": c.n_b, "unit": c.unit, "ratio": c.ratio}
            row["verdict"] = c.verdict
            if c.is_noise is not None:
                row["ratio_ci95"] = [c.low, c.high]
                row["ci95"] = f"{c.low:.3f} .. {c.high:.3f}"
        return row | {"sentence": "; ".join(filter(None, [row["verdict"], *self.doubts]))}


def judged(
    a: list[TimedRun], b: list[TimedRun], any_commit: bool = False, scaling: str | None = None
) -> Verdict:
    """A beside B, if their work, machine and (unless `any_commit`) commit are the same.

    scaling: strong or weak; None takes what the runs are (fairness.py).
    """
    runs = [run.record for run in (*a, *b)]
    first, other = a[0].record, b[0].record
    scaling = scaling or scaling_of(runs)
    for name_by in (lambda r: named(r) or name_of(r), name_of, lambda r: r.source):
        names = [name_by(first), name_by(other)]
        if names[0] != names[1]:
            break
    told = changes(first, other)
    values = [f"{WORDS.get(k, k)} {x} -> {y}" for k, (x, y) in told.items()]

    def refused(why: str) -> Verdict:
        return Verdict(*names, None, [why], values, other.gpus)

    for name, side in (("A", a), ("B", b)):
        apart = dict.fromkeys(k for r in side for k in unlike(side[0].record, r.record, any_commit))
        if apart:
            words = ", ".join(apart)
            return refused(f"no comparison: {name}'s own {len(side)} runs differ in: {words}")
    unfair = dict.fromkeys(d for r in runs for d in differences(r, first, scaling, any_commit))
    if unfair:
        return refused(f"invalid comparison: {'; '.join(unfair)}")
    order = [[run.record.repeat for run in side] for side in (a, b)]
    comparison = compare(*([r.step_s for r in side] for side in (a, b)), paired=are_pairs(*order))
    if comparison is None:
        return refused("no verdict: too few points on one side to say what noise is")
    if comparison.unit == BLOCKS and (first.running_average or other.running_average):
        comparison = replace(comparison, low=None, high=None)
    if "gpus" in told:
        comparison = replace(comparison, gpus=told["gpus"])
    return Verdict(*names, comparison, _doubts(a, b, comparison), values, other.gpus)


def _doubts(a: list[TimedRun], b: list[TimedRun], comparison: Comparison) -> list[str]:
    """What limits the verdict: noise, unfinished or oversubscribed runs, missing facts."""
    runs = [run.record for run in (*a, *b)]
    first, other = a[0].record, b[0].record
    doubts = by_reason([(name_of(run.record), doubt) for run in (*a, *b) for doubt in run.doubts])
    if comparison.gpus and first.global_batch and other.global_batch:
        if (work := other.global_batch / first.global_batch) != 1:
            doubts.append(f"weak scaling: a step of B is {work:g} times A's work")
    if unknown := unstated([first, other]):
        doubts.append(f"not stated on both sides, so not compared: {', '.join(unknown)}")
    for name, record in (("A", first), ("B", other)):
        if record.running_average:
            doubts.append(f"{name} prints running averages: their noise is not its iterations'")
        elif record.interval > 1:
            average = f"{name}'s entries average {record.interval} iterations"
            doubts.append(f"{average}: the noise of one iteration is larger")
    if comparison.unit == BLOCKS:
        doubts.append(
            "one or two runs a side: what changes from run to run is not in this interval"
        )
    ends = {name_of(record): judge(record).verdict for record in runs}
    if stopped := [f"{name}: {end}" for name, end in ends.items() if end != "complete"]:
        doubts.append(f"not complete, its steps are counted all the same: {', '.join(stopped)}")
    if crowded := [name_of(record) for record in runs if record.oversubscribed]:
        doubts.append(f"oversubscribed, more ranks than cores: {', '.join(crowded)}")
    partners = shared_cores(runs)
    doubts += [f"{name_of(r)}: {partners[r.source]}" for r in runs if r.source in partners]
    if any(map(is_changed, runs)):
        doubts.append(CHANGED)
    return doubts + busy(runs) + other_kernels(runs) + other_libraries(runs)


def of_study(runs: list[TimedRun], any_commit: bool = False) -> list[Verdict]:
    """Each configuration of a study beside the baseline's, in the order the names have; then at
    each number of GPUs the fastest beside the others, the faster first.

    Raises:
        UsageError: there is only one configuration.
    """
    groups = by_configuration(sorted(runs, key=lambda run: run.record.repeat or 0))
    if len(groups) < 2:
        raise UsageError(f"two things are compared, but there is only {next(iter(groups))}")
    wanted = next((run.record.baseline for run in runs if run.record.baseline), None)
    records = [run.record for run in runs]
    start = None
    if wanted and has_baseline(wanted, records):
        start = group_with(baseline_of(wanted, records), groups)
    base = start or min(groups)
    pairs = [(base, name) for name in sorted(groups) if name != base]
    sizes: dict[int, list[str]] = defaultdict(list)
    middles = {n: np.median([np.median(run.step_s) for run in of]) for n, of in groups.items()}
    for name in sorted(groups, key=middles.__getitem__):
        if gpus := groups[name][0].record.gpus:
            sizes[gpus].append(name)
    for _, (fastest, *others) in sorted(sizes.items()):
        pairs += [(fastest, name) for name in others if base not in (fastest, name)]
    how = any_commit, scaling_of(records)
    verdicts = [replace(judged(groups[a], groups[b], *how), a=a, b=b) for a, b in pairs]
    if wanted and not start:
        missing = f"the study's baseline {wanted} has no time here: {base} stands in for it"
        n = len(groups) - 1
        verdicts[:n] = [replace(v, doubts=[*v.doubts, missing]) for v in verdicts[:n]]
    return verdicts


def table(verdicts: list[Verdict], any_commit: bool = False) -> Table:
    """One row per comparison; a note says where `any_commit` let commits differ."""
    notes = ["step times: median after the warm-up that the data show"]
    if len({verdict.a for verdict in verdicts}) > 1:
        notes.append(
            "below the rows of the baseline: the fastest on as many GPUs (A), and the others there"
            " in the order of their times"
        )
    if any_commit:
        notes.append(ANY_COMMIT)
    return Table(COLUMNS, [verdict.row() for verdict in verdicts], notes=notes)


@command_line("analysis.compare")
def main(argv: list[str] | None = None) -> int:
    names = ("any_commit", "times", "facts", "table")
    flags = parser_of("analysis.compare", __doc__, *names, paths="A B, or a study").parse_args(argv)
    if len(flags.paths) > 2:
        raise UsageError(f"two things are compared, but {len(flags.paths)} were given")
    sides = []
    for path in flags.paths:
        runs, left_out = timed_runs([path], facts_of(flags), flags.window)
        warn("analysis.compare", *left_out)
        sides.append(runs)
    if len(sides) == 1:
        verdicts = of_study(sides[0], flags.any_commit)
    else:
        verdicts = [judged(*sides, flags.any_commit)]
    shown = table(verdicts, flags.any_commit)
    if len(sides) == 2 and verdicts[0].values:
        shown.notes.append(f"they differ in: {', '.join(verdicts[0].values)}")
    shown.title = question_of([run.record for side in sides for run in side])
    show([shown], flags.format, flags.columns)
    return 0 if all(verdict.comparison for verdict in verdicts) else 1


if __name__ == "__main__":
    sys.exit(main())
