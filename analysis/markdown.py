"""Published tables as data: Markdown tables and CSV files under one set of column names.

Both keep the line each row stands on, so that a finding can name it, and Markdown cells keep their
place, so that one of them can be rewritten and nothing else.
"""

import csv
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from models.errors import UsageError
from models.files import check_ends

# Our name of a column -> what publishers call it, in lower case without spaces and punctuation.
HEADINGS = {
    "gpus": ("gpus", "ngpus", "numgpus"),
    "params_b": ("size", "msize", "paramsb", "modelsize"),
    "tp": ("tp",),
    "pp": ("pp",),
    "dp": ("dp",),
    "cp": ("cp",),
    "gas": ("gas", "ppchunks", "gradaccum"),
    "micro_batch": ("mbs", "micbs", "microbatch"),
    "global_batch": ("gbs", "globbs", "globalbatch"),
    "seq_len": ("seq", "seqlen"),
    "step_s": ("speed", "secondsperiteration", "siter"),
    "tflops": ("tflops", "tflopspergpu"),
    "tokens_per_s": ("tokenssecglobal", "tokenssec", "tokenspers", "tokenss"),
    "wall_s": ("walltimes", "walltime", "totalwalltimesec"),
    "speedup": ("speedup", "speedupvs1gpu"),
    "efficiency": ("efficiency", "scalingefficiency"),
    "time_s": ("timesec", "times", "trainingtime"),
}
_BY_HEADING = {alias: name for name, aliases in HEADINGS.items() for alias in aliases}


def column_name(heading: str) -> str:
    """Our name for a heading; one that means nothing to us stays, in lower case."""
    plain = re.sub(r"[^a-z0-9]", "", heading.lower())
    if heading in HEADINGS:
        return heading
    return _BY_HEADING.get(plain, plain)


@dataclass(frozen=True)
class Cell:
    """The text of a cell and where it stands in its line."""

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
    """A table of a document: its headings' line, rows, and the section that it stands in."""

    line_no: int
    columns: list[str]
    rows: list[Row]
    section: str = ""
    section_lines: tuple[int, int] = (1, 1)  # first and last line of the section


@dataclass
class Document:
    """A Markdown file: its lines, its tables, and its prose (lines outside of code fences)."""

    source: str
    lines: list[str]
    tables: list[PublishedTable] = field(default_factory=list)
    prose: list[tuple[int, str]] = field(default_factory=list)
    headings: list[tuple[int, int, str]] = field(default_factory=list)  # line, level, text


_NUMBER = re.compile(r"^[~*\s$]*([+-]?\d[\d,]*(?:\.\d+)?(?:[eE][+-]?\d+)?)")


def number(text: str) -> float | None:
    """The number that a text starts with, or None."""
    match = _NUMBER.match(text)
    return float(match[1].replace(",", "")) if match else None


def unit_in_last_place(text: str) -> float:
    """What one step of the last printed digit is worth: 1 for `137s`, 0.1 for `46.7`."""
    match = _NUMBER.match(text)
    decimals = match[1].partition(".")[2] if match else ""
    return 10.0 ** -len(decimals)


def _split(line: str) -> list[Cell]:
    """The cells of a table line: text between unescaped bars, stripped, with their places."""
    bars = [m.start() for m in re.finditer(r"(?<!\\)\|", line)]
    cells = []
    for left, right in zip(bars, bars[1:], strict=False):
        inside = line[left + 1 : right]
        stripped = inside.strip()
        start = left + 1 + (len(inside) - len(inside.lstrip())) if stripped else left + 1
        cells.append(Cell(stripped, start, start + len(stripped)))
    return cells


_RULE = re.compile(r"^\s*\|(?:\s*:?-+:?\s*\|)+\s*$")


def parse(text: str, source: str = "") -> Document:
    """Read a Markdown document."""
    document = Document(source, text.split("\n"))
    fenced = False
    for line_no, line in enumerate(document.lines, start=1):
        if line.lstrip().startswith("```"):
            fenced = not fenced
        elif not fenced:
            document.prose.append((line_no, line.rstrip("\r")))
            if match := re.match(r"^(#{1,6}) +(.*)", line):
                document.headings.append((line_no, len(match[1]), match[2].strip()))
    outside = dict(document.prose)
    for line_no, line in document.prose:
        if _RULE.match(line) and "|" in outside.get(line_no - 1, ""):
            document.tables.append(_table(document, outside, line_no - 1))
    return document


def _table(document: Document, outside: dict[int, str], heading_line: int) -> PublishedTable:
    columns: list[str] = []
    for cell in _split(outside[heading_line]):
        columns.append(_unique(column_name(cell.text), columns))
    rows, line_no = [], heading_line + 2
    while outside.get(line_no, "").lstrip().startswith("|"):
        cells = _split(outside[line_no])
        if any(cell.text for cell in cells):
            rows.append(Row(line_no, dict(zip(columns, cells, strict=False))))
        line_no += 1
    first, last, title = 1, len(document.lines), ""
    for at, level, text in document.headings:
        if at < heading_line:
            first, title, own = at, text, level
        elif title and level <= own:
            last = at - 1
            break
    return PublishedTable(heading_line, columns, rows, title, (first, last))


