"""Entries that are one line each, read a block at a time.

Most lines of a log are alike. The first one makes an expression: its words as they stand, its
fields as groups, any number where another number stands. One pass of it over a block gives all
fields of all lines that are like it. A line that is not is read field by field.
"""

import gc
import math
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from itertools import compress, pairwise
from typing import NamedTuple

import numpy as np

from analysis.logs.parsing.fields import SUFFIX, is_nan, number
from analysis.logs.parsing.logfile import Log
from analysis.logs.record import Record

LINE = 4096  # no entry is longer
Columns = dict[str, np.ndarray]
Fields = Mapping[str, re.Pattern[bytes]]
Reader = Callable[[bytes], float | None]
_COMMA = re.compile(rb"-?\d{1,25},\d")  # where no thousands are: a decimal comma
_REST = re.compile(rb"(?:\s|\0|\x1b\[[0-9;]{0,24}[mK])*\Z")
# What differs from line to line: a number, and how many spaces pad it. A colour stays as it is.
_VARIES = re.compile(rb"(\x1b\[[0-9;]{0,24}[mK])|( {0,7})[-+.]?\d[\w.+-]*")
_PADDING, _NUMBER = rb" {1,7}+", rb"[-+.\d][\w.+-]*+"
_DISTINCT = 1 << 16  # texts of a field that are remembered
_KINDS = 4  # of lines in a log that get an expression of their own
_FEW = 0.05  # a share of a block's lines; where more are like no other, they get one
# What a start begins with; a character before a quantifier is not part of it.
_LITERAL = re.compile(rb"(?:[\w :'\"/=<>-]|\\[{|\"])+(?![*+?{])")


class _Field(NamedTuple):
    """Where a field stands in the line that made the expression."""

    name: str
    begin: int
    end: int


class _Entry(NamedTuple):
    """One line, from where the entry starts. cut: the file ends in it, without a line's end, so a
    number right there may have lost digits."""

    start: re.Match[bytes]
    text: bytes
    cut: bool


class _Kind(NamedTuple):
    """Lines that are like one of them: an expression of what follows the start, and its fields."""

    line: bytes
    rest: bytes
    fields: list[_Field]


class _Column(NamedTuple):
    """A column's numbers, the rows whose text is none, and those with a comma."""

    numbers: np.ndarray
    odd: list[int]
    commas: list[int]


def table(log: Log, start: re.Pattern[bytes], fields: Fields, record: Record) -> Columns:
    """Returns columns: `start`'s named groups, each field's first number, and `at`, where the line
    begins.

    A last line that the file's end cuts off counts when it has every field that the line before it
    has; a number that ends where the file does is none. A number at its line's end counts where
    most lines end in that field: in another line it is cut. A doubt counts those that are none.
    `nan_loss` is 1 where the loss was printed as NaN.
    """
    reader = _Table(start, fields)
    collects = gc.isenabled()
    gc.disable()  # the texts of a block are many tuples without circles: looking at each takes time
    try:
        for offset, block in log.blocks():
            reader.read(offset, block, offset + len(block) == log.size)
    finally:
        if collects:
            gc.enable()
    return reader.columns(record)


