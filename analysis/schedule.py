"""Pipeline schedules, event by event: GPipe, 1F1B and interleaved 1F1B, and their picture.

    python -m analysis.schedule --schedule 1f1b --pp 4 --micro-batches 8 [--vpp 2] [--png FILE]

Prints each stage's row (digits forward, letters backward), the makespan and the idle share, beside
the closed formula of Narayanan et al. SC'21 (arXiv 2104.04473), section 2.2: idle over ideal time
(pp - 1) / (vpp n_micro). Times are in units of one chunk's forward unless given.
"""

if not __package__:
    import as_script

import sys
from functools import partial
from pathlib import Path

from analysis.planner.pipeline import (
    MOST_EVENTS,
    MOST_STAGES,
    SCHEDULES,
    bubble,
    draw,
    makespan,
    simulate,
    text,
)
from models.bounds import Bounds, check_flags
from models.errors import Parser, command_line
from parallel.config.layout import Layout


@command_line("analysis.schedule")
def main(argv: list[str] | None = None) -> int:
    """Simulate, print, draw."""
    parser = Parser(prog="python -m analysis.schedule", description=__doc__)
    add = parser.add_argument
    add("--schedule", choices=SCHEDULES, default="1f1b", help="default: 1f1b")
    count = partial(add, type=int, metavar="N")
    count("--pp", default=4, help="pipeline stages (default: 4)")
    count("--micro-batches", default=8, help="micro-batches of a step (default: 8)")
    chunks = "model chunks per stage; above 1 with interleaved (default: 1)"
    count("--vpp", default=1, help=chunks)
    ratio = "a backward's time over a forward's (default: 2)"
    add("--backward", type=float, default=2.0, metavar="RATIO", help=ratio)
    add("--png", type=Path, metavar="FILE", help="draw it, too")
    arguments = parser.parse_args(argv)
    pp, n, vpp = arguments.pp, arguments.micro_batches, arguments.vpp
    most, backward = (1, MOST_EVENTS), Bounds(0, 100, above=True)
    check_flags(arguments, pp=(1, MOST_STAGES), micro_batches=most, vpp=most, backward=backward)
    events = simulate(arguments.schedule, pp, n, vpp, 1.0, arguments.backward)
    formula = Layout(pp=pp, vpp=vpp, n_micro=n).bubble
    said = f"makespan {makespan(events):g}, bubble {bubble(events):.4f}, formula {formula:.4f}"
    print(text(events, pp), end="")
    print(said)
    if arguments.png:
        draw(events, pp, f"{arguments.schedule}, pp {pp}, vpp {vpp}: {said}", arguments.png)
    return 0


if __name__ == "__main__":
    sys.exit(main())
