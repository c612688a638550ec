"""Saves and loads of checkpoints, as logs of any format tell them.

    saving checkpoint at iteration      50 to /out          successfully saved checkpoint ...
    time (ms) | save-checkpoint: 57514.53                   (Megatron-LM before 2022)
        save-checkpoint ...........: (24895.07, 24895.13)   (since: fastest and slowest rank)
    [2023-10-19 23:07:46,157] ... [Torch] Checkpoint global_step1 is about to be saved!
    ... Saved checkpoint out/checkpoint_best.pt (...) (writing took 37.71 seconds)       (fairseq)
    ... Finished saving the checkpoint (or staging if async is enabled)in 5.53 seconds (torchtitan)

A timer counts before the clock on the lines. A save whose log has neither has no time. The
timer of a load that found nothing to load is left out.
"""

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime

from analysis.logs.parsing.fields import number, plain
from analysis.logs.parsing.logfile import Log


@dataclass
class Event:
    """One save, load or export. Seconds and bytes are None where nothing says them.

    blocked_s: what training waited. total_s: until it was on disk; longer where saving goes on
    behind the training. problem: why it failed, where it did.
    """

    kind: str
    step: int | None = None
    blocked_s: float | None = None
    total_s: float | None = None
    bytes: float | None = None
    ranks: int | None = None
    problem: str = ""
    # While the log is read: which of _BEGIN began it, the clock at both ends, whether it has ended,
    # whether it goes on behind the training.
    began: int = -1
    start: float | None = None
    end: float | None = None
    done: bool = False
    behind: bool = False


_WORD = b"heckpoint"
_LONGEST = 2000
_BEGIN = (
    ("save", re.compile(rb"(?<![a-z] )saving checkpoint at iteration {1,8}(\d{1,9})")),
    ("save", re.compile(rb"\[Torch\] Checkpoint (?:global_step)?(\d{0,9})\S{0,80} is about to be")),
    ("save", re.compile(rb"Preparing to save checkpoint for epoch \d+ @ (\d{1,9}) updates()")),
    ("save", re.compile(rb"(?<!Finished )[Ss]aving (?:the |a full )?checkpoint\b()")),
    ("load", re.compile(rb" loading (?:release |distributed )?checkpoint from ()")),
    ("load", re.compile(rb"\[Torch\] Loading checkpoint from ()")),
    ("load", re.compile(rb"Loading the checkpoint\b()")),
)
_DONE = (
    ("save", re.compile(rb"successfully saved checkpoint (?:at|from) iteration")),
    ("save", re.compile(rb"\[Torch\] Checkpoint \S{1,80} is ready now|zero checkpoint saved ")),
    ("load", re.compile(rb"successfully loaded checkpoint from ")),
    ("load", re.compile(rb"\[Torch\] Loaded checkpoint from ")),
)
_SECONDS = rb"([\d.]{1,16})"
_SLOWEST = rb"\(?(?:[\d.]{1,16}, )?"  # of (fastest, slowest) rank
_TIMERS = (
    (None, 1e-3, re.compile(rb"(save|load)-checkpoint[ .]{0,60}: {0,4}" + _SLOWEST + _SECONDS)),
    ("save", 1.0, re.compile(rb"Saved checkpoint [^\r\n]{1,300}\(writing took ()" + _SECONDS)),
    ("save", 1.0, re.compile(rb"Finished saving the (checkpoint)[^\d\r\n]{1,60}" + _SECONDS)),
    ("load", 1.0, re.compile(rb"Finished loading the (checkpoint)[^\d\r\n]{1,60}" + _SECONDS)),
)
_BEHIND = re.compile(rb"[Aa]sync(?:hronous)? checkpoint save|staging if async is enabled")
_NOTHING = re.compile(rb"will not load any checkpoints|[Uu]nable to find latest file")
_OTHER_RANK = re.compile(rb"\A[^\r\n]{0,60}?\[?rank[-_ ]?[1-9]\d{0,5}\]?[:/]")
_CLOCK = re.compile(
    rb"(?:(\d{4})-?(\d\d)-?(\d\d)|(\d\d)/(\d\d)/(\d{4}))[ T](\d\d):(\d\d):(\d\d)(?:[.,](\d{1,6}))?"
)


def scan(log: Log) -> list[Event]:
    """Every save and load that the log tells of, in its order."""
    events: list[Event] = []
    last: dict[str, Event] = {}

    def begin(event: Event) -> None:
        last[event.kind] = event
        events.append(event)

    nothing = False  # was found to load: the timer that follows times nothing
    for line in _lines(log):
        if _OTHER_RANK.match(line):
            continue
        clock = _clock(line)
        nothing = nothing or bool(_NOTHING.search(line))
        if timer := _timer(line):
            kind, seconds = timer
            if kind == "load" and nothing:
                nothing = False
                continue
            if kind not in last or last[kind].blocked_s is not None:
                begin(Event(kind))
            last[kind].blocked_s = seconds
            last[kind].done = True
        elif beginning := _beginning(line):
            began, kind, step = beginning
            current = last.get(kind)
            if current and not current.done and current.began != began:
                current.start = current.start or clock  # another line about the same save
            elif not (kind == "load" and current and current.began == began and clock):
                begin(
                    Event(kind, step, began=began, start=clock)
                )  # but DeepSpeed loads file by file
        if _BEHIND.search(line) and "save" in last:
            last["save"].behind = True
        for kind, pattern in _DONE:
            if kind in last and pattern.search(line):
                last[kind].done = True
                last[kind].end = clock or last[kind].end
    for event in events:
        if None not in (event.start, event.end) and event.end >= event.start:
            event.total_s = event.end - event.start
        if not event.behind:
            # A sync save's timer and the clock's whole seconds are one time; the timer is exact.
            exact = event.total_s if event.blocked_s is None else event.blocked_s
            event.total_s = event.blocked_s = exact
    return events


def _timer(line: bytes) -> tuple[str, float] | None:
    """(kind, seconds) of a line that prints them."""
    for kind, unit, pattern in _TIMERS:
        if match := pattern.search(line):
            seconds = number(match[2])
            return None if math.isnan(seconds) else (kind or match[1].decode(), seconds * unit)
    return None


def _beginning(line: bytes) -> tuple[int, str, int | None] | None:
    """(which pattern, kind, step) of a line that says that one begins."""
    for began, (kind, pattern) in enumerate(_BEGIN):
        if match := pattern.search(line):
            return began, kind, int(match[1]) if match[1] else None
    return None


def _lines(log: Log) -> Iterator[bytes]:
    """The lines with the word, without colours, each once."""
    for _, block in log.blocks():
        at = block.find(_WORD)
        while at >= 0:
            begin = max(block.rfind(b"\n", 0, at), block.rfind(b"\r", 0, at)) + 1
            end = block.find(b"\n", at)
            end = len(block) if end < 0 else end
            begin = max(begin, at - _LONGEST)
            yield plain(block[begin : min(end, at + _LONGEST)])
            at = block.find(_WORD, end)


def _clock(line: bytes) -> float | None:
    """Seconds of the first date and time on a line, in no zone; only differences mean anything."""
    match = _CLOCK.search(line)
    if not match:
        return None
    year, month, day = (match[i] or match[j] for i, j in ((1, 6), (2, 4), (3, 5)))
    parts = [int(part) for part in (year, month, day, *match.group(7, 8, 9))]
    try:
        whole = datetime(*parts)
    except ValueError:
        return None
    return (whole - datetime(2000, 1, 1)).total_seconds() + float(b"0." + (match[10] or b"0"))
