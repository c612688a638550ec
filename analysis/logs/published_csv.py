"""Published measurements in CSV files: one reader, and one vocabulary for their columns.

The planner, the audit and the recomputed tables all read through `read_csv`. A column is known by
our name (`step_s`) or by what publishers call it (`seconds_per_iteration`, `Speed`).

What a publisher says in words is a column of ours in the tables of logs/published: `lint` (how the
row contradicts itself), `warm_up` (yes: the time is of a first iteration), `gradients` (the
precision in which they are accumulated), `first_layers` and `last_layers` (of an uneven pipeline),
`repeated_modules` (of selective recomputation), `mtp_layer`, the sizes of latent attention, and
`blocks` (of a hybrid). In the tables of others they are remarks in `notes`, from which `read_csv`
copies what _REMARKS finds.
"""

import csv
import math
import re
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

from base.errors import UsageError

# Our column -> what publishers call it; case, spaces and punctuation but % do not count.
HEADINGS = {
    "gpus": "# gpus; gpu count; number of gpus; total gpus; world size; devices; num devices;"
    " n gpus; num gpus",
    "nodes": "nodes; num nodes; number of nodes; hosts",
    "gpus_per_node": "gpus per node; gpus/node",
    "tp": "tp size; tensor parallel; tensor parallelism; tensor parallel size",
    "pp": "pp size; pipeline parallel; pipeline parallelism; pipeline parallel size",
    "dp": "dp size; data parallel; data parallelism; data parallel size",
    "cp": "cp size; context parallel; context parallel size",
    "ep": "ep; ep size; expert parallel; expert parallel size",
    "experts": "experts; num experts; number of experts",
    "routing": "routing; expert routing; router; load balancing",
    "dropped": "dropped; dropped tokens; dropped share; drop rate; capacity; capacity factor",
    "micro_batch": "micro batch size; micro-batch; mbs; micbs",
    "gas": "ga; gradient accumulation; gradient accumulation steps; grad accum steps; pp chunks;"
    " grad accum",
    "global_batch": "global batch size; total batch size; gbs; globbs; global batch",
    "seq_len": "sequence length; seq length; context length; seq; seq len",
    "layers": "layers; num layers; number of layers",
    "hidden": "hidden; hidden size; d model",
    "heads": "heads; attention heads; num heads",
    "ffn": "ffn; ffn size; ffn hidden size",
    "vocab": "vocab; vocab size; vocabulary size",
    "steps": "steps; train steps; optimizer steps; iterations",
    "params_b": "params; parameters; model size (b); # params (b); parameters (b); size; msize;"
    " model size",
    "step_s": "step time; step time (s); s/step; seconds per step; s/iteration; iteration time;"
    " iteration time (s); sec/iter; time per iteration (s); time per step (s); speed;"
    " seconds per iteration",
    "step_ms": "step time (ms); ms/step; ms/iter; iteration time (ms); time per step (ms);"
    " elapsed time per iteration (ms)",
    "tokens_per_s": "tokens/s (global); total tokens/s; global tokens/s; tokens/s (total)",
    "tokens_per_s_gpu": "tokens/s/gpu; tokens/gpu/s; tokens per second per gpu; tgs;"
    " throughput (tokens/s/gpu); tps/gpu",
    "tokens_per_s_some": "tokens/s; tokens per second; throughput (tokens/s); tps;"
    " throughput in tokens per second",
    "samples_per_s": "samples/s; samples per second; sequences/s; seq/s",
    "tflops": "tflop/s; tflop/s/gpu; tflops/gpu; tflops/s/gpu; achieved tflops; tflop/s per gpu;"
    " model tflop/s/gpu; model tflops/gpu",
    "mfu": "mfu; model flops utilization",
    "mfu_pct": "mfu %; mfu pct; model flops utilization (%)",
    "memory_gb": "memory (gb); peak memory (gb); memory (gib); memory/gpu (gb); peak gb; mem gb;"
    " gpu m",
    "efficiency_pct": "efficiency (%); scaling efficiency (%); efficiency pct",
    "tokens": "tokens; trained tokens; total tokens",
    "wall_s": "time_s; wall clock (s); wall time (s); wall time; total wall time sec",
    "gpu_type": "gpu; gpu type; hardware",
    "precision": "precision; dtype; data type",
    "model": "model; model name; workload",
    "formula": "tflops formula; formula; convention",
    "commit": "commit; revision",
    "cluster": "cluster; system",
    "engine": "framework; program; trainer; training framework",
    "table": "table",
    "recompute": "act recompute",
    "speedup": "speedup vs 1 gpu",
    "efficiency": "scaling efficiency",
    "gpu_memory_gb": "gpu mem gb",
    "sequence_parallel": "seq parallel",
}


_SAME_WORD = dict.fromkeys(("sec", "second", "seconds"), "s")
_SAME_WORD |= dict.fromkeys(("device", "chip", "accelerator"), "gpu")
_SAME_WORD |= {"tok": "tokens", "toks": "tokens", "approx": ""}


def _plain(heading: str) -> str:
    """Returns a heading's letters, digits and %, without tags of HTML, in one word for each of what
    programs name differently: `Tokens/sec/device` and `tok/s/GPU` are one."""
    words = re.findall(r"[a-z0-9]+|%", re.sub(r"<[^>]*>", " ", heading.lower()))
    return "".join(_SAME_WORD.get(word, word) for word in words)


