"""Published tables (logs/published) beside the values recomputed from their own numbers.

Each function returns a Table made from the transcribed facts alone; `analysis.report` puts them
into Markdown, `analysis.plots` draws from the same rows.
"""

import re
import statistics
from collections import defaultdict
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

from analysis.common.table import Column, Table
from analysis.logs.published_csv import Row, read_csv
from analysis.measured import predictions, scaling_curve
from analysis.planner.calibration import load_calibration
from analysis.published.audit import audit_paths
from analysis.published.documents import row_tflops
from base.errors import UsageError
from base.files import ROOT
from base.storage import checkpoint_bytes, state_bytes, weights_bytes
from models.config import PRESETS, GPTConfig
from models.flops import CONVENTIONS, tflops_per_gpu
from models.gpus import mfu
from parallel.config.layout_arrays import columns as step_columns

FOLDER = ROOT / "logs" / "published"
JEAN_ZAY = "seed003_jeanzay_v100.csv"
DATA_PARALLEL = "gpt2_data_parallel.csv"
EPOCHS = "gpt_epochs.csv"
REAL_LOGS = "real_logs.csv"
CHECKPOINTS = "seed003_checkpoint_save.csv"
BIG_PURPLE = "big-purple-v100"  # of slurm/clusters.toml
SC21_DAYS = "narayanan_sc21_table2.csv"


def _rows(name: str) -> list[Row]:
    return read_csv(FOLDER / name).rows


def _numbers(row: Row, *names: str) -> dict[str, float | None]:
    return {name: row.number(name) for name in names}


def _config(row: Row) -> GPTConfig | None:
    """The model's sizes where the row has them."""
    names = {"n_layer": "layers", "hidden": "hidden", "vocab_size": "vocab", "n_head": "heads"}
    sizes = {ours: row.number(theirs) for ours, theirs in names.items()}
    seq_len = row.number("seq_len")
    if None in sizes.values() or not seq_len:
        return None
    return GPTConfig(max_seq_len=int(seq_len), **{k: int(v) for k, v in sizes.items()})


def _line(row: Row) -> int:
    """The line of the published document that the row was transcribed from."""
    return int(re.match(r"line (\d+)", row.text("table"))[1])


@cache
def _by_data_sheet(cluster: str) -> dict[str, float]:
    """Predicted seconds per step of the GPT-2 124M rows of a cluster that nobody calibrated.

    DeepSpeed's runs were ZeRO 1, as the studies in slurm/published/ that cover them.
    """
    where = load_calibration(cluster)
    found = {}
    for row in _rows(DATA_PARALLEL):
        sizes = _numbers(row, "dp", "micro_batch", "gas", "seq_len")
        if None in sizes.values():
            continue
        deepspeed = row.text("engine") == "DeepSpeed"
        x = step_columns(
            PRESETS["gpt2-124m"],
            seq=sizes["seq_len"],
            dp=sizes["dp"],
            micro_batch=sizes["micro_batch"],
            n_micro=sizes["gas"],
            zero_stage=int(deepspeed),
            deepspeed=deepspeed,
            flash=where.flash,
            gpus_per_node=where.gpus_per_node,
        )
        found[row.text("run")] = float(where.fit.seconds(x, where.machine())[0])
    return found


def _big_purple_notes(rows: list[dict[str, Any]]) -> list[str]:
    made_of = f"{predictions.source(BIG_PURPLE)}; there is no calibration of Big Purple"
    return predictions.notes(made_of, [(r["run"], r["predicted_s"], r["step_s"]) for r in rows])


def _big_purple_row(row: Row) -> dict[str, Any]:
    """What both tables of the V100s of Big Purple show of a run."""
    found = _numbers(row, "gpus", "tokens_per_s", "wall_s")
    step_s = row.number("epoch_s") / row.number("optimizer_steps")
    predicted_s = _by_data_sheet(BIG_PURPLE)[row.text("run")]
    return found | {
        "run": row.text("run"),
        "train_s": row.number("tokens") / found["tokens_per_s"],
        "step_s": step_s,
        "predicted_s": predicted_s,
        "predicted_error": predictions.error(predicted_s, step_s),
    }


