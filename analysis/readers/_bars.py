"""Megatron's iteration line, thousands at a time.

    iteration        7/    1000 | consumed samples: 7168 | elapsed time per iteration (ms): 128.9 |

Its fields stand between bars. One pass over a block finds the bars; a field is known by the eight
bytes that follow its bar, compared as one 64-bit number; digits are parsed eight at a time in
64-bit words (SWAR). So a line costs some tens of numpy operations shared by the whole block and
no Python at all. Every fast step checks itself, row by row: a row that does not look like the
block's first (a `current/average` pair, a unit, `nan`) is read by a regular expression instead.
"""

import re
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np

from analysis.readers._log import Log

BLOCK = 1 << 23
_PIECE = 1 << 18  # the pass for the bars stays in the L2 cache
_PAD = 64  # so that looking a little back or ahead never leaves the buffer
_BAR, _SPACE, _DOT, _SLASH, _MINUS = b"| ./-"

_NUMBER = re.compile(
    rb"(?<!\{)[:=][ \t]{0,16}"
    rb"(-?(?:\d{1,15}(?:\.\d{0,20})?|\.\d{1,20})(?:[eE][-+]?\d{1,3})?|-?nan|-?inf)",
    re.IGNORECASE,
)
_COUNT = re.compile(rb"(\d{1,12})[ \t]{0,16}/[ \t]{0,16}(\d{1,12})[ \t]{0,4}\Z")
_ITERATION_OF = re.compile(
    rb"iteration[ :=]{1,16}(\d{1,12})[ \t]{0,16}/[ \t]{0,16}(\d{1,12})[ \t]{0,16}\|"
)
_PLAIN = re.compile(
    rb"[ \t]*-?(\d{1,8})(?:\.(\d{1,7}))?([eE][-+]\d\d)?(/[\d.]{1,16}|[A-Za-z%]{1,12})?( {1,3})"
)


_LAST_NUMBER = re.compile(_PLAIN.pattern + rb"\Z")


def _among(words: np.ndarray, keys: np.ndarray) -> np.ndarray:
    """Which of `words` are one of the few `keys`."""
    found = words == keys[0]
    for key in keys[1:]:
        found |= words == key
    return found


def _key(text: str) -> int:
    return int.from_bytes(text.encode()[:8].ljust(8), "little")


def _keys(*labels: str) -> np.ndarray:
    """Labels as 64-bit numbers, in the spellings `lm loss`, `lm-loss` and `lm_loss`."""
    spelled = {s.replace(" ", c) if " " in s.rstrip() else s for s in labels for c in " _-"}
    return np.array(sorted({_key(s) for s in spelled}), np.uint64)


_ELAPSED = _keys("elapsed time")
_TIME_PER = _keys("time per")
_BEFORE_ELAPSED = _keys("consumed samples", "skipped samples")
_ITERATION = _keys("iteration")

# Column -> the first eight bytes of its label (and, where two labels share them, the next eight).
_FIELDS: dict[str, tuple[np.ndarray, np.ndarray | None]] = {
    "loss": (_keys("lm loss:", "lm loss="), None),
    "grad_norm": (_keys("grad norm"), None),
    "tflops": (_keys("throughput", "TFLOPs: ", "TFLOPs=", "approx flops", "[LM]TFLOPs"), None),
    "samples_per_s": (_keys("samples per second"), None),
    "tokens_per_s_per_gpu": (_keys("tokens per gpu", "tokens per GPU"), None),
    "skipped": (_keys("number of skipped"), _keys("f skipped")),
    "nan": (_keys("number of nan"), _keys("f nan it")),
    "global_batch": (_keys("global batch"), None),
    "seq_len": (_keys("actual seqlen"), None),
}


