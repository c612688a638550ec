"""How often `analysis.compare --at-most 3%` fails a change of code, by how much slower it is.

    python -m tests.tools.gate_campaign [--trials 1000] [--steps 60]

Both sides are made: steps of one second whose noise is 5 %, independent or with 0.6 of a step's
deviation in the next one; runs differ from each other by 0 or 1 %. The seed is fixed. Prints the
Markdown table of docs/ci-gate.md: the share of trials that exit with 1 where NEW truly takes that
much longer, and of those with equal sides that exit with 2.
"""

import sys
from collections import Counter

import numpy as np

from analysis.common.table import Column, Table, show
from analysis.runs import gate
from analysis.runs.judged import Run, judged
from analysis.runs.pairs import pair_of
from base.errors import Parser, command_line
from tests.fixture_runs import logged

AT_MOST, NOISE = 0.03, 0.05
SLOWER = (0.0, 0.03, 0.06, 0.1)
NOISES = {"independent": 0.0, "AR 0.6": 0.6}
COLUMNS = [Column("noise", "noise of steps"), Column("between", "between runs", ".0%")]
COLUMNS += [Column("runs", "runs of each", "d")]
COLUMNS += [Column(f"{share:g}", f"fails at +{share:.0%}", ".1%") for share in SLOWER]
COLUMNS += [Column("unknown", "unknown", ".1%")]


def side(
    draw: np.random.Generator, mean_s: float, keeps: float, between: float, runs: int, steps: int
) -> list[Run]:
    """Returns runs of a log. keeps: how much of a step's deviation the next one has."""
    deviations = draw.standard_normal((steps + 20, runs)) * np.sqrt(1 - keeps**2)
    for at in range(1, len(deviations)):
        deviations[at] += keeps * deviations[at - 1]
    means_s = mean_s * (1 + between * draw.standard_normal(runs))
    return judged(
        [logged(n=steps, step_s=mean * (1 + NOISE * column[20:]), gpus=8, completed=True)
         for mean, column in zip(means_s, deviations.T, strict=True)]
    )  # fmt: skip


def statuses(
    slower: float, keeps: float, between: float, runs: int, steps: int, trials: int
) -> Counter[int]:
    """Returns how many trials end with each exit status."""
    draw, ends = np.random.default_rng(1), Counter()
    for _ in range(trials):
        old, new = (side(draw, s, keeps, between, runs, steps) for s in (1.0, 1.0 + slower))
        ends[gate.judge(pair_of(old, new), AT_MOST).status] += 1
    return ends


@command_line("tests.tools.gate_campaign")
def main(argv: list[str] | None = None) -> int:
    parser = Parser(prog="python -m tests.tools.gate_campaign", description=__doc__)
    for name, default in (("trials", 1000), ("steps", 60)):
        parser.add_argument(f"--{name}", type=int, default=default)
    flags = parser.parse_args(argv)
    rows = []
    for noise, keeps in NOISES.items():
        for between in (0.0, 0.01):
            for runs in (1, 3, 5):
                row = {"noise": noise, "between": between, "runs": runs}
                for slower in SLOWER:
                    ends = statuses(slower, keeps, between, runs, flags.steps, flags.trials)
                    row[f"{slower:g}"] = ends[gate.SLOWER] / flags.trials
                    if slower == 0:
                        row["unknown"] = ends[gate.UNKNOWN] / flags.trials
                rows.append(row)
    show([Table(COLUMNS, rows)], "markdown")
    return 0


if __name__ == "__main__":
    sys.exit(main())
