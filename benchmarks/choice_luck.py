"""How much of the Ultra-Scale sweep no planner can know, from its runs that differ by ZeRO alone.

    python benchmarks/choice_luck.py [--draws N] [--seed N]

Twins are two runs that differ by nothing but ZeRO stage 0 or 1. Prints two Markdown tables:

- twins: how far their times are from each other, beside what the time model says of the same runs,
  and the error of a prediction that takes a run's twin for it (times the ratio that the model
  predicts of the two);
- luck: how much slower than the best the first choice would be of a planner that knows the
  undisturbed time of each layout: the predicted ones are taken for it. Each run is slowed by
  chance. Without a pipeline: half of the time not at all, half of it as much as a pair of twins of
  as many GPUs was apart. In a pipeline: as a random run of one on as many GPUs, by what it took
  longer than predicted, if that was more than 1.7 times.
"""

import argparse
import sys
from pathlib import Path

sys.path[0] = str(Path(__file__).resolve().parent.parent)

import numpy as np  # noqa: E402

from analysis.common.table import Column, Table  # noqa: E402
from analysis.planner.choice import groups_of  # noqa: E402
from analysis.planner.ranking import MARGIN, to_measure  # noqa: E402
from analysis.planner.rows import Rows  # noqa: E402
from analysis.planner.scores import CHOICES, rows_of  # noqa: E402
from analysis.planner.validate import fits_in_memory, validate_time  # noqa: E402
from base.bounds import check_flags  # noqa: E402
from base.errors import Parser, command_line  # noqa: E402

FAR = 1.7  # times: twins of which one stalled


def kind(rows: Rows, i: int) -> tuple[int, bool]:
    """Runs of a kind are slowed alike: its number of GPUs, and whether it is a pipeline."""
    return int(rows.x.gpus[i]), bool(rows.x.pp[i] > 1)


def twins(rows: Rows, index: np.ndarray) -> np.ndarray:
    """Pairs of rows that differ by the ZeRO stage alone, int (pairs, 2)."""
    found: dict[tuple, list[int]] = {}
    names = ("hidden", "layers", "gpus", "tp", "pp", "dp", "micro_batch", "n_micro")
    for i in index:
        found.setdefault(tuple(int(getattr(rows.x, name)[i]) for name in names), []).append(i)
    return np.array([pair for pair in found.values() if len(pair) == 2])


def apart(rows: Rows, pairs: np.ndarray, predicted: np.ndarray) -> np.ndarray:
    """Log of how much longer the first twin took than the second, beyond what is predicted."""
    first, second = np.log(rows.measured / predicted)[pairs].T
    return first - second


def twin_table(rows: Rows, pairs: np.ndarray, predicted: np.ndarray) -> Table:
    """Twins by number of GPUs and kind."""
    error, differ = np.abs(predicted / rows.measured - 1), apart(rows, pairs, predicted)
    kinds = np.array([kind(rows, i) for i in pairs[:, 0]])
    found = []
    for gpus, piped in [*sorted({kind(rows, i) for i in pairs[:, 0]}), (0, False)]:
        here = (kinds == (gpus, piped)).all(axis=1) if gpus else np.ones(len(pairs), bool)
        by_twin = np.abs(np.exp(np.concatenate([differ[here], -differ[here]])) - 1)
        found.append(
            {
                "gpus": gpus or "all",
                "kind": ("pipelines" if piped else "no pipeline") if gpus else "",
                "pairs": int(here.sum()),
                "far": float(np.mean(np.abs(differ[here]) > np.log(FAR))),
                "median": float(np.median(by_twin)),
                "mape": float(np.mean(by_twin)),
                "model": float(np.mean(error[pairs[here]])),
            }
        )
    columns = [
        Column("gpus", "GPUs", "d"),
        Column("kind", "runs"),
        Column("pairs", "twins", "d"),
        Column("far", f"more than {FAR} times apart", ".0%"),
        Column("median", "a run predicted by its twin: median error", ".1%"),
        Column("mape", "MAPE", ".0%"),
        Column("model", "by the time model without a run: MAPE", ".0%"),
    ]
    return Table(columns, found, title="Twins")


