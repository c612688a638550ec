"""What a page is made of: sections with tables and charts over the same rows. Plain data."""

from dataclasses import dataclass, field
from typing import Any

from analysis.common.tables import Table

# Rows of one kind: facts that all of them share, and one list per column.
Group = dict[str, dict[str, Any]]


@dataclass(frozen=True)
class Axis:
    """One axis of a layout map. values: what stands on it from below, evenly spaced; None where it
    is a number between its ends (log: by its logarithm), and one that a row lacks stands below."""

    key: str
    title: str
    values: tuple[Any, ...] | None = None
    ends: tuple[float, float] = (0.0, 1.0)
    log: bool = False


@dataclass(frozen=True)
class Chart:
    """A Vega-Lite specification over named rows, and its contents in words.

    data: the name of a table or of a data set of the page. A chart over a table shows the rows that
    the table's filter leaves; another chart, the rows whose `run` the table `runs` has left. limit:
    how many it shows at most, the first ones; 0: all of them. axes: of a chart over a table whose
    horizontal scale is these columns, in this order; a drag along one of them limits the table's
    filter, and the rows that it leaves out stay with `left` false.
    """

    spec: dict[str, Any]
    data: str
    summary: str
    limit: int = 0
    axes: tuple[Axis, ...] = ()


# Where a value stands: the name of a table of the page, the number of its row from 0, its column.
Cell = tuple[str, int, str]


@dataclass
class Section:
    """One view: sentences, tables by name, and charts. A section without content is left out.

    links: pairs of cells that lead to each other: a finding, and a cell that it is about. long:
    the names of tables whose rows are drawn when they are looked at, the first ones that the filter
    leaves; a click marks a row, and a chart with limit 1 shows the marked one.
    """

    title: str
    words: list[str] = field(default_factory=list)
    tables: dict[str, Table] = field(default_factory=dict)
    charts: list[Chart] = field(default_factory=list)
    data: dict[str, list[Group]] = field(default_factory=dict)
    links: list[tuple[Cell, Cell]] = field(default_factory=list)
    long: tuple[str, ...] = ()

    @property
    def empty(self) -> bool:
        """Whether there is nothing to show."""
        return not (self.words or self.charts or any(t.rows for t in self.tables.values()))


def group(rows: list[dict[str, Any]], **same: Any) -> Group:
    """Rows as columns; what is the same in all of them is said once."""
    keys = dict.fromkeys(key for row in rows for key in row)
    columns = {key: [row.get(key) for row in rows] for key in keys}
    alike = {k: v[0] for k, v in columns.items() if len(v) > 1 and v.count(v[0]) == len(v)}
    return {
        "same": same | alike,
        "columns": {k: values for k, values in columns.items() if k not in alike},
    }
