"""Is B faster than A, or is it noise? And how far apart are runs that should be identical?

    python -m analysis.compare A B [--format json]       A, B: a log, a run, or a folder of repeats
    python -m analysis.compare STUDY                     each configuration with its baseline
    python -m analysis.compare --repeats PATH...         n and spread of identical configurations

With three repeats or more on both sides the unit is the run, and where a study ran them A B A B
the pair of neighbours; with fewer it is a block of steady iterations within the runs, which cannot
see what changes from one run to the next, and says so. The verdict is plain: B faster by x % +- y,
slower, or within noise. On another number of GPUs nothing is faster as such: the ratio of times and
of GPU-seconds is given. What differs, what no log states and what makes the noise unknown (running
averages) is said. Runs whose fixed work differs, or whose commit does (unless --any-commit),
are not compared: exit 1. Exits 2 when nothing could be read.
"""

import argparse
import math
import sys
from collections import defaultdict
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

if not __package__:  # run as a script: find the rooms, not analysis/ itself
    sys.path[0] = str(Path(__file__).resolve().parent.parent)

import numpy as np

from analysis.load import called, name_of
from analysis.quality import add_time_flags, judge, no_timing, step_times, timed
from analysis.records import Record
from analysis.repeats import log_ratio
from analysis.scaling import (
    ANY_COMMIT,
    AXES,
    CHANGED,
    add_commit_flag,
    configuration,
    differences,
    is_changed,
    named,
    shared_cores,
    unstated,
)
from analysis.tables import FORMAT_HELP, FORMATS, Column, Table, emphasise, json_objects
from models.errors import Parser, UsageError, command_line, printable, warn
from parallel.steady import Steady, steady_iterations

RESAMPLES = 10_000
BLOCKS = "blocks of iterations"
_Run = tuple[Record, np.ndarray]  # a run and its steady step times
FEW_REPEATS = 3  # below this many runs a side, blocks of iterations are resampled instead


