"""Tables of Markdown, HTML and CSV files with any headings, as rows of quantities.

A table may stand on its side (a column a run). Cards, GPUs, precisions and layouts are read from
words, too: `8x H100`, `dp2, tp2, pp4`, `128x GB200 GPUs`, `config_DGXH100_1344x8x8x4x8`.
"""

import csv
import re
from dataclasses import dataclass, field, replace
from functools import lru_cache
from html.parser import HTMLParser
from pathlib import Path

from analysis.published.documents import Document, cells_of, parse
from analysis.published.headings import (
    COUNTS,
    MEASURED,
    WORDS,
    Meaning,
    Value,
    meaning,
    read_cell,
    splits_of,
)
from models.errors import UsageError
from models.gpus import GPUS

LABELS = 200  # no table on its side has more
Cells = list[tuple[int, list[str]]]  # each row's line in the file, and its cells


@dataclass
class Line:
    """One run of a table: its line, what its cells mean, and the text of every cell."""

    line_no: int
    file: str = ""
    values: dict[str, Value] = field(default_factory=dict)
    words: dict[str, str] = field(default_factory=dict)
    cells: dict[str, str] = field(default_factory=dict)  # heading -> text, of all columns
    lines: dict[str, int] = field(default_factory=dict)  # column -> line, where they differ
    unread: list[str] = field(default_factory=list)  # columns whose cell has digits, but no number

    def __getitem__(self, name: str) -> Value | None:
        return self.values.get(name)

    def number(self, name: str, default: float | None = None) -> float | None:
        """The value in our unit, or the default."""
        value = self.values.get(name)
        return default if value is None else value.value

    def at(self, column: str) -> int:
        """The line of the file that a column of this run stands on."""
        return self.lines.get(column, self.line_no)


@dataclass(frozen=True)
class Stated:
    """What a document states outside of a table's rows; None where it states none or two.

    tokens: of a run. formula: "8PT" where it states the Jean Zay study's; sizes are then exactly
    as printed.
    """

    tp: float | None = None
    seq_len: float | None = None
    tokens: float | None = None
    formula: str = ""


@dataclass
class AnyTable:
    """A table: runs, what each heading was taken for, and the words around it."""

    file: str
    line_no: int
    rows: list[Line]
    columns: dict[str, Meaning]
    unused: list[str]
    section: str = ""
    stated: Stated = Stated()
    unchecked: list[str] = field(default_factory=list)  # columns in which no error is noticed

    def heading(self, name: str) -> str:
        """The first heading that was taken for a quantity; its name where none was."""
        name = name.removesuffix("_gpu").removesuffix("_all")
        return next((text for text, what in self.columns.items() if what.name == name), name)

    def says(self) -> str:
        """One line: what the headings were taken for, and what the audit cannot check."""
        parts = []
        for heading, what in self.columns.items():
            of = {"gpu": " of one GPU", "all": " of all GPUs"}.get(what.of, "")
            unit = f" x {what.scale:g}" if what.scale != 1 else ""
            parts.append(f"{heading!r} = {what.name}{of}{unit}")
        unused = []
        for heading in self.unused:
            found = (k for row in self.rows for k, v in row.values.items() if v.column == heading)
            names = ", ".join(dict.fromkeys(found))
            parts += [f"{heading!r} = {names} by its words"] if names else []
            unused += [] if names else [repr(heading)]
        more = f"; not used: {', '.join(unused)}" if unused else ""
        odd = [f"{row.cells[c]!r} on line {row.at(c)}" for row in self.rows for c in row.unread]
        if odd:
            more += f"; not read as one number: {', '.join(odd[:3])}"
            more += f" and {len(odd) - 3} more" if len(odd) > 3 else ""
        if self.unchecked:
            more += f"; twice the number would not be noticed in {', '.join(self.unchecked)}"
        return f"{self.file}:{self.line_no}: {', '.join(parts)}{more}"


