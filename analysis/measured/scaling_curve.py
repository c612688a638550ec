"""Speedup, efficiency and serial share over repeats at several sizes: the curve of a study."""

import statistics
from collections import defaultdict
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

from analysis.common.table import Column, Table
from analysis.logs.load import called, load, name_of
from analysis.logs.model import asked
from analysis.logs.record import Record
from analysis.logs.verdict import averages, judge, timed, unfinished
from analysis.measured import predictions, throughput
from analysis.measured.fairness import (
    ANY_COMMIT,
    UNSTATED,
    busy,
    changed,
    configuration,
    differences,
    named,
    other_kernels,
    scaling_of,
    shared_cores,
    sharing,
    unstated,
)
from analysis.measured.throughput import MARKED
from base.errors import UsageError, by_reason
from parallel.measure.steady_time import Steady

LINEAR = 1.005  # an efficiency above it is printed as more than 1.00


def speedup(
    step_s: float,
    gpus: int,
    baseline_step_s: float,
    baseline_gpus: int,
    scaling: str = "strong",
) -> tuple[float, float]:
    """(speedup, efficiency) against a baseline of `baseline_gpus` GPUs.

    Strong (Amdahl 1967): the time ratio, over the ratio of GPUs. Weak (Gustafson 1988): the work
    grew with the GPUs, so the time ratio is the efficiency, and times the ratio of GPUs the scaled
    speedup.
    """
    times, ratio = baseline_step_s / step_s, gpus / baseline_gpus
    return (times, times / ratio) if scaling == "strong" else (times * ratio, times)


class Times(NamedTuple):
    """Seconds per step of a run or of repeats on `gpus`, with the least and the most that its 95 %
    interval or the repeats allow; None where neither is known."""

    step_s: float
    gpus: int
    low_s: float | None = None
    high_s: float | None = None


class Ratio(NamedTuple):
    """A speedup and an efficiency. `why`: why they are withheld. `note`: what is odd about an
    efficiency above 1, which a table marks."""

    speedup: float | None
    efficiency: float | None
    why: str = ""
    note: str = ""


def against(side: Times, base: Times, scaling: str, shared: str = "") -> Ratio:
    """The ratio of two sides' times, by the one rule of every table: it is withheld where either
    side `shared` its machine, and an efficiency above 1 has a note with its interval."""
    if shared:
        return Ratio(None, None, f"no speedup: {shared}")
    faster, efficiency = speedup(side.step_s, side.gpus, base.step_s, base.gpus, scaling)
    interval = None
    if None not in (*side, *base):
        interval = (
            speedup(side.high_s, side.gpus, base.low_s, base.gpus, scaling)[1],
            speedup(side.low_s, side.gpus, base.high_s, base.gpus, scaling)[1],
        )
    return Ratio(faster, efficiency, "", above_linear(efficiency, side.gpus / base.gpus, interval))


def of_run(time: Steady, gpus: int) -> Times:
    """A run's time with its 95 % interval."""
    return Times(time.step_s, gpus, *(time.ci95 or ()))


def of_repeats(repeats: list[Times]) -> Times:
    """Repeats' median, their fastest and their slowest; of one run its own interval."""
    if len(repeats) == 1:
        return repeats[0]
    times = [one.step_s for one in repeats]
    return Times(statistics.median(times), repeats[0].gpus, min(times), max(times))


def karp_flatt(speedup: float, ratio: float) -> float | None:
    """The experimentally determined serial fraction, (1/S - 1/p) / (1 - 1/p), p = `ratio` > 1.

    Karp & Flatt 1990, "Measuring parallel processor performance". Growing with p: overhead grows.
    Negative: the speedup is above linear. Above 1: there is none. Neither is a share of anything.
    """
    return None if ratio <= 1 else (1 / speedup - 1 / ratio) / (1 - 1 / ratio)


def serial_share(speedup: float, ratio: float) -> float | None:
    """`karp_flatt`, where it is a share (0 to 1); else None."""
    share = karp_flatt(speedup, ratio)
    return share if share is not None and 0 <= share <= 1 else None


