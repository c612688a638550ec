"""Ways to damage a file, and neutral ways that must not matter; each takes (chance, bytes).

A damaging way returns bytes that are wrong somewhere; `chance` decides where. A neutral way changes
no fact in the file: line ends, colours, padding, a rank's prefix.
"""

import json
import random
import re
from collections.abc import Callable
from typing import Any

Spoiler = Callable[[random.Random, bytes], bytes]

NUMBER = re.compile(rb"(?<![\w.])-?\d+(?:\.\d+)?(?:[eE][+-]?\d+)?")
NO_NUMBERS = [b"nan", b"inf", b"-inf", b"-1", b"0", b"1e38", b"3.4E+38", b"1e400", b"", b"text"]
NO_NUMBERS += [b"9" * 30, b"1" + b"0" * 400, b"1,024", b"0x10", b"--", b"[]", b"1.2.3", b"-0.0"]
OTHER_TYPES: list[Any] = [[], {}, None, "x", "", True, 5, -1, 1.5, 1e400, -(10**30), [[]], {"a": 1}]


def _cut(chance: random.Random, data: bytes, at: int, length: int, new: bytes) -> bytes:
    return data[:at] + new + data[at + length :]


def one_byte(chance: random.Random, data: bytes) -> bytes:
    at = chance.randrange(len(data))
    return _cut(chance, data, at, chance.randrange(2), bytes([chance.randrange(256)]))


def _lines(data: bytes) -> list[bytes]:
    return data.splitlines(keepends=True) or [b""]


def lost_line(chance: random.Random, data: bytes) -> bytes:
    lines = _lines(data)
    del lines[chance.randrange(len(lines))]
    return b"".join(lines)


def cut_line(chance: random.Random, data: bytes) -> bytes:
    lines = _lines(data)
    at = chance.randrange(len(lines))
    lines[at] = lines[at][: chance.randrange(len(lines[at]) + 1)]
    return b"".join(lines)


def truncated(chance: random.Random, data: bytes) -> bytes:
    return data[: chance.randrange(len(data))]


def beheaded(chance: random.Random, data: bytes) -> bytes:
    return data[chance.randrange(len(data)) :]


def swapped_lines(chance: random.Random, data: bytes) -> bytes:
    lines = _lines(data)
    one, other = chance.randrange(len(lines)), chance.randrange(len(lines))
    lines[one], lines[other] = lines[other], lines[one]
    return b"".join(lines)


def doubled_lines(chance: random.Random, data: bytes) -> bytes:
    lines = _lines(data)
    at = chance.randrange(len(lines))
    lines[at:at] = lines[at : at + chance.randint(1, 50)]
    return b"".join(lines)


def interleaved(chance: random.Random, data: bytes) -> bytes:
    """As two writers at once do: a line begins within another."""
    at, start = chance.randrange(len(data)), chance.randrange(len(data))
    return _cut(chance, data, at, 0, data[start : start + chance.randint(1, 300)])


def nuls(chance: random.Random, data: bytes) -> bytes:
    at, length = chance.randrange(len(data)), chance.choice([1, 8, 4096])
    return _cut(chance, data, at, chance.choice([0, length]), bytes(length))


def no_utf8(chance: random.Random, data: bytes) -> bytes:
    bad = chance.choice([b"\xff", b"\xc3\x28", b"\xed\xa0\x80", b"\xf8\x88", b"\x80" * 20])
    return _cut(chance, data, chance.randrange(len(data)), 0, bad)


def escapes(chance: random.Random, data: bytes) -> bytes:
    """Escape sequences for a terminal."""
    bad = chance.choice([b"\x1b[2J", b"\x1b]0;title\x07", b"\x9b31m", b"\r", b"\x08" * 5])
    return _cut(chance, data, chance.randrange(len(data)), 0, bad)


def _a_number(chance: random.Random, data: bytes) -> re.Match[bytes] | None:
    return NUMBER.search(data, chance.randrange(len(data))) or NUMBER.search(data)


def one_number(chance: random.Random, data: bytes) -> bytes:
    found = _a_number(chance, data)
    if not found:
        return one_byte(chance, data)
    return data[: found.start()] + chance.choice(NO_NUMBERS) + data[found.end() :]


def every_such_number(chance: random.Random, data: bytes) -> bytes:
    """Change the number after one word, everywhere in the file."""
    found = _a_number(chance, data)
    if not found:
        return one_byte(chance, data)
    word = re.escape(data[max(0, found.start() - 8) : found.start()].split(b"\n")[-1])
    new = chance.choice(NO_NUMBERS)
    return re.sub(rb"(" + word + rb")" + NUMBER.pattern, lambda m: m[1] + new, data)


