"""Published measurements in CSV files: one reader, and one vocabulary for their columns.

The planner, the audit and the recomputed tables all read through `read_csv`. A column is known by
our name (`step_s`) or by what publishers call it (`seconds_per_iteration`, `Speed`).

Three facts about a row have columns of their own. In the tables of others they are remarks in
`notes`, which `read_csv` moves: `lint` (how the row contradicts itself), `warm_up` (yes: the time
is of a first iteration) and `gradients` (the precision in which they are accumulated).
"""

import csv
import math
import os
import re
from dataclasses import dataclass, field
from pathlib import Path

from base.errors import UsageError
from base.files import check_ends

# Our name of a column -> what publishers call it, in lower case without spaces and punctuation.
HEADINGS = {
    "gpus": ("gpus", "ngpus", "numgpus"),
    "gpu_type": ("gputype",),
    "gpu_memory_gb": ("gpumemgb",),
    "params_b": ("size", "msize", "paramsb", "modelsize"),
    "tp": ("tp",),
    "pp": ("pp",),
    "dp": ("dp",),
    "cp": ("cp",),
    "gas": ("gas", "ppchunks", "gradaccum"),
    "micro_batch": ("mbs", "micbs", "microbatch"),
    "global_batch": ("gbs", "globbs", "globalbatch"),
    "seq_len": ("seq", "seqlen"),
    "recompute": ("actrecompute",),
    "sequence_parallel": ("seqparallel",),
    "step_s": ("speed", "secondsperiteration", "siter"),
    "tflops": ("tflops", "tflopspergpu"),
    "tokens_per_s": ("tokenssecglobal", "tokenssec", "tokenspers", "tokenss"),
    "memory_gb": ("memgb", "gpum"),
    "wall_s": ("walltimes", "walltime", "totalwalltimesec"),
    "speedup": ("speedup", "speedupvs1gpu"),
    "efficiency": ("efficiency", "scalingefficiency"),
    "time_s": ("timesec", "times", "trainingtime"),
}
_BY_HEADING = {alias: name for name, aliases in HEADINGS.items() for alias in aliases}
_LINT = re.compile(r";?\s*\bLINT\b:?\s*([^;]*)")
_WARM_UP = re.compile(r"first iteration|\bwarm-?up iteration", re.IGNORECASE)
_BF16_GRADIENTS = re.compile(r";?\s*gradients in bf16", re.IGNORECASE)
_NUMBER = re.compile(r"^[~*\s$]*([+-]?(?:\d[\d,]*(?:\.\d+)?|\.\d+)(?:[eE][+-]?\d+)?)")


def column_name(heading: str) -> str:
    """Our name for a heading; an unknown heading stays, in lower case with _ between its words."""
    if heading in HEADINGS:
        return heading
    words = re.findall(r"[a-z0-9]+", heading.lower())
    return _BY_HEADING.get("".join(words), "_".join(words))


def number(text: str) -> float | None:
    """The number that a text starts with, or None."""
    match = _NUMBER.match(text)
    value = float(match[1].replace(",", "")) if match else math.inf
    return value if math.isfinite(value) else None


def unit_in_last_place(text: str) -> float:
    """What one step of the last printed digit is worth: 1 for `137s`, 0.1 for `46.7`."""
    match = _NUMBER.match(text)
    decimals = match[1].partition(".")[2] if match else ""
    return 10.0 ** -len(decimals)


@dataclass(frozen=True)
class Cell:
    """The text of a cell and where it stands in its line (Markdown only)."""

    text: str
    start: int = 0
    end: int = 0


@dataclass
class Row:
    """One row: its line (from 1) and its cells by column name (a repeated name gets #2, #3)."""

    line_no: int
    cells: dict[str, Cell]

    def text(self, name: str) -> str:
        """The cell's text; empty where there is none."""
        cell = self.cells.get(name)
        return cell.text if cell else ""

    def number(self, name: str) -> float | None:
        """The number that a cell starts with (`137s`, `52B`, `29,971.23`, `**~650 s**`)."""
        return number(self.text(name))


@dataclass
class PublishedTable:
    """A table of a document: its headings' line, its columns by our names, and its rows."""

    line_no: int
    columns: list[str]
    rows: list[Row]
    headings: list[str] = field(default_factory=list)  # of the columns, as they are printed


def unique(name: str, taken: list[str]) -> str:
    """The name, or name#2, name#3 where others have it already."""
    count = 1 + sum(other.partition("#")[0] == name for other in taken)
    return name if count == 1 else f"{name}#{count}"


def read_csv(
    path: Path, needed: tuple[str, ...] = ("gpus",), delimiter: str = ","
) -> PublishedTable:
    """Read a CSV of measurements; empty lines are skipped.

    Raises:
        UsageError: unreadable, empty, truncated, or without a needed column; it names them.
    """
    try:
        with check_ends(path).open(newline="", encoding="utf-8", errors="replace") as lines:
            reader = csv.reader(lines, delimiter=delimiter, strict=True)
            columns: list[str] = []
            headings = next(reader, [])
            for heading in headings:
                columns.append(unique(column_name(heading), columns))
            if not columns:
                raise UsageError(f"{path}: empty file")
            if missing := [name for name in needed if name not in columns]:
                raise UsageError(f"{path}: no column {', '.join(missing)} in this CSV")
            rows, width = [], len(columns)
            for texts in filter(None, reader):
                width = len(texts)
                cells = [Cell(text.strip()) for text in texts]
                rows.append(Row(reader.line_num, dict(zip(columns, cells, strict=False))))
            if width < len(columns) and not _ends_in_newline(path):
                raise UsageError(
                    f"{path}: truncated: line {reader.line_num} ends after {width} of"
                    f" {len(columns)} columns"
                )
    except OSError as error:
        raise UsageError(f"{path}: {error.strerror or error}") from error
    except csv.Error as error:
        raise UsageError(f"{path}: no CSV: {error}") from error
    for row in rows:
        _move_remarks(row)
    return PublishedTable(1, columns, rows, headings)


def _move_remarks(row: Row) -> None:
    """Move what `notes` says about LINT, warm-up and gradients to its columns, where not there."""
    notes, found = row.text("notes"), {}
    if match := _LINT.search(notes):
        found["lint"] = match[1].strip() or "yes"
        notes = _LINT.sub("", notes)
    if _WARM_UP.search(notes):
        found["warm_up"] = "yes"
    if _BF16_GRADIENTS.search(notes):
        found["gradients"] = "bf16"
        notes = _BF16_GRADIENTS.sub("", notes)
    if found:
        found = {name: text for name, text in found.items() if not row.text(name)}
        row.cells |= {name: Cell(text) for name, text in found.items()}
        row.cells["notes"] = Cell(notes.strip("; "))


def _ends_in_newline(path: Path) -> bool:
    with Path(path).open("rb") as stream:
        stream.seek(-1, os.SEEK_END)
        return stream.read() == b"\n"
