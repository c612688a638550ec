"""Runs with their steady time and their verdict, and which of them are results: what every table
of ratios starts from."""

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from analysis.common.reasons import Reason
from analysis.logs.model import asked
from analysis.logs.naming import name_of
from analysis.logs.record import SCHEDULE, SEVERAL_BATCHES, Record
from analysis.logs.step_time import printed_rate, steady_entries, timed, timed_by_rate
from analysis.runs.shared_hosts import shared_cores
from analysis.runs.verdict import REGIMES, Judgement, judge, unfinished
from base.errors import Reading, UsageError, by_reason
from parallel.measure.steady_time import Steady, Window


class Run(NamedTuple):
    """A run, its steady step time, if it has one, its verdict, and with which other runs it shared
    its cores, in words, or "". window: the iterations that were asked for. entries: the indices of
    those that its time and rates are of."""

    record: Record
    time: Steady | None
    judgement: Judgement
    shared: str = ""
    window: Window | None = None
    entries: np.ndarray = np.empty(0, int)

    @property
    def unfit(self) -> str:
        """Returns why the run's time is no result; "" where it is one."""
        return "; ".join(map(str, self.judgement.doubts)) if self.judgement.unfit else ""

    @property
    def is_fit(self) -> bool:
        """Tells whether the run has a time that can be compared with others'."""
        return self.time is not None and not self.judgement.unfit

    @property
    def time_doubts(self) -> list[str]:
        """Returns what each table that shows the run's time must say of it."""
        kinds = {REGIMES, "rising", *self.record.doubts} - {SCHEDULE}  # which is about the losses
        return [doubt.text for doubt in self.judgement.doubts if doubt.kind in kinds]

    @property
    def counts(self) -> bool:
        """Tells whether the run's time is one of those that the median of its repeats is of."""
        return self.is_fit and not unfinished(self.record)


def judged(records: list[Record], window: Window | None = None) -> list[Run]:
    """Returns each run with its time and its verdict. Only these are looked at for runs that
    shared cores."""
    partners, runs = shared_cores(records), []
    for record in records:
        entries = steady_entries(record, window)
        _settle_batch(record, entries)
        time = timed(record, window)
        shared = partners.get(record.source, "")
        judgement = judge(record, time)
        if time is None and (changes := _changed_rate(record, window)):
            judgement.reasons.append(Reason(REGIMES, changes))
        single = time if time and time.single else None
        runs.append(Run(record, single, judgement, shared, window, entries))
    return runs


def _settle_batch(record: Record, entries: np.ndarray) -> None:
    """Gives the record the global batch of the entries that its time is of; a doubt where these
    have several."""
    record.reasons = [reason for reason in record.reasons if reason.kind != SEVERAL_BATCHES]
    batches = record.steps["sequences"][entries]
    batches = batches[np.isfinite(batches)]
    if not len(batches):
        return
    if (batches == batches[0]).all():
        record.global_batch = int(batches[0])
        return
    grows = f"the global batch goes from {batches[0]:.0f} to {batches[-1]:.0f}"
    words = f"{grows} in the iterations that the time is of (--window FIRST:LAST takes one part)"
    record.reasons.append(
        Reason(SEVERAL_BATCHES, words, ("global_batch", "step_s", "tokens_per_s"))
    )


def _changed_rate(record: Record, window: Window | None) -> str:
    """Returns how the rate of a run without step times changed, where no one rate is the run's; ""
    where one is."""
    by_rate = timed_by_rate(record, window)
    if by_rate is None or by_rate.single or by_rate.change is None:
        return ""
    rate = printed_rate(record).replace("_per_s", "/s")
    before, after = 1 / by_rate.change.before_s, 1 / by_rate.change.after_s
    changes = f"{rate} went from {before:.5g} to {after:.5g}"
    return f"no steady rate: {changes} (--window FIRST:LAST takes the rate of one part)"


def results(
    records: list[Record], refused: list[str], window: Window | None = None
) -> Reading[list[Run]]:
    """Returns the runs whose times are results, and (name, reason) of all others. `refused` has a
    line for each file that could not be read."""
    runs, untimed = divided(judged(records, window), _no_result)
    left_out = [(line.partition(": ")[0], line.partition(": ")[2]) for line in refused]
    left_out += [(name_of(run.record), reason) for run, reason in untimed]
    if not runs:
        raise UsageError("; ".join(by_reason(left_out)))
    return Reading(runs, left_out)


def divided(runs: list[Run], why_not: Callable[[Run], str]) -> Reading[list[Run]]:
    """Returns the runs for which there is no reason why not, and (run, reason) of the others."""
    reasons = [(run, why_not(run)) for run in runs]
    return Reading(
        [run for run, reason in reasons if not reason], [pair for pair in reasons if pair[1]]
    )


def _no_result(run: Run) -> str:
    """Returns why a run has no place in a curve, or ""."""
    record, time, judgement = run.record, run.time, run.judgement
    if record.copy_of:
        return f"the same evidence as {record.copy_of}"
    if run.unfit:
        return run.unfit
    if unfinished(record):
        return f"{judgement.verdict}: {judgement.proof}".rstrip(": ")
    if not record.gpus:
        return asked(["gpus"])
    if time is None or not time.step_s > 0:
        return "no steady time"
    return "; ".join(map(str, judgement.doubts)) if record.oversubscribed else ""
