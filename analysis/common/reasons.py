"""Why a cell of a table is empty or in doubt, and what else is to be said of a run: one list of
reasons for a run, and the words that tables, JSON and pages make of it."""

from collections.abc import Container, Iterable
from typing import NamedTuple

# Kinds of reasons; any other kind is a doubt about the run, or proves how it ended.
NOTE = "note"  # worth saying where a run has no result
MISSING = "missing"  # why its columns are empty
WITHHELD = "withheld"  # why they are empty, which is said of the run, too
DOUBT = "doubt"  # about its columns, whose values are marked, or about the run
ASIDE = "aside"  # said where all reasons are asked for


class Reason(NamedTuple):
    """Why something is so: `kind` is what code tests, `text` the sentence that people read, and
    `columns` are the cells that it is about, by their keys; none where it is about all of a run."""

    kind: str
    text: str
    columns: tuple[str, ...] = ()

    def __str__(self) -> str:
        return self.text


def of_cells(reasons: Iterable[Reason]) -> dict[str, dict[str, str]]:
    """Returns why cells of a row are empty, `missing`, and in doubt, `doubtful`, each in words by
    the key of the column: what `Table` prints below its rows."""
    cells: dict[str, dict[str, str]] = {"missing": {}, "doubtful": {}}
    for reason in reasons:
        is_missing = reason.kind in (MISSING, WITHHELD)
        cells["missing" if is_missing else "doubtful"] |= dict.fromkeys(reason.columns, reason.text)
    return cells


def sentences(reasons: Iterable[Reason], silent: Container[str] = (MISSING,)) -> list[str]:
    """Returns the reasons in words, but for those of the `silent` kinds."""
    return [reason.text for reason in reasons if reason.kind not in silent]
