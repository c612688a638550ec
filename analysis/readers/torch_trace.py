"""torch.profiler's trace in Chrome's trace event format, as `nsys stats`' tables.

Complete events (`ph` X, times in microseconds) of category user_annotation are ranges: our
train/forward, a collective's gloo:all_reduce; kernel is a GPU kernel, cpu_op an operator on the
host. An operator's own time, without the operators that it calls, is what adds up, so that is what
`cpu_op_sum` holds. ProfilerStep#n ranges are the profiled steps themselves.
"""

import gzip
import json
import zlib
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from analysis.readers.nsys import Row
from analysis.readers.nsys_sqlite import rows
from analysis.records import Refusal

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
        Refusal: cut off, not JSON, or no trace.
    """
    try:
        opened = gzip.open(path, "rb") if path.suffix == ".gz" else path.open("rb")
        with opened as file:
            content = json.load(file)
    except (ValueError, EOFError, gzip.BadGzipFile, zlib.error, RecursionError) as error:
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
    tables = {
        "nvtx_sum": rows(_sums((e["name"], e["dur"]) for e in ranges), "Range", "Instances"),
        "cuda_gpu_kern_sum": rows(
            _sums((e["name"], e["dur"]) for e in complete if e.get("cat") == "kernel"),
            "Name",
            "Instances",
        ),
        "cpu_op_sum": rows(_sums(_own_times(complete)), "Name", "Instances"),
    }
    return Trace(
        {name: table for name, table in tables.items() if table},
        rank if isinstance(rank, int) else None,
        len(steps),
        sum(e["dur"] for e in steps) / 1e6,
    )


def _problem(event: dict[str, Any]) -> str:
    """Which value of an event is none that the profiler writes, or ""."""
    for key in ("ts", "dur"):
        value = event.get(key)
        number = isinstance(value, (int, float)) and not isinstance(value, bool)
        if not number or not 0 <= value < 1e18:  # microseconds
            return f"{key} is {ascii(value):.40}"
    for key, kinds in (("name", str), ("cat", (str, type(None)))):
        if not isinstance(event.get(key), kinds):
            return f"{key} is {ascii(event.get(key)):.40}"
    for key in ("pid", "tid"):
        if not isinstance(event.get(key), (int, str, type(None))):
            return f"{key} is {ascii(event.get(key)):.40}"
    return ""


def _sums(durations: Any) -> dict[str, tuple[int, float, float, float]]:
    """name -> (count, total, shortest, longest) in nanoseconds, from (name, microseconds)."""
    found: dict[str, list[float]] = defaultdict(list)
    for name, us in durations:
        found[name].append(1000 * us)
    return {name: (len(ns), sum(ns), min(ns), max(ns)) for name, ns in found.items()}


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
