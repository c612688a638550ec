"""Sentences of a document against the rows of its own tables.

A sentence is checked only where it states GPUs that a table has, or a layout that one has, and
where that table has the quantity. It is contradicted where no row of these GPUs gives its number
within its digits. What a sentence calls ideal, expected or another's is not checked.
"""

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from analysis.published.any_table import AnyTable, Line, sizes_in
from analysis.published.documents import Document
from analysis.published.finding import Finding
from analysis.published.headings import Meaning, read_cell
from analysis.published.rules.broken import figure
from analysis.published.rules.columns import better_rows
from analysis.published.rules.intervals import (
    AVERAGED,
    Interval,
    apart,
    middle,
    product_of,
    ratio_of,
    span_of,
)
from analysis.published.rules.rows import tokens_rate

_NOT_MEASURED = re.compile(
    r"(?i)\b(?:ideal\w*|theoretical\w*|expect\w*|predict\w*|estimat\w*|project(?:ed|ion)|goal|"
    r"target|should|would|could|if|paper|et al|previous\w*|reported|up to|at least|at most)\b"
)
_ABOUT = re.compile(
    r"(?i)(?:[~≈<>≤≥]|\b(?:about|around|approximately|roughly|nearly|almost|over|under|more than|"
    r"less than|above|below|some))\s*$"
)
LOOSE = 0.1  # "about": 10 % either way
_N = r"(?P<n>\d[\d,]*(?:\.\d+)?)"
_OF = r"(?:\s+(?:of|is|was|at|reaches|reached|drops to|=|:))*\s*[~≈]?\s*"


@dataclass(frozen=True)
class Sentence:
    """A sentence, and the line that it begins on."""

    line: int
    text: str


def sentences(document: Document) -> Iterator[Sentence]:
    """The sentences of a document's paragraphs, list items and headings; not those of tables."""
    block: list[tuple[int, str]] = []
    for line_no, line in [*document.prose, (0, "")]:
        text = line.strip()
        begins = re.match(r"(?:[-*+]|\d+[.)]|#+)\s", text)
        if not text or text.startswith("|") or begins:
            yield from _split(block)
            block = []
        if text and not text.startswith("|"):
            block.append((line_no, text))
            if text.startswith("#"):
                yield from _split(block)
                block = []


def _split(block: list[tuple[int, str]]) -> Iterator[Sentence]:
    text, starts = "", []
    for line_no, line in block:
        starts.append((len(text), line_no))
        text += line + " "
    at = 0
    for end in [*(m.end() for m in re.finditer(r"[.!?;]\s+(?=[A-Z(`*\"])", text)), len(text)]:
        if text[at:end].strip():
            yield Sentence(max(no for begin, no in starts if begin <= at), text[at:end].strip())
        at = end


_GPUS = re.compile(
    r"(?<![\w.:/-])(\d[\d,]*)(?: ?[x×])?[ -]?(?:(?:NVIDIA|AMD) )?"
    r"(?:(?:GB|MI|[HPVABT])\d{1,3}\w?s?(?![\w.])|(?i:GPUs?|devices|cards|accelerators)\b)"
)
# what others are compared with: `from 8 to 64 GPUs`, `7.6x over 8 GPUs`
_BASES = (
    r"(?i)\bfrom (\d+)(?: GPUs?)? to \d+",
    r"(?i)\b(?:over|versus|vs\.?|compared (?:to|with)|relative to) (\d+)[ -]GPUs?\b",
)
_PRECISION = re.compile(r"(?i)\b(?:bf16|fp16|fp8|fp4|fp32|tf32)\b")


def _rows_meant(text: str, table: AnyTable, sizes_needed: int = 2) -> list[Line]:
    """The rows of a table that a sentence is about: its GPUs or nodes, its layout.

    No row where it states neither, or names a model size or a precision that no row has.
    """
    base = {float(n) for pattern in _BASES for n in re.findall(pattern, text)}
    gpus = {float(n.replace(",", "")) for n in _GPUS.findall(text)}
    if gpus:  # `90 % on 64 GPUs, 84 % on 128`
        gpus |= {
            float(n) for n in re.findall(r"\b(?:on|at|to|and|with) (\d+)\b(?! ?%|[.,]\d)", text)
        }
    gpus = gpus - base or gpus
    nodes = {float(n) for n in re.findall(r"(?i)(?<![\w.])(\d+)[ -]nodes?\b", text)}
    sizes = sizes_in(text)
    rows = table.rows
    if not (gpus or nodes or len(sizes) >= sizes_needed):
        return []
    if gpus:
        rows = [row for row in rows if row.number("gpus") in gpus]
    elif nodes:
        rows = [row for row in rows if row.number("nodes") in nodes]
    if any(row[name] for row in rows for name in sizes):
        rows = [row for row in rows if all(row.number(k, 1) == v for k, v in sizes.items())]
    models = {float(n) for n in re.findall(r"(?<![\w.])(\d+(?:\.\d+)?) ?B\b", text)}
    if models and any(row["params_b"] for row in rows):
        rows = [row for row in rows if row.number("params_b") in models]
    names = {name.lower() for name in _PRECISION.findall(text)}
    if names and any("precision" in row.words for row in rows):
        rows = [
            row for row in rows if names & set(_PRECISION.findall(row.words["precision"].lower()))
        ]
    return rows


