"""Shows published tables (logs/published) beside the values recomputed from their own numbers.

    python -m benchmarks.published_tables FILE.md... [--check]

analysis.report, and it knows these blocks, too: `jeanzay FIRST-LAST`, the published rows of these
lines, `logs WORD...`, the published logs whose path has such a word, `planned FLAG...`, a plan in
few columns, `checkpoints`, `gpt2`, `epochs`, `convergence` and `coverage`. Each table is made from
the transcribed facts alone.
"""

import re
import sys
from dataclasses import replace
from typing import Any

import numpy as np
import pandas

from analysis import plan, report
from analysis.common.table import Column, Table
from analysis.logs.published_csv import Row, read_csv
from analysis.published.published_runs import record_of, stated_rate
from analysis.runs.scaling_curve import karp_flatt
from analysis.runs.throughput import tflops_per_gpu, utilisation
from base.errors import Parser, UsageError, command_line
from base.files import ROOT
from base.storage import BYTES, state_bytes
from benchmarks import reference_convergence
from benchmarks.planner import interval_errors

FOLDER = ROOT / "logs" / "published"
JEAN_ZAY = "seed003_jeanzay_v100.csv"


def serial_share(speedup: float, ratio: float) -> float | None:
    """Returns `karp_flatt`, where it is a share (0 to 1); else None."""
    share = karp_flatt(speedup, ratio)
    return share if share is not None and 0 <= share <= 1 else None


def _rows(name: str) -> list[Row]:
    return read_csv(FOLDER / name).rows


def _frame(rows: list[Row], *names: str) -> pandas.DataFrame:
    """Returns columns of the rows as numbers, NaN where there is none."""
    table = [[row.number(name) for name in names] for row in rows]
    return pandas.DataFrame(table, columns=names, dtype=float)


def _line(row: Row) -> int:
    """Returns the line of the published document that the row was transcribed from."""
    return int(re.match(r"line (\d+)", row.text("table"))[1])


def jean_zay(lines: list[str]) -> Table:
    """Recomputes the Jean Zay V100 rows from the document's lines, which are stated as FIRST-LAST.

    `published` is as printed; `8P tokens` its own rule on its own seconds; `megatron` model FLOPs
    from the shapes, which leave recomputation out, and MFU is theirs over the V100's peak.
    """
    first, dash, last = " ".join(lines).partition("-")
    if not (dash and first.isdecimal() and last.isdecimal()):
        raise UsageError(f"jeanzay wants FIRST-LAST, not {' '.join(lines)!r}")
    source = [row for row in _rows(JEAN_ZAY) if int(first) <= _line(row) <= int(last)]
    if not source:
        raise UsageError(f"{JEAN_ZAY} has no row from lines {first} to {last}")
    columns = [
        Column("line", "line", "d"),
        Column("gpus", "GPUs", ".0f"),
        Column("params_b", "size (B)", "g"),
        *(Column(axis, axis.upper(), ".0f") for axis in ("tp", "pp", "dp")),
        Column("gas", "GAS", ".0f"),
        Column("micro_batch", "MBS", ".0f"),
        Column("global_batch", "GBS", ".0f"),
        Column("step_s", "s/iter", "g"),
        Column("published", "TFLOPs published", ".1f"),
        Column("recomputed", "recomputed (8P tokens)", ".1f"),
        Column("megatron", "model TFLOP/s (megatron)", ".1f"),
        Column("mfu", "MFU", ".1%"),
        Column("engine", "engine"),
        Column("zero_stage", "ZeRO", ".0f"),
        Column("offload", "offload"),
        Column("date", "date"),
        Column("status", "status"),
        Column("notes", "notes"),
    ]
    rows = [_jean_zay_row(row) for row in source]
    return Table([replace(column, seldom=True) for column in columns], rows)


