"""Which runs a log holds, and which attempt of each is read. A script may train one run after the
other into one log. A job that is queued again appends to its log, often on other GPUs or with
another batch: facts and steps of two attempts do not belong together.
"""

from itertools import pairwise
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from analysis.logs.facts import SETTINGS
from analysis.logs.parsing.logfile import Log
from analysis.logs.parsing.steps import rank_of
from analysis.logs.record import Record
from parallel.record.ends import find_sign

if TYPE_CHECKING:  # a format is declared with this module's help
    from analysis.logs.parsing.line_format import Format


def read_runs(log_format: "Format", log: Log) -> list[Record]:
    """Returns the records of the runs in the log, of each its last attempt.

    Another run begins where the one before it was over, as its program says at its end
    (`log_format.done`; where it says nothing, by the last planned step), and iterations do not go
    on. Everything else that begins is another attempt at the same run.
    """
    whole = log_format.read(log)
    begins = _other_kind(log_format, log, whole) + _begins(log_format, log, whole)
    if not begins or (log_format.done and not log.places(log_format.done)):
        return [_last_attempt(log_format, log, whole)]
    spans = [Span(*span) for span in pairwise([log.begin, *begins, log.size])]
    parts = [log_format.read(log.part(*span)) for span in spans]
    runs = spans[:1]
    for earlier, following, span in zip(parts[:-1], parts[1:], spans[1:], strict=True):
        first = following.steps["at"][:1].astype(int).tolist() or [span.begin]
        done = log.places(log_format.done, earlier.last_at or 0, first[0])
        is_over = bool(done) if log_format.done else earlier.completed
        if is_over and not _goes_on(earlier, following):
            begin = max(log.line_end(done[-1]) if done else 0, span.begin)
            runs[-1:] = [Span(runs[-1].begin, begin), Span(begin, span.end)]
        else:
            runs[-1] = Span(runs[-1].begin, span.end)
    if len(runs) == 1:
        return [_last_attempt(log_format, log, whole)]
    records = []
    for number, (begin, end) in enumerate(runs, 1):
        own_log = log.part(begin, end)
        record = _last_attempt(log_format, own_log, log_format.read(own_log))
        line = log.line_no(begin)
        record.run = f"{log.path.name}:{line}"
        record.note(f"run {number} of {len(runs)} in one log, from line {line} on")
        records.append(record)
    return records


class Span(NamedTuple):
    """A part of a log: the offsets where it begins and ends, in bytes."""

    begin: int
    end: int


def _other_kind(log_format: "Format", log: Log, whole: Record) -> list[int]:
    """Returns where a run ends whose steps are lines of another kind than the whole's, which are of
    the first kind that the log holds. None: [], else the offset behind these lines."""
    if len(log_format.lines) < 2 or not len(whole.steps):
        return []
    starts = log.places(log_format.starts, end=int(whole.steps["at"][0]))
    if len(starts) < 2:
        return []
    earlier = log_format.read(log.part(log.begin, starts[-1]))
    return [] if earlier.last_at is None else [log.line_end(earlier.last_at)]


def _goes_on(earlier: Record, following: Record) -> bool:
    """Returns whether the following part goes on where the earlier one stopped, or either has no
    steps."""
    earlier_numbers = earlier.steps["iteration"]
    numbers = following.steps["iteration"]
    if not len(earlier_numbers) or not len(numbers):
        return True
    return bool(numbers[0] > earlier_numbers[-1])


def _batch_before(begin: int, record: Record) -> int | None:
    """Returns the batch of the last entry before `begin`; the record's where no line prints one."""
    earlier = record.batches[record.steps["at"] < begin]
    return int(earlier[-1]) if len(earlier) and earlier[-1] > 0 else record.global_batch


