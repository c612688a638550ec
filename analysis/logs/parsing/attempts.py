"""Which attempt of a log is read. A job that is queued again appends to its log, often on other
GPUs or with another batch: facts and steps of two attempts do not belong together.
"""

from typing import TYPE_CHECKING

import numpy as np

from analysis.logs.parsing.logfile import Log
from analysis.logs.parsing.setting_names import SETTINGS
from analysis.logs.record import Record

if TYPE_CHECKING:  # a format is declared with this module's help
    from analysis.logs.parsing.line_format import Format


def read_last_attempt(form: "Format", log: Log) -> Record:
    """The record of the last attempt in the log; a doubt says what was left out.

    Another attempt begins where the program prints between two entries what it prints as it starts
    (`form.starts`), or where the iterations start again from the first. What the earlier header
    states is unknown then, unless the attempt states it itself.
    """
    record = form.read(log)
    steps = record.steps[np.isfinite(record.steps["at"])]
    entries = np.sort(np.concatenate([steps["at"], _places(log, form.ends)])).astype(int)
    if len(entries) < 2:
        return record
    before = np.searchsorted(entries, _places(log, form.starts, *entries[[0, -1]]))
    if len(steps) and not form.counts_per_epoch:
        iteration = steps["iteration"]
        again = np.flatnonzero((iteration[1:] <= iteration[0]) & (np.diff(iteration) < 0)) + 1
        before = np.concatenate([before, np.searchsorted(entries, steps["at"][again])])
    begins = np.unique(before[(before > 0) & (before < len(entries))])
    if later := [place for place in _places(log, form.starts, entries[-1])]:
        words = f"another attempt, from line {log.line_no(min(later))} on, logs no step of its own"
        record.doubts["attempts"] = words
    if not len(begins):
        return record
    first, last = entries[begins[-1] - 1 :][:2]
    end_of_line = log.slice(first, last).find(b"\n") + 1
    log.begin = int(first + end_of_line if end_of_line else last)
    attempt = form.read(log)
    words = f"{len(begins) + 1} attempts in one log: the last is read, from line"
    words = f"{words} {log.line_no(log.begin)} on"
    changed = [
        f"{name} was {getattr(record, name)}"
        for name in SETTINGS
        if getattr(record, name) not in (None, getattr(attempt, name))
    ]
    attempt.doubts["attempts"] = "; before, ".join(filter(None, [words, ", ".join(changed)]))
    return attempt


def _places(log: Log, marks: tuple[bytes, ...], start: int = 0, end: int | None = None) -> list:
    """Where the marks stand in the log, in bytes, in no order."""
    places = []
    for offset, block in log.blocks(start, end) if marks else ():
        for mark in marks:
            at = block.find(mark)
            while at >= 0:
                places.append(offset + at)
                at = block.find(mark, at + len(mark))
    return places
