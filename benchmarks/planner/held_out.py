"""Measures how far predictions of published runs are off that no fit has seen.

    python -m benchmarks.planner.held_out > logs/published/held_out.md

Prints three tables over the sets of `SETS`: errors of the time of a step by
which rows the fit has not seen, errors by how many rows were fitted, and errors of memory with the
runs that the memory model refuses.
"""

import statistics
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from analysis.common.table import Column, Table, show
from analysis.planner import fitting
from analysis.planner.columns import Columns
from analysis.planner.memory.peak import peaks, stage_peaks
from base.errors import Parser, command_line
from base.files import ROOT
from base.units import GIB
from benchmarks.planner.published_rows import CRASHED, Rows, healthy, read_rows
from models.headroom import CONSTANTS

SETS = {  # of logs/published
    "Selene, SC'21 tables 1 and 2": ["narayanan_sc21_table1.csv", "narayanan_sc21_table2.csv"],
    "Jean Zay V100, healthy network": ["seed003_jeanzay_v100.csv"],
    "DGX H100, NeMo in bf16 and FP8": ["dgx_h100.csv"],
    "llm-foundry H100, FSDP": ["llm_foundry_h100.csv"],
    "llm-foundry A100, FSDP": ["llm_foundry_a100.csv"],
    "Megatron-LM H100, its own table": ["megatron_readme_h100.csv"],
    "torchtitan H100, FSDP2": ["torchtitan_h100.csv"],
    "vTrain A100, one node": ["vtrain_single_a100.csv"],
    "vTrain A100, 8 nodes": ["vtrain_multi_a100.csv"],
    "Ultra-Scale H100, nanotron 1.34B and 8.86B": ["ultrascale_h100.csv"],
    "MLPerf GPT-3 175B, v3.1 to v4.1": ["mlperf_gpt3.csv"],
    "InternEvo A100, 7B": ["internevo_a100.csv"],
    "DGX GB200 and H100, NeMo 25.05": ["dgxc_v2505.csv"],
    "LiBai V100, LiBai and Megatron-LM": ["libai_v100.csv"],
    "AMP T4, 16 over a slow network": ["amp_t4.csv"],
    "MLPerf Llama 3.1 405B, v5.0": ["mlperf_v5.csv"],
}
EXPERTS = {  # tables of models with experts; some have rows of others
    "DGX H100 and GB200, NeMo 25.01 to 25.05": ["dgxc_moe.csv"],
    "Qwen3-235B, Megatron-MoE-ModelZoo": ["moe_modelzoo_qwen3.csv"],
    "DeepSeek-V2, Primus MI355X": ["primus_moe.csv"],
    "Megatron-Bridge H100, one change at a time": ["bridge_moe_ablations.csv"],
    "AutoModel H100, FSDP2": ["automodel_h100.csv"],
    "DeepSeek-V2 cut to 4 layers, SimuMax B200": ["simumax_b200.csv"],
    "Megatron-Bridge, containers 25.09 to 26.08": ["megatron_bridge_moe.csv"],
}
SPLITS = ("random", "leave-model-out", "leave-tp-out")
BY_SPLIT = list(SETS)[:3]
FOLDS = 5
MEMORY_WIDTHS = np.array([0.4, 0.08])  # of the priors of CONSTANTS, in log
MEMORY_NOISE = 0.05  # of one peak's log bytes


class HeldOut(NamedTuple):
    """Predictions of the rows `index`, each by a fit without it; spread: of the value's log."""

    rows: Rows
    index: np.ndarray
    predicted: np.ndarray
    spread: np.ndarray

    def errors(self, truth: np.ndarray) -> dict[str, Any]:
        """Returns n, MAPE, median error, the share inside the 80 % interval, and the noise of
        identical runs."""
        repeats = [truth[group].tolist() for group in self.rows.repeats(self.index)]
        truth = truth[self.index]
        error = np.abs(self.predicted / truth - 1)
        inside = np.abs(np.log(self.predicted / truth)) <= fitting.INTERVAL * self.spread
        return {
            "n": len(truth),
            "mape": float(np.mean(error)),
            "median": float(np.median(error)),
            "inside": float(np.mean(inside)),
            "noise": repeat_noise(repeats),
        }


def repeat_noise(groups: Iterable[Sequence[float]]) -> float | None:
    """Returns the least MAPE of any prediction on runs that were identical; None where none
    repeats. Of a group's values t, one is the best single prediction p, which minimises the mean
    of |p / t - 1|."""
    errors: list[float] = []
    for times in groups:
        if len(times) > 1:
            errors += min(([abs(p / t - 1) for t in times] for p in times), key=sum)
    return statistics.fmean(errors) if errors else None