def _last_attempt(log_format: "Format", log: Log, first_attempt: Record) -> Record:
    """Returns the record of the last attempt in the log. A doubt in it says what was left out.
    first_attempt: what was read of the whole log.

    Another attempt begins where the program prints between two entries what it prints as it starts
    (`log_format.starts`), or before the first entry, behind a failure; where an entry follows the
    end of a run; or where the iterations start again from the first. What the earlier header states
    is unknown then, unless the attempt states it itself.
    """
    attempt = first_attempt
    doubts, n_attempts = [], 0
    while begins := _begins(
        log_format, log, attempt
    ):  # again: a line that was left out may stand first
        n_attempts = n_attempts or len(begins) + 1
        log.begin = begins[-1]
        attempt = log_format.read(log)
    entries = _entries(log_format, log, attempt).at
    if len(entries) and (failures := _failed_starts(log_format, log, entries[0])):
        n_attempts = (n_attempts or 1) + len(failures)
        log.begin = failures[-1]
        attempt = log_format.read(log)
    if n_attempts:
        opening = f"{n_attempts} attempts in one log: the last is read, from line"
        first_attempt.global_batch = _batch_before(log.begin, first_attempt)
        changed = [
            f"{name} was {getattr(first_attempt, name)}"
            for name in SETTINGS
            if getattr(first_attempt, name) not in (None, getattr(attempt, name))
        ]
        doubts = [f"{opening} {log.line_no(log.begin)} on", ", ".join(changed)]
        doubts = ["; before, ".join(filter(None, doubts))]
    if len(entries) > 1 and (later_starts := log.places(log_format.starts, entries[-1])):
        line = log.line_no(later_starts[0])
        doubts.append(f"another attempt, from line {line} on, logs no step of its own")
    if doubts:
        attempt.doubt("attempts", "; ".join(doubts))
    return attempt


class _Entries(NamedTuple):
    """The places of the steps and of the ends of the run: offsets in bytes, ascending, and which of
    them are steps."""

    at: np.ndarray
    is_step: np.ndarray


def _entries(log_format: "Format", log: Log, record: Record) -> _Entries:
    """Returns where the record's steps and the ends of a run stand in the log."""
    steps = record.steps["at"][np.isfinite(record.steps["at"])]
    offsets = np.concatenate([steps, log.places(log_format.ends)]).astype(int)
    order = np.argsort(offsets, kind="stable")
    return _Entries(offsets[order], order < len(steps))


def _begins(log_format: "Format", log: Log, record: Record) -> list[int]:
    """Returns the offsets at which each attempt but the first begins: behind the last entry before
    it."""
    entries, is_step = _entries(log_format, log, record)
    if len(entries) < 2:
        return []
    firsts = np.searchsorted(entries, _starts(log_format, log, *entries[[0, -1]]))
    firsts = np.append(firsts, np.flatnonzero(is_step[1:] & ~is_step[:-1]) + 1)
    steps = record.steps[["at", "iteration"]][np.isfinite(record.steps["at"])]
    if len(steps) and not log_format.counts_per_epoch:
        iteration = steps["iteration"]
        restarts = np.flatnonzero((iteration[1:] <= iteration[0]) & (np.diff(iteration) < 0)) + 1
        firsts = np.append(firsts, np.searchsorted(entries, steps["at"][restarts]))
    begins = []
    for index in np.unique(firsts[(firsts > 0) & (firsts < len(entries))]).astype(int):
        begins.append(_behind_entry(log_format, log, *entries[index - 1 : index + 1].tolist()))
    return begins


def _behind_entry(log_format: "Format", log: Log, entry: int, following: int) -> int:
    """Returns the offset behind the entry that begins at `entry`: behind its line, and, where its
    values have lines of their own, behind the last of these before the program starts again.
    following: where the next entry begins."""
    starts = log.places(log_format.starts, entry, following)
    text = log.slice(entry, starts[0] if starts else following)
    # What begins an entry has groups, as that of its iteration; what begins a value has none.
    values = [
        match.start()
        for line in log_format.lines
        for match in line.start.finditer(text)
        if match.lastgroup is None
    ]
    last_line = entry + max(values, default=0)
    end_of_line = log.slice(last_line, following).find(b"\n") + 1
    return last_line + end_of_line if end_of_line else following


def _failed_starts(log_format: "Format", log: Log, first: int) -> list[int]:
    """Returns where each attempt ended that failed before its first step: the offsets behind a
    failure's line, where the program starts again later. first: the offset of the log's first
    entry."""
    places = log.places(log_format.starts, end=first)
    failures = set()
    for mark in log_format.starts:  # between two different ones it is one start that goes on
        of_mark = [at for at in places if log.slice(at, at + len(mark)) == mark]
        for start, following in pairwise(of_mark):
            if sign := find_sign(log.slice(start, following)):
                line = log.slice(start + sign.at, following)
                failures.add(start + sign.at + line.find(b"\n") + 1)
    return sorted(failures)


def _starts(log_format: "Format", log: Log, start: int, end: int) -> list[int]:
    """Returns the offsets in [start, end) at which the program starts. A rank that prints no start
    before the first entry, where others do, is late; its line begins no attempt."""
    starts = log.places(log_format.starts, start, end)
    ranks = {at: rank_of(log, at) for at in starts}
    header_starts = log.places(log_format.starts, 0, start) if any(ranks.values()) else []
    early_ranks = {rank_of(log, at) for at in header_starts}
    return [at for at in starts if not (early_ranks and ranks[at]) or ranks[at] in early_ranks]
