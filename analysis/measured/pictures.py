"""The pictures of runs and logs: TFLOP/s, speedup, and where a step's time goes."""

from pathlib import Path
from typing import Any

from analysis.common import plots
from analysis.logs.load import load, name_of
from analysis.logs.record import Record
from analysis.measured.tflops import rows as scaling_rows
from models.errors import UsageError
from models.flops import DEFAULT_CONVENTION

PHASES = ("compute", "communication", "data loading", "data movement")


def draw(paths: list[Path], folder: Path, baseline: str | None) -> tuple[list[Path], list[str]]:
    """(the pictures written to a folder, one line for each run that a picture leaves out).

    Raises:
        UsageError: nothing could be read, or nothing of it can be drawn.
    """
    records, left_out = load(paths)
    by_engine: dict[str, list[tuple[float, float]]] = {}
    curves: dict[str, list[dict[str, Any]]] = {}
    for record, row in zip(records, scaling_rows(records, baseline=baseline), strict=True):
        label, missing = row["engine"] or "unknown", []
        if row["tflops"] and row["gpus"]:
            by_engine.setdefault(label, []).append((row["gpus"], row["tflops"]))
        else:
            missing.append("tflops")
        if row["speedup"] and row["efficiency"]:  # oversubscribed rows have no efficiency
            curves.setdefault(label, []).append(row)
        else:
            missing.append("speedup")
        if missing:
            why = _why_not(row, baseline or record.baseline)
            left_out.append(f"{row['run']}: not in {' and '.join(missing)}: {why}")
    written: list[Path] = []
    if by_engine:
        figure = plots.tflops(by_engine, "TFLOP/s per GPU", DEFAULT_CONVENTION)
        written += plots.save(figure, folder, "tflops")
    if curves:
        for found in curves.values():
            found.sort(key=lambda row: (row["gpus"], row["run"]))
        written += plots.save(plots.speedup(curves, "Strong scaling"), folder, "speedup")
    if bars := {name_of(record): parts for record in records if (parts := _phases(record))}:
        figure = plots.phases(bars, "Where a step's time goes")
        written += plots.save(figure, folder, "breakdown")
    if not written:
        nothing = "no run here has a number of GPUs and a steady time: nothing to draw"
        raise UsageError("; ".join([nothing, *left_out]))
    return written, left_out


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
