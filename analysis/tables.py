"""Tables: one type, printed as text, Markdown, CSV or JSON.

    python analysis/tables.py --recompute FILE.md      print FILE with its TFLOPs column recomputed

`--recompute` follows the Jean Zay tables' rule (8 FLOPs per parameter and token, sequence length
1024) and leaves everything else byte for byte as it was; a row that it cannot compute stays.
"""

import csv
import io
import json
import math
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

FORMATS = ("text", "markdown", "csv", "json")
UNKNOWN = "-"


@dataclass(frozen=True)
class Column:
    """One column: the rows' key, its heading, and a format spec for numbers (words stay)."""

    key: str
    heading: str
    spec: str = ""


@dataclass
class Table:
    """Rows are dicts with raw values; None is unknown. `notes` are printed below the rows."""

    columns: Sequence[Column]
    rows: list[dict[str, Any]]
    title: str = ""
    notes: list[str] = field(default_factory=list)

    def render(self, format: str = "text") -> str:
        """The table as a string that ends with a newline."""
        return {"text": _text, "markdown": _markdown, "csv": _csv, "json": _json}[format](self)


def cell(value: Any, spec: str = "") -> str:
    """A value as it is printed: unknown is `-`, never a guess."""
    if value is None or (isinstance(value, float) and math.isnan(value)):
        return UNKNOWN
    if spec and isinstance(value, (int, float)) and not isinstance(value, bool):
        return format(value, spec)
    return str(value)


def _cells(table: Table) -> list[list[str]]:
    return [[cell(row.get(c.key), c.spec) for c in table.columns] for row in table.rows]


def _numeric(column: Column, rows: Iterable[dict[str, Any]]) -> bool:
    return bool(column.spec) or all(
        isinstance(row.get(column.key), (int, float, type(None))) for row in rows
    )


def _text(table: Table) -> str:
    headings, body = [c.heading for c in table.columns], _cells(table)
    widths = [max(map(len, column)) for column in zip(headings, *body, strict=True)]
    right = [_numeric(c, table.rows) for c in table.columns]

    def line(cells: list[str]) -> str:
        padded = (
            text.rjust(width) if to_right else text.ljust(width)
            for text, width, to_right in zip(cells, widths, right, strict=True)
        )
        return "  ".join(padded).rstrip()

    rule = "  ".join("-" * width for width in widths)
    lines = [table.title] if table.title else []
    lines += [line(headings), rule, *map(line, body), *table.notes]
    return "\n".join(lines) + "\n"


def _markdown(table: Table) -> str:
    right = [_numeric(c, table.rows) for c in table.columns]

    def line(cells: Iterable[str]) -> str:
        return "| " + " | ".join(text.replace("|", "\\|") for text in cells) + " |"

    lines = [f"**{table.title}**", ""] if table.title else []
    lines += [line(c.heading for c in table.columns)]
    lines += ["| " + " | ".join("---:" if r else "---" for r in right) + " |"]
    lines += map(line, _cells(table))
    if table.notes:
        lines += ["", *(f"- {note}" for note in table.notes)]
    return "\n".join(lines) + "\n"


def _csv(table: Table) -> str:
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(c.key for c in table.columns)
    for row in table.rows:
        values = (row.get(c.key) for c in table.columns)
        writer.writerow("" if v is None else v for v in values)
    return out.getvalue()


def _json(table: Table) -> str:
    return json_objects(
        [{c.key: row.get(c.key) for c in table.columns} | row for row in table.rows]
    )


def json_objects(rows: list[dict[str, Any]]) -> str:
    """A JSON list, one object a line; what is not a finite number is null."""

    def clean(value: Any) -> Any:
        if isinstance(value, dict):
            return {k: clean(v) for k, v in value.items()}
        if isinstance(value, (list, tuple)):
            return [clean(v) for v in value]
        if isinstance(value, float) and not math.isfinite(value):
            return None
        return value

    return "[\n" + ",\n".join(json.dumps(clean(row)) for row in rows) + "\n]\n"


def emphasise(text: str) -> str:
    """The heading line in bold on a terminal, as it is elsewhere."""
    if not sys.stdout.isatty():
        return text
    lines = text.split("\n")
    rule = next((i for i, line in enumerate(lines) if line.startswith("--")), 0)
    for i in range(rule):
        lines[i] = f"\033[1m{lines[i]}\033[0m"
    return "\n".join(lines)
