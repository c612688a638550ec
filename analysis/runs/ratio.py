"""The ratio of two sides' times, by the one rule of every table: a side is the repeats of one
configuration, and its time is their median.

Three repeats or more a side tell what changes from run to run: the interval is Student's t, of
`ratio_of_medians` in analysis/common/statistics.py. Fewer do not; the interval is the sides' own
spans divided by each other. Two repeats alone cannot be 95 % sure of anything: of two equal sides
one is whole below the other in a third of all cases. So their span holds what the steps of each
allow, too.
"""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from analysis.common.reasons import DOUBT, MISSING, WITHHELD, Reason
from analysis.common.statistics import FEW_REPEATS, are_pairs, ratio_of_medians
from analysis.logs.naming import name_of
from analysis.logs.record import Record
from analysis.runs.baseline import standing_for
from analysis.runs.fairness import changed_settings, unfair
from analysis.runs.judged import Run
from analysis.runs.repeats import by_study, study_key
from analysis.runs.verdict import unfinished
from base.intervals import Interval

MARKED = ("speedup", "efficiency")  # the columns of a ratio
LINEAR = 1.005  # an efficiency above it is printed as more than 1.00
RUNS, PAIRS, STEPS = "runs", "pairs of runs", "steps of a run"  # what an interval is of
INTERVALS = (  # a table's note
    f"intervals: 95 %, of repeats where both sides have {FEW_REPEATS} or more; else of the steps"
    " of each run, without what changes from run to run"
)
_FOLLOW = ("gpus", "dp", "global_batch", "grad_accum")  # from the number of GPUs


@dataclass(frozen=True)
class Side:
    """The repeats of one configuration on `gpus` GPUs: the seconds per step of each, and what their
    95 % intervals of the median hold together; None where one of them is unknown.

    `shared` says why no ratio of the times is a result, "" where one is. `numbers` are those of the
    repeats in their study, `record` is that of the first, `steps` counts the steady steps that all
    repeats have.
    """

    name: str
    gpus: int
    seconds: tuple[float, ...]
    ci95: Interval | None = None
    shared: str = ""
    numbers: tuple[int | None, ...] = ()
    record: Record | None = None
    steps: int = 0

    @property
    def step_s(self) -> float:
        """Returns the median of the repeats' seconds per step."""
        return statistics.median(self.seconds)

    @property
    def span(self) -> Interval | None:
        """Returns the interval that the steps of all repeats allow; where that is unknown, the
        fastest and the slowest repeat; None of a single run."""
        if self.ci95 or len(self.seconds) == 1:
            return self.ci95
        return Interval(min(self.seconds), max(self.seconds))

    @property
    def has_noise(self) -> bool:
        """Returns whether the side says what noise is: by its repeats or by its steps."""
        return len(self.seconds) >= FEW_REPEATS or self.ci95 is not None

    @property
    def is_averaged(self) -> bool:
        """Returns whether its steps are running averages, whose spread is not that of steps."""
        return self.record is not None and self.record.running_average


def side_of(runs: Sequence[Run], name: str = "") -> Side:
    """Returns the repeats of one configuration as one side."""
    first = runs[0]
    shared = [f"{name_of(run.record)} {run.shared}" for run in runs if run.shared]
    return Side(
        name,
        first.record.gpus,
        seconds=tuple(run.time.step_s for run in runs),
        ci95=Interval.around(run.time.ci95 for run in runs),
        shared="; ".join(shared),
        numbers=tuple(run.record.repeat for run in runs),
        record=first.record,
        steps=sum(run.time.n for run in runs),
    )


class TimesRatio(NamedTuple):
    """A ratio of times, its 95 % interval where that is known, and what the interval is of."""

    value: float
    interval: Interval | None
    unit: str


def times_ratio(side: Side, base: Side) -> TimesRatio:
    """Returns the baseline's time over the side's, of the medians of their repeats.

    With fewer than FEW_REPEATS runs on a side the interval is of the sides' spans, which do not see
    what changes from run to run; those of running averages say nothing.
    """
    if min(len(side.seconds), len(base.seconds)) >= FEW_REPEATS:
        paired = are_pairs(side.numbers, base.numbers)
        value, *interval = ratio_of_medians(base.seconds, side.seconds, paired)
        return TimesRatio(value, Interval(*interval), PAIRS if paired else RUNS)
    is_known = base.span and side.span and not (base.is_averaged or side.is_averaged)
    span = base.span.over(side.span) if is_known else None
    return TimesRatio(base.step_s / side.step_s, span, STEPS)


class Ratio(NamedTuple):
    """A speedup and an efficiency, with the speedup's interval where it is known, and the reasons
    why they are withheld or in doubt."""

    speedup: float | None = None
    efficiency: float | None = None
    interval: Interval | None = None
    reasons: tuple[Reason, ...] = ()


