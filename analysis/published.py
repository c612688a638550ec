"""Tables that others published, beside what their own numbers give: functions of logs/published.

Each function returns a Table made from the transcribed facts alone; `analysis.report` puts them
into Markdown, `analysis.plots` draws from the same rows.
"""

import csv
import re
from collections import defaultdict
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from analysis import beside, scaling
from analysis.audit import Context, audit_rows
from analysis.compare import REPEAT_COLUMNS, spread
from analysis.fitting import MAX_ROWS
from analysis.markdown import Row, read_csv, row_tflops
from analysis.tables import Column, Table
from models.config import PRESETS, GPTConfig
from models.errors import UsageError
from models.flops import CONVENTIONS, tflops_per_gpu
from models.hardware import mfu
from models.storage import checkpoint_bytes, state_bytes, weights_bytes

FOLDER = Path(__file__).resolve().parent.parent / "logs" / "published"
JEAN_ZAY = "seed003_jeanzay_v100.csv"
DATA_PARALLEL = "gpt2_data_parallel.csv"
EPOCHS = "gpt_epochs.csv"
CHECKPOINTS = "seed003_checkpoint_save.csv"
BIG_PURPLE = "big-purple-v100"  # of slurm/clusters.toml
SC21 = ("narayanan_sc21_table1.csv", "narayanan_sc21_table2.csv")
HELD_OUT = "predicted s/iter (held out)"


def _rows(name: str) -> list[Row]:
    return read_csv(FOLDER / name).rows


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
def _held_out(*names: str) -> dict[str, tuple[float, float]]:
    """(predicted, measured) seconds of a cluster's published rows, each from a fit that never saw
    it; nan where there is none."""
    from analysis.predict import validate_time
    from analysis.rows import read_rows

    found = validate_time(read_rows([FOLDER / name for name in names]), MAX_ROWS, "random")
    pairs = zip(found.predicted, found.rows.measured, strict=True)
    return {row: tuple(map(float, pair)) for row, pair in zip(found.rows.ids, pairs, strict=True)}


def _held_out_by(cluster: str) -> str:
    return f"a fit on {MAX_ROWS} other rows of {cluster} at most, which never saw the row"