def above_linear(
    efficiency: float, ratio: float, interval: tuple[float, float] | None = None
) -> str:
    """What an efficiency above 1 says on `ratio` times the baseline's GPUs, or "".

    `interval`: what the intervals or repeats of both sides allow, where that is known.
    """
    if efficiency <= LINEAR:
        return ""
    span = f" ({interval[0]:.2f} to {interval[1]:.2f})" if interval else ""
    if interval and interval[0] <= 1:
        return f"efficiency {efficiency:.2f}{span} may be 1: too little to be sure of"
    if ratio == 1:
        return (
            f"{efficiency:.2f}{span} times as fast as the baseline on as many GPUs: another split,"
            " or the baseline shared its machine"
        )
    return (
        f"superlinear: efficiency {efficiency:.2f}{span} is above 1 (each GPU's part fits its"
        " caches or memory better, or the baseline shared its machine)"
    )


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


@dataclass(frozen=True)
class Point:
    """One timed run: enough to scale by. Points of one configuration are repeats.

    sharing: why no ratio of its time is a result, or ""."""

    name: str
    gpus: int
    step_s: float
    configuration: tuple = ()
    predicted_s: float | None = None
    micro_batch: int | None = None
    peak_gb: float | None = None
    mfu: float | None = None
    ci95: tuple[float, float] | None = None
    sharing: str = ""

    @property
    def times(self) -> Times:
        return Times(self.step_s, self.gpus, *(self.ci95 or ()))


def curve(
    points: list[Point], baseline: Point, scaling: str = "strong"
) -> tuple[list[dict[str, Any]], float | None]:
    """(one row per configuration, fitted serial share) of repeats at several sizes.

    Rows: run, gpus, n repeats, step_s (their median), spread ((slowest - fastest) / median),
    speedup, efficiency, serial (Karp-Flatt, where it is a share), note (why one is none, and what
    is odd about the efficiency). The baseline's own repeats are what it is against.
    The fit is to the fastest configuration of each size: a law is about what the machine can do.
    """
    groups = defaultdict(list)
    for point in points:
        groups[point.gpus, point.configuration].append(point)
    alike = groups.get((baseline.gpus, baseline.configuration), [baseline])
    ordered = sorted(groups.items(), key=lambda g: (g[0][0], g[1][0].name))
    rows = [_row(repeats, alike, scaling) for _, repeats in ordered]
    best: dict[float, float] = {}
    for row in rows:
        if (ratio := row["gpus"] / baseline.gpus) > 1 and row["speedup"] is not None:
            best[ratio] = max(row["speedup"], best.get(ratio, 0.0))
    return rows, (fit_amdahl if scaling == "strong" else fit_gustafson)(list(best.items()))


def _row(repeats: list[Point], alike: list[Point], scaling: str) -> dict[str, Any]:
    """The repeats of one configuration against the baseline's repeats, `alike`."""
    first, times = repeats[0], [p.step_s for p in repeats]
    side, base = (of_repeats([p.times for p in points]) for points in (repeats, alike))
    step_s, ratio = side.step_s, side.gpus / base.gpus
    shared = [p.sharing for p in repeats if p.sharing]
    shared = shared or [f"the baseline {p.sharing}" for p in alike if p.sharing]
    found = against(side, base, scaling, "; ".join(shared))
    withheld = dict.fromkeys(MARKED, found.why) if found.why else {}
    share = karp_flatt(found.speedup, ratio) if found.speedup else None
    peaks = [p.peak_gb for p in repeats if p.peak_gb is not None]
    return {
        "run": first.name,
        "gpus": side.gpus,
        "micro_batch": first.micro_batch,
        "n": len(times),
        "step_s": step_s,
        "spread": (max(times) - min(times)) / step_s if len(times) > 1 else None,
        "fastest_s": min(times),
        "slowest_s": max(times),
        "predicted_s": first.predicted_s,
        "predicted_error": predictions.error(first.predicted_s, step_s),
        "peak_gb": max(peaks, default=None),
        "mfu": first.mfu and first.mfu * first.step_s / step_s,
        "speedup": found.speedup,
        "efficiency": found.efficiency,
        "serial": found.speedup and serial_share(found.speedup, ratio),
        "note": found.why or found.note or _no_share(share),
        "above": found.note,
        "missing": withheld,
    }


