"""Records that are one line each: where a line starts, and what its fields look like.

For formats without Megatron's bars. Every pattern is bounded and must not be able to run past the
end of its line, so that no log makes it slow. A number counts only as a whole: with what its format
has behind it, and with commas only where its format puts them between thousands.
"""

import math
import re
from collections import Counter, defaultdict
from collections.abc import Iterator

import numpy as np

from analysis.logs.parsing.logfile import Log
from analysis.logs.record import Record

LINE = 4096  # no record is longer
ANSI = rb"(?:\x1b\[[0-9;]{0,24}m)*"
NUMBER = (
    rb"(-?(?:\d{1,25}(?:\.\d{0,24})?|\.\d{1,24})(?:[eE][-+]?\d{1,3})?(?!\d|[.,]\d)"
    rb"|-?nan|-?inf|-?NaN)"
)
# The same of a format that puts commas between thousands: a comma behind it may be one of these.
THOUSANDS = NUMBER.replace(rb"\d{1,25}", rb"(?:\d{1,3}(?:,\d{3}){1,8}|\d{1,25})", 1)
THOUSANDS = THOUSANDS.replace(rb"[.,]\d)", rb"\.\d|,(?! ))", 1)
# What stands behind a number: an end, and, of one that is never the last in its line, more of it.
BEHIND = rb"(?=[\s|;)}\]\"'(]|,(?!\d)|\x1b|\Z)"
NOT_LAST = rb"(?=[,;|)}]| {1,2}[(|])"
# A number that float() takes between blanks, alone or before `/average`.
_ALONE = re.compile(
    rb"(?i)[ \t]{0,16}(-?(?:\d{1,24}(?:\.\d{0,20})?|\.\d{1,20})(?:e[-+]?\d{1,3})?|-?nan|-?inf)"
    rb"(?:([KMGTP]?)FLOPS)?[ \t]{0,16}(?:/|\Z)"
)
_COMMA = re.compile(rb"-?\d{1,25},\d")  # where no thousands are: a decimal comma
_REST = re.compile(rb"(?:\s|\0|\x1b\[[0-9;]{0,24}[mK])*\Z")
_SUFFIX = {b"": 1.0, b"K": 1e3, b"M": 1e6, b"G": 1e9, b"B": 1e9, b"T": 1e12, b"P": 1e15}
_ANSI = re.compile(rb"\x1b\[[0-9;]{0,24}[mK]")
_HUMAN = re.compile(THOUSANDS + rb"([KMGBTP]?)")


def named_number(name: str) -> bytes:
    """A pattern for a number, as a group of that name."""
    return NUMBER.replace(b"(", b"(?P<%b>" % name.encode(), 1)


def word(literal: bytes) -> bytes:
    """A pattern for `literal` where a word may begin; starting with it, it is found quickest."""
    return literal + rb"(?:(?<![\w.]" + literal + rb")|(?<=[0-9;\[]m" + literal + rb"))"


def number(text: bytes | None) -> float:
    """`1,340`, `4.71K`, `1.2e-05`, `nan`: the number; NaN for None and for what is none."""
    match = _HUMAN.fullmatch(text.strip()) if text else None
    return float(match[1].replace(b",", b"")) * _SUFFIX[match[2]] if match else math.nan


def lone_number(text: bytes) -> float:
    """The number that fills a text up to a slash, FLOPS in tera; NaN where there is none."""
    match = _ALONE.match(text)
    unit = b"T" if match is None or match[2] is None else match[2].upper()
    return float(match[1]) * (_SUFFIX[unit] / 1e12) if match else math.nan


def is_nan(text: bytes | None) -> bool:
    """Whether `nan` is what was printed: not a number that is missing or damaged."""
    return bool(text) and text.strip().lstrip(b"-")[:3].lower() == b"nan"


def labelled(
    label: bytes, after: bytes = rb"[:=] {0,8}", unit: bytes = b"", number: bytes = NUMBER
) -> re.Pattern[bytes]:
    """The number (with K, M, G ... where there is one) that follows a label, which begins where a
    word may: not within another, but after a colour. Without its unit, or with more behind it than
    an end, the number is none."""
    begin = rb"(?:(?<![\w.])|(?<=[0-9;\[]m))"
    whole = number + rb"([KMGBTP](?![A-Za-z]))?" + unit + BEHIND
    return re.compile(begin + label + ANSI + after + ANSI + rb"(?:" + whole + rb")?")


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
    log: Log, start: re.Pattern[bytes], fields: dict[str, re.Pattern[bytes]], record: Record
) -> dict[str, np.ndarray]:
    """Columns: `start`'s named groups, each field's first number, and `at`, where the line is.

    A last line that the file's end cuts off counts when it has every field that the line before it
    has; a number that ends where the file does is none. A number at its line's end counts where
    most lines end in that field: in another line it is cut. A doubt counts those that are none.
    `nan_loss` is 1 where the loss was printed as NaN.
    """
    names = (*start.groupindex, *fields, "nan_loss", "at")
    columns: dict[str, list[float]] = {name: [] for name in names}
    last: dict[str, list[int]] = {name: [] for name in fields}  # the rows that end in the field
    none, decimal, with_comma = Counter(), Counter(), defaultdict(list)
    for offset, match, text, cut in lines(log, start):
        texts = {name: (match[name], b"") for name in start.groupindex}
        row_at = len(columns["at"])
        for name, pattern in fields.items():
            if value := pattern.search(text):
                cut_off = cut and value.end() == len(text)
                texts[name] = (None, b"") if cut_off else (*value.groups(), b"")[:2]
                if value[1] is None:
                    none[name] += 1
                    decimal[name] += bool(_COMMA.match(text, value.end()))
                elif _REST.match(text, value.end()):
                    last[name].append(row_at)
                if b"," in (value[1] or b""):
                    with_comma[name].append(row_at)
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
    arrays = {name: np.array(values, float) for name, values in columns.items()}
    of_decimals = any(2 * count > len(arrays["at"]) for count in decimal.values())
    for name in fields:
        known = np.isfinite(arrays[name]).sum()
        cut_rows = last[name] if 2 * len(last[name]) <= known else []
        unsure = [
            row for row in cut_rows + with_comma[name] * of_decimals if row < len(arrays[name])
        ]
        arrays[name][unsure] = math.nan
        none[name] += len(set(unsure))
    record.doubt_numbers(none, "commas stand for decimal points: " if of_decimals else "")
    return arrays


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
