"""How well the time and memory models predict published runs that they were not fitted on.

    python -m analysis.predict --validate FILE.csv... [--calibrate-rows 20]
        [--split random|leave-model-out|leave-tp-out|leave-one-out] [--memory]
        [--format text|markdown|csv|json]

FILE is a CSV that must have the columns gpu_type, gpus, hidden, tp, pp, micro_batch and
seconds_per_iteration; it may have id, cluster, gpu_mem_gb, gpus_per_node, params_b, layers, heads,
kv_heads, ffn, glu, vocab, seq, vpp, dp, cp, global_batch, gas, zero_stage, offload, act_recompute,
seq_parallel, precision, engine, tokens_per_s, tflops_per_gpu, tflops_formula, mem_gb, status and
notes (as the files of logs/published have). Each row is predicted by constants fitted on
at most --calibrate-rows other rows of its cluster: of the other folds (random: five; up to 31 rows,
each row alone), of other model sizes, or of other tensor-parallel sizes. Which rows are fitted is
chosen from their layouts, never from their times. --calibrate-rows 0 uses the data sheet's priors.

Ranks of a context-parallel group (cp) count as data-parallel ranks, each with a part of a
micro-batch. Gradients of bf16 rows are fp32, unless the notes say "gradients in bf16". FP8 speeds
up the layers' four GEMMs and nothing else; its memory is not modelled, and not judged.

Rows marked LINT, first iterations and rows whose model has no published width are not scored; nor
are those on a slow network: a row 1.3 times slower than one with no less to do (both MAPEs are
printed). `repeat noise` is the least MAPE that any prediction can reach on identical runs. `choice`
is, over groups of at least 5 layouts of one model, batch and GPU count, how much slower than the
group's best the predicted first (best of first three) was. Intervals cover 80 %.
"""

import argparse
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

if not __package__:  # run as a script: find the rooms, not analysis/ itself
    sys.path[0] = str(Path(__file__).resolve().parent.parent)

import numpy as np

from analysis import fitting, repeats
from analysis.collectives import measured_on
from analysis.rows import Rows, crowding, healthy, read_rows, settings_of
from analysis.tables import FORMAT_HELP, FORMATS, Column, Table, emphasise, json_objects
from models import memory
from models.bounds import check_flags
from models.errors import Parser, UsageError, command_line
from models.hardware import planning_gpu
from parallel.columns import columns

SPLITS = ("random", "leave-model-out", "leave-tp-out", "leave-one-out")
FOLDS = 5


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
    """`repeats.repeat_noise` of the rows that are repeats of one run."""
    groups: dict[tuple, list[float]] = {}
    for i in index:
        groups.setdefault(rows.key(i), []).append(float(values[i]))
    return repeats.repeat_noise(groups.values())


def choice(rows: Rows, index: np.ndarray, predicted: np.ndarray) -> dict[str, Any]:
    """Mean regret of the predicted first choice and of the best of its first three."""
    groups: dict[tuple, dict[tuple, list[int]]] = {}
    for i in index:
        what = (*rows.model[i], int(rows.x.heads[i]), int(rows.x.global_batch[i]))
        what += (int(rows.x.gpus[i]), int(rows.x.recompute[i]), rows.cluster_key[i])
        groups.setdefault(what, {}).setdefault(rows.key(i), []).append(i)
    first, three = [], []
    for layouts in groups.values():
        if len(layouts) < 5:
            continue
        times = np.array([np.mean(rows.measured[g]) for g in layouts.values()])
        order = np.argsort([np.mean(predicted[g]) for g in layouts.values()], kind="stable")
        first.append(times[order[0]] / times.min() - 1)
        three.append(times[order[:3]].min() / times.min() - 1)
    if not first:
        return {"groups": 0, "first": None, "best_of_three": None}
    return {
        "groups": len(first),
        "first": float(np.mean(first)),
        "best_of_three": float(np.mean(three)),
    }


@dataclass
class Validation:
    """What a validation found; arrays are nan where a row was not predicted."""

    rows: Rows
    index: np.ndarray
    scored: np.ndarray
    why_not: list[str]
    predicted: np.ndarray
    spread: np.ndarray
    n_fit: np.ndarray


