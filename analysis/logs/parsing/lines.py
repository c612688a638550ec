"""Entries that are one line each, read a block at a time.

Most lines of a log differ in their digits alone: they have one shape. The first line of a shape is
searched for each field; of the others, the fields stand at the same places, and a column of them
becomes numbers at once. No expression may therefore tell one digit from another.
"""

import gc
import math
import re
from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping
from itertools import repeat
from typing import NamedTuple

import numpy as np

from analysis.logs.parsing.fields import SUFFIX, is_nan, number
from analysis.logs.parsing.logfile import Log
from analysis.logs.record import Record

LINE = 4096  # no entry is longer
Columns = dict[str, np.ndarray]
Fields = Mapping[str, re.Pattern[bytes]]
_COMMA = re.compile(rb"-?\d{1,25},\d")  # where no thousands are: a decimal comma
_REST = re.compile(rb"(?:\s|\0|\x1b\[[0-9;]{0,24}[mK])*\Z")
_SHAPE = bytes.maketrans(b"123456789\r", b"000000000\n")
_SHAPES = 1 << 12  # of lines in a log that are remembered
_SPARSE = 1000  # bytes for an entry
_EXACT = 15  # digits of which a float64 holds every whole number
_NO_ENTRY, _UNKNOWN = -1, -2  # in place of the number of a layout
# What a start begins with; a character before a quantifier is not part of it.
_LITERAL = re.compile(rb"(?:[\w :'\"/=<>-]|\\[{|\"])+(?![*+?{])")


class _Value(NamedTuple):
    """What an entry prints under a name. text: None where it is no number, or cut off. at: where it
    begins in the entry; -1 where it is no number. is_last: nothing stands behind it."""

    name: str
    text: bytes | None
    unit: bytes
    at: int
    is_last: bool

    @property
    def number(self) -> float:
        return number(self.text) * SUFFIX[self.unit]

    @property
    def has_comma(self) -> bool:
        return b"," in (self.text or b"")


class _Entry(NamedTuple):
    """One line, from where the entry starts. cut: the file ends in it, without a line's end, so a
    number right there may have lost digits."""

    start: re.Match[bytes]
    text: bytes
    cut: bool


class _Layout(NamedTuple):
    """Where the entry begins in lines of one shape, and its values in one of them."""

    begin: int
    values: list[_Value]


class Line(NamedTuple):
    """A kind of line that a program prints for a step.

    start: a pattern where the entry starts, best with words first. fields: a pattern for each of
    its fields, which stand in any order. The named groups of `start` and the names of fields are
    columns: those of Record's steps, or

        ms            a step's time in milliseconds
        planned       how many iterations the run should take
        global_batch  sequences in a step, by its line: steps' `sequences`
        seq_len       tokens in a sequence
        batch_tokens  tokens in a step
        per_gpu       tokens per second of one GPU
        peak_gib      most memory that a rank held so far, GiB
        mfu_pct       model FLOPs utilisation as printed, in percent

    derive: makes other columns of these, in SI units, or leaves out rows that are no step. mark:
    what each such line holds, where `start` does not begin with its words. closed: each field
    counts only with what stands behind it, so a line that the file's end cuts off counts, too.
    valid: whether an entry is whole, by its text; it is asked once for lines of a shape.
    """

    start: re.Pattern[bytes]
    fields: Fields = {}
    derive: Callable[[Columns, Record, Log], Columns] | None = None
    mark: bytes = b""
    closed: bool = False
    valid: Callable[[bytes], bool] = bool


def table(log: Log, line: Line, record: Record) -> Columns:
    """Returns columns: the named groups of `line.start`, each field's first number, and `at`, where
    the line begins.

    A last line that the file's end cuts off counts when it has every field that the line before it
    has; a number that ends where the file does is none. A number at its line's end counts where
    most lines end in that field: in another line it is cut. A doubt counts those that are none.
    `nan_loss` is 1 where the loss was printed as NaN.
    """
    reader = _Table(line)
    collects = gc.isenabled()
    gc.disable()  # a block has many lines, without circles: looking at each takes time
    try:
        for offset, block in log.blocks():
            if reader.read(offset, block, offset + len(block) == log.size):
                log.skip(offset, offset + len(block))
    finally:
        if collects:
            gc.enable()
    return reader.columns(record)


