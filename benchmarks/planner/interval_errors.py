"""Chooses the widths of the planner's intervals by the errors of publishers that were left out.

    python -m benchmarks.planner.interval_errors     # two minutes

Writes logs/published/interval_errors.csv: of each publisher at most PER_CASE rows that are alike
in what is unknown of them, each with the logarithm of measured over predicted seconds, the
deviation that the fit states, and the rows that it stands for. From these follow
analysis/planner/widths.toml and the block `coverage` of benchmarks.published_tables.

Rows of tables that were predicted on record before anybody saw them have the errors of that record
(logs/predictions/before_seen.csv), whatever the model learned from them since.
"""

import json
import statistics
import sys
from typing import Any, NamedTuple

import numpy as np
import pandas

from analysis.common.table import Column, Table
from analysis.planner import certainty, fitting
from analysis.planner.certainty import UNKNOWN, Scale, widened
from analysis.planner.columns import FAMILIES
from base.errors import Parser, command_line
from base.files import ROOT
from benchmarks.planner.held_out import EXPERTS, SETS, fit_some, folds, rows_of, scored
from benchmarks.planner.published_rows import Rows

ERRORS = ROOT / "logs" / "published" / "interval_errors.csv"
BEFORE_SEEN = ROOT / "logs" / "predictions" / "before_seen.csv"
FITS = (("random", 0), ("random", 10), ("random", 20), ("leave-model-out", 10))
FITS += (("leave-model-out", 20),)
PER_CASE = 8
SHARE = 0.8  # of a further publisher's rows that intervals are to hold
MOST = 0.88  # where few publishers have rows of a kind
KINDS = ("model", "experts")  # of UNKNOWN: rows alike in them are of one kind
GRID = tuple(n / 100 for n in range(0, 51, 2))  # log seconds of what is unknown
ROUNDS = 4  # over all that may be unknown; two or three are enough
WORDS = {  # of a publisher -> their heading and format
    "rows": ("rows", "d"),
    "inside": ("inside", ".0%"),
    "dense": ("half-width, dense", ".0%"),
    "experts": ("experts", ".0%"),
}
# Words of a table's name -> who published it; the others are NVIDIA's.
PUBLISHERS = {
    "Jean Zay": "Jean Zay",
    "llm-foundry": "Databricks",
    "torchtitan": "torchtitan",
    "vTrain": "vTrain",
    "Ultra-Scale": "Hugging Face",
    "MLPerf": "MLPerf",
    "InternEvo": "InternEvo",
    "LiBai": "LiBai",
    "AMP": "AMP",
    "Primus": "AMD",
    "SimuMax": "SimuMax",
}


def publisher_of(table: str) -> str:
    """Returns who published a table of SETS or EXPERTS."""
    return next((name for words, name in PUBLISHERS.items() if words in table), "NVIDIA")


def measured_by_two(publishers: dict[str, set[str]], but: str = "") -> frozenset[str]:
    """Returns the cards or engines that two publishers or more measured, `but` not counted: by one
    alone nobody can tell the card from the publisher."""
    return frozenset(name for name, found in publishers.items() if len(found - {but}) > 1)


class Tables(NamedTuple):
    """The published tables, {name: rows}, and who measured each card and each engine's family."""

    rows: dict[str, Rows]
    cards: dict[str, set[str]]
    engines: dict[str, set[str]]


def tables() -> Tables:
    """Returns every table of SETS and EXPERTS."""
    read = Tables({name: rows_of(name) for name in SETS | EXPERTS}, {}, {})
    for name, rows in read.rows.items():
        for i in scored(rows):
            read.cards.setdefault(str(rows.gpu[i]), set()).add(publisher_of(name))
            family = FAMILIES[rows.steps.family[i]]
            read.engines.setdefault(family, set()).add(publisher_of(name))
    return read


def errors_of(read: Tables, name: str) -> pandas.DataFrame:
    """Returns the errors of a table's rows by each of FITS: its publisher counts as nobody who
    measured a card or an engine, and runs that are fitted are of its own other rows."""
    rows, publisher, found = read.rows[name], publisher_of(name), []
    others = measured_by_two(read.cards, publisher), measured_by_two(read.engines, publisher)
    index, keys = scored(rows), rows.cluster_key
    for split, count in FITS:
        for key in np.unique(keys[index]):
            for seen, unseen in folds(rows, index[keys[index] == key], split):
                fit = fit_some(rows, seen, count, rows.gpu[unseen[0]]).fit
                if fit.n == 0 and count:  # nothing else to fit: that is without runs
                    continue
                steps, machine = rows.steps.take(unseen), rows.machine.take(unseen)
                unknown = certainty.unknown(steps, machine, fit, *others)
                stated = np.sqrt(fit.stated_variance(steps, machine))
                error = np.log(rows.measured[unseen] / fit.seconds(steps, machine))
                names = [[n for n in UNKNOWN if unknown[n][i]] for i in range(len(unseen))]
                for i, *values in zip(unseen, names, error, stated, strict=True):
                    facts = publisher, rows.ids[i], bool(rows.steps.experts[i]), count
                    found.append((*facts, " ".join(values[0]), *values[1:]))
    columns = ["publisher", "id", "experts", "runs", "unknown", "log_error", "stated"]
    measured = dict(zip(rows.ids, rows.measured, strict=True))
    return _as_recorded(pandas.DataFrame(found, columns=columns), measured)


