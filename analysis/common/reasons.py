"""Why a cell of a table is empty or in doubt, and what else is to be said of a run: one list of
reasons for a run, and the words that tables, JSON and pages make of it."""

from collections import defaultdict
from collections.abc import Container, Iterable
from typing import Any, NamedTuple

from analysis.common.terminal import who

UNKNOWN, DOUBTFUL = "-", "?"  # in place of a value, and after one
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
    the key of the column: what `below_rows` prints."""
    cells: dict[str, dict[str, str]] = {"missing": {}, "doubtful": {}}
    for reason in reasons:
        is_missing = reason.kind in (MISSING, WITHHELD)
        cells["missing" if is_missing else "doubtful"] |= dict.fromkeys(reason.columns, reason.text)
    for column in cells["missing"]:  # what is empty is not in doubt
        cells["doubtful"].pop(column, None)
    return cells


def sentences(reasons: Iterable[Reason], silent: Container[str] = (MISSING,)) -> list[str]:
    """Returns the reasons in words, but for those of the `silent` kinds."""
    return [reason.text for reason in reasons if reason.kind not in silent]


def below_rows(rows: list[dict[str, Any]], headings: dict[str, str]) -> list[str]:
    """Returns a line for each reason that the rows' `missing` and `doubtful` have for a column. It
    has the columns' `headings` (by key), their mark, the reason, and the runs that have it."""
    runs: dict[str, list[str]] = defaultdict(list)
    for row in rows:
        for group, mark in (("missing", UNKNOWN), ("doubtful", DOUBTFUL)):
            reasons, columns = row.get(group) or {}, defaultdict(list)
            for key, heading in headings.items():
                if reason := reasons.get(key):
                    columns[reason].append(heading)
            for reason, names in columns.items():
                runs[f"{', '.join(names)} {mark}: {reason}"].append(row["run"])
    return [
        f"{reason}: {who(list(dict.fromkeys(names)), len(rows))}" for reason, names in runs.items()
    ]
