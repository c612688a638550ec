"""Megatron's iteration line: fields between bars.

    iteration        7/    1000 | consumed samples: 7168 | elapsed time per iteration (ms): 128.9 |

The first line of a kind is taken apart field by field. From it a regular expression is made for
all lines with the same labels, which reads those of a whole block at once. A number is always
what float() makes of its text; what float() refuses (`current/average`, `13.3TFLOPS`) is read by
a regular expression.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from analysis.readers._lines import is_nan
from analysis.readers._log import Log

_SIGNED = rb"(-?(?:\d{1,24}(?:\.\d{0,20})?|\.\d{1,20})(?:[eE][-+]?\d{1,3})?(?![\d.])|-?nan|-?inf)"
_NUMBER = re.compile(  # early 2020 wrote `lm loss 9.1E+00`
    rb"(?:(?<!\{)[:=]|(?<=loss)(?= ))[ \t]{0,16}" + _SIGNED, re.IGNORECASE
)
_VALUE = re.compile(rb"[ \t]{0,16}" + _SIGNED + rb"([KMGTP](?=FLOPS)|/)?", re.IGNORECASE)
_SAMPLES = rb"samples/sec: {1,3}([\d.]{1,20}) ?\| {0,4}"  # GPT-NeoX opens its lines with it
_ITERATION = rb"iteration[ :=]{1,16}(\d{1,12})[ \t]{0,16}/[ \t]{0,16}(\d{1,12})[ \t]{0,16}\|"
_START = re.compile(_ITERATION)
_BEFORE = re.compile(_SAMPLES + rb"\Z")
_ELAPSED = (b"elapsed time per", b"elapsed_time_per")
_LINE_END = re.compile(rb"[\r\n]").search
_AT_MOST = 4  # fields between the iteration and its time
_LONGEST = 4096
_TERA = {b"K": 1e-9, b"M": 1e-6, b"G": 1e-3, b"T": 1.0, b"P": 1e3}  # GPT-NeoX: one for each line
# The columns, by how their labels begin: `lm loss`, `lm-loss` and `lm_loss` are one.
_LABEL = re.compile(
    rb"""[ ]?(?:
    (?P<step_s>elapsed[ _-]time[ _-]per[ _-]iteration) |
    (?P<loss>lm[ _-]loss[ ]?[ :=]) |
    (?P<grad_norm>grad[ _-]norm) |
    (?P<tflops>throughput[ _]per[ _]gpu | (?:\[LM\])?TFLOPs | approx[ _]flops) |
    (?P<samples_per_s>samples[ _]per[ _]second) |
    (?P<tokens_per_s_per_gpu>tokens[ _]per[ _]gpu | tokens-per-second-per-gpu) |
    (?P<skipped>number[ _]of[ _]skipped) |
    (?P<nan>number[ _]of[ _]nan) |
    (?P<global_batch>global[ _]batch) |
    (?P<seq_len>actual[ _]seqlen)
    )""",
    re.VERBOSE | re.IGNORECASE,
)
_SECONDS = re.compile(rb".{27,28}\(?s")
_COLUMNS = ("iteration", "planned", *_LABEL.groupindex, "nan_loss")
_BLOCK = 1 << 18
_HUGE = 512 << 20  # bytes; a larger log's columns are kept in single precision


@dataclass
class Table:
    """All iteration lines of a log, in file order.

    columns: per line `iteration`, `planned`, `step_s` (seconds) and what _LABEL names, NaN where
    the line is silent; `nan_loss` is 1 where the loss was printed as NaN. offset: where in the
    file each line's iteration is. pairs: lines that printed current/average.
    """

    columns: dict[str, np.ndarray]
    offset: np.ndarray
    pairs: int


@dataclass(frozen=True)
class _Kind:
    """Lines with the same labels. names: the column of each group; None is the text of no use."""

    pattern: re.Pattern[bytes]
    names: tuple[str, ...]
    in_seconds: bool


def scan(log: Log) -> Table:
    """Read every iteration line of a log.

    Memory is what the lines say: in single precision in a log beyond _HUGE bytes, and a column
    that never changes takes none.
    """
    dtype = np.float32 if log.size > _HUGE else np.float64
    columns = {name: _Column(dtype) for name in _COLUMNS}
    offsets = _Column(np.int64)
    kinds: list[_Kind] = []
    pairs = 0
    for at, block in log.blocks(size=_BLOCK):
        lines = sum(block.count(words) for words in _ELAPSED)
        if not lines:
            continue
        parts, places = [], []
        for kind, matches in _by_kind(_without_colours(block), lines, kinds):
            found, twice = _columns(kind, matches)
            timed = ~np.isnan(found["step_s"])
            parts.append({name: values[timed] for name, values in found.items()})
            places.append(np.array([match.start() + at for match in matches], np.int64)[timed])
            pairs += twice
        if not parts:
            continue
        place = np.concatenate(places)
        order = np.argsort(place)
        offsets.add(place[order])
        for name, column in columns.items():
            if any(name in part for part in parts):
                silent = (np.full(len(where), np.nan) for where in places)
                values = [part.get(name, no) for part, no in zip(parts, silent, strict=True)]
                column.add(np.concatenate(values)[order])
            else:
                column.add(np.broadcast_to(np.nan, len(place)))
    return Table({name: column.array() for name, column in columns.items()}, offsets.array(), pairs)


class _Column:
    """Numbers behind each other; in the memory of one while all are the same."""

    def __init__(self, dtype: type):
        self.n, self.only, self.bytes = 0, np.array(np.nan), bytearray()
        self.dtype = np.dtype(dtype)

    def add(self, values: np.ndarray) -> None:
        if not len(values):
            return
        if not self.bytes:
            same = values.strides == (0,) or (values == values[0]).all()
            if same and (not self.n or str(values[0]) == str(self.only)):  # as text: nan is nan
                self.n, self.only = self.n + len(values), values[0]
                return
            self.bytes += np.broadcast_to(self.only, self.n).astype(self.dtype).tobytes()
        self.n += len(values)
        self.bytes += values.astype(self.dtype).tobytes()

    def array(self) -> np.ndarray:
        if self.bytes or not self.n:
            return np.frombuffer(self.bytes, self.dtype)
        return np.broadcast_to(np.asarray(self.only, self.dtype), self.n)


def _without_colours(block: bytes) -> bytes:
    """Spaces where colours were, so that every byte stays where it is."""
    if b"\x1b" not in block:
        return block
    return re.sub(rb"\x1b\[[0-9;]{0,24}m", lambda match: b" " * len(match[0]), block)


def _by_kind(
    block: bytes, lines: int, kinds: list[_Kind]
) -> Iterator[tuple[_Kind, list[re.Match[bytes]]]]:
    """Each kind of line in the block with its matches; `kinds` are those met so far."""
    if kinds:  # most blocks hold one kind
        matches = list(kinds[0].pattern.finditer(block))
        # One that went on behind the end of its line took the next one's beginning: a time is
        # left over, and the block is read line by line.
        if len(matches) == lines:
            yield kinds[0], matches
            return
    found: dict[_Kind, list[re.Match[bytes]]] = {}
    starts = list(_START.finditer(block))
    for start, following in zip(starts, [*starts[1:], None], strict=False):
        begin, end = start.start(), start.end() + _LONGEST
        end = min(end, following.start() if following else len(block))
        if stop := _LINE_END(block, start.end(), end):
            end = stop.start()
        if before := _BEFORE.search(block, max(begin - 60, 0), begin):
            begin = before.start()
        for kind in kinds:
            if match := kind.pattern.match(block, begin, end):
                break
        else:
            kind = _kind(block[start.end() : end], bool(before))
            match = kind and kind.pattern.match(block, begin, end)
            if not match:
                continue
            kinds.append(kind)
        found.setdefault(kind, []).append(match)
    kinds.sort(key=lambda kind: -len(found.get(kind, ())))
    del kinds[_KINDS:]
    yield from found.items()


_KINDS = 64  # that are remembered from block to block


def _kind(text: bytes, samples: bool) -> _Kind | None:
    """The kind of the line whose text behind `iteration N/ M |` this is; None without a time."""
    *pieces, _ = text.split(b"|")
    pattern, names, in_seconds = _ITERATION, ["iteration", "planned"], False
    if samples:
        pattern, names = _SAMPLES + pattern, ["samples_per_s", *names]
    for place, piece in enumerate(pieces):
        label = _LABEL.match(piece)
        name = label.lastgroup if label else None
        number = _NUMBER.search(piece[:120]) if name and name not in names else None
        if number and (name != "step_s" or place <= _AT_MOST):
            pattern += re.escape(piece[: number.start() + 1]) + rb"([^|]*+)\|"
            names.append(name)
            in_seconds |= name == "step_s" and bool(_SECONDS.match(piece))
        else:
            # Up to its number it tells this kind of line from others that have a column here.
            rest = rb"[^|]*+\|" if "step_s" in names else rb"[^|\r\n]*+\|"
            pattern += re.escape(piece[:3]) + rest
    if "step_s" not in names:
        return None
    return _Kind(re.compile(pattern + rb"[^|\r\n]{0,400}+(?!\|)"), tuple(names), in_seconds)


def _columns(kind: _Kind, matches: list[re.Match[bytes]]) -> tuple[dict[str, np.ndarray], int]:
    """The numbers that the lines print, by column, and how many times are current/average."""
    pairs = 0
    columns = {}
    for group, name in enumerate(kind.names, 1):
        column = [match[group] for match in matches]
        if column[0] == column[-1] and len(set(column)) == 1:
            value, pair = _value(column[0], name)
            values, twice = np.full(len(column), value), pair * len(column)
        else:
            try:
                values, twice = np.array(list(map(float, column))), 0
            except ValueError:
                read = [_value(text, name) for text in column]
                values = np.array([value for value, _ in read])
                twice = sum(pair for _, pair in read)
        if name == "step_s":
            pairs = twice
            values = values if kind.in_seconds else values / 1000
        if name == "loss" and np.isnan(values).any():
            columns["nan_loss"] = np.array(list(map(is_nan, column)), float)
        columns[name] = values
    return columns, pairs


def _value(text: bytes, name: str) -> tuple[float, bool]:
    """The number that a field's text begins with, and whether it is one of a pair."""
    match = _VALUE.match(text)
    if not match:
        return np.nan, False
    unit = match[2]
    scale = _TERA.get(unit.upper(), 1.0) if unit and name == "tflops" else 1.0
    return float(match[1]) * scale, unit == b"/"
