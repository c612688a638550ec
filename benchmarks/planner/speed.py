"""How many layouts a second the planner makes, prices and ranks on one core.

    python -m benchmarks.planner.speed [--rounds 9] [--out FILE.md]

Each plan is made, predicted and sorted as `analysis.plan` does it, in turns, on one core of this
machine. Prints, and writes to FILE, the layouts of each plan and the medians over the rounds of
layouts a second: of the time model alone, of time, memory and ranking together, and of all of it
with the making of the layouts. The exit status is 1 when time, memory and ranking are below 100,000
layouts a second. It is the process' CPU time, which other work on the machine stretches less than
the clock's; the load average stands below.
"""

import os
import statistics
import sys
import time
from pathlib import Path

for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
    os.environ[name] = "1"  # before numpy is loaded

from analysis.common.table import Column, Table, writing  # noqa: E402
from analysis.plan import add_flags, question  # noqa: E402
from base.bounds import check_flags  # noqa: E402
from base.errors import Parser, command_line  # noqa: E402

BAR = 100_000  # layouts a second
PLANS = {
    "175B on 512 A100s": "--preset 175b --cluster selene --gpus 512 --global-batch 1536",
    "1T on 10,000 A100s": "--preset 1t --cluster selene --gpus 10000 --leave 16"
    " --global-batch 9984",
    "Llama 3 70B on 72 GB200s": "--preset llama3-70b --gpu-type GB200 --gpus-per-node 4 --gpus 72"
    " --global-batch 1152",
}
KEYS = ("time", "ranked", "made")
COLUMNS = (
    Column("plan", "plan"),
    Column("layouts", "layouts", ",d"),
    Column("time", "time: layouts/s", ",.0f"),
    Column("ranked", "time, memory and ranking: layouts/s", ",.0f"),
    Column("made", "with making them: layouts/s", ",.0f"),
)


def seconds_of(flags: str) -> tuple[int, float, float, float]:
    """(layouts of a plan; seconds of the time model alone, of ranking and of all of it)."""
    from analysis.planner import ranking
    from analysis.planner.space import space

    parser = Parser()
    add_flags(parser)
    ask = question(parser.parse_args(flags.split()))
    begin = time.process_time()
    x = space(ask.config, ask.cluster, ask.gpus, ask.global_batch, **ask.settings)
    made = time.process_time()
    ranking.rank(x, ask.cluster, ask.margin)
    ranked = time.process_time()
    ask.cluster.fit.seconds(x, ask.cluster.machine())
    return len(x), time.process_time() - ranked, ranked - made, ranked - begin


@command_line("speed")
def main(argv: list[str] | None = None) -> int:
    parser = Parser(description=__doc__.split("\n")[0])
    parser.add_argument("--rounds", type=int, default=9, metavar="N", help="default: 9")
    parser.add_argument("--out", type=Path, metavar="FILE.md", help="write the table there, too")
    arguments = parser.parse_args(argv)
    check_flags(arguments, rounds=(1, 1000))
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    found: dict[str, list[tuple[int, float, float, float]]] = {name: [] for name in PLANS}
    for _ in range(arguments.rounds + 1):
        for name, flags in PLANS.items():
            found[name].append(seconds_of(flags))
    rows = []
    for name, rounds in found.items():
        n, rates = rounds[0][0], list(zip(*rounds[1:], strict=True))[1:]  # the first warms up
        rates = (n / statistics.median(seconds) for seconds in rates)
        rows.append({"plan": name, "layouts": n} | dict(zip(KEYS, rates, strict=True)))
    load = ", ".join(f"{value:.1f}" for value in os.getloadavg())
    note = f"one core, {arguments.rounds} rounds; load average {load}"
    text = Table(COLUMNS, rows, notes=[note]).render("markdown")
    if arguments.out:
        with writing(arguments.out):
            arguments.out.write_text(text)
    print(text, end="")
    return int(min(row["ranked"] for row in rows) < BAR)


if __name__ == "__main__":
    sys.exit(main())