def luck_table(
    rows: Rows, index: np.ndarray, pairs: np.ndarray, predicted: np.ndarray, draws: int, seed: int
) -> Table:
    """What the first choice costs by group, as measured and by chance alone."""
    slowed: dict[tuple[int, bool], list[float]] = {}  # logs
    for i, by in zip(pairs[:, 0], np.abs(apart(rows, pairs, predicted)), strict=True):
        if not kind(rows, i)[1]:
            slowed.setdefault(kind(rows, i), []).extend([0.0, float(by)])
    for i in index[rows.x.pp[index] > 1]:
        by = float(np.log(rows.measured[i] / predicted[i]))
        slowed.setdefault(kind(rows, i), []).append(by if by > np.log(FAR) else 0.0)
    fits, chance = fits_in_memory(rows, MARGIN), np.random.default_rng(seed)
    found, first, three = [], [], []
    for group in groups_of(rows, index):
        undisturbed, refused = group.of(predicted), group.of(~fits) > 0
        order = np.lexsort([undisturbed, refused])
        draw = [chance.choice(slowed[kind(rows, int(runs[0]))], draws) for runs in group.runs]
        seconds = undisturbed * np.exp(np.stack(draw, axis=1))  # (draws, layouts)
        best = seconds.min(axis=1)
        first.append(seconds[:, order[0]] / best - 1)
        measured = order[to_measure(group.tp[order], group.pp[order])]
        three.append(seconds[:, measured].min(axis=1) / best - 1)
        i, regret = int(group.runs[0][0]), group.regret(order)
        gpus, wide = int(rows.x.gpus[i]), int(rows.x.hidden[i])
        found.append({"hidden": wide, "gpus": gpus, "measured": regret[0], "three": regret[1]})
        found[-1] |= {"luck": float(np.mean(first[-1])), "luck_three": float(np.mean(three[-1]))}
    found.sort(key=lambda row: (row["hidden"], row["gpus"]))
    keys = ("measured", "three", "luck", "luck_three")
    found.append({"hidden": "all"} | {key: np.mean([row[key] for row in found]) for key in keys})
    sweeps = np.mean(first, axis=0)
    tenth = np.quantile(first, 0.9, axis=0)
    notes = [
        f"of {draws} sweeps drawn by chance, {np.mean(sweeps <= 0.1):.0%} have a mean of 10 % or"
        f" less, half {np.median(sweeps):.1%} or less; {np.mean(tenth <= 0.25):.0%} have a 90th"
        f" percentile of 25 % or less; {np.mean(np.mean(three, axis=0) <= 0.03):.0%} a best of"
        " three of 3 % or less"
    ]
    columns = [
        Column("hidden", "hidden", "d"),
        Column("gpus", "GPUs", "d"),
        Column("measured", "first choice slower than the best, measured", ".1%"),
        Column("three", "best of three", ".1%"),
        Column("luck", "by chance alone: first choice", ".1%"),
        Column("luck_three", "best of three", ".1%"),
    ]
    return Table(columns, found, title="Luck", notes=notes)


@command_line("choice_luck")
def main(argv: list[str] | None = None) -> int:
    """Print the two tables."""
    parser = Parser(
        prog="python benchmarks/choice_luck.py",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--draws", type=int, default=2000, metavar="N", help="sweeps to draw")
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="of the draws")
    given = parser.parse_args(argv)
    check_flags(given, draws=(1, 10**5), seed=(0, 2**32))
    rows = rows_of(CHOICES[0])
    tried = validate_time(rows, 0, "random")
    index, predicted = np.flatnonzero(tried.scored), tried.predicted
    pairs = twins(rows, index)
    for table in (
        twin_table(rows, pairs, predicted),
        luck_table(rows, index, pairs, predicted, given.draws, given.seed),
    ):
        print(table.render("markdown"))
    return 0


if __name__ == "__main__":
    sys.exit(main())
