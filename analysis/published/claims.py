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
    r"(?i)(?:~|≈|\b(?:about|around|approximately|roughly|nearly|almost|over|under|more than|"
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


def _gpus_of(text: str) -> tuple[set[int], set[int]]:
    """(GPUs that a sentence is about, those that it compares them with: `from 1 to 8 GPUs`)."""
    base = {int(n) for n in re.findall(r"(?i)\bfrom (\d+)(?: GPUs?)? to \d+", text)}
    found = {int(n.replace(",", "")) for n in _GPUS.findall(text)}
    return found - base, base


_GPUS = re.compile(
    r"(?<![\w.])(\d[\d,]*)(?: ?[x×])?[ -]?(?:(?:NVIDIA|AMD) )?"
    r"(?:(?:GB|MI|[HPVABT])\d{1,3}\w?s?(?![\w.])|(?i:GPUs?|devices|cards|accelerators)\b)"
)


def _pairs(table: AnyTable, gpus: set[int]) -> Iterator[tuple[Line, Line]]:
    for row in table.rows:
        if row.number("gpus") in gpus:
            yield from ((row, other) for other in table.rows if other is not row)


def _faster(row: Line, base: Line) -> Iterator[tuple[str, Interval]]:
    """How many times faster one row is than another, by each quantity that both have."""
    for name in ("step_s", "wall_s"):
        if span := ratio_of(span_of(base[name]), span_of(row[name])):
            yield name, span
    for name in ("samples_per_s", "tflops_all"):
        if span := ratio_of(span_of(row[name]), span_of(base[name])):
            yield name, span
    if span := ratio_of(tokens_rate(row), tokens_rate(base)):
        yield "tokens_per_s", span


def _printed(table: AnyTable, gpus: set[int], *names: str) -> Iterator[tuple[str, Interval]]:
    for row in table.rows:
        if row.number("gpus") not in gpus:
            continue
        for heading, what in table.columns.items():
            if what.name in names:
                value = next((v for v in row.values.values() if v.column == heading), None)
                value = value or read_cell(row.cells.get(heading, ""), heading, what)
                if value:
                    yield what.name, (value.low, value.high)


def _speedups(table: AnyTable, gpus: set[int]) -> Iterator[tuple[str, Interval]]:
    yield from _printed(table, gpus, "speedup")
    for row, base in _pairs(table, gpus):
        yield from _faster(row, base)


def _efficiencies(table: AnyTable, gpus: set[int]) -> Iterator[tuple[str, Interval]]:
    yield from _printed(table, gpus, "efficiency", "mfu", "hfu")
    one = min((row.number("gpus") for row in table.rows if row["gpus"]), default=1) or 1
    for name, (low, high) in _printed(table, gpus, "speedup"):
        for many in gpus:
            yield name, (low * one / many, high * one / many)
    for row, base in _pairs(table, gpus):
        many, first = row.number("gpus"), base.number("gpus")
        for name, (low, high) in _faster(row, base) if first and first < many else ():
            yield name, (low * first / many, high * first / many)
            if name in ("step_s", "wall_s"):  # weak scaling: the time stays
                yield name, (low, high)


def _values(*names: str) -> Callable:
    def found(table: AnyTable, gpus: set[int]) -> Iterator[tuple[str, Interval]]:
        for row in table.rows:
            many = row.number("gpus")
            for name in names if many in gpus else ():
                if span := span_of(row[name]):
                    yield name, span
                    yield name, (span[0] / many, span[1] / many)
                    yield name, product_of(span, (many, many))

    return found


# What is claimed: the words, what the number means, and what a table says about it.
_CLAIMS: tuple[tuple[str, str, Meaning, Callable], ...] = (
    (
        "speedup",
        rf"{_N}\s?[x×](?![\w×]|\s*\d)(?=[^.;,]*?\b(?:speed-?ups?|faster)\b)|"
        rf"\b(?:speed-?up)(?: factor)?{_OF}\(?{_N.replace('?P<n>', '?P<m>')}\s?[x×]",
        Meaning("speedup"),
        _speedups,
    ),
    (
        "efficiency",
        rf"{_N}\s?%(?=(?:\s\w+){{0,3}}\s+efficien)|"
        rf"\befficiency{_OF}\(?{_N.replace('?P<n>', '?P<m>')}\s?%",
        Meaning("efficiency", 0.01),
        _efficiencies,
    ),
    (
        "MFU",
        rf"{_N}\s?%(?=(?:\s\w+){{0,1}}\s+MFU)|\bMFU{_OF}\(?{_N.replace('?P<n>', '?P<m>')}\s?%",
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
)


def contradicted(document: Document, tables: list[AnyTable]) -> Iterator[Finding]:
    """Claims of the prose that no row of the document's tables gives."""
    for sentence in sentences(document):
        gpus, _ = _gpus_of(sentence.text)
        if not _NOT_MEASURED.search(sentence.text):
            known = [t for t in tables if any(row.number("gpus") in gpus for row in t.rows)]
            for kind, pattern, what, of in _CLAIMS if known else ():
                for match in re.finditer(pattern, sentence.text):
                    yield from _claim(document, sentence, match, kind, what, of, known, gpus)
            yield from _best(document, sentence, tables, gpus)


def _claim(
    document: Document,
    sentence: Sentence,
    match: re.Match,
    kind: str,
    what: Meaning,
    of: Callable,
    tables: list[AnyTable],
    gpus: set[int],
) -> Iterator[Finding]:
    groups = match.groupdict()
    text = (groups["n"] or groups.get("m")) + (groups.get("unit") or "")
    value = read_cell(text, kind, what)
    start = match.start("n") if groups["n"] else match.start("m")
    given = [(t, name, span) for t in tables for name, span in of(t, gpus)]
    if value is None or value.low <= 0 or not given:
        return
    loose = LOOSE if _ABOUT.search(sentence.text[:start]) else AVERAGED
    claimed = (value.low * (1 - loose), value.high * (1 + loose))
    table, name, nearest = min(given, key=lambda one: apart(one[2], claimed))
    if apart(nearest, claimed) > 0:
        shown = f"{middle(nearest) / what.scale:.4g}"
        many = ", ".join(f"{n}" for n in sorted(gpus))
        said = (
            f"{match[0].strip()!r} on {many} GPUs: the table on line {table.line_no} gives {shown}"
            f" at the nearest (by {name})"
        )
        yield Finding(document.source, sentence.line, "claim", said, kind, text, shown, "likely")


_BEST = re.compile(r"(?i)\b(?:best|fastest|optimal|quickest|highest[- ]throughput)\b")


def _best(
    document: Document, sentence: Sentence, tables: list[AnyTable], gpus: set[int]
) -> Iterator[Finding]:
    """A layout that is called the best is the fastest of its GPUs and model in a table."""
    sizes = sizes_in(sentence.text)
    if not sizes or not _BEST.search(sentence.text) or "memory" in sentence.text.lower():
        return
    wrong: Finding | None = None
    for table in tables:
        for row in table.rows:
            if any(row.number(k) != size for k, size in sizes.items()):
                continue
            if gpus and row.number("gpus") not in gpus:
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
