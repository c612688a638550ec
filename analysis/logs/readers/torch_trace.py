"""torch.profiler's trace in Chrome's trace event format, as `nsys stats`' tables.

Complete events (`ph` X, times in microseconds) of category user_annotation are ranges: our
train/forward, a collective's gloo:all_reduce; kernel is a GPU kernel, cpu_op an operator on the
host. An operator's own time, without the operators that it calls, is what adds up, so that is what
`cpu_op_sum` holds. ProfilerStep#n ranges are the profiled steps themselves.
"""

from collections import defaultdict
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from analysis.logs.parsing.json_values import document, integer, mapping, real, rows
from analysis.logs.parsing.logfile import Log
from analysis.logs.readers.nsys import Row
from analysis.logs.record import Refusal

_STEP = "ProfilerStep#"


class Trace(NamedTuple):
    """What a trace holds. tables: the name of a report of `nsys stats` -> its rows. rank: the rank
    that wrote it. steps: how many steps it profiled. profiled_s: the seconds of these."""

    tables: dict[str, list[Row]]
    rank: int | None
    steps: int
    profiled_s: float


class _Event(NamedTuple):
    """A complete event, in seconds. thread: the numbers of its process and its thread."""

    begin_s: float
    seconds: float
    end_s: float
    name: str
    category: str
    thread: str


def read_trace(path: Path) -> Trace:
    """Reads one trace, plain or gzipped.

    Raises:
        Refusal: cut off, too large, not JSON, or no trace.
    """
    with Log(path) as log:
        content = document(str(path), log.text(), "torch trace")
    if not isinstance(content.get("traceEvents"), list):
        raise Refusal(str(path), "no torch trace: it has no traceEvents")
    complete = [e for e in rows(content["traceEvents"]) if e.get("ph") == "X" and "dur" in e]
    if not complete:
        raise Refusal(str(path), "a torch trace that holds no events")
    events = sorted(_event(event, path) for event in complete)
    ranges = [e for e in events if e.category == "user_annotation"]
    steps = [e.seconds for e in ranges if e.name.startswith(_STEP)]
    ranges = [e for e in ranges if not e.name.startswith(_STEP)]
    kernels = [(e.name, e.seconds) for e in events if e.category == "kernel"]
    tables = {
        "nvtx_sum": _summed(_covered(ranges), "Range"),
        "cuda_gpu_kern_sum": _summed(kernels, "Name"),
        "cpu_op_sum": _summed(_own_times(events), "Name"),
    }
    rank = integer(mapping(content.get("distributedInfo")).get("rank"))
    return Trace(tables, rank, len(steps), sum(steps))


def _event(event: dict[str, Any], path: Path) -> _Event:
    """Returns an event of the file's list.

    Raises:
        Refusal: a value is none that the profiler writes.
    """
    name, times = event.get("name"), [real(event.get(key)) for key in ("ts", "dur")]
    if not isinstance(name, str) or not all(0 <= us < 1e18 for us in times):
        values = ", ".join(f"{key} {ascii(event.get(key)):.40}" for key in ("name", "ts", "dur"))
        raise Refusal(str(path), f"damaged torch trace: an event has {values}")
    begin_us, us = times
    thread = f"{event.get('pid')} {event.get('tid')}"
    seconds = (begin_us / 1e6, us / 1e6, (begin_us + us) / 1e6)
    return _Event(*seconds, name, str(event.get("cat")), thread)


def _summed(durations: Iterable[tuple[str, float]], heading: str) -> list[Row]:
    """Returns the rows that `nsys stats` would print, one a name, that of the longest time first.
    durations: (name, seconds) of each event. heading: of the column of names."""
    times: dict[str, list[float]] = defaultdict(list)
    for name, event_s in durations:
        times[name].append(event_s)
    totals = sorted(((sum(events_s), name) for name, events_s in times.items()), reverse=True)
    percent_per_s = 100 / (sum(total_s for total_s, _ in totals) or 1)
    keys = ("Time (%)", "Total Time (s)", "Instances", heading)
    rows = [
        (percent_per_s * total_s, total_s, float(len(times[name])), name)
        for total_s, name in totals
    ]
    return [dict(zip(keys, row, strict=True)) for row in rows]


def _covered(events: list[_Event]) -> Iterator[tuple[str, float]]:
    """Yields (name, seconds that no earlier event of the name covers). So ranges of one name that
    lie inside each other, or in several threads at once, add up to the time that they cover.
    events: by the time when they begin."""
    ends: dict[str, float] = {}  # a name -> when the last of its events so far ends
    for event in events:
        covered_until_s = ends.get(event.name, event.begin_s)
        yield event.name, max(0.0, event.end_s - max(covered_until_s, event.begin_s))
        ends[event.name] = max(covered_until_s, event.end_s)


def _own_times(events: list[_Event]) -> Iterator[tuple[str, float]]:
    """Yields (name, seconds without the operators that it calls) of each operator on the host."""
    operators = [e for e in events if e.category == "cpu_op"]
    operators.sort(key=lambda operator: (operator.begin_s, -operator.seconds))
    called_s: dict[int, float] = defaultdict(float)  # an operator's number -> of those it calls
    stacks: dict[str, list[int]] = defaultdict(list)  # thread -> open operators, outermost first
    for number, event in enumerate(operators):
        stack = stacks[event.thread]
        while stack and operators[stack[-1]].end_s <= event.begin_s:
            stack.pop()
        if stack:
            called_s[stack[-1]] += event.seconds
        stack.append(number)
    for number, event in enumerate(operators):
        yield event.name, max(0.0, event.seconds - called_s[number])