def _no_share(share: float | None) -> str | None:
    if share is None or 0 <= share <= 1:
        return None
    if share > 1:
        return "no serial share, slower than the baseline on more GPUs"
    return "no serial share: the efficiency is 1 or too little above it to be sure of"


def table(
    rows: list[dict[str, Any]],
    share: float | None,
    scaling: str,
    baseline: str,
    predicted: bool = False,
) -> Table:
    """The scaling curve as a table; predicted: a prediction was asked for, so its columns stand
    there even if no row has one."""
    columns = [
        Column("run", "run"),
        Column("gpus", "GPUs", "d"),
        Column("micro_batch", "micro-batch", "d"),
        Column("n", "runs", "d"),
        Column("step_s", "s/iter", ".4g"),
        Column("spread", "spread", ".1%"),
        *predictions.columns(seldom=not predicted),
        Column("peak_gb", "peak GB", ".3g"),
        Column("mfu", "MFU", ".1%"),
        Column("speedup", "speedup", ".2f"),
        Column("efficiency", "efficiency", ".2f"),
        Column("serial", "serial share (Karp-Flatt)", ".3f"),
        Column("note", "notes", seldom=True, long="below", tells=(*MARKED, "serial")),
    ]
    law = {"strong": "Amdahl", "weak": "Gustafson"}[scaling]
    notes = [f"{scaling} scaling against {baseline}; spread: (slowest - fastest) / median"]
    if share is not None:
        fits = f"a serial share of {share:.3f}"
        if not 0 <= share <= 1:
            why = "above linear" if share < 0 else "slower than the baseline"
            fits = f"no serial share: {why}"
        notes.append(f"{law}'s law, at each size's fastest, fits {fits}")
    return Table(columns, rows, notes=notes, doubtful=doubtful(rows))


def doubtful(rows: list[dict[str, Any]]) -> dict[int, tuple[str, ...]]:
    """Which cells of rows a table marks: those of an efficiency above 1."""
    return {number: MARKED for number, row in enumerate(rows) if row.get("above")}


Pair = tuple[Record, Point]


def report(
    paths: list[Path],
    baseline: str | None = None,
    scaling: str | None = None,
    *,
    facts: dict[str, Any] | None = None,
    window: tuple[int, int] | None = None,
    rule: str = "median",
    any_commit: bool = False,
    predict: str | None = None,
) -> Table:
    """The scaling curve of what is at the paths.

    Args:
        baseline: the name or path of a run or configuration; default: the fewest GPUs.
        scaling: strong or weak; None takes what the runs are (fairness.py).
        facts: what the logs do not say, by Record's names.
        window, rule: how a step time is taken (logs/verdict.py).
        any_commit: also compare runs of different commits.
        predict: the calibrated cluster whose predictions stand beside the times.

    Raises:
        UsageError: nothing could be read or timed, or there is no such baseline.
    """
    records, refused = load(paths, facts)
    return report_of(
        records,
        refused,
        baseline,
        scaling,
        window=window,
        rule=rule,
        any_commit=any_commit,
        predict=predict,
    )