class _Table:
    """A reader of one kind of entries: `read` takes the log's blocks in order, `columns` returns
    the numbers of all of them. It learns expressions of whole lines as it goes."""

    def __init__(self, start: re.Pattern[bytes], fields: Fields):
        self.start, self.fields = start, fields
        literal = _LITERAL.match(start.pattern)
        self.mark = literal[0].replace(b"\\", b"") if literal else b""
        self.names = dict.fromkeys([*start.groupindex, *fields, "nan_loss", "at"]).keys()
        self.parts: list[Columns] = []
        self.rows = 0  # that are in `parts`
        self.kinds: list[_Kind] = []
        self.pattern = start
        self.readers: dict[tuple[bytes, _Field], Reader] = {}
        # Of each field: values that are no number, those with a decimal comma; the rows whose line
        # ends in it, and the rows that have a comma.
        self.none: Counter[str] = Counter()
        self.decimal: Counter[str] = Counter()
        self.last: dict[str, list[np.ndarray]] = defaultdict(list)
        self.with_comma: dict[str, list[int]] = defaultdict(list)

    def read(self, offset: int, block: bytes, at_end: bool) -> None:
        """Adds the block's entries. at_end: the log ends with it."""
        if self.mark not in block or not (first := self.start.search(block)):
            return
        if not self.kinds:
            self._learn(self._entry(block, first, len(block), at_end))
        while True:
            matches = self._matches(block)
            at = self._places(block, len(matches))
            texts = list(zip(*matches, strict=True)) if self.kinds else []
            rows = self._rows_is_kinds(texts)
            unlike = np.flatnonzero(~np.any([*rows, np.zeros(len(at), bool)], axis=0)).tolist()
            if len(self.kinds) == _KINDS or len(unlike) <= _FEW * len(matches):
                break
            entries = (self._entry_at(block, at, row, at_end) for row in unlike)
            if not any(self._learn(entry) for entry in entries):
                break
        columns = {"at": at + float(offset), "nan_loss": np.zeros(len(at))}
        for name, index in self.start.groupindex.items() if texts else ():
            columns[name] = _numbers(texts[index - 1], number).numbers
            if name == "loss":
                columns["nan_loss"] = _printed_nan(texts[index - 1], columns[name])
        group = self.start.groups
        for kind, is_kind in zip(self.kinds, rows, strict=True):
            unlike += self._read_kind(kind, texts[group:], columns, is_kind)
            group += len(kind.fields) + 1
        for name in self.names - columns.keys():
            columns[name] = np.full(len(at), np.nan)
        kept = [
            self._read_entry(self._entry_at(block, at, row, at_end), columns, row)
            for row in sorted(unlike)
        ]
        if not all(kept):  # the last one
            columns = {name: values[:-1] for name, values in columns.items()}
        self.parts.append(columns)
        self.rows += len(columns["at"])
        n_lines = {i: is_kind.sum() for i, is_kind in enumerate(rows) if is_kind.any()}
        order = sorted(n_lines, key=lambda i: -n_lines[i])  # the commonest is looked for first
        if order and order != list(range(len(self.kinds))):
            self._use([self.kinds[i] for i in order])

    def _learn(self, entry: _Entry) -> bool:
        """Adds the expression of the lines that are like this one. Returns whether it is a new
        one."""
        kind = _kind(entry, self.fields)
        if kind is None or any(kind.rest == learned.rest for learned in self.kinds):
            return False
        self._use([*self.kinds, kind])
        return True

    def _use(self, kinds: list[_Kind]) -> None:
        """Sets the kinds of lines that are looked for, and makes the pattern that finds them."""
        self.kinds, rests = kinds, b"|".join(kind.rest for kind in kinds)
        self.pattern = re.compile(b"(?:%b)(?:%b|)" % (self.start.pattern, rests), self.start.flags)

    def _matches(self, block: bytes) -> list[tuple[bytes, ...]]:
        """Returns the groups of each entry: the start's, then each kind's fields and its line's
        end."""
        return self.pattern.findall(block) if self.kinds else [()] * len(self.start.findall(block))

    def _places(self, block: bytes, count: int) -> np.ndarray:
        """Returns where the entries start in the block."""
        at = _find_all(block, self.mark) if self.mark else np.empty(0, int)
        if len(at) == count:
            return at
        at = np.array([match.start() for match in self.start.finditer(block)], int)
        if len(at) != count:  # the start of one stands in another's line
            at = np.array([match.start() for match in self.pattern.finditer(block)], int)
        return at

    def _rows_is_kinds(self, texts: Sequence[tuple[bytes, ...]]) -> list[np.ndarray]:
        """Returns for each kind which rows are like it, bool (rows,)."""
        rows, end = [], self.start.groups - 1
        for kind in self.kinds:
            end += len(kind.fields) + 1
            ends = texts[end]
            rows.append(np.array(ends) != b"" if b"" in ends else np.ones(len(ends), bool))
        return rows

    def _read_kind(
        self,
        kind: _Kind,
        texts: Sequence[tuple[bytes, ...]],
        columns: Columns,
        is_kind: np.ndarray,
    ) -> list[int]:
        """Fills the rows that are like `kind`; returns those with a text that is no number for its
        field. is_kind: which rows are like it."""
        alike, rows = is_kind.all(), np.flatnonzero(is_kind)
        wrong: set[int] = set()
        for field, values in zip(kind.fields, texts, strict=False):
            values = values if alike else tuple(compress(values, is_kind))
            numbers, odd, commas = _numbers(values, self._reader(kind, field))
            wrong.update(rows[odd].tolist())
            if not alike:
                columns.setdefault(field.name, np.full(len(is_kind), np.nan))[rows] = numbers
            else:
                columns[field.name] = numbers
            self.with_comma[field.name] += (rows[commas] + self.rows).tolist()
            if field.name == "loss":
                columns["nan_loss"][rows] = _printed_nan(values, numbers)
        read_rows = np.setdiff1d(rows, list(wrong)) if wrong else rows
        for field in kind.fields:
            if _REST.match(kind.line, field.end):
                self.last[field.name].append(read_rows + self.rows)
        return list(wrong)

    def _reader(self, kind: _Kind, field: _Field) -> Reader:
        """Returns the exact way to read a field of lines of a kind, with what it read before."""
        if (kind.rest, field) not in self.readers:
            self.readers[kind.rest, field] = lru_cache(_DISTINCT)(self._exactly(kind, field))
        return self.readers[kind.rest, field]

    def _exactly(self, kind: _Kind, field: _Field) -> Reader:
        """Returns a function that searches for the field in a line of the kind with another text in
        the field's place."""
        before, behind = kind.line[: field.begin], kind.line[field.end :] + b"\n"

        def read(text: bytes) -> float | None:
            """Reads a text in the field's place; None where it is no number there."""
            match = self.fields[field.name].search(before + text + behind)
            value, unit = (*match.groups(), b"")[:2] if match else (None, None)
            whole = value is not None and match.start(1) == len(before)
            if not whole or value + (unit or b"") != text:
                return None
            return number(value) * SUFFIX[unit or b""]

        return read

    def _entry_at(self, block: bytes, at: np.ndarray, row: int, at_end: bool) -> _Entry:
        """Returns the entry of a row of the block, which starts at `at[row]`."""
        following = int(at[row + 1]) if row + 1 < len(at) else len(block)
        return self._entry(block, self.start.match(block, int(at[row])), following, at_end)

    def _entry(self, block: bytes, match: re.Match[bytes], following: int, at_end: bool) -> _Entry:
        """Returns an entry up to its line's end, or to the next entry where two stand on one
        line. following: where the next one begins."""
        begin = match.start()
        end = min(begin + LINE, following)
        for stop in (b"\n", b"\r"):
            at = block.find(stop, begin, end)
            end = at if at >= 0 else end
        return _Entry(match, block[begin:end], end == len(block) and at_end)

    def _read_entry(self, entry: _Entry, columns: Columns, row: int) -> bool:
        """Fills a row of the columns field by field. Returns False where the file's end cuts the
        entry off: it lacks a field that the row before it has, or ends within a number of its
        start."""
        texts = {name: (entry.start[name], b"") for name in self.start.groupindex}
        for name, pattern in self.fields.items():
            if value := pattern.search(entry.text):
                cut_off = entry.cut and value.end() == len(entry.text)
                texts[name] = (None, b"") if cut_off else (*value.groups(), b"")[:2]
                if value[1] is None:
                    self.none[name] += 1
                    self.decimal[name] += bool(_COMMA.match(entry.text, value.end()))
                elif _REST.match(entry.text, value.end()):
                    self.last[name].append(np.array([self.rows + row]))
                if b"," in (value[1] or b""):
                    self.with_comma[name].append(self.rows + row)
        for name, (value, unit) in texts.items():
            columns[name][row] = number(value) * SUFFIX[unit or b""]
        columns["nan_loss"][row] = float(is_nan(texts.get("loss", (None,))[0]))
        if not entry.cut:
            return True
        if entry.start[0] == entry.text and entry.text[-1:] in b"0123456789.,eE+-":
            return False
        before = {n: values[row - 1] for n, values in columns.items()} if row else {}
        if not before and self.parts:
            before = {name: values[-1] for name, values in self.parts[-1].items()}
        absent = self.fields.keys() - texts.keys()
        return all(math.isnan(before.get(name, math.nan)) for name in absent)

    def columns(self, record: Record) -> Columns:
        """Returns the columns of the whole log, and puts the doubts about numbers in its record."""
        parts = self.parts or [{name: np.empty(0) for name in self.names}]
        columns = {name: np.concatenate([part[name] for part in parts]) for name in self.names}
        has_commas = any(2 * count > self.rows for count in self.decimal.values())
        for name in self.fields:
            n_numbers = np.isfinite(columns[name]).sum()
            last_rows = np.concatenate([np.empty(0, int), *self.last[name]])
            cut_rows = last_rows if 2 * len(last_rows) <= n_numbers else last_rows[:0]
            if has_commas:
                cut_rows = np.append(cut_rows, self.with_comma[name])
            cut_rows = np.unique(cut_rows[cut_rows < self.rows]).astype(int)
            columns[name][cut_rows] = math.nan
            self.none[name] += len(cut_rows)
        record.doubt_numbers(self.none, "commas stand for decimal points: " if has_commas else "")
        return columns


