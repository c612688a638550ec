"""Tables of MLPerf results: every result, and strong and weak scaling where sizes allow it.

A series is what is compared: one round, division, benchmark, submitter, accelerator and precision.
Strong scaling keeps the global batch, weak scaling the batch per GPU; of each, a table needs two
sizes. The files of one system and benchmark are repeats of one run.
"""

import statistics
from collections import defaultdict
from dataclasses import replace
from fractions import Fraction
from typing import Any

from analysis.common.table import Column, Table
from analysis.logs.record import Record
from analysis.measured.scaling_curve import Timed, gather, report_of
from analysis.measured.throughput import model_utilisation
from base.errors import UsageError
from parallel.config.axes import SET_AXES

COLUMNS = [
    Column("round", "round", seldom=True),
    Column("submitter", "submitter"),
    Column("system", "system"),
    Column("benchmark", "benchmark"),
    Column("division", "division", seldom=True),
    Column("gpus", "GPUs", "d"),
    *(Column(axis, axis, "d", seldom=True) for axis in SET_AXES),
    Column("micro_batch", "micro-batch", "d", seldom=True),
    Column("global_batch", "global batch", "d"),
    Column("n", "runs", "d"),
    Column("steps", "steps", ".0f"),
    Column("step_s", "s/step", ".5g"),
    Column("spread", "spread", ".2%"),
    Column("samples_per_s", "samples/s", ".5g"),
    Column("tokens_per_s_per_gpu", "tokens/s/GPU", ".5g"),
    Column("mfu", "MFU", ".1%", seldom=True),
    Column("target_s", "s to target", ".5g"),
    Column("samples", "samples to target", ".0f"),
    Column("eval_share", "in evaluations", ".1%"),
]
_NOTES = [
    "s/step: median over the runs of each one's median; spread: (slowest - fastest) / median",
    "s to target, samples: medians of the runs that reached it",
]


def is_result(record: Record) -> bool:
    """Whether a run is one of MLPerf's results, of which the folders tell the system."""
    return record.submission is not None and record.repeat is not None


def report(
    records: list[Record],
    refused: list[str],
    scaling: str | None = None,
    *,
    baseline: str | None = None,
    window: tuple[int, int] | None = None,
) -> list[Table]:
    """The table of all results, then one for each series, law and fixed work.

    Args:
        refused: the lines of what could not be read.
        scaling: strong or weak alone; None makes both.
        baseline: the system to compare with, where a table has it; else its smallest.
        window: how a step time is taken (logs/verdict.py).

    Raises:
        UsageError: no result could be timed, or no table has that baseline.
    """
    runs, untimed = gather(records, window)
    left_out = [*refused, *(f"{name}: {why}" for name, why in untimed)]
    if not runs:
        raise UsageError("; ".join(left_out))
    results: dict[tuple, list[Timed]] = defaultdict(list)
    for run in runs:
        record = run.record
        sizes = (record.gpus, record.global_batch or 0, record.seq_len or 0)
        results[_series(record), *sizes, record.submission.system].append(run)
    rows = [_row(results[key]) for key in sorted(results)]
    notes = [*_NOTES, *_notes(runs), *(f"left out: {line}" for line in left_out)]
    every = Table(COLUMNS, rows, "every result", notes)
    tables: list[Table] = []
    for law in [scaling] if scaling else ["strong", "weak"]:
        tables += _of_law(runs, law, baseline, window)
    if baseline and not any(baseline in table.notes[0] for table in tables):
        names = ", ".join(dict.fromkeys(row["system"] for row in rows))
        raise UsageError(f"no table compares with {baseline!r}; there are: {names}")
    if not tables:
        every.notes.append("no series has two sizes with one global batch or one batch per GPU")
    return [every, *tables]


def _series(record: Record) -> tuple[str, ...]:
    """What results are compared within; "" where it is not known, or a closed division."""
    about = record.submission
    division = "" if about.division == "closed" else about.division
    card, precision = record.gpu_type or "", record.precision or ""
    return (about.benchmark, about.submitter, card, about.round, division, precision)


def _row(runs: list[Timed]) -> dict[str, Any]:
    """The row of one system's runs of one benchmark, of which the first says what all share."""
    first, seconds = runs[0].record, [run.time.step_s for run in runs]
    step_s, batch = statistics.median(seconds), first.global_batch
    records = [run.record for run in runs]
    about = ("round", "submitter", "system", "benchmark", "accelerator", "nodes")
    names = ("gpus", *SET_AXES, "micro_batch", "global_batch", "seq_len")
    row = {name: getattr(first.submission, name) or None for name in about}
    row |= {name: getattr(first, name) for name in names}
    row |= {"n": len(runs), "step_s": step_s, "runs": [record.source for record in records]}
    if first.submission.division != "closed":
        row["division"] = first.submission.division or None
    if len(runs) > 1:
        row["spread"] = (max(seconds) - min(seconds)) / step_s
    reached = [record for record in records if record.completed and "wall_s" in record.totals]
    row["target_s"] = _median([record.totals["wall_s"] for record in reached])
    row["samples"] = _median([record.submission.samples for record in reached])
    timed = [record for record in reached if record.submission.eval_s is not None]
    row["eval_share"] = _median([r.submission.eval_s / r.totals["wall_s"] for r in timed])
    if batch:
        row["samples_per_s"] = batch / step_s
        row["steps"] = row["samples"] and row["samples"] / batch
        row["tokens_per_s_per_gpu"] = batch * (first.seq_len or 0) / step_s / first.gpus or None
    row["mfu"] = model_utilisation(first, step_s)[0]
    return row


def _median(values: list[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return statistics.median(known) if known else None


def _of_law(
    runs: list[Timed], law: str, baseline: str | None, window: tuple[int, int] | None
) -> list[Table]:
    """A table for each series and fixed work that has two sizes, against its fastest system of the
    fewest GPUs."""
    groups: dict[tuple, list[Record]] = defaultdict(list)
    for run in sorted(runs, key=lambda run: run.time.step_s):
        record = run.record
        if batch := record.global_batch:
            work = Fraction(batch, 1 if law == "strong" else record.gpus)
            groups[_series(record), record.seq_len or 0, work].append(record)
    tables = []
    for key in sorted(groups):
        (series, seq_len, work), records = key, groups[key]
        if len({record.gpus for record in records}) < 2:
            continue
        names = {record.submission.system: record.configuration for record in records}
        table = report_of(records, [], names.get(baseline), law, window=window)
        words = ", ".join(filter(None, series))
        table.columns = [replace(column, seldom=True) for column in table.columns]
        for row in table.rows:
            row |= {"scaling": law, "series": words, "global_batch": int(work)}
            if law == "weak":
                row["global_batch"] = int(work * row["gpus"])
        unit = "global batch {:g}" if law == "strong" else "{:g} sequences a GPU"
        table.title = f"{law} scaling: {words}; {unit.format(float(work))}"
        if seq_len:
            table.title += f" of {seq_len} tokens"
        tables.append(table)
    return tables


def _notes(runs: list[Timed]) -> list[str]:
    """One line for each thing that the logs of some results say or leave out."""
    names: dict[str, dict[str, None]] = defaultdict(dict)
    for record in (run.record for run in runs):
        notes = list(record.notes)
        if record.tp is None:
            notes.append("layout -: neither the log nor a configuration's name says it")
        for note in notes:
            if not note.startswith(("from name: ", "counts of samples")):
                names[note][f"{record.submission.system} {record.submission.benchmark}"] = None
    return [f"{note}: {', '.join(systems)}" for note, systems in names.items()]
