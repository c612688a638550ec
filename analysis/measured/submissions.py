"""Tables of MLPerf results: every result, and strong and weak scaling where sizes allow it.

A series is what is compared: one round, division, benchmark, submitter, accelerator and precision.
Strong scaling keeps the global batch, weak scaling the batch per GPU; of each, a table needs two
sizes. The files of one system and benchmark are repeats of one run.
"""

import statistics
from collections import defaultdict
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

from analysis.common.table import Column, Table
from analysis.logs.load import name_of
from analysis.logs.record import Record
from analysis.logs.verdict import judge, timed, unfinished
from analysis.measured.fairness import differences
from analysis.measured.scaling_curve import Side, curve, doubtful
from analysis.measured.throughput import model_utilisation
from base.errors import UsageError
from parallel.config.axes import AXES, SET_AXES
from parallel.measure.steady_time import Steady

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
    Column("block_s", "s/block", ".5g"),
    Column("samples_per_s", "samples/s", ".5g"),
    Column("tokens_per_s_per_gpu", "tokens/s/GPU", ".5g"),
    Column("mfu", "MFU", ".1%", seldom=True),
    Column("target_s", "s to target", ".5g"),
    Column("samples", "samples to target", ".0f"),
    Column("eval_share", "in evaluations", ".1%"),
    Column("init_s", "s before", ".4g"),
]
_ROW = [
    Column("run", "system"),
    Column("gpus", "GPUs", "d"),
    Column("layout", "layout", seldom=True),
    Column("global_batch", "global batch", "d"),
    Column("n", "runs", "d"),
    Column("step_s", "s/step", ".5g"),
    Column("spread", "spread", ".2%"),
    Column("speedup", "speedup", ".2f"),
    Column("efficiency", "efficiency", ".3f"),
    Column("serial", "serial share (Karp-Flatt)", ".4f"),
]
_NOTES = [
    "s/step: median over the runs of each one's median; spread: (slowest - fastest) / median",
    "s/block: between two evaluations; s to target, samples: medians of runs that reached it",
]


@dataclass
class Result:
    """One system's runs of one benchmark, timed: repeats of one run."""

    runs: list[Record]
    times: list[float]

    @property
    def record(self) -> Record:
        """The first run, which says what all have in common."""
        return self.runs[0]

    @property
    def step_s(self) -> float:
        return statistics.median(self.times)

    @property
    def series(self) -> tuple[str, ...]:
        """What its results are compared within."""
        about, record = self.record.submission, self.record
        division = "" if about.division in ("", "closed") else about.division
        words = (about.benchmark, about.submitter, record.gpu_type or "", about.round, division)
        return (*words, record.precision or "")


def is_result(record: Record) -> bool:
    """Whether a run is one of MLPerf's results, of which the folders tell the system."""
    return record.submission is not None and record.repeat is not None


def report(
    records: list[Record],
    left_out: list[str],
    scaling: str | None = None,
    *,
    baseline: str | None = None,
    window: tuple[int, int] | None = None,
) -> list[Table]:
    """The table of all results, then one for each series, law and fixed work.

    Args:
        left_out: lines of what was not read.
        scaling: strong or weak alone; None makes both.
        baseline: the system to compare with, where a table has it; else its smallest.
        window: the iterations to use, by the numbers in the log.

    Raises:
        UsageError: no result could be timed, or no table has that baseline.
    """
    results, untimed = _results(records, window)
    left_out = [*left_out, *untimed]
    if not results:
        raise UsageError("; ".join(left_out))
    rows = [_row(result) for result in results]
    first = Table(COLUMNS, rows, "every result", [*_NOTES, *_notes(results)])
    first.notes += [f"left out: {line}" for line in left_out]
    laws = [scaling] if scaling else ["strong", "weak"]
    tables = [table for law in laws for table in _of_law(results, law, baseline)]
    if baseline and not any(baseline in table.notes[0] for table in tables):
        names = ", ".join(dict.fromkeys(_name(result) for result in results))
        raise UsageError(f"no table compares with {baseline!r}; there are: {names}")
    if not tables:
        first.notes.append("no series has two sizes with one global batch or one batch per GPU")
    return [first, *tables]


def _results(
    records: list[Record], window: tuple[int, int] | None
) -> tuple[list[Result], list[str]]:
    """(the timed results by name, one line for each run that is none)."""
    groups: dict[tuple, Result] = {}
    left_out = []
    for record in records:
        time = timed(record, window)
        if why := _unfit(record, time):
            left_out.append(f"{name_of(record)}: {why}")
            continue
        sizes = (record.gpus, record.global_batch, record.seq_len, record.submission.division)
        result = groups.setdefault((record.configuration, *sizes), Result([], []))
        result.runs.append(record)
        result.times.append(time.step_s)
    ordered = sorted(groups.values(), key=lambda r: (r.series, r.record.gpus, _name(r)))
    return ordered, left_out


def _unfit(record: Record, time: Steady | None) -> str:
    """Why a run is no timed result, or ""."""
    if record.copy_of:
        return f"the same evidence as {record.copy_of}"
    if why := unfinished(record):
        return why
    judgement = judge(record, time)
    if judgement.unfit:
        return "; ".join(map(str, judgement.flags))
    if time is None or not time.step_s > 0:
        return "; ".join(note for note in record.notes if "time" in note) or "no step is timed"
    if not record.gpus:
        return "the number of GPUs is not known: no systems/SYSTEM.json, and no name says it"
    return ""


