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

import re
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime
from typing import NamedTuple

from analysis.logs.parsing.fields import plain
from analysis.logs.parsing.logfile import Log


@dataclass
class Event:
    """One save or load. Seconds and bytes are None where nothing says them.

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
    # While the log is read: the sign that began it, the clock at both ends, whether it has ended,
    # whether it goes on behind the training.
    sign: "_Sign | None" = None
    start: float | None = None
    end: float | None = None
    done: bool = False
    behind: bool = False


class _Sign(NamedTuple):
    """A line of a save or load: what it says, and its pattern. The pattern's group is the step of
    what begins, or the time that it took."""

    says: str  # begins, took s, took ms, ends, behind (it goes on behind training), nothing
    kind: str
    pattern: bytes


_SECONDS = rb"(\d{1,12}(?:\.\d{0,12})?)"
_TIMER = rb"-checkpoint[ .]{0,60}: {0,4}\(?(?:[\d.]{1,16}, )?" + _SECONDS  # the slowest rank
_SIGNS = (
    _Sign("begins", "save", rb"(?<![a-z] )saving checkpoint at iteration {1,8}(\d{1,9})"),
    _Sign("begins", "save", rb"\[Torch\] Checkpoint (?:global_step)?(\d{0,9})\S{0,80} is about to"),
    _Sign("begins", "save", rb"Preparing to save checkpoint for epoch \d+ @ (\d{1,9}) updates"),
    _Sign("begins", "save", rb"(?<!Finished )[Ss]aving (?:the |a full )?checkpoint\b()"),
    _Sign("begins", "load", rb"(?:\[Torch\] L| l)oading (?:\w{1,20} )?checkpoint from ()"),
    _Sign("begins", "load", rb"Loading the checkpoint\b()"),
    _Sign("took ms", "save", rb"save" + _TIMER),
    _Sign("took ms", "load", rb"load" + _TIMER),
    _Sign("took s", "save", rb"Saved checkpoint [^\r\n]{1,300}\(writing took " + _SECONDS),
    _Sign("took s", "save", rb"Finished saving the checkpoint[^\d\r\n]{1,60}" + _SECONDS),
    _Sign("took s", "load", rb"Finished loading the checkpoint[^\d\r\n]{1,60}" + _SECONDS),
    _Sign("ends", "save", rb"successfully saved checkpoint (?:at|from) iteration"),
    _Sign("ends", "save", rb"\[Torch\] Checkpoint \S{1,80} is ready now|zero checkpoint saved "),
    _Sign("ends", "load", rb"(?:successfully l|\[Torch\] L)oaded checkpoint from "),
    _Sign("behind", "save", rb"[Aa]sync(?:hronous)? checkpoint save|staging if async is enabled"),
    _Sign("nothing", "load", rb"will not load any checkpoints|[Uu]nable to find latest file"),
)
_WORD = b"heckpoint"
_LONGEST = 2000
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
        clock, signs = _clock(line), _signs(line)
        nothing = nothing or "nothing" in signs
        if took := signs.get("took s", signs.get("took ms")):
            sign, match = took
            if sign.kind == "load" and nothing:
                nothing = False
                continue
            if sign.kind not in last or last[sign.kind].blocked_s is not None:
                begin(Event(sign.kind))
            last[sign.kind].blocked_s = float(match[1]) / (1000 if sign.says == "took ms" else 1)
            last[sign.kind].done = True
        elif "begins" in signs:
            sign, match = signs["begins"]
            current = last.get(sign.kind)
            if current and not current.done and current.sign is not sign:
                current.start = current.start or clock  # another line about the same save
            elif not (current and current.sign is sign and sign.kind == "load" and clock):
                step = int(match[1]) if match[1] else None  # DeepSpeed loads file by file
                begin(Event(sign.kind, step, sign=sign, start=clock))
        if "behind" in signs and "save" in last:
            last["save"].behind = True
        if "ends" in signs and (event := last.get(signs["ends"][0].kind)):
            event.done, event.end = True, clock or event.end
    for event in events:
        if None not in (event.start, event.end) and event.end >= event.start:
            event.total_s = event.end - event.start
        if not event.behind:
            # A sync save's timer and the clock's whole seconds are one time; the timer is exact.
            exact = event.total_s if event.blocked_s is None else event.blocked_s
            event.total_s = event.blocked_s = exact
    return events


def _signs(line: bytes) -> dict[str, tuple[_Sign, re.Match[bytes]]]:
    """The first sign of each sort on a line, with its match; of another rank's line none."""
    signs: dict[str, tuple[_Sign, re.Match[bytes]]] = {}
    for sign in () if _OTHER_RANK.match(line) else _SIGNS:
        if sign.says not in signs and (match := re.search(sign.pattern, line)):
            signs[sign.says] = sign, match
    return signs


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
