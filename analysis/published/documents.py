"""Published Markdown tables as data, under the column names of analysis/logs/published_csv.py.

A row keeps its line, so that a finding can name it.
"""

import re
from itertools import pairwise

from analysis.logs.published_csv import Cell, PublishedTable, Row, column_name, unique


def cells_of(line: str) -> list[Cell]:
    """The cells of a table line: text between unescaped bars, stripped, with their places."""
    bars = [m.start() for m in re.finditer(r"(?<!\\)\|", line)]
    if line[: bars[0]].strip():  # no bar at the line's begin, none at its end
        bars.insert(0, -1)
    if line[bars[-1] + 1 :].strip():
        bars.append(len(line))
    cells = []
    for left, right in pairwise(bars):
        inside = line[left + 1 : right]
        stripped = inside.strip()
        start = left + 1 + (len(inside) - len(inside.lstrip())) if stripped else left + 1
        cells.append(Cell(stripped, start, start + len(stripped)))
    return cells


_RULE = re.compile(r"^\s*(?=.*\|)\|?\s*:?-+:?\s*(?:\|\s*:?-+:?\s*)*\|?\s*$")


def tables_in(text: str) -> list[PublishedTable]:
    """The tables of a Markdown document outside of code fences."""
    outside: dict[int, str] = {}  # of code fences
    fenced = False
    for line_no, line in enumerate(text.split("\n"), start=1):
        if line.lstrip().startswith("```"):
            fenced = not fenced
        elif not fenced:
            outside[line_no] = line.rstrip("\r")
    return [
        _table(outside, line_no - 1)
        for line_no, line in outside.items()
        if _RULE.match(line) and "|" in outside.get(line_no - 1, "")
    ]


def _table(outside: dict[int, str], heading_line: int) -> PublishedTable:
    headings = [cell.text for cell in cells_of(outside[heading_line])]
    columns: list[str] = []
    for heading in headings:
        columns.append(unique(column_name(heading), columns))
    rows, line_no = [], heading_line + 2
    while "|" in outside.get(line_no, ""):
        cells = cells_of(outside[line_no])
        if any(cell.text for cell in cells):
            rows.append(Row(line_no, dict(zip(columns, cells, strict=False))))
        line_no += 1
    return PublishedTable(heading_line, columns, rows, headings)
