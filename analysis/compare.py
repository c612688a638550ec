"""Is B faster than A, or is it noise? And how far apart are runs that should be identical?

    python -m analysis.compare A B [--format json]       A, B: a log, a run, or a folder of repeats
    python -m analysis.compare --repeats PATH...         n and spread of identical configurations

With three repeats or more on both sides the unit is the run; with fewer it is a block of steady
iterations within the runs, which cannot see what changes from one run to the next, and says so.
The verdict is plain: B faster by x % +- y, slower, or within noise. Two runs whose fixed work
differs are not compared: exit 1. Exits 2 when nothing could be read.
"""

import argparse
import sys
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from typing import Any

if not __package__:  # run as a script: find the rooms, not analysis/ itself
    sys.path[0] = str(Path(__file__).resolve().parent.parent)

import numpy as np

from analysis.quality import Steady, add_time_flags, judge, step_times, timed
from analysis.records import Record
from analysis.scaling import AXES, configuration, differences
from analysis.tables import FORMATS, Column, Table, emphasise, json_objects
from models.errors import UsageError

RESAMPLES = 10_000
FEW_REPEATS = 3  # below this many runs a side, blocks of iterations are resampled instead


@dataclass(frozen=True)
class Comparison:
    """How much faster B is than A: time of A over time of B, less one, with a 95 % interval."""

    gain: float
    low: float
    high: float
    unit: str  # what was resampled: "runs" or "blocks of iterations"
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


def compare(a: list[np.ndarray], b: list[np.ndarray], seed: int = 0) -> Comparison | None:
    """Compare two sides, each a list of runs, each its steady step times in seconds.

    A percentile bootstrap (Efron 1979) on the ratio of medians. Iterations of one run follow each
    other and are not independent, so blocks of about sqrt(n) of them are drawn with replacement
    (Kuensch 1989). None where a side has too little to resample (a single number).
    """
    rng = np.random.default_rng(seed)
    repeats = min(len(a), len(b)) >= FEW_REPEATS
    if repeats:
        sides = [np.array([np.median(run) for run in side]) for side in (a, b)]
        drawn = [np.median(x[rng.integers(0, len(x), (RESAMPLES, len(x)))], axis=1) for x in sides]
    else:
        sides = [np.concatenate(side) for side in (a, b)]
        if min(map(len, sides)) < 2 * FEW_REPEATS:
            return None
        drawn = [_block_medians(side, rng) for side in (a, b)]
    ratio = drawn[0] / drawn[1] - 1
    low, high = np.percentile(ratio, [2.5, 97.5])
    gain = float(np.median(sides[0]) / np.median(sides[1]) - 1)
    unit = "runs" if repeats else "blocks of iterations"
    return Comparison(gain, float(low), float(high), unit, len(sides[0]), len(sides[1]))


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
    return ", ".join(said) or record.format


def _timed(paths: list[Path], arguments: argparse.Namespace) -> list[tuple[Record, np.ndarray]]:
    """(record, its steady step times) of every run at the paths that has any.

    Raises:
        UsageError: none has.
    """
    from analysis.load import load

    records, refused = load(paths, arguments)
    found = []
    for record in records:
        time = timed(record, arguments.window)
        if time is None or judge(record, time).unfit:
            refused.append(f"{record.source}: no iteration with an optimizer step was timed")
            continue
        x = step_times(record)[time.first :]
        if arguments.window:
            numbers = record.iteration[time.first :]
            x = x[numbers <= arguments.window[1]]
        found.append((record, x[np.isfinite(x)]))
    for line in refused:
        print(f"analysis.compare: {line}", file=sys.stderr)
    if not found:
        raise UsageError(f"{', '.join(map(str, paths))}: nothing here was timed")
    return found


def main(argv: list[str] | None = None) -> int:
    """Print the verdict, or the table of repeats."""
    from analysis.load import add_fact_flags, load

    parser = argparse.ArgumentParser(
        prog="python -m analysis.compare",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("paths", nargs="+", type=Path, metavar="PATH", help="A B, or repeats")
    parser.add_argument("--repeats", action="store_true", help="n and spread of identical runs")
    add_time_flags(parser)
    add_fact_flags(parser)
    parser.add_argument("--format", choices=FORMATS, default="text")
    arguments = parser.parse_args(argv)
    try:
        if arguments.repeats:
            records, refused = load(arguments.paths, arguments)
            found = [(r, t) for r in records if (t := timed(r, arguments.window, arguments.rule))]
            rows = repeats([r for r, _ in found], [t for _, t in found])
            text = Table(REPEAT_COLUMNS, rows, notes=refused).render(arguments.format)
            print(emphasise(text) if arguments.format == "text" else text, end="")
            return 0
        if len(arguments.paths) != 2:
            raise UsageError(f"two things are compared, but {len(arguments.paths)} were given")
        a, b = (_timed([path], arguments) for path in arguments.paths)
    except UsageError as error:
        print(f"analysis.compare: {error}", file=sys.stderr)
        return 2
    unfair = differences(b[0][0], a[0][0])
    if unfair:
        print(f"invalid comparison: {'; '.join(unfair)}")
        return 1
    found = compare([x for _, x in a], [x for _, x in b])
    if found is None:
        print("no verdict: too few points on one side to say what noise is")
        return 1
    if arguments.format == "json":
        print(json_objects([vars(found) | {"verdict": found.verdict}]), end="")
        return 0
    print(f"{found.verdict} (95 %, {found.n_a} and {found.n_b} {found.unit.split()[-1]})")
    if found.unit != "runs":
        print("one or two runs a side: what changes from run to run is not in this interval")
    return 0


if __name__ == "__main__":
    sys.exit(main())