Given = Iterator[tuple[str, Interval]]  # what a table gives: the quantity, and its interval


def _faster(row: Line, base: Line) -> Given:
    """How many times faster one row is than another, by each quantity that both have."""
    for name in ("step_s", "wall_s"):
        if span := ratio_of(span_of(base[name]), span_of(row[name])):
            yield name, span
    for name in ("samples_per_s", "tflops_all"):
        if span := ratio_of(span_of(row[name]), span_of(base[name])):
            yield name, span
    if span := ratio_of(tokens_rate(row), tokens_rate(base)):
        yield "tokens_per_s", span


def _pairs(table: AnyTable, rows: list[Line]) -> Iterator[tuple[Line, Line]]:
    return ((row, other) for row in rows for other in table.rows if other is not row)


def _printed(table: AnyTable, rows: list[Line], *names: str) -> Given:
    for row in rows:
        for heading, what in table.columns.items():
            if what.name in names:
                value = next((v for v in row.values.values() if v.column == heading), None)
                value = value or read_cell(row.cells.get(heading, ""), heading, what)
                if value:
                    yield what.name, (value.low, value.high)


def _speedups(table: AnyTable, rows: list[Line]) -> Given:
    yield from _printed(table, rows, "speedup")
    for row, base in _pairs(table, rows):
        yield from _faster(row, base)


def _gains(table: AnyTable, rows: list[Line]) -> Given:
    """Shares of more work or of less time: 1.4 times faster is 40 % faster, in 29 % less time."""
    for name, (low, high) in _speedups(table, rows):
        yield name, (low - 1, high - 1)
        yield name, (1 - 1 / low, 1 - 1 / high)


def _efficiencies(table: AnyTable, rows: list[Line]) -> Given:
    yield from _printed(table, rows, "efficiency", "mfu", "hfu")
    one = min((row.number("gpus") for row in table.rows if row["gpus"]), default=1) or 1
    for row in rows:
        for name, (low, high) in _printed(table, [row], "speedup"):
            if many := row.number("gpus"):
                yield name, (low * one / many, high * one / many)
    for row, base in _pairs(table, rows):
        many, first = row.number("gpus"), base.number("gpus")
        for name, (low, high) in _faster(row, base) if first and many and first < many else ():
            yield name, (low * first / many, high * first / many)
            if name in ("step_s", "wall_s"):  # weak scaling: the time stays
                yield name, (low, high)


def _values(*names: str) -> Callable[[AnyTable, list[Line]], Given]:
    """The printed values, and those of one GPU and of all."""

    def found(table: AnyTable, rows: list[Line]) -> Given:
        for row in rows:
            many = row.number("gpus", 1) or 1
            for name in names:
                if span := span_of(row[name]):
                    yield name, span
                if span and name != "step_s":
                    yield f"{name}_all", (span[0] / many, span[1] / many)
                    yield f"{name}_all", product_of(span, (many, many))

    return found