@cache
def _by_data_sheet(cluster: str) -> dict[str, float]:
    """Predicted seconds per step of the GPT-2 124M rows of a cluster that nobody calibrated.

    DeepSpeed's runs were ZeRO 1, as the studies of slurm/ that cover them.
    """
    from analysis.calibration import load_calibration
    from parallel.columns import columns

    where = load_calibration(cluster)
    found = {}
    for row in _rows(DATA_PARALLEL):
        sizes = {k: row.number(k) for k in ("dp", "micro_batch", "gas", "seq_len")}
        if None in sizes.values():
            continue
        deepspeed = row.text("engine") == "DeepSpeed"
        x = columns(
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


def _big_purple_by() -> str:
    source = beside.source(BIG_PURPLE)
    return f"{source}; there is no calibration of Big Purple"


def jean_zay(first: int, last: int) -> Table:
    """The Jean Zay V100 rows from the document's lines `first` to `last`, recomputed.

    `published` is as printed; `8P tokens` its own rule on its own seconds; `megatron` model FLOPs
    from the shapes, which leave recomputation out, and MFU is theirs over the V100's peak.
    `predicted` is held out: analysis.predict's time model, fitted on at most 20 other rows.

    Raises:
        UsageError: no row stands on these lines.
    """
    source = read_csv(FOLDER / JEAN_ZAY)
    findings = defaultdict(list)
    for finding in audit_rows(source, JEAN_ZAY, Context()):
        findings[finding.line].append(finding.message)
    rows, pairs = [], []
    for row in source.rows:
        if not first <= _line(row) <= last:
            continue
        step_s, gpus, batch = (row.number(k) for k in ("step_s", "gpus", "global_batch"))
        config, seq_len = _config(row), row.number("seq_len")
        found: dict[str, Any] = {
            name: row.number(name)
            for name in ("gpus", "params_b", "tp", "pp", "dp", "micro_batch", "gas", "global_batch")
        }
        found |= {
            "line": _line(row),
            "step_s": step_s,
            "published": row.number("tflops"),
            "recomputed": row_tflops(row, seq_len),
            "status": row.text("status"),
        }
        if config and step_s and batch:
            tokens = batch * seq_len
            found["megatron"] = tflops_per_gpu(config, int(seq_len), tokens, step_s, int(gpus))
            gpu = f"{row.text('gputype')} {row.text('cluster')}"
            found["mfu"], _ = mfu(found["megatron"], gpu, row.text("precision"), "megatron")
        remarks = [text for text in (row.text("engine"), _settings(row)) if text]
        remarks += findings[row.line_no]
        if found["status"] != "ok":
            remarks.append(found["status"])
        found["remarks"] = "; ".join(remarks)
        found["predicted_s"], _ = _held_out(JEAN_ZAY).get(row.text("id") or "", (None, None))
        found["predicted_error"] = beside.error(found["predicted_s"], step_s)
        rows.append(found)
        pairs.append((_configuration(row), found["predicted_s"], step_s))
    if not rows:
        raise UsageError(f"{JEAN_ZAY} has no row from lines {first} to {last}")
    columns = [
        Column("line", "line", "d"),
        Column("gpus", "GPUs", ".0f"),
        Column("params_b", "size (B)", "g"),
        *(Column(k, k.upper(), ".0f") for k in ("tp", "pp", "dp")),
        Column("gas", "GAS", ".0f"),
        Column("micro_batch", "MBS", ".0f"),
        Column("global_batch", "GBS", ".0f"),
        Column("step_s", "s/iter", "g"),
        *beside.columns(HELD_OUT),
        Column("published", "TFLOPs published", ".1f"),
        Column("recomputed", "recomputed (8P tokens)", ".1f"),
        Column("megatron", "model TFLOP/s (megatron)", ".1f"),
        Column("mfu", "MFU", ".1%"),
        Column("remarks", "remarks"),
    ]
    shown = [c for c in columns if any(r.get(c.key) is not None for r in rows)]
    return Table(shown, rows, notes=beside.notes(_held_out_by("Jean Zay's V100s"), pairs))


def _configuration(row: Row) -> tuple[str, ...]:
    """What two Jean Zay rows must share to be repeats of each other."""
    names = ("gpus", "params_b", "tp", "pp", "dp", "gas", "micro_batch", "global_batch")
    notes = re.sub(r";?\s*LINT .*|ID [\d.]+;?|log file name.*", "", row.text("notes"))
    rest = (row.text(k) for k in ("zerostage", "offload", "engine"))
    return (*(row.text(k) for k in names), *rest, notes.strip(" ;"))


def _settings(row: Row) -> str:
    """What else the row says about its run: date, ZeRO, bucket size and the like."""
    said = [re.sub(r";?\s*LINT .*", "", row.text("notes"))]
    said += [f"ZeRO-{row.text('zerostage')}"] if row.text("zerostage") else []
    said += [f"offload {row.text('offload')}"] if row.text("offload") not in ("", "none") else []
    said += [row.text("date")]
    return "; ".join(text for text in said if text and not text.startswith("LINT"))


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
            seconds = np.array([m.number("step_s") for m in members])
            rows.append({"configuration": about, **spread(seconds), "lines": lines})
    return Table([*REPEAT_COLUMNS, Column("lines", "lines")], rows)


def checkpoints(path: Path = FOLDER / CHECKPOINTS) -> Table:
    """The time to save a checkpoint, and the bytes and rates that follow at 2 + 12 per parameter.

    Raises:
        UsageError: it is no table of saves.
    """
    rows = []
    for row in read_csv(path, ("gpus", "params_b", "savems")).rows:
        gpus, size, save_ms = (row.number(k) for k in ("gpus", "params_b", "savems"))
        known = size and save_ms
        rate = checkpoint_bytes(size) / (save_ms / 1000) if known else None
        rows.append(
            {
                "nodes": row.number("nodes"),
                "gpus": gpus,
                "params_b": size,
                "save_ms": save_ms,
                "weights_tb": weights_bytes(size) / 1000 if size else None,
                "state_tb": state_bytes(size) / 1000 if size else None,
                "gb_per_s": rate,
                "gb_per_s_per_gpu": rate / gpus if rate and gpus else None,
            }
        )
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
    rows, base = [], None
    for row in _rows(DATA_PARALLEL):
        if row.number("efficiency") is None:
            continue
        base = base or row
        gpus, rate = row.number("gpus"), row.number("tokens_per_s")
        step_s, base_s = 1 / rate, 1 / base.number("tokens_per_s")
        faster, efficiency = scaling.speedup(step_s, gpus, base_s, base.number("gpus"))
        measured = row.number("epochs") / row.number("optimizersteps")
        predicted = _by_data_sheet(BIG_PURPLE)[row.text("run")]
        changed = [k for k in ("precision", "engine", "commit") if row.text(k) != base.text(k)]
        rows.append(
            {
                "gpus": gpus,
                "tokens_per_s": rate,
                "wall_s": row.number("wall_s"),
                "train_s": row.number("tokens") / rate,
                "published": row.number("speedup"),
                "published_efficiency": row.number("efficiency"),
                "speedup": faster,
                "efficiency": efficiency,
                "wall_speedup": base.number("wall_s") / row.number("wall_s"),
                "serial": scaling.serial_share(faster, gpus / base.number("gpus")),
                "step_s": measured,
                "predicted_s": predicted,
                "predicted_error": beside.error(predicted, measured),
                "remarks": f"invalid comparison: {', '.join(changed)} differ" if changed else "",
            }
        )
    columns = [
        Column("gpus", "GPUs", ".0f"),
        Column("tokens_per_s", "tokens/s", ".2f"),
        Column("wall_s", "wall s", ".2f"),
        Column("train_s", "of which training", ".2f"),
        Column("step_s", "s/iter", ".4g"),
        *beside.columns(),
        Column("published", "speedup published", ".2f"),
        Column("speedup", "recomputed", ".2f"),
        Column("wall_speedup", "by wall clock", ".2f"),
        Column("published_efficiency", "efficiency published", ".2f"),
        Column("efficiency", "recomputed", ".2f"),
        Column("serial", "serial share (Karp-Flatt)", ".3f"),
        Column("remarks", "remarks"),
    ]
    share = scaling.fit_amdahl([(r["gpus"], r["speedup"]) for r in rows if r["gpus"] > 1])
    notes = [f"Amdahl's law fits a serial share of {share:.3f}"]
    pairs = [(r["gpus"], r["predicted_s"], r["step_s"]) for r in rows]
    return Table(columns, rows, notes=notes + beside.notes(_big_purple_by(), pairs))


def t4() -> Table:
    """The 1x and 4x T4 epoch times, both printed as approximate."""
    found = [r for r in _rows(DATA_PARALLEL) if r.text("gputype") == "T4"]
    base = found[0]
    rows = []
    for row in found:
        faster, efficiency = scaling.speedup(
            row.number("wall_s"), row.number("gpus"), base.number("wall_s"), base.number("gpus")
        )
        rows.append(
            {
                "run": row.text("run"),
                "wall_s": row.number("wall_s"),
                "published": row.number("speedup"),
                "speedup": faster,
                "efficiency": efficiency,
                "saved": 1 - 1 / faster,
            }
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
        {
            "run": row.text("run"),
            "tokens_per_s": row.number("tokens_per_s"),
            "train_s": row.number("tokens") / row.number("tokens_per_s"),
            "wall_s": row.number("wall_s"),
            "gain": row.number("tokens_per_s") / a.number("tokens_per_s") - 1,
            "wall_gain": a.number("wall_s") / row.number("wall_s") - 1,
            "step_s": row.number("epochs") / row.number("optimizersteps"),
            "commit": row.text("commit")[:7],
        }
        for row in (a, b)
    ]
    predicted = _by_data_sheet(BIG_PURPLE)
    beside.fill(rows, [predicted[row["run"]] for row in rows], "step_s")
    columns = [
        Column("run", "run"),
        Column("tokens_per_s", "tokens/s", ".2f"),
        Column("gain", "gain recomputed (published +19.5 %)", "+.1%"),
        Column("wall_s", "wall s", ".2f"),
        Column("wall_gain", "gain by wall clock", "+.1%"),
        Column("train_s", "of which training", ".2f"),
        Column("step_s", "s/iter", ".4g"),
        *beside.columns(),
        Column("commit", "commit"),
    ]
    notes = [
        f"invalid comparison: commit {a.text('commit')[:7]} and {b.text('commit')[:7]}",
        "one run each: nothing says how far apart two identical runs are",
        *beside.notes(_big_purple_by(), [(r["run"], r["predicted_s"], r["step_s"]) for r in rows]),
    ]
    return Table(columns, rows, notes=notes)


def epochs() -> dict[tuple[int, int], dict[str, dict[str, float]]]:
    """(batch, GPUs) -> rank (or "mean") -> seconds by phase, of the per-epoch breakdowns."""
    found: dict[tuple[int, int], dict[str, dict[str, float]]] = defaultdict(dict)
    try:
        with (FOLDER / EPOCHS).open(newline="") as lines:
            for row in csv.DictReader(lines):
                seconds = {k: float(v) for k, v in row.items() if k.endswith("_s")}
                found[int(row["batch"]), int(row["gpus"])][row["rank"]] = seconds
    except OSError as error:
        raise UsageError(f"{FOLDER / EPOCHS}: {error.strerror}") from error
    return found


def _slowest(ranks: dict[str, dict[str, float]]) -> dict[str, float]:
    return max((s for rank, s in ranks.items() if rank != "mean"), key=lambda s: s["total_s"])


def epoch_speedups() -> Table:
    """Speedups from the mean over ranks, as published, and from the slowest rank, which decides."""
    found, rows = epochs(), []
    for (batch, gpus), ranks in sorted(found.items()):
        alone = _slowest(found[batch, 1])["total_s"]
        mean = ranks.get("mean", _slowest(ranks))["total_s"]
        slowest = _slowest(ranks)["total_s"]
        rows.append(
            {
                "batch": batch,
                "gpus": gpus,
                "mean_s": mean,
                "published": alone / mean,
                "slowest_s": slowest,
                "speedup": alone / slowest,
                "efficiency": alone / slowest / gpus,
                "serial": scaling.serial_share(alone / slowest, gpus),
            }
        )
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
    return Table(columns, rows, notes=notes)


def epoch_phases() -> Table:
    """Compute and communication: the mean over ranks, as published, and the slowest rank's."""
    rows = []
    for (batch, gpus), ranks in sorted(epochs().items()):
        mean, slowest = ranks.get("mean", _slowest(ranks)), _slowest(ranks)
        rows.append(
            {
                "batch": batch,
                "gpus": gpus,
                "compute_s": mean["compute_s"],
                "comm_s": mean["comm_s"],
                "ratio": mean["compute_s"] / mean["comm_s"],
                "slowest_compute_s": slowest["compute_s"],
                "slowest_comm_s": slowest["comm_s"],
                "share": slowest["comm_s"] / slowest["total_s"],
            }
        )
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
    return Table(columns, rows)


def sc21_days() -> Table:
    """SC'21 table 2: days for 300 billion tokens, published, from equation 3 and its TFLOP/s, and
    predicted."""
    rows, pairs = [], []
    for row in _rows(SC21[1]):
        config = _config_sc21(row)
        rate = row.number("tflops") * 1e12 * row.number("gpus")
        per_token = CONVENTIONS["sc21"](config, 2048, True)
        predicted_s, measured_s = _held_out(*SC21)[row.text("id")]
        days = 300e9 * per_token / rate / 86400
        pairs.append((row.text("id"), predicted_s, measured_s))
        rows.append(
            {
                "engine": row.text("engine"),
                "params_b": row.number("params_b"),
                "gpus": row.number("gpus"),
                "tflops": row.number("tflops"),
                "published": float(re.search(r"300B tokens (\d+) days", row.text("notes"))[1]),
                "days": days,
                "predicted_days": days * predicted_s / measured_s,
                "predicted_error": beside.error(predicted_s, measured_s),
            }
        )
    columns = [
        Column("engine", "engine"),
        Column("params_b", "size (B)", "g"),
        Column("gpus", "GPUs", ".0f"),
        Column("tflops", "TFLOP/s/GPU published", ".0f"),
        Column("published", "days published", ".0f"),
        Column("days", "recomputed (sc21)", ".1f"),
        *beside.columns("predicted days (held out)", "predicted_days", ".1f"),
    ]
    return Table(columns, rows, notes=beside.notes(_held_out_by("Selene"), pairs))


def sc21_weak() -> Table:
    """SC'21 table 1: model and GPUs grow together; seconds by equation 3 and the published TFLOP/s,
    and predicted."""
    rows, pairs = [], []
    for row in _rows(SC21[0]):
        predicted_s, measured_s = _held_out(*SC21)[row.text("id")]
        pairs.append((row.text("id"), predicted_s, measured_s))
        names = ("params_b", "gpus", "tp", "pp", "dp", "global_batch")
        rows.append(
            {
                **{name: row.number(name) for name in names},
                "tflops": row.number("tflops"),
                "step_s": measured_s,
                "predicted_s": predicted_s,
                "predicted_error": beside.error(predicted_s, measured_s),
            }
        )
    columns = [
        Column("params_b", "size (B)", "g"),
        Column("gpus", "GPUs", ".0f"),
        *(Column(k, k, ".0f") for k in ("tp", "pp", "dp")),
        Column("global_batch", "global batch", ".0f"),
        Column("tflops", "TFLOP/s/GPU published", ".0f"),
        Column("step_s", "s/iter (sc21)", ".4g"),
        *beside.columns(HELD_OUT),
    ]
    return Table(columns, rows, notes=beside.notes(_held_out_by("Selene"), pairs))


def _config_sc21(row: Row) -> GPTConfig:
    sizes = [int(row.number(k)) for k in ("layers", "hidden", "heads")]
    return GPTConfig(*sizes, vocab_size=51200, max_seq_len=2048)
