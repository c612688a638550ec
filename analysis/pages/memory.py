"""The view of memory: predicted by part on each stage, the measured peak, and the card's memory."""

from pathlib import Path
from typing import Any

import numpy as np

from analysis.common.tables import Column, Table
from analysis.common.terminal import who
from analysis.logs.load import name_of
from analysis.logs.readers import run_folder
from analysis.logs.record import Record
from analysis.measured.breakdown import spec_of
from analysis.pages import charts
from analysis.pages.section import Chart, Section, group
from analysis.planner.calibration import UNFUSED
from analysis.planner.runs import settings_of
from models import memory
from models.gpus import Gpu, find_gpu
from parallel.config.layout_arrays import columns, columns_of
from parallel.record.reader import read_run

RUNS = 20  # that the chart shows at once
_SMALL = 1e-3  # of a stage's bytes: a part below it is not drawn


def view(records: list[Record], rows: list[dict[str, Any]]) -> Section:
    """Predicted parts, stacked, beside the peak of the fullest rank; rows: `tflops.rows`'s."""
    one = Section("Memory")
    cards = {r.gpu_type: find_gpu(r.gpu_type) for r in records if r.gpu_type}
    card = (
        next(iter(cards.values())) if len(cards) == 1 and all(r.gpu_type for r in records) else None
    )
    found: list[dict[str, Any]] = []
    drawn: list[dict[str, Any]] = []
    lacking: dict[str, list[str]] = {}
    for record, row in zip(records, rows, strict=True):
        parts, why = predicted(record)
        peak = row["peak_gb"]
        if why:
            lacking.setdefault(why, []).append(name_of(record))
        if peak is None and not parts:
            continue
        most = max(parts, key=lambda stage: sum(parts[stage].values()), default=None)
        total = sum(parts[most].values()) if most else None
        found.append(
            {"run": name_of(record), "stage": most, "predicted_gb": total, "peak_gb": peak}
            | {"card_gb": _bytes_gb(find_gpu(record.gpu_type))}
            | (parts[most] if most else {})
        )
        drawn += _bars(name_of(record), parts, peak, most)
    if not found or all(row["peak_gb"] is None for row in found):
        return one  # predictions alone are the planner's to show
    names = list(dict.fromkeys(key for row in found for key in row))[5:]
    one.tables["memory"] = _table(found, names, records, lacking)
    one.data["memory_parts"] = [group(drawn)]
    spec = charts.memory({name: name.replace("_", " ") for name in names}, _bytes_gb(card))
    one.charts.append(Chart(spec, "memory_parts", _said(found, card), RUNS))
    return one


def _on_host(record: Record) -> bool:
    """Whether a run of ours had no GPU, so that its peak is resident memory."""
    return bool(record.facts) and not (record.facts.get("host") or {}).get("gpu")


def _bytes_gb(card: Gpu | None) -> float | None:
    """A card's memory in 1e9 bytes, as the peaks are: a card of 80 GB has 80 x 2^30 bytes."""
    return card and card.memory_gb * memory.GB / 1e9


def predicted(record: Record) -> tuple[dict[str, dict[str, float]], str]:
    """(stage -> part -> GB by models/memory.py, "") or ({}, which fact is absent).

    On a CPU the tensors alone, for no library of a GPU is there.
    """
    card, on_host = find_gpu(record.gpu_type), _on_host(record)
    flash = on_host or (card is not None and card.name not in UNFUSED)
    try:
        if record.format == run_folder.FORMAT:
            spec = spec_of(read_run(Path(record.source)))
            x = columns_of(spec, flash=flash, dropout=False)  # no model of ours has dropout
        else:
            x = columns(**settings_of(record) | {"flash": flash})
    except ValueError as error:
        return {}, str(error)
    stages = {1: ("first",), 2: ("first", "last")}.get(int(x.pp[0]), ("first", "middle", "last"))
    found = {}
    for stage in stages:
        parts = memory.parts(x, stage, tensors_alone=on_host)
        sizes = {name: float(f"{np.ravel(of)[0] / 1e9:.6g}") for name, of in parts.items()}
        total = sum(sizes.values())
        found[stage] = {name: gb for name, gb in sizes.items() if gb > _SMALL * total}
    return found, ""


def _bars(
    run: str, parts: dict[str, dict[str, float]], peak: float | None, most: str | None
) -> list[dict[str, Any]]:
    """One row a stage with its parts, and the peak on the fullest; {} of parts: the peak alone."""
    return [
        {"run": run, "stage": stage if len(parts) > 1 else None, **of}
        | {"peak": peak if stage == most else None}
        for stage, of in (parts or {None: {}}).items()
    ]


def _table(
    found: list[dict[str, Any]], names: list[str], records: list[Record], lacking: dict[str, list]
) -> Table:
    shown = [
        Column("run", "run"),
        Column("peak_gb", "measured peak GB", ".3g"),
        Column("predicted_gb", "predicted GB", ".3g"),
        Column("stage", "on the stage"),
        Column("card_gb", "card GB", ".3g", seldom=True),
        *(Column(name, name.replace("_", " "), ".3g", seldom=True) for name in names),
    ]
    notes = [
        "GB: 1e9 bytes",
        "predicted, not measured: the fullest stage, by the formulas of models/memory.py",
    ]
    if any(map(_on_host, records)):
        notes.append(
            "on a CPU the peak is resident memory: it holds Python and its libraries, and not what"
            " is allocated and never written, as most of DeepSpeed's buckets; predicted are the"
            " tensors alone"
        )
    if not all(map(_on_host, records)):
        c = memory.CONSTANTS
        notes.append(
            f"library: {c['library_gb']:g} x 2^30 bytes, assumed; activations have"
            f" {c['fragments'] - 1:.0%} for the allocator's fragments"
        )
    for why, runs in lacking.items():
        notes.append(f"predicted -: {why}: {who(runs, len(records))}")
    return Table(shown, found, notes=notes)


def _said(found: list[dict[str, Any]], card: Gpu | None) -> str:
    known = [row for row in found if row["peak_gb"] is not None]
    most = max(known, key=lambda row: row["peak_gb"])
    line = (
        f"The dashed line is {card.name}'s {card.memory_gb:g} GB, {_bytes_gb(card):.3g}e9 bytes."
        if card
        else ""
    )
    return (
        f"Predicted GB by part on each stage, and as a mark the measured peak of the fullest rank."
        f" {len(known)} runs have one; most: {most['run']}, {most['peak_gb']:.3g} GB."
        f" {line or 'No line: the runs have no one known card.'} At most {RUNS} runs are shown."
    )
