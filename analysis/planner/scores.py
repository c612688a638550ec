"""The tables of docs/planner-accuracy.md: how right the planner chooses and predicts on the
published rows of this repository. `python -m analysis.report` writes them.
"""

from typing import Any

import numpy as np

from analysis.common.table import Column, Table
from analysis.planner import fitting
from analysis.planner.choice import choice, first_crashed, naive
from analysis.planner.ranking import MARGIN
from analysis.planner.rows import Rows, read_rows
from analysis.planner.validate import (
    SPLITS,
    fits_in_memory,
    summary,
    validate_memory,
    validate_time,
)
from base.errors import UsageError
from base.files import ROOT

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
}
FIRST = list(SETS)[:3]  # by split
CHOICES = (
    "Ultra-Scale H100, nanotron 1.34B and 8.86B",
    "vTrain A100, one node",
    "vTrain A100, 8 nodes",
)
COUNTS = (0, 10, fitting.MAX_ROWS)
# What the planner of commit 7687084 chose on the same rows: (first, 90th percentile, best of 3).
BEFORE = {
    ("Ultra-Scale H100, nanotron 1.34B and 8.86B", "no run"): (0.553, 1.711, 0.257),
    ("Ultra-Scale H100, nanotron 1.34B and 8.86B", "20 rows"): (1.298, 3.226, 0.047),
    ("Ultra-Scale H100, nanotron 1.34B and 8.86B", "20 rows of other models"): (
        0.669,
        1.716,
        0.283,
    ),
    ("vTrain A100, one node", "no run"): (0.080, 0.278, 0.012),
    ("vTrain A100, one node", "20 rows"): (0.056, 0.242, 0.005),
    ("vTrain A100, one node", "20 rows of other models"): (0.044, 0.128, 0.003),
    ("vTrain A100, 8 nodes", "no run"): (0.039, 0.076, 0.026),
    ("vTrain A100, 8 nodes", "20 rows"): (0.057, 0.125, 0.034),
    ("vTrain A100, 8 nodes", "20 rows of other models"): (0.039, 0.076, 0.026),
}


def rows_of(name: str) -> Rows:
    """The published rows of a set."""
    return read_rows([ROOT / "logs" / "published" / file for file in SETS[name]])


def choices() -> Table:
    """Regret of the planner's choices, of rules of thumb, and of the planner before."""
    most = fitting.MAX_ROWS
    kinds = {
        "no run": (0, "random"),
        f"{most} rows": (most, "random"),
        f"{most} rows of other models": (most, "leave-model-out"),
    }
    found: list[dict[str, Any]] = []
    for name in CHOICES:
        rows = rows_of(name)
        for kind, how in kinds.items():
            tried = validate_time(rows, *how)
            index = np.flatnonzero(tried.scored)
            fits = fits_in_memory(rows, MARGIN)
            now = choice(rows, index, tried.predicted, fits)
            now["crashed"] = first_crashed(rows, index, tried.predicted, fits)
            first, p90, three = BEFORE[name, kind]
            before = {"first": first, "first_p90": p90, "best_of_three": three}
            found.append({"set": name, "by": f"planner, {kind}"} | now)
            found.append({"set": name, "by": f"planner of 7687084, {kind}"} | before)
        found += [{"set": name, "by": rule} | regret for rule, regret in naive(rows, index).items()]
    columns = [
        Column("set", "published rows"),
        Column("by", "chosen by"),
        Column("groups", "groups", "d"),
        Column("first", "first choice slower than the best", ".1%"),
        Column("first_p90", "90th percentile", ".1%"),
        Column("near", "within 5 %", ".0%"),
        Column("best_of_three", "best of three", ".1%"),
        Column("crashed", "first choice crashed", ".0%"),
    ]
    return Table(columns, found)


def by_split() -> Table:
    """Held-out errors of time on the tables that the model grew up with, by split."""
    found = []
    for name in FIRST:
        rows = rows_of(name)
        for split in SPLITS[:3]:
            result = summary(validate_time(rows, fitting.MAX_ROWS, split))
            found.append({"set": name, "split": split} | result)
    columns = [
        Column("set", "published rows"),
        Column("split", "split"),
        Column("mape", "MAPE", ".1%"),
        Column("n", "n", "d"),
        Column("coverage80", "inside the 80 % interval", ".0%"),
        Column("repeat_noise", "repeat noise", ".1%"),
        Column("mape_slow", "MAPE with the slow network's rows", ".1%"),
    ]
    return Table(columns, found)


def by_count() -> Table:
    """Held-out errors of time by how many other rows were fitted; 0: the priors alone."""
    found = []
    for name in SETS:
        rows = rows_of(name)
        row: dict[str, Any] = {"set": name}
        for count in COUNTS:
            result = summary(validate_time(rows, count, "random"))
            keys = ("median_abs_error", "mape", "coverage80")
            row |= {"n": result["n"]} | {f"{key}{count}": result[key] for key in keys}
        if len(set(rows.model)) > 1:
            other = summary(validate_time(rows, fitting.MAX_ROWS, "leave-model-out"))
            row["other"] = other["mape"]
        found.append(row)
    few, many = COUNTS[1:]
    columns = [
        Column("set", "published rows"),
        Column("n", "n", "d"),
        Column("median_abs_error0", "no run: median error", ".1%"),
        Column("mape0", "MAPE", ".1%"),
        Column("coverage800", "in the interval", ".0%"),
        Column(f"median_abs_error{few}", f"{few} rows: median error", ".1%"),
        Column(f"mape{few}", "MAPE", ".1%"),
        Column(f"coverage80{few}", "in the interval", ".0%"),
        Column(f"mape{many}", f"{many} rows: MAPE", ".1%"),
        Column(f"coverage80{many}", "in the interval", ".0%"),
        Column("other", f"{many} rows of other models: MAPE", ".1%"),
    ]
    return Table(columns, found)


def by_memory() -> Table:
    """Held-out errors of memory where peaks are published, and which runs are refused."""
    found = []
    for name in SETS:
        try:
            result = summary(validate_memory(rows_of(name), fitting.MAX_ROWS, "random"))
        except UsageError:  # no peak is published
            continue
        refused = result["refused"]
        wrong = ", ".join(refused["wrong"]) if len(refused["wrong"]) <= 5 else "many"
        found.append({"set": name} | result | refused | {"wrong": wrong})
    columns = [
        Column("set", "published rows"),
        Column("mape", "MAPE of the peak", ".1%"),
        Column("n", "n", "d"),
        Column("oom", "out of memory or crashed", "d"),
        Column("oom_refused", "of them refused", "d"),
        Column("ran", "ran", "d"),
        Column("ran_refused", "of them refused", "d"),
        Column("wrong", "wrong"),
    ]
    return Table(columns, found)
