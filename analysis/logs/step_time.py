"""The step time of a run: how every command here takes it."""

from dataclasses import replace

import numpy as np

from analysis.common.reasons import Reason
from analysis.logs.parsing.fields import positive
from analysis.logs.parsing.rate_words import step_s_of_rates
from analysis.logs.record import Record
from parallel.measure.steady_time import Steady, Window, steady, steady_iterations

UNTIMED = ("off the clock", "rows missing")  # doubts of a run folder that rule out a time


def step_times(record: Record) -> np.ndarray:
    """Returns seconds per optimizer step, one per logged entry.

    That is the logged time. Where the log times micro-steps or prints only throughput, it is the
    time that the global batch takes at the printed tokens or samples per second. Empty where
    neither is known.
    """
    step_s = record.steps["step_s"]
    if record.per_epoch or not np.isfinite(step_s).any():
        step_s = step_s_of_rates(record)
    return step_s if np.isfinite(step_s).any() else np.empty(0)


def no_timing(record: Record) -> Reason | None:
    """Returns why no time is taken from a run whatever its rows say, or None."""
    if record.profiler:  # it slows the steps that it watches
        tool = record.profiler.get("tool", "an unknown tool")
        return Reason("profiled", f"profiled with {tool}: not a timing")
    untimed = (reason for reason in record.reasons if reason.kind in UNTIMED)
    return next(untimed, None)


def timed(record: Record, window: Window | None = None) -> Steady | None:
    """Returns `steady` of a run's optimizer steps: how every command here takes a step time.

    None where nothing was timed, or `no_timing` says why no time is taken. Where the log states
    the mean of the run alone, that is it. Running means have no period, and no jump to slower
    ones: each has the steps before it, so one slow step lifts many.
    """
    if no_timing(record):
        return None
    if record.mean_of and window is None:
        return Steady(record.totals["step_s_mean"], 1, None, 0, 0)
    steps = record.steps
    time = steady(step_times(record), steps["skipped"], steps["iteration"], window)
    if time is None or not record.running_average:
        return time
    if time.change and time.change.at is not None and time.change.after_s > time.change.before_s:
        time = replace(time, change=None, single=True)
    return replace(time, period=None)


def steady_entries(record: Record, window: Window | None = None) -> np.ndarray:
    """Returns the indices of the entries that a step time is of, and so every rate beside it.

    Where no step time is known, the printed rate chooses them: its inverse is a time.
    """
    steps = record.steps
    if record.mean_of and window is None:
        return np.arange(len(steps))
    times = step_times(record)
    if not len(times) and (name := printed_rate(record)):
        times = 1 / positive(steps[name])
    return steady_iterations(times, steps["skipped"], steps["iteration"], window)


def printed_rate(record: Record) -> str:
    """Returns which rate of all GPUs the entries print; "" where they print none."""
    names = ("tokens_per_s", "samples_per_s")
    return next((name for name in names if (record.steps[name] > 0).any()), "")


def timed_by_rate(record: Record, window: Window | None = None) -> Steady | None:
    """Returns `steady` of the seconds that a token or a sample takes at the printed rate. None
    where a step time is known, or no rate."""
    name = printed_rate(record)
    if not name or record.mean_of or no_timing(record) or len(step_times(record)):
        return None
    steps = record.steps
    return steady(1 / positive(steps[name]), steps["skipped"], steps["iteration"], window)


def describe_rule(window: Window | None) -> str:
    """Returns how a step time was taken, for a table's note."""
    if window:
        return f"median of iterations {window.first} to {window.last}"
    return "median after the warm-up that the data show"
