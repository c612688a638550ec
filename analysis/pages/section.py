"""What a page is made of: the runs of a study in; sections with sentences, tables and charts out.
Plain data."""

from dataclasses import dataclass, field
from typing import Any, NamedTuple

from analysis.common import colours
from analysis.common.table import Table
from analysis.logs.record import Record

GOOD, IN_DOUBT, BAD = "good", "doubt", "bad"


@dataclass(frozen=True)
class Study:
    """The runs that a page shows.

    table: that of `analysis.tflops`, a row for each of `records`. kind: of scaling, strong or weak.
    baseline: as it was asked for, and the run that it means. refused: what could not be read.
    predict: the cluster that predictions are for.
    """

    records: list[Record]
    table: Table
    kind: str
    baseline: str | None = None
    base: Record | None = None
    refused: list[str] = field(default_factory=list)
    predict: str | None = None

    @property
    def palette(self) -> dict[str, str]:
        """Returns the colour of each engine on the whole page."""
        return colours.of_engines(colours.label(record.engine) for record in self.records)

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


class Card(NamedTuple):
    """The fastest run on one number of GPUs. `figure` is the number that people look for, `words`
    stand below it."""

    heading: str
    run: str
    figure: str
    words: list[str]
    colour: str
    is_muted: bool = False  # slower than the baseline, or unsure


class Trust(NamedTuple):
    """Whether the numbers of a page can be believed: `state` is GOOD, IN_DOUBT or BAD, `doubts`
    stand behind their number, which opens."""

    state: str
    headline: str
    words: list[str]
    doubts: list[str]


class FirstScreen(NamedTuple):
    """What a page says before anybody scrolls: what its runs are, the answer to the study's
    question, a card for each number of GPUs, whether to trust them, and one picture. `bound`: what
    bounds the fastest run, "" where it is a log of another program."""

    about: str
    answer: str
    cards: list[Card]
    trust: Trust
    picture: Chart | None = None
    bound: str = ""


class Page(NamedTuple):
    """A page's title, which is the study's question where there is one, its first screen, its
    views, and what could not be read."""

    title: str
    first: FirstScreen
    sections: list[Section]
    refused: list[str]
    palette: dict[str, str] = {}
