"""Speedup, efficiency and serial share over repeats at several sizes: the curve of a study."""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from analysis.common.statistics import FEW_REPEATS, are_pairs, ratio_of_medians
from analysis.common.table import Column, Reasons, Table
from analysis.logs.load import baseline_of, name_of, own_name
from analysis.logs.model import asked
from analysis.logs.record import Record
from analysis.logs.verdict import averages, judge, time_doubts, timed, unfinished
from analysis.runs import throughput
from analysis.runs.fairness import (
    WORDS,
    busy,
    by_configuration,
    changes,
    differences,
    group_with,
    notes_on,
    question_of,
    scaling_of,
    shared_cores,
)
from base.errors import Reading, UsageError, by_reason
from base.intervals import Interval
from base.units import GIB
from parallel.measure.steady_time import Steady, Window

MARKED = ("speedup", "efficiency")  # the columns of a value above linear
LINEAR = 1.005  # an efficiency above it is printed as more than 1.00


class Ratio(NamedTuple):
    """A speedup and an efficiency. `why`: why they are withheld. `note`: what is odd about an
    efficiency above 1, which a table marks. interval: the speedup's, where it is known."""

    speedup: float | None
    efficiency: float | None
    why: str = ""
    note: str = ""
    interval: Interval | None = None


def speedup(
    step_s: float, gpus: int, baseline_step_s: float, baseline_gpus: int, scaling: str = "strong"
) -> Ratio:
    """Speedup and efficiency against a baseline of `baseline_gpus` GPUs.

    Strong (Amdahl 1967): the time ratio, over the ratio of GPUs. Weak (Gustafson 1988): the work
    grew with the GPUs, so the time ratio is the efficiency, and times the ratio of GPUs the scaled
    speedup.
    """
    times, ratio = baseline_step_s / step_s, gpus / baseline_gpus
    return Ratio(times, times / ratio) if scaling == "strong" else Ratio(times * ratio, times)


class Timed(NamedTuple):
    """A run and its steady step time."""

    record: Record
    time: Steady


@dataclass(frozen=True)
class Side:
    """The repeats of one configuration on `gpus`: seconds per step of each, and of a single one its
    95 % interval where that is known. shared: why no ratio of its times is a result, or "".
    numbers: of the repeats in their study. record: of the first."""

    name: str
    gpus: int
    seconds: tuple[float, ...]
    ci95: Interval | None = None
    shared: str = ""
    numbers: tuple[int | None, ...] = ()
    record: Record | None = None

    @property
    def step_s(self) -> float:
        """The repeats' median."""
        return statistics.median(self.seconds)

    @property
    def span(self) -> Interval | None:
        """The fastest and the slowest repeat; of a single run its interval."""
        seconds = self.seconds
        return Interval(min(seconds), max(seconds)) if len(seconds) > 1 else self.ci95


def side_of(runs: list[Timed], partners: dict[str, str], name: str = "") -> Side:
    """The repeats as one side; partners: `shared_cores`."""
    shared = [
        f"{name_of(run.record)} {partners[run.record.source]}"
        for run in runs
        if run.record.source in partners
    ]
    seconds = tuple(run.time.step_s for run in runs)
    record, time = runs[0]
    numbers = tuple(run.record.repeat for run in runs)
    return Side(name, record.gpus, seconds, time.ci95, "; ".join(shared), numbers, record)


def times_ratio(side: Side, base: Side) -> tuple[float, Interval | None]:
    """The baseline's time over the side's, of the medians of their repeats, and its 95 % interval.
    With fewer than FEW_REPEATS on a side: the range of repeats, of single runs their intervals,
    which do not see what changes from run to run; None where these are not known."""
    if min(len(side.seconds), len(base.seconds)) >= FEW_REPEATS:
        paired = are_pairs(side.numbers, base.numbers)
        ratio, *interval = ratio_of_medians(base.seconds, side.seconds, paired)
        return ratio, Interval(*interval)
    span = base.span.over(side.span) if base.span and side.span else None
    return base.step_s / side.step_s, span


def against(side: Side, base: Side, scaling: str) -> Ratio:
    """The ratio of two sides' times, by the one rule of every table: it is withheld where either
    side shared its machine, and an efficiency above 1 has a note with its interval."""
    shared = side.shared or (base.shared and f"the baseline {base.shared}")
    if shared:
        return Ratio(None, None, f"no speedup: {shared}")
    times, span = times_ratio(side, base)
    if side.record is base.record is not None:
        span = None  # nothing is noise beside itself
    ratio, *ends = (
        speedup(1 / time, side.gpus, 1.0, base.gpus, scaling) for time in (times, *(span or ()))
    )
    allowed = Interval(*(end.efficiency for end in ends)) if ends else None
    apart = _settings_apart(base.record, side.record) if base.record and side.record else []
    note = above_linear(ratio.efficiency, side.gpus / base.gpus, allowed, apart)
    interval = Interval(*(end.speedup for end in ends)) if ends else None
    return ratio._replace(note=note, interval=interval)