def by_heading(columns: Columns, heading: np.ndarray) -> Columns:
    """Returns one row for each heading, where an entry is a heading and lines of its values: the
    first value of each name up to the next heading. heading: which rows are one."""
    entry = np.cumsum(heading) - 1
    merged = {}
    for name, values in columns.items():
        stated = values > 0 if name == "nan_loss" else ~np.isnan(values)
        rows = np.flatnonzero(stated & (entry >= 0))[::-1]  # of a name, the first is put last
        merged[name] = np.full(int(heading.sum()), 0.0 if name == "nan_loss" else np.nan)
        merged[name][entry[rows]] = values[rows]
    return merged


class _Table:
    """A reader of one kind of entries: `read` takes the log's blocks in order, `columns` returns
    the numbers of all of them. It learns the shapes of lines as it goes."""

    def __init__(self, line: Line):
        self.start, self.fields = line.start, line.fields
        self.closed, self.valid = line.closed, line.valid
        literal = _LITERAL.match(line.start.pattern)
        self.mark = line.mark or (literal[0].replace(b"\\", b"") if literal else b"")
        self.names = [*dict.fromkeys([*self.start.groupindex, *self.fields, "nan_loss", "at"])]
        self.parts: list[Columns] = []
        self.rows = 0  # that are in `parts`
        self.damaged = 0  # entries that are not valid
        self.is_sparse = False  # the last block was: only lines with the mark are looked at
        self.layouts: list[_Layout] = []
        self.shapes = {b"": _NO_ENTRY}  # the shape of a line -> the number of its layout
        # Of each field: values that are no number, those with a decimal comma; the rows whose line
        # ends in it, and the rows that have a comma.
        self.none: Counter[str] = Counter()
        self.decimal: Counter[str] = Counter()
        self.last: dict[str, list[np.ndarray]] = defaultdict(list)
        self.with_comma: dict[str, list[np.ndarray]] = defaultdict(list)

    def read(self, offset: int, block: bytes, at_end: bool) -> bool:
        """Adds the block's entries. Returns whether it holds lines of known shapes alone. at_end:
        the log ends with it."""
        if self.mark not in block:
            return False
        size, n_rows, origins = len(block), self.rows, None
        if self.is_sparse:
            spans = _lines_with(block, self.mark)
            block = b"".join(block[begin:end] for begin, end in spans)
            origins = np.array([begin for begin, _ in spans])
            starts = np.cumsum([0] + [end - begin for begin, end in spans[:-1]])
        shapes = block.translate(_SHAPE).split(b"\n")
        lengths = np.fromiter(map(len, shapes), int, len(shapes))
        begins = np.cumsum(lengths + 1) - lengths - 1
        kinds = np.fromiter(map(self.shapes.get, shapes, repeat(_UNKNOWN)), int, len(shapes))
        if shapes[-1]:  # it has no end
            kinds[-1] = _UNKNOWN
        single_entries = self._learn(block, at_end, shapes, begins, kinds)
        if (kinds >= 0).any() or single_entries:
            self._add(offset, block, begins, kinds, single_entries)
            if origins is not None:
                at = self.parts[-1]["at"]
                line = np.searchsorted(starts, at - offset, "right") - 1
                self.parts[-1]["at"] = at + (origins - starts)[line]
        self.is_sparse = bool(self.mark) and (self.rows - n_rows) * _SPARSE < size
        return origins is None and bool((kinds != _UNKNOWN).all())

    def _learn(
        self,
        block: bytes,
        at_end: bool,
        shapes: list[bytes],
        begins: np.ndarray,
        kinds: np.ndarray,
    ) -> list[_Entry]:
        """Learns the shapes of the lines that have an entry and are of no known kind, and fills
        their kinds. Returns the entries whose line must be read by itself."""
        edges = np.flatnonzero(np.diff(kinds == _UNKNOWN, prepend=False, append=False)).tolist()
        places = [*begins.tolist(), len(block)] if edges else []
        single_entries = []
        for first, last in zip(edges[::2], edges[1::2], strict=True):
            at, end = block.find(self.mark, places[first], places[last]), places[last]
            while 0 <= at < end:
                line = bisect_right(places, at, first, last) - 1
                shape, following = shapes[line], places[line + 1]
                if shape not in self.shapes or line == len(shapes) - 1:
                    entries = self._entries(block, places[line], following, at_end)
                    if line == len(shapes) - 1 or not self._remember(shape, places[line], entries):
                        single_entries += entries
                if line < len(shapes) - 1:
                    kinds[line] = self.shapes.get(shape, _UNKNOWN)
                at = block.find(self.mark, following, end)
        return single_entries

    def _remember(self, shape: bytes, begin: int, entries: list[_Entry]) -> bool:
        """Adds the shape of a line whose one entry has no field without a number. Returns whether
        there is room for it, and it is such a line."""
        if len(entries) != 1 or len(shape) >= LINE or len(self.shapes) >= _SHAPES:
            return False
        values = self._values(entries[0])
        if any(value.text is None for value in values):
            return False
        self.shapes[shape] = len(self.layouts)
        self.layouts.append(_Layout(entries[0].start.start() - begin, values))
        return True

    def _entries(self, block: bytes, begin: int, end: int, at_end: bool) -> list[_Entry]:
        """Returns the entries of the line in [begin, end), without those that are damaged."""
        matches = list(self.start.finditer(block, begin, end))
        stops = [match.start() for match in matches[1:]] + [end]
        pairs = zip(matches, stops, strict=False)
        entries = [self._entry(block, match, stop, at_end) for match, stop in pairs]
        valid = [entry for entry in entries if self.valid(entry.text)]
        self.damaged += len(entries) - len(valid)
        return valid

    def _entry(self, block: bytes, match: re.Match[bytes], following: int, at_end: bool) -> _Entry:
        """Returns an entry up to its line's end, or to the next entry where two stand on one
        line. following: where the next one begins."""
        begin = match.start()
        end = min(begin + LINE, following)
        for stop in (b"\n", b"\r"):
            at = block.find(stop, begin, end)
            end = at if at >= 0 else end
        return _Entry(match, block[begin:end], end == len(block) and at_end)

    def _values(self, entry: _Entry) -> list[_Value]:
        """Returns what an entry prints: what its start holds, and each field that it has."""
        begin = entry.start.start()
        values = [
            _Value(name, text, b"", entry.start.start(name) - begin, False)
            for name, text in entry.start.groupdict().items()
            if text is not None
        ]
        for name, pattern in self.fields.items():
            if match := pattern.search(entry.text):
                text, unit = (*match.groups(), b"")[:2]
                if entry.cut and match.end() == len(entry.text):
                    text = None
                is_last = text is not None and _REST.match(entry.text, match.end()) is not None
                values.append(_Value(name, text, unit or b"", match.start(1), is_last))
        return values

    def _add(
        self,
        offset: int,
        block: bytes,
        begins: np.ndarray,
        kinds: np.ndarray,
        single_entries: list[_Entry],
    ) -> None:
        """Adds the rows of a block: those of lines of known kinds, and the entries whose line was
        read by itself."""
        lines = np.flatnonzero(kinds >= 0)
        kinds, begins = kinds[lines], begins[lines]
        starts = np.array([layout.begin for layout in self.layouts], int)[kinds] + begins
        places = np.append(starts, [entry.start.start() for entry in single_entries]).astype(int)
        order = np.argsort(places, kind="stable")
        row_of = np.empty(len(order), int)  # in the order of the file
        row_of[order] = np.arange(len(order))
        columns = {name: np.full(len(order), np.nan) for name in self.names}
        columns |= {"at": (places[order] + offset).astype(float), "nan_loss": np.zeros(len(order))}
        for kind in np.unique(kinds).tolist():
            chosen = np.flatnonzero(kinds == kind)
            rows = row_of[chosen]
            for value in self.layouts[kind].values:
                numbers = _numbers(block, starts[chosen] + value.at, value)
                if len(rows) == len(order):  # as in most blocks
                    columns[value.name] = np.broadcast_to(numbers, len(order))
                else:
                    columns[value.name][rows] = numbers
                self._note(value, rows, columns)
        for row, entry in zip(row_of[len(lines) :].tolist(), single_entries, strict=True):
            values = self._values(entry)
            for value in values:
                columns[value.name][row] = value.number
                self._note(value, np.array([row]), columns)
                if value.text is None and value.at < 0:
                    self.none[value.name] += 1
                    match = self.fields[value.name].search(entry.text)
                    self.decimal[value.name] += bool(_COMMA.match(entry.text, match.end()))
            if entry.cut and not self._counts(entry, values, columns, row):  # the last one
                columns = {name: numbers[:-1] for name, numbers in columns.items()}
        self.parts.append(columns)
        self.rows += len(columns["at"])

    def _note(self, value: _Value, rows: np.ndarray, columns: Columns) -> None:
        """Notes what is told of the rows that have such a value."""
        if value.name == "loss":
            columns["nan_loss"][rows] = float(is_nan(value.text))
        if value.name in self.fields:
            if value.is_last:
                self.last[value.name].append(rows + self.rows)
            if value.has_comma:
                self.with_comma[value.name].append(rows + self.rows)

    def _counts(self, entry: _Entry, values: list[_Value], columns: Columns, row: int) -> bool:
        """Returns whether an entry counts that the file's end cuts off: not where it lacks a field
        that the row before it has, or ends within a number of its start."""
        if entry.start[0] == entry.text and entry.text[-1:] in b"0123456789.,eE+-":
            return False
        if self.closed:
            return True
        earlier_values = (
            {name: numbers[row - 1] for name, numbers in columns.items()} if row else {}
        )
        if not earlier_values and self.parts:
            earlier_values = {name: numbers[-1] for name, numbers in self.parts[-1].items()}
        absent = self.fields.keys() - {value.name for value in values}
        return all(math.isnan(earlier_values.get(name, math.nan)) for name in absent)

    def columns(self, record: Record) -> Columns:
        """Returns the columns of the whole log, and puts the doubts about numbers in its record."""
        parts = self.parts or [{name: np.empty(0) for name in self.names}]
        # Of a long log a column is many bytes: the parts are let go one by one.
        columns = {name: np.concatenate([part.pop(name) for part in parts]) for name in self.names}
        has_commas = any(2 * count > self.rows for count in self.decimal.values())
        for name in self.fields:
            n_numbers = np.isfinite(columns[name]).sum()
            last_rows = np.concatenate([np.empty(0, int), *self.last[name]])
            cut_rows = last_rows if 2 * len(last_rows) <= n_numbers else last_rows[:0]
            if has_commas:
                cut_rows = np.concatenate([cut_rows, *self.with_comma[name]])
            cut_rows = np.unique(cut_rows[cut_rows < self.rows]).astype(int)
            columns[name][cut_rows] = math.nan
            self.none[name] += len(cut_rows)
        if self.damaged:
            record.note(f"{self.damaged} lines of steps are damaged: left out")
        record.doubt_numbers(self.none, "commas stand for decimal points: " if has_commas else "")
        return columns


