"""Finds the line of a log that proves how a run failed. parallel/record/ends.py has the words that
say out of memory, a lost node and the like."""

import os
import re
from collections.abc import Callable, Sequence
from itertools import chain

from analysis.logs.parsing.fields import plain
from analysis.logs.parsing.logfile import LONGEST_LINE, Log
from analysis.logs.record import Failure, Record
from parallel.record.ends import Sign, exit_sign, find_sign, line_of
from parallel.record.first_place import Place, place_of

_LAUNCHER = re.compile(  # but for srun's word on tasks, which follows from something else
    rb"(?:^|(?<=\r))(?![^\r\n]{0,20}srun: error: [^\r\n ]{1,300}: tasks? )"
    rb"[^\r\n]{0,200}?(?:\[ERROR\]|\berror:|\bERROR:|command not found|No such file)"
    rb"[^\r\n]{0,200}",
    re.MULTILINE,
)
_NEAR = 1 << 18  # bytes at either end of a log, where ranks and nodes are named
_CONSEQUENCES = ("nccl", "cancelled", "aborted")  # often: of another rank's end
_LINES_BACK = 4  # ranks are interleaved: the failing one may print before the last iteration line


def judge_end(record: Record, log: Log, ends: Sequence[int] | None = None) -> None:
    """Sets the record's `failure` by what stands after the last step.

    ends: where the lines are that count as the last steps, if these are not the record's. A
    traceback after a completed run is noted, but no failure.
    """
    ends = record.steps["at"].astype(int) if ends is None else ends
    failure = find_failure(log, ends[-1] if len(ends) else 0)
    if failure is None and len(ends) and not record.completed:
        failure = find_failure(log, ends[-_LINES_BACK:][0])
    if failure is None and not record.completed:
        failure = _failure_beside(log)
    if failure is None and not len(ends) and not record.whole_run:
        if first := next(iter(log.matches(_LAUNCHER)), None):  # nothing was trained at all
            failure = _failure(log, "launcher", first[0] + len(first[1][0]) - 1)
    if failure is None and not record.completed:
        failure = _find(log, ends[-1] if len(ends) else 0, exit_sign)
    if failure and record.completed:
        record.note(
            f"line {failure.line_no}: {failure.kind} after the run had completed: {failure.line}"
        )
    elif failure:
        if failure.place == Place():
            failure.place = _place(failure, log)
        record.failure = failure


def _failure_beside(log: Log) -> Failure | None:
    """Returns the evidence in the run's other files, with the file's name: the first that is no
    consequence of another rank's end, if there is one."""
    failures = []
    for other in log.others():
        if failure := find_failure(other):
            failure.place = _place(failure, other, log)
            failure.line = f"{os.path.relpath(other.path, log.path.parent)}: {failure.line}"
            failures.append(failure)
    return min(failures, key=lambda failure: failure.kind in _CONSEQUENCES, default=None)


def find_failure(log: Log, start: int = 0) -> Failure | None:
    """Returns the evidence at or after `start`: a cause if there is one, else the first sign."""
    return _find(log, start, find_sign)


def _find(log: Log, start: int, sign_in: Callable[[bytes], Sign | None]) -> Failure | None:
    for offset, text in log.blocks(start, size=LONGEST_LINE):
        if sign := sign_in(text):
            failure = _failure(log, sign.kind, offset + sign.at)
            if sign.raised is not None:
                raised = _failure(log, sign.kind, offset + sign.raised)
                opening = failure.line.rstrip(":")
                failure.line = f"{opening}, line {raised.line_no}: {raised.line}"
            return failure
    return None


def _failure(log: Log, kind: str, at: int) -> Failure:
    """Returns a failure of a kind whose evidence is the line at an offset, cut to 300
    characters."""
    first = max(at - 300, 0)
    line = line_of(log.slice(first, at + 300), at - first)
    text = plain(line).replace(b"\0", b"").decode("utf-8", "replace").strip()
    return Failure(kind, log.line_no(at), text[:300])


def _place(failure: Failure, *logs: Log) -> Place:
    """Returns where the run failed first, by what its files say as they begin and as they end."""
    texts = []
    for log in chain(logs, logs[0].others()):
        head = log.begin + _NEAR
        texts += [log.slice(log.begin, head), log.slice(max(head, log.size - _NEAR), log.size)]
    return place_of(failure.kind, failure.line, b"\n".join(texts).decode("utf-8", "replace"))