def report_of(
    records: list[Record],
    refused: list[str],
    baseline: str | None = None,
    scaling: str | None = None,
    *,
    window: tuple[int, int] | None = None,
    rule: str = "median",
    any_commit: bool = False,
    predict: str | None = None,
) -> Table:
    """`report` of runs that were read, and the lines of what was refused."""
    predicted, lacking = predictions.seconds(records, predict)
    partners = shared_cores(records)
    pairs, untimed = _points(records, predicted, partners, window, rule)
    read = (line.partition(": ") for line in refused)
    left_out = [(source, why) for source, _, why in read] + untimed
    if not pairs:
        raise UsageError("; ".join(by_reason(left_out)))
    base, start = _baseline(pairs, baseline)
    scaling = scaling or scaling_of([record for record, _ in pairs])
    fair = []
    for record, point in pairs:
        if unfair := differences(record, base, scaling, any_commit):
            left_out.append((point.name, f"invalid comparison: {'; '.join(unfair)}"))
        else:
            fair.append((record, point))
    fair = _named_by_configuration(fair)
    compared = [record for record, _ in fair]
    rows, share = curve([point for _, point in fair], start, scaling)
    called_base = next(point.name for record, point in fair if record is base)
    shown = table(rows, share, scaling, f"{called_base} ({base.gpus} GPUs)", predict is not None)
    if not baseline:
        shown.notes[0] += "; the baseline: fewest GPUs, for none was named (--baseline NAME)"
    shown.notes += averages(compared)
    unpredicted = {r.source: why for r, why in zip(records, lacking, strict=True)}
    shown.missing = throughput.shown_in(rows) | throughput.grouped(
        [
            (
                name_of(r),
                unpredicted[r.source] | throughput.plain_missing(r) | _no_mfu(r, point.step_s),
            )
            for r, point in fair
        ]
    )
    if open_ := unstated(compared):
        shown.notes.append(UNSTATED + ", ".join(open_))
    shown.notes += busy(compared) + other_kernels(compared) + changed(compared)
    if predict:
        told = [(point.configuration, point.predicted_s, point.step_s) for _, point in fair]
        shown.notes += predictions.notes(predictions.source(predict), told)
        shown.notes += predictions.other_processor(predict, compared)
    shown.notes += [ANY_COMMIT] * any_commit
    shown.notes += [f"left out: {line}" for line in by_reason(left_out)]
    return shown


def _points(
    records: list[Record],
    predicted: list[float | None],
    partners: dict[str, str],
    window: tuple[int, int] | None,
    rule: str,
) -> tuple[list[Pair], list[tuple[str, str]]]:
    """(the timed runs with their points, the name of each other run and why it is none)."""
    pairs, left_out = [], []
    for record, predicted_s in zip(records, predicted, strict=True):
        time, name = timed(record, window, rule), name_of(record)
        judgement = judge(record, time)
        if record.copy_of:
            left_out.append((name, f"the same evidence as {record.copy_of}"))
        elif judgement.unfit or record.oversubscribed:
            left_out.append((name, "; ".join(map(str, judgement.flags))))
        elif why := unfinished(record):
            left_out.append((name, why))
        elif not record.gpus:
            left_out.append((name, asked(["gpus"])))
        elif time is None or not time.step_s > 0:
            left_out.append((name, "no steady time"))
        else:
            point = Point(
                name,
                record.gpus,
                time.step_s,
                configuration(record),
                predicted_s,
                record.micro_batch,
                throughput.peak_gb(record),
                throughput.model_utilisation(record, time.step_s)[0],
                time.ci95,
                sharing([record], [], partners),
            )
            pairs.append((record, point))
    return pairs, left_out


def _no_mfu(record: Record, step_s: float) -> dict[str, str]:
    value, why = throughput.model_utilisation(record, step_s)
    return {} if value is not None else {"mfu": why}


def _baseline(pairs: list[Pair], baseline: str | None) -> Pair:
    """The pair that the others are compared with.

    Raises:
        UsageError: no timed run is called `baseline`, or several configurations are.
    """
    wanted = [pair for pair in pairs if baseline and called(baseline, pair[0])]
    if baseline and not wanted:
        names = ", ".join(point.name for _, point in pairs)
        raise UsageError(f"no timed run called {baseline!r}; there are: {names}")
    if len({point.configuration for _, point in wanted}) > 1:
        names = ", ".join(point.name for _, point in wanted)
        raise UsageError(f"--baseline {baseline} fits {names}; name one of these")
    return min(wanted or pairs, key=lambda pair: pair[1].gpus)


def _named_by_configuration(pairs: list[Pair]) -> list[Pair]:
    """Repeats get their configuration's name, unless other configurations have it, too."""
    kinds: dict[str | None, set[tuple]] = defaultdict(set)
    for record, point in pairs:
        kinds[named(record)].add(point.configuration)
    return [
        (record, point)
        if len(kinds[name := named(record)]) > 1
        else (record, replace(point, name=name or point.name))
        for record, point in pairs
    ]