def _places(document: Any) -> list[tuple[Any, Any]]:
    """(container, key) of every value of a JSON document."""
    if not isinstance(document, (dict, list)):
        return []
    keys = list(document) if isinstance(document, dict) else range(len(document))
    return [p for key in keys for p in [(document, key), *_places(document[key])]]


def _other_value(chance: random.Random, text: bytes) -> bytes:
    document = json.loads(text)
    places = _places(document)
    if not places or chance.random() < 0.05:
        document = chance.choice(OTHER_TYPES)
    else:
        container, key = chance.choice(places)
        if isinstance(container, dict) and chance.random() < 0.1:
            del container[key]
        else:
            container[key] = chance.choice(OTHER_TYPES)
    return json.dumps(document, allow_nan=True).encode()


def json_value(chance: random.Random, data: bytes) -> bytes:
    """Another type in a JSON document, or in one JSON line of a log."""
    try:
        return _other_value(chance, data)
    except (ValueError, RecursionError):
        pass
    lines = _lines(data)
    with_json = [i for i, line in enumerate(lines) if b"{" in line and b"}" in line]
    chance.shuffle(with_json)
    for i in with_json[:20]:
        start, end = lines[i].find(b"{"), lines[i].rfind(b"}") + 1
        try:
            lines[i] = lines[i][:start] + _other_value(chance, lines[i][start:end]) + lines[i][end:]
            return b"".join(lines)
        except (ValueError, RecursionError):
            continue
    return one_number(chance, data)


def json_number(chance: random.Random, data: bytes) -> bytes:
    """Another number in a JSON document, where a number stands."""
    document = json.loads(data)
    places = [(c, k) for c, k in _places(document) if type(c[k]) in (int, float)]
    container, key = chance.choice(places)
    number = container[key]
    container[key] = chance.choice([number + 1, number - 1, -number - 1, 2 * number, 0, 10**12])
    return json.dumps(document).encode()


def combined(chance: random.Random, data: bytes) -> bytes:
    for spoil in chance.sample(SPOILERS, 3):
        data = spoil(chance, data or b"\n")
    return data


def long_line(chance: random.Random, data: bytes) -> bytes:
    """Ten megabytes without a newline."""
    filling = chance.choice([b"x", b"1", b" ", b"[", b"0: ", b"|", b"\r"])
    return _cut(
        chance, data, chance.randrange(len(data)), 0, filling * (10_000_000 // len(filling))
    )


def deep(chance: random.Random, data: bytes) -> bytes:
    """JSON (or TOML) that is nested more deeply than a parser's stack allows."""
    opening, closing = chance.choice([(b"[", b"]"), (b'{"a":', b"}"), (b"[", b"")])
    nested = opening * 100_000 + b"1" + closing * 100_000
    found = NUMBER.search(data, data.find(b":") + 1)
    return data[: found.start()] + nested + data[found.end() :] if found else nested


SPOILERS: list[Spoiler] = [one_byte, lost_line, cut_line, truncated, beheaded, swapped_lines]
SPOILERS += [doubled_lines, interleaved, nuls, no_utf8, escapes, one_number, every_such_number]
SPOILERS += [json_value]
HARD: list[Spoiler] = [combined, long_line, deep]


# --- neutral -------------------------------------------------------------------------------------


def crlf(data: bytes) -> bytes:
    return re.sub(rb"\r?\n", b"\r\n", data)


def byte_order_mark(data: bytes) -> bytes:
    return data if data.startswith(b"\xef\xbb\xbf") else b"\xef\xbb\xbf" + data


def trailing_spaces(data: bytes) -> bytes:
    return re.sub(rb"(\r?\n)", rb"  \1", data)


def blank_lines(data: bytes) -> bytes:
    return data.replace(b"\n", b"\n\n")


def colours(data: bytes) -> bytes:
    return re.sub(rb"([^\r\n]+)", b"\x1b[32m\\1\x1b[0m", data)


def nul_padding(data: bytes) -> bytes:
    """NUL bytes, as after a crash or in a log that was truncated while open."""
    return bytes(4096) + b"\n" + data + bytes(4096)


def progress_bar(data: bytes) -> bytes:
    return re.sub(rb"\n(?=[^\r\n])", b"\n 10%|#         | 1/10 [00:01<00:09,  1.00s/it]\r", data)


def no_final_newline(data: bytes) -> bytes:
    return data.rstrip(b"\r\n")


def rank_prefix(data: bytes) -> bytes:
    """A rank's prefix, as srun --label writes it."""
    return re.sub(rb"(?m)^(?=[^\r\n])", b"0: ", data)


NEUTRAL = [crlf, byte_order_mark, trailing_spaces, blank_lines, no_final_newline]
NEUTRAL_OF_LINES = [colours, nul_padding, progress_bar, rank_prefix]  # no JSON document has these
