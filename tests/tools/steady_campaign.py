"""How often a steady run is called changing or periodic, and how often a change is found; how often
its ranks or steps are called slow, and how often slow ones are named with their cause.

    python tests/tools/steady_campaign.py [--runs 1000]

Made runs of 20 to 1,000 steps of 1 s have 2 % of noise: white; AR 0.6 (its next step has so much of
the last one's); heavy-tailed (Student's t of 3 degrees of freedom, scaled to that spread); or white
with an outlier of 5 to 50 spreads in every fiftieth step, by chance. Nothing else is in the clean
ones: each doubt of theirs is a false alarm. The others have one change of 3 spreads: a jump at a
place in the middle 60 %, a growth from the first step to the last, or one longer step in every
2nd to so many that eight or more are in the run (100 at most). A jump or growth is found when the
run is said to change, a period when its length is right.

The runs of the second table have the parts of their steps on 8 ranks, as torchtitan's files do: the
noise is in forward and backward, alike on all ranks, and half of it in each rank's data. In clean
ones each slow rank and each cause is a false alarm; outliers are slow steps, so no runs have them.
In the others the data of one rank take 20 % of a step longer, always; or half a step in 6 % of the
steps, by chance; or all ranks lose that in forward and backward. Steps are named where one cause
alone is told, of this part and rank, in all but 5 % of these steps and in 1 % of the others at
most. Prints Markdown tables.
"""

import math
import sys
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent
sys.path[0] = str(ROOT)

import numpy as np  # noqa: E402

from analysis.common.table import Column, Table, by_key, show  # noqa: E402
from base.errors import Parser, command_line  # noqa: E402
from parallel.measure.slow_steps import PartTimes, slow_ranks_of, slow_steps  # noqa: E402
from parallel.measure.steady_time import Steady, steady  # noqa: E402

SPREAD = 0.02  # of a step of 1 s
CHANGE = 3 * SPREAD
STEPS = (20, 50, 200, 1000)
OCCURRENCES = 8  # long steps that a run with a period has, at least
LONGEST = 100  # period


def noise(kind: str, n: int, rng: np.random.Generator) -> np.ndarray:
    """Returns n values of noise, whose robust standard deviation is 1."""
    values = rng.standard_t(3, size=n) / 1.134 if kind == "heavy-tailed" else rng.normal(size=n)
    if kind == "AR 0.6":
        for i in range(1, n):
            values[i] = 0.6 * values[i - 1] + math.sqrt(1 - 0.6**2) * values[i]
    if kind == "outliers":
        values += (rng.random(n) < 0.02) * rng.uniform(5, 50, n)
    return values


def _jump(n: int, rng: np.random.Generator) -> np.ndarray:
    return CHANGE * (np.arange(n) >= rng.uniform(0.2, 0.8) * n)


