"""The steps of a run from the lines of its log.

Repeated lines are dropped; restarts and gaps are noted.
"""

import re

import numpy as np

from analysis.logs.parsing.logfile import Log
from analysis.logs.record import PER_STEP, Record

# Who printed a line: srun -l, torchrun --tee, torch's and Primus's loggers, pdsh's host names.
_WHO = re.compile(
    rb"\[default(\d+)\]|\[?rank[-= ]?(\d+)|^ ?(\d{1,5}): |^([A-Za-z][\w.-]{0,60}): ", re.IGNORECASE
)

_ENOUGH = 100_000


def put_steps(
    record: Record,
    columns: dict[str, np.ndarray],
    offsets: np.ndarray,
    log: Log,
    averages: bool = False,
) -> list[int]:
    """Fill the per-step arrays; returns where the log's last few lines are, for `judge_end`.

    A line that repeats another (same iteration, time and loss) is dropped. Where several ranks
    print the same iterations, one of them is kept. averages: an entry is the mean over the
    iterations since the last one, so that the spacing is `record.interval`. A column `nan_loss` is
    1 where NaN was printed as the loss.
    """
    columns, offsets = _possible(record, columns, np.asarray(offsets))
    size = len(offsets)
    last_lines = [int(at) for at in offsets[-4:]]
    for name in PER_STEP:
        columns.setdefault(name, np.broadcast_to(np.nan, (size,)))  # in the memory of one
    iteration = columns["iteration"]
    if size and (np.diff(iteration) <= 0).any():
        keep = _without_repeats(columns, offsets, log, record)
        columns = {k: v[keep] for k, v in columns.items()}
        offsets = offsets[keep]
        iteration = columns["iteration"]
    for name in PER_STEP:
        setattr(record, name, columns[name])
    if "nan_loss" in columns:
        record.count_nans(columns["nan_loss"] == 1)
    if size:
        record.last_at = int(offsets[-1])
    steps = np.diff(iteration)
    # The first entries show the usual spacing; a log of millions is not copied for it.
    forward = steps[:_ENOUGH][steps[:_ENOUGH] > 0]
    usual = int(np.median(forward)) if len(forward) else 1
    if averages and usual > 1:
        record.interval = usual
    back = np.flatnonzero(steps <= 0)
    record.restarts = len(back)
    if len(back):
        at = int(back[0])
        record.notes.append(
            f"line {log.line_no(int(offsets[at + 1]))}: iterations go back from"
            f" {iteration[at]:.0f} to {iteration[at + 1]:.0f}"
            + (f"; they do so {len(back)} times" if len(back) > 1 else "")
        )
    gaps = np.flatnonzero(steps > usual)
    # A log that starts at 0 or 1 and goes on at 10, 20 ... has no gap.
    gaps = gaps[(gaps > 0) | (steps[gaps] > usual + 1)] if len(gaps) else gaps
    if len(gaps):
        at = int(gaps[0])
        record.notes.append(
            f"{len(gaps)} gaps: the first after iteration {iteration[at]:.0f},"
            f" the next line is {iteration[at + 1]:.0f}"
        )
    if size and iteration[0] > 2 * usual:
        record.notes.append(f"resumed: the first iteration is {iteration[0]:.0f}")
    return last_lines


def _possible(
    record: Record, columns: dict[str, np.ndarray], offsets: np.ndarray
) -> tuple[dict[str, np.ndarray], np.ndarray]:
    """The lines whose iteration is a number; impossible times and rates become NaN."""
    columns = dict(columns)
    numbered = np.isfinite(columns["iteration"])
    if not numbered.all():
        record.notes.append(f"{(~numbered).sum()} lines whose iteration is no number are left out")
        columns = {name: values[numbered] for name, values in columns.items()}
        offsets = offsets[numbered]
    for name in _NOT_NEGATIVE & columns.keys():
        wrong = (columns[name] < 0) | np.isinf(columns[name])
        if wrong.any():
            record.notes.append(f"{wrong.sum()} values of {name} are negative or infinite: unknown")
            columns[name] = np.where(wrong, np.nan, columns[name])
    return columns, offsets


_NOT_NEGATIVE = {"step_s", "tflops", "samples_per_s", "tokens_per_s", "skipped"}


def _without_repeats(
    columns: dict[str, np.ndarray], offsets: np.ndarray, log: Log, record: Record
) -> np.ndarray:
    """Indices of the lines to keep, in file order."""
    import pandas  # slow to load, seldom needed

    lines = pandas.DataFrame({name: columns[name] for name in PER_STEP})
    keep = np.flatnonzero(~lines.duplicated())
    if dropped := len(offsets) - len(keep):
        record.notes.append(f"{dropped} duplicate lines dropped")
    iteration = columns["iteration"]
    back = (np.diff(iteration[keep]) <= 0).sum()
    if back * 10 < len(keep):
        return keep  # restarts; interleaved ranks go back all the time
    printer = np.array([_printer(log, int(at)) for at in offsets[keep]])
    printers, counts = np.unique(printer, return_counts=True)
    if len(printers) > 1:
        kept = printers[np.argmax(counts)]
        mine = keep[printer == kept]
        for other in printers[printers != kept]:
            theirs = keep[printer == other]
            shared = np.isin(iteration[theirs], iteration[mine]).mean()
            if shared < 0.5 or theirs[0] > mine[-1] or theirs[-1] < mine[0]:
                mine = np.sort(np.concatenate([mine, theirs]))
        if dropped := len(keep) - len(mine):
            record.notes.append(f"{dropped} lines of other ranks dropped: {kept} is kept")
        keep = mine
    # The same iteration again, measured by another rank: the first one stays.
    again = np.flatnonzero(np.diff(iteration[keep]) == 0) + 1
    if len(again):
        record.notes.append(f"{len(again)} lines repeat an iteration with other values: dropped")
    return np.delete(keep, again)


def _printer(log: Log, offset: int) -> str:
    before = log.slice(offset - 300, offset)
    line = before[max(before.rfind(b"\n"), before.rfind(b"\r")) + 1 :]
    match = _WHO.search(re.sub(rb"\x1b\[[0-9;]{0,20}m", b"", line))
    return match[0].decode("utf-8", "replace") if match else ""
