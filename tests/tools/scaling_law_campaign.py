"""Whether the intervals of the laws of scaling hold what is true: made times, fitted many times.

    python -m tests.tools.scaling_law_campaign [--trials 1000] [--seed 1]

A trial draws a law, its parameters (0 among them), 3 to 7 sizes, 1 to 5 repeats of each and a noise
of 0.5 to 5 %. It counts whether each parameter's 95 % interval holds the true value, and whether
that of the speedup at twice and four times the largest size holds what one more run there shows.
"""

import argparse
import math
import sys
from collections import Counter

import numpy as np

from analysis.common.table import Column, Table
from analysis.runs.scaling_laws import AMDAHL, GUSTAFSON, LAWS, Bounded, Law, fit

FIRST = (0.0, 0.001, 0.01, 0.05, 0.2)  # serial shares and sigmas
KAPPAS = (0.0, 1e-5, 1e-4, 1e-3)
BASE_S = 7.0


def speedup(law: Law, parameters: list[float], n: float) -> float:
    """Returns the speedup at N by the law's own formula."""
    first, *others = parameters
    if law is AMDAHL:
        return 1 / (first + (1 - first) / n)
    if law is GUSTAFSON:
        return n - first * (n - 1)
    return n / (1 + first * (n - 1) + others[0] * n * (n - 1))


def trial(chance: np.random.Generator, scaling: str, law: Law) -> dict[str, bool | None]:
    """Returns whether each interval holds the truth; None for one that is withheld."""
    sizes, repeats = 2.0 ** np.arange(chance.integers(3, 8)), chance.integers(1, 6)
    noise = chance.uniform(0.005, 0.05)
    parameters = [float(chance.choice(FIRST))]
    if len(law.parameters) > 1:
        parameters.append(float(chance.choice(KAPPAS)))

    def measured(n: float, count: int) -> np.ndarray:
        work = n if scaling == "weak" else 1.0
        seconds = BASE_S * work / speedup(law, parameters, n)
        return seconds * np.exp(noise * chance.standard_normal(count))

    found = fit(law, scaling, {n: measured(n, repeats) for n in sizes}).value
    held = {name: holds(found.parameter(i), parameters[i]) for i, name in enumerate(law.parameters)}
    for factor in (2, 4):
        n = float(sizes[-1] * factor)
        work = n if scaling == "weak" else 1.0
        seconds = measured(n, 1)[0]
        held[f"speedup, {factor} x"] = holds(found.speedup(n), BASE_S * work / seconds)
        held[f"seconds, {factor} x"] = holds(found.seconds(n), seconds)
    if found.limit:
        held["limit"] = holds(found.limit, 1 / parameters[0] if parameters[0] else math.inf)
    if found.peak:
        sigma, kappa = parameters
        held["peak"] = holds(found.peak, math.sqrt((1 - sigma) / kappa) if kappa else math.inf)
    return held


def holds(found: Bounded, truth: float) -> bool | None:
    """Tells whether the interval holds the truth; None without an interval."""
    if found.interval is None:
        return None
    return bool(found.interval.low <= truth <= found.interval.high)


def campaign(trials: int, seed: int) -> list[dict[str, object]]:
    """Returns a row for each scaling, law and quantity: how many of its intervals hold."""
    chance, counts, kept = np.random.default_rng(seed), Counter(), Counter()
    for scaling, laws in LAWS.items():
        for law in laws:
            for _ in range(trials):
                for quantity, held in trial(chance, scaling, law).items():
                    counts[scaling, law.name, quantity] += held is not None
                    kept[scaling, law.name, quantity] += held is True
    return [
        {"scaling": scaling, "law": law, "quantity": quantity, "n": n, "held": kept[key] / n}
        for key, n in counts.items()
        for scaling, law, quantity in [key]
    ]


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.tools.scaling_law_campaign")
    parser.add_argument("--trials", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=1)
    arguments = parser.parse_args(argv)
    columns = [
        *(Column(key, key) for key in ("scaling", "law", "quantity")),
        Column("n", "intervals", "d"),
        Column("held", "hold the truth", ".1%"),
    ]
    table = Table(columns, campaign(arguments.trials, arguments.seed))
    print(table.render("markdown"), end="")
    return 0


if __name__ == "__main__":
    sys.exit(main())
