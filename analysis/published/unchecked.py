"""Columns of a table in which the audit would not notice a wrong number."""

from dataclasses import replace

from analysis.published.any_table import AnyTable, Line
from analysis.published.rules import findings_of

ROWS = 24  # of a table take part
CELLS = 3  # of a column are doubled, one at a time


def unchecked(table: AnyTable) -> list[str]:
    """The columns whose numbers could be twice as large and no rule would say it.

    table: before `settle`; it stays as it is. A column counts as checked if the audit notices most
    of its doubled numbers, which are taken from the first, a middle and the last row.
    """
    rows = table.rows[:ROWS]
    before = _found(table, rows)
    columns = dict.fromkeys(value.column for row in rows for value in row.values.values())
    missed = []
    for column in columns:
        having = [i for i, row in enumerate(rows) if _doubled(row, column) is not None]
        if not having:  # zeros alone: twice the number is the same
            continue
        tried = sorted({having[k * (len(having) - 1) // (CELLS - 1)] for k in range(CELLS)})
        noticed = 0
        for i in tried:
            changed = [*rows[:i], _doubled(rows[i], column), *rows[i + 1 :]]
            noticed += bool(_found(table, changed) - before)
        if 2 * noticed <= len(tried):
            missed.append(column)
    return missed


def _found(table: AnyTable, rows: list[Line]) -> set[tuple]:
    copies = [replace(row, values=dict(row.values), words=dict(row.words)) for row in rows]
    return {(f.line, f.column, f.kind) for f in findings_of(replace(table, rows=copies))}


def _doubled(row: Line, column: str) -> Line | None:
    """The row with twice the number in a column; None where it has none there."""
    values = {
        name: replace(value.times(2), text=f"{2 * value.value:g}")
        for name, value in row.values.items()
        if value.column == column and value.value
    }
    if not values:
        return None
    cells = row.cells
    if len(values) == 1:  # not a layout in words
        cells = cells | {column: next(iter(values.values())).text}
    return replace(row, values=row.values | values, cells=cells)