def real_logs() -> Table:
    """What published logs print beside what is computed from them (benchmarks/published_logs.py).

    `ours by that`: TFLOP/s by the convention in `printed by` over the printed, less one, the median
    of the log's entries.
    """
    columns = [
        Column("log", "log"),
        Column("gpus", "GPUs", "d"),
        Column("tflops", "TFLOP/s/GPU", ".4g"),
        Column("convention", "convention"),
        Column("printed_tflops", "printed", ".4g"),
        Column("printed_by", "printed by"),
        Column("printed_error", "ours by that", "+.1%"),
        Column("why", "why"),
    ]
    source = _rows(REAL_LOGS)
    found = [
        {c.key: (row.number(c.key) if c.spec else row.text(c.key) or None) for c in columns}
        | {"gpus": (gpus := row.number("gpus")) and int(gpus)}
        for row in source
    ]
    counted = [row for row in found if row["tflops"] is not None]
    for row in found:
        row["convention"] = row["convention"] if row in counted else None
    note = f"{len(counted)} of {len(found)} logs have TFLOP/s under a named convention."
    return Table(columns, found, notes=[note])


def jean_zay(first: int, last: int) -> Table:
    """The Jean Zay V100 rows from the document's lines `first` to `last`, recomputed.

    `published` is as printed; `8P tokens` its own rule on its own seconds; `megatron` model FLOPs
    from the shapes, which leave recomputation out, and MFU is theirs over the V100's peak.

    Raises:
        UsageError: no row stands on these lines.
    """
    source = read_csv(FOLDER / JEAN_ZAY)
    findings = defaultdict(list)
    for finding in audit_paths([FOLDER / JEAN_ZAY]).findings:
        if finding.kind != "repeats":  # of several rows: the function `repeats` lists them
            findings[finding.line].append(finding.message)
    chosen = [row for row in source.rows if first <= _line(row) <= last]
    if not chosen:
        raise UsageError(f"{JEAN_ZAY} has no row from lines {first} to {last}")
    rows = [_jean_zay_row(row, findings[row.line_no]) for row in chosen]
    columns = [
        Column("line", "line", "d"),
        Column("gpus", "GPUs", ".0f"),
        Column("params_b", "size (B)", "g"),
        *(Column(k, k.upper(), ".0f") for k in ("tp", "pp", "dp")),
        Column("gas", "GAS", ".0f"),
        Column("micro_batch", "MBS", ".0f"),
        Column("global_batch", "GBS", ".0f"),
        Column("step_s", "s/iter", "g"),
        Column("published", "TFLOPs published", ".1f"),
        Column("recomputed", "recomputed (8P tokens)", ".1f"),
        Column("megatron", "model TFLOP/s (megatron)", ".1f"),
        Column("mfu", "MFU", ".1%"),
        Column("remarks", "remarks", long="below"),
    ]
    seldom = [replace(column, seldom=True) for column in columns]
    return Table(seldom, rows)


def _jean_zay_row(row: Row, findings: list[str]) -> dict[str, Any]:
    step_s, gpus, batch = (row.number(k) for k in ("step_s", "gpus", "global_batch"))
    config, seq_len = _config(row), row.number("seq_len")
    megatron = utilisation = None
    if config and step_s and batch:
        megatron = tflops_per_gpu(config, int(seq_len), batch * seq_len, step_s, int(gpus))
        gpu = f"{row.text('gpu_type')} {row.text('cluster')}"
        utilisation, _ = mfu(megatron, gpu, row.text("precision"), "megatron")
    engine, status = row.text("engine"), row.text("status")
    remarks = [engine, _settings(row), *findings, status * (status != "ok")]
    settings = ("gpus", "params_b", "tp", "pp", "dp", "micro_batch", "gas", "global_batch")
    return {
        **_numbers(row, *settings),
        "line": _line(row),
        "engine": engine,
        "step_s": step_s,
        "published": row.number("tflops"),
        "recomputed": row_tflops(row, seq_len),
        "megatron": megatron,
        "mfu": utilisation,
        "remarks": "; ".join(filter(None, remarks)),
    }