def withheld(reason: str) -> Ratio:
    """Returns the ratio of sides that have none, for this reason."""
    return Ratio(reasons=(Reason(WITHHELD, reason, MARKED),))


def speedup(
    step_s: float, gpus: int, baseline_step_s: float, baseline_gpus: int, scaling: str = "strong"
) -> Ratio:
    """Returns speedup and efficiency against a baseline of `baseline_gpus` GPUs.

    Strong (Amdahl 1967): the time ratio, over the ratio of GPUs. Weak (Gustafson 1988): the work
    grew with the GPUs, so the time ratio is the efficiency, and times the ratio of GPUs the scaled
    speedup.
    """
    times, ratio = baseline_step_s / step_s, gpus / baseline_gpus
    return Ratio(times, times / ratio) if scaling == "strong" else Ratio(times * ratio, times)


def against(side: Side, base: Side, scaling: str) -> Ratio:
    """Returns the ratio of two sides' times. It is withheld where either side shared its machine;
    an efficiency above 1 is doubtful and gives its interval."""
    if shared := side.shared or (base.shared and f"the baseline {base.shared}"):
        return withheld(f"no speedup: {shared}")
    times = times_ratio(side, base)
    ratio = speedup(1 / times.value, side.gpus, 1.0, base.gpus, scaling)
    interval, allowed = None, None
    beside_itself = side.record is base.record and base.record is not None
    if times.interval and not beside_itself:  # nothing is noise beside itself
        ends = [speedup(1 / end, side.gpus, 1.0, base.gpus, scaling) for end in times.interval]
        interval = Interval(*(end.speedup for end in ends))
        allowed = Interval(*(end.efficiency for end in ends))
    differing = []
    if base.record and side.record:
        differing = changed_settings(base.record, side.record, without=_FOLLOW)
    doubt = above_linear(ratio.efficiency, side.gpus / base.gpus, allowed, differing)
    reasons = (Reason(DOUBT, doubt, MARKED),) if doubt else ()
    return ratio._replace(interval=interval, reasons=reasons)


class Sides:
    """The runs of a table as sides, each with the repeats that a study made of it: the baseline of
    a run, and the ratio of both."""

    def __init__(self, runs: list[Run], scaling: str, any_commit: bool):
        self.scaling, self.any_commit = scaling, any_commit
        self.repeats = by_study(runs)

    def baseline(self, record: Record) -> Run:
        """Returns the run that is a baseline, or, where it has no time that counts, a repeat of it
        that has."""
        return standing_for(record, self._counted(record) or self.repeats[study_key(record)])

    def side(self, run: Run) -> Side:
        """Returns the repeats of a run that count; where none does, the run alone."""
        return side_of(self._counted(run.record) or [run])

    def _counted(self, record: Record) -> list[Run]:
        return [run for run in self.repeats[study_key(record)] if run.counts]

    def ratio(self, run: Run, base: Run) -> Ratio:
        """Returns the ratio of a run with a time to its baseline, or why it is withheld."""
        if reason := self._no_ratio(run, base):
            return withheld(reason)
        ratio = against(self.side(run), self.side(base), self.scaling)
        if run.record.oversubscribed:  # as a doubt about the run says, too
            reason = Reason(MISSING, "the ranks share cores", ("efficiency",))
        elif base.record.oversubscribed:
            reason = Reason(WITHHELD, "the baseline is oversubscribed", ("efficiency",))
        else:
            return ratio
        return ratio if ratio.efficiency is None else Ratio(ratio.speedup, reasons=(reason,))

    def _no_ratio(self, run: Run, base: Run) -> str:
        """Returns why a run with a time has no ratio to its baseline, or ""."""
        record, baseline = run.record, base.record
        if base.time is None:
            return f"the baseline {name_of(baseline)} has no time"
        if not (run.time.step_s > 0 and base.time.step_s > 0):
            return "no time: less than one whole second"
        if not (record.gpus and baseline.gpus):
            return "number of GPUs unknown"
        if ended := unfinished(record):
            return f"no speedup: {ended}"
        if ended := unfinished(baseline):
            return f"no speedup: the baseline {name_of(baseline)} is {ended}"
        return unfair([record], baseline, self.scaling, self.any_commit)


def above_linear(
    efficiency: float, ratio: float, interval: Interval | None = None, apart: Sequence[str] = ()
) -> str:
    """Returns a doubt about an efficiency above 1 on `ratio` times the baseline's GPUs; "" where
    there is none.

    `interval` is what the intervals or repeats of both sides allow, where that is known. `apart`
    are the settings that differ from the baseline's.
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
