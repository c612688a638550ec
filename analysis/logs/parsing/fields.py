"""Records that are one line each: where a line starts, and what its fields look like.

For formats without Megatron's bars. Every pattern is bounded and must not be able to run past the
end of its line, so that no log makes it slow.
"""

import math
import re
from collections.abc import Iterator

import numpy as np

from analysis.logs.parsing.logfile import Log

LINE = 4096  # no record is longer
ANSI = rb"(?:\x1b\[[0-9;]{0,24}m)*"
NUMBER = rb"(-?(?:\d[\d,]{0,24}(?:\.\d{0,24})?|\.\d{1,24})(?:[eE][-+]?\d{1,3})?|-?nan|-?inf|-?NaN)"
# A number that float() takes, behind at most 16 blanks.
_LEADING = re.compile(
    rb"(?i)[ \t]{0,16}(-?(?:\d{1,24}(?:\.\d{0,20})?|\.\d{1,20})(?:e[-+]?\d{1,3})?(?![\d.])"
    rb"|-?nan|-?inf)([KMGTP](?=FLOPS))?"
)
_SUFFIX = {b"": 1.0, b"K": 1e3, b"M": 1e6, b"G": 1e9, b"B": 1e9, b"T": 1e12, b"P": 1e15}
_ANSI = re.compile(rb"\x1b\[[0-9;]{0,24}[mK]")
_HUMAN = re.compile(rb"(.{1,40}?)([KMGBTP]?)\Z", re.DOTALL)


def named_number(name: str) -> bytes:
    """A pattern for a number, as a group of that name."""
    return NUMBER.replace(b"(", b"(?P<%b>" % name.encode(), 1)


def word(literal: bytes) -> bytes:
    """A pattern for `literal` where a word may begin; starting with it, it is found quickest."""
    return literal + rb"(?:(?<![\w.]" + literal + rb")|(?<=[0-9;\[]m" + literal + rb"))"


def number(text: bytes | None) -> float:
    """`1,340`, `4.71K`, `1.2e-05`, `nan`: the number; NaN for None and for what is none."""
    try:
        return float(text or b"nan")
    except ValueError:
        pass
    match = _HUMAN.match(text.strip()) if text else None
    if match is None:
        return float("nan")
    try:
        return float(match[1].replace(b",", b"")) * _SUFFIX[match[2]]
    except ValueError:
        return float("nan")


def leading_number(text: bytes) -> float:
    """The number that a text begins with, FLOPS in tera; NaN where there is none."""
    match = _LEADING.match(text)
    return float(match[1]) * (_SUFFIX[(match[2] or b"T").upper()] / 1e12) if match else math.nan


def is_nan(text: bytes | None) -> bool:
    """Whether `nan` is what was printed: not a number that is missing or damaged."""
    return bool(text) and text.strip().lstrip(b"-")[:3].lower() == b"nan"


def labelled(label: bytes, after: bytes = rb"[:=] {0,8}") -> re.Pattern[bytes]:
    """The number (with K, M, G ... where there is one) that follows a label, which begins where a
    word may: not within another, but after a colour."""
    begin = rb"(?:(?<![\w.])|(?<=[0-9;\[]m))"
    return re.compile(begin + label + ANSI + after + ANSI + NUMBER + rb"([KMGBTP](?![A-Za-z]))?")


def lines(log: Log, start: re.Pattern[bytes]) -> Iterator[tuple[int, re.Match[bytes], bytes, bool]]:
    """(offset, match, text, cut) of every record: from where `start` matches to the end of its
    line, or to the next record where two stand on one line. cut: the file ends in this record
    without a line's end, so a number right there may have lost digits."""
    for offset, block in log.blocks():
        matches = list(start.finditer(block))
        for match, following in zip(matches, [*matches[1:], None], strict=False):
            begin = match.start()
            end = min(begin + LINE, following.start() if following else len(block))
            for stop in (b"\n", b"\r"):
                at = block.find(stop, begin, end)
                end = at if at >= 0 else end
            cut = end == len(block) and offset + len(block) == log.size
            yield offset + begin, match, block[begin:end], cut


def table(
    log: Log, start: re.Pattern[bytes], fields: dict[str, re.Pattern[bytes]]
) -> dict[str, np.ndarray]:
    """Columns: `start`'s named groups, each field's first number, and `at`, where the line is.

    A last line that the file's end cuts off counts when it has every field that the line before it
    has; a number that ends where the file does is none. `nan_loss` is 1 where the loss was printed
    as NaN.
    """
    names = (*start.groupindex, *fields, "nan_loss", "at")
    columns: dict[str, list[float]] = {name: [] for name in names}
    for offset, match, text, cut in lines(log, start):
        texts = {name: (match[name], b"") for name in start.groupindex}
        for name, pattern in fields.items():
            if value := pattern.search(text):
                cut_off = cut and value.end() == len(text)
                texts[name] = (None, b"") if cut_off else (*value.groups(), b"")[:2]
        row = {name: number(value) * _SUFFIX[unit or b""] for name, (value, unit) in texts.items()}
        row["nan_loss"] = float(is_nan(texts.get("loss", (None,))[0]))
        row["at"] = offset
        if cut and match[0] == text and text[-1:] in b"0123456789.,eE+-":
            continue
        absent = fields.keys() - texts.keys()
        if cut and columns["at"] and any(not math.isnan(columns[name][-1]) for name in absent):
            continue
        for name, values in columns.items():
            values.append(row.get(name, math.nan))
    return {name: np.array(values, float) for name, values in columns.items()}


def positive(values: np.ndarray) -> np.ndarray:
    """The same, NaN where a value is none to divide by: 0, negative or infinite."""
    return np.where((values > 0) & np.isfinite(values), values, np.nan)


def plain(text: bytes) -> bytes:
    """Without colours."""
    return _ANSI.sub(b"", text) if b"\x1b" in text else text


def ranks_of_rates(total: np.ndarray, each: np.ndarray, rounded: float = 0.01) -> int | None:
    """How many GPUs make `total` of `each`'s rate; None where rounding leaves several numbers.

    rounded: how far the two printed numbers together may be off, as a share (three digits: 0.01).
    """
    with np.errstate(divide="ignore", invalid="ignore"):
        ratio = np.asarray(total) / np.asarray(each)
    ratio = ratio[np.isfinite(ratio)]
    if not len(ratio):
        return None
    middle = float(np.median(ratio))
    ranks = round(middle)
    sure = ranks >= 1 and rounded * middle < 0.5 and abs(middle - ranks) <= rounded * middle
    return ranks if sure else None
