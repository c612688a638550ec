"""The pictures of runs and logs: TFLOP/s and speedup against GPUs."""

import statistics
from collections import defaultdict
from pathlib import Path
from typing import Any

from analysis.common import drawing
from analysis.common.drawing import Point
from analysis.logs.load import load
from analysis.logs.record import Record
from analysis.measured.fairness import by_configuration, scaling_of
from analysis.measured.run_table import rows as scaling_rows
from base.errors import UsageError
from models.flops import DEFAULT_CONVENTION
from parallel.config.axes import AXES

Row = dict[str, Any]  # of `run_table.rows`, with the configuration's name, its split and baseline


def draw(
    paths: list[Path], folder: Path, baseline: str | None, force: bool = False
) -> tuple[list[Path], list[str]]:
    """(the pictures written to a folder, one line for each thing that a picture leaves out).

    Raises:
        UsageError: nothing could be read, or nothing of it can be drawn.
    """
    records, left_out = load(paths)
    groups = by_configuration([(record,) for record in records])
    name_by = {id(run[0]): name for name, repeats in groups.items() for run in repeats}
    rows = [
        row
        | {"engine": record.engine or "unknown", "configuration": name_by[id(record)]}
        | {"split": _split(record), "baseline": baseline or record.baseline}
        for record, row in zip(records, scaling_rows(records, baseline=baseline), strict=True)
    ]
    figures = _figures(rows, scaling_of(records) == "weak", left_out)
    if not figures:
        why = "no run here has a number of GPUs and a steady time: nothing to draw"
        raise UsageError("; ".join([why, *left_out]))
    written = [drawing.save(figure, folder, name, force) for name, figure in figures.items()]
    return sum(written, []), left_out


def _split(record: Record) -> str:
    """What of a run is split or sharded, as "tp2 dp4 zero1"; "" where nothing is or is known."""
    sizes = {axis: getattr(record, axis) or 1 for axis in AXES}
    words = [f"{axis}{size}" for axis, size in sizes.items() if size > 1]
    if (record.facts.get("layout") or {}).get("sequence_parallel"):
        words.append("sp")
    if words and record.zero_stage:
        words.append(f"zero{record.zero_stage}")
    return " ".join(words)


def _point(row: Row, y: str) -> Point:
    return Point(row["gpus"], row[y], row["engine"], row["precision"], row["split"])


def _together(rows: list[Row]) -> list[list[Row]]:
    """The rows of each configuration."""
    alike: dict[str, list[Row]] = defaultdict(list)
    for row in rows:
        alike[row["configuration"]].append(row)
    return list(alike.values())


def _figures(rows: list[Row], weak: bool, left_out: list[str]) -> dict[str, Any]:
    """TFLOP/s and speedup against GPUs."""
    drawn: dict[str, list[Row]] = {"tflops": [], "speedup": []}
    for row in rows:
        fits = {
            "tflops": row["tflops"] and row["gpus"],
            "speedup": row["speedup"] and row["efficiency"],  # oversubscribed rows have none
        }
        for name, fit in fits.items():
            if fit:
                drawn[name].append(row)
        if missing := [name for name, fit in fits.items() if not fit]:
            left_out.append(f"{row['run']}: not in {' and '.join(missing)}: {_why_not(row)}")
    figures: dict[str, Any] = {}
    if drawn["tflops"]:
        points = [_point(row, "tflops") for row in drawn["tflops"]]
        figures["tflops"] = drawing.tflops(points, "TFLOP/s per GPU", DEFAULT_CONVENTION)
    if drawn["speedup"]:
        points = [_speedup(repeats) for repeats in _together(drawn["speedup"])]
        first = drawn["speedup"][0]
        start = round(first["gpus"] * first["efficiency"] / first["speedup"])  # the baseline's GPUs
        title = "Weak scaling" if weak else "Strong scaling"
        figures["speedup"] = drawing.speedup(points, title, start, weak)
    return figures


def _speedup(repeats: list[Row]) -> Point:
    """A configuration's speedup, which its rows share, and what its repeats span."""
    times = [row["step_s"] for row in repeats]
    point = _point(repeats[0], "speedup")
    if len(times) == 1:
        return point
    base = point.y * statistics.median(times)
    return point._replace(low=base / max(times), high=base / min(times))


def _why_not(row: Row) -> str:
    """Why a row of the scaling table is not in a picture."""
    why = row["notes"] if row["verdict"] == "complete" else row["verdict"]
    if not (why or row["baseline"]):
        why = "no baseline is stated (--baseline NAME)"
    return why or "a fact that it needs is not known"
