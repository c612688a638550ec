"""Published Markdown tables as data, under the column names of analysis/logs/published_csv.py.

A row keeps its line, so that a finding can name it, and a cell its place, so that one cell can be
rewritten and nothing else.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass, field

from analysis.logs.published_csv import Cell, PublishedTable, Row, column_name, number, unique
from models.errors import UsageError
from models.flops import stated_size_tflops


@dataclass
class Document:
    """A Markdown file: its lines, its tables, and its prose (lines outside of code fences)."""

    source: str
    lines: list[str]
    tables: list[PublishedTable] = field(default_factory=list)
    prose: list[tuple[int, str]] = field(default_factory=list)
    headings: list[tuple[int, int, str]] = field(default_factory=list)  # line, level, text


def cells_of(line: str) -> list[Cell]:
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
    for cell in cells_of(outside[heading_line]):
        columns.append(unique(column_name(cell.text), columns))
    rows, line_no = [], heading_line + 2
    while outside.get(line_no, "").lstrip().startswith("|"):
        cells = cells_of(outside[line_no])
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