def _as_recorded(errors: pandas.DataFrame, measured: dict[str, float]) -> pandas.DataFrame:
    """Returns errors, in which rows that were predicted before they were seen have the errors of
    the record: without runs, and with runs of other models."""
    record = pandas.read_csv(BEFORE_SEEN, index_col="id")
    for i, row in errors.iterrows():
        if row.id in record.index:
            runs, others = row.runs > 0, "model" in row.unknown.split()
            seconds, low, high = record.loc[row.id].to_numpy()[3 * runs : 3 * runs + 3]
            if others and np.isfinite(seconds):
                error = np.log(measured[row.id] / seconds)
                stated = np.log(high / low) / 2 / fitting.INTERVAL
                errors.loc[i, ["log_error", "stated"]] = error, stated
    return errors


def thinned(errors: pandas.DataFrame) -> pandas.DataFrame:
    """Returns at most PER_CASE rows of each case of a publisher, evenly by how far they are off,
    with `rows`, how many each stands for."""
    chosen = []
    for _, case in errors.groupby(["publisher", "experts", "runs", "unknown"]):
        order = (case.log_error.abs() / case.stated).argsort(kind="stable").to_numpy()
        count = min(PER_CASE, len(case))
        middles = ((np.arange(count) + 0.5) * len(case) / count).astype(int)
        chosen.append(case.iloc[order[middles]].assign(rows=len(case) / count))
    return pandas.concat(chosen).round({"log_error": 4, "stated": 4, "rows": 2})