_FOLLOW = ("gpus", "dp", "global_batch", "grad_accum")  # from the number of GPUs


def _settings_apart(base: Record, record: Record) -> list[str]:
    """The settings beside the number of GPUs that differ, with the baseline's value and this."""
    pairs = changes(base, record).items()
    return [f"{WORDS.get(k, k)} {x} -> {y}" for k, (x, y) in pairs if k not in _FOLLOW]


def karp_flatt(speedup: float, ratio: float) -> float | None:
    """The experimentally determined serial fraction, (1/S - 1/p) / (1 - 1/p), p = `ratio` > 1.

    Karp & Flatt 1990, "Measuring parallel processor performance". Growing with p: overhead grows.
    Negative: the speedup is above linear. Above 1: there is none. Neither is a share of anything.
    """
    return None if ratio <= 1 else (1 / speedup - 1 / ratio) / (1 - 1 / ratio)


def above_linear(
    efficiency: float, ratio: float, interval: Interval | None = None, apart: Sequence[str] = ()
) -> str:
    """What an efficiency above 1 says on `ratio` times the baseline's GPUs, or "".

    `interval`: what the intervals or repeats of both sides allow, where that is known. apart: the
    settings that differ from the baseline's.
    """
    if efficiency <= LINEAR:
        return ""
    span = f" ({interval.low:.2f} to {interval.high:.2f})" if interval else ""
    if interval and interval.low <= 1:
        return f"efficiency {efficiency:.2f}{span} may be 1: too little to be sure of"
    words = f"superlinear: efficiency {efficiency:.2f}{span} is above 1"
    if ratio == 1:
        words = f"{efficiency:.2f}{span} times as fast as the baseline on as many GPUs"
    if apart:
        return f"{words}; these settings differ: {', '.join(apart)}"
    shared = "the baseline shared its machine"
    if ratio == 1:
        return f"{words}: {shared}?"
    return f"{words} (each GPU's part fits its caches or memory better, or {shared})"


def fit_amdahl(points: list[tuple[float, float]]) -> float | None:
    """The serial share f of Amdahl 1967, 1/S = f + (1 - f)/p, by least squares over (p, S)."""
    return _slope([(1 - 1 / p, 1 / s - 1 / p) for p, s in points])


def fit_gustafson(points: list[tuple[float, float]]) -> float | None:
    """The serial share f of Gustafson 1988, S = p - f (p - 1), by least squares over (p, S)."""
    return _slope([(p - 1, p - s) for p, s in points])


def _slope(points: list[tuple[float, float]]) -> float | None:
    """The a of y = a x by least squares; None where every x is 0."""
    square = sum(x * x for x, _ in points)
    return sum(x * y for x, y in points) / square if square else None


class Curve(NamedTuple):
    """A row a configuration, the serial share of the law that fits them, if one does, and the
    share's interval, where those of the speedups are known."""

    rows: list[dict[str, Any]]
    share: float | None
    interval: Interval | None = None


def curve(sides: list[Side], base: Side, scaling: str = "strong") -> Curve:
    """The rows, by GPUs and name, and the serial share that fits them.

    A row is a configuration: run, gpus, n repeats, step_s (their median), spread ((slowest -
    fastest) / median), speedup, efficiency, serial (Karp-Flatt, where it is a share), the intervals
    of speedup and serial, note (why one is none, and what is odd about the efficiency), missing.
    The fit is to the fastest configuration of each size: a law is about what the machine can do.
    Its interval is that of the fits to the lowest and to the highest speedups.
    """
    ordered = sorted(sides, key=lambda side: (side.gpus, side.name))
    rows = [_row(side, base, scaling) for side in ordered]
    best: dict[float, dict[str, Any]] = {}
    for row in sorted(rows, key=lambda row: row["speedup"] or 0.0):
        if (ratio := row["gpus"] / base.gpus) > 1 and row["speedup"] is not None:
            best[ratio] = row
    fit = fit_amdahl if scaling == "strong" else fit_gustafson
    share = fit([(ratio, row["speedup"]) for ratio, row in best.items()])
    spans = {ratio: row["speedup_ci95"] for ratio, row in best.items()}
    interval = None
    if spans and None not in spans.values():
        ends = [fit([(ratio, span[end]) for ratio, span in spans.items()]) for end in (1, 0)]
        interval = Interval(*ends)
    return Curve(rows, share, interval)