def _find_all(block: bytes, mark: bytes) -> np.ndarray:
    """Returns the offsets in the block at which the mark stands."""
    text = np.frombuffer(block, np.uint8)
    offsets = np.flatnonzero(text[: max(len(text) - len(mark) + 1, 0)] == mark[0])
    for i, byte in enumerate(mark[1:], start=1):
        offsets = offsets[text[offsets + i] == byte]
    return offsets


def _kind(entry: _Entry, fields: Fields) -> _Kind | None:
    """Returns the kind of lines that are like an entry; None where it is cut off, or no number
    follows a field's label, or a field stands in the start."""
    line, begin = entry.text, len(entry.start[0])
    found = []
    for name, pattern in fields.items():
        if value := pattern.search(line):
            if value[1] is None or value.start(1) < begin:
                return None
            found.append(
                _Field(name, value.start(1), max(map(value.end, range(1, len(value.groups()) + 1))))
            )
    found.sort(key=lambda field: field.begin)
    if not (found or entry.start.re.groups) or entry.cut or len(line) == LINE:
        return None
    if entry.start.re.search(line, begin):  # two entries on one line
        return None
    if any(a.end > b.begin for a, b in pairwise(found)):
        return None
    rest, at = b"", begin
    for field in found:
        words = line[at : field.begin]
        stripped = words.rstrip(b" ")
        behind = re.escape(line[field.end : field.end + 1])
        rest += _alike(stripped) + (_PADDING if stripped != words else b"")
        rest += rb"([^%b\s]{1,40}+)" % behind
        at = field.end
    return _Kind(line, rest + _alike(line[at:]) + rb"([\r\n])", found)