def validate_time(rows: Rows, calibrate_rows: int, split: str) -> Validation:
    """Predict the seconds of every row from constants that never saw it.

    Raises:
        UsageError: nothing to score.
    """
    good = healthy(rows)
    n = len(rows.ids)
    why = [""] * n
    for i in range(n):
        if not rows.fit[i]:
            why[i] = "LINT: the published row contradicts itself"
        elif not np.isfinite(rows.measured[i]):
            why[i] = f"no time ({rows.status[i]})"
        elif not rows.steady[i]:
            why[i] = "first iteration, not a steady one"
        elif rows.guessed[i]:
            why[i] = "width of the model not published"
        elif not good[i]:
            why[i] = "slow network: a run with no less to do was 1.3 times as fast"
    scored = np.array([not w for w in why])
    index = np.flatnonzero(scored)
    if not len(index):
        raise UsageError("no row has a time that can be scored")
    predicted, spread = np.full(n, np.nan), np.full(n, np.nan)
    n_fit = np.zeros(n, int)
    keys = np.array(rows.cluster_key)
    for cluster in sorted(set(rows.cluster_key)):
        here = index[keys[index] == cluster]
        others = np.flatnonzero((keys == cluster) & ~scored)
        card = planning_gpu(rows.gpu[np.flatnonzero(keys == cluster)[0]]).name
        if not len(here):  # nothing to learn from: the priors say what they can
            pairs = []
        else:
            pairs = folds(rows, here, split)
        for known, unknown in pairs:
            fit = fit_some(rows, known, calibrate_rows, card)
            _fill(rows, unknown, fit, predicted, spread, n_fit)
        if len(others):  # shown beside the scored ones
            fit = fit_some(rows, here, calibrate_rows, card)
            _fill(rows, others, fit, predicted, spread, n_fit)
    return Validation(rows, index, scored, why, predicted, spread, n_fit)


def fit_some(rows: Rows, known: np.ndarray, count: int, card: str | None = None) -> fitting.Fit:
    """Constants from at most `count` of the known rows, over the priors of a card (a name of
    models.hardware; theirs, unless there are none and it is given)."""
    priors = fitting.priors_of(card or planning_gpu(rows.gpu[known[0]]).name)
    if count <= 0 or not len(known):
        return fitting.prior_fit(priors)
    x, machine = rows.x.take(known), rows.machine.take(known)
    chosen = known[fitting.choose(x, count, fitting.slopes(x, machine, priors))]
    table = measured_on(rows.cluster_key[known[0]])
    x, machine = rows.x.take(chosen), rows.machine.take(chosen)
    return fitting.fit(x, machine, rows.measured[chosen], priors, table)


def _fill(rows, index, fit, predicted, spread, n_fit) -> None:
    x, machine = rows.x.take(index), rows.machine.take(index)
    predicted[index] = fit.seconds(x, machine)
    spread[index] = fit.spread(x, machine)
    n_fit[index] = fit.n


def told(rows: Rows) -> np.ndarray:
    """Rows whose gigabytes say what a step needs, bool (n,): a reading of the whole card says what
    the allocator took, and what fp8 keeps of a GEMM's inputs (a byte, or both copies) is open."""
    return np.isfinite(rows.memory_gb) & ~(rows.memory_gb >= rows.gpu_memory_gb) & ~in_fp8(rows)


def in_fp8(rows: Rows) -> np.ndarray:
    """Rows whose layers' GEMMs run in fp8, bool (n,)."""
    return np.broadcast_to(rows.machine.linear, len(rows.ids)) > 0


def fit_memory(rows: Rows, chosen: np.ndarray) -> tuple[dict[str, float], float]:
    """(memory constants, spread of log gigabytes) from rows with published peaks."""
    from scipy.optimize import least_squares

    names = list(memory.CONSTANTS)
    centre = np.log([memory.CONSTANTS[n] for n in names])
    width = np.array([0.4, 0.08])
    if not len(chosen):
        return dict(memory.CONSTANTS), 0.15
    x, wanted = rows.x.take(chosen), np.log(rows.memory_gb[chosen])

    def residuals(z: np.ndarray) -> np.ndarray:
        constants = dict(zip(names, np.exp(centre + z * width), strict=True))
        r = (np.log(memory.first_rank(x, constants) / memory.GB) - wanted) / 0.05
        robust = np.sign(r) * np.sqrt(2 * (np.sqrt(1 + r * r) - 1) + 1e-12)
        return np.concatenate([robust, z])

    z = least_squares(residuals, np.zeros(len(names))).x
    constants = dict(zip(names, np.exp(centre + z * width), strict=True))
    errors = np.log(memory.first_rank(x, constants) / memory.GB) - wanted
    n = len(chosen)
    scale = 1.4826 * np.median(np.abs(errors))
    return constants, float(np.sqrt((n * scale**2 + 5 * 0.05**2) / (n + 5)))