def rows_of(name: str) -> Rows:
    """Returns the published rows of a set."""
    return read_rows([ROOT / "logs" / "published" / file for file in (SETS | EXPERTS)[name]])


def scored(rows: Rows) -> np.ndarray:
    """Returns the rows whose time is a fact about their layout. It is a steady time, of a model of
    known width, that nothing in the row contradicts, on a network that was not slow."""
    return np.flatnonzero(healthy(rows) & rows.fit & rows.steady & np.isfinite(rows.measured))


def folds(rows: Rows, index: np.ndarray, split: str) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Yields (rows to learn from, rows to predict), so that each row of `index` is predicted
    once."""
    if split == "leave-model-out":
        kinds = sorted({rows.model[i] for i in index})
        group = np.array([kinds.index(rows.model[i]) for i in index])
    elif split == "leave-tp-out":
        group = rows.steps.tp[index]
    elif len(index) <= 31:
        group = np.arange(len(index))
    else:
        group = np.random.default_rng(0).permutation(len(index)) % FOLDS
    for g in np.unique(group):
        yield index[group != g], index[group == g]


def _held_out(
    rows: Rows,
    index: np.ndarray,
    split: str,
    predict: Callable[[np.ndarray, np.ndarray], tuple[np.ndarray, np.ndarray | float]],
) -> HeldOut:
    """Predicts each row of `index` by a fit on other rows of its cluster. `predict` returns the
    values, and the spread of their logs, for rows to learn from and rows to predict."""
    predicted, spread = np.full((2, len(rows.ids)), np.nan)
    keys = rows.cluster_key
    for key in np.unique(keys[index]):
        for seen, unknown in folds(rows, index[keys[index] == key], split):
            predicted[unknown], spread[unknown] = predict(seen, unknown)
    return HeldOut(rows, index, predicted[index], spread[index])


def of_time(rows: Rows, count: int, split: str) -> HeldOut:
    """Predicts seconds of a step, by constants that were fitted on at most `count` other rows."""

    def predict(seen: np.ndarray, unknown: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        fit, _ = fit_some(rows, seen, count, rows.gpu[unknown[0]])
        steps, machine = rows.steps.take(unknown), rows.machine.take(unknown)
        return fit.seconds(steps, machine), fit.spread(steps, machine)

    return _held_out(rows, scored(rows), split, predict)


class SomeFit(NamedTuple):
    """A fit, and the indices of the rows on which it was fitted."""

    fit: fitting.Fit
    chosen: np.ndarray


def fit_some(rows: Rows, seen: np.ndarray, count: int, card: str) -> SomeFit:
    """Returns constants from the priors of a card and at most `count` of the rows that are seen."""
    priors = fitting.priors_of(card)
    if count <= 0 or not len(seen):
        return SomeFit(fitting.card_fit(card), seen[:0])
    steps, machine = rows.steps.take(seen), rows.machine.take(seen)
    chosen = seen[fitting.choose(steps, count, fitting.slopes(steps, machine, priors))]
    steps, machine = rows.steps.take(chosen), rows.machine.take(chosen)
    return SomeFit(fitting.fit(steps, machine, rows.measured[chosen], priors), chosen)


def of_memory(rows: Rows, count: int = fitting.MAX_ROWS) -> HeldOut:
    """Predicts the gigabytes of rank 0, whose memory logs print, by constants of at most `count`
    other rows."""

    def predict(seen: np.ndarray, unknown: np.ndarray) -> tuple[np.ndarray, float]:
        constants = memory_constants(rows, seen, count)
        library = np.where(rows.tensors_alone[unknown], constants["library_gb"], 0.0)
        gigabytes = stage_peaks(rows.steps.take(unknown), 0, constants) / GIB
        return gigabytes - library, np.nan

    return _held_out(rows, _has_peak(rows), "random", predict)


def _has_peak(rows: Rows) -> np.ndarray:
    """Returns the rows whose published gigabytes can be predicted."""
    ran = rows.fit & (rows.status == "ok")
    return np.flatnonzero(ran & ~rows.steps.fp8 & np.isfinite(rows.memory_gb))


def memory_constants(rows: Rows, seen: np.ndarray, count: int) -> dict[str, float]:
    """Returns CONSTANTS, moved by the published peaks of at most `count` of the seen rows."""
    seen = seen[rows.has_step_memory[seen]]
    chosen = seen[fitting.choose(rows.steps.take(seen), count, np.zeros((len(seen), 1)))]
    return fit_memory(rows.steps.take(chosen), rows.memory_gb[chosen])


def fit_memory(steps: Columns, gigabytes: np.ndarray) -> dict[str, float]:
    """Fits the constants of the memory model to peaks: by soft-l1 of their logs, and the priors."""
    from scipy.optimize import least_squares

    names, centre = list(CONSTANTS), np.log(list(CONSTANTS.values()))
    if not len(gigabytes):
        return dict(CONSTANTS)

    def constants(z: np.ndarray) -> dict[str, float]:
        return dict(zip(names, np.exp(centre + z * MEMORY_WIDTHS), strict=True))

    def residuals(z: np.ndarray) -> np.ndarray:
        r = np.log(stage_peaks(steps, 0, constants(z)) / GIB / gigabytes) / MEMORY_NOISE
        return np.concatenate([np.sign(r) * fitting.soft_l1(r), z])

    return constants(least_squares(residuals, np.zeros(len(names))).x)


def refused(rows: Rows) -> dict[str, Any]:
    """Counts the published runs that the memory model refuses, by constants of the cluster's peaks;
    a run that its engine cannot start is refused, too."""
    needed, keys = np.zeros(len(rows.ids)), rows.cluster_key
    for key in np.unique(keys):
        cluster = np.flatnonzero(keys == key)
        peaked = np.intersect1d(cluster, _has_peak(rows))
        constants = memory_constants(rows, peaked, fitting.MAX_ROWS)
        needed[cluster] = peaks(rows.steps.take(cluster), constants) / GIB
    comparable = np.isfinite(rows.gpu_memory_gb) & ~rows.steps.fp8
    refuses = (needed > rows.gpu_memory_gb) | ~rows.can_start
    crashed = comparable & np.isin(rows.status, CRASHED)
    ran = comparable & (rows.status == "ok") & rows.fit
    return {
        "crashed": int(crashed.sum()),
        "crashed_refused": int((crashed & refuses).sum()),
        "ran": int(ran.sum()),
        "ran_refused": int((ran & refuses).sum()),
    }


def by_split() -> Table:
    """Shows errors of time on three sets and those of experts, by which rows the fit has not
    seen."""
    results = []
    for name in [*BY_SPLIT, *EXPERTS]:
        rows = rows_of(name)
        for split in SPLITS if name in BY_SPLIT else ["leave-model-out"]:
            errors = of_time(rows, fitting.MAX_ROWS, split).errors(rows.measured)
            results.append({"set": name, "split": split} | errors)
    columns = [
        Column("set", "published rows"),
        Column("split", "split"),
        Column("mape", "MAPE", ".1%"),
        Column("n", "n", "d"),
        Column("inside", "inside the 80 % interval", ".0%"),
        Column("noise", "repeat noise", ".1%"),
    ]
    return Table(columns, results)


def by_count() -> Table:
    """Shows errors of time by how many other rows were fitted; with 0 the priors are alone."""
    results = []
    for name in SETS | EXPERTS:
        rows = rows_of(name)
        row: dict[str, Any] = {"set": name}
        for count in (0, 10, fitting.MAX_ROWS):
            errors = of_time(rows, count, "random").errors(rows.measured)
            row |= {"n": errors["n"]} | {f"{key}{count}": v for key, v in errors.items()}
        results.append(row)
    columns = [Column("set", "published rows"), Column("n", "n", "d")]
    for count, words in ((0, "no run"), (10, "10 rows"), (fitting.MAX_ROWS, "20 rows")):
        columns += [
            Column(f"median{count}", f"{words}: median error", ".1%"),
            Column(f"mape{count}", "MAPE", ".1%"),
            Column(f"inside{count}", "in the interval", ".0%"),
        ]
    return Table(columns, results)


def by_memory() -> Table:
    """Shows errors of memory where peaks are published, and which runs are refused."""
    results = []
    for name in SETS:
        rows = rows_of(name)
        if len((held_out := of_memory(rows)).index):
            results.append({"set": name} | held_out.errors(rows.memory_gb) | refused(rows))
    columns = [
        Column("set", "published rows"),
        Column("mape", "MAPE of the peak", ".1%"),
        Column("n", "n", "d"),
        Column("crashed", "out of memory or crashed", "d"),
        Column("crashed_refused", "of them refused", "d"),
        Column("ran", "ran", "d"),
        Column("ran_refused", "of them refused", "d"),
    ]
    return Table(columns, results)


@command_line("held_out")
def main(argv: list[str] | None = None) -> int:
    Parser(description=__doc__).parse_args(argv)
    show([by_split(), by_count(), by_memory()], "markdown")
    return 0


if __name__ == "__main__":
    sys.exit(main())
