"""Pipeline schedules, event by event: GPipe, 1F1B and interleaved 1F1B.

    python -m analysis.schedule --schedule 1f1b --pp 4 --micro-batches 8 [--vpp 2] [--png FILE]

Prints each stage's row (digits are forwards, letters backwards), then the stages' work, idle time
and most micro-batches held, then the makespan and the bubble (idle over ideal time) beside the
closed formula, (pp - 1) / (vpp n_micro) by Narayanan et al. SC'21 (arXiv 2104.04473), section 2.2.
Times are in units of one chunk's forward unless given.

--trace writes what https://ui.perfetto.dev opens: one process per stage with its forwards and
backwards; a gap is bubble, or a message that travels (--transfer).
"""

if not __package__:
    import as_script

import gzip
import json
import sys
from functools import partial
from pathlib import Path
from typing import Any

from analysis.common.table import Column, Table
from analysis.planner.pipeline import (
    KINDS,
    MOST_EVENTS,
    MOST_STAGES,
    SCHEDULES,
    Event,
    bubble,
    busy_s,
    draw,
    in_flight,
    makespan,
    simulate,
    text,
)
from base.bounds import Bounds, check_flags
from base.errors import Parser, UsageError, command_line, printable
from base.files import add_force_flag
from base.storage import output
from parallel.config.layout import Layout

# Columns of a picture whose columns are shorter than 1: the shortest task, where that fits.
WIDEST = 400
TRACE_MARK = '"otherData":{"schedule"'  # in the first bytes of every trace of ours


@command_line("analysis.schedule")
def main(argv: list[str] | None = None) -> int:
    """Simulate, print, draw."""
    parser = Parser(prog="python -m analysis.schedule", description=__doc__)
    add = parser.add_argument
    add("--schedule", choices=SCHEDULES, default="1f1b", help="default: 1f1b")
    count = partial(add, type=int, metavar="N")
    count("--pp", default=4, help="pipeline stages (default: 4)")
    count("--micro-batches", default=8, help="micro-batches of a step (default: 8)")
    count("--vpp", default=1, help="model chunks per stage; above 1 with interleaved (default: 1)")
    ratio = partial(add, type=float, metavar="RATIO")
    ratio("--backward", default=2.0, help="a backward's time over a forward's (default: 2)")
    transfer = "a message's time between stages over a forward's (default: 0)"
    ratio("--transfer", default=0.0, help=transfer)
    add("--png", type=Path, metavar="FILE", help="draw it, too")
    traced = "write it for Perfetto, too (FILE.json.gz)"
    add("--trace", type=Path, metavar="FILE", help=traced)
    add_force_flag(parser)
    arguments = parser.parse_args(argv)
    name, pp, n = arguments.schedule, arguments.pp, arguments.micro_batches
    vpp, backward = arguments.vpp, arguments.backward
    check_flags(
        arguments,
        pp=(1, MOST_STAGES),
        micro_batches=(1, MOST_EVENTS),
        vpp=(1, MOST_EVENTS),
        backward=Bounds(0, 100, above=True),
        transfer=Bounds(0, 100),
    )
    events = simulate(name, pp, n, vpp, 1.0, backward, arguments.transfer)
    formula = Layout(pp=pp, vpp=vpp, n_micro=n).bubble
    summary = f"makespan {makespan(events):g}, bubble {bubble(events):.4f}, formula {formula:.4f}"
    written = []
    if arguments.png:
        picture = arguments.png if arguments.png.suffix else arguments.png.with_suffix(".png")
        draw(events, pp, f"{name}, pp {pp}, vpp {vpp}: {summary}", picture, arguments.force)
        written.append(picture)
    if arguments.trace:
        about = {"schedule": name, "pp": pp, "vpp": vpp, "micro_batches": n}
        about |= {"backward": backward, "transfer": arguments.transfer}
        with output(arguments.trace, TRACE_MARK, arguments.force) as file:
            if arguments.trace.suffix != ".gz":
                raise UsageError(f"{arguments.trace}: the name must end in .json.gz")
            file.write_bytes(_trace(events, about | {"unit": "a chunk's forward is 1 s"}))
        written.append(arguments.trace)
    # Printed last: a reader that goes away, as head does, ends the command.
    shortest = min(e.end - e.start for e in events)
    print(text(events, pp, min(1.0, max(shortest, makespan(events) / WIDEST))), end="")
    print(_stages(events, pp).render(), end="")
    print(summary)
    if arguments.transfer:
        print("- the formula counts no messages (--transfer)")
    for path in written:
        print(printable(str(path)))
    return 0


def _trace(events: list[Event], about: dict[str, Any]) -> bytes:
    """The tasks in Google's Trace Event Format, gzipped: complete events (`ph` X; `ts` and `dur` in
    microseconds), a process for each stage. `about` becomes its `otherData`."""
    spans = [
        {
            "ph": "X",
            "name": f"{KINDS[e.kind]} {e.micro}",
            "cat": KINDS[e.kind],
            "pid": e.stage,
            "tid": 0,
            "ts": e.start * 1e6,
            "dur": (e.end - e.start) * 1e6,
            "args": {"micro_batch": e.micro, "chunk": e.chunk},
        }
        for e in events
    ]
    names = [
        {"ph": "M", "name": "process_name", "pid": stage, "args": {"name": f"stage {stage}"}}
        for stage in sorted({e.stage for e in events})
    ]
    content = {"displayTimeUnit": "ms", "otherData": about, "traceEvents": names + spans}
    return gzip.compress(json.dumps(content, separators=(",", ":")).encode(), mtime=0)


def _stages(events: list[Event], pp: int) -> Table:
    """What each stage works, waits and holds."""
    whole, busy = makespan(events), busy_s(events)
    rows = [
        {"stage": s, "busy": busy[s], "idle": whole - busy[s], "held": in_flight(events, s)}
        for s in range(pp)
    ]
    columns = [
        Column("stage", "stage", "d"),
        Column("busy", "busy", "g"),
        Column("idle", "idle", ".6g"),
        Column("held", "most chunks held", "d"),
    ]
    return Table(columns, rows)


if __name__ == "__main__":
    sys.exit(main())