class _Html(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.tables: list[Cells] = []
        self.prose: list[tuple[int, str]] = []
        self._hidden = False
        self._open: list[Cells] = []
        self._cell: list[str] | None = None
        self._span = self._rows = 1
        self._below: list[dict[int, tuple[int, str]]] = []  # column -> rows that a cell still fills

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag == "table":
            self._open.append([])
            self._below.append({})
            self.tables.append(self._open[-1])
        elif tag == "tr" and self._open:
            self._end_row()
            self._open[-1].append((self.getpos()[0], []))
        elif tag in ("td", "th") and self._open and self._open[-1]:
            self._end_cell()
            spans = [dict(attrs).get(name) or "1" for name in ("colspan", "rowspan")]
            spans = [min(int(span), 100) if span.isdecimal() else 1 for span in spans]
            self._span, self._rows = (max(span, 1) for span in spans)
            self._cell = []
        elif tag == "br" and self._cell is not None:
            self._cell.append(" ")
        elif tag in ("p", "li", "div") and not self._open:
            self.prose.append((self.getpos()[0], ""))
        self._hidden = tag in ("script", "style")

    def handle_endtag(self, tag: str) -> None:
        if tag in ("td", "th", "tr"):
            self._end_cell()
        elif tag == "table" and self._open:
            self._end_row()
            self._open.pop()
            self._below.pop()

    def handle_data(self, data: str) -> None:
        if self._cell is not None:
            self._cell.append(data)
        elif not self._open and not self._hidden:
            for more, line in enumerate(data.split("\n")):
                if line.strip():
                    self.prose.append((self.getpos()[0] + more, line))

    def _end_cell(self) -> None:
        if self._cell is not None and self._open and self._open[-1]:
            text = " ".join("".join(self._cell).split())
            self._fill_from_above()
            row = self._open[-1][-1][1]
            if self._rows > 1:
                columns = range(len(row), len(row) + self._span)
                self._below[-1] |= {column: (self._rows - 1, text) for column in columns}
            row.extend([text] * self._span)
        self._cell = None

    def _fill_from_above(self) -> None:
        """Repeat the cells of rows above that reach down to here."""
        row, below = self._open[-1][-1][1], self._below[-1]
        while len(row) in below:
            column, (rows, text) = len(row), below.pop(len(row))
            if rows > 1:
                below[column] = (rows - 1, text)
            row.append(text)

    def _end_row(self) -> None:
        self._end_cell()
        if self._open[-1] and self._open[-1][-1][1]:
            self._fill_from_above()


def html_prose(text: str) -> list[tuple[int, str]]:
    """(line, text) of an HTML page outside of its tables; an empty text ends a paragraph."""
    parser = _Html()
    parser.feed(text)
    return parser.prose


def tables_of(path: Path, text: str, given: dict[str, str]) -> list[AnyTable]:
    """The tables of a file that say something that can be audited.

    given: heading -> our name (with `:unit` or `/gpu`), where the guess is wrong.

    Raises:
        UsageError: a CSV cannot be read.
    """
    found = []
    for section, cells in _raw(path, text):
        table = _understand(str(path), section, cells, given)
        if table is not None:
            found.append(table)
    return found


def _raw(path: Path, text: str) -> list[tuple[str, Cells]]:
    suffix = path.suffix.lower()
    if suffix in (".csv", ".tsv"):
        return [("", _csv_cells(path, text, "\t" if suffix == ".tsv" else ""))]
    found: list[tuple[str, Cells]] = []
    if suffix in (".html", ".htm") or re.search(r"<table\b", text, re.IGNORECASE):
        parser = _Html()
        parser.feed(text)
        found += [("", [row for row in table if row[1]]) for table in parser.tables]
    if suffix in (".html", ".htm"):
        return found
    document = parse(text, str(path))
    for table in document.tables:
        lines = [(table.line_no, document.lines[table.line_no - 1])]
        lines += [(row.line_no, document.lines[row.line_no - 1]) for row in table.rows]
        cells = [(no, [cell.text for cell in cells_of(line)]) for no, line in lines]
        found.append((f"{table.section} {_just_above(document, table.line_no)}", cells))
    return found


def _just_above(document: Document, line_no: int) -> str:
    """The words that introduce a table: its caption, or the end of the paragraph before it."""
    before = document.lines[max(line_no - 4, 0) : line_no - 1]
    return " ".join(line.strip() for line in before if not line.lstrip().startswith(("|", "#")))


def _csv_cells(path: Path, text: str, mark: str) -> Cells:
    lines = text.splitlines()
    head = lines[0] if lines else ""
    mark = mark or max(",;\t|", key=head.count)
    try:
        reader = csv.reader(lines, delimiter=mark, strict=True)
        return [(reader.line_num, [t.strip() for t in row]) for row in reader if any(row)]
    except csv.Error as error:
        raise UsageError(f"{path}: {error}") from error


def _given(heading: str, given: dict[str, str]) -> Meaning | None:
    text = next((v for k, v in given.items() if k.strip().lower() == heading.lower()), None)
    if text is None:
        found = meaning(heading)
        # A column of one card's numbers, as of its peaks: not of the runs that its rows are.
        return None if found and found.name in MEASURED and _named(heading, "gpu_type") else found
    if text in ("", "-"):
        return None
    name, _, unit = text.partition(":")
    name, of = (name.removesuffix("/gpu"), "gpu") if name.endswith("/gpu") else (name, "")
    if name not in (*COUNTS, *MEASURED, *WORDS, "params_b"):
        names = ", ".join((*COUNTS, *MEASURED, *WORDS, "params_b"))
        raise UsageError(f"--mapping {heading}={text}: no such name; there are {names}")
    try:
        return Meaning(name, float(unit or 1), of, 1.0 if text.endswith("tokens") else 0.0)
    except ValueError:
        raise UsageError(f"--mapping {heading}={text}: {unit!r} is no factor") from None


def _understand(file: str, section: str, cells: Cells, given: dict[str, str]) -> AnyTable | None:
    if len(cells) < 2:
        return None
    cells = _without_second_heading(cells)
    width = max(len(row) for _, row in cells)
    cells = [(no, row + [""] * (width - len(row))) for no, row in cells]
    comma = _has_comma_decimals(cells)
    across = [_given(text, given) for text in cells[0][1]]
    down = [_given(row[0], given) for _, row in cells[:LABELS]]
    # Labels of a table on its side stand in the first column; its headings mean nothing or little.
    known = lambda found: len({m.name for m in found if m} & {*COUNTS, *MEASURED})  # noqa: E731
    sideways = known(down) > max(known(across), 1) and 1 < width and len(cells) <= LABELS
    sideways = sideways and 4 * sum(m is not None for m in down) >= len(down)
    if sideways:
        rows, columns, unused = _turned(cells, down, comma)
    else:
        rows, columns, unused = _upright(cells, across, comma)
    adds = any(_ADDS.search(text) for text in [*cells[0][1], *(row[0] for _, row in cells)])
    if not rows or not (columns or adds):
        return None
    for row in rows:
        row.file = file
        _words(row, f"{section} {cells[0][1][0] if sideways else ''}")
    return AnyTable(file, cells[0][0], rows, columns, unused, section)


def _without_second_heading(cells: Cells) -> Cells:
    """Two rows of headings as one: the first has gaps or repeats, the second no number."""
    first, second = cells[0][1], cells[1][1]
    no_numbers = not any(re.match(r"^[~*\s]*[\d.]", text) for text in second)
    if len(cells) < 3 or not no_numbers or sum(meaning(t) is not None for t in second) < 2:
        return cells
    if sum(meaning(t) is not None for t in first) > sum(meaning(t) is not None for t in second):
        return cells
    group, joined = "", []
    for i, text in enumerate(second):
        group = first[i] if i < len(first) and first[i] else group
        joined.append(f"{group} {text}".strip() if text and text != group else group)
    return [(cells[0][0], joined), *cells[2:]]


def _upright(cells: Cells, across: list[Meaning | None], comma: bool) -> tuple:
    headings = _distinct(cells[0][1])
    columns = {h: m for h, m in zip(headings, across, strict=True) if m}
    rows = []
    for no, texts in cells[1:]:
        row = Line(no, cells=dict(zip(headings, texts, strict=True)))
        for heading, what in columns.items():
            _put(row, what, heading, row.cells[heading], comma)
        rows.append(row)
    return rows, columns, [h for h in headings if h and h not in columns]


def _turned(cells: Cells, down: list[Meaning | None], comma: bool) -> tuple:
    labels = _distinct([row[0] for _, row in cells])
    columns = {label: m for label, m in zip(labels, down, strict=True) if m}
    rows = []
    for i in range(1, len(cells[0][1])):
        row = Line(cells[0][0])
        for label, what, (no, texts) in zip(labels, down, cells, strict=True):
            row.cells[label], row.lines[label] = texts[i], no
            if what:
                _put(row, what, label, texts[i], comma)
        rows.append(row)
    return rows, columns, [label for label in labels if label and label not in columns]


def _distinct(headings: list[str]) -> list[str]:
    found: list[str] = []
    for text in headings:
        count = 1 + sum(other == text or other.startswith(f"{text} #") for other in found)
        found.append(text if count == 1 or not text else f"{text} #{count}")
    return found


_NUMERIC = r"[~≈*_\s±+-]*(?:{})\s*(?:[%x×*]|[a-zA-Z/]{{1,6}})?[*_\s]*"
_COMMA = re.compile(
    _NUMERIC.format(r"\d{1,3}(?:\.\d{3})*,(?:\d{1,2}|\d{4,})|\d{1,3}(?:\.\d{3})+,\d+")
)
_DOT = re.compile(_NUMERIC.format(r"\d+\.(?:\d{1,2}|\d{4,})|\d{1,3}(?:,\d{3})+(?:\.\d+)?|0\.\d+"))


def _has_comma_decimals(cells: Cells) -> bool:
    """Whether a table writes 1.234,5: cells that can only be read so, and none only as 1,234.5."""
    texts = [text for _, row in cells for text in row]
    dots = any(_DOT.fullmatch(text) for text in texts)
    return not dots and sum(bool(_COMMA.fullmatch(text)) for text in texts) > 1


def _with_point(text: str) -> str:
    """A cell that writes 1.234,5, as 1234.5."""
    return re.sub(r"(?<=\d)\.(?=\d{3}(?!\d))", "", text).replace(",", ".")


def _put(row: Line, what: Meaning, column: str, text: str, comma: bool = False) -> None:
    if not text:
        return
    if what.name in WORDS:
        row.words.setdefault(what.name, text)
        return
    value = read_cell(_with_point(text) if comma else text, column, what)
    if value is None:
        row.unread += [column] if re.search(r"\d", text) else []
        return
    value = replace(value, text=text)
    name = what.name
    if name == "tokens_per_s" and what.of:
        name = {"gpu": "tokens_per_s_gpu", "all": "tokens_per_s"}[what.of]
    elif name == "samples_per_s" and what.of == "gpu":
        name = "samples_per_s_gpu"
    elif name == "tflops" and what.of == "all":
        name = "tflops_all"
    elif name == "global_batch" and (what.tokens or re.search(r"\d\s*[kKmM]\b", text)):
        name = "batch_tokens"
    elif name == "params_b" and re.search(r"[x×]\s*\d", text):
        row.words.setdefault("model", text)  # 8x7B: a mixture of experts
        return
    if name == "train_days":
        row.words["train_tokens"] = str(what.tokens)
    row.values.setdefault(name, value)


_CARD = re.compile("|".join(rf"(?:{gpu.pattern})" for gpu in GPUS), re.IGNORECASE)
_BARE = re.compile(r"\b(?:V100|H100|P100|H200|A800|H800|MI300X|MI250X?|GB200|B200)\b", re.I)
_GPUS = re.compile(
    r"(?<![\w.:/-])(\d[\d,]*)\s*(?:[x×*-]\s*)?"
    r"(?:(?:NVIDIA |AMD )?(?:GB|MI|[HVPATBL])\d{1,3}\w?|(?i:GPUs?|devices|cards))\b"
)
# `4 nodes x 8 A100`, `16x8 H100`: nodes, GPUs of one
_NODES = re.compile(
    r"(?<![\w.:/-])(\d{1,5})\s*(?:(?i:nodes?|hosts?|servers?)\s*)?[x×*]\s*(\d{1,2})\s*(?:[x×]\s*)?"
    r"(?:NVIDIA |AMD )?(?:(?:GB|MI|[HVPATBL])\d{1,3}|(?i:GPUs?|devices|cards)\b)"
)
_SIZES = re.compile(
    r"(?<![A-Za-z])(fsdp|tp|pp|dp|cp|ep)\s*[=:_ ]?\s*(\d+)(?!\d|\.\d)", re.IGNORECASE
)
_PRECISION = re.compile(r"\b(bf16|fp16|fp8|fp4|fp32|tf32|mxfp8|nvfp4)\b", re.IGNORECASE)
_CONFIG = re.compile(r"_(\d+)x(\d+)x(\d+)x(\d+)x(\d+)(?:_|\b)")  # nodes, GPUs, steps, tp, pp


_ADDS = re.compile(r"(?i)^\W*(?:grand )?(?:totals?|sum)\b|%|\bshare\b|\bideal\b")
_REMARKS = re.compile(r"(?i)source|url|link|notes?|remarks?|inferred|id$")


def sizes_in(text: str) -> dict[str, int]:
    """tp, pp, dp, cp and ep that a text states once each (`dp2, tp2, pp4`, `TP=8/PP=4`)."""
    found: dict[str, set[int]] = {}
    for name, number in _SIZES.findall(text):
        found.setdefault(name.lower(), set()).add(int(number))
    sizes = {name: numbers.pop() for name, numbers in found.items() if len(numbers) == 1}
    if shards := sizes.pop("fsdp", None):  # with dp: copies of the shards
        sizes["dp"] = shards * sizes.get("dp", 1)
    return sizes


def gpus_in(text: str) -> int | None:
    """The one number of GPUs that a text states (`8x H100`, `128x GB200 GPUs`, `8 GPUs`)."""
    found = {int(nodes) * int(each) for nodes, each in _NODES.findall(text)}
    text = _NODES.sub(" ", text)
    found |= {int(number.replace(",", "")) for number in _GPUS.findall(text)}
    return found.pop() if len(found) == 1 else None


@lru_cache(maxsize=1 << 16)
def _named(text: str, what: str) -> frozenset[str]:
    """The cards (`gpu_type`) or precisions that a text names, in lower case."""
    pattern = _CARD if what == "gpu_type" else _PRECISION
    found = [match[0].lower() for match in pattern.finditer(text)]
    if not found and what == "gpu_type":
        found = [name.lower() for name in _BARE.findall(text)]
    return frozenset(found)


def _words(row: Line, around: str) -> None:
    """Fill in what the words of the cells say, where no column says it."""

    def put(name: str, number: float, column: str, text: str) -> None:
        row.values.setdefault(name, Value(number, number, number, text, column))

    for column, text in row.cells.items():
        numbers = [int(n) for n in re.findall(r"\d+", text)]
        if (names := splits_of(column)) and len(names) == len(numbers):
            for name, number in zip(names, numbers, strict=True):
                put(name, number, column, text)
        if len(text) > 200 or _REMARKS.match(column) or not re.search("[a-zA-Z]", text):
            continue
        if any(value.column == column for value in row.values.values()):
            continue
        both = f"{column} {text}"
        sizes = sizes_in(text)
        if len(sizes) > 1 and "dp" in sizes:  # a whole layout: what it does not name is 1
            sizes = {"tp": 1, "pp": 1} | sizes
        if len(sizes) > 1 or (sizes and re.search(r"tp|pp|dp|parallel|layout|config", both, re.I)):
            for name, number in sizes.items():
                put(name, number, column, text)
        if gpus := gpus_in(text):
            put("gpus", gpus, column, text)
        if match := _CONFIG.search(text):
            nodes, each, gas, tp, pp = map(int, match.groups())
            put("gpus", nodes * each, column, text)
            if nodes * each % (tp * pp) == 0:
                for name, number in {"nodes": nodes, "gas": gas, "tp": tp, "pp": pp}.items():
                    put(name, number, column, text)
    for name in ("gpu_type", "precision"):
        texts = [t for c, t in row.cells.items() if not _REMARKS.match(c)]
        if "gpus" in row.values:
            texts.append(row.values["gpus"].column)  # `H100s`, `GPUs (H100)`
        names = set().union(*(_named(text, name) for text in texts)) or _named(around, name)
        if name not in row.words and len(names) == 1:
            row.words[name] = next(iter(names))
    row.words.setdefault("around", around)