@dataclass(frozen=True)
class Comparison:
    """How much faster B is than A: time of A over time of B, less one, with a 95 % interval.

    low, high: None where nothing says what noise is. gpus: A's and B's, where they differ: B's
    gain is then no speed of the same machine, and `verdict` gives both times and GPU-seconds.
    """

    gain: float
    low: float | None
    high: float | None
    unit: str  # what was compared or resampled: "pairs of runs", "runs", BLOCKS or of entries
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
        said = f"on {b} GPUs instead of {a}, B takes {time:.3f} of A's time per step"
        if self.low is None or self.high is None:
            return f"{said} and {seconds:.3f} of its GPU-seconds; how much is noise is unknown"
        said += f" ({1 / (1 + self.high):.3f} to {1 / (1 + self.low):.3f})"
        noise = "; the times are equal within noise" * (self.low <= 0 <= self.high)
        return f"{said} and {seconds:.3f} of its GPU-seconds{noise}"

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
    of pairs where `paired` (see analysis.repeats). With fewer: a percentile bootstrap (Efron 1979)
    on the ratio of medians. Iterations of one run follow each other and are not independent, so
    blocks of about sqrt(n) of them are drawn with replacement (Kuensch 1989). None where a side has
    too little to resample (a single number).
    """
    if min(len(a), len(b)) >= FEW_REPEATS:
        medians = [[float(np.median(run)) for run in side] for side in (a, b)]
        gains = (math.expm1(value) for value in log_ratio(*medians, paired))
        return Comparison(*gains, "pairs of runs" if paired else "runs", len(a), len(b))
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
    pieces = []
    for x in runs:
        block = max(1, int(round(len(x) ** 0.5)))
        count = -(-len(x) // block)
        starts = rng.integers(0, len(x) - block + 1, (RESAMPLES, count))
        index = (starts[:, :, None] + np.arange(block)).reshape(RESAMPLES, -1)[:, : len(x)]
        pieces.append(x[index])
    return np.median(np.concatenate(pieces, axis=1), axis=1)


def repeats(records: list[Record], times: list[Steady]) -> list[dict[str, Any]]:
    """One row per configuration: how many runs, and how far apart they are."""
    groups = defaultdict(list)
    for record, time in zip(records, times, strict=True):
        groups[configuration(record)].append((record, time.step_s))
    rows = []
    for members in groups.values():
        record, seconds = members[0][0], np.array([s for _, s in members])
        rows.append(
            {
                "configuration": _describe(record),
                **spread(seconds),
                "sources": ", ".join(r.source for r, _ in members),
            }
        )
    return rows


def spread(seconds: np.ndarray) -> dict[str, Any]:
    """n, median, fastest, slowest and spread (slowest over fastest, less one) of repeats."""
    return {
        "n": len(seconds),
        "median_s": float(np.median(seconds)),
        "fastest_s": float(seconds.min()),
        "slowest_s": float(seconds.max()),
        "spread": float(seconds.max() / seconds.min() - 1) if len(seconds) > 1 else None,
    }


REPEAT_COLUMNS = (
    Column("configuration", "configuration"),
    Column("n", "n", "d"),
    Column("median_s", "median s", ".4g"),
    Column("fastest_s", "fastest", ".4g"),
    Column("slowest_s", "slowest", ".4g"),
    Column("spread", "spread", ".1%"),
)


def _describe(record: Record) -> str:
    said = [f"{k} {v}" for k in AXES if (v := getattr(record, k)) is not None]
    said += [f"zero {record.zero_stage}"] * bool(record.zero_stage)
    said += [f"recompute {record.recompute}"] * (record.recompute not in (None, "none"))
    layout = (record.extra.get("facts") or {}).get("layout") or {}
    said += ["sp"] * bool(layout.get("sequence_parallel"))
    about = ", ".join(said) or record.format
    return f"{name}: {about}" if (name := named(record)) else about


def _timed(paths: list[Path], arguments: argparse.Namespace | None = None) -> list[_Run]:
    """(record, its steady step times) of every run at the paths that has any.

    Raises:
        UsageError: none has.
    """
    from analysis.load import load

    records, refused = load(paths, arguments)
    window = getattr(arguments, "window", None)
    found = []
    for record in records:
        time = timed(record, window)
        judgement = judge(record, time)
        if time is None or judgement.unfit:
            why = "; ".join(judgement.flags if judgement.unfit else ["no step was timed"])
            refused.append(f"{record.source}: {why}")
            continue
        x = step_times(record)
        where = steady_iterations(x, record.skipped, record.iteration, window)
        found.append((record, x[where]))
    for line in refused:
        warn("analysis.compare", line)
    if not found:
        raise UsageError(f"{', '.join(map(str, paths))}: nothing here was timed")
    return found


@dataclass(frozen=True)
class Verdict:
    """One A beside one B. `found` is None where they were not compared, and `doubts` say why."""

    a: str
    b: str
    found: Comparison | None
    doubts: list[str]
    differ: list[str]  # the settings that tell B from A
    values: list[str] = field(default_factory=list)  # the same with A's and B's values

    def lines(self) -> list[str]:
        """For a terminal."""
        about = [f"A is {self.a}, B is {self.b}; they differ in: {', '.join(self.values)}"]
        if self.found is None:
            return self.doubts
        found = self.found
        what = found.unit.split()[0 if found.unit == "pairs of runs" else -1]
        counts = f"{found.n_a} and {found.n_b} {what}" if what != "pairs" else f"{found.n_a} pairs"
        sure = "" if found.low is None else "95 %, "
        return [f"{found.verdict} ({sure}{counts})", *about * bool(self.differ), *self.doubts]

    def as_dict(self) -> dict[str, Any]:
        known = self.found.as_dict() if self.found else {"verdict": None}
        said = {"differ": self.differ, "values": self.values, "doubts": self.doubts}
        return {"a": self.a, "b": self.b} | said | known


# What decides a step's time, as far as a log may say it: Record's fields and their words.
_FACTS = {name: name for name in AXES} | {
    **{name: name for name in ("zero_stage", "precision", "recompute", "interval")},
    "gpus": "GPUs",
    "interval": "iterations per entry",
}


def changes(a: Record, b: Record, settings: bool = True) -> dict[str, tuple[Any, Any]]:
    """What both state and what differs -> (A's, B's value); `settings`: of run.json, too."""
    found = {
        name: (getattr(a, name), getattr(b, name))
        for name in _FACTS
        if None not in (getattr(a, name), getattr(b, name))
    }
    for name in ("model", "params"):
        if name == "params" and a.model and b.model:
            continue
        mine, theirs = getattr(a, name), getattr(b, name)
        found |= {name: (mine, theirs)} if mine and theirs else {}
    specs = [(r.extra.get("facts") or {}).get("spec") or {} for r in (a, b)]
    for name in specs[0] if settings else ():
        if name in specs[1]:
            found.setdefault(name, (specs[0][name], specs[1][name]))
    return {name: pair for name, pair in found.items() if pair[0] != pair[1]}


def judged(a: list[_Run], b: list[_Run], any_commit: bool = False) -> Verdict:
    """A beside B, if their work, machine and (unless `any_commit`) commit are the same."""
    first, other = a[0][0], b[0][0]
    names = [named(r) or name_of(r) for r in (first, other)]
    if names[0] == names[1]:
        names = [name_of(first), name_of(other)]
    if names[0] == names[1]:
        names = [first.source, other.source]
    told = changes(first, other)
    values = [f"{_FACTS.get(k, k)} {x} -> {y}" for k, (x, y) in told.items()]

    def refused(why: str) -> Verdict:
        return Verdict(*names, None, [why], list(told), values)

    for name, side in zip("AB", (a, b), strict=True):
        if mixed := list(dict.fromkeys(k for r, _ in side for k in changes(side[0][0], r, False))):
            said = ", ".join(_FACTS.get(k, k) for k in mixed)
            return refused(f"no comparison: {name}'s own {len(side)} runs differ in: {said}")
    unfair = dict.fromkeys(
        d for r, _ in (*a, *b) for d in differences(r, first, any_commit=any_commit)
    )
    if unfair:
        return refused(f"invalid comparison: {'; '.join(unfair)}")
    order = [[r.extra.get("repeat") for r, _ in side] for side in (a, b)]
    paired = order[0] == order[1] and None not in order[0] and len(set(order[0])) == len(a)
    found = compare([x for _, x in a], [x for _, x in b], paired=paired)
    if found is None:
        return refused("no verdict: too few points on one side to say what noise is")
    if found.unit == BLOCKS and (_running(first) or _running(other)):
        found = replace(found, low=None, high=None)
    if found.unit == BLOCKS and max(r.interval for r, _ in (*a, *b)) > 1:
        found = replace(found, unit="blocks of entries")
    if "gpus" in told:
        found = replace(found, gpus=told["gpus"])
    return Verdict(*names, found, _doubts(a, b, found), list(told), values)


def _running(record: Record) -> bool:
    return bool(record.extra.get("running_average"))


def _doubts(a: list[_Run], b: list[_Run], found: Comparison) -> list[str]:
    """What a reader of a verdict must know besides."""
    first, other = a[0][0], b[0][0]
    doubts = []
    if found.gpus is not None:
        tokens = [r.global_batch and r.seq_len and r.global_batch * r.seq_len for r, _ in (*a, *b)]
        if None not in tokens and len(set(tokens)) == 1:
            spent = [
                r.gpus * float(np.median([np.median(x) for _, x in side])) / tokens[0]
                for r, side in ((first, a), (other, b))
            ]
            doubts.append(f"GPU-seconds per token: A {spent[0]:.4g}, B {spent[1]:.4g}")
        else:
            doubts.append("GPU-seconds per token: - (no global batch or sequence length)")
    if open_ := unstated([first, other]):
        doubts.append(f"not stated on both sides, so not compared: {', '.join(open_)}")
    for name, record in (("A", first), ("B", other)):
        if _running(record):
            doubts.append(f"{name} prints running averages: their noise is not its iterations'")
        elif record.interval > 1:
            doubts.append(
                f"{name}'s entries average {record.interval} iterations: the noise of one"
                " iteration is larger"
            )
    if found.unit.startswith("blocks"):
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
    return doubts


def against_baseline(runs: list[_Run], any_commit: bool = False) -> list[Verdict]:
    """Each configuration of a study beside the baseline's, in the order the names have.

    Raises:
        UsageError: there is only one configuration.
    """
    kinds: dict[tuple, list[_Run]] = defaultdict(list)
    for record, x in sorted(runs, key=lambda run: run[0].extra.get("repeat") or 0):
        kinds[configuration(record)].append((record, x))
    names = [named(side[0][0]) or name_of(side[0][0]) for side in kinds.values()]
    groups = {
        name if names.count(name) == 1 else name_of(side[0][0]): side
        for name, side in zip(names, kinds.values(), strict=True)
    }
    if len(groups) < 2:
        raise UsageError(f"two things are compared, but there is only {next(iter(groups))}")
    wanted = next((b for r, _ in runs if (b := r.extra.get("baseline"))), None)
    fits = [k for k, g in groups.items() if wanted and any(called(wanted, r) for r, _ in g)]
    if len(fits) > 1:
        raise UsageError(f"the baseline {wanted} fits {', '.join(fits)}; give A and B")
    base = fits[0] if fits else min(groups)
    found = [judged(groups[base], groups[k], any_commit) for k in sorted(groups) if k != base]
    if wanted and not fits:
        missing = f"the study's baseline {wanted} has no time here: {base} stands in for it"
        found = [replace(verdict, doubts=[*verdict.doubts, missing]) for verdict in found]
    return found


def table(verdicts: list[Verdict], any_commit: bool = False) -> Table:
    """One row per comparison; a note says where `any_commit` let commits differ."""
    rows = []
    for verdict in verdicts:
        found = verdict.found
        known = found is not None and found.low is not None
        low_high = (1 + found.low, 1 + found.high) if known else None
        rows.append(
            {
                "a": verdict.a,
                "b": verdict.b,
                "n": found and found.n_b,
                "unit": found and found.unit,
                "ratio": found and 1 + found.gain,
                "ci95": low_high and "{:.3f} .. {:.3f}".format(*low_high),
                "verdict": "; ".join(([found.verdict] if found else []) + verdict.doubts),
            }
        )
    columns = [
        Column("a", "A"),
        Column("b", "B"),
        Column("n", "n", "d"),
        Column("unit", "of"),
        Column("ratio", "time A / time B", ".3f"),
        Column("ci95", "95 % interval"),
        Column("verdict", "verdict"),
    ]
    notes = ["step times: median after the warm-up that the data show"]
    return Table(columns, rows, notes=notes + [ANY_COMMIT] * any_commit)


def report(paths: list[Path]) -> Table:
    """The table of a study's configurations beside its baseline, for reports.

    Raises:
        UsageError: nothing could be read, or there is nothing to compare.
    """
    return table(against_baseline(_timed(paths)))


@command_line("analysis.compare")
def main(argv: list[str] | None = None) -> int:
    """Print the verdict, or the table of repeats."""
    from analysis.load import add_fact_flags, load

    parser = Parser(
        prog="python -m analysis.compare",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("paths", nargs="+", type=Path, metavar="PATH", help="A B, or a study")
    add_commit_flag(parser)
    parser.add_argument("--repeats", action="store_true", help="n and spread of identical runs")
    add_time_flags(parser)
    add_fact_flags(parser)
    parser.add_argument("--format", choices=FORMATS, default="text", help=FORMAT_HELP)
    arguments = parser.parse_args(argv)
    if arguments.repeats:
        records, refused = load(arguments.paths, arguments)
        found = []
        for record in records:
            if time := timed(record, arguments.window, arguments.rule):
                found.append((record, time))
            else:
                why = no_timing(record) or "no step was timed"
                refused.append(f"{name_of(record)}: {why}")
        rows = repeats([r for r, _ in found], [t for _, t in found])
        notes = [f"left out: {line}" for line in refused]
        text = Table(REPEAT_COLUMNS, rows, notes=notes).render(arguments.format)
        print(emphasise(text) if arguments.format == "text" else text, end="")
        return 0
    if len(arguments.paths) > 2:
        raise UsageError(f"two things are compared, but {len(arguments.paths)} were given")
    sides = [_timed([path], arguments) for path in arguments.paths]
    if len(sides) == 1:
        verdicts = against_baseline(sides[0], arguments.any_commit)
    else:
        verdicts = [judged(*sides, arguments.any_commit)]
    if arguments.format == "json":
        print(json_objects([verdict.as_dict() for verdict in verdicts]), end="")
    elif len(sides) == 1:
        text = table(verdicts, arguments.any_commit).render(arguments.format)
        print(emphasise(text) if arguments.format == "text" else text, end="")
    else:
        lines = verdicts[0].lines() + [ANY_COMMIT] * arguments.any_commit
        print(*map(printable, lines), sep="\n")
    return 0 if all(verdict.found for verdict in verdicts) else 1


if __name__ == "__main__":
    sys.exit(main())