def _alike(words: bytes) -> bytes:
    """Returns an expression for these words, with any numbers."""
    expression, at = b"", 0
    for varies in _VARIES.finditer(words):
        expression += re.escape(words[at : varies.start()])
        if varies[1]:
            expression += re.escape(varies[1])
        else:
            expression += (_PADDING if varies[2] else b"") + _NUMBER
        at = varies.end()
    return expression + re.escape(words[at:])


def _numbers(texts: Sequence[bytes], read: Reader) -> _Column:
    """Returns the numbers of a column. read: takes a text that is not plain digits; it is asked
    once for each."""
    if not b"\n".join(texts).translate(None, b"0123456789.\n"):
        plain = [text or b"nan" for text in texts] if b"" in texts else texts
        try:
            return _Column(np.fromiter(map(float, plain), float, len(texts)), [], [])
        except ValueError:
            pass
    distinct = {text: read(text) for text in set(texts)}
    numbers = np.array([distinct[text] for text in texts], float)  # NaN of None
    odd = {text for text, value in distinct.items() if value is None}
    commas = {text for text in distinct if b"," in text}
    return _Column(
        numbers,
        [row for row, text in enumerate(texts) if text in odd] if odd else [],
        [row for row, text in enumerate(texts) if text in commas] if commas else [],
    )


def _printed_nan(texts: Sequence[bytes], numbers: np.ndarray) -> np.ndarray:
    """Returns 1 where NaN was printed, 0 elsewhere."""
    printed, rows = np.zeros(len(texts)), np.flatnonzero(np.isnan(numbers)).tolist()
    nan = {text: is_nan(text) for text in {texts[row] for row in rows}}
    printed[rows] = [nan[texts[row]] for row in rows]
    return printed
