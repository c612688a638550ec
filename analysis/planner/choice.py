"""How good the first choices of a planner are, where many layouts of one model were measured.

A group is at least 5 layouts of one model, global batch and number of GPUs on one cluster. The
regret of a choice is how much slower it is than the group's fastest layout.
"""

from dataclasses import dataclass

import numpy as np

from analysis.planner.ranking import to_measure
from analysis.planner.rows import CRASHED, Rows
from parallel.config.layout_arrays import Array

LEAST = 5  # layouts of a group
NEAR = 0.05  # regret of a choice that is as good as the best


@dataclass(frozen=True)
class Group:
    """Layouts that compete. runs: the rows of each layout that repeat one run; seconds: the mean of
    their measured times."""

    runs: list[np.ndarray]
    seconds: np.ndarray
    tp: np.ndarray
    pp: np.ndarray

    def of(self, values: Array) -> np.ndarray:
        """The mean of each layout's values; `values` has an entry a row."""
        return np.array([np.mean(values[r]) for r in self.runs])

    def regret(self, order: np.ndarray) -> tuple[float, float]:
        """(regret of the first layout, of the best of three to measure) in that order."""
        slower = self.seconds / self.seconds.min() - 1
        three = order[to_measure(self.tp[order], self.pp[order])]
        return float(slower[order[0]]), float(slower[three].min())


def _question(rows: Rows, i: int) -> tuple:
    """What the layouts of row i's group have in common."""
    what = (*rows.model[i], int(rows.x.heads[i]), int(rows.x.global_batch[i]))
    return (*what, int(rows.x.gpus[i]), int(rows.x.recompute[i]), rows.cluster_key[i])


def groups_of(rows: Rows, index: np.ndarray) -> list[Group]:
    """The groups among the rows of `index`, which all have a time."""
    found: dict[tuple, dict[tuple, list[int]]] = {}
    for i in index:
        found.setdefault(_question(rows, i), {}).setdefault(rows.key(i), []).append(i)
    groups = []
    for layouts in found.values():
        if len(layouts) >= LEAST:
            runs = [np.array(g) for g in layouts.values()]
            seconds = np.array([np.mean(rows.measured[r]) for r in runs])
            first = [r[0] for r in runs]
            groups.append(Group(runs, seconds, rows.x.tp[first], rows.x.pp[first]))
    return groups


def _summary(regrets: list[tuple[float, float]]) -> dict[str, float | int | None]:
    first = [one for one, _ in regrets]
    return {
        "groups": len(regrets),
        "first": float(np.mean(first)) if regrets else None,
        "first_p90": float(np.quantile(first, 0.9)) if regrets else None,
        "near": float(np.mean(np.array(first) <= NEAR)) if regrets else None,
        "best_of_three": float(np.mean([three for _, three in regrets])) if regrets else None,
    }


def choice(
    rows: Rows, index: np.ndarray, predicted: np.ndarray, fits: np.ndarray | None = None
) -> dict[str, float | int | None]:
    """Regret of the layouts that are predicted to be fastest; those that are predicted not to fit
    come last.

    predicted: seconds, an entry a row. fits: bool, an entry a row; default: all fit.
    """
    found = []
    for group in groups_of(rows, index):
        refused = np.zeros(len(group.runs)) if fits is None else group.of(~fits) > 0
        found.append(group.regret(np.lexsort([group.of(predicted), refused])))
    return _summary(found)


def first_crashed(
    rows: Rows, index: np.ndarray, predicted: np.ndarray, fits: np.ndarray
) -> float | None:
    """The share of groups whose first choice crashed, where runs that crashed may be chosen, too;
    None where no run of the table crashed. Arrays as for `choice`."""
    crashed = np.isin(rows.status, CRASHED)
    if not crashed.any():
        return None
    found = {}
    for group in groups_of(rows, index):
        found[_question(rows, int(group.runs[0][0]))] = np.concatenate(group.runs)
    for i in np.flatnonzero(crashed):
        if (what := _question(rows, i)) in found:
            found[what] = np.append(found[what], i)
    order = np.lexsort([predicted, ~fits])
    place = np.argsort(order)
    return float(np.mean([crashed[runs[np.argmin(place[runs])]] for runs in found.values()]))


# What people do without a model, as keys to sort layouts by; the first key counts most.
def least_model_parallel(rows: Rows) -> list[Array]:
    """Least tp x pp, then least pp, then the largest micro-batch."""
    x = rows.x
    return [x.tp * x.pp * x.cp, x.pp, -x.micro_batch]


def megatrons_advice(rows: Rows) -> list[Array]:
    """tp as large as the node, then the least pp, dp with the rest (Narayanan et al. 2021, arXiv
    2104.04473, takeaways 1 and 2), then the largest micro-batch."""
    x = rows.x
    outside = x.tp > x.gpus_per_node
    return [outside, -x.tp, x.pp, -x.micro_batch]


RULES = {
    "least tp x pp that ran": least_model_parallel,
    "tp = the node, then the least pp (Megatron-LM's advice)": megatrons_advice,
}


def naive(rows: Rows, index: np.ndarray) -> dict[str, dict[str, float | int | None]]:
    """The regret of each rule of `RULES` over the same groups as `choice`."""
    found = {}
    for name, rule in RULES.items():
        keys, regrets = rule(rows), []
        for group in groups_of(rows, index):
            regrets.append(group.regret(np.lexsort([group.of(key) for key in reversed(keys)])))
        found[name] = _summary(regrets)
    return found