def validate_memory(rows: Rows, calibrate_rows: int, split: str) -> tuple[Validation, dict]:
    """Predict the gigabytes of every row that has them, and which rows do not fit.

    Raises:
        UsageError: nothing to score.
    """
    n = len(rows.ids)
    why = [""] * n
    fp8 = in_fp8(rows)
    for i in range(n):
        if not rows.fit[i]:
            why[i] = "LINT: the published row contradicts itself"
        elif fp8[i]:
            why[i] = "memory of fp8 is not modelled"
        elif rows.status[i] != "ok" or not np.isfinite(rows.memory_gb[i]):
            why[i] = f"no measured memory ({rows.status[i]})"
        elif rows.guessed[i]:
            why[i] = "width of the model not published"
    scored = np.array([not w for w in why])
    index = np.flatnonzero(scored)
    if not len(index):
        raise UsageError("no row has memory that can be scored")
    predicted, spread, full = (np.full(n, np.nan) for _ in range(3))
    n_fit = np.zeros(n, int)
    keys = np.array(rows.cluster_key)
    for cluster in sorted(set(rows.cluster_key)):
        here = index[keys[index] == cluster]
        others = np.flatnonzero((keys == cluster) & ~scored)
        pairs = folds(rows, here, split) if len(here) else []
        for known, unknown in [*pairs, (here, others)]:
            known = known[told(rows)[known]]
            count = calibrate_rows if len(known) else 0
            chosen = known[fitting.choose(rows.x.take(known), count)] if count else known[:0]
            constants, sigma = fit_memory(rows, chosen)
            x = rows.x.take(unknown)
            predicted[unknown] = memory.first_rank(x, constants) / memory.GB
            full[unknown] = memory.peak(x, constants) / memory.GB
            spread[unknown], n_fit[unknown] = sigma, len(chosen)
    known_size = np.isfinite(rows.gpu_memory_gb) & ~rows.guessed & ~fp8
    refuses = full > rows.gpu_memory_gb
    status = np.array(rows.status)
    oom, ran = known_size & (status == "OOM"), known_size & (status == "ok") & rows.fit
    refused = {
        "oom": int(oom.sum()),
        "oom_refused": int((oom & refuses).sum()),
        "ran": int(ran.sum()),
        "ran_refused": int((ran & refuses).sum()),
        "wrong": [rows.ids[i] for i in np.flatnonzero((oom & ~refuses) | (ran & refuses))],
    }
    return Validation(rows, index, scored, why, predicted, spread, n_fit), refused


def summary(found: Validation, what: str = "time") -> dict[str, Any]:
    """MAPE, n, coverage, noise, choice and every row, as JSON prints them."""
    rows, i = found.rows, found.index
    truth = rows.measured if what == "time" else rows.memory_gb
    unit = "s" if what == "time" else "gb"
    error = found.predicted / truth - 1
    inside = np.abs(np.log(found.predicted / truth)) <= fitting.INTERVAL * found.spread
    timed = np.flatnonzero(np.isfinite(error))
    unlike = np.array([why.startswith("slow network") for why in found.why_not])
    slow = np.flatnonzero((found.scored | unlike) & np.isfinite(error))
    noise, repeated = repeat_noise(rows, i, truth)
    noise_all, _ = repeat_noise(rows, timed, truth)
    shown = []
    for k in range(len(rows.ids)):
        low, high = (
            found.predicted[k] * np.exp(s * fitting.INTERVAL * found.spread[k]) for s in (-1, 1)
        )
        shown.append(
            {
                "id": rows.ids[k],
                "gpus": int(rows.x.gpus[k]),
                **rows.layout(k),
                f"measured_{unit}": float(truth[k]),
                f"predicted_{unit}": float(found.predicted[k]),
                "error": float(error[k]),
                "low": float(low),
                "high": float(high),
                "scored": bool(found.scored[k]),
                "note": found.why_not[k],
            }
        )
    return {
        "mape": float(np.mean(np.abs(error[i]))),
        "n": len(i),
        "coverage80": float(np.mean(inside[i])),
        "median_error": float(np.median(error[i])),
        "mape_slow": float(np.mean(np.abs(error[slow]))),
        "mape_all": float(np.mean(np.abs(error[timed]))),
        "n_all": len(timed),
        "calibration_rows_at_most": int(found.n_fit[i].max()),
        "repeat_noise": noise,
        "repeat_rows": repeated,
        "repeat_noise_all": noise_all,
        **({"choice": choice(rows, i, found.predicted)} if what == "time" else {}),
        "left_out": [{"id": name, "reason": reason} for name, reason in rows.left_out],
        "rows": shown,
    }


