"""Fit the constants of engines (analysis/planner/engines.py) to published tables again.

    python -m benchmarks.fit_engines [--out FILE.md]
    python -m benchmarks.fit_engines --check
    python -m benchmarks.fit_engines --by-eye [--out FILE.md]

All that a family of engines states is fitted at once to the tables of that family, with the
constants of each cluster at the priors of its card: predictions without a run are to be right. The
loss is soft-l1. The search starts from engines without constants of their own, so nothing depends
on what is committed, and nothing is drawn at random. Prints the constants, committed beside fitted,
and the median errors of predictions without a run: with no constants of the engine, with the
committed ones, with the fitted ones, and with those fitted on the family's other tables (its other
models, where it has one table). Tables that no fit saw stand below the others.

--check exits with 1 where a committed constant is more than a tenth (of shares also 0.02) from the
fitted one.
--by-eye prints numbers of the time model that were chosen and not fitted: the median error of the
table that each moves most, at half, once and twice its value.
"""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from analysis.common.table import Column, Table, writing
from analysis.planner import engines, fitting, timemodel
from analysis.planner.rows import Rows
from analysis.planner.scores import SETS, rows_of
from analysis.planner.timemodel import Machine
from analysis.planner.validate import validate_time
from base.errors import Parser, command_line
from models.gpus import planning_gpu
from parallel.config.layout_arrays import FAMILIES, Columns

FITTED_ON = {  # of analysis.planner.scores.SETS
    "fsdp": ["llm-foundry H100, FSDP"],
    "megatron_core": [
        "DGX H100, NeMo in bf16 and FP8",
        "MLPerf GPT-3 175B, v3.1 to v4.1",
        "DGX GB200 and H100, NeMo 25.05",
    ],
    "nanotron": ["Ultra-Scale H100, nanotron 1.34B and 8.86B"],
}
HELD_OUT = {
    "fsdp": ["llm-foundry A100, FSDP", "torchtitan H100, FSDP2"],
    "megatron_core": ["Megatron-LM H100, its own table"],
    "nanotron": [],
}
SHARES = ("overlap", "crowd")  # between 0 and 1; the others are above 0
NEAR = 0.1  # a committed constant this near its fit is that fit
LEAST = 1e-6  # of what is fitted as a logarithm
BY_EYE = {  # module -> numbers that no fit made
    timemodel: ("STALL_GPUS", "SENT", "SHOWN", "PLAIN_SOFTMAX", "HOST_SPREAD", "SHARPNESS"),
    fitting: ("NARROWER", "UNSEEN"),
}


@contextmanager
def constants_of(family: str, values: dict[str, float]) -> Iterator[None]:
    """Within it, engines of the family have these constants."""
    place = FAMILIES.index(family)
    before = {name: column[place] for name, column in engines.TABLE.items()}
    try:
        for name, value in values.items():
            engines.TABLE[name][place] = value
        yield
    finally:
        for name, value in before.items():
            engines.TABLE[name][place] = value


@dataclass(frozen=True)
class Part:
    """Rows of one cluster, which are predicted by the priors of its card."""

    x: Columns
    machine: Machine
    measured: np.ndarray
    constants: dict[str, float]

    def errors(self) -> np.ndarray:
        """log(predicted / measured)."""
        return np.log(timemodel.seconds(self.x, self.machine, self.constants) / self.measured)


def groups_of(family: str) -> dict[str, dict[str, np.ndarray]]:
    """What the family is fitted on: its tables or, of one table, its models. Each is a table's name
    and the rows of it, bool (n,), that can be scored."""
    found = {}
    for name in FITTED_ON[family]:
        rows, scored = scored_of(name, family)
        found |= {name: {name: scored}}
    if len(found) > 1:
        return found
    models = sorted({model for model, good in zip(rows.model, scored, strict=True) if good})
    same = {m: scored & np.array([model == m for model in rows.model]) for m in models}
    return {f"{name}: {m[0]} layers, hidden {m[1]}": {name: same[m]} for m in models}


@cache
def scored_of(name: str, family: str) -> tuple[Rows, np.ndarray]:
    """(a table's rows, which of them are the family's and can be scored)."""
    rows = rows_of(name)
    scored = validate_time(rows, 0, "random").scored
    return rows, scored & (rows.x.family == FAMILIES.index(family))


def parts_of(family: str, groups: list[dict[str, np.ndarray]]) -> list[Part]:
    """A part for each cluster of each group."""
    parts = []
    for name, chosen in (item for group in groups for item in group.items()):
        rows, _ = scored_of(name, family)
        keys = np.array(rows.cluster_key)
        for key in np.unique(keys[chosen]):
            i = np.flatnonzero(chosen & (keys == key))
            fit = fitting.prior_fit(fitting.priors_of(planning_gpu(rows.gpu[i[0]]).name))
            machine = rows.machine.take(i)
            parts.append(Part(rows.x.take(i), machine, rows.measured[i], fit.constants))
    return parts


def fitted(family: str, parts: list[Part]) -> dict[str, float]:
    """The constants that the family states, fitted to all parts together."""
    from scipy.optimize import least_squares

    names = list(engines.FAMILY[family])
    is_share = np.isin(names, SHARES)
    low, high = np.where(is_share, 0.0, np.log(LEAST)), np.where(is_share, 0.95, np.log(100.0))
    usual = np.array([engines.USUAL[name] for name in names])
    start = np.where(is_share, 0.5, np.log(np.maximum(usual, 1e-3)))

    def named(values: np.ndarray) -> dict[str, float]:
        found = np.where(is_share, values, np.exp(values))
        return dict(zip(names, found.tolist(), strict=True))

    def residuals(values: np.ndarray) -> np.ndarray:
        with constants_of(family, named(values)):
            return np.concatenate([part.errors() for part in parts]) / fitting.NOISE

    done = least_squares(residuals, start, bounds=(low, high), loss="soft_l1", x_scale="jac")
    return named(np.round(done.x, 6))


