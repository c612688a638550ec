"""Published measurements in CSV files: one reader, and one vocabulary for their columns.

The planner, the audit and the recomputed tables all read through `read_csv`. A column is known by
our name (`step_s`) or by what publishers call it (`seconds_per_iteration`, `Speed`).

Three facts about a row have columns of their own. In the tables of others they are remarks in
`notes`, from which `read_csv` copies them: `lint` (how the row contradicts itself), `warm_up` (yes:
the time is of a first iteration) and `gradients` (the precision in which they are accumulated).
"""

import csv
import math
import re
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

from base.errors import UsageError

# Our name of a column -> what publishers call it, in lower case without spaces and punctuation.
_HEADINGS = {
    "gpus": "ngpus numgpus",
    "gpu_type": "gputype",
    "gpu_memory_gb": "gpumemgb",
    "params_b": "size msize paramsb modelsize",
    "gas": "ppchunks gradaccum",
    "micro_batch": "mbs micbs microbatch",
    "global_batch": "gbs globbs globalbatch",
    "seq_len": "seq seqlen",
    "recompute": "actrecompute",
    "sequence_parallel": "seqparallel",
    "step_s": "speed secondsperiteration siter",
    "tflops": "tflopspergpu",
    "tokens_per_s": "tokenssecglobal tokenssec tokenspers tokenss",
    "memory_gb": "memgb gpum",
    "wall_s": "walltimes walltime totalwalltimesec",
    "speedup": "speedupvs1gpu",
    "efficiency": "scalingefficiency",
    "time_s": "timesec times trainingtime",
}
_BY_HEADING = {alias: name for name, aliases in _HEADINGS.items() for alias in aliases.split()}
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


def column_name(heading: str) -> str:
    """Our name for a heading; an unknown heading stays, in lower case with _ between its words."""
    words = re.findall(r"[a-z0-9]+", heading.lower())
    return _BY_HEADING.get("".join(words), "_".join(words))


def number(text: str) -> float | None:
    """The number that a text starts with, or None."""
    match = _NUMBER.match(text)
    value = float(match[1].replace(",", "")) if match else math.inf
    return value if math.isfinite(value) else None


class Row(NamedTuple):
    """One row: its line (from 1) and its cells by column name (a repeated name gets #2, #3)."""

    line_no: int
    cells: dict[str, str]

    def text(self, name: str) -> str:
        """The cell's text; empty where there is none."""
        return self.cells.get(name, "")

    def number(self, name: str) -> float | None:
        """The number that a cell starts with (`137s`, `52B`, `29,971.23`, `**~650 s**`)."""
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
    """A table of its headings and of the texts in each of its lines."""
    columns: list[str] = []
    for heading in headings:
        name = column_name(heading)
        count = 1 + sum(other.partition("#")[0] == name for other in columns)
        columns.append(name if count == 1 else f"{name}#{count}")
    rows = [Row(no, dict(zip(columns, texts, strict=False))) for no, texts in lines]
    return PublishedTable(line_no, headings, columns, rows)


def read_csv(
    path: Path, needed: tuple[str, ...] = ("gpus",), delimiter: str = ","
) -> PublishedTable:
    """Read a CSV of measurements; empty lines are skipped.

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
        for name, pattern in _REMARKS.items():
            if not row.text(name) and (match := pattern.search(row.text("notes"))):
                row.cells[name] = match[1].strip() or "yes"
    return table
