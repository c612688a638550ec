"""Fits a table to the width of a terminal.

A value that every row shares stands once above the table. Sentences wrap below it. Long names are
cut in the middle. Columns that do not fit go into further blocks.
"""

import textwrap
from dataclasses import dataclass
from typing import NamedTuple

BOLD = "\033[1m{}\033[0m"
GAP = 2  # spaces between columns
NAME = 12  # no text is cut below this many characters
FEW = 8  # runs that a note names
NARROWEST = 40  # a narrower terminal gets lines of this many characters


@dataclass(frozen=True)
class Shown:
    """One column as text: its heading and a cell for each row.

    right: aligned to the right, and never cut. long: "" (names, cut in the middle), "below"
    (sentences, which stand below the table) or "word" (the part before a colon stays in the row).
    """

    heading: str
    cells: list[str]
    right: bool = False
    long: str = ""


def who(names: list[str], total: int, n: int | None = None) -> str:
    """Returns which of `total` runs a note is about: all, their names, or of many how many, and the
    first ones; `--format json` says it of each run. `n` counts them where `names` has only the
    first ones."""
    count = len(names) if n is None else n
    if count == total and total > 1:
        return "all"
    if count <= FEW:
        return ", ".join(names)
    return f"{count} of {total} runs: {', '.join(names[:3])} ..."


def fit(title: str, columns: list[Shown], notes: list[str], width: int) -> str:
    """Returns the table in lines of at most `width` characters; the first column names the rows."""
    width = max(width, NARROWEST)
    names = columns[0]
    constant: list[Shown] = []  # the same in every row
    sentences: list[Shown] = []  # below the rows
    beside: list[Shown] = []
    for column in columns[1:]:
        if column.long:
            sentences.append(column)
            if column.long != "below":
                words = [text.partition(": ")[0] for text in column.cells]
                beside.append(Shown(column.heading, words))
        elif len(column.cells) > 1 and len(set(column.cells)) == 1:
            constant.append(column)
        else:
            beside.append(column)
    rows = [BOLD.format(line) for line in wrapped(title, width)]
    if constant:
        values = ", ".join(f"{column.heading} {column.cells[0]}" for column in constant)
        rows += wrapped(f"same in every row: {values}", width)
    for number, (block, widths) in enumerate(_blocks([names, *beside], width)):
        if number:
            rows.append("")
        headings, *block_rows = lines(block, widths)
        rows += [BOLD.format(headings), *block_rows]
    # The first column whose cells tell all rows apart.
    named = next((c for c in columns if len(set(c.cells)) == len(c.cells)), names)
    for column in sentences:
        rows += _below(named.cells, column, width)
    return "\n".join([*rows, *(line for note in notes for line in wrapped(note, width))]) + "\n"


def wrapped(text: str, width: int) -> list[str]:
    """Returns a sentence in lines; all but the first are indented."""
    return textwrap.wrap(text, width, subsequent_indent="  ", break_on_hyphens=False)


def counted(count: int | str, plural: str) -> str:
    """Returns the count and its noun: 1 file, 2 files."""
    return f"{count} {plural.removesuffix('s') if count == 1 else plural}"


def cut(text: str, size: int) -> str:
    """Returns the text in `size` characters: its beginning and its end, with … between them."""
    if len(text) <= size:
        return text
    tail = (size - 1) // 2
    return f"{text[: size - 1 - tail]}…{text[-tail:]}"


def cut_apart(cells: list[str], size: int) -> list[str]:
    """Returns the cells in `size` characters; different ones that would look the same get #1, #2
    ..."""
    texts: dict[str, list[str]] = {}
    for text in dict.fromkeys(cells):
        texts.setdefault(cut(text, size), []).append(text)
    shortened = {}
    for cut_text, full_texts in texts.items():
        for number, text in enumerate(full_texts, start=1):
            mark = f"#{number}" if len(full_texts) > 1 else ""
            shortened[text] = cut(text, size - len(mark)) + mark if mark else cut_text
    return [shortened[text] for text in cells]


def _below(names: list[str], column: Shown, width: int) -> list[str]:
    """Returns one sentence for each row that has one; rows with the same sentence stand
    together."""
    rows: dict[str, list[str]] = {}
    for name, text in zip(names, column.cells, strict=True):
        if text not in ("", "-") and (column.long == "below" or ": " in text):
            rows.setdefault(text, []).append(name)
    total = len(column.cells)
    return [
        line
        for text, row_names in rows.items()
        for line in wrapped(f"{who(row_names, total)}: {text}", width)
    ]


class _Block(NamedTuple):
    """Columns that stand side by side, and their widths."""

    columns: list[Shown]
    widths: list[int]


def _blocks(columns: list[Shown], width: int) -> list[_Block]:
    """Returns the columns in as few blocks as fit; each begins with the first column. A text takes
    a third of the width at most."""
    widths = [max(map(len, (c.heading, *c.cells))) for c in columns]
    most = max(NAME, width // 3)
    widths = [n if c.right else min(n, most) for c, n in zip(columns, widths, strict=True)]
    blocks = [_Block(columns[:1], widths[:1])]
    for column, size in zip(columns[1:], widths[1:], strict=True):
        if sum(blocks[-1].widths) + size + GAP * len(blocks[-1].widths) > width:
            if len(blocks[-1].columns) > 1:
                blocks.append(_Block(columns[:1], widths[:1]))
        blocks[-1].columns.append(column)
        blocks[-1].widths.append(size)
    return blocks


def lines(columns: list[Shown], widths: list[int]) -> list[str]:
    """Returns the headings, a rule and the rows; a cell of text that is longer than its width is
    cut."""
    columns_of_cells = []
    for column, size in zip(columns, widths, strict=True):
        if column.right:
            cells = [text.rjust(size) for text in (column.heading, *column.cells)]
        else:
            texts = [cut(column.heading, size), *cut_apart(column.cells, size)]
            cells = [text.ljust(size) for text in texts]
        columns_of_cells.append([cells[0], "-" * size, *cells[1:]])
    return [(" " * GAP).join(line).rstrip() for line in zip(*columns_of_cells, strict=True)]