class Cases:
    """Rows of ERRORS as arrays. kind: rows of one number are alike in KINDS."""

    def __init__(self, errors: pandas.DataFrame) -> None:
        self.publisher = errors.publisher.to_numpy()
        self.runs = errors.runs.to_numpy() > 0
        self.off = np.abs(errors.log_error.to_numpy())
        self.stated = errors.stated.to_numpy()
        self.rows = errors.rows.to_numpy()
        words = [set(text.split()) for text in errors.unknown.fillna("")]
        self.unknown = {name: np.array([name in each for each in words]) for name in UNKNOWN}
        kinds = pandas.DataFrame({"runs": self.runs} | {k: self.unknown[k] for k in KINDS})
        self.kind = kinds.groupby(list(kinds)).ngroup().to_numpy()

    def half_widths(self, sizes: dict[str, float]) -> np.ndarray:
        """Returns half of each row's interval, before the factor."""
        return fitting.INTERVAL * np.sqrt(widened(self.stated**2, self.unknown, sizes))

    def weights(self, used: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Returns a weight of each row, by which kinds count alike and publishers in a kind; and
        the price of a row's distance from its interval. Of K publishers the intervals hold SHARE
        (K + 1) / K, as `factor` wants it, at most MOST."""
        weights, price = np.zeros((2, len(self.kind)))
        for kind in np.unique(self.kind[used]):
            of_kind = used & (self.kind == kind)
            publishers = np.unique(self.publisher[of_kind])
            level = min(SHARE * (len(publishers) + 1) / len(publishers), MOST)
            price[of_kind] = 1 / (1 - level)
            for publisher in publishers:
                own = of_kind & (self.publisher == publisher)
                weights[own] = self.rows[own] / self.rows[own].sum() / len(publishers)
        return weights, price


def chosen_sizes(cases: Cases, used: np.ndarray) -> dict[str, float]:
    """Returns the sizes of what is unknown, of GRID, at which the rows `used` have the least
    interval score: half a width, and the price of the distance of a row that is not inside."""
    weights, price = cases.weights(used)

    def score(sizes: dict[str, float]) -> float:
        half = cases.half_widths(sizes)
        return float(weights @ (half + price * np.maximum(cases.off - half, 0.0)))

    sizes, before = dict.fromkeys(UNKNOWN, 0.1), None
    for _ in range(ROUNDS):
        if sizes != before:
            before = sizes
            for name in UNKNOWN:
                sizes = min(({**sizes, name: size} for size in GRID), key=score)
    return sizes


def factor(scores: np.ndarray, publishers: np.ndarray, rows: np.ndarray) -> float:
    """Returns the score that SHARE of a further publisher's rows do not exceed: the quantile over
    publishers that count alike, one more of which has errors without bound (Lee, Barber and
    Willett 2023)."""
    total = {name: rows[publishers == name].sum() for name in np.unique(publishers)}
    weights = rows / np.array([total[name] for name in publishers]) / (len(total) + 1)
    order = np.argsort(scores, kind="stable")
    at = np.searchsorted(np.cumsum(weights[order]), SHARE - 1e-9)
    return float(scores[order][min(at, len(order) - 1)])


class HeldOut(NamedTuple):
    """Rows of a publisher without or with runs of its own: how many, the share of them inside
    intervals that were chosen without the publisher, and half of the median interval of dense
    models and of experts, None where there is none."""

    runs: str
    publisher: str
    rows: int
    inside: float
    dense: float | None
    experts: float | None


def chosen(errors: pandas.DataFrame) -> tuple[dict[str, float], dict[str, Scale], list[HeldOut]]:
    """Returns the sizes and scales of widths.toml, and how they hold for publishers left out."""
    cases = Cases(errors)
    everyone = np.ones(len(errors), bool)
    sizes, left_out = chosen_sizes(cases, everyone), np.zeros(len(errors))
    for publisher in np.unique(cases.publisher):
        own = cases.publisher == publisher
        left_out[own] = cases.half_widths(chosen_sizes(cases, ~own))[own]
    scores, scales, held_out = cases.off / left_out, {}, []

    def factor_of(used: np.ndarray) -> float:
        return factor(scores[used], cases.publisher[used], cases.rows[used])

    for runs, of_runs in (("without_runs", ~cases.runs), ("with_runs", cases.runs)):
        publishers = np.unique(cases.publisher[of_runs])
        count = round(float(cases.rows[of_runs].sum()))
        scales[runs] = Scale(round(factor_of(of_runs), 3), len(publishers), count)
        half = scales[runs].factor * cases.half_widths(sizes)
        for publisher in publishers:
            own = of_runs & (cases.publisher == publisher)
            inside = scores[own] <= factor_of(of_runs & ~own)
            share = float(cases.rows[own] @ inside / cases.rows[own].sum())
            medians = [
                float(np.median(np.repeat(half[part], np.ceil(cases.rows[part]).astype(int))))
                if (part := own & (errors.experts.to_numpy() == of_experts)).any()
                else None
                for of_experts in (False, True)
            ]
            held_out.append(HeldOut(runs, publisher, round(cases.rows[own].sum()), share, *medians))
    return sizes, scales, held_out


def coverage() -> Table:
    """Shows for each publisher how many of its rows are inside 80 % intervals that were chosen
    without its rows, and how wide the intervals are."""
    _, _, held_out = chosen(pandas.read_csv(ERRORS))
    rows: dict[str, dict[str, Any]] = {}
    for found in held_out:
        row = rows.setdefault(found.publisher, {"publisher": found.publisher})
        row |= {f"{k}_{found.runs}": v for k, v in found._asdict().items()}
    names = [f"{k}_{runs}" for k in WORDS for runs in ("without_runs", "with_runs")]
    means = {name: [row[name] for row in rows.values() if row.get(name)] for name in names}
    summary = {"publisher": "mean, of half-widths the median"}
    for name, values in means.items():
        if not name.startswith("rows"):
            middle = statistics.fmean if name.startswith("inside") else statistics.median
            summary[name] = middle(values)
    columns = [Column("publisher", "publisher left out")]
    for runs, words in (("without_runs", "no run"), ("with_runs", "10 or 20 rows")):
        columns += [
            Column(f"{key}_{runs}", f"{words}: {heading}", spec)
            for key, (heading, spec) in WORDS.items()
        ]
    return Table(columns, [*rows.values(), summary])


def write_widths(read: Tables, errors: pandas.DataFrame) -> None:
    """Writes widths.toml."""
    sizes, scales, _ = chosen(errors)
    lines = [
        "# Written by: python -m benchmarks.planner.interval_errors. analysis/planner/certainty.py",
        "# says what each number is. cards, engines: measured by two publishers or more.",
        f"cards = {json.dumps(sorted(measured_by_two(read.cards)))}",
        f"engines = {json.dumps(sorted(measured_by_two(read.engines)))}",
        "",
        "[unknown]  # log seconds",
        *(f"{name} = {size}" for name, size in sizes.items()),
    ]
    for name, scale in scales.items():
        lines += ["", f"[{name}]", *(f"{k} = {v}" for k, v in scale._asdict().items())]
    certainty.FILE.write_text("\n".join(lines) + "\n")


@command_line("interval_errors")
def main(argv: list[str] | None = None) -> int:
    Parser(description=__doc__.split("\n")[0]).parse_args(argv)
    read = tables()
    errors = thinned(pandas.concat([errors_of(read, name) for name in read.rows]))
    errors.to_csv(ERRORS, index=False)
    write_widths(read, pandas.read_csv(ERRORS))
    return 0


if __name__ == "__main__":
    sys.exit(main())
