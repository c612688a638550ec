"""The steps of a run from the lines of its log.

Repeated lines are dropped; restarts and gaps are noted.
"""

import re

import numpy as np

from analysis.logs.parsing.logfile import Log
from analysis.logs.record import PRINTED_PARTS, STEP, Record, steps_table

# Who printed a line: srun -l, torchrun --tee, torch's and Primus's loggers, pdsh's host names.
_WHO = re.compile(
    rb"\[default(\d+)\]|\[?rank[-= ]?(\d+)|^ ?(\d{1,5}): |^([A-Za-z][\w.-]{0,60}): ", re.IGNORECASE
)
ONE_RUN = 1.25  # a factor; the ranks of a run take the same time for a step
_NOT_NEGATIVE = ("step_s", "tflops", "samples_per_s", "tokens_per_s", "skipped")


def put_steps(
    record: Record, columns: dict[str, np.ndarray], log: Log, averages: bool = False
) -> None:
    """Makes the record's table of steps from columns; those that are none of STEP's are left out.

    A line that repeats another (same iteration, time and loss) is dropped. Where several ranks
    print the same iterations, one of them is kept. averages: an entry is the mean over the
    iterations since the last one, so that the spacing is `record.interval`.
    """
    steps = _possible(record, steps_table(**{k: v for k, v in columns.items() if k in STEP.names}))
    if (np.diff(steps["iteration"]) <= 0).any():
        steps = _without_repeats(steps, log, record)
    record.steps = steps
    if not len(steps):
        return
    kept = np.searchsorted(columns["at"], steps["at"])
    for column, part in PRINTED_PARTS.items():
        if column in columns:
            record.printed_parts[part] = columns[column][kept]
    record.last_at = int(steps["at"][-1])
    iteration, as_number = steps["iteration"], "{:.0f}".format
    advances = np.diff(iteration)
    usual_advance = int(np.median(advances[advances > 0])) if (advances > 0).any() else 1
    if averages and usual_advance > 1:
        record.interval = usual_advance
    restarts = np.flatnonzero(advances <= 0)
    for at in restarts[:1]:
        line = f"line {log.line_no(int(steps['at'][at + 1]))}: iterations go back from"
        often = f"; they do so {len(restarts)} times" if len(restarts) > 1 else ""
        back_to = f"{line} {as_number(iteration[at])} to {as_number(iteration[at + 1])}{often}"
        record.doubt("restart", back_to)
    gaps = np.flatnonzero(advances > usual_advance)
    # A log that starts at 0 or 1 and goes on at 10, 20 ... has no gap.
    gaps = gaps[(gaps > 0) | (advances[gaps] > usual_advance + 1)]
    for at in gaps[:1]:
        words = f"after iteration {as_number(iteration[at])}, the next line is"
        record.note(f"{len(gaps)} gaps: the first {words} {as_number(iteration[at + 1])}")
    if iteration[0] > 2 * usual_advance:
        record.note(f"resumed: the first iteration is {as_number(iteration[0])}")


def _possible(record: Record, steps: np.ndarray) -> np.ndarray:
    """Returns the lines whose iteration is a number, with NaN for impossible times and rates."""
    numbered = np.isfinite(steps["iteration"])
    if not numbered.all():
        record.note(f"{(~numbered).sum()} lines whose iteration is no number are left out")
        steps = steps[numbered]
    for name in _NOT_NEGATIVE:
        wrong = (
            (steps[name] < 0) | np.isinf(steps[name]) | ((steps[name] == 0) & (name == "step_s"))
        )
        if wrong.any():
            zero = "zero, " if name == "step_s" else ""
            words = f"{wrong.sum()} values of {name} are {zero}negative or infinite: unknown"
            record.doubt(f"impossible {name}", words)
            steps[name][wrong] = np.nan
    return steps


def _without_repeats(steps: np.ndarray, log: Log, record: Record) -> np.ndarray:
    """Returns the lines to keep, in file order: each iteration once, of one rank."""
    import pandas  # slow to load, seldom needed

    is_duplicate = pandas.DataFrame(steps).drop(columns="at").duplicated().to_numpy()
    if is_duplicate.any():
        record.note(f"{is_duplicate.sum()} duplicate lines dropped")
        steps = steps[~is_duplicate]
    if (np.diff(steps["iteration"]) <= 0).sum() * 10 < len(steps):
        return steps  # restarts; interleaved ranks go back all the time
    line_printers = np.array([_printer(log, int(at)) for at in steps["at"]])
    printers, counts = np.unique(line_printers, return_counts=True)
    if "" in printers and (np.diff(steps["iteration"]) <= 0).sum() == 1:
        return steps  # one restart in a short log; a line that says no rank is of no other rank
    chosen = printers[np.argmax(counts)]
    is_kept = line_printers == chosen
    if not is_kept.all():
        record.note(f"{(~is_kept).sum()} lines of other ranks dropped: {chosen} is kept")
        _doubt_times(record, steps, is_kept)
        steps = steps[is_kept]
    # The same iteration again, measured by another rank: the first one stays.
    repeat = np.diff(steps["iteration"], prepend=np.nan) == 0
    if repeat.any():
        record.note(f"{repeat.sum()} lines repeat an iteration with other values: dropped")
        _doubt_times(record, steps, ~repeat)
    return steps[~repeat]


def _doubt_times(record: Record, steps: np.ndarray, kept: np.ndarray) -> None:
    """Says so where the dropped lines' times are not those of a rank of the same run."""
    timed = np.isfinite(steps["step_s"])
    if not (timed & kept).any() or not (timed & ~kept).any():
        return
    kept_s, dropped_s = (float(np.median(steps["step_s"][timed & rows])) for rows in (kept, ~kept))
    if not 1 / ONE_RUN < dropped_s / kept_s < ONE_RUN:
        words = f"lines of the same iterations take {dropped_s:.4g} s and {kept_s:.4g} s"
        record.doubt("repeats", f"{words}: are they of one run? The latter are read")


def rank_of(log: Log, offset: int) -> str:
    """Returns the rank that printed the line at `offset`, where its number stands before it; else
    an empty string."""
    match = _who(log, offset)
    return next(filter(None, match.groups()[:3]), b"").decode() if match else ""


def _printer(log: Log, offset: int) -> str:
    """Returns what names the printer of the line at `offset`, a rank or a host; empty where nothing
    does."""
    match = _who(log, offset)
    return match[0].decode("utf-8", "replace") if match else ""


def _who(log: Log, offset: int) -> re.Match[bytes] | None:
    """Returns the match of what stands before the line's entry and names its printer, if anything
    does."""
    preceding = log.slice(offset - 300, offset)
    line = preceding[max(preceding.rfind(b"\n"), preceding.rfind(b"\r")) + 1 :]
    return _WHO.search(re.sub(rb"\x1b\[[0-9;]{0,20}m", b"", line))
