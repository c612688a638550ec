"""Is B faster than A, or is it noise? And how far apart are runs that should be identical?

    python -m analysis.compare A B [--format json]       A, B: a log, a run, or a folder of repeats
    python -m analysis.compare STUDY                     each configuration with its baseline
    python -m analysis.compare --repeats PATH...         n and spread of identical configurations

With three repeats or more on both sides the unit is the run, and where a study ran them A B A B
the pair of neighbours; with fewer it is a block of steady iterations within the runs, which cannot
see what changes from one run to the next, and says so. The verdict is plain: B faster by x % +- y,
slower, or within noise. Runs whose fixed work differs, or whose commit does (unless --any-commit),
are not compared: exit 1. Exits 2 when nothing could be read.
"""

import argparse
import math
import sys
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from typing import Any

if not __package__:  # run as a script: find the rooms, not analysis/ itself
    sys.path[0] = str(Path(__file__).resolve().parent.parent)

import numpy as np

from analysis.load import name_of
from analysis.quality import add_time_flags, judge, no_timing, step_times, timed
from analysis.records import Record
from analysis.repeats import log_ratio
from analysis.scaling import ANY_COMMIT, AXES, add_commit_flag, configuration, differences, named
from analysis.tables import FORMATS, Column, Table, emphasise, json_objects
from models.errors import UsageError, command_line
from parallel.steady import Steady

RESAMPLES = 10_000
_Run = tuple[Record, np.ndarray]  # a run and its steady step times
FEW_REPEATS = 3  # below this many runs a side, blocks of iterations are resampled instead


@dataclass(frozen=True)
class Comparison:
    """How much faster B is than A: time of A over time of B, less one, with a 95 % interval."""

    gain: float
    low: float
    high: float
    unit: str  # what was compared or resampled: "pairs of runs", "runs" or "blocks of iterations"
    n_a: int
    n_b: int

    @property
    def verdict(self) -> str:
        """One plain sentence."""
        if self.low <= 0 <= self.high:
            return (
                f"within noise: B is {self.gain:+.1%} but could be"
                f" {self.low:+.1%} to {self.high:+.1%}"
            )
        word = "faster" if self.gain > 0 else "slower"
        half = (self.high - self.low) / 2
        return f"B is {word} by {abs(self.gain):.1%} ± {half:.1%}"

    def as_dict(self) -> dict[str, Any]:
        """Plain data; `ratio` is the time of A over the time of B."""
        ratio = {"ratio": 1 + self.gain, "ratio_ci95": [1 + self.low, 1 + self.high]}
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
    return Comparison(gain, float(low), float(high), "blocks of iterations", *map(len, sides))


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
        x = step_times(record)[time.first :]
        if window:
            x = x[record.iteration[time.first :] <= window[1]]
        found.append((record, x[np.isfinite(x)]))
    for line in refused:
        print(f"analysis.compare: {line}", file=sys.stderr)
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

    def lines(self) -> list[str]:
        """For a terminal."""
        if self.found is None:
            return self.doubts
        found = self.found
        what = found.unit.split()[0 if found.unit == "pairs of runs" else -1]
        counts = f"{found.n_a} and {found.n_b} {what}" if what != "pairs" else f"{found.n_a} pairs"
        more = [f"A is {self.a}, B is {self.b}; they differ in: {', '.join(self.differ)}"]
        return [f"{found.verdict} (95 %, {counts})", *more * bool(self.differ), *self.doubts]

    def as_dict(self) -> dict[str, Any]:
        known = self.found.as_dict() if self.found else {"verdict": None}
        return {"a": self.a, "b": self.b, "differ": self.differ, "doubts": self.doubts} | known


def judged(a: list[_Run], b: list[_Run], any_commit: bool = False) -> Verdict:
    """A beside B, if their work, machine and (unless `any_commit`) commit are the same."""
    first, names = a[0][0], [named(side[0][0]) or side[0][0].source for side in (a, b)]
    specs = [(side[0][0].extra.get("facts") or {}).get("spec") or {} for side in (a, b)]
    differ = [k for k in specs[0] if k in specs[1] and specs[0][k] != specs[1][k]]
    unfair = dict.fromkeys(
        d for r, _ in (*a, *b) for d in differences(r, first, any_commit=any_commit)
    )
    if unfair:
        return Verdict(*names, None, [f"invalid comparison: {'; '.join(unfair)}"], differ)
    order = [[r.extra.get("repeat") for r, _ in side] for side in (a, b)]
    paired = order[0] == order[1] and None not in order[0] and len(set(order[0])) == len(a)
    found = compare([x for _, x in a], [x for _, x in b], paired=paired)
    if found is None:
        return Verdict(
            *names, None, ["no verdict: too few points on one side to say what noise is"], differ
        )
    doubts = []
    if found.unit == "blocks of iterations":
        doubts.append(
            "one or two runs a side: what changes from run to run is not in this interval"
        )
    ends = {name_of(r): judge(r, None) for r, _ in (*a, *b)}
    if stopped := [f"{name}: {j.verdict}" for name, j in ends.items() if j.verdict != "complete"]:
        doubts.append(f"not complete, its steps are counted all the same: {', '.join(stopped)}")
    if any(r.commit and r.commit.endswith("+dirty") for r, _ in (*a, *b)):
        doubts.append("run from a changed working tree: its commit does not say what ran")
    return Verdict(*names, found, doubts, differ)


def against_baseline(runs: list[_Run], any_commit: bool = False) -> list[Verdict]:
    """Each configuration of a study beside the baseline's, in the order the names have.

    Raises:
        UsageError: there is only one configuration.
    """
    groups: dict[str, list[_Run]] = defaultdict(list)
    for record, x in sorted(runs, key=lambda run: run[0].extra.get("repeat") or 0):
        groups[named(record) or record.source].append((record, x))
    if len(groups) < 2:
        raise UsageError(f"two things are compared, but there is only {next(iter(groups))}")
    wanted = runs[0][0].extra.get("baseline")
    base = next(
        (k for k, g in groups.items() if wanted in (k, *(r.extra.get("run") for r, _ in g))),
        min(groups),
    )
    return [judged(groups[base], groups[k], any_commit) for k in sorted(groups) if k != base]


def table(verdicts: list[Verdict], any_commit: bool = False) -> Table:
    """One row per comparison; a note says where `any_commit` let commits differ."""
    rows = []
    for verdict in verdicts:
        found = verdict.found
        low_high = (1 + found.low, 1 + found.high) if found else None
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

    parser = argparse.ArgumentParser(
        prog="python -m analysis.compare",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("paths", nargs="+", type=Path, metavar="PATH", help="A B, or a study")
    add_commit_flag(parser)
    parser.add_argument("--repeats", action="store_true", help="n and spread of identical runs")
    add_time_flags(parser)
    add_fact_flags(parser)
    parser.add_argument("--format", choices=FORMATS, default="text")
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
        print("\n".join(verdicts[0].lines() + [ANY_COMMIT] * arguments.any_commit))
    return 0 if all(verdict.found for verdict in verdicts) else 1


if __name__ == "__main__":
    sys.exit(main())
