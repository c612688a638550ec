"""The pictures of runs and logs: speed, scaling, where a step's time goes, losses; any column
against another."""

from pathlib import Path
from typing import Any

import numpy as np

from analysis.common import plots
from analysis.logs.load import load, name_of
from analysis.logs.record import Record
from analysis.measured.fairness import configuration, named
from analysis.measured.tflops import rows as scaling_rows
from models.errors import UsageError
from models.flops import DEFAULT_CONVENTION

PHASES = ("compute", "communication", "data loading", "data movement")
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
    *("gpus", "tp", "cp", "pp", "vpp", "dp", "micro_batch", "n_micro", "global_batch", "seq_len"),
    *("zero_stage", "recompute", "precision", "engine"),
)
Axes = tuple[str | None, str | None]


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
        {key: getattr(record, key, None) for key in LAYOUT} | row
        for record, row in zip(records, scaling_rows(records, baseline=baseline), strict=True)
    ]
    figures = _of_axes(records, rows, axes, left_out) if any(axes) else {}
    if not any(axes):
        figures |= _of_speed(records, rows, baseline, left_out)
        figures |= _of_phases(records, left_out)
        figures |= _of_losses(records, left_out)
    if not figures:
        wanted = " and ".join(filter(None, axes)) or "a number of GPUs and a steady time"
        raise UsageError("; ".join([f"no run here has {wanted}: nothing to draw", *left_out]))
    written = [plots.save(figure, folder, name, force) for name, figure in figures.items()]
    return sum(written, []), left_out


def _check(axes: Axes) -> None:
    """Raises: UsageError: an axis is no column, or y has words."""
    x, y = axes
    for flag, name, known in (("--x", x, (*LAYOUT, *MEASURES)), ("--y", y, tuple(MEASURES))):
        if name is not None and name not in known:
            also = ", which --x can be" * (name in LAYOUT)
            raise UsageError(f"{flag} cannot be {name!r}{also}; it can be: {', '.join(known)}")


def _of_axes(
    records: list[Record], rows: list[dict[str, Any]], axes: Axes, left_out: list[str]
) -> dict[str, Any]:
    """y against x by engine, or the bars of y by configuration."""
    x, y = axes[0], axes[1] or "tokens_per_s"
    names = _configurations(records)
    series: dict[str, list[tuple[Any, float]]] = {}
    values: dict[str, tuple[str, list[float]]] = {}
    for record, row, name in zip(records, rows, names, strict=True):
        label = row["engine"] or "unknown"
        missing = [key for key in (x, y) if key and row[key] is None]
        if missing or not row["fit"]:
            why = missing and row["missing"].get(missing[0]) or _why_not(row, record.baseline)
            left_out.append(f"{row['run']}: not in {y}{f' by {x}' if x else ''}: {why}")
        elif x:
            series.setdefault(label, []).append((row[x], row[y]))
        else:
            values.setdefault(name, (label, []))[1].append(row[y])
    if x:
        words = WORDS.get(x, x.replace("_", " "))
        title = f"{MEASURES[y]} by {words}"
        figure = plots.points(series, title, words, MEASURES[y]) if series else None
        return {f"{y}_by_{x}": figure} if series else {}
    return {y: plots.bars(values, MEASURES[y], MEASURES[y])} if values else {}


def _configurations(records: list[Record]) -> list[str]:
    """The name of each run's configuration; the run's own where several have that name."""
    alike: dict[str | None, set[tuple]] = {}
    for record in records:
        alike.setdefault(named(record), set()).add(configuration(record))
    return [
        (named(record) if len(alike[named(record)]) == 1 else None) or name_of(record)
        for record in records
    ]


def _of_speed(
    records: list[Record],
    rows: list[dict[str, Any]],
    baseline: str | None,
    left_out: list[str],
) -> dict[str, Any]:
    """TFLOP/s and speedup against GPUs, and the seconds of each configuration."""
    by_engine: dict[str, list[tuple[float, float]]] = {}
    curves: dict[str, list[dict[str, Any]]] = {}
    times: dict[str, tuple[str, list[float]]] = {}
    for record, row, name in zip(records, rows, _configurations(records), strict=True):
        label, missing = row["engine"] or "unknown", []
        if row["tflops"] and row["gpus"]:
            by_engine.setdefault(label, []).append((row["gpus"], row["tflops"]))
        else:
            missing.append("tflops")
        if row["speedup"] and row["efficiency"]:  # oversubscribed rows have no efficiency
            curves.setdefault(label, []).append(row)
        else:
            missing.append("speedup")
        if row["fit"] and row["step_s"] is not None:
            times.setdefault(name, (label, []))[1].append(row["step_s"])
        else:
            missing.append("step_s")
        if missing:
            which = " and ".join(filter(None, (", ".join(missing[:-1]), missing[-1])))
            why = _why_not(row, baseline or record.baseline)
            left_out.append(f"{row['run']}: not in {which}: {why}")
    for found in curves.values():
        found.sort(key=lambda row: (row["gpus"], row["run"]))
    convention = DEFAULT_CONVENTION
    figures: dict[str, Any] = {}
    if by_engine:
        figures["tflops"] = plots.tflops(by_engine, "TFLOP/s per GPU", convention)
    if curves:
        figures["speedup"] = plots.speedup(curves, "Strong scaling")
    if times:
        figures["step_s"] = plots.bars(times, "Time of a step", MEASURES["step_s"])
    return figures


def _of_phases(records: list[Record], left_out: list[str]) -> dict[str, Any]:
    """Where a step's time goes, of the runs whose logs break it down."""
    bars = {name_of(record): parts for record in records if (parts := _phases(record))}
    without = [name_of(record) for record in records if name_of(record) not in bars]
    if bars and without:
        left_out.append(f"not in breakdown: their logs have none: {', '.join(without)}")
    return {"breakdown": plots.phases(bars, "Where a step's time goes")} if bars else {}


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
    return {"loss": plots.losses(curves, "Loss")} if curves else {}


def _why_not(row: dict[str, Any], baseline: str | None) -> str:
    """Why a row of the scaling table is not in a picture."""
    why = row["notes"] if row["verdict"] == "complete" else row["verdict"]
    if not (why or baseline):
        why = "no baseline is stated (--baseline NAME)"
    return why or "a fact that it needs is not known"


def _phases(record: Record) -> dict[str, float]:
    """Seconds by phase where the log breaks its time down; {} where it does not."""
    if record.ranks:
        slowest = max(record.ranks, key=lambda rank: rank.get("epoch_s", 0.0))
        keys = ("compute_s", "comm_s", "data_s", "move_s")
        return {name: slowest.get(key, 0.0) for name, key in zip(PHASES, keys, strict=True)}
    # DeepSpeed's wall_clock_breakdown; its other timers are parts of these.
    return {k: record.timers_s[k] for k in ("fwd", "bwd", "step") if k in record.timers_s}
