"""The pictures of runs and logs: speed, scaling, where a step's time goes, losses; any column
against another."""

import statistics
from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy as np

from analysis.common import drawing
from analysis.common.drawing import Bar, Point
from analysis.logs.load import load, name_of
from analysis.logs.record import Record
from analysis.measured.fairness import configuration, named, scaling_of
from analysis.measured.run_table import rows as scaling_rows
from base.errors import UsageError
from models.flops import DEFAULT_CONVENTION
from parallel.config.axes import AXES

PHASES = ("compute", "communication", "data loading", "data movement")  # of colours.PARTS
TIMERS = {"fwd": "forward", "bwd": "backward", "step": "optimizer"}  # of DeepSpeed
POINTS = 400  # that are drawn of a loss curve at most
MEASURES = {  # columns that an axis can show, with their words; the others are of the layout
    "step_s": "s/iter",
    "tokens_per_s": "tokens/s",
    "samples_per_s": "samples/s",
    "tflops": f"TFLOP/s per GPU ({DEFAULT_CONVENTION})",
    "mfu": "MFU",
    "peak_gb": "peak GB",
    "speedup": "speedup",
    "efficiency": "efficiency",
    "params": "parameters",
}
WORDS = MEASURES | {"gpus": "GPUs", "micro_batch": "micro-batch", "zero_stage": "ZeRO stage"}
LAYOUT = (
    *("gpus", *AXES, "micro_batch", "n_micro", "global_batch", "seq_len"),
    *("zero_stage", "recompute", "precision", "engine"),
)
LESS_IS_BETTER = ("step_s", "peak_gb")
Axes = tuple[str | None, str | None]
Row = dict[str, Any]  # of `tflops.rows`, with the layout, the configuration's name and the split


def draw(
    paths: list[Path],
    folder: Path,
    baseline: str | None,
    axes: Axes = (None, None),
    force: bool = False,
) -> tuple[list[Path], list[str]]:
    """(the pictures written to a folder, one line for each thing that a picture leaves out).

    axes: (x, y). With an x, one picture of y (tokens/s where it is None) against x; with y alone,
    one of its bars; without both, all pictures that the runs have the facts for.

    Raises:
        UsageError: nothing could be read, an axis is no column, or nothing of it can be drawn.
    """
    _check(axes)
    records, left_out = load(paths)
    rows = [
        {key: getattr(record, key, None) for key in LAYOUT}
        | row
        | {"engine": record.engine or "unknown", "configuration": name, "split": _split(record)}
        | {"baseline": baseline or record.baseline}
        for record, row, name in zip(
            records,
            scaling_rows(records, baseline=baseline),
            _configurations(records),
            strict=True,
        )
    ]
    figures = _of_axes(rows, axes, left_out) if any(axes) else {}
    if not any(axes):
        figures |= _of_speed(rows, scaling_of(records) == "weak", left_out)
        figures |= _of_phases(records, left_out)
        figures |= _of_losses(records, left_out)
    if not figures:
        wanted = " and ".join(filter(None, axes)) or "a number of GPUs and a steady time"
        raise UsageError("; ".join([f"no run here has {wanted}: nothing to draw", *left_out]))
    written = [drawing.save(figure, folder, name, force) for name, figure in figures.items()]
    return sum(written, []), left_out


def _check(axes: Axes) -> None:
    """Raises: UsageError: an axis is no column, or y has words."""
    x, y = axes
    for flag, name, known in (("--x", x, (*LAYOUT, *MEASURES)), ("--y", y, tuple(MEASURES))):
        if name is not None and name not in known:
            also = ", which --x can be" * (name in LAYOUT)
            raise UsageError(f"{flag} cannot be {name!r}{also}; it can be: {', '.join(known)}")


def _split(record: Record) -> str:
    """What of a run is split or sharded, as "tp2 dp4 zero1"; "" where nothing is or is known."""
    sizes = {axis: getattr(record, axis) or 1 for axis in AXES}
    words = [f"{axis}{size}" for axis, size in sizes.items() if size > 1]
    if (record.facts.get("layout") or {}).get("sequence_parallel"):
        words.append("sp")
    if words and record.zero_stage:
        words.append(f"zero{record.zero_stage}")
    return " ".join(words)


def _point(row: Row, x: str, y: str) -> Point:
    return Point(row[x], row[y], row["engine"], row["precision"], row["split"])


def _of_axes(rows: list[Row], axes: Axes, left_out: list[str]) -> dict[str, Any]:
    """y against x by engine, or the bars of y by configuration."""
    x, y = axes[0], axes[1] or "tokens_per_s"
    drawn = []
    for row in rows:
        missing = [key for key in (x, y) if key and row[key] is None]
        if missing or not row["fit"]:
            why = missing and row["missing"].get(missing[0]) or _why_not(row)
            left_out.append(f"{row['run']}: not in {y}{f' by {x}' if x else ''}: {why}")
        else:
            drawn.append(row)
    if not drawn:
        return {}
    if x is None:
        return {y: drawing.bars(_bars(drawn, y), MEASURES[y], MEASURES[y])}
    words = WORDS.get(x, x.replace("_", " "))
    points = [_point(row, x, y) for row in drawn]
    return {f"{y}_by_{x}": drawing.values(points, f"{MEASURES[y]} by {words}", words, MEASURES[y])}


def _configurations(records: list[Record]) -> list[str]:
    """The name of each run's configuration; the run's own where several have that name."""
    alike: dict[str | None, set[tuple]] = {}
    for record in records:
        alike.setdefault(named(record), set()).add(configuration(record))
    return [
        (named(record) if len(alike[named(record)]) == 1 else None) or name_of(record)
        for record in records
    ]


