"""Tables: one type, printed as text, Markdown, CSV or JSON; what commands share to print them."""

import argparse
import csv
import io
import json
import math
import re
import shutil
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from analysis.common import terminal
from analysis.common.reasons import DOUBTFUL, UNKNOWN, below_rows
from base.errors import UsageError, printable
from base.storage import finite
from parallel.config.layout import AXES, EXPERT_AXES, shown_axes

FORMATS = ("text", "markdown", "csv", "json")
_NUMBER = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?( ?%)?|-")  # or the lone dash


@dataclass(frozen=True)
class Column:
    """One column: the rows' key, its heading, and a format spec for numbers (words stay).

    seldom: not printed where no row has a value. long: how a terminal shows sentences ("below" or
    "word", see terminal.py); "" for names and numbers. asked: printed where --columns names it
    alone. explains: the columns whose dashes and doubts this one's cells explain, row by row.
    """

    key: str
    heading: str
    spec: str = ""
    seldom: bool = False
    long: str = ""
    asked: bool = False
    explains: tuple[str, ...] = ()


def by_key(keys: Iterable[str], spec: str = "", seldom: bool = False) -> list[Column]:
    """Returns columns whose headings are their keys."""
    return [Column(key, key, spec, seldom) for key in keys]


def axis_columns(rows: Iterable[Mapping[str, Any]]) -> list[Column]:
    """Returns a column for each axis of a split; a seldom one that no row has is only asked for."""
    shown = shown_axes(rows)
    return [Column(axis, axis, "d", asked=axis not in shown) for axis in (*AXES, *EXPERT_AXES)]


@dataclass
class Table:
    """Rows are dicts with raw values; None is unknown. `notes` are printed below the rows, and then
    `doubts`: why what the rows say may not be so.

    Below them stands why a row's values are unknown and what is doubtful about some, which are
    marked: its `missing` and its `doubtful`, each a reason by column, "" for none. They are printed
    where the column is and no other one `explains` it. chosen: the columns were named, so JSON has
    nothing else. json_keys: what JSON has of a row, in this order, where none were named; without
    them, all of it. Each may be named as a column.
    """

    columns: Sequence[Column]
    rows: list[dict[str, Any]]
    title: str = ""
    notes: list[str] = field(default_factory=list)
    doubts: list[str] = field(default_factory=list)
    chosen: bool = False
    json_keys: Sequence[str] = ()

    @property
    def possible(self) -> list[Column]:
        """Returns the columns that may be named."""
        keys = {column.key for column in self.columns}
        return [*self.columns, *by_key(key for key in self.json_keys if key not in keys)]

    @property
    def shown(self) -> list[Column]:
        """Returns the columns without those that are asked for, or seldom known and here in no
        row."""
        filled = {c.key for c in self.columns for row in self.rows if row.get(c.key) is not None}
        return [c for c in self.columns if not c.asked and (not c.seldom or c.key in filled)]

    @property
    def below(self) -> list[str]:
        """Returns every note, each one line."""
        explained = {key for column in self.shown for key in column.explains}
        headings = {c.key: c.heading for c in self.shown if c.key not in explained}
        reasons = below_rows(self.rows, headings)
        return [printable(note) for note in (*self.notes, *self.doubts, *reasons)]

    def texts(self, column: Column) -> list[str]:
        """Returns the column's cells as they are printed."""
        return [
            cell(row.get(column.key), column.spec)
            + (DOUBTFUL if (row.get("doubtful") or {}).get(column.key) else "")
            for row in self.rows
        ]

    def render(self, format: str = "text") -> str:
        """Returns the table as a string that ends with a newline."""
        if format == "json":
            return json_objects(_objects(self))
        return {"text": _text, "markdown": _markdown, "csv": _csv}[format](self)

    @property
    def shown_texts(self) -> list[terminal.Shown]:
        """Returns the shown columns as text."""
        return [
            terminal.Shown(c.heading, self.texts(c), self.is_numeric(c), c.long) for c in self.shown
        ]

    def is_numeric(self, column: Column) -> bool:
        """Returns whether a column has numbers alone."""
        kinds = (int, float, type(None))
        return bool(column.spec) or all(isinstance(r.get(column.key), kinds) for r in self.rows)

    def fitted(self, width: int) -> str:
        """Returns the table as text for a terminal of `width` columns."""
        if not self.columns:  # sentences alone
            return self.render()
        return terminal.fit(printable(self.title), self.shown_texts, self.below, width)


def cell(value: Any, spec: str = "") -> str:
    """Returns a value as it is printed: unknown is `-`, never a guess."""
    if value is None or (isinstance(value, float) and math.isnan(value)):
        return UNKNOWN
    if isinstance(value, list):
        return "; ".join(cell(element, spec) for element in value)
    if spec and isinstance(value, (int, float)) and not isinstance(value, bool):
        text = format(value, spec)
        # `.3g` of a B200's 2,431 TFLOP/s is 2.43e+03
        powers = spec.endswith("g") and "e+" in text and (abs(value) < 1e7 or "," in spec)
        return format(value, ",.0f" if "," in spec else ".0f") if powers else text
    return printable(str(value))


