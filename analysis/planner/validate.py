"""Predictions of published rows by constants that were fitted on other rows, and their errors."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from analysis.common import statistics
from analysis.common.table import Column, Table
from analysis.planner import fitting
from analysis.planner.choice import choice
from analysis.planner.collectives import measured_on
from analysis.planner.rows import CRASHED, Rows, healthy, split_of
from base.errors import Reason, UsageError
from models import memory
from models.gpus import planning_gpu
from parallel.config.axes import AXES

SPLITS = ("random", "leave-model-out", "leave-tp-out", "leave-one-out")
FOLDS = 5
LINT = Reason("LINT", "LINT: the published row contradicts itself")
NO_WIDTH = Reason("no width", "width of the model not published")
SLOW_NETWORK = Reason(
    "slow network", "slow network: a run with no less to do was 1.3 times as fast"
)


def folds(rows: Rows, index: np.ndarray, split: str) -> list[tuple[np.ndarray, np.ndarray]]:
    """(rows to learn from, rows to predict) pairs that predict each row of `index` once."""
    if split == "leave-model-out":
        kinds = sorted({rows.model[i] for i in index})
        group = np.array([kinds.index(rows.model[i]) for i in index])
    elif split == "leave-tp-out":
        group = rows.x.tp[index]
    elif split == "leave-one-out" or len(index) <= 31:
        group = np.arange(len(index))
    else:
        group = np.random.default_rng(0).permutation(len(index)) % FOLDS
    return [(index[group != g], index[group == g]) for g in np.unique(group)]


def repeat_noise(rows: Rows, index: np.ndarray, values: np.ndarray) -> tuple[float | None, int]:
    """`statistics.repeat_noise` of the rows that are repeats of one run."""
    groups: dict[tuple, list[float]] = {}
    for i in index:
        groups.setdefault(rows.key(i), []).append(float(values[i]))
    return statistics.repeat_noise(groups.values())


@dataclass
class Validation:
    """What a validation found, an entry a row; arrays are nan where a row was not predicted.

    unit: s for a validation of time, gb for one of memory, which has `refused`, too.
    """

    rows: Rows
    unit: str
    why_not: list[Reason | None]  # None where it is scored
    predicted: np.ndarray
    spread: np.ndarray
    n_fit: np.ndarray
    refused: dict[str, Any] = field(default_factory=dict)

    @property
    def truth(self) -> np.ndarray:
        return self.rows.measured if self.unit == "s" else self.rows.memory_gb

    @property
    def scored(self) -> np.ndarray:
        return np.array([why is None for why in self.why_not])


def _validate(
    rows: Rows,
    unit: str,
    tests: list[tuple[np.ndarray, Reason]],
    split: str,
    predict: Callable[[np.ndarray, np.ndarray], tuple[np.ndarray, Any, int]],
) -> Validation:
    """Predict each scored row by a fit that never saw it, and the others of its cluster by a fit
    on all scored ones.

    tests: (rows, why they are not scored); the first that holds counts. predict: of rows to learn
    from and rows to predict, the (values, spread of their logs, number of fitted rows).

    Raises:
        UsageError: no row can be scored.
    """
    n = len(rows.ids)
    why_not = [next((why for where, why in tests if where[i]), None) for i in range(n)]
    if all(why_not):
        what = "a time" if unit == "s" else "memory"
        raise UsageError(f"no row has {what} that can be scored")
    nan = np.full(n, np.nan)
    found = Validation(rows, unit, why_not, nan, nan.copy(), np.zeros(n, int))
    keys = np.array(rows.cluster_key)
    for cluster in np.unique(keys):
        here = np.flatnonzero((keys == cluster) & found.scored)
        others = np.flatnonzero((keys == cluster) & ~found.scored)
        pairs = folds(rows, here, split) if len(here) else []
        for known, unknown in [*pairs, *([(here, others)] if len(others) else [])]:
            result = predict(known, unknown)
            found.predicted[unknown], found.spread[unknown], found.n_fit[unknown] = result
    for i in np.flatnonzero(~found.scored):
        why = why_not[i]
        why_not[i] = Reason(why.kind, why.text.format(status=rows.status[i]))
    return found


def validate_time(rows: Rows, calibrate_rows: int, split: str) -> Validation:
    """Predict the seconds of every row by constants that were fitted without it.

    Raises:
        UsageError: nothing to score.
    """

    def predict(known: np.ndarray, unknown: np.ndarray) -> tuple[np.ndarray, np.ndarray, int]:
        card = planning_gpu(rows.gpu[unknown[0]]).name
        fit, _ = fit_some(rows, known, calibrate_rows, card)
        x, machine = rows.x.take(unknown), rows.machine.take(unknown)
        return fit.seconds(x, machine), fit.spread(x, machine), fit.n

    tests = [
        (~rows.fit, LINT),
        (~np.isfinite(rows.measured), Reason("no time", "no time ({status})")),
        (~rows.steady, Reason("not steady", "first iteration, not a steady one")),
        (rows.guessed, NO_WIDTH),
        (~healthy(rows), SLOW_NETWORK),
    ]
    return _validate(rows, "s", tests, split, predict)


def fit_some(
    rows: Rows, known: np.ndarray, count: int, card: str | None = None
) -> tuple[fitting.Fit, np.ndarray]:
    """(constants, the fitted rows): at most `count` of the known rows, with the priors of a card (a
    name of models.gpus; default: the rows' own)."""
    priors = fitting.priors_of(card or planning_gpu(rows.gpu[known[0]]).name)
    if count <= 0 or not len(known):
        return fitting.prior_fit(priors), known[:0]
    x, machine = rows.x.take(known), rows.machine.take(known)
    chosen = known[fitting.choose(x, count, fitting.slopes(x, machine, priors))]
    table = measured_on(rows.cluster_key[known[0]])
    x, machine = rows.x.take(chosen), rows.machine.take(chosen)
    return fitting.fit(x, machine, rows.measured[chosen], priors, table), chosen


def validate_memory(rows: Rows, calibrate_rows: int, split: str) -> Validation:
    """Predict the gigabytes of every row that has them, and which rows do not fit.

    Raises:
        UsageError: nothing to score.
    """
    full = np.full(len(rows.ids), np.nan)

    def predict(known: np.ndarray, unknown: np.ndarray) -> tuple[np.ndarray, float, int]:
        known = known[rows.has_step_memory[known]]
        chosen = known[fitting.choose(rows.x.take(known), calibrate_rows)]
        constants, spread = fitting.fit_memory(rows.x.take(chosen), rows.memory_gb[chosen])
        x = rows.x.take(unknown)
        full[unknown] = memory.peak(x, constants) / memory.GB
        library = np.where(rows.tensors_alone[unknown], constants["library_gb"], 0.0)
        return memory.first_rank(x, constants) / memory.GB - library, spread, len(chosen)

    unknown = (np.array(rows.status) != "ok") | ~np.isfinite(rows.memory_gb)
    tests = [
        (~rows.fit, LINT),
        (rows.in_fp8, Reason("fp8", "fp8: whether its weights are in bf16, too, is not published")),
        (unknown, Reason("no memory", "no measured memory ({status})")),
        (rows.guessed, NO_WIDTH),
    ]
    found = _validate(rows, "gb", tests, split, predict)
    found.refused = _refused(rows, full)
    return found


def fits_in_memory(rows: Rows, margin: float) -> np.ndarray:
    """Whether each row can start and its fullest rank fits its card with that share of it left
    free, bool (n,); one of unknown memory does."""
    limit = rows.gpu_memory_gb * (1 - margin)
    full = memory.peak(rows.x) / memory.GB
    return rows.can_start & (~(full > limit) | rows.guessed | rows.in_fp8)


def _refused(rows: Rows, full: np.ndarray) -> dict[str, Any]:
    """Which published runs the memory model refuses; `full`: gigabytes of the fullest rank. A row
    that cannot run at all is refused, too."""
    known_size = np.isfinite(rows.gpu_memory_gb) & ~rows.guessed & ~rows.in_fp8
    refuses = (full > rows.gpu_memory_gb) | ~rows.can_start
    oom = known_size & np.isin(rows.status, CRASHED)
    ran = known_size & (np.array(rows.status) == "ok") & rows.fit
    wrong = np.flatnonzero((oom & ~refuses) | (ran & refuses))
    which = {"oom": oom, "oom_refused": oom & refuses, "ran": ran, "ran_refused": ran & refuses}
    counts = {name: int(where.sum()) for name, where in which.items()}
    for name in ("oom", "oom_refused"):
        counts[name] += len(rows.left_out_crashed)
    return counts | {"wrong": [rows.ids[i] for i in wrong]}


def summary(found: Validation) -> dict[str, Any]:
    """MAPE, n, coverage, noise, choice and every row, as JSON prints them."""
    rows, truth = found.rows, found.truth
    i = np.flatnonzero(found.scored)
    error = found.predicted / truth - 1
    inside = np.abs(np.log(found.predicted / truth)) <= fitting.INTERVAL * found.spread
    timed = np.flatnonzero(np.isfinite(error))
    unlike = np.array([why == SLOW_NETWORK for why in found.why_not])
    slow = np.flatnonzero((found.scored | unlike) & np.isfinite(error))
    noise, repeated = repeat_noise(rows, i, truth)
    noise_all, _ = repeat_noise(rows, timed, truth)
    return {
        "mape": float(np.mean(np.abs(error[i]))),
        "n": len(i),
        "coverage80": float(np.mean(inside[i])),
        "width80": float(np.median(np.expm1(fitting.INTERVAL * found.spread[i]))),
        "median_error": float(np.median(error[i])),
        "median_abs_error": float(np.median(np.abs(error[i]))),
        "mape_slow": float(np.mean(np.abs(error[slow]))),
        "mape_all": float(np.mean(np.abs(error[timed]))),
        "n_all": len(timed),
        "calibration_rows_at_most": int(found.n_fit[i].max()),
        "repeat_noise": noise,
        "repeat_rows": repeated,
        "repeat_noise_all": noise_all,
        **({"choice": choice(rows, i, found.predicted)} if found.unit == "s" else {}),
        "left_out": [{"id": name, "reason": reason} for name, reason in rows.left_out],
        "rows": _row_results(found, error),
        **({"refused": found.refused} if found.unit == "gb" else {}),
    }


def _row_results(found: Validation, error: np.ndarray) -> list[dict[str, Any]]:
    rows, unit, half = found.rows, found.unit, fitting.INTERVAL * found.spread
    return [
        {
            "id": rows.ids[k],
            "gpus": int(rows.x.gpus[k]),
            **split_of(rows.x, k),
            f"measured_{unit}": float(found.truth[k]),
            f"predicted_{unit}": float(found.predicted[k]),
            "error": float(error[k]),
            "low": float(found.predicted[k] * np.exp(-half[k])),
            "high": float(found.predicted[k] * np.exp(half[k])),
            "scored": found.why_not[k] is None,
            "note": str(found.why_not[k] or ""),
        }
        for k in range(len(rows.ids))
    ]


def _percent(value: float | None) -> str:
    return "-" if value is None else f"{value:.1%}"


def error_columns(unit: str) -> list[Column]:
    """The columns of a row's split, its measured and predicted value in `unit`, and the error."""
    return [
        *(Column(k, k, "g") for k in (*AXES, "micro_batch")),
        Column(f"measured_{unit}", f"measured {unit}", ".4g"),
        Column(f"predicted_{unit}", f"predicted {unit}", ".4g"),
        Column("error", "error", "+.1%"),
    ]


def table(result: dict[str, Any]) -> Table:
    """A `summary` as a table of its rows, with the sums below it."""
    unit = "gb" if "refused" in result else "s"
    columns = [
        Column("id", "row"),
        Column("gpus", "gpus", "g"),
        *error_columns(unit),
        Column("low", "low", ".4g"),
        Column("high", "high", ".4g"),
        Column("note", "not scored because"),
    ]
    notes = [
        f"MAPE {result['mape']:.2%}, median error {result['median_abs_error']:.2%},"
        f" n = {result['n']}; the 80 % interval held {result['coverage80']:.0%} (its usual width:"
        f" {1 / (1 + result['width80']) - 1:+.0%} to {result['width80']:+.0%});"
        f" repeat noise {_percent(result['repeat_noise'])}"
        f" ({result['repeat_rows']} repeated runs)",
        f"with the slow network's rows: MAPE {result['mape_slow']:.2%};"
        f" with every timed row: MAPE {result['mape_all']:.2%}, n = {result['n_all']};"
        f" repeat noise {_percent(result['repeat_noise_all'])};"
        f" fitted on at most {result['calibration_rows_at_most']} rows",
    ]
    picked = result.get("choice")
    if picked and picked["groups"]:
        notes.append(
            f"choice: {picked['groups']} groups, the first is {picked['first']:.1%} slower than the"
            f" best (90th percentile {picked['first_p90']:.1%}), the best of three"
            f" {picked['best_of_three']:.1%}"
        )
    if "refused" in result:
        said = result["refused"]
        notes.append(
            f"out of memory: {said['oom_refused']} of {said['oom']} refused;"
            f" ran: {said['ran_refused']} of {said['ran']} refused"
            + (f"; wrong: {', '.join(said['wrong'])}" if said["wrong"] else "")
        )
    notes += [f"left out {row['id']}: {row['reason']}" for row in result["left_out"]]
    return Table(columns, result["rows"], notes=notes)
