"""What a page is made of: the runs of a study in; sections with sentences, tables and charts out.
Plain data."""

from dataclasses import dataclass, field
from typing import Any, NamedTuple

from analysis.common.table import Table
from analysis.logs.record import Record


@dataclass(frozen=True)
class Study:
    """The runs that a page shows.

    table: that of `analysis.tflops`, a row for each of `records`. kind: of scaling, strong or weak.
    baseline: as it was asked for, and the run that it means. refused: what could not be read.
    """

    records: list[Record]
    table: Table
    kind: str
    baseline: str | None = None
    base: Record | None = None
    refused: list[str] = field(default_factory=list)

    @property
    def own(self) -> list[Record]:
        """Returns the runs of this repository, whose folders say more than a log."""
        return [record for record in self.records if record.own]


class Chart(NamedTuple):
    """A Vega-Lite specification with its rows, and its contents in words."""

    spec: dict[str, Any]
    caption: str


@dataclass
class Section:
    """One view. A section without content is left out. `results`: columns of its tables that stand
    first, behind the name."""

    title: str
    words: list[str] = field(default_factory=list)
    tables: dict[str, Table] = field(default_factory=dict)
    charts: list[Chart] = field(default_factory=list)
    results: tuple[str, ...] = ()

    @property
    def empty(self) -> bool:
        """Returns whether the section has nothing to show."""
        return not (self.words or self.charts or any(t.rows for t in self.tables.values()))


class Page(NamedTuple):
    """A page's title, the sentences of its first screen, its views, and what could not be read."""

    title: str
    summary: list[str]
    sections: list[Section]
    refused: list[str]