def _together(rows: list[Row]) -> list[list[Row]]:
    """The rows of each configuration."""
    alike: dict[str, list[Row]] = defaultdict(list)
    for row in rows:
        alike[row["configuration"]].append(row)
    return list(alike.values())


def _bars(rows: list[Row], key: str) -> list[Bar]:
    """A bar a configuration, the best of each number of GPUs first; precisions are told apart."""
    mixed = len({row["precision"] for row in rows}) > 1
    found = []
    for repeats in _together(rows):
        first, values = repeats[0], [row[key] for row in repeats]
        name = f"{first['configuration']} ({first['precision'] or '?'})"
        name = name if mixed else first["configuration"]
        gpus = first["gpus"] or 0
        group = f"{gpus} GPU{'s' if gpus > 1 else ''}" if gpus else ""
        place = statistics.median(values) * (1 if key in LESS_IS_BETTER else -1)
        found.append((gpus, place, Bar(name, first["engine"], values, group)))
    return [bar for *_, bar in sorted(found)]


def _of_speed(rows: list[Row], weak: bool, left_out: list[str]) -> dict[str, Any]:
    """TFLOP/s and speedup against GPUs, and the seconds of each configuration."""
    drawn: dict[str, list[Row]] = {"tflops": [], "speedup": [], "step_s": []}
    for row in rows:
        fits = {
            "tflops": row["tflops"] and row["gpus"],
            "speedup": row["speedup"] and row["efficiency"],  # oversubscribed rows have none
            "step_s": row["fit"] and row["step_s"] is not None,
        }
        for name, fit in fits.items():
            drawn[name] += [row] if fit else []
        if missing := [name for name, fit in fits.items() if not fit]:
            which = " and ".join(filter(None, (", ".join(missing[:-1]), missing[-1])))
            left_out.append(f"{row['run']}: not in {which}: {_why_not(row)}")
    figures: dict[str, Any] = {}
    if drawn["tflops"]:
        points = [_point(row, "gpus", "tflops") for row in drawn["tflops"]]
        figures["tflops"] = drawing.tflops(points, "TFLOP/s per GPU", DEFAULT_CONVENTION)
    if drawn["speedup"]:
        points = [_speedup(repeats) for repeats in _together(drawn["speedup"])]
        first = drawn["speedup"][0]
        start = round(first["gpus"] * first["efficiency"] / first["speedup"])  # the baseline's GPUs
        title = "Weak scaling" if weak else "Strong scaling"
        figures["speedup"] = drawing.speedup(points, title, start, weak)
    if drawn["step_s"]:
        bars = _bars(drawn["step_s"], "step_s")
        figures["step_s"] = drawing.bars(bars, "Time of a step, fastest first", MEASURES["step_s"])
    return figures


def _speedup(repeats: list[Row]) -> Point:
    """A configuration's speedup, which its rows share, and what its repeats span."""
    times = [row["step_s"] for row in repeats]
    point = _point(repeats[0], "gpus", "speedup")
    if len(times) == 1:
        return point
    base = point.y * statistics.median(times)
    return point._replace(low=base / max(times), high=base / min(times))


def _of_phases(records: list[Record], left_out: list[str]) -> dict[str, Any]:
    """Where a step's time goes, of the runs whose logs break it down."""
    bars = {name_of(record): parts for record in records if (parts := _phases(record))}
    without = [name_of(record) for record in records if name_of(record) not in bars]
    if bars and without:
        left_out.append(f"not in breakdown: their logs have none: {', '.join(without)}")
    return {"breakdown": drawing.phases(bars, "Where a step's time goes")} if bars else {}


def _of_losses(records: list[Record], left_out: list[str]) -> dict[str, Any]:
    """The losses of every run; of a long one, evenly spaced steps."""
    curves: dict[str, list[tuple[Any, Any]]] = {}
    without, thinned = [], 0
    for record in records:
        known = np.flatnonzero(np.isfinite(record.loss)) if len(record.loss) else np.array([], int)
        if not len(known):
            without.append(name_of(record))
            continue
        at = known[np.unique(np.linspace(0, len(known) - 1, min(len(known), POINTS)).astype(int))]
        thinned += len(known) > POINTS
        pair = (record.iteration[at], record.loss[at])
        curves.setdefault(record.engine or "unknown", []).append(pair)
    if curves and without:
        left_out.append(f"not in loss: their logs have no losses: {', '.join(without)}")
    if thinned:
        left_out.append(f"loss: of {thinned} long runs, {POINTS} steps each, evenly spaced")
    return {"loss": drawing.losses(curves, "Loss")} if curves else {}


def _why_not(row: Row) -> str:
    """Why a row of the scaling table is not in a picture."""
    why = row["notes"] if row["verdict"] == "complete" else row["verdict"]
    if not (why or row["baseline"]):
        why = "no baseline is stated (--baseline NAME)"
    return why or "a fact that it needs is not known"


def _phases(record: Record) -> dict[str, float]:
    """Seconds by phase where the log breaks its time down; {} where it does not."""
    if record.ranks:
        slowest = max(record.ranks, key=lambda rank: rank.get("epoch_s", 0.0))
        keys = ("compute_s", "comm_s", "data_s", "move_s")
        return {name: slowest.get(key, 0.0) for name, key in zip(PHASES, keys, strict=True)}
    # DeepSpeed's wall_clock_breakdown; its other timers are parts of these.
    return {name: record.timers_s[k] for k, name in TIMERS.items() if k in record.timers_s}
