"""Speedup, efficiency and serial share over repeats at several sizes: the curve of a study."""

from typing import Any, NamedTuple

from analysis.common.reasons import MISSING, NOTE, Reason, of_cells, sentences
from analysis.common.table import Column, Table
from analysis.common.terminal import counted
from analysis.logs.naming import name_of
from analysis.logs.record import Record
from analysis.runs import throughput, time_to_target
from analysis.runs.baseline import timed_baseline, usual_baseline
from analysis.runs.fairness import (
    DEFAULT_TERMS,
    Terms,
    notes_on,
    question_of,
    scaling_of,
    unfair,
)
from analysis.runs.judged import Run, divided, results
from analysis.runs.ratio import INTERVALS, MARKED, Side, against, side_of
from analysis.runs.repeats import by_configuration, group_with
from analysis.runs.scaling_laws import LAWS, fit
from analysis.runs.shared_hosts import busy
from analysis.runs.verdict import averages
from base.errors import UsageError, by_reason
from base.intervals import Interval
from base.units import GIB


def karp_flatt(speedup: float, ratio: float) -> float | None:
    """Returns the experimentally determined serial fraction, (1/S - 1/p) / (1 - 1/p), p = `ratio`.

    Karp & Flatt 1990, "Measuring parallel processor performance". Growing with p: overhead grows.
    Negative: the speedup is above linear. Above 1: there is none. Neither is a share of anything.
    """
    return None if ratio <= 1 else (1 / speedup - 1 / ratio) / (1 - 1 / ratio)


class Curve(NamedTuple):
    """A row a configuration, the serial share of the law that fits them, if one does, and the
    share's interval, where those of the speedups are known."""

    rows: list[dict[str, Any]]
    share: float | None
    interval: Interval | None = None


def curve(sides: list[Side], base: Side, scaling: str = "strong") -> Curve:
    """Returns the rows, by GPUs and name, and the serial share that fits them.

    A row is a configuration: run, gpus, n repeats, step_s (their median), spread ((slowest -
    fastest) / median), speedup, efficiency, serial (Karp-Flatt, where it is a share), the intervals
    of speedup and serial, note (why one is none, and what is odd about the efficiency), missing,
    doubtful.
    The fit is to the fastest configuration of each size: a law is about what the machine can do.
    Of two runs its interval is that of the fits to the lowest and to the highest speedup.
    """
    ordered = sorted(sides, key=lambda side: (side.gpus, side.name))
    rows = [_row(side, base, scaling) for side in ordered]
    law, best = LAWS[scaling][0], fastest(ordered, rows, base)
    fitted = fit(law, scaling, {ratio: side.seconds for ratio, (side, _) in best.items()}).value
    if fitted is None:
        return Curve(rows, None)
    interval = fitted.parameter(0).interval
    (ratio, (_, row)) = list(best.items())[-1]
    if interval is None and (span := row["speedup_ci95"]):  # two runs
        work = ratio if scaling == "weak" else 1.0
        ends = [fit(law, scaling, {1.0: [1.0], ratio: [work / end]}).value for end in span[::-1]]
        interval = Interval(*(end.free_share for end in ends))
    return Curve(rows, fitted.free_share, interval)


def fastest(
    sides: list[Side], rows: list[dict[str, Any]], base: Side
) -> dict[float, tuple[Side, dict[str, Any]]]:
    """Returns, by GPUs over the baseline's, the baseline and the fastest configuration of each
    larger size, each with its row; {} where no speedup counts. A law is fitted to these."""
    best: dict[float, tuple[Side, dict[str, Any]]] = {}
    pairs = sorted(zip(sides, rows, strict=True), key=lambda pair: pair[1]["speedup"] or 0.0)
    for side, row in pairs:
        if side is base or (side.gpus > base.gpus and row["speedup"] is not None):
            best[side.gpus / base.gpus] = side, row
    return dict(sorted(best.items())) if len(best) > 1 else {}


def _row(side: Side, base: Side, scaling: str) -> dict[str, Any]:
    """Returns the row of one configuration; `curve` says what is in it."""
    ratio = against(side, base, scaling)
    fastest_s, slowest_s = min(side.seconds), max(side.seconds)
    times_gpus, interval = side.gpus / base.gpus, ratio.interval
    share = karp_flatt(ratio.speedup, times_gpus) if ratio.speedup else None
    span, reasons = None, ratio.reasons
    if share is not None and interval:
        span = [karp_flatt(speedup, times_gpus) for speedup in (interval.high, interval.low)]
    if share is not None and not 0 <= share <= 1:
        no_share = "no serial share: the efficiency is 1 or too little above it to be sure of"
        if share > 1:
            no_share = "no serial share, slower than the baseline on more GPUs"
        reasons = reasons or (Reason(NOTE, no_share),)
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
        "note": "; ".join(sentences(reasons)) or None,
        **of_cells(reasons),
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
    Column("note", "notes", seldom=True, long="below", explains=(*MARKED, "serial")),
]


