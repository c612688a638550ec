"""What each stage and rank did when, as a trace that Perfetto and Chrome open. Torch-free.

A trace is JSON in Google's Trace Event Format, gzipped: an object whose `traceEvents` are complete
events (`ph` X; `ts` and `dur` in microseconds, here to the nanosecond) and names (`ph` M). A
process is a pipeline stage. Its thread 0 is the simulated stage, thread r + 1 is rank r. On one
thread no two events overlap. `otherData` says what the trace is of.

A run with `--breakdown` writes breakdown/trace_rank<r>.json.gz (parallel/measure/traced_steps.py);
analysis puts the ranks and a simulation into one file.
"""

import gzip
import json
import math
import os
import zlib
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

from base.errors import UsageError
from base.files import check_file
from base.storage import publish, sync
from parallel.record.schema import CATEGORIES

TRACE_VERSION = "1"
MARK = '"otherData":{"schema_version"'  # in the first bytes of every trace of ours
_MOST_BYTES = 1 << 28  # of a trace, inflated; a step of a rank has some kilobytes
# What an interval is, as the breakdown's categories are; `pp` is send and receive here. The weight
# gradients are apart from `backward` in schedules that split it.
KINDS = (
    *("forward", "backward", "weight gradients", "optimizer", "send", "receive", "bubble"),
    *(name for name in CATEGORIES if name not in ("forward", "backward", "optimizer", "bubble")),
)
COMPUTE = ("forward", "backward", "weight gradients")


class Interval(NamedTuple):
    """One thing that a stage did, or waited for, from start_s to end_s.

    micro: the micro-batch from 0; None for what belongs to none. Of an interleaved run as a rank
    recorded it, the how-manieth forward or backward of the step. chunk: the stage's model chunk.
    rank: whose it is; None where it was simulated. step: the optimizer step that was measured.
    """

    stage: int
    kind: str
    micro: int | None
    start_s: float
    end_s: float
    chunk: int = 0
    rank: int | None = None
    step: int | None = None


def file_of(folder: Path, rank: int) -> Path:
    """Where a run's rank has its trace."""
    return Path(folder) / "breakdown" / f"trace_rank{rank}.json.gz"


def write(path: Path, intervals: Iterable[Interval], about: dict[str, Any]) -> None:
    """Write a trace. `about` becomes its `otherData`.

    Raises:
        OSError: as the disk has it.
        ValueError: the file's name does not say that it is gzip.
    """
    if path.suffix != ".gz":
        raise ValueError("the trace is gzip, so its name must end in .json.gz")
    content = {
        "displayTimeUnit": "ms",
        "otherData": {"schema_version": TRACE_VERSION} | about,
        "traceEvents": events(intervals),
    }
    aside = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        text = json.dumps(content, allow_nan=False, separators=(",", ":"))
        aside.write_bytes(gzip.compress(text.encode(), mtime=0))
        sync(aside)
        publish(aside, path)
    finally:
        aside.unlink(missing_ok=True)


def events(intervals: Iterable[Interval]) -> list[dict[str, Any]]:
    """The events of a trace: the names of processes and threads, then the intervals by time."""
    found, threads = [], set()
    for one in intervals:
        start_ns, end_ns = round(one.start_s * 1e9), round(one.end_s * 1e9)
        if end_ns <= start_ns:
            continue
        thread = 0 if one.rank is None else one.rank + 1
        threads.add((one.stage, thread))
        args = {"micro_batch": one.micro, "chunk": one.chunk, "step": one.step}
        if one.kind != "bubble":
            args["stream"] = thread  # HolisticTraceAnalysis: busy; what has none is idle
        found.append(
            {
                "ph": "X",
                "name": one.kind if one.micro is None else f"{one.kind} {one.micro}",
                "cat": one.kind,
                "pid": one.stage,
                "tid": thread,
                "ts": start_ns / 1000,
                "dur": (end_ns - start_ns) / 1000,
                "args": {key: value for key, value in args.items() if value is not None},
            }
        )
    names = [("process", stage, 0, f"stage {stage}") for stage in sorted({s for s, _ in threads})]
    for stage, thread in sorted(threads):
        names.append(("thread", stage, thread, f"rank {thread - 1}" if thread else "simulated"))
    head = []
    for what, pid, tid, name in names:
        place = {"ph": "M", "pid": pid, "tid": tid}
        head.append(place | {"name": f"{what}_name", "args": {"name": name}})
        order = {"sort_index": pid if what == "process" else tid}
        head.append(place | {"name": f"{what}_sort_index", "args": order})
    return head + sorted(found, key=lambda e: (e["ts"], e["pid"], e["tid"]))


def read(path: Path) -> tuple[list[Interval], dict[str, Any]]:
    """The intervals of a trace that `write` wrote, and what it is about.

    Raises:
        UsageError: there is none, or it is damaged; it names the file.
    """
    try:
        with gzip.open(check_file(path)) as file:
            text = file.read(_MOST_BYTES + 1)
        if len(text) > _MOST_BYTES:
            raise ValueError(f"it inflates to more than {_MOST_BYTES >> 20} MiB")
        content = json.loads(text)
        about = content["otherData"]
        if about["schema_version"] != TRACE_VERSION:
            raise ValueError(f"schema_version {about['schema_version']!r} is not known")
        complete = [event for event in content["traceEvents"] if event["ph"] == "X"]
        return [_interval(event) for event in complete], about
    except FileNotFoundError as error:
        raise UsageError(f"{path}: no such file") from error
    except (OSError, EOFError, zlib.error, ValueError, KeyError, TypeError) as error:
        raise UsageError(f"{path} is damaged: {type(error).__name__}: {error}") from error


def _interval(event: dict[str, Any]) -> Interval:
    start_us, dur_us = float(event["ts"]), float(event["dur"])
    if not (math.isfinite(start_us) and math.isfinite(dur_us) and dur_us > 0):
        raise ValueError(f"an event from {start_us} for {dur_us}")
    if event["cat"] not in KINDS:
        raise ValueError(f"an event of kind {event['cat']!r:.40}")
    args, thread = event["args"], int(event["tid"])
    return Interval(
        int(event["pid"]),
        event["cat"],
        args.get("micro_batch"),
        start_us / 1e6,
        (start_us + dur_us) / 1e6,
        int(args.get("chunk", 0)),
        thread - 1 if thread else None,
        args.get("step"),
    )