@dataclass
class Table:
    """All iteration lines of a log, in file order.

    columns: per line `iteration`, `planned`, `step_s` (seconds) and _FIELDS, NaN where the line is
    silent. offset: where in the file each line's first bar is. pairs: lines that printed
    current/average.
    """

    columns: dict[str, np.ndarray]
    offset: np.ndarray
    pairs: int


def scan(log: Log) -> Table:
    """Read every iteration line of a log.

    Two threads share a large one: numpy works outside the interpreter's lock. Memory is their
    buffers and what the lines say: in single precision in a log beyond _HUGE bytes, and a column
    that never changes takes none.
    """
    dtype = np.float32 if log.size > _HUGE else np.float64
    halves = log.halves(_LARGE)
    with ThreadPoolExecutor(len(halves)) as pool:
        found = [*pool.map(lambda half: _scan(log, *half, dtype), halves)]
    pieces = [piece for half in found for piece in half]
    del found
    lines = sum(len(offset) for _, offset, _ in pieces)
    columns = {}
    for name in _COLUMNS:
        parts = [found.pop(name) for found, _, _ in pieces]
        # As text, for one nan is no other.
        values = {str(part[0]) if part.strides == (0,) else None for part in parts}
        if not parts or (len(values) == 1 and None not in values):
            columns[name] = _constant(parts[0][0] if parts else dtype("nan"), lines)
        else:
            columns[name] = np.concatenate(parts)
        del parts
    offsets = [offset for _, offset, _ in pieces]
    offset = np.concatenate(offsets) if offsets else np.empty(0, np.int64)
    return Table(columns, offset, sum(pairs for _, _, pairs in pieces))


Piece = tuple[dict[str, np.ndarray | None], np.ndarray, int]


def _scan(log: Log, start: int, end: int, dtype: type) -> list[Piece]:
    """What `_Block.records` finds in [start, end), block by block, with offsets in the file."""
    pieces: list[Piece] = []
    for at, buffer, length in log.blocks_into(_PAD, BLOCK, start, end):
        if found := _Block(buffer, length).records():
            columns, offset, pairs = found
            if not len(offset):
                continue
            for name, column in columns.items():
                if column is None or (column[:1] == column).all():
                    value = dtype("nan") if column is None else dtype(column[0])
                    columns[name] = _constant(value, len(offset))
                else:
                    columns[name] = column.astype(dtype)
            pieces.append((columns, offset + at, pairs))
    return pieces


def _constant(value: np.floating, n: int) -> np.ndarray:
    """n times the same, in the memory of one."""
    return np.broadcast_to(np.array(value), (n,))


_LARGE = 64 << 20
_HUGE = 512 << 20
_COLUMNS = ("iteration", "planned", "step_s", *_FIELDS)


_WORTH_A_ROUND = 32  # rows; fewer are read one by one