def median_error(parts: list[Part], family: str, values: dict[str, float]) -> float:
    """Of predictions without a run."""
    with constants_of(family, values):
        errors = [part.errors() for part in parts]
    return float(np.median(np.abs(np.expm1(np.concatenate(errors)))))


def _near(value: float, committed: float, name: str) -> bool:
    return bool(np.isclose(value, committed, rtol=NEAR, atol=0.02 if name in SHARES else 0.0))


def compared(family: str) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """(a row for each constant, a row for each group of rows)."""
    groups, committed = groups_of(family), engines.FAMILY[family]
    found = fitted(family, parts_of(family, list(groups.values())))
    constants = [
        {
            "family": family,
            "constant": name,
            "committed": committed[name],
            "fitted": value,
            "differs": "" if _near(value, committed[name], name) else "differs",
        }
        for name, value in found.items()
    ]
    none = {name: engines.USUAL[name] for name in committed}
    unseen = {name: {name: scored_of(name, family)[1]} for name in HELD_OUT[family]}
    errors = []
    for name, group in (groups | unseen).items():
        parts = parts_of(family, [group])
        row = {"rows": name, "n": sum(len(part.measured) for part in parts), "family": family}
        for key, values in (("none", none), ("committed", committed), ("fitted", found)):
            row[key] = median_error(parts, family, values)
        if name in groups:
            others = [some for other, some in groups.items() if other != name]
            row["others"] = median_error(parts, family, fitted(family, parts_of(family, others)))
        errors.append(row | {"seen": "yes" if name in groups else "no"})
    return constants, errors


def tables() -> list[Table]:
    """The constants, and the errors."""
    both = [compared(family) for family in FITTED_ON]
    first = [
        Column("family", "engines"),
        Column("constant", "constant"),
        Column("committed", "committed", ".3g"),
        Column("fitted", "fitted", ".3g"),
        Column("differs", "more than a tenth apart"),
    ]
    second = [
        Column("rows", "published rows"),
        Column("family", "engines"),
        Column("n", "n", "d"),
        Column("seen", "fitted on"),
        Column("none", "no constants of the engine: median error", ".1%"),
        Column("committed", "committed", ".1%"),
        Column("fitted", "fitted", ".1%"),
        Column("others", "fitted on the other rows", ".1%"),
    ]
    return [
        Table(first, [row for constants, _ in both for row in constants]),
        Table(second, [row for _, errors in both for row in errors]),
    ]


def scores() -> dict[str, tuple[float, float]]:
    """(median error, share inside the 80 % interval) of each set without a run."""
    found = {}
    for name in SETS:
        tried = validate_time(rows_of(name), 0, "random")
        i = np.flatnonzero(tried.scored)
        log = np.abs(np.log(tried.predicted[i] / tried.truth[i]))
        error = np.abs(tried.predicted[i] / tried.truth[i] - 1)
        inside = log <= fitting.INTERVAL * tried.spread[i]
        found[name] = float(np.median(error)), float(np.mean(inside))
    return found


def by_eye() -> Table:
    """Each number of `BY_EYE` at half, once and twice its value, on the table that it moves most:
    the median error or, of a number that only intervals have, the share inside."""
    rows, before = [], scores()
    for module, names in BY_EYE.items():
        which = int(module is fitting)
        for name in names:
            value = getattr(module, name)
            moved = []
            for factor in (0.5, 2.0):
                setattr(module, name, value * factor)
                moved.append(scores())
            setattr(module, name, value)
            at = [{k: v[which] for k, v in one.items()} for one in (moved[0], before, moved[1])]
            most = max(at[1], key=lambda k: max(abs(at[0][k] - at[1][k]), abs(at[2][k] - at[1][k])))
            said = "inside the interval" if which else "median error"
            rows.append({"name": name, "value": value, "rows": most, "what": said})
            rows[-1] |= {"half": at[0][most], "once": at[1][most], "twice": at[2][most]}
    columns = [
        Column("name", "number"),
        Column("value", "value", "g"),
        Column("rows", "moves most"),
        Column("what", "what"),
        *(
            Column(key, f"at {key}" if key != "once" else "as it is", ".1%")
            for key in ("half", "once", "twice")
        ),
    ]
    return Table(columns, rows)


@command_line("fit_engines")
def main(argv: list[str] | None = None) -> int:
    parser = Parser(description=__doc__.split("\n")[0])
    add = parser.add_argument
    add("--check", action="store_true", help="exit with 1 where a committed constant differs")
    add("--by-eye", action="store_true", help="what numbers that no fit made move")
    add("--out", type=Path, metavar="FILE.md", help="write the tables there, too")
    arguments = parser.parse_args(argv)
    made = [by_eye()] if arguments.by_eye else tables()
    text = "\n".join(table.render("markdown") for table in made)
    if arguments.out:
        with writing(arguments.out):
            arguments.out.write_text(text)
    print(text, end="")
    if not arguments.check:
        return 0
    return int(any(row["differs"] for row in made[0].rows))


if __name__ == "__main__":
    sys.exit(main())