def _shares(kind: str, n: int, runs: int) -> dict[str, float]:
    """Returns a row's shares of `runs` runs."""
    rng = np.random.default_rng([n, len(kind)])

    def made(change: np.ndarray | float = 0.0) -> Steady:
        time = steady(1 + SPREAD * noise(kind, n, rng) + change)
        assert time is not None
        return time

    def found(change: Callable[[], np.ndarray]) -> float:
        return sum(made(change()).change is not None for _ in range(runs)) / runs

    clean = [made() for _ in range(runs)]
    shares = {"false_change": sum(run.change is not None for run in clean) / runs}
    shares["false_period"] = sum(run.period is not None for run in clean) / runs
    shares["jump"] = found(lambda: _jump(n, rng))
    shares["growth"] = found(lambda: np.linspace(0, CHANGE, n))
    shares["period"] = 0.0
    for _ in range(runs):
        every = int(rng.integers(2, min(LONGEST, n // OCCURRENCES) + 1))
        period = made(CHANGE * (np.arange(n) % every == rng.integers(every))).period
        shares["period"] += (period is not None and period.every == every) / runs
    return shares


def rows(runs: int, lengths: tuple[int, ...] = STEPS) -> list[dict[str, object]]:
    """Returns a row for each kind of noise and length: shares of `runs` runs."""
    found = []
    for kind in ("white", "AR 0.6", "heavy-tailed", "outliers"):
        for n in lengths:
            row: dict[str, object] = {"noise": kind, "n": n}
            found.append(row | _shares(kind, n, runs))
    return found


RANKS = 8
MIXED = "forward and backward"


def _parts(kind: str, n: int, rng: np.random.Generator) -> dict[str, np.ndarray]:
    """Returns the seconds of a clean run's parts, (ranks, steps)."""
    data_s = [0.02 + SPREAD / 2 * np.abs(noise(kind, n, rng)) for _ in range(RANKS)]
    return {"data": np.array(data_s), MIXED: np.tile(1 + SPREAD * noise(kind, n, rng), (RANKS, 1))}


def _times(parts: dict[str, np.ndarray]) -> PartTimes:
    """Returns the times of these parts. A step ends when the rank that is last is done."""
    n = parts["data"].shape[1]
    step_s = np.tile(np.max(sum(parts.values()), axis=0), (RANKS, 1))
    return PartTimes(np.arange(1.0, n + 1), step_s, parts, tuple(range(RANKS)), ("",) * RANKS)


def _cause_shares(kind: str, n: int, runs: int) -> dict[str, float]:
    """Returns a row's shares of `runs` runs."""
    rng = np.random.default_rng([n, len(kind), RANKS])
    shares = dict.fromkeys(("false_rank", "false_cause", "rank", "steps_rank", "steps_all"), 0.0)
    for _ in range(runs):
        clean = _times(_parts(kind, n, rng))
        shares["false_rank"] += bool(slow_ranks_of(clean)) / runs
        shares["false_cause"] += any(steps.part for steps in slow_steps(clean)) / runs
        rank = int(rng.integers(RANKS))
        parts = _parts(kind, n, rng)
        parts["data"][rank] += 0.2
        found = [(verdict.kind, verdict.rank) for verdict in slow_ranks_of(_times(parts))]
        shares["rank"] += (found == [("data", rank)]) / runs
        late = {*(3 + rng.choice(n - 3, max(1, round(0.06 * n)), replace=False)).tolist()}
        for name, part, ranks in (("steps_rank", "data", (rank,)), ("steps_all", MIXED, ())):
            parts = _parts(kind, n, rng)
            parts[part][np.ix_(ranks or range(RANKS), sorted(late))] += 0.5
            causes = slow_steps(_times(parts))
            if [(steps.part, steps.ranks) for steps in causes] == [(part, ranks)]:
                told = {number - 1 for number in causes[0].iterations}
                shares[name] += (
                    len(late - told) <= 0.05 * len(late) and len(told - late) <= 0.01 * n
                ) / runs
    return shares


def cause_rows(runs: int, lengths: tuple[int, ...] = STEPS) -> list[dict[str, object]]:
    """Returns a row for each kind of noise and length: shares of `runs` runs."""
    kinds = ("white", "AR 0.6", "heavy-tailed")
    return [
        {"noise": kind, "n": n} | _cause_shares(kind, n, runs) for kind in kinds for n in lengths
    ]


@command_line("tests.tools.steady_campaign")
def main(argv: list[str] | None = None) -> int:
    parser = Parser(prog="python tests/tools/steady_campaign.py", description=__doc__)
    parser.add_argument("--runs", type=int, default=1000, help="runs of each kind ")
    options = parser.parse_args(argv)
    columns = [*by_key(("noise",)), Column("n", "steps", "d")]
    columns.append(Column("false_change", "false: changes", ".1%"))
    columns.append(Column("false_period", "false: period", ".1%"))
    columns += by_key(("jump", "growth", "period"), ".1%")
    causes = [*columns[:2], Column("false_rank", "false: slow rank", ".1%")]
    causes += [Column("false_cause", "false: cause of slow steps", ".1%")]
    causes += [Column("rank", "slow data of a rank", ".1%")]
    causes += [Column("steps_rank", "slow steps, its data", ".1%")]
    causes += [Column("steps_all", "slow steps, all ranks", ".1%")]
    tables = [Table(columns, rows(options.runs)), Table(causes, cause_rows(options.runs))]
    show(tables, "markdown")
    return 0


if __name__ == "__main__":
    sys.exit(main())