def _row(side: Side, base: Side, scaling: str) -> dict[str, Any]:
    ratio = against(side, base, scaling)
    fastest_s, slowest_s = min(side.seconds), max(side.seconds)
    times_gpus, interval = side.gpus / base.gpus, ratio.interval
    share = karp_flatt(ratio.speedup, times_gpus) if ratio.speedup else None
    span, no_share = None, None
    if share is not None and interval:
        span = [karp_flatt(speedup, times_gpus) for speedup in (interval.high, interval.low)]
    if share is not None and not 0 <= share <= 1:
        no_share = "no serial share: the efficiency is 1 or too little above it to be sure of"
        if share > 1:
            no_share = "no serial share, slower than the baseline on more GPUs"
        share = span = None
    return {
        "run": side.name,
        "gpus": side.gpus,
        "n": len(side.seconds),
        "step_s": side.step_s,
        "spread": (slowest_s - fastest_s) / side.step_s if len(side.seconds) > 1 else None,
        "fastest_s": fastest_s,
        "slowest_s": slowest_s,
        "speedup": ratio.speedup,
        "speedup_ci95": interval and list(interval),
        "efficiency": ratio.efficiency,
        "serial": share,
        "serial_ci95": span,
        "note": ratio.why or ratio.note or no_share,
        "above": ratio.note,
        "missing": dict.fromkeys(MARKED, ratio.why) if ratio.why else {},
    }


_COLUMNS = [
    Column("run", "run"),
    Column("gpus", "GPUs", "d"),
    Column("micro_batch", "micro-batch", "d"),
    Column("n", "runs", "d"),
    Column("step_s", "s/iter", ".4g"),
    Column("spread", "spread", ".1%"),
    Column("peak_gib", "peak GiB", ".3g"),
    Column("mfu", "MFU", ".1%"),
    Column("speedup", "speedup", ".2f"),
    Column("speedup_ci95", "interval of the speedup", ".2f", seldom=True),
    Column("efficiency", "efficiency", ".2f"),
    Column("serial", "serial share (Karp-Flatt)", ".3f"),
    Column("serial_ci95", "interval of the share", ".3f", seldom=True),
    Column("note", "notes", seldom=True, long="below", tells=(*MARKED, "serial")),
]


def table(found: Curve, scaling: str, baseline: str) -> Table:
    law = {"strong": "Amdahl", "weak": "Gustafson"}[scaling]
    rows, share, interval = found
    notes = [f"{scaling} scaling against {baseline}; spread: (slowest - fastest) / median"]
    if any(row["speedup_ci95"] for row in rows):
        notes.append(
            f"intervals: 95 % of {FEW_REPEATS} repeats or more a side; the range of fewer; of"
            " single runs what their steps allow, without what changes from run to run"
        )
    if share is not None:
        span = " (its noise is not known)"
        if interval:
            span = f" ({interval.low:.3f} to {interval.high:.3f})"
        fits = f"a serial share of {share:.3f}{span} of the baseline's time"
        if scaling == "weak":
            fits = (
                f"{share:.3f}{span} of a run's own time as serial, where Karp-Flatt's share is of"
                " the time that the baseline would take for the same work"
            )
        if not 0 <= share <= 1:
            why = "above linear" if share < 0 else "slower than the baseline"
            fits = f"no serial share: {why}"
        notes.append(f"{law}'s law, at each size's fastest, fits {fits}")
    return Table(_COLUMNS, rows, notes=notes, reasons=reasons(rows))


def reasons(rows: list[dict[str, Any]]) -> list[Reasons]:
    """Why values of rows are unknown; an efficiency above 1 is doubtful."""
    return [Reasons(r["run"], r["missing"], dict.fromkeys(MARKED, r["above"])) for r in rows]


