"""Tables: one type, printed as text, Markdown, CSV or JSON.

    python analysis/tables.py --recompute FILE.md [--in-place] [--seq-len 1024]

`--recompute` prints FILE with the TFLOPs column of its tables computed again from their GPUs,
size, global batch and seconds, by the Jean Zay tables' rule (8 FLOPs per parameter and token).
Everything else stays byte for byte as it was, and so does a row that cannot be computed.
`--in-place` writes it back instead. Exits 2 when FILE cannot be read or has no such table.
"""

import argparse
import contextlib
import csv
import io
import json
import math
import re
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import pandas

if not __package__:  # run as a script: find the rooms, not analysis/ itself
    sys.path[0] = str(Path(__file__).resolve().parent.parent)

from models.bounds import check_flags
from models.errors import Parser, UsageError, command_line, printable
from models.files import check_ends

FORMATS = ("text", "markdown", "csv", "json")
FORMAT_HELP = "csv: a cell that a spreadsheet would take for a formula begins with '"
_NUMBER = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?( ?%)?|-")  # or the lone dash
UNKNOWN = "-"


@contextlib.contextmanager
def writing(path: Path) -> Iterator[None]:
    """Raises: UsageError: what is written inside cannot be, with the path and the reason."""
    try:
        yield
    except OSError as error:
        raise UsageError(f"{path}: {error.strerror or error}") from error
    except ValueError as error:  # a picture's suffix that matplotlib does not know
        raise UsageError(f"{path}: {error}") from error


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

    def frame(self) -> "pandas.DataFrame":
        """The rows as a pandas DataFrame, raw values under the columns' keys."""
        import pandas  # here, because it takes longer to load than a table to print

        return pandas.DataFrame(self.rows, columns=[c.key for c in self.columns])


def cell(value: Any, spec: str = "") -> str:
    """A value as it is printed: unknown is `-`, never a guess."""
    if value is None or (isinstance(value, float) and math.isnan(value)):
        return UNKNOWN
    if spec and isinstance(value, (int, float)) and not isinstance(value, bool):
        return format(value, spec)
    return printable(str(value))


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
    lines = [printable(table.title)] if table.title else []
    lines += [line(headings), rule, *map(line, body), *map(printable, table.notes)]
    return "\n".join(lines) + "\n"


def _markdown(table: Table) -> str:
    right = [_numeric(c, table.rows) for c in table.columns]

    def line(cells: Iterable[str]) -> str:
        return "| " + " | ".join(text.replace("|", "\\|") for text in cells) + " |"

    lines = [f"**{printable(table.title)}**", ""] if table.title else []
    lines += [line(c.heading for c in table.columns)]
    lines += ["| " + " | ".join("---:" if r else "---" for r in right) + " |"]
    lines += map(line, _cells(table))
    if table.notes:
        lines += ["", *(f"- {printable(note)}" for note in table.notes)]
    return "\n".join(lines) + "\n"


def _csv(table: Table) -> str:
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(c.key for c in table.columns)
    for row in table.rows:
        writer.writerow(_csv_cell(row.get(c.key)) for c in table.columns)
    return out.getvalue()


def _csv_cell(value: Any) -> Any:
    """Words of a log that a spreadsheet would take for a formula begin with a ' here."""
    if value is None or isinstance(value, (bool, int, float)):
        return "" if value is None else value
    text = printable(str(value))
    formula = text.lstrip().startswith(("=", "+", "-", "@")) and not _NUMBER.fullmatch(text.strip())
    return f"'{text}" if formula else text


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


@command_line("analysis.tables")
def main(argv: list[str] | None = None) -> int:
    """Print a Markdown file with its TFLOPs recomputed."""
    from analysis.markdown import recompute_tflops

    parser = Parser(
        prog="python -m analysis.tables",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--recompute", type=Path, metavar="FILE.md", required=True)
    parser.add_argument("--in-place", action="store_true", help="write FILE, print nothing")
    parser.add_argument("--seq-len", type=int, default=1024, help="tokens per sequence")
    arguments = parser.parse_args(argv)
    check_flags(arguments, seq_len=(1, 2**24))
    try:
        old = check_ends(arguments.recompute).read_bytes()
    except OSError as error:
        raise UsageError(f"{arguments.recompute}: {error.strerror}") from error
    # latin-1 maps every byte to one character and back, so what is no UTF-8 survives too
    try:
        new = recompute_tflops(old.decode("latin-1"), arguments.seq_len).encode("latin-1")
    except UsageError as error:
        raise UsageError(f"{arguments.recompute}: {error}") from error
    if not arguments.in_place:
        sys.stdout.buffer.write(new)
        sys.stdout.buffer.flush()
    elif new != old:
        try:
            arguments.recompute.write_bytes(new)
        except OSError as error:
            raise UsageError(f"{arguments.recompute}: {error.strerror}") from error
    return 0


if __name__ == "__main__":
    sys.exit(main())
