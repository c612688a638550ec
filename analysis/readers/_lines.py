"""Records that are one line each: where a line starts, and what its fields look like.

For formats without Megatron's bars. Every pattern is bounded and must not be able to run past the
end of its line, so that no log makes it slow.
"""

import re
from collections.abc import Iterator

import numpy as np

from analysis.readers._log import Log

LINE = 4096  # no record is longer
ANSI = rb"(?:\x1b\[[0-9;]{0,24}m)*"
# Where a word may begin: not within another, but after a colour it may.
WORD = rb"(?:(?<![\w.])|(?<=[0-9;\[]m))"
NUMBER = rb"(-?(?:\d[\d,]{0,24}(?:\.\d{0,24})?|\.\d{1,24})(?:[eE][-+]?\d{1,3})?|-?nan|-?inf|-?NaN)"
_SUFFIX = {b"": 1.0, b"K": 1e3, b"M": 1e6, b"G": 1e9, b"B": 1e9, b"T": 1e12, b"P": 1e15}
_ANSI = re.compile(rb"\x1b\[[0-9;]{0,24}m")
_HUMAN = re.compile(rb"(.{1,40}?)([KMGBTP]?)\Z", re.DOTALL)


def number(text: bytes | None) -> float:
    """`1,340`, `4.71K`, `1.2e-05`, `nan`: the number; NaN for None and for what is none."""
    match = _HUMAN.match(text.strip()) if text else None
    if match is None:
        return float("nan")
    try:
        return float(match[1].replace(b",", b"")) * _SUFFIX[match[2]]
    except ValueError:
        return float("nan")


def labelled(label: bytes, after: bytes = rb"[:=] {0,8}") -> re.Pattern[bytes]:
    """The number (with K, M, G ... where there is one) that follows a label."""
    return re.compile(WORD + label + ANSI + after + ANSI + NUMBER + rb"([KMGBTP](?![A-Za-z]))?")


def lines(log: Log, start: re.Pattern[bytes]) -> Iterator[tuple[int, re.Match[bytes], bytes]]:
    """(offset, match, text) of every record: from where `start` matches to the end of its line,
    or to the next record where two stand on one line. A last line that was cut has no text."""
    for offset, block in log.blocks():
        found = list(start.finditer(block))
        for match, following in zip(found, [*found[1:], None], strict=False):
            begin = match.start()
            end = min(begin + LINE, following.start() if following else len(block))
            for stop in (b"\n", b"\r"):
                at = block.find(stop, begin, end)
                end = at if at >= 0 else end
            cut = end == len(block) and offset + len(block) == log.size
            if not cut or _looks_whole(block[begin:end]):
                yield offset + begin, match, block[begin:end]


def _looks_whole(text: bytes) -> bool:
    # The file ends without a newline: a number right at its end may have lost digits.
    return not text[-1:].isdigit() and text[-1:] not in b".,eE+-"


def table(
    log: Log, start: re.Pattern[bytes], fields: dict[str, re.Pattern[bytes]]
) -> tuple[dict[str, np.ndarray], np.ndarray]:
    """Columns and line offsets: `start`'s named groups, and each field's first number."""
    columns: dict[str, list[float]] = {name: [] for name in [*start.groupindex, *fields]}
    offsets = []
    for offset, match, text in lines(log, start):
        offsets.append(offset)
        for name in start.groupindex:
            columns[name].append(number(match[name]))
        for name, pattern in fields.items():
            found = pattern.search(text)
            value = number(found[1]) if found else float("nan")
            if found and pattern.groups > 1 and found[2]:
                value *= _SUFFIX[found[2]]
            columns[name].append(value)
    arrays = {name: np.array(values, float) for name, values in columns.items()}
    return arrays, np.array(offsets, np.int64)


def plain(text: bytes) -> bytes:
    """Without colours."""
    return _ANSI.sub(b"", text)


def find_int(pattern: re.Pattern[bytes], text: bytes) -> int | None:
    """The last match's first group as an integer: what is said last before training counts."""
    found = pattern.findall(text)
    return int(found[-1].replace(b",", b"").replace(b"_", b"")) if found else None