def _jean_zay_row(row: Row) -> dict[str, Any]:
    """Returns the cells of a row. The convention `seed` counts recomputation for a size that is
    stated without a shape."""
    numbers = ("gpus", "params_b", "tp", "pp", "dp", "micro_batch", "gas", "global_batch")
    cells = {name: row.number(name) for name in (*numbers, "step_s", "zero_stage")}
    cells |= {name: row.text(name) or None for name in ("engine", "offload", "date", "notes")}
    record = record_of(row, JEAN_ZAY)
    rate = stated_rate(record, row) if cells["step_s"] else None
    recomputed = tflops_per_gpu(record, rate, "seed").value
    record.params = None  # a rounded size, beside which the shape counts
    megatron = tflops_per_gpu(record, rate, "megatron").value
    return cells | {
        "line": _line(row),
        "status": row.text("status").replace("ok", "") or None,
        "published": row.number("tflops"),
        "recomputed": recomputed,
        "megatron": megatron,
        "mfu": utilisation(record, megatron, "megatron").value,
    }


def checkpoints() -> Table:
    """Shows the time to save a checkpoint; bytes and rates follow at 2 + 12 per parameter."""
    saves = _frame(_rows("seed003_checkpoint_save.csv"), "nodes", "gpus", "params_b", "save_ms")
    weights_gb, state_gb = saves.params_b * BYTES["bf16"], state_bytes(saves.params_b)
    saves["weights_tb"], saves["state_tb"] = weights_gb / 1000, state_gb / 1000
    saves["gb_per_s"] = (state_gb + weights_gb) / (saves.save_ms / 1000)
    saves["gb_per_s_per_gpu"] = saves.gb_per_s / saves.gpus
    columns = [
        Column("nodes", "nodes", ".0f"),
        Column("gpus", "GPUs", ".0f"),
        Column("params_b", "size (B)", "g"),
        Column("save_ms", "ms (published)", ".2f"),
        Column("weights_tb", "weights TB (2P)", ".3f"),
        Column("state_tb", "state TB (12P)", ".3f"),
        Column("gb_per_s", "GB/s", ".1f"),
        Column("gb_per_s_per_gpu", "GB/s per GPU", ".3f"),
    ]
    return Table(columns, saves.to_dict("records"))


def gpt2() -> Table:
    """Shows the tables of GPT-2 124M: each run beside the first of its table, by tokens/s and by
    wall clock. An efficiency by wall clock stands where no tokens/s are printed."""
    source = _rows("gpt2_data_parallel.csv")
    names = ("gpus", "tokens", "tokens_per_s", "wall_s", "epoch_s", "steps")
    runs = _frame(source, *names, "speedup", "efficiency").add_suffix("_published")
    runs = runs.rename(columns={f"{name}_published": name for name in names})
    runs["train_s"] = runs.tokens / runs.tokens_per_s
    runs["step_s"] = runs.epoch_s / runs.steps
    facts = ("table", "run", "precision", "engine", "commit")
    words = pandas.DataFrame([[row.text(name) for name in facts] for row in source], columns=facts)
    base = runs.groupby(words.table).transform("first")
    changed = words.iloc[:, 2:] != words.groupby("table")[[*facts[2:]]].transform("first")
    ratio = runs.gpus / base.gpus
    runs["speedup"] = runs.tokens_per_s / base.tokens_per_s
    runs["wall_speedup"] = base.wall_s / runs.wall_s
    runs["efficiency"] = (runs.speedup.fillna(runs.wall_speedup) / ratio).where(ratio > 1)
    rows = runs.assign(run=words.run, ratio=ratio).to_dict("records")
    for row, differs in zip(rows, changed.to_dict("records"), strict=True):
        row["serial"] = serial_share(row["speedup"], row["ratio"])
        if any(differs.values()):
            names = ", ".join(name for name, value in differs.items() if value)
            row["remarks"] = f"invalid comparison: {names} differ"
    columns = [
        Column("run", "run"),
        Column("gpus", "GPUs", ".0f"),
        Column("tokens_per_s", "tokens/s", ".2f"),
        Column("wall_s", "wall s", ".2f"),
        Column("train_s", "of which training", ".2f"),
        Column("step_s", "s/iter", ".4g"),
        Column("speedup_published", "speedup published", ".2f"),
        Column("speedup", "recomputed", ".3f"),
        Column("wall_speedup", "by wall clock", ".3f"),
        Column("efficiency_published", "efficiency published", ".2f"),
        Column("efficiency", "recomputed", ".2f"),
        Column("serial", "serial share (Karp-Flatt)", ".3f"),
        Column("remarks", "remarks", long="below"),
    ]
    return Table(columns, rows)


