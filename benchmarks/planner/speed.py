"""Measures how many layouts a second the planner makes, prices and ranks on one core.

    python -m benchmarks.planner.speed > logs/2-core-cpu/plan_speed.md

Each plan is made, predicted and sorted as `analysis.plan` does it, in turns, on one core of this
machine. Prints the layouts of each plan and the medians of layouts a second:
of the time model alone, of time, memory and ranking together, and with the making of the layouts.
It is the process' CPU time; the load average stands below.
"""

import os
import statistics
import sys
import time

from analysis.common.table import Column, Table, show
from analysis.plan import Question, add_flags, question
from analysis.planner import ranking
from analysis.planner.space import space
from base.errors import Parser, command_line

ROUNDS = 9
PLANS = {
    "175B on 512 A100s": "--preset 175b --cluster selene --gpus 512 --global-batch 1536",
    "1T on 10,000 A100s": "--preset 1t --cluster selene --gpus 10000 --leave 16"
    " --global-batch 9984",
    "Llama 3 70B on 72 GB200s": "--preset llama3-70b --gpu-type GB200 --gpus-per-node 4 --gpus 72"
    " --global-batch 1152",
}
COLUMNS = (
    Column("plan", "plan"),
    Column("layouts", "layouts", ",d"),
    Column("time", "time: layouts/s", ",.0f"),
    Column("ranked", "time, memory and ranking: layouts/s", ",.0f"),
    Column("made", "with making them: layouts/s", ",.0f"),
)


def rates(ask: Question) -> dict[str, float]:
    """Returns the layouts of a plan, and how many of them a second."""
    begin = time.process_time()
    steps = space(ask.config, ask.cluster, ask.gpus, ask.global_batch, **ask.settings)
    made = time.process_time()
    ranking.rank(steps, ask.cluster, ask.margin)
    ranked = time.process_time()
    ask.cluster.fit.seconds(steps, ask.cluster.machine())
    timed_s = time.process_time() - ranked
    seconds = {"time": timed_s, "ranked": ranked - made, "made": ranked - begin}
    return {"layouts": len(steps)} | {name: len(steps) / s for name, s in seconds.items()}


@command_line("speed")
def main(argv: list[str] | None = None) -> int:
    Parser(description=__doc__).parse_args(argv)
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    flags = Parser()
    add_flags(flags)
    asks = {name: question(flags.parse_args(words.split())) for name, words in PLANS.items()}
    rounds = [{name: rates(ask) for name, ask in asks.items()} for _ in range(ROUNDS + 1)][1:]
    rows = [
        {"plan": name} | {k: statistics.median(r[name][k] for r in rounds) for k in rounds[0][name]}
        for name in PLANS
    ]
    note = "one core, {} rounds; load average {:.1f}, {:.1f}, {:.1f}".format(
        ROUNDS, *os.getloadavg()
    )
    show([Table(COLUMNS, rows, notes=[note])], "markdown")
    return 0


if __name__ == "__main__":
    sys.exit(main())