def _unique(name: str, taken: list[str]) -> str:
    count = 1 + sum(other.partition("#")[0] == name for other in taken)
    return name if count == 1 else f"{name}#{count}"


def read_document(path: Path) -> Document:
    """Read a Markdown file; bytes that are no UTF-8 are replaced.

    Raises:
        UsageError: it cannot be read.
    """
    try:
        return parse(check_ends(path).read_text(encoding="utf-8", errors="replace"), str(path))
    except OSError as error:
        raise UsageError(f"{path}: {error.strerror}") from error


def read_csv(path: Path, needed: tuple[str, ...] = ("gpus",)) -> PublishedTable:
    """Read a CSV of measurements.

    Raises:
        UsageError: unreadable, empty, or without a needed column; it names them.
    """
    try:
        with check_ends(path).open(newline="", encoding="utf-8", errors="replace") as lines:
            reader = csv.reader(lines, strict=True)
            headings = next(reader, None)
            if headings is None:
                raise UsageError(f"{path}: empty file")
            columns: list[str] = []
            for heading in headings:
                columns.append(_unique(column_name(heading), columns))
            missing = [name for name in needed if name not in columns]
            if missing:
                raise UsageError(f"{path}: no column {', '.join(missing)} in this CSV")
            rows, width = [], len(columns)
            for cells in reader:
                width = len(cells)
                cells = [Cell(text.strip()) for text in cells]
                rows.append(Row(reader.line_num, dict(zip(columns, cells, strict=False))))
            if width < len(columns) and not _ends_in_newline(path):
                raise UsageError(
                    f"{path}: truncated: line {reader.line_num} ends after {width} of"
                    f" {len(columns)} columns"
                )
    except (OSError, csv.Error) as error:
        raise UsageError(f"{path}: {getattr(error, 'strerror', None) or error}") from error
    return PublishedTable(1, columns, rows)


def _ends_in_newline(path: Path) -> bool:
    with Path(path).open("rb") as stream:
        stream.seek(-1, os.SEEK_END)
        return stream.read() == b"\n"


def recompute_tflops(text: str, seq_len: int = 1024) -> str:
    """`text` with every TFLOPs cell computed again from its row, all else byte for byte.

    The Jean Zay tables' rule, 8 FLOPs per parameter and token with the size as the row states it.
    A cell keeps its width where the number fits; a row without one of size, global batch, GPUs and
    seconds (or without a number in its TFLOPs cell, such as OOM) stays as it is.

    Raises:
        UsageError: there is no table with these columns.
    """
    document = parse(text)
    needed = {"gpus", "params_b", "global_batch", "step_s", "tflops"}
    tables = [table for table in document.tables if needed <= set(table.columns)]
    if not tables:
        raise UsageError("no table with GPUs, size, GBS, seconds (Speed) and TFLOPs columns")
    for table in tables:
        for row in table.rows:
            computed = row_tflops(row, seq_len)
            cell = row.cells.get("tflops")
            if computed is None or cell is None or number(cell.text) is None:
                continue
            line = document.lines[row.line_no - 1]
            document.lines[row.line_no - 1] = _replace(line, cell, f"{computed:.1f}")
    return "\n".join(document.lines)


def _replace(line: str, cell: Cell, new: str) -> str:
    start, old = cell.start, cell.text
    shift = len(new) - len(old)
    if shift > 0 and line[start - shift - 1 : start].isspace():
        start -= shift  # a wider number takes the room on its left
    elif shift < 0:
        new = " " * -shift + new
    return line[:start] + new + line[cell.end :]


def row_tflops(
    row: Row, seq_len: float | None, step_s: float | None = None, recompute: bool = True
) -> float | None:
    """TFLOP/s per GPU of a row by the Jean Zay rule, or None where a number is missing."""
    from analysis.tflops import stated_size_tflops

    gpus, size, batch = (row.number(k) for k in ("gpus", "params_b", "global_batch"))
    step_s = step_s or row.number("step_s")
    if not (gpus and size and batch and step_s and seq_len):
        return None
    return stated_size_tflops(size * 1e9, batch * seq_len, step_s, gpus, recompute)


def find(document: Document, pattern: str, lines: tuple[int, int] | None = None) -> Iterator:
    """(line number, match) of `pattern` in the prose, within `lines` where given."""
    first, last = lines or (1, len(document.lines))
    for line_no, line in document.prose:
        if first <= line_no <= last:
            for match in re.finditer(pattern, line):
                yield line_no, match