_BY_HEADING = {
    _plain(words): name for name, headings in HEADINGS.items() for words in headings.split(";")
}
_REMARKS = {  # column -> what a remark in `notes` says; where it says no more, it is "yes"
    "lint": re.compile(r"\bLINT\b:?\s*([^;]*)"),
    "warm_up": re.compile(r"(?:first iteration|\bwarm-?up iteration)()", re.IGNORECASE),
    "gradients": re.compile(r"gradients in (bf16)", re.IGNORECASE),
    "head_dim": re.compile(r"\bhead_dim (\d+)"),
    "q_lora_rank": re.compile(r"\bq_lora (\d+)"),
    "kv_lora_rank": re.compile(r"\bkv_lora (\d+)"),
    "qk_pos_emb_head_dim": re.compile(r"\bqk_rope (\d+)"),
    "qk_head_dim": re.compile(r"\bqk_nope (\d+)"),
    "v_head_dim": re.compile(r"\bv_dim (\d+)"),
    "mtp_layer": re.compile(r"(?=.*one MTP layer).*with one()"),
    "repeated_modules": re.compile(r"recompute (?:of )?+(?!core_attn|none|full)(\w[\w+, ]*)"),
    "memory_of": re.compile(r"that of (the last rank)"),
    "blocks": re.compile(
        r"\b((?:hybrid of|gated delta net in) [^;]*|compressed and sparse|(?<=blocks: )[^;]*)"
    ),
}
_NUMBER = re.compile(r"^[~*\s$]*([+-]?(?:\d[\d,]*(?:\.\d+)?|\.\d+)(?:[eE][+-]?\d+)?)")


def known_name(heading: str) -> str | None:
    """Returns our name for a heading that HEADINGS lists; None for another."""
    return _BY_HEADING.get(_plain(heading))


def column_name(heading: str) -> str:
    """Returns our name for a heading. An unknown heading stays, in lower case with _ between its
    words."""
    words = "_".join(re.findall(r"[a-z0-9]+", heading.lower()))
    return words if words in HEADINGS else known_name(heading) or words


def number(text: str) -> float | None:
    """Returns the number that a text starts with; None where there is none."""
    match = _NUMBER.match(text)
    value = float(match[1].replace(",", "")) if match else math.inf
    return value if math.isfinite(value) else None


class Row(NamedTuple):
    """One row: its line (from 1) and its cells by column name (a repeated name gets #2, #3)."""

    line_no: int
    cells: dict[str, str]

    def text(self, name: str) -> str:
        """Returns the cell's text; empty where there is none."""
        return self.cells.get(name, "")

    def number(self, name: str) -> float | None:
        """Returns the number that a cell starts with (`137s`, `52B`, `29,971.23`, `**~650 s**`)."""
        return number(self.text(name))


class PublishedTable(NamedTuple):
    """A table of a document: its headings' line, the headings as they are printed, our names of
    them, and its rows."""

    line_no: int
    headings: list[str]
    columns: list[str]
    rows: list[Row]


def table_of(
    line_no: int, headings: list[str], lines: Iterable[tuple[int, list[str]]]
) -> PublishedTable:
    """Returns the table of these headings and of the texts in each of these lines. line_no: where
    the headings stand."""
    columns: list[str] = []
    for heading in headings:
        name = column_name(heading)
        count = 1 + sum(column.partition("#")[0] == name for column in columns)
        columns.append(name if count == 1 else f"{name}#{count}")
    rows = [Row(row_no, dict(zip(columns, texts, strict=False))) for row_no, texts in lines]
    return PublishedTable(line_no, headings, columns, rows)


def read_csv(
    path: Path, needed: tuple[str, ...] = ("gpus",), delimiter: str = ","
) -> PublishedTable:
    """Reads a CSV of measurements; empty lines are skipped.

    Raises:
        UsageError: unreadable, empty, truncated, or without a needed column; it names them.
    """
    try:
        with path.open(newline="", encoding="utf-8", errors="replace") as lines:
            reader = csv.reader(lines, delimiter=delimiter, strict=True)
            headings = next(reader, [])
            texts = [(reader.line_num, [cell.strip() for cell in row]) for row in reader if row]
    except OSError as error:
        raise UsageError(f"{path}: {error.strerror or error}") from error
    except csv.Error as error:
        raise UsageError(f"{path}: no CSV: {error}") from error
    if not headings:
        raise UsageError(f"{path}: empty file")
    table = table_of(1, headings, texts)
    if missing := [name for name in needed if name not in table.columns]:
        raise UsageError(f"{path}: no column {', '.join(missing)} in this CSV")
    last_line, last = texts[-1] if texts else (1, headings)
    if len(last) < len(headings) and not Path(path).read_bytes().endswith(b"\n"):
        raise UsageError(
            f"{path}: truncated: line {last_line} ends after {len(last)} of {len(headings)} columns"
        )
    for row in table.rows:
        notes = row.text("notes")
        for name, pattern in _REMARKS.items() if notes else ():
            if not row.text(name) and (match := pattern.search(notes)):
                row.cells[name] = match[1].strip() or "yes"
    return table
