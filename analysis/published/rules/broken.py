"""How a rule names the cell that breaks it."""

import re
from collections.abc import Callable, Iterator

from analysis.published.any_table import AnyTable, Line
from analysis.published.finding import Finding
from analysis.published.headings import Value
from analysis.published.rules.intervals import AVERAGED, Interval, apart, middle, tolerance

FEW = 8


def of_cell(
    row: Line, cell: Value, kind: str, said: str, expected: str = "", sure: str = "certain"
) -> Finding:
    """The finding about a number of a row."""
    return Finding(
        row.file, row.at(cell.column), kind, said, cell.column, cell.text, expected, sure
    )


def of_text(
    row: Line, column: str, kind: str, said: str, expected: str = "", sure: str = "certain"
) -> Finding:
    """The finding about the cell of a row in a column."""
    line, text = row.at(column), row.cells.get(column, "")
    return Finding(row.file, line, kind, said, column, text, expected, sure)


Identity = Callable[[Line], tuple[str, Interval, Interval, str] | None]


def broken(table: AnyTable, kind: str, identity: Identity, least: float = 0.0) -> Iterator[Finding]:
    """Rows whose printed cell misses what follows by more than `least` and the table allow."""
    cases = [(row, case) for row in table.rows if (case := identity(row))]
    misses = [apart(printed, expected) for _, (_, printed, expected, _) in cases]
    few = 2.5 * AVERAGED if len(misses) < FEW else 0.0  # rows: these do not show how they average
    allowed = max(least, tolerance(misses), few)
    for row, (name, printed, expected, words) in cases:
        miss = apart(printed, expected)
        if miss <= allowed * (1 + 1e-9) + 1e-9:
            continue
        value = row[name]
        sure = "certain" if miss > 0.01 else "likely"
        ratio = middle(printed) / middle(expected)
        said = f"{value.column} {value.text}: {words}, {as_ratio(ratio)}"
        shown = as_printed(value, middle(expected) / middle(printed) * value.value, 6)
        yield of_cell(row, value, kind, said, shown, sure)


def as_ratio(ratio: float) -> str:
    close = 0.7 < ratio < 1.4
    return f"{100 * (ratio - 1):+.2g} %" if close else f"{figure(ratio, 3)} times that"


def figure(number: float, digits: int = 6) -> str:
    """A number in a sentence: a whole one as it is (2,097,152), else so many digits; no powers."""
    if digits > 3 and abs(number - round(number)) <= 1e-9 * abs(number):
        return f"{number:,.0f}"
    number = float(f"{number:.{digits}g}")
    if abs(number) < 1000:
        return f"{number:g}"
    return f"{number:,.{max(digits - len(f'{abs(number):.0f}'), 0)}f}"


def as_printed(cell: Value, number: float, digits: int = 4) -> str:
    """A value in the unit that the cell is printed in: `84.2 %` beside `94.5%`."""
    sign = "%" in cell.text + cell.column
    first = re.search(r"\d+", cell.text)
    if sign or (first and int(first[0]) > 10 * abs(cell.value) > 0 and cell.value < 10):
        return f"{100 * number:.{digits}g}" + " %" * sign
    return f"{number:.{digits}g}"