def _name(result: Result) -> str:
    return result.record.submission.system


def _row(result: Result) -> dict[str, Any]:
    """A result's row of the table of all."""
    record, about, step_s = result.record, result.record.submission, result.step_s
    reached = [run for run in result.runs if run.completed and "wall_s" in run.totals]
    tokens = (record.global_batch or 0) * (record.seq_len or 0) / step_s or None
    samples = _median([run.submission.samples for run in reached])
    about_names = ("round", "submitter", "system", "benchmark")
    names = ("gpus", *SET_AXES, "micro_batch", "global_batch", "seq_len")
    return {
        **{name: getattr(about, name) or None for name in about_names},
        **{name: getattr(record, name) for name in names},
        "division": about.division if about.division != "closed" else None,
        "accelerator": about.accelerator or None,
        "nodes": about.nodes,
        "n": len(result.times),
        "steps": samples and record.global_batch and samples / record.global_batch,
        "step_s": step_s,
        "spread": _spread(result.times),
        "block_s": _median([run.submission.block_s for run in result.runs]),
        "samples_per_s": record.global_batch and record.global_batch / step_s,
        "tokens_per_s_per_gpu": tokens and tokens / record.gpus,
        "mfu": model_utilisation(record, step_s)[0],
        "target_s": _median([run.totals["wall_s"] for run in reached]),
        "samples": samples,
        "eval_share": _median([_eval_share(run) for run in reached]),
        "init_s": _median([run.submission.init_s for run in result.runs]),
        "runs": [run.source for run in result.runs],
    }


def _median(values: list[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return statistics.median(known) if known else None


def _spread(times: list[float]) -> float | None:
    return (max(times) - min(times)) / statistics.median(times) if len(times) > 1 else None


def _eval_share(run: Record) -> float | None:
    spent = run.submission.eval_s
    return None if spent is None else spent / run.totals["wall_s"]


def _of_law(results: list[Result], law: str, baseline: str | None) -> list[Table]:
    """A table for each series and fixed work that has two sizes."""
    groups: dict[tuple, list[Result]] = defaultdict(list)
    for result in results:
        record = result.record
        if record.global_batch:
            each = Fraction(record.global_batch, record.gpus)
            fixed = record.global_batch if law == "strong" else each
            groups[(*result.series, record.seq_len, fixed)].append(result)
    found = []
    for key, alike in groups.items():
        if len({result.record.gpus for result in alike}) > 1:
            found.append(_series(key, alike, law, baseline))
    return found


def _series(key: tuple, results: list[Result], law: str, baseline: str | None) -> Table:
    """Speedup and efficiency of the results of one series, of one fixed work."""
    *series, seq_len, fixed = key
    named = [
        result for result in results if baseline in (_name(result), result.record.configuration)
    ]
    smallest = sorted(results, key=lambda result: (result.record.gpus, result.step_s))
    base = (named or smallest)[0].record
    fair, notes = {}, []
    for result in results:
        record = result.record
        if unlike := differences(record, base, law):
            notes.append(f"left out: {_name(result)}: invalid comparison: {'; '.join(unlike)}")
        else:
            fair[_name(result), record.gpus] = result
    sides = {name: Side(*name, tuple(result.times)) for name, result in fair.items()}
    rows, share = curve(list(sides.values()), sides[base.submission.system, base.gpus], law)
    for row in rows:
        record = fair[row["run"], row["gpus"]].record
        row |= {"layout": _layout(record), "global_batch": record.global_batch}
        row |= {"scaling": law, "series": " ".join(filter(None, series))}
    work = f"global batch {fixed}" if law == "strong" else f"{float(fixed):g} sequences a GPU"
    title = f"{law} scaling: {', '.join(filter(None, series))}; {work}"
    title += f" of {seq_len} tokens" if seq_len else ""
    first = f"against {base.submission.system} ({base.gpus} GPUs)"
    if share is not None and 0 <= share <= 1:
        name = "Amdahl" if law == "strong" else "Gustafson"
        first += f"; {name}'s law fits a serial share of {share:.4f}"
    odd = [f"{row['run']}: {row['note']}" for row in rows if row["note"]]
    return Table(_ROW, rows, title, [first, *odd, *notes], doubtful=doubtful(rows))


def _layout(record: Record) -> str | None:
    """`tp4 pp8 dp16`, with cp and vpp where they are above 1."""
    if record.tp is None:
        return None
    sizes = {name: getattr(record, name) for name in AXES}
    shown = {k: v for k, v in sizes.items() if v and (v > 1 or k in ("tp", "pp", "dp"))}
    return " ".join(f"{name}{size}" for name, size in shown.items())


def _notes(results: list[Result]) -> list[str]:
    """One line for each thing that the logs of some results say or leave out."""
    names: dict[str, dict[str, None]] = defaultdict(dict)
    for result in results:
        name = f"{_name(result)} {result.record.submission.benchmark}"
        for note in (note for run in result.runs for note in run.notes):
            if not note.startswith(("from name: ", "counts of samples", "throughput ")):
                names[note][name] = None
        if result.record.tp is None:
            names["layout -: neither the log nor a configuration's name says it"][name] = None
    return [f"{note}: {', '.join(systems)}" for note, systems in names.items()]