def _text(table: Table) -> str:
    """Returns a table as plain text."""
    columns = table.shown_texts
    widths = [max(map(len, (c.heading, *c.cells))) for c in columns]
    rows = [printable(table.title)] if table.title else []
    return "\n".join([*rows, *terminal.lines(columns, widths), *table.below]) + "\n"


def no_html(text: str) -> str:
    """Returns text for Markdown in which a name is no tag, no link and no picture."""
    return text.replace("&", "&amp;").replace("<", "&lt;").replace("](", "&#93;(")


def _markdown(table: Table) -> str:
    """Returns a table in Markdown; its notes are a list below it."""
    columns = table.shown_texts

    def line(cells: Iterable[str]) -> str:
        escaped = (no_html(text).replace("\\", "\\\\").replace("|", "\\|") for text in cells)
        return "| " + " | ".join(escaped) + " |"

    lines = [f"**{no_html(printable(table.title))}**", ""] if table.title else []
    if columns:
        lines += [line(c.heading for c in columns)]
        lines += ["| " + " | ".join("---:" if c.right else "---" for c in columns) + " |"]
        lines += [*map(line, zip(*(c.cells for c in columns), strict=True)), ""]
    if table.below:
        lines += [f"- {no_html(note)}" for note in table.below]
    return "\n".join(lines).rstrip("\n") + "\n"


def _csv(table: Table) -> str:
    """Returns a table in CSV with the keys of its columns as the head."""
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    columns = table.shown
    writer.writerow(c.key for c in columns)
    for row in table.rows:
        writer.writerow(_csv_cell(row.get(c.key)) for c in columns)
    return out.getvalue()


def _csv_cell(value: Any) -> Any:
    """Returns the value, with a ' before words that a spreadsheet would take for a formula."""
    if value is None or isinstance(value, (bool, int, float)):
        return "" if value is None else value
    text = cell(value)
    formula = text.lstrip().startswith(("=", "+", "-", "@")) and not _NUMBER.fullmatch(text.strip())
    return f"'{text}" if formula else text


def _objects(table: Table) -> list[dict[str, Any]]:
    """Returns the rows for JSON: the shown columns, then all other values where none are chosen."""
    if table.json_keys and not table.chosen:
        return [{key: row.get(key) for key in table.json_keys} for row in table.rows]
    columns = table.shown
    values = [{c.key: row.get(c.key) for c in columns} for row in table.rows]
    if table.chosen:
        return values
    return [value | row for value, row in zip(values, table.rows, strict=True)]


def json_objects(rows: list[dict[str, Any]]) -> str:
    """Returns a JSON list, one object a line; what is not a finite number is null."""
    return "[\n" + ",\n".join(json.dumps(finite(row)) for row in rows) + "\n]\n"


def add_table_flags(parser: argparse.ArgumentParser) -> None:
    """Adds --format and --columns to a command that prints tables."""
    parser.add_argument(
        "--format",
        choices=FORMATS,
        default="text",
        help="how to print (default: text); in csv, a cell that a spreadsheet would take for a"
        " formula begins with '",
    )
    parser.add_argument(
        "--columns",
        type=lambda text: [name.strip() for name in text.split(",")],
        metavar="A,B,C",
        help="print these columns, in this order",
    )


def chosen(tables: Sequence[Table], names: Sequence[str] | None) -> list[Table]:
    """Returns the tables with these columns alone, named by key or heading; a table that has none
    of them is left out."""
    if names is None:
        return list(tables)
    keys = {c.heading: c.key for table in tables for c in table.possible}
    possible = list(dict.fromkeys(c.key for table in tables for c in table.possible))
    names = [name if name in possible else keys.get(name, name) for name in names]
    if unknown := [name for name in names if name not in possible]:
        raise UsageError(f"no column {', '.join(unknown)}; there are: {', '.join(possible)}")
    shortened = []
    for table in tables:
        columns = {c.key: replace(c, seldom=False, asked=False) for c in table.possible}
        kept = [columns[name] for name in names if name in columns]
        if kept:
            shortened.append(replace(table, columns=kept, chosen=True))
    return shortened


def show(tables: Sequence[Table], format: str, columns: Sequence[str] | None = None) -> None:
    """Prints tables. Text is fitted to a terminal; a file or a pipe gets it in full. Several JSON
    tables are one list, in which each row says its `table`."""
    printed = chosen(tables, columns)
    if format == "json" and len(printed) > 1:
        rows = [{"table": table.title} | row for table in printed for row in _objects(table)]
        print(json_objects(rows), end="")
        return
    width = shutil.get_terminal_size().columns
    fits = format == "text" and sys.stdout.isatty()
    texts = [table.fitted(width) if fits else table.render(format) for table in printed]
    print("\n".join(texts), end="")