def epochs() -> Table:
    """Shows each epoch's breakdown: the mean over ranks, as published, and the slowest rank, which
    decides when the epoch ends (`slowest_...`)."""
    source = _rows("gpt_epochs.csv")
    phases = ("total_s", "compute_s", "comm_s", "loading_s", "movement_s")
    ranks = _frame(source, "batch", "gpus", *phases).astype({"batch": int, "gpus": int})
    is_mean = np.array([row.text("rank") == "mean" for row in source])
    means = ranks[is_mean].set_index(["batch", "gpus"])
    each = ranks[~is_mean].sort_values("total_s").groupby(["batch", "gpus"]).last()
    table = means.combine_first(each).join(each.add_suffix("_slowest"))
    alone = table.total_s_slowest.xs(1, level="gpus").reindex(table.index, level="batch")
    table["published"] = alone / table.total_s
    table["speedup"] = alone / table.total_s_slowest
    table["efficiency"] = table.speedup / table.index.get_level_values("gpus")
    table["share"] = table.comm_s_slowest / table.total_s_slowest
    rows = table.reset_index().to_dict("records")
    for row in rows:
        row["serial"] = serial_share(row["speedup"], row["gpus"])
    columns = [
        Column("batch", "batch", "d"),
        Column("gpus", "GPUs", "d"),
        Column("total_s", "published s (mean of ranks)", ".2f"),
        Column("published", "speedup published", ".2f"),
        Column("total_s_slowest", "slowest rank s", ".2f"),
        Column("speedup", "recomputed", ".2f"),
        Column("efficiency", "efficiency", ".2f"),
        Column("serial", "serial share (Karp-Flatt)", ".3f"),
        Column("compute_s_slowest", "its compute s", ".2f"),
        Column("comm_s_slowest", "its communication s", ".2f"),
        Column("share", "share", ".1%"),
    ]
    return Table(columns, rows)


def read_logs(words: list[str]) -> Table:
    """Shows the published logs whose path has one of these words, as `analysis.tflops` reads them:
    our TFLOP/s beside those that the program prints, and by which convention it counts."""
    rows = pandas.read_csv(FOLDER / "real_logs.csv", dtype={"gpus": float}).astype(object)
    rows = rows.where(rows.notna(), None)
    found = pandas.concat(rows[rows.log.str.contains(word, regex=False)] for word in words)
    found["published"] = found.log.str.partition("/")[0].str.replace("+", "/")
    columns = [
        Column("published", "published by"),
        Column("format", "format"),
        Column("gpus", "GPUs", ".0f"),
        Column("tokens_per_s", "tokens/s", ".0f"),
        Column("tflops", "TFLOP/s/GPU (megatron)", ".1f"),
        Column("printed_tflops", "printed", ".1f"),
        Column("printed_by", "its convention"),
        Column("why", "why", long="below"),
    ]
    return Table(columns, found.to_dict("records"))


def planned(words: list[str]) -> Table:
    """Shows the fastest layouts of a plan by what decides: the split, the time with its interval,
    and the memory; `words` are the flags of `analysis.plan`."""
    parser = Parser(prog="python -m analysis.plan")
    plan.add_flags(parser)
    table = plan.answer(parser.parse_args(words))
    keys = ("engine", "tp", "pp", "vpp", "dp", "micro_batch", "recompute", "predicted_s", "low_s")
    chosen = {*keys, "high_s", "mfu", "memory_gib"}
    columns = [column for column in table.columns if column.key in chosen]
    return replace(table, columns=columns, notes=table.notes[:2])


report.BLOCKS |= {
    "planned": planned,
    "logs": read_logs,
    "jeanzay": jean_zay,
    "checkpoints": lambda _: checkpoints(),
    "gpt2": lambda _: gpt2(),
    "epochs": lambda _: epochs(),
    "convergence": lambda _: reference_convergence.coverage(),
    "coverage": lambda _: interval_errors.coverage(),
}


@command_line("published_tables")
def main(argv: list[str] | None = None) -> int:
    """Runs analysis.report, which knows these blocks, too."""
    return report.main(argv)


if __name__ == "__main__":
    sys.exit(main())