def _lines_with(block: bytes, mark: bytes) -> list[tuple[int, int]]:
    """Returns where the lines that hold the mark begin and end."""
    spans, at = [], block.find(mark)
    while at >= 0:
        end = block.find(b"\n", at) + 1 or len(block)
        spans.append((block.rfind(b"\n", 0, at) + 1, end))
        at = block.find(mark, end)
    return spans


def _numbers(block: bytes, places: np.ndarray, value: _Value) -> np.ndarray | float:
    """Returns the numbers that stand at these places in the block, all of the shape of `value`; one
    number where all are equal."""
    width = len(value.text)
    if not width or math.isnan(value.number):
        return math.nan
    texts = np.ndarray((len(block) - width + 1, width), np.uint8, block, strides=(1, 1))[places]
    if (texts == texts[0]).all():
        return value._replace(text=texts[0].tobytes()).number
    factor = SUFFIX.get(value.text[-1:], 1.0) * SUFFIX[value.unit]
    kept = [at for at, byte in enumerate(value.text) if byte in b"0123456789"]
    separators = value.text.translate(None, b"0123456789,KMGBTP")
    if separators in (b"", b".") and len(kept) <= _EXACT:  # as float() rounds it, but all at once
        whole = (texts[:, kept] - 48.0) @ 10.0 ** np.arange(len(kept) - 1, -1, -1)
        return whole / 10.0 ** len(value.text.partition(b".")[2].rstrip(b"KMGBTP")) * factor
    kept = [at for at, byte in enumerate(value.text) if byte not in b",KMGBTP"]
    plain = np.ascontiguousarray(texts[:, kept]).view(f"S{len(kept)}")[:, 0].tolist()
    return np.fromiter(map(float, plain), float, len(plain)) * factor
