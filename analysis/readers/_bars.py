"""Megatron's iteration line, thousands at a time.

    iteration        7/    1000 | consumed samples: 7168 | elapsed time per iteration (ms): 128.9 |

Its fields stand between bars. One pass over a block finds the bars, and those that an elapsed time
follows. The first line not read yet is taken apart by regular expressions; all lines that have the
same labels behind their bars are then read together, field by field, eight digits at a time in
64-bit words (SWAR). So a line costs some tens of numpy operations shared by the whole block and no
Python at all. Every fast step checks itself, row by row: a number that is not laid out like the
first line's (a `current/average` pair, `nan`) is read by a regular expression too.
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
    rb"(?:(?<!\{)[:=]|(?<=loss)(?= ))[ \t]{0,16}"  # early 2020 wrote `lm loss 9.1E+00`
    rb"(-?(?:\d{1,15}(?:\.\d{0,20})?|\.\d{1,20})(?:[eE][-+]?\d{1,3})?|-?nan|-?inf)",
    re.IGNORECASE,
)
_ITERATION = re.compile(
    rb"iteration[ :=]{1,16}(\d{1,12})[ \t]{0,16}/[ \t]{0,16}(\d{1,12})([ \t]{0,16})\Z"
)
_SAMPLES_BEFORE = re.compile(rb"samples/sec: {1,3}([\d.]{1,20}) ?\Z")
# What a number must look like, up to the bar, to be read together with others.
_PLAIN = re.compile(
    rb"[ \t]*-?(\d{1,8})(?:\.(\d{1,7}))?([eE][-+]\d\d)?(/[\d.]{1,16}|[A-Za-z%]{1,12})?( {1,3})"
)
_LAST = re.compile(_PLAIN.pattern + rb"\Z")
_UNIT = re.compile(rb"([KMGTP])FLOPS")  # GPT-NeoX chooses one for each line
_TERA = {b"K": 1e-9, b"M": 1e-6, b"G": 1e-3, b"T": 1.0, b"P": 1e3}
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
_FIELDS = tuple(_LABEL.groupindex)
_COLUMNS = ("iteration", "planned", *_FIELDS)


def _keys(*texts: bytes) -> list[np.uint64]:
    return [np.uint64(int.from_bytes(text, "little")) for text in texts]


_ELAPSED = _keys(b" elapsed", b"elapsed ", b"elapsed_")
_TIME_PER = _keys(b"time per", b"time_per")


def _among(words: np.ndarray, keys: list[np.uint64]) -> np.ndarray:
    """Which of `words` are one of the few `keys`."""
    found = words == keys[0]
    for key in keys[1:]:
        found |= words == key
    return found


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
    if len(halves) == 1:
        found = [_scan(log, *halves[0], dtype)]
    else:
        with ThreadPoolExecutor(len(halves)) as pool:
            found = [*pool.map(lambda half: _scan(log, *half, dtype), halves)]
    columns = {}
    for name in (*_COLUMNS, "offset"):
        parts = [half.columns.pop(name) for half in found]
        if all(part.ndim == 0 for part in parts) and len({str(part) for part in parts}) == 1:
            columns[name] = np.broadcast_to(parts[0], (sum(half.n for half in found),))
            continue
        parts = [
            np.broadcast_to(part, (half.n,)) if part.ndim == 0 else part[: half.n]
            for part, half in zip(parts, found, strict=True)
        ]
        columns[name] = np.concatenate(parts) if len(parts) > 1 else parts[0]
    return Table(columns, columns.pop("offset"), sum(half.pairs for half in found))


_LARGE = 64 << 20
_HUGE = 512 << 20
_SHORTEST = 40  # bytes; no iteration line with its elapsed time is shorter


class _Found:
    """The lines found so far: a column is one value until it changes, then an array.

    An array has room for as many lines as there can be: what is not written takes no memory.
    """

    def __init__(self, room: int, dtype: type, size: int):
        self.room, self.n, self.pairs = room, 0, 0
        self.columns = {name: np.array(np.nan, dtype) for name in _COLUMNS}
        self.columns["offset"] = np.empty(room, np.min_scalar_type(size))

    def add(self, columns: dict[str, np.ndarray | None], offset: np.ndarray, pairs: int) -> None:
        if not len(offset):
            return
        start, self.n = self.n, self.n + len(offset)
        self.pairs += pairs
        self.columns["offset"][start : self.n] = offset
        for name, new in columns.items():
            known = self.columns[name]
            if known.ndim == 0:
                same = new is None or (new == new[0]).all()
                value = known.dtype.type(np.nan if new is None else new[0])
                if same and (start == 0 or str(value) == str(known)):  # as text: nan is nan
                    self.columns[name] = np.array(value)
                    continue
                known = np.empty(self.room, known.dtype)
                known[:start] = self.columns[name]
                self.columns[name] = known
            known[start : self.n] = np.nan if new is None else new


def _scan(log: Log, start: int, end: int, dtype: type) -> _Found:
    """What `_Block.records` finds in [start, end), with offsets in the file.

    Where iteration lines are far between, they are copied together and read many at a time.
    """
    found = _Found((end - start) // _SHORTEST + 1, dtype, log.size)
    kept = _Kept(found)
    for at, buffer, length in log.blocks_into(_PAD, BLOCK, start, end):
        block = _Block(buffer, length)
        n = len(block.elapsed)
        if n < _FEW:
            kept.add(block, at)
        else:
            kept.read()
            found.add(*block.records(at))
    kept.read()
    return found


_FEW = 3000  # lines in a block; fewer are not worth their own rounds over every kind of line


class _Kept:
    """Iteration lines of many blocks, copied behind each other, and where they come from."""

    def __init__(self, found: _Found):
        self.found = found
        self._clear()

    def _clear(self) -> None:
        self.size = 0
        self.pieces: list[bytes] = [b"\n" * _PAD]
        self.origins: list[int] = []

    def add(self, block: "_Block", at: int) -> None:
        """Keep the lines of a block that begins at `at` in the file."""
        data, done, pieces, origins = block.data, _PAD, [], []
        for bar in block.bars[block.elapsed].tolist():
            if bar < done:
                continue  # the second record of a line that was kept
            far = bar - _AHEAD if bar - _AHEAD > done else done
            begin = data.rfind(b"\n", far, bar) + 1 or far
            done = data.find(b"\n", bar, bar + _LONGEST) + 1
            if done:
                pieces.append(data[begin:done])
            else:
                done = min(bar + _LONGEST, block.end)
                pieces.append(data[begin:done] + b"\n")
            origins.append(begin + at)
        self.pieces += pieces
        self.origins += origins
        self.size += sum(map(len, pieces))
        if self.size > BLOCK:
            self.read()

    def read(self) -> None:
        """Read what was kept, and forget it."""
        if not self.size:
            return
        block = _Block(bytearray(b"".join([*self.pieces, b"\n" * _PAD])), self.size)
        columns, offset, pairs = block.records(0)
        starts = np.cumsum([*map(len, self.pieces[:-1])])
        line = np.searchsorted(starts, offset + _PAD, "right") - 1
        offset = offset + (np.array(self.origins) - starts)[line]
        self.found.add(columns, offset, pairs)
        self._clear()


_AHEAD, _LONGEST = 400, 4096  # how far before and after its first bar a line is looked at


_WORTH_A_ROUND = 32  # rows; fewer are read one by one
_ROUNDS = 64  # kinds of lines in one block that are read together; what is left, one by one


@dataclass(frozen=True)
class _Line:
    """One iteration line by itself: what it says, and how to find it in others like it.

    before: how many bars the iteration's is before the elapsed time's. labels: what follows each
    bar from there on, up to its number where it is a column's (else at most eight bytes; also of
    what follows the last bar). names: their columns. iteration: the text before the first bar.
    """

    before: int
    labels: list[bytes]
    names: list[str | None]
    values: dict[str, float]
    pairs: int
    in_seconds: bool
    iteration: re.Match[bytes] | None
    samples: bool  # GPT-NeoX opens its line with ` samples/sec: 757.0 | iteration ...`


class _Block:
    """Some whole lines: buffer[_PAD : _PAD + length], with _PAD newlines on both sides."""

    def __init__(self, buffer: bytearray, length: int):
        self.data = buffer
        self.end = length + _PAD
        self.bytes = np.frombuffer(buffer, np.uint8, length + 2 * _PAD)
        # The same bytes as overlapping 64-bit words: words[i] holds bytes i..i+7.
        self.words = np.ndarray(len(self.bytes) - 7, "<u8", buffer, strides=(1,))
        self.bars = self._bars()
        self.elapsed = self._elapsed() if len(self.bars) > 1 else np.empty(0, int)

    def records(self, at: int) -> tuple[dict[str, np.ndarray | None], np.ndarray, int]:
        """The columns (None where no line has it), the lines' places in the file, in which the
        block begins `at`, and how many print pairs."""
        n = len(self.elapsed)
        self.columns: dict[str, np.ndarray | None] = dict.fromkeys(_COLUMNS)
        self.first = self.bars[self.elapsed]  # the bar that ends `iteration N/ M`
        self.pairs = 0
        left = np.arange(n)
        # The labels behind the next two bars tell most kinds of lines apart.
        kind = self.words[self.bars[np.minimum(self.elapsed + 1, len(self.bars) - 1)] + 1].copy()
        kind ^= self.words[self.bars[np.minimum(self.elapsed + 2, len(self.bars) - 1)] + 1] << _U8
        for _ in range(_ROUNDS):
            if len(left) < _WORTH_A_ROUND:
                break
            alike = kind[left] == kind[left[0]]
            if alike.sum() < _WORTH_A_ROUND:
                left = self._read_alike(left)
            else:
                left = np.concatenate([left[~alike], self._read_alike(left[alike])])
        for row in left.tolist():
            self._read_one(row)
        columns, offset = self.columns, self.first + (at - _PAD)
        step, iteration = columns["step_s"], columns["iteration"]
        if step is None or iteration is None:
            return {}, np.empty(0, int), 0
        whole = ~(np.isnan(step) | np.isnan(iteration))
        if not whole.all():
            offset = offset[whole]
            columns = {k: c if c is None else c[whole] for k, c in columns.items()}
        return columns, offset, self.pairs

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

    def _elapsed(self) -> np.ndarray:
        """Which bars `elapsed time per` follows, and a bar that closes it."""
        third = self.bytes[3:][self.bars[:-1]]  # one byte is quicker to look up than eight
        found = np.flatnonzero((third == ord("l")) | (third == ord("a")))
        after = self.bars[found] + 1
        elapsed = _among(self.words[after], _ELAPSED)
        found, after = found[elapsed], after[elapsed]
        after += self.bytes[after] == _SPACE
        return found[_among(self.words[after + 8], _TIME_PER)]

    def _line(self, row: int) -> _Line:
        """One line, by regular expressions."""
        bar = int(self.bars[self.elapsed[row]])
        stop = min(bar + _LONGEST, self.end)
        if row + 1 < len(self.elapsed):
            stop = min(stop, int(self.bars[self.elapsed[row + 1]]))
        newline = self.data.find(b"\n", bar, stop) + 1
        *closed, tail = self._text(bar + 1, newline or stop).split(b"|")
        ahead = self._text(bar - _AHEAD, bar).rpartition(b"\n")[2].split(b"|")
        iteration, before, samples = None, 0, None
        for back, piece in enumerate(reversed(ahead[-5:])):
            if iteration := _ITERATION.search(piece):
                before = back
                samples = ahead[: -back - 1] and _SAMPLES_BEFORE.search(ahead[-back - 2])
                break
        labels, names, values, pairs = [], [], {}, 0
        if iteration:
            values = {"iteration": float(iteration[1]), "planned": float(iteration[2])}
        for piece in ahead[len(ahead) - before :] + closed:
            found = _LABEL.match(piece)
            name = found.lastgroup if found else None
            number = _NUMBER.search(piece[:120]) if found else None
            if name and number and name not in values and b"\r" not in piece:
                values[name] = float(number[1])
                if name == "tflops" and (unit := _UNIT.match(piece, number.end())):
                    values[name] *= _TERA[unit[1]]
                pairs += name == "step_s" and piece[number.end() : number.end() + 1] == b"/"
                labels.append(piece[: number.start() + 1])
                names.append(name)
            else:
                labels.append(piece[:3])
                names.append(None)
        if samples:
            values["samples_per_s"] = float(samples[1])
        in_seconds = bool(re.match(rb".{27,28}\(?s", closed[0])) if closed else False
        if in_seconds is False and "step_s" in values:
            values["step_s"] /= 1000
        labels.append(tail[:8] or b"|")
        return _Line(before, labels, names, values, pairs, in_seconds, iteration, bool(samples))

    def _read_one(self, row: int) -> None:
        line = self._line(row)
        self.first[row] = self.bars[self.elapsed[row] - line.before]
        self.pairs += line.pairs
        for name, value in line.values.items():
            self._put(name, np.array([row]), np.array([value]))

    def _put(self, name: str, rows: np.ndarray, values: np.ndarray) -> None:
        n = len(self.elapsed)
        if len(rows) == n:
            self.columns[name] = values
            return
        if self.columns[name] is None:
            self.columns[name] = np.full(n, np.nan)
        self.columns[name][rows] = values

    def _read_alike(self, rows: np.ndarray) -> np.ndarray:
        """Read the first of `rows`, and all that have its labels; returns those that have not."""
        line = self._line(int(rows[0]))
        if line.iteration is None or "step_s" not in line.names:
            self._read_one(int(rows[0]))
            return rows[1:]
        at = self.elapsed[rows]
        # Lines so near an end of the block that they cannot have all these bars are left.
        last = len(line.names) - line.before
        inside = slice(*np.searchsorted(at, (line.before, len(self.bars) - last)))
        mine, at = np.arange(len(rows))[inside], at[inside]
        bars: list[np.ndarray] = []
        for place, label in enumerate(line.labels, -line.before):
            bars.append(self.bars[at + place])
            same = self._same(bars[-1] + 1, label)
            if not same.all():
                mine, at, bars = mine[same], at[same], [bar[same] for bar in bars]
        number, planned, sure = self._count(bars[0], line.iteration)
        if not sure[:1].all():
            self._read_one(int(rows[0]))
            return rows[1:]
        if not sure.all():  # of another length, or with another field before the elapsed time
            mine, at, number, planned = (x[sure] for x in (mine, at, number, planned))
            bars = [bar[sure] for bar in bars]
        read = rows[mine]
        self.first[read] = bars[0]
        for name, begin in zip(line.names, range(len(line.names)), strict=True):
            if name is None:
                continue
            start = bars[begin] + (1 + len(line.labels[begin]))
            values, pairs = self._values(start, bars[begin + 1])
            if name == "step_s":
                self.pairs += pairs
            if name == "step_s" and not line.in_seconds:
                values /= 1000
            elif name == "tflops" and b"approx" in line.labels[begin]:
                unit = self.bytes[bars[begin + 1] - len(b"TFLOPS ")]
                for letter in np.unique(unit).tolist():
                    values[unit == letter] *= _TERA.get(bytes([letter]), np.nan)
            self._put(name, read, values)
        if line.samples:
            end = self.bars[at - line.before - 1]
            self._put("samples_per_s", read, self._values(end - 20, end, last=True)[0])
        self._put("iteration", read, number)
        self._put("planned", read, planned)
        rest = np.ones(len(rows), bool)
        rest[mine] = False
        return rows[rest]

    def _same(self, at: np.ndarray, text: bytes) -> np.ndarray:
        """Where the bytes from `at` on are `text`."""
        if len(text) < 4:  # a short label that is not read: its last byte tells it
            return self.bytes[at + (len(text) - 1)] == text[-1]
        n = -(-len(text) // 8)
        # One look-up for all of it: what is looked up costs the same for 8 bytes as for 32.
        wide = np.ndarray(len(self.bytes) - 8 * n + 1, f"V{8 * n}", self.data, strides=(1,))
        found = wide[at].view("<u8").reshape(-1, n)
        wanted = np.frombuffer(text.ljust(8 * n, b"\0"), "<u8")
        same = found[:, 0] == wanted[0] if n > 1 else None
        for i in range(1, n - 1):
            same &= found[:, i] == wanted[i]
        rest = np.uint64(2 ** (8 * (len(text) - 8 * (n - 1))) - 1)
        last = (found[:, -1] & rest) == wanted[-1]
        return last if same is None else same & last

    def _count(
        self, bar: np.ndarray, layout: re.Match[bytes]
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Number and planned number of iterations, from `N/ M` before each bar; which are sure."""
        slash = bar - (len(layout[0]) - layout[0].rindex(b"/"))
        end = bar - len(layout[3])
        number, n_number = self._digits(self.words[slash - 8])
        sure = (self.bytes[slash] == _SLASH) & (n_number > 0) & (n_number < 8)
        word = self.words[end - 8]
        if len(layout[2]) < 8 and (word == word[0]).all():
            return _float(number), np.full(len(bar), float(layout[2])), sure
        total, n_total = self._digits(word)
        sure &= (n_total > 0) & (n_total < 8) & (self.bytes[bar - 1] == layout[0][-1])
        return _float(number), _float(total), sure

    def _values(
        self, start: np.ndarray, end: np.ndarray, last: bool = False
    ) -> tuple[np.ndarray, int]:
        """The numbers that fill [start, end), or are its last; and how many were pairs.

        NaN where it says nan or nothing that is a number, or was cut.
        """
        n = len(start)
        values = np.full(n, np.nan)
        left: np.ndarray | slice = slice(None)
        pairs, odd = 0, []
        # Each round reads the rows that are laid out like the first one left: most, or all of them.
        while n >= _WORTH_A_ROUND:
            text = self._text(int(start[left][0]), int(end[left][0]))
            layout = _LAST.search(text) if last else _PLAIN.fullmatch(text)
            if layout is None:
                left = np.arange(len(values))[left]
                odd.append(left[0])
                left = left[1:]
                n -= 1
                if len(odd) > 8:
                    break
                continue
            if isinstance(left, slice) and len(text) < 8:
                # A field that never changes, such as the skipped iterations, is read once.
                word = self.words[end - 8]
                if (word == word[0]).all():
                    values[:] = float(layout[0])
                    return values, 0
            suffix = layout[4] or b""
            stop = end[left] - len(layout[5])
            stop -= len(suffix)
            read, good = self._plain(start[left], stop, layout)
            good &= self.bytes[end[left] - 1] == _SPACE
            pair = suffix[:1] == b"/"
            for i, byte in enumerate(suffix[:1] if pair else suffix):
                good &= self.bytes[stop + i] == byte
            if good.all():
                values[left] = read
                return values, pairs + pair * n
            if not good[0]:
                break
            left = np.arange(len(values))[left]
            values[left[good]] = read[good]
            pairs += pair * int(good.sum())
            left = left[~good]
            n = len(left)
        for row in [*odd, *np.arange(len(values))[left].tolist()]:
            a, b = int(start[row]) - 1, int(end[row])
            match = _NUMBER.match(b":" + self._text(a + 1, min(b, a + 60)))
            if match and b"\n" not in self._text(a, min(b, a + 120)):
                values[row] = float(match[1])
                pairs += self.data[a + match.end() : a + match.end() + 1] == b"/"
        return values, pairs

    def _plain(
        self, start: np.ndarray, end: np.ndarray, layout: re.Match[bytes]
    ) -> tuple[np.ndarray, np.ndarray]:
        """Numbers written as `layout` in [start, end): values, and which of them are sure."""
        decimals, exponent = len(layout[2] or b""), bool(layout[3])
        good, power = np.ones(len(end), bool), None
        if exponent:
            sign = self.bytes[end - 3]
            power = (self.bytes[end - 2] - _ZERO) * 10 + (self.bytes[end - 1] - _ZERO)
            good = (self.bytes[end - 4] | 32) == ord("e")
            good &= (sign == ord("+")) | (sign == _MINUS)
            good &= ((self.bytes[end - 2] - _ZERO) < 2) & ((self.bytes[end - 1] - _ZERO) < 10)
            good &= power < 16
            power = np.where(sign == _MINUS, -_float(power), _float(power)).astype(np.int64)
            end = end - 4
        word = self.words[end - 8]
        short = decimals and len(layout[1]) + decimals < 8
        if short:  # whole number, dot and decimals are in one word: take the dot out of it
            dot = np.uint64(8 * (7 - decimals))
            good &= (word >> dot) & _U255 == _DOT
            above = np.uint64(2**64 - 2 ** (8 * (8 - decimals)))
            word = (word & above) | ((word << _U8) & ~above)
            value, digits = self._digits(word)
            good &= (digits > decimals) & (digits < 8)
            begin = end - 1 - digits
            value = _float(value)
        else:
            value, digits = self._digits(word)
            if decimals:
                good &= (digits == decimals) & (self.bytes[end - decimals - 1] == _DOT)
                end = end - (decimals + 1)
                whole, digits = self._digits(self.words[end - 8])
                value = _float(whole) * 10.0**decimals + _float(value)
            else:
                value = _float(value)
            good &= (digits > 0) & (digits < 8)
            begin = end - digits
        before = self.bytes[begin - 1]
        negative = before == _MINUS
        good &= ((before == _SPACE) | (begin == start) | negative) & (begin >= start)
        # An integer below 2**53 over (or times) a power of ten up to 10**22: rounded once, so
        # it is the very number that float() makes of the text.
        if power is not None:
            power -= decimals
            scale = _POWERS[np.abs(power)]
            value = np.where(power < 0, value / scale, value * scale)
        elif decimals:
            value /= 10.0**decimals
        return (np.where(negative, -value, value) if negative.any() else value), good

    @staticmethod
    def _digits(word: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The digits at the end of each word: their number and their count.

        Eight ASCII digits in one little-endian word, the last one in the highest byte (Lemire,
        "Quickly parsing eight digits", 2018); what stands before them is masked to zero.
        """
        word = word ^ _ZEROS  # a digit's byte is now 0..9
        other = word + _TO_TEN
        other |= word
        other &= _HIGH_BITS  # bit 7 of a byte: it is no digit
        other |= _U1
        # The highest of these bits is the exponent of the number they make: 7, 15 ... or 0.
        count = (_1087 - (other.astype(np.float64).view(np.int64) >> 52)) >> 3
        word &= _LAST_BYTES[count]
        word *= _STEP_1
        word >>= _U8
        word &= _PAIRS
        word *= _STEP_2
        word >>= _U16
        word &= _QUADS
        word *= _STEP_3
        word >>= _U32
        return word, count

    def _text(self, start: int, end: int) -> bytes:
        return bytes(self.data[max(start, _PAD) : max(end, _PAD)])


def _float(whole: np.ndarray) -> np.ndarray:
    """As float; numpy is quicker to do it from signed numbers."""
    return whole.view(np.int64).astype(np.float64) if whole.itemsize == 8 else whole.astype(float)


_POWERS = np.array([float(f"1e{i}") for i in range(23)])
_U1, _U8, _U16, _U32, _U255 = (np.uint64(n) for n in (1, 8, 16, 32, 255))
_1087 = 1023 + 64
_ZERO = np.uint8(ord("0"))
_ZEROS = np.uint64(0x3030303030303030)
_TO_TEN = np.uint64(0x7676767676767676)
_HIGH_BITS = np.uint64(0x8080808080808080)
_PAIRS = np.uint64(0x00FF00FF00FF00FF)
_QUADS = np.uint64(0x0000FFFF0000FFFF)
# One product shifts and adds: ten times the lower digit, and the higher one.
_STEP_1, _STEP_2 = np.uint64((10 << 8) + 1), np.uint64((100 << 16) + 1)
_STEP_3 = np.uint64((10000 << 32) + 1)
_LAST_BYTES = np.array([2**64 - 2 ** (64 - 8 * n) for n in range(9)], np.uint64)