def table(scaled: Curve, scaling: str, baseline: str) -> Table:
    """Returns the table of a scaling curve; its notes give the serial share that a law fits."""
    law = {"strong": "Amdahl", "weak": "Gustafson"}[scaling]
    rows, share, interval = scaled
    notes = [f"{scaling} scaling against {baseline}; spread: (slowest - fastest) / median"]
    if any(row["speedup_ci95"] for row in rows):
        notes.append(INTERVALS)
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
            reason = "above linear" if share < 0 else "slower than the baseline"
            fits = f"no serial share: {reason}"
        notes.append(f"{law}'s law, at each size's fastest, fits {fits}")
    return Table(_COLUMNS, rows, notes=notes)


class Compared(NamedTuple):
    """Runs that are fair to compare, by their configurations' names, and those that are left out
    with the reasons. start: the name of the baseline's configuration; whose: why it is the
    baseline, in words."""

    groups: dict[str, list[Run]]
    sides: dict[str, Side]
    start: str
    whose: str
    scaling: str
    left_out: list[tuple[str, str]]

    @property
    def base(self) -> Side:
        """Returns the repeats of the baseline."""
        return self.sides[self.start]

    @property
    def records(self) -> list[Record]:
        """Returns the runs that are compared."""
        return [run.record for repeats in self.groups.values() for run in repeats]

    def notes(self, any_commit: bool) -> list[str]:
        """Returns what must be said of the runs that are compared, and of those that are not."""
        lines = averages(self.records) + busy(self.records) + notes_on(self.records, any_commit)
        runs = [run for repeats in self.groups.values() for run in repeats]
        doubted = [(name_of(run.record), "; ".join(run.time_doubts)) for run in runs]
        lines += [f"in doubt: {line}" for line in by_reason([d for d in doubted if d[1]])]
        return lines + [f"left out: {line}" for line in by_reason(self.left_out)]


def compared(records: list[Record], refused: list[str], terms: Terms = DEFAULT_TERMS) -> Compared:
    """Returns the runs whose times are results and fair to compare with the baseline's. Without a
    baseline it is the study's, or the run on the fewest GPUs. `refused` has a line for each file
    that could not be read."""
    runs, left_out = results(records, refused, terms.window)
    base, whose = usual_baseline(runs)
    if terms.baseline:
        try:
            base = timed_baseline(terms.baseline, records, runs, left_out)
            whose = "--baseline"
        except UsageError as error:
            raise UsageError("; not read: ".join([str(error), *refused])) from None
    scaling = terms.scaling or scaling_of([run.record for run in runs])
    fair, refused_runs = divided(
        runs, lambda run: unfair([run.record], base, scaling, terms.any_commit)
    )
    left_out += [(name_of(run.record), reason) for run, reason in refused_runs]
    groups = by_configuration(fair)
    sides = {name: side_of(repeats, name) for name, repeats in groups.items()}
    return Compared(groups, sides, group_with(base, groups), whose, scaling, left_out)


def report_of(records: list[Record], refused: list[str], terms: Terms = DEFAULT_TERMS) -> Table:
    """Returns the scaling curve of runs, of what `compared` returns."""
    found = compared(records, refused, terms)
    scaled = curve(list(found.sides.values()), found.base, found.scaling)
    for row in scaled.rows:
        _add_facts(row, [run.record for run in found.groups[row["run"]]])
    shown = table(scaled, found.scaling, f"{found.start} ({counted(found.base.gpus, 'GPUs')})")
    shown.title = question_of(records)
    if found.scaling == "weak":
        time_to_target.add_to(shown, found.groups, found.base, terms)
    elif terms.critical_batch or terms.target_loss is not None:
        shown.notes.append(time_to_target.SAME_BATCH)
    if not terms.baseline:
        shown.notes[0] += f"; the baseline: {found.whose} (--baseline NAME takes another)"
    shown.notes += found.notes(terms.any_commit)
    return shown


def _add_facts(row: dict[str, Any], repeats: list[Record]) -> None:
    """Adds to a configuration's row the micro-batch, MFU and peak of memory of its repeats."""
    first = repeats[0]
    mfu, no_mfu = throughput.model_utilisation(first, row["step_s"])
    peaks = [record.peak_bytes for record in repeats if record.peak_bytes is not None]
    row |= {"micro_batch": first.micro_batch, "mfu": mfu}
    row["peak_gib"] = max(peaks) / GIB if peaks else None
    missing = [*throughput.plain_missing(first), Reason(MISSING, no_mfu, ("mfu",))]
    row["missing"] |= of_cells(missing)["missing"]