def _configuration(row: Row) -> tuple[str, ...]:
    """What two Jean Zay rows must share to be repeats of each other."""
    names = ("gpus", "params_b", "tp", "pp", "dp", "gas", "micro_batch", "global_batch")
    notes = re.sub(r"ID [\d.]+;?|log file name.*", "", row.text("notes"))
    rest = (row.text(k) for k in ("zero_stage", "offload", "engine"))
    return (*(row.text(k) for k in names), *rest, notes.strip(" ;"))


def _settings(row: Row) -> str:
    """What else the row says about its run: date, ZeRO, bucket size and the like."""
    said = [row.text("notes")]
    said += [f"ZeRO-{row.text('zero_stage')}"] if row.text("zero_stage") else []
    said += [f"offload {row.text('offload')}"] if row.text("offload") not in ("", "none") else []
    said += [row.text("date")]
    return "; ".join(text for text in said if text)


def repeats() -> Table:
    """Identical configurations that the Jean Zay tables measured more than once."""
    groups = defaultdict(list)
    for row in _rows(JEAN_ZAY):
        if row.number("step_s"):
            groups[_configuration(row)].append(row)
    rows = []
    for key, members in groups.items():
        if len(members) > 1:
            gpus, size, tp, pp, dp, _, micro, batch = key[:8]
            split = f"{size}B on {gpus} GPUs, tp {tp} pp {pp} dp {dp}, mbs {micro}, gbs {batch}"
            about = ", ".join(text for text in (split, key[10], key[11]) if text)
            lines = ", ".join(str(_line(m)) for m in members)
            seconds = [m.number("step_s") for m in members]
            rows.append(
                {
                    "configuration": about,
                    "n": len(seconds),
                    "median_s": statistics.median(seconds),
                    "fastest_s": min(seconds),
                    "slowest_s": max(seconds),
                    "spread": max(seconds) / min(seconds) - 1,
                    "lines": lines,
                }
            )
    columns = [
        Column("configuration", "configuration"),
        Column("n", "n", "d"),
        Column("median_s", "median s", ".4g"),
        Column("fastest_s", "fastest", ".4g"),
        Column("slowest_s", "slowest", ".4g"),
        Column("spread", "spread", ".1%"),
        Column("lines", "lines"),
    ]
    return Table(columns, rows)


def checkpoints(path: Path = FOLDER / CHECKPOINTS) -> Table:
    """The time to save a checkpoint, and the bytes and rates that follow at 2 + 12 per parameter.

    Raises:
        UsageError: it is no table of saves.
    """
    rows = []
    for row in read_csv(path, ("gpus", "params_b", "save_ms")).rows:
        found = _numbers(row, "nodes", "gpus", "params_b", "save_ms")
        size, save_ms = found["params_b"], found["save_ms"]
        found["weights_tb"] = weights_bytes(size) / 1000 if size else None
        found["state_tb"] = state_bytes(size) / 1000 if size else None
        rate = checkpoint_bytes(size) / (save_ms / 1000) if size and save_ms else None
        found["gb_per_s"] = rate
        found["gb_per_s_per_gpu"] = rate / found["gpus"] if rate and found["gpus"] else None
        rows.append(found)
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
    return Table(columns, rows)