class _Block:
    """Some whole lines: buffer[_PAD : _PAD + length], with _PAD newlines on both sides."""

    def __init__(self, buffer: bytearray, length: int):
        self.data = buffer
        self.bytes = np.frombuffer(buffer, np.uint8, length + 2 * _PAD)
        # The same bytes as overlapping 64-bit words: words[i] holds bytes i..i+7.
        self.words = np.ndarray(len(self.bytes) - 7, "<u8", buffer, strides=(1,))

    def records(self) -> tuple[dict[str, np.ndarray | None], np.ndarray, int] | None:
        """The columns (None where no line has it), the lines' places, and how many print pairs."""
        bars = self._bars()
        if len(bars) < 2:
            return None
        label = bars + 1
        label += self.bytes[label] == _SPACE
        key = self.words[label]
        elapsed = np.flatnonzero(_among(key[:-1], _ELAPSED))
        elapsed = elapsed[_among(self.words[label[elapsed] + 8], _TIME_PER)]
        if not len(elapsed):
            return None
        of_line = None  # which line's each bar is, when it is needed
        step, pairs = self._values(bars, label, elapsed)
        if not self._in_seconds(label[elapsed[:1]])[0]:
            step /= 1000
            if (other := self._in_seconds(label[elapsed])).any():
                step[other] *= 1000
        elif not (other := self._in_seconds(label[elapsed])).all():
            step[~other] /= 1000
        columns: dict[str, np.ndarray | None] = {"step_s": step}
        first = self._first_bar(key, elapsed)
        columns["iteration"], columns["planned"] = self._iteration(bars, first, elapsed)
        for name, (keys, further) in _FIELDS.items():
            columns[name] = None
            where, line = self._places(key, label, elapsed, keys, further)
            if line is None:  # not every line has it at the same place
                where = np.flatnonzero(_among(key[:-1], keys))
                if further is not None:
                    where = where[_among(self.words[label[where] + 8], further)]
                if not len(where):
                    continue
                if of_line is None:
                    of_line = np.cumsum(np.bincount(elapsed, minlength=len(bars))) - 1
                line = of_line[where]
                ours = line >= 0
                ours[1:] &= line[1:] != line[:-1]
                ours &= bars[where] - bars[elapsed[line]] < 4096
                where, line = where[ours], line[ours]
            values, _ = self._values(bars, label, where)
            if len(where) < len(elapsed):
                columns[name] = np.full(len(elapsed), np.nan)
                columns[name][line] = values
            else:
                columns[name] = values
        self._samples_before(bars, first, key, columns)
        offset = bars[first] - _PAD
        whole = ~(np.isnan(step) | np.isnan(columns["iteration"]))
        if not whole.all():
            offset = offset[whole]
            columns = {k: c if c is None else c[whole] for k, c in columns.items()}
        return columns, offset, pairs

    def _places(
        self,
        key: np.ndarray,
        label: np.ndarray,
        elapsed: np.ndarray,
        keys: np.ndarray,
        further: np.ndarray | None,
    ) -> tuple[np.ndarray, np.ndarray | None]:
        """A field's bars, where it is as many bars behind the elapsed time in every line."""
        stop = elapsed[1] if len(elapsed) > 1 else len(key) - 1
        for place in np.flatnonzero(_among(key[elapsed[0] : stop], keys)):
            where = np.minimum(elapsed + place, len(key) - 2)
            fits = _among(key[where], keys)
            if further is not None:
                fits &= _among(self.words[label[where] + 8], further)
            if fits.all():
                return where, np.arange(len(elapsed))
        return elapsed, None

    def _bars(self) -> np.ndarray:
        mask = np.empty(_PIECE, bool)
        found = []
        for start in range(0, len(self.bytes), _PIECE):
            piece = self.bytes[start : start + _PIECE]
            np.equal(piece, _BAR, out=mask[: len(piece)])
            here = np.flatnonzero(mask[: len(piece)])
            here += start
            found.append(here)
        return np.concatenate(found)

    def _first_bar(self, key: np.ndarray, elapsed: np.ndarray) -> np.ndarray:
        """The bar that ends `iteration N/ M`: consumed samples or tokens may follow it."""
        first = elapsed
        for _ in range(4):
            back = _among(key[first - 1], _BEFORE_ELAPSED) & (first > 0)
            if not back.any():
                break
            first = first - back
        return first

    def _iteration(
        self, bars: np.ndarray, first: np.ndarray, elapsed: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        """Number and planned number of iterations, from `N/ M` before each `first` bar."""
        end = bars[first] - 1
        text = self._text(int(end[0]) - 40, int(end[0]))
        iteration, planned = np.full(len(first), np.nan), np.full(len(first), np.nan)
        good = np.zeros(len(first), bool)
        if _COUNT.search(text):
            slash = end - (len(text) - text.rindex(b"/"))
            total, n_total = self._digits(end)
            number, n_number = self._digits(slash)
            good = (self.bytes[slash] == _SLASH) & (self.bytes[end] == _SPACE)
            good &= (n_total > 0) & (n_number > 0) & (n_total < 8) & (n_number < 8)
            iteration[good], planned[good] = number[good], total[good]
        for row in np.flatnonzero(~good):
            bar = int(bars[elapsed[row]])
            line = self._text(bar - 400, bar).rpartition(b"\n")[2]
            if stated := _ITERATION_OF.findall(line):
                iteration[row], planned[row] = map(float, stated[-1])
        return iteration, planned

    def _samples_before(
        self,
        bars: np.ndarray,
        first: np.ndarray,
        key: np.ndarray,
        columns: dict[str, np.ndarray | None],
    ) -> None:
        """GPT-NeoX opens its line with ` samples/sec: 757.0 | iteration ...`."""
        rows = np.flatnonzero((first > 0) & _among(key[first - 1], _ITERATION))
        if not len(rows):
            return
        end = bars[first[rows] - 1] - 1
        text = self._text(int(end[0]) - 40, int(end[0]) + 1)
        if b"samples/sec:" not in text:
            return  # two lines that run into one another
        values, good = np.full(len(rows), np.nan), np.zeros(len(rows), bool)
        if layout := _LAST_NUMBER.search(text):
            values, good = self._plain(end - 20, end, layout)
        for row in np.flatnonzero(~good).tolist():
            before = self._text(int(end[row]) - 40, int(end[row]) + 1)
            match = _NUMBER.search(before, max(before.rfind(b"samples/sec:"), 0))
            values[row] = float(match[1]) if match else np.nan
        if columns["samples_per_s"] is None:
            columns["samples_per_s"] = np.full(len(first), np.nan)
        columns["samples_per_s"][rows] = values

    def _in_seconds(self, label: np.ndarray) -> np.ndarray:
        """Which elapsed times are in seconds: `(s):`, where most are `(ms):` or `_ms=`."""
        at = label + len("elapsed time per iteration ")
        opened = self.bytes[at] == ord("(")
        return self.bytes[at + opened] == ord("s")

    def _values(
        self, bars: np.ndarray, label: np.ndarray, where: np.ndarray
    ) -> tuple[np.ndarray, int]:
        """The number of each field `where` (indices of bars); and how many were pairs.

        NaN where the field says nan or nothing that is a number, or was cut.
        """
        start, end = label[where], bars[where + 1]
        values = np.full(len(where), np.nan)
        left = np.arange(len(where))
        pairs, odd = 0, []
        # Each round reads the rows that are laid out like the first one left: most, or all of them.
        while len(left) >= _WORTH_A_ROUND:
            text = self._text(int(start[left[0]]), int(end[left[0]]))
            separator = max(text.find(b":"), text.find(b"="))
            layout = _PLAIN.fullmatch(text, separator + 1) if separator >= 0 else None
            if layout is None:
                odd.append(left[0])
                left = left[1:]
                if len(odd) > 8:
                    break
                continue
            if len(text) - separator < 8 and len(left) == len(where):
                # A field that never changes, such as the skipped iterations, is read once.
                word = self.words[end - 8]
                if (word == word[0]).all():
                    return np.full(len(where), float(text[separator + 1 :])), 0
            suffix = layout[4] or b""
            begin = start[left] + separator + 1
            stop = end[left] - len(layout[5]) - len(suffix)
            read, good = self._plain(begin, stop, layout)
            # The label must be this row's, as far as its last eight bytes tell, and so the unit.
            tail = self.words[begin - 8]
            good &= (tail == tail[0]) & (self.bytes[end[left] - 1] == _SPACE)
            pair = suffix[:1] == b"/"
            for i, byte in enumerate(suffix[:1] if pair else suffix):
                good &= self.bytes[stop + i] == byte
            values[left[good]] = read[good]
            pairs += pair * int(good.sum())
            if not good[0]:
                break
            left = left[~good]
        for row in [*odd, *left]:
            text = self._text(int(start[row]), min(int(end[row]), int(start[row]) + 120))
            cut = int(end[row]) - int(start[row]) > 120 or b"\n" in text
            match = None if cut else _NUMBER.search(text)
            values[row] = float(match[1]) if match else np.nan
            pairs += bool(match) and text[match.end() : match.end() + 1] == b"/"
        return values, pairs

    def _plain(
        self, start: np.ndarray, end: np.ndarray, layout: re.Match[bytes]
    ) -> tuple[np.ndarray, np.ndarray]:
        """Numbers written as `layout` in [start, end): values, and which of them are sure."""
        decimals, exponent = len(layout[2] or b""), bool(layout[3])
        power = -decimals
        good = np.ones(len(end), bool)
        if exponent:
            size, digits = self._digits(end)
            sign = self.bytes[end - 3]
            good = (digits == 2) & ((self.bytes[end - 4] | 32) == ord("e"))
            good &= (sign == ord("+")) | (sign == _MINUS)
            size = np.minimum(size, 22).astype(np.int64)
            good &= size < 16
            power = np.where(sign == _MINUS, -size, size) - decimals
            end = end - 4
        if decimals:
            fraction, digits = self._digits(end)
            good &= (digits == decimals) & (self.bytes[end - decimals - 1] == _DOT)
            end = end - decimals - 1
        whole, digits = self._digits(end)
        good &= (digits > 0) & (digits < 8)
        begin = end - digits
        before = self.bytes[begin - 1]
        negative = before == _MINUS
        blank = (before == _SPACE) | (begin == start) | negative
        good &= blank & (begin >= start) & (begin - start < 24)
        # An integer below 2**53 over (or times) a power of ten up to 10**22: rounded once, so
        # it is the very number that float() makes of the text.
        values = whole.astype(np.float64)
        if decimals:
            values = values * 10.0**decimals + fraction
        if exponent:
            scale = _POWERS[np.abs(power)]
            values = np.where(power < 0, values / scale, values * scale)
        elif decimals:
            values /= 10.0**decimals
        return np.where(negative, -values, values), good

    def _digits(self, end: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The digits that end before `end`, at most eight: their number and their count.

        Eight ASCII digits in one little-endian word, the last one in the highest byte (Lemire,
        "Quickly parsing eight digits", 2018); what stands before them is masked to zero.
        """
        word = self.words[end - 8] ^ _ZEROS  # a digit's byte is now 0..9
        other = (((word & _LOW_BITS) + _TO_TEN) | word) & _HIGH_BITS  # bit 7: it is none
        other = (other >> _U7) * _U255
        # Clear all below the highest byte that is no digit: fill downwards from it.
        below = other | (other >> _U8)
        below |= below >> _U16
        below |= below >> _U32
        word &= ~below
        count = 8 - (np.bitwise_count(below) >> 3).astype(np.int64)
        word = (word * _U10 + (word >> _U8)) & _PAIRS
        word = (word * _U100 + (word >> _U16)) & _QUADS
        word = (word * _U10000 + (word >> _U32)) & _LOW_HALF
        return word, count

    def _text(self, start: int, end: int) -> bytes:
        return bytes(self.data[max(start, _PAD) : max(end, _PAD)])


_POWERS = np.array([float(f"1e{i}") for i in range(23)])
_U7, _U8, _U10, _U16, _U32 = (np.uint64(n) for n in (7, 8, 10, 16, 32))
_U100, _U255, _U10000 = (np.uint64(n) for n in (100, 255, 10000))
_ZEROS = np.uint64(0x3030303030303030)
_TO_TEN = np.uint64(0x7676767676767676)
_LOW_BITS = np.uint64(0x7F7F7F7F7F7F7F7F)
_HIGH_BITS = np.uint64(0x8080808080808080)
_PAIRS = np.uint64(0x00FF00FF00FF00FF)
_QUADS = np.uint64(0x0000FFFF0000FFFF)
_LOW_HALF = np.uint64(0x00000000FFFFFFFF)
