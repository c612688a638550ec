"""The fields of a line, and the numbers in them.

Every pattern is bounded and must not be able to run past the end of its line, so that no log makes
it slow. A number counts only as a whole: with what its format has behind it, and with commas only
where its format puts them between thousands.
"""

import math
import re

import numpy as np

ANSI = rb"(?:\x1b\[[0-9;]{0,24}m)*"
NUMBER = (
    rb"(-?(?:\d{1,25}(?:\.\d{0,24})?|\.\d{1,24})(?:[eE][-+]?\d{1,3})?(?!\d|[.,]\d)"
    rb"|-?(?i:nan|infinity|inf))"
)
# The same of a format that puts commas between thousands: a comma behind it may be one of these.
THOUSANDS = NUMBER.replace(rb"\d{1,25}", rb"(?:\d{1,3}(?:,\d{3}){1,8}|\d{1,25})", 1)
THOUSANDS = THOUSANDS.replace(rb"[.,]\d)", rb"\.\d|,(?! ))", 1)
# What stands behind a number: an end, and, of one that is never the last in its line, more of it.
BEHIND = rb"(?=[\s|;)}\]\"'(]|,(?!\d)|\x1b|\Z)"
# Where a line ends, after padding and colours.
LINE_END = rb"(?:[ \t\0]|\x1b\[[\d;]{0,20}[mK]){0,400}(?:\r|\n|\Z)"
NOT_LAST = rb"(?=[,;|)}]| {1,2}[(|])"
SUFFIX = {b"": 1.0, b"K": 1e3, b"M": 1e6, b"G": 1e9, b"B": 1e9, b"T": 1e12, b"P": 1e15}
SUFFIX |= {unit + b"FLOPS": scale / 1e12 for unit, scale in SUFFIX.items()}
_ANSI = re.compile(rb"\x1b\[[0-9;]{0,24}[mK]")
_HUMAN = re.compile(THOUSANDS + rb"([KMGBTP]?)")


def named_number(name: str) -> bytes:
    """Returns a pattern for a number, as a group of that name."""
    return NUMBER.replace(b"(", b"(?P<%b>" % name.encode(), 1)


def word(literal: bytes) -> bytes:
    """Returns a pattern for `literal` where a word may begin. It starts with the literal, which is
    found quickest."""
    return literal + rb"(?:(?<![\w.]" + literal + rb")|(?<=[0-9;\[]m" + literal + rb"))"


def number(text: bytes | None) -> float:
    """Returns the number of a text like `1,340`, `4.71K`, `1.2e-05` or `nan`; NaN for None and for
    what is no number."""
    match = _HUMAN.fullmatch(text.strip()) if text else None
    return float(match[1].replace(b",", b"")) * SUFFIX[match[2]] if match else math.nan


def is_nan(text: bytes | None) -> bool:
    """Returns whether `nan` was printed, which a number that is missing or damaged is not."""
    return bool(text) and text.strip().lstrip(b"-")[:3].lower() == b"nan"


def labelled(
    label: bytes, separator: bytes = rb"[:=] {0,8}", unit: bytes = b"", number: bytes = NUMBER
) -> re.Pattern[bytes]:
    """Returns a pattern for the number (with K, M, G ... where there is one) that follows a label.
    The label begins where a word may: not within another, but after a colour. Without its unit, or
    with more behind it than an end, the number is none."""
    begin = rb"(?:(?<![\w.])|(?<=[0-9;\[]m))"
    whole = number + rb"([KMGBTP](?![A-Za-z]))?" + unit + BEHIND
    return re.compile(begin + label + ANSI + separator + ANSI + rb"(?:" + whole + rb")?")


def positive(values: np.ndarray) -> np.ndarray:
    """Returns the values, with NaN for each that nothing can be divided by: 0, negative or
    infinite."""
    return np.where((values > 0) & np.isfinite(values), values, np.nan)


def plain(text: bytes) -> bytes:
    """Returns the text without colours."""
    return _ANSI.sub(b"", text) if b"\x1b" in text else text


def ranks_of_rates(total: np.ndarray, each: np.ndarray, rounded: float = 0.01) -> int | None:
    """Returns how many GPUs of the rate `each` make the rate `total`; None where rounding leaves
    several numbers.

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


def whole(values: np.ndarray) -> int | None:
    """Returns the whole number that all known values are; None where they are not one."""
    known = values[np.isfinite(values)]
    number = round(float(known[-1])) if len(known) else 0
    return number if number and (np.abs(known - number) < 1e-6 * number).all() else None
