"""Tables of MLPerf results: every result, and strong and weak scaling where sizes allow it.

A series is what is compared: one benchmark, submitter, accelerator, round, division, precision and
length of sequences. Strong scaling keeps the global batch, weak scaling the batch per GPU; of each,
a table needs two sizes. The files of one system and benchmark are repeats of one run.
"""

import statistics
from collections import defaultdict
from dataclasses import replace
from fractions import Fraction
from typing import Any, NamedTuple

from analysis.common.table import Column, Table, by_key
from analysis.logs.record import Record
from analysis.runs import time_to_target
from analysis.runs.baseline import has_baseline
from analysis.runs.fairness import Terms
from analysis.runs.judged import Run, results
from analysis.runs.scaling_curve import report_of
from analysis.runs.scaling_laws import LAWS
from analysis.runs.throughput import model_utilisation
from base.errors import UsageError, by_reason
from parallel.config.layout import SET_AXES

_ABOUT = ("round", "division", "submitter", "system", "benchmark")
_SIZES = ("gpus", *SET_AXES, "micro_batch", "global_batch", "seq_len", "gpu_type")
COLUMNS = [
    *by_key(("round", "division"), seldom=True),
    *by_key(("submitter", "system", "benchmark")),
    Column("gpus", "GPUs", "d"),
    *by_key(SET_AXES, "d", seldom=True),
    Column("micro_batch", "micro-batch", "d", seldom=True),
    Column("global_batch", "global batch", "d"),
    Column("n", "runs", "d"),
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
    """Tells whether a run is one of MLPerf's results, whose folders name the system."""
    return record.submission is not None and record.repeat is not None


def report(records: list[Record], refused: list[str], terms: Terms) -> list[Table]:
    """Returns the table of all results, then one for each series, law and fixed work. `refused` has
    a line for each file that could not be read. Without a scaling both laws are tabled; a table
    that does not have the baseline compares with its smallest system."""
    runs, left_out = results(records, refused, terms.window)
    systems: dict[tuple, list[Run]] = defaultdict(list)
    for run in runs:
        record = run.record
        sizes = (record.gpus, record.global_batch or 0)
        systems[_series(record), *sizes, record.submission.system].append(run)
    rows = [_row(systems[key]) for key in sorted(systems)]
    notes_of_runs = dict.fromkeys(
        (run.record.configuration, note) for run in runs for note in run.record.notes
    )
    notes = [
        *_NOTES,
        *by_reason(notes_of_runs),
        *(f"left out: {line}" for line in by_reason(left_out)),
    ]
    if any(row["tp"] is None for row in rows):
        notes.append("tp -: neither the log nor a configuration's name says it")
    tabled = works(runs, terms.scaling)
    if terms.baseline and not any(has_baseline(terms.baseline, work.records) for work in tabled):
        names = ", ".join(dict.fromkeys(row["system"] for row in rows))
        raise UsageError(f"no table compares with {terms.baseline!r}; there are: {names}")
    if not tabled:
        notes.append("no series has two sizes with one global batch or one batch per GPU")
    results_table = Table(COLUMNS, rows, "every result", notes)
    return [results_table, *(_curve(work, terms) for work in tabled)]


def _series(record: Record) -> tuple[str, ...]:
    """Returns what results are compared within; "" where it is not known."""
    about = record.submission
    card, precision = record.gpu_type or "", record.precision or ""
    length = f"sequences of {record.seq_len}" if record.seq_len else ""
    return (about.benchmark, about.submitter, card, about.round, about.division, precision, length)


def _row(runs: list[Run]) -> dict[str, Any]:
    """Returns the row of one system's runs of one benchmark, of which the first says what all
    share."""
    records, seconds = [run.record for run in runs], [run.time.step_s for run in runs]
    first, step_s = records[0], statistics.median(seconds)
    row = {name: getattr(first.submission, name) or None for name in _ABOUT}
    row |= {name: getattr(first, name) for name in _SIZES}
    row |= {"n": len(runs), "step_s": step_s, "runs": [record.source for record in records]}
    if len(runs) > 1:
        row["spread"] = (max(seconds) - min(seconds)) / step_s
    reached = [vars(r.submission) | r.totals for r in records if r.completed]
    for key, name in (("target_s", "wall_s"), ("samples", "samples"), ("eval_share", "eval_share")):
        values = [about[name] for about in reached if about.get(name) is not None]
        row[key] = statistics.median(values) if values else None
    if batch := first.global_batch:
        row["samples_per_s"] = batch / step_s
        row["tokens_per_s_per_gpu"] = batch * (first.seq_len or 0) / step_s / first.gpus or None
    row["mfu"] = model_utilisation(first, step_s).value
    return row


class Work(NamedTuple):
    """Results of one series that can be compared by a law: of one global batch (strong), or of one
    batch per GPU (weak)."""

    law: str
    series: tuple[str, ...]
    batch: Fraction
    records: list[Record]

    @property
    def title(self) -> str:
        """Returns the law, the series and the batch in words."""
        unit = "global batch {:g}" if self.law == "strong" else "{:g} sequences a GPU"
        words = ", ".join(filter(None, self.series))
        return f"{self.law} scaling: {words}; {unit.format(float(self.batch))}"

    def terms(self, terms: Terms) -> Terms:
        """Returns the terms with this law, and with the baseline where it is one of the results."""
        has_named = terms.baseline and has_baseline(terms.baseline, self.records)
        return replace(terms, baseline=terms.baseline if has_named else None, scaling=self.law)


def works(runs: list[Run], scaling: str | None) -> list[Work]:
    """Returns each fixed work that has two sizes, with its records by their times: of strong or of
    weak scaling, without one of both."""
    groups: dict[tuple, list[Record]] = defaultdict(list)
    for run in sorted(runs, key=lambda run: run.time.step_s):
        record = run.record
        for law in ([scaling] if scaling else LAWS) if record.global_batch else ():
            fixed = Fraction(record.global_batch, 1 if law == "strong" else record.gpus)
            groups[law, _series(record), fixed].append(record)
    works = [Work(*group, groups[group]) for group in sorted(groups)]
    return [work for work in works if len({record.gpus for record in work.records}) > 1]


def _curve(work: Work, terms: Terms) -> Table:
    """Returns the scaling curve of a fixed work, against the baseline where it is one of its
    results, else against the fastest system of the fewest GPUs."""
    table = report_of(work.records, [], work.terms(terms))
    words = ", ".join(filter(None, work.series))
    table.columns = [replace(c, seldom=c.key not in time_to_target.KEYS) for c in table.columns]
    for row in table.rows:
        batch = int(work.batch if work.law == "strong" else work.batch * row["gpus"])
        row |= {"scaling": work.law, "series": words, "global_batch": batch}
    table.title = work.title
    return table
