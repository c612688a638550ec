"""torch.profiler's trace in Chrome's trace event format, as `nsys stats`' tables.

Complete events (`ph` X, times in microseconds) of category user_annotation are ranges: our
train/forward, a collective's gloo:all_reduce; kernel is a GPU kernel, cpu_op an operator on the
host. An operator's own time, without the operators that it calls, is what adds up, so that is what
`cpu_op_sum` holds. ProfilerStep#n ranges are the profiled steps themselves.
"""

import json
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from analysis.logs.parsing.packed import open_log
from analysis.logs.readers.nsys import Row
from analysis.logs.record import Refusal

FORMAT = "torch trace"
_STEP = "ProfilerStep#"


@dataclass
class Trace:
    """tables: report name -> rows. rank: whose it is. steps, profiled_s: how many, how long."""

    tables: dict[str, list[Row]]
    rank: int | None
    steps: int
    profiled_s: float


def read_trace(path: Path) -> Trace:
    """Read one trace, plain or gzipped.

    Raises:
        Refusal: cut off, too large, not JSON, or no trace.
    """
    try:
        with open_log(path) as file:
            content = json.load(file)
    except Refusal:
        raise
    except (ValueError, RecursionError) as error:
        raise Refusal(str(path), f"truncated or no JSON: {error}") from error
    events = content.get("traceEvents") if isinstance(content, dict) else None
    if not isinstance(events, list):
        raise Refusal(str(path), "no torch trace: it has no traceEvents")
    complete = [e for e in events if isinstance(e, dict) and e.get("ph") == "X" and "dur" in e]
    if not complete:
        raise Refusal(str(path), "a torch trace that holds no events")
    for event in complete:
        if problem := _problem(event):
            raise Refusal(str(path), f"damaged torch trace: an event's {problem}")
    about = content.get("distributedInfo")
    rank = about.get("rank") if isinstance(about, dict) else None
    ranges = [e for e in complete if e.get("cat") == "user_annotation"]
    steps = [e for e in ranges if e["name"].startswith(_STEP)]
    ranges = [e for e in ranges if not e["name"].startswith(_STEP)]
    kernels = [e for e in complete if e.get("cat") == "kernel"]
    tables = {
        "nvtx_sum": _summed(_covered(ranges), "Range"),
        "cuda_gpu_kern_sum": _summed(((e["name"], e["dur"]) for e in kernels), "Name"),
        "cpu_op_sum": _summed(_own_times(complete), "Name"),
    }
    return Trace(
        {name: table for name, table in tables.items() if table},
        rank if isinstance(rank, int) else None,
        len(steps),
        sum(e["dur"] for e in steps) / 1e6,
    )


def _problem(event: dict[str, Any]) -> str:
    """Which value of an event is none that the profiler writes, or ""."""
    time, text = (int, float), (int, str, type(None))
    kinds = {
        "ts": time,
        "dur": time,
        "name": str,
        "cat": (str, type(None)),
        "pid": text,
        "tid": text,
    }
    for key, kind in kinds.items():
        value = event.get(key)
        fits = isinstance(value, kind) and not isinstance(value, bool)
        if not fits or (kind is time and not 0 <= value < 1e18):  # microseconds
            return f"{key} is {ascii(value):.40}"
    return ""


def _summed(durations: Iterable[tuple[str, float]], heading: str) -> list[Row]:
    """Rows as `nsys stats` prints them, the longest first, from (name, microseconds)."""
    seconds: dict[str, list[float]] = defaultdict(list)
    for name, us in durations:
        seconds[name].append(us / 1e6)
    total_s = sum(map(sum, seconds.values())) or 1
    return [
        {
            "Time (%)": 100 * sum(times) / total_s,
            "Total Time (s)": sum(times),
            "Instances": float(len(times)),
            heading: name,
        }
        for name, times in sorted(seconds.items(), key=lambda item: -sum(item[1]))
    ]


def _covered(events: list[dict[str, Any]]) -> Iterator[tuple[str, float]]:
    """(name, microseconds that no earlier event of the name covers): ranges of one name that lie
    inside each other, or in several threads at once, count as the time that they cover."""
    ends: dict[str, float] = {}
    for event in sorted(events, key=lambda e: e["ts"]):
        name, end = event["name"], event["ts"] + event["dur"]
        before = ends.get(name, event["ts"])
        yield name, max(0.0, end - max(before, event["ts"]))
        ends[name] = max(before, end)


def _own_times(events: list[dict[str, Any]]) -> list[tuple[str, float]]:
    """(name, microseconds without the operators inside) of every operator on the host."""
    threads = defaultdict(list)
    for event in events:
        if event.get("cat") == "cpu_op":
            threads[event.get("pid"), event.get("tid")].append(event)
    found = []
    for thread in threads.values():
        thread.sort(key=lambda e: (e["ts"], -e["dur"]))
        open_: list[list[Any]] = []  # [end, name, own time], outermost first
        for event in thread:
            while open_ and open_[-1][0] <= event["ts"]:
                found.append(tuple(open_.pop()[1:]))
            if open_:
                open_[-1][2] -= event["dur"]
            open_.append([event["ts"] + event["dur"], event["name"], event["dur"]])
        found += [tuple(entry[1:]) for entry in open_]
    return [(name, max(own, 0.0)) for name, own in found]
