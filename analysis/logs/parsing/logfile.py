"""A log file as blocks of whole lines. Readers see bytes, one block at a time.

A log may be cut or mixed, hold megabytes without a newline, or be no text: nothing is decoded.
"""

import copy
import os
import re
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, suppress
from functools import cached_property
from pathlib import Path

import numpy as np

from analysis.logs.parsing.packed import open_log
from analysis.logs.record import Refusal

BLOCK = 1 << 20  # bytes; fits a core's L2 cache
LONGEST_LINE = 64 << 20  # a longer one is cut at a space: memory stays bounded
SAMPLE = 1 << 16
_FENCE = re.compile(rb"^[ \t>]{0,12}(`{3,20}|~{3,20})([^`\r\n]{0,200})\r?\n", re.MULTILINE)
_BLANK = b" \t\r\n\0\xef\xbb\xbf"


class Log(AbstractContextManager):
    """A readable, non-empty log: a file, one in an archive, or a stream; unpacked if gzipped.

    begin: the offset of the attempt that is read, in bytes. Earlier text is another attempt's, and
    nothing here returns it, but offsets and lines are counted from the file's first byte. beside:
    other files of the same run, which state facts and how it ended. unsearched: bytes of its header
    in which nobody looked for facts.

    Raises:
        Refusal: it is missing, empty, damaged, no log's kind of file or may not be read.
    """

    def __init__(self, path: Path):
        self.path = Path(path)
        self.begin = 0
        self.beside: Sequence[Path] = ()
        self.unsearched = 0
        self._skipped: list[tuple[int, int]] = []
        self._places: dict[tuple[bytes, ...], np.ndarray] = {}
        try:
            self._file = open_log(self.path)
            self.size = os.fstat(self._file.fileno()).st_size
        except Refusal:
            raise
        except (OSError, ValueError) as error:  # a zero byte in the path is a ValueError
            raise Refusal(str(path), getattr(error, "strerror", "") or str(error)) from error
        if self.size == 0:
            self._file.close()
            raise Refusal(str(path), "empty file")

    def others(self) -> Iterator["Log"]:
        """Yields the run's other files, opened, but those that cannot be read. Of a later attempt
        there are none: which part of them is its own is not known."""
        for path in [] if self.begin else self.beside:
            with suppress(Refusal), Log(path) as other:
                yield other

    def part(self, begin: int, end: int) -> "Log":
        """Returns the part of the log in [begin, end) as a log: what is read there is all that it
        holds."""
        log = copy.copy(self)
        log.begin, log.size = begin, end
        log._skipped, log._places = [], {}
        log.beside = ()  # which of its runs they are of is not known
        for cached in ("head", "tail"):
            log.__dict__.pop(cached, None)
        return log

    def line_end(self, offset: int) -> int:
        """Returns the offset behind the line that holds the byte at `offset`."""
        block = self.slice(offset, offset + SAMPLE)
        return offset + (block.find(b"\n") + 1 or len(block))

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def slice(self, start: int, end: int) -> bytes:
        """Returns the file's bytes from `start` up to `end`, both cut to the file and its
        attempt."""
        start, end = max(start, self.begin), min(end, self.size)
        return self._bytes(start, end)

    def _bytes(self, start: int, end: int) -> bytes:
        """Returns the file's bytes from `start` up to `end`, those of earlier attempts, too."""
        return os.pread(self._file.fileno(), max(end - start, 0), start)

    @cached_property
    def head(self) -> bytes:
        """Returns the first text, up to SAMPLE bytes, without blank lines, zero bytes and a byte
        order mark before it."""
        for at in range(0, self.size, SAMPLE):
            if text := self.slice(at, at + SAMPLE).lstrip(_BLANK):
                return text + self.slice(at + SAMPLE, at + 2 * SAMPLE - len(text))
        return b""

    @cached_property
    def tail(self) -> bytes:
        """Returns the last text, up to SAMPLE bytes, without blank lines and zero bytes behind
        it."""
        for at in range(self.size, 0, -SAMPLE):
            if text := self.slice(at - SAMPLE, at).rstrip(_BLANK):
                return self.slice(at - 2 * SAMPLE + len(text), at - SAMPLE) + text
        return b""

    def text(self) -> str:
        """Returns the whole file, decoded. It is for formats that are one document, such as
        JSON."""
        return self.slice(0, self.size).decode("utf-8-sig", "replace")

    def blocks(
        self, start: int = 0, end: int | None = None, size: int = BLOCK
    ) -> Iterator[tuple[int, bytes]]:
        """Yields (offset, bytes) of the pieces of [start, end), each of which ends where a line
        does. size: bytes of a piece, more where a line is longer."""
        start = max(start, self.begin)
        end = self.size if end is None else min(end, self.size)
        usual = size
        while start < end:
            block = self.slice(start, min(start + size, end))
            if not block:
                return  # the file shrank under us
            if start + len(block) < end:
                cut = max(block.rfind(b"\n"), block.rfind(b"\r")) + 1
                if cut == 0 and size < LONGEST_LINE:
                    size *= 2
                    continue
                cut = cut or block.rfind(b" ") + 1 or len(block)
                block = block[:cut]
            yield start, block
            start += len(block)
            size = usual

    def matches(
        self, pattern: re.Pattern[bytes], start: int = 0, end: int | None = None
    ) -> Iterator[tuple[int, re.Match[bytes]]]:
        """Yields (offset in the file, match) of every match that lies within a line."""
        for offset, block in self.blocks(start, end):
            for match in pattern.finditer(block):
                yield offset + match.start(), match

    def fenced_blocks(self) -> Iterator[tuple[int, int]]:
        """Yields the offsets where the text of each fenced block of a Markdown page begins and
        ends."""
        fence, begin = b"", 0
        for at, match in self.matches(_FENCE):
            if not fence:
                fence, begin = match[1], at + len(match[0])
            elif match[1].startswith(fence) and not match[2].strip():
                yield begin, at
                fence = b""
        if fence:  # the page ends in it
            yield begin, self.size

    def held(self, marks: Iterable[bytes], near: bytes = b"") -> set[bytes]:
        """Returns those of the marks that stand in the file. With `near`, only what is close to its
        first and last place in each block of a long file is searched."""
        missing = set(marks)
        held_marks: set[bytes] = set()
        for _, block in self.blocks() if missing else ():
            if near and self.size > BLOCK:
                places = sorted({block.find(near), block.rfind(near)} - {-1})
                margin = SAMPLE // 4
                block = b"\n".join(block[max(at - margin, 0) : at + margin] for at in places)
            held_marks |= {mark for mark in missing if mark in block}
            missing -= held_marks
        return held_marks

    def contains(self, mark: bytes, start: int = 0) -> bool:
        """Returns whether `mark` stands anywhere in the file, at or behind `start`."""
        return any(mark in block for _, block in self.blocks(start))

    def skip(self, start: int, end: int) -> None:
        """Lets `places` pass over [start, end), which holds nothing but lines of steps."""
        self._skipped.append((start, end))

    def places(self, marks: tuple[bytes, ...], start: int = 0, end: int | None = None) -> list[int]:
        """Returns the offsets in [start, end) at which the marks stand, ascending. The file is
        searched once, from this attempt on."""
        if marks not in self._places:
            offsets: list[int] = []
            begin = self.begin
            for skipped, behind in [*sorted(self._skipped), (self.size, self.size)]:
                for offset, block in self.blocks(begin, skipped):
                    offsets += [offset + at for mark in marks for at in find_all(block, mark)]
                begin = max(begin, behind)
            self._places[marks] = np.array(sorted(offsets), int)
        places = self._places[marks]
        start = max(start, self.begin)
        within = slice(*np.searchsorted(places, [start, self.size if end is None else end]))
        return places[within].tolist()

    def line_no(self, offset: int) -> int:
        """Returns the number of the line (from 1, counted in newlines as editors do) that holds the
        byte at `offset`."""
        at, lines = 0, 1
        while at < offset and (block := self._bytes(at, min(at + (1 << 18), offset))):
            lines += int(np.count_nonzero(np.frombuffer(block, np.uint8) == 10))
            at += len(block)
        return lines


def find_all(text: bytes, mark: bytes) -> Iterator[int]:
    """Yields the offsets in the text at which the mark stands."""
    at = text.find(mark)
    while at >= 0:
        yield at
        at = text.find(mark, at + len(mark))