def big_purple() -> Table:
    """The 1/2/4-GPU fixed-work table: speedups from its own tokens/s and from its wall clock."""
    measured = [row for row in _rows(DATA_PARALLEL) if row.number("efficiency") is not None]
    base, rows = measured[0], []
    for row in measured:
        found = _big_purple_row(row)
        times = 1 / found["tokens_per_s"], found["gpus"], 1 / base.number("tokens_per_s")
        faster, efficiency = scaling_curve.speedup(*times, base.number("gpus"))
        changed = [k for k in ("precision", "engine", "commit") if row.text(k) != base.text(k)]
        found |= {
            "published": row.number("speedup"),
            "published_efficiency": row.number("efficiency"),
            "speedup": faster,
            "efficiency": efficiency,
            "wall_speedup": base.number("wall_s") / found["wall_s"],
            "serial": scaling_curve.serial_share(faster, found["gpus"] / base.number("gpus")),
            "remarks": f"invalid comparison: {', '.join(changed)} differ" if changed else "",
        }
        rows.append(found)
    columns = [
        Column("gpus", "GPUs", ".0f"),
        Column("tokens_per_s", "tokens/s", ".2f"),
        Column("wall_s", "wall s", ".2f"),
        Column("train_s", "of which training", ".2f"),
        Column("step_s", "s/iter", ".4g"),
        *predictions.columns(),
        Column("published", "speedup published", ".2f"),
        Column("speedup", "recomputed", ".2f"),
        Column("wall_speedup", "by wall clock", ".2f"),
        Column("published_efficiency", "efficiency published", ".2f"),
        Column("efficiency", "recomputed", ".2f"),
        Column("serial", "serial share (Karp-Flatt)", ".3f"),
        Column("remarks", "remarks", long="below"),
    ]
    share = scaling_curve.fit_amdahl([(r["gpus"], r["speedup"]) for r in rows if r["gpus"] > 1])
    notes = [f"Amdahl's law fits a serial share of {share:.3f}"]
    return Table(columns, rows, notes=notes + _big_purple_notes(rows))


def t4() -> Table:
    """The 1x and 4x T4 epoch times, both printed as approximate."""
    found = [r for r in _rows(DATA_PARALLEL) if r.text("gpu_type") == "T4"]
    base_s, base_gpus = found[0].number("wall_s"), found[0].number("gpus")
    rows = []
    for row in found:
        wall_s = row.number("wall_s")
        faster, efficiency = scaling_curve.speedup(wall_s, row.number("gpus"), base_s, base_gpus)
        rows.append(
            {"run": row.text("run"), "wall_s": wall_s, "published": row.number("speedup")}
            | {"speedup": faster, "efficiency": efficiency, "saved": 1 - 1 / faster}
        )
    columns = [
        Column("run", "run"),
        Column("wall_s", "seconds (about)", ".0f"),
        Column("published", "speedup published", ".1f"),
        Column("speedup", "recomputed", ".2f"),
        Column("efficiency", "efficiency", ".2f"),
        Column("saved", "time saved", ".0%"),
    ]
    notes = ["published: 71% less time, 3.5x"]
    notes.append("nothing is predicted: neither the batch nor the steps of an epoch are published")
    return Table(columns, rows, notes=notes)


def bucket_ab() -> Table:
    """The A/B of DeepSpeed's bucket size: +19.5 % published, on two commits and one run each."""
    a, b = [r for r in _rows(DATA_PARALLEL) if r.text("table").startswith("Performance")]
    rows = [
        _big_purple_row(row)
        | {
            "gain": row.number("tokens_per_s") / a.number("tokens_per_s") - 1,
            "wall_gain": a.number("wall_s") / row.number("wall_s") - 1,
            "commit": row.text("commit")[:7],
        }
        for row in (a, b)
    ]
    columns = [
        Column("run", "run"),
        Column("tokens_per_s", "tokens/s", ".2f"),
        Column("gain", "gain recomputed (published +19.5 %)", "+.1%"),
        Column("wall_s", "wall s", ".2f"),
        Column("wall_gain", "gain by wall clock", "+.1%"),
        Column("train_s", "of which training", ".2f"),
        Column("step_s", "s/iter", ".4g"),
        *predictions.columns(),
        Column("commit", "commit"),
    ]
    notes = [
        f"invalid comparison: commit {a.text('commit')[:7]} and {b.text('commit')[:7]}",
        "one run each: nothing says how far apart two identical runs are",
        *_big_purple_notes(rows),
    ]
    return Table(columns, rows, notes=notes)


def epochs() -> dict[tuple[int, int], dict[str, dict[str, float]]]:
    """(batch, GPUs) -> rank (or "mean") -> seconds by phase, of the per-epoch breakdowns."""
    found: dict[tuple[int, int], dict[str, dict[str, float]]] = defaultdict(dict)
    for row in _rows(EPOCHS):
        seconds = {name: row.number(name) for name in row.cells if name.endswith("_s")}
        found[int(row.number("batch")), int(row.number("gpus"))][row.text("rank")] = seconds
    return found