def gather(
    records: list[Record], refused: list[str], window: Window | None = None
) -> Reading[list[Timed]]:
    """The runs whose times are results, and (name, why) of all else.

    refused: the lines of what could not be read.

    Raises:
        UsageError: nothing was timed.
    """
    runs, left_out = [], [(line.partition(": ")[0], line.partition(": ")[2]) for line in refused]
    for record in records:
        time = timed(record, window)
        judgement = judge(record, time)
        if record.copy_of:
            why = f"the same evidence as {record.copy_of}"
        elif judgement.unfit:
            why = "; ".join(map(str, judgement.flags))
        elif unfinished(record):
            why = f"{judgement.verdict}: {judgement.proof}".rstrip(": ")
        elif not record.gpus:
            why = asked(["gpus"])
        elif time is None or not time.step_s > 0:
            why = "no steady time"
        elif record.oversubscribed:
            why = "; ".join(map(str, judgement.flags))
        else:
            runs.append(Timed(record, time))
            continue
        left_out.append((name_of(record), why))
    if not runs:
        raise UsageError("; ".join(by_reason(left_out)))
    return Reading(runs, left_out)


def _usual_baseline(runs: list[Timed]) -> tuple[Record, str]:
    """The timed run that is the baseline of all runs' study, else that on the fewest GPUs; which
    of the two it is, in words."""
    records = [run.record for run in runs]
    names = {record.baseline for record in records}
    of_study = [record for record in records if {own_name(record)} == names]
    if len(of_study) == 1:
        return of_study[0], "the study's"
    return min(records, key=lambda record: record.gpus), "fewest GPUs"


def _baseline_of(
    wanted: str, records: list[Record], runs: list[Timed], left_out: list[tuple[str, str]]
) -> Record:
    """The baseline among the timed runs; left_out: why others have no time.

    Raises:
        UsageError: there is no such run, or neither it nor a repeat of it has a time.
    """
    named, groups = baseline_of(wanted, records), by_configuration(runs)
    if (group := group_with(named, groups)) is None:
        why = dict(left_out).get(name_of(named), "no steady time")
        names = ", ".join(name_of(run.record) for run in runs)
        raise UsageError(f"the baseline {name_of(named)} is left out: {why}; there are: {names}")
    repeats = [run.record for run in groups[group]]
    return named if any(record is named for record in repeats) else repeats[0]


def report_of(
    records: list[Record],
    refused: list[str],
    baseline: str | None = None,
    scaling: str | None = None,
    *,
    window: Window | None = None,
    any_commit: bool = False,
) -> Table:
    """The scaling curve of runs.

    Args:
        refused: the lines of what could not be read.
        baseline: the name or path of a run or configuration; default: the study's, or the run on
            the fewest GPUs.
        scaling: strong or weak; None takes what the runs are (fairness.py).
        window: the iterations to use, by the numbers in the log.
        any_commit: also compare runs of different commits.

    Raises:
        UsageError: nothing was timed, or there is no such baseline.
    """
    runs, left_out = gather(records, refused, window)
    usual, which = _usual_baseline(runs)
    try:
        base = _baseline_of(baseline, records, runs, left_out) if baseline else usual
    except UsageError as error:
        raise UsageError("; not read: ".join([str(error), *refused])) from None
    scaling = scaling or scaling_of([run.record for run in runs])
    fair = []
    for run in runs:
        if unfair := differences(run.record, base, scaling, any_commit):
            left_out.append((name_of(run.record), f"invalid comparison: {'; '.join(unfair)}"))
        else:
            fair.append(run)
    compared = [run.record for run in fair]
    groups, partners = by_configuration(fair), shared_cores(records)
    sides = {name: side_of(repeats, partners, name) for name, repeats in groups.items()}
    start = next(n for n, repeats in groups.items() if any(r.record is base for r in repeats))
    found = curve(list(sides.values()), sides[start], scaling)
    for row in found.rows:
        repeats = [run.record for run in groups[row["run"]]]
        mfu, no_mfu = throughput.model_utilisation(repeats[0], row["step_s"])
        peaks = [record.peak_bytes for record in repeats if record.peak_bytes is not None]
        row |= {"micro_batch": repeats[0].micro_batch, "mfu": mfu}
        row["peak_gib"] = max(peaks) / GIB if peaks else None
        row["missing"] |= throughput.plain_missing(repeats[0]) | {"mfu": no_mfu}
    shown = table(found, scaling, f"{start} ({base.gpus} GPUs)")
    shown.title = question_of(records)
    if not baseline:
        shown.notes[0] += f"; the baseline: {which} (--baseline NAME takes another)"
    shown.notes += averages(compared) + busy(compared) + notes_on(compared, any_commit)
    doubted = [(name_of(run.record), "; ".join(time_doubts(*run))) for run in fair]
    shown.notes += [f"in doubt: {line}" for line in by_reason([d for d in doubted if d[1]])]
    shown.notes += [f"left out: {line}" for line in by_reason(left_out)]
    return shown
