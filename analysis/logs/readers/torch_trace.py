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
    """tables: report name -> rows. rank: whose it is. steps, profiled_s: how many, how long."""

    tables: dict[str, list[Row]]
    rank: int | None
    steps: int
    profiled_s: float


class _Event(NamedTuple):
    """A complete event; seconds. thread: the process and the thread that it is of."""

    begin_s: float
    seconds: float
    end_s: float
    name: str
    category: str
    thread: str


def read_trace(path: Path) -> Trace:
    """Read one trace, plain or gzipped.

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
    """Raises: Refusal: a value is none that the profiler writes."""
    name, times = event.get("name"), [real(event.get(key)) for key in ("ts", "dur")]
    if not isinstance(name, str) or not all(0 <= us < 1e18 for us in times):
        values = ", ".join(f"{key} {ascii(event.get(key)):.40}" for key in ("name", "ts", "dur"))
        raise Refusal(str(path), f"damaged torch trace: an event has {values}")
    begin_us, us = times
    thread = f"{event.get('pid')} {event.get('tid')}"
    seconds = (begin_us / 1e6, us / 1e6, (begin_us + us) / 1e6)
    return _Event(*seconds, name, str(event.get("cat")), thread)


def _summed(durations: Iterable[tuple[str, float]], heading: str) -> list[Row]:
    """Rows as `nsys stats` prints them, the longest first, from (name, seconds)."""
    times: dict[str, list[float]] = defaultdict(list)
    for name, seconds in durations:
        times[name].append(seconds)
    totals = sorted(((sum(of_name), name) for name, of_name in times.items()), reverse=True)
    percent = 100 / (sum(total for total, _ in totals) or 1)
    keys = ("Time (%)", "Total Time (s)", "Instances", heading)
    rows = [(percent * total, total, float(len(times[name])), name) for total, name in totals]
    return [dict(zip(keys, row, strict=True)) for row in rows]


def _covered(events: list[_Event]) -> Iterator[tuple[str, float]]:
    """(name, seconds that no earlier event of the name covers): ranges of one name that lie inside
    each other, or in several threads at once, count as the time that they cover."""
    ends: dict[str, float] = {}
    for event in events:
        before = ends.get(event.name, event.begin_s)
        yield event.name, max(0.0, event.end_s - max(before, event.begin_s))
        ends[event.name] = max(before, event.end_s)


def _own_times(events: list[_Event]) -> Iterator[tuple[str, float]]:
    """(name, seconds without the operators inside) of every operator on the host."""
    operators = [e for e in events if e.category == "cpu_op"]
    operators.sort(key=lambda operator: (operator.begin_s, -operator.seconds))
    inside: dict[int, float] = defaultdict(float)  # an operator's number -> seconds
    around: dict[str, list[int]] = defaultdict(list)  # thread -> operators, outermost first
    for n, event in enumerate(operators):
        open_ = around[event.thread]
        while open_ and operators[open_[-1]].end_s <= event.begin_s:
            open_.pop()
        if open_:
            inside[open_[-1]] += event.seconds
        open_.append(n)
    for n, event in enumerate(operators):
        yield event.name, max(0.0, event.seconds - inside[n])