_M = _N.replace("?P<n>", "?P<m>")
# What is claimed: the words, what the number means, and what a table says about it.
_CLAIMS: tuple[tuple[str, str, Meaning, Callable], ...] = (
    (
        "speedup",
        rf"{_N}\s?(?:[x×]|times\b)(?![\w×]|\s*\d)(?=[^.;,]*?\b(?:speed-?ups?|faster)\b)|"
        rf"\bspeed-?up(?: factor)?{_OF}\(?{_M}(?!\s?%|[\d.,]*\s?GPU)",
        Meaning("speedup"),
        _speedups,
    ),
    (
        "efficiency",
        rf"{_N}\s?%(?=(?:\s\w+){{0,3}}\s+efficien)|"
        rf"\befficiency{_OF}\(?{_M}\s?%",
        Meaning("efficiency", 0.01),
        _efficiencies,
    ),
    (
        "efficiency",
        rf"\befficiency{_OF}\(?(?P<n>0\.\d+)\b(?!\s?%)",
        Meaning("efficiency"),
        _efficiencies,
    ),
    (
        "gain",
        rf"{_N}\s?%\s(?:faster|higher throughput|more (?:tokens|throughput)|less time|shorter|"
        r"reduction in (?:\w+ )?time)\b",
        Meaning("efficiency", 0.01),
        _gains,
    ),
    (
        "MFU",
        rf"{_N}\s?%(?=(?:\s\w+){{0,1}}\s+MFU)|\bMFU{_OF}\(?{_M}\s?%",
        Meaning("mfu", 0.01),
        _values("mfu", "hfu"),
    ),
    (
        "tokens/s",
        rf"{_N}\s?(?P<unit>[kKM])?\s?tok(?:en)?s?\s?(?:/|per\s)\s?s(?:ec(?:ond)?)?\b",
        Meaning("tokens_per_s"),
        _values("tokens_per_s", "tokens_per_s_gpu"),
    ),
    (
        "TFLOP/s",
        rf"{_N}\s?TFLOP(?:/s|s|S)?\b",
        Meaning("tflops"),
        _values("tflops", "tflops_all"),
    ),
    (
        "seconds a step",
        rf"{_N}\s?(?P<unit>ms|s|sec|seconds)\s?(?:/|per\s|an?\s)\s?(?:step|iter(?:ation)?)\b",
        Meaning("step_s"),
        _values("step_s"),
    ),
    (
        "seconds a step",
        r"\b(?:step|iteration)(?: time)?(?:\s+(?:takes?|took|lasts?|of|is|was|=))+\s*[~≈]?\s*"
        rf"{_N}\s?(?P<unit>ms|s|sec|seconds)\b(?!\s+(?:less|more|long|short|fast|slow))",
        Meaning("step_s"),
        _values("step_s"),
    ),
)


def contradicted(document: Document, tables: list[AnyTable]) -> Iterator[Finding]:
    """Claims of the prose that no row of the document's tables gives."""
    for sentence in sentences(document):
        if _NOT_MEASURED.search(sentence.text):
            continue
        meant = [(table, _rows_meant(sentence.text, table)) for table in tables]
        meant = [(table, rows) for table, rows in meant if rows]
        for kind, pattern, what, of in _CLAIMS if meant else ():
            given = [(table, *one) for table, rows in meant for one in of(table, rows)]
            for match in re.finditer(pattern, sentence.text) if given else ():
                yield from _claim(document, sentence, match, kind, what, given)
        yield from _best(document, sentence, tables)


def _claim(
    document: Document,
    sentence: Sentence,
    match: re.Match,
    kind: str,
    what: Meaning,
    given: list[tuple[AnyTable, str, Interval]],
) -> Iterator[Finding]:
    groups = match.groupdict()
    text = (groups.get("n") or groups.get("m")) + (groups.get("unit") or "")
    value = read_cell(text, kind, what)
    start = match.start("n" if groups.get("n") else "m")
    if value is None or value.low <= 0:
        return
    loose = LOOSE if _ABOUT.search(sentence.text[:start]) else AVERAGED
    claimed = (value.low * (1 - loose), value.high * (1 + loose))
    given = [one for one in given if one[2][0] > 0]
    if not given:
        return
    if all(apart(span, claimed) > 0 for *_, span in given):
        printed = [one for one in given if one[1] == what.name]
        table, name, nearest = min(printed or given, key=lambda one: apart(one[2], claimed))
        digits = max(len(re.sub(r"\D", "", value.text).lstrip("0")), 2)
        shown = figure(middle(nearest) / what.scale, digits)
        said = (
            f"{match[0].strip()!r}: the rows that the sentence means, of the table on line"
            f" {table.line_no}, give {shown} at the nearest (by {table.heading(name)})"
        )
        yield Finding(document.source, sentence.line, "claim", said, kind, text, shown, "likely")


_BEST = re.compile(r"(?i)\b(?:best|fastest|optimal|quickest|highest[- ]throughput)\b")


def _best(document: Document, sentence: Sentence, tables: list[AnyTable]) -> Iterator[Finding]:
    """A layout that is called the best is the fastest of its GPUs and model in a table."""
    sizes = sizes_in(sentence.text)
    if not sizes or not _BEST.search(sentence.text) or "memory" in sentence.text.lower():
        return
    wrong: Finding | None = None
    for table in tables:
        for row in _rows_meant(sentence.text, table, sizes_needed=1):
            if any(row.number(k) != size for k, size in sizes.items()):
                continue
            found = better_rows(table, row, ("gpus", "params_b", "seq_len", "layers", "hidden"))
            if found is None:
                continue
            cell, better = found
            if not better:
                return  # a table says so
            top, faster = better[0]
            said = (
                f"{_BEST.search(sentence.text)[0]!r}: {cell.column} {cell.text} on line"
                f" {row.line_no}, but line {top.line_no} has {faster.text}"
            )
            place = (document.source, sentence.line, "best", said, cell.column, cell.text)
            wrong = wrong or Finding(*place, faster.text, "likely")
    if wrong:
        yield wrong
