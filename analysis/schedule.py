"""Pipeline schedules, event by event: GPipe, 1F1B and interleaved 1F1B.

    python -m analysis.schedule --schedule 1f1b --pp 4 --micro-batches 8 [--vpp 2]

Prints each stage's row (digits are forwards, letters backwards), then the stages' work, idle time
and most micro-batches held, then the makespan and the bubble (idle over ideal time) beside the
closed formula, (pp - 1) / (vpp n_micro) by Narayanan et al. SC'21 (arXiv 2104.04473), section 2.2.
Times are in units of one chunk's forward.
"""

if not __package__:
    import as_script

import sys
from functools import partial

from analysis.common.table import Column, Table
from analysis.planner import pipeline
from base.bounds import Bounds, check_flags
from base.errors import Parser, command_line
from parallel.config.layout import Layout

WIDEST = 400  # columns of a picture whose columns are shorter than 1
COLUMNS = (
    Column("stage", "stage", "d"),
    Column("busy", "busy", "g"),
    Column("idle", "idle", ".6g"),
    Column("held", "most chunks held", "d"),
)


@command_line("analysis.schedule")
def main(argv: list[str] | None = None) -> int:
    """Simulate, print."""
    parser = Parser(prog="python -m analysis.schedule", description=__doc__)
    add = parser.add_argument
    add("--schedule", choices=pipeline.SCHEDULES, default="1f1b", help="default: 1f1b")
    count = partial(add, type=int, metavar="N")
    count("--pp", default=4, help="pipeline stages (default: 4)")
    count("--micro-batches", default=8, help="micro-batches of a step (default: 8)")
    count("--vpp", default=1, help="model chunks per stage; above 1 with interleaved (default: 1)")
    backward = "a backward's time over a forward's (default: 2)"
    add("--backward", type=float, metavar="RATIO", default=2.0, help=backward)
    arguments = parser.parse_args(argv)
    check_flags(
        arguments,
        pp=(1, pipeline.MOST_STAGES),
        micro_batches=(1, pipeline.MOST_EVENTS),
        vpp=(1, pipeline.MOST_EVENTS),
        backward=Bounds(0, 100, above=True),
    )
    pp, vpp, n = arguments.pp, arguments.vpp, arguments.micro_batches
    events = pipeline.simulate(arguments.schedule, pp, n, vpp, backward_s=arguments.backward)
    makespan, busy = pipeline.makespan(events), pipeline.busy_s(events)
    unit = min(1.0, max(arguments.backward, makespan / WIDEST))
    print(pipeline.text(events, pp, unit), end="")
    rows = [
        {"stage": s, "busy": w, "idle": makespan - w, "held": pipeline.in_flight(events, s)}
        for s, w in sorted(busy.items())
    ]
    print(Table(COLUMNS, rows).render(), end="")
    bubble, formula = pipeline.bubble(events), Layout(pp=pp, vpp=vpp, n_micro=n).bubble
    print(f"makespan {makespan:g}, bubble {bubble:.4f}, formula {formula:.4f}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