def table(result: dict[str, Any], what: str = "time") -> Table:
    """The per-row table and, below it, the sums."""
    unit = "s" if what == "time" else "gb"
    columns = [
        Column("id", "row"),
        *(Column(k, k, "g") for k in ("gpus", "tp", "pp", "vpp", "dp", "micro_batch")),
        Column(f"measured_{unit}", f"measured {unit}", ".4g"),
        Column(f"predicted_{unit}", f"predicted {unit}", ".4g"),
        Column("error", "error", "+.1%"),
        Column("low", "low", ".4g"),
        Column("high", "high", ".4g"),
        Column("note", "not scored because"),
    ]
    percent = lambda v: "-" if v is None else f"{v:.1%}"  # noqa: E731
    notes = [
        f"MAPE {result['mape']:.2%}, n = {result['n']}; the 80 % interval held"
        f" {result['coverage80']:.0%}; repeat noise {percent(result['repeat_noise'])}"
        f" ({result['repeat_rows']} repeated runs)",
        f"with the slow network's rows: MAPE {result['mape_slow']:.2%};"
        f" with every timed row: MAPE {result['mape_all']:.2%}, n = {result['n_all']};"
        f" repeat noise {percent(result['repeat_noise_all'])};"
        f" fitted on at most {result['calibration_rows_at_most']} rows",
    ]
    picked = result.get("choice")
    if picked and picked["groups"]:
        notes.append(
            f"choice: {picked['groups']} groups, the first is {picked['first']:.1%} slower than the"
            f" best, the best of three {picked['best_of_three']:.1%}"
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


def published() -> Table:
    """Held-out errors on the published tables of this repository, by split."""
    folder = Path(__file__).resolve().parent.parent / "logs" / "published"
    sets = {
        "Selene, SC'21 tables 1 and 2": ["narayanan_sc21_table1.csv", "narayanan_sc21_table2.csv"],
        "Jean Zay V100, healthy network": ["seed003_jeanzay_v100.csv"],
        "DGX H100, NeMo in bf16 and FP8": ["dgx_h100.csv"],
    }
    found = []
    for name, files in sets.items():
        rows = read_rows([folder / file for file in files])
        for split in SPLITS[:3]:
            result = summary(validate_time(rows, fitting.MAX_ROWS, split))
            found.append({"set": name, "split": split} | result)
    return Table(
        [
            Column("set", "published rows"),
            Column("split", "split"),
            Column("mape", "MAPE", ".1%"),
            Column("n", "n", "d"),
            Column("coverage80", "inside the 80 % interval", ".0%"),
            Column("repeat_noise", "repeat noise", ".1%"),
            Column("mape_slow", "MAPE with the slow network's rows", ".1%"),
        ],
        found,
    )


def beside(records: list[Any], calibration: Any) -> list[float | None]:
    """Predicted seconds of runs that were read from logs; None where their facts do not suffice."""
    here = calibration.machine_override is not None
    found: list[float | None] = []
    for record in records:
        try:
            settings = settings_of(record, here)
        except ValueError:
            found.append(None)
            continue
        if here and settings["width"] != 4:  # a host was measured and fitted in fp32 alone
            found.append(None)
            continue
        if not here:
            settings |= {"gpus_per_node": calibration.gpus_per_node, "flash": calibration.flash}
        x = columns(**settings)
        machine = calibration.machine(settings["width"], record.precision == "fp8")
        crowd = crowding(record) if here else 1.0
        found.append(float(np.ravel(calibration.fit.seconds(x, machine))[0]) * crowd)
    return found


@command_line("analysis.predict")
def main(argv: list[str] | None = None) -> int:
    """Validate, print."""
    parser = Parser(
        prog="python -m analysis.predict",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--validate", nargs="+", type=Path, metavar="FILE", required=True)
    parser.add_argument("--calibrate-rows", type=int, default=fitting.MAX_ROWS, metavar="N")
    parser.add_argument("--split", choices=SPLITS, default="random")
    parser.add_argument("--memory", action="store_true", help="gigabytes, not seconds")
    parser.add_argument("--format", choices=FORMATS, default="text", help=FORMAT_HELP)
    arguments = parser.parse_args(argv)
    check_flags(arguments, calibrate_rows=(0, 10_000))
    rows = read_rows(arguments.validate)
    what = "memory" if arguments.memory else "time"
    if arguments.memory:
        found, refused = validate_memory(rows, arguments.calibrate_rows, arguments.split)
        result = summary(found, what) | {"refused": refused}
    else:
        found = validate_time(rows, arguments.calibrate_rows, arguments.split)
        result = summary(found, what)
    if arguments.format == "json":
        print(json_objects([result]).strip()[1:-1].strip())
        return 0
    text = table(result, what).render(arguments.format)
    print(emphasise(text) if arguments.format == "text" else text, end="")
    return 0


if __name__ == "__main__":
    sys.exit(main())