def slowest_rank(ranks: dict[str, dict[str, float]]) -> dict[str, float]:
    return max((s for rank, s in ranks.items() if rank != "mean"), key=lambda s: s["total_s"])


def _epoch_rows() -> list[dict[str, Any]]:
    """Each breakdown: the mean over ranks, as published, and the slowest rank, which decides."""
    found, rows = epochs(), []
    for (batch, gpus), ranks in sorted(found.items()):
        slowest = slowest_rank(ranks)
        mean, alone = ranks.get("mean", slowest), slowest_rank(found[batch, 1])["total_s"]
        speedup = alone / slowest["total_s"]
        rows.append(
            {
                "batch": batch,
                "gpus": gpus,
                "mean_s": mean["total_s"],
                "published": alone / mean["total_s"],
                "slowest_s": slowest["total_s"],
                "speedup": speedup,
                "efficiency": speedup / gpus,
                "serial": scaling_curve.serial_share(speedup, gpus),
                "compute_s": mean["compute_s"],
                "comm_s": mean["comm_s"],
                "ratio": mean["compute_s"] / mean["comm_s"],
                "slowest_compute_s": slowest["compute_s"],
                "slowest_comm_s": slowest["comm_s"],
                "share": slowest["comm_s"] / slowest["total_s"],
            }
        )
    return rows


def epoch_speedups() -> Table:
    """Speedups from the mean over ranks, as published, and from the slowest rank."""
    columns = [
        Column("batch", "batch", "d"),
        Column("gpus", "GPUs", "d"),
        Column("mean_s", "published s (mean of ranks)", ".2f"),
        Column("published", "speedup published", ".2f"),
        Column("slowest_s", "slowest rank s", ".2f"),
        Column("speedup", "recomputed", ".2f"),
        Column("efficiency", "efficiency", ".2f"),
        Column("serial", "serial share (Karp-Flatt)", ".3f"),
    ]
    notes = ["nothing is predicted: neither model, sequence length nor GPU is published"]
    return Table(columns, _epoch_rows(), notes=notes)


def epoch_phases() -> Table:
    """Compute and communication: the mean over ranks, as published, and the slowest rank's."""
    columns = [
        Column("batch", "batch", "d"),
        Column("gpus", "GPUs", "d"),
        Column("compute_s", "compute s published", ".2f"),
        Column("comm_s", "comm s published", ".2f"),
        Column("ratio", "ratio", ".0f"),
        Column("slowest_compute_s", "compute s, slowest rank", ".2f"),
        Column("slowest_comm_s", "comm s, slowest rank", ".2f"),
        Column("share", "comm share", ".1%"),
    ]
    return Table(columns, _epoch_rows())


def sc21_days() -> Table:
    """SC'21 table 2: days for 300 billion tokens, published, and by equation 3 and its TFLOP/s."""
    rows = []
    for row in _rows(SC21_DAYS):
        found = _numbers(row, "params_b", "gpus", "tflops")
        rate = found["tflops"] * 1e12 * found["gpus"]
        sizes = [int(row.number(k)) for k in ("layers", "hidden", "heads")]
        config = GPTConfig(*sizes, vocab_size=51200, max_seq_len=2048)
        days = 300e9 * CONVENTIONS["sc21"](config, 2048, True) / rate / 86400
        published = float(re.search(r"300B tokens (\d+) days", row.text("notes"))[1])
        rows.append(found | {"engine": row.text("engine"), "published": published, "days": days})
    columns = [
        Column("engine", "engine"),
        Column("params_b", "size (B)", "g"),
        Column("gpus", "GPUs", ".0f"),
        Column("tflops", "TFLOP/s/GPU published", ".0f"),
        Column("published", "days published", ".0f"),
        Column("days", "recomputed (sc21)", ".1f"),
    ]
    return Table(columns, rows)
