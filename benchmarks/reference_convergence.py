"""Writes MLPerf's reference convergence points, and shows how well the law of batches fits them.

    pip install mlperf-logging                                # the extra `mlperf`
    python -m benchmarks.reference_convergence [--check]      # writes the file of points

The points are of the rcp_checker's JSON files of the training rulesets. A run of more than twice
the median of its batch is left out and named. `coverage` is a block of benchmarks.published_tables:
it predicts the largest batch of each benchmark from all others.
"""

import json
import statistics
import sys
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

from analysis.common.convergence import (
    REFERENCE_FILE,
    Point,
    fitted,
    of_benchmark,
    point_of,
    reference_points,
)
from analysis.common.table import Column, Table
from base.errors import Parser, UsageError, command_line, warn

PACKAGE = "mlperf-logging"
FEWEST = 3  # batches whose fit has an interval


def rulesets() -> Iterator[tuple[str, str, list[Point]]]:
    """Yields (round, benchmark, points) of each file of the installed package, by round."""
    try:
        files = metadata.files(PACKAGE) or []
    except metadata.PackageNotFoundError:
        raise UsageError(f"{PACKAGE} is not installed: pip install {PACKAGE}") from None
    named = []
    for file in files:
        if file.match("training_*/rcps_*.json"):
            path = Path(file.locate())
            version = path.parent.name.removeprefix("training_").removesuffix(".0")
            named.append((version, path.stem.removeprefix("rcps_"), path))
    for version, benchmark, path in sorted(named, key=lambda name: (float(name[0]), name[1])):
        points = []
        for record in json.loads(path.read_text()).values():
            counts = next(value for key, value in record.items() if "to converge" in key)
            possible = [n for n in counts if n <= 2 * statistics.median(counts)]
            if left := [n for n in counts if n not in possible]:
                warn("reference_convergence", f"{benchmark} v{version}: left out {left}")
            points.append(point_of(record["BS"], possible))
        yield version, benchmark, sorted(points)


def as_toml() -> str:
    """Returns the file of points: a table for each series of points, with its rounds."""
    rounds: dict[tuple[str, tuple[Point, ...]], list[str]] = {}
    for version, benchmark, points in rulesets():
        rounds.setdefault((benchmark, tuple(points)), []).append(version)
    lines = [
        "# What MLPerf's reference runs needed to converge: for each batch the number of runs, and",
        "# the mean and standard deviation of their counts (samples, tokens or epochs, as the",
        f"# benchmark counts). Source: {PACKAGE} {metadata.version(PACKAGE)} (Apache-2.0), files",
        "# rcp_checker/training_*/rcps_*.json. Written by benchmarks/reference_convergence.py.",
    ]
    for (benchmark, points), versions in rounds.items():
        lines += [
            "",
            "[[series]]",
            f'benchmark = "{benchmark}"',
            f"rounds = {json.dumps(versions)}",
        ]
        for name, values in zip(Point._fields, zip(*points, strict=True), strict=True):
            lines.append(f"{name} = [{', '.join(f'{value:.10g}' for value in values)}]")
    return "\n".join(lines) + "\n"


def _row(benchmark: str, points: tuple[Point, ...]) -> dict:
    """Returns the fit to all batches of a benchmark, and what the others say of the largest."""
    law = of_benchmark(benchmark).value
    row = {"benchmark": benchmark, "batches": len(points), "critical_batch": law.value}
    row |= {"critical_ci95": list(law.interval), "off": law.off}
    *others, largest = points
    if len(others) < FEWEST:
        return row
    ratio = fitted(others, "").value.law_ratio(largest.batch, others[0].batch)
    measured = largest.mean / others[0].mean
    low, high = ratio.interval
    row |= {"measured": measured, "predicted": ratio.value, "predicted_ci95": [low, high]}
    return row | {"missed": ratio.value / measured - 1, "holds": low <= measured <= high}


def coverage() -> Table:
    """Returns a row for each benchmark, by its newest round; of equal points (a benchmark that was
    renamed) the newest name has it."""
    newest = {name: points for (name, _), points in reference_points().items()}
    names = {points: name for name, points in newest.items()}
    rows = [_row(name, points) for points, name in sorted(names.items(), key=lambda item: item[1])]
    columns = [
        Column("benchmark", "benchmark"),
        Column("batches", "batches", "d"),
        Column("critical_batch", "critical batch", ".3g"),
        Column("critical_ci95", "95 % interval", ".3g"),
        Column("off", "law off by at most", ".1%"),
        Column("measured", "largest batch's samples / smallest's", ".2f"),
        Column("predicted", "predicted from the others", ".2f"),
        Column("predicted_ci95", "its 95 % interval", ".2f"),
        Column("missed", "off", "+.1%"),
    ]
    held = [row["holds"] for row in rows if "holds" in row]
    return Table(columns, rows, notes=[f"{sum(held)} of {len(held)} intervals hold the measured"])


@command_line("reference_convergence")
def main(argv: list[str] | None = None) -> int:
    parser = Parser(prog="python -m benchmarks.reference_convergence", description=__doc__)
    parser.add_argument("--check", action="store_true", help="exit 1 where the file is stale")
    text = as_toml()
    if not parser.parse_args(argv).check:
        REFERENCE_FILE.write_text(text)
        return 0
    return int(REFERENCE_FILE.read_text() != text)


if __name__ == "__main__":
    sys.exit(main())
