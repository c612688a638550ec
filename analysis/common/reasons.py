"""Why a cell of a table is empty or in doubt, and what else is to be said of a run: one list of
reasons for a run, and the words that tables, JSON and pages make of it."""

from typing import NamedTuple

NOTE = "note"  # the kind of what is worth saying where a run has no result


class Reason(NamedTuple):
    """Why something is so: `kind` is what code tests, `text` the sentence that people read, and
    `columns` are the cells that it is about, by their keys; none where it is about all of a run."""

    kind: str
    text: str
    columns: tuple[str, ...] = ()

    def __str__(self) -> str:
        return self.text
