"""How seconds grow with the number of GPUs beyond what is predicted; gives `fitting.GROWTH`.

    python -m benchmarks.planner.growth

A series is rows of one layout on one cluster, but for dp, over at least two doublings of the GPUs.
Of each series: the slope of log(measured / predicted without a run) over the doublings.
"""

import sys
from collections import defaultdict

import numpy as np

from analysis.common.table import Column, Table, show
from analysis.planner import fitting
from base.errors import Parser, command_line
from benchmarks.planner.held_out import SETS, rows_of, scored
from benchmarks.planner.published_rows import Rows

LAYOUT = "seq tp cp pp vpp micro_batch n_micro zero_stage recompute fp8 grad_width".split()
DOUBLINGS = 2


def slopes(rows: Rows) -> list[float]:
    """The slope of each series."""
    series = defaultdict(list)
    for i in scored(rows):
        layout = (float(getattr(rows.x, name)[i]) for name in LAYOUT)
        if rows.x.gpus[i] >= rows.x.gpus_per_node[i]:
            series[rows.cluster_key[i], *rows.model[i], *layout].append(i)
    found = []
    for index in series.values():
        x, machine = rows.x.take(np.array(index)), rows.machine.take(np.array(index))
        doublings = np.log2(x.gpus)
        if np.ptp(doublings) >= DOUBLINGS:
            fit = fitting.prior_fit(fitting.priors_of(rows.gpu[index[0]]))
            excess = np.log(rows.measured[index] / fit.seconds(x, machine))
            found.append(float(np.polyfit(doublings, excess, 1)[0]))
    return found


def table() -> Table:
    """A row for each set of rows that has series, and one for all."""
    sets = {name: found for name in SETS if (found := slopes(rows_of(name)))}
    sets["all"] = sum(sets.values(), [])
    rows = [
        {
            "set": name,
            "n": len(found),
            "middle": float(np.median(found)),
            "size": float(np.median(np.abs(found))),
        }
        for name, found in sets.items()
    ]
    columns = [
        Column("set", "published rows"),
        Column("n", "series", "d"),
        Column("middle", "median growth a doubling", "+.2%"),
        Column("size", "median of its size", ".2%"),
    ]
    return Table(columns, rows)


@command_line("growth")
def main(argv: list[str] | None = None) -> int:
    Parser(description=__doc__.split("\n")[0]).parse_args(argv)
    show([table()], "text", None)
    return 0


if __name__ == "__main__":
    sys.exit(main())
