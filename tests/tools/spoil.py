"""Ways to damage a file, and neutral ways that must not matter.

A damaging way takes (chance, bytes) and returns bytes that are wrong somewhere; `chance` decides
where. A neutral way changes no fact in the file: line ends, colours, padding, a rank's prefix.
"""

import json
import os
import random
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

NUMBER = re.compile(rb"(?<![\w.])-?\d+(?:\.\d+)?(?:[eE][+-]?\d+)?")
NO_NUMBERS = [b"nan", b"inf", b"-inf", b"-1", b"0", b"1e38", b"3.4E+38", b"1e400", b"", b"text"]
NO_NUMBERS += [b"9" * 30, b"1" + b"0" * 400, b"1,024", b"0x10", b"--", b"[]", b"1.2.3", b"-0.0"]
OTHER_TYPES: list[Any] = [[], {}, None, "x", "", True, 5, -1, 1.5, 1e400, -(10**30), [[]], {"a": 1}]
STRANGE = [  # NULs, what is no UTF-8, a terminal's escapes
    *(bytes(1), bytes(8), bytes(4096), b"\xff", b"\xc3\x28", b"\xed\xa0\x80", b"\xf8\x88"),
    *(b"\x80" * 20, b"\x1b[2J", b"\x1b]0;title\x07", b"\x9b31m", b"\r", b"\x08" * 5),
]


def a_byte_or_a_part_of_it(chance: random.Random, data: bytes) -> bytes:
    """Another byte, or a part of the file within a line of it, as two writers at once leave it."""
    at, start = chance.randrange(len(data)), chance.randrange(len(data))
    part = data[start : start + chance.randint(1, 300)]
    new = chance.choice([part, bytes([chance.randrange(256)])])
    return data[:at] + new + data[at + chance.randrange(2) :]


def strange_bytes(chance: random.Random, data: bytes) -> bytes:
    """STRANGE bytes in the place of others or between them."""
    at, new = chance.randrange(len(data)), chance.choice(STRANGE)
    return data[:at] + new + data[at + chance.choice([0, len(new)]) :]


def a_line(chance: random.Random, data: bytes) -> bytes:
    """A line is lost, cut, another one, or repeated with those that follow it."""
    lines = data.splitlines(keepends=True) or [b""]
    at = chance.randrange(len(lines))
    cut, again = chance.randrange(len(lines[at]) + 1), chance.randint(1, 50)
    ways = [[], [lines[at][:cut]], [chance.choice(lines)], [*lines[at : at + again], lines[at]]]
    lines[at : at + 1] = chance.choice(ways)
    return b"".join(lines)


def beginning_or_end(chance: random.Random, data: bytes) -> bytes:
    at = chance.randrange(len(data))
    return chance.choice([data[:at], data[at:]])


def a_number(chance: random.Random, data: bytes) -> bytes:
    """Another number, or none, in one place or after one word everywhere in the file."""
    number = NUMBER.search(data, chance.randrange(len(data))) or NUMBER.search(data)
    if not number:
        return strange_bytes(chance, data)
    new = chance.choice(NO_NUMBERS)
    if chance.random() < 0.5:
        return data[: number.start()] + new + data[number.end() :]
    word = re.escape(data[max(0, number.start() - 8) : number.start()].split(b"\n")[-1])
    return re.sub(rb"(" + word + rb")" + NUMBER.pattern, lambda m: m[1] + new, data)


def _places(document: Any) -> list[tuple[Any, Any]]:
    """(container, key) of every value of a JSON document."""
    if not isinstance(document, (dict, list)):
        return []
    keys = list(document) if isinstance(document, dict) else range(len(document))
    return [p for key in keys for p in [(document, key), *_places(document[key])]]


def _other_value(chance: random.Random, text: bytes) -> bytes:
    holder = [json.loads(text)]
    container, key = chance.choice(_places(holder))
    container[key] = chance.choice(OTHER_TYPES)
    if isinstance(container, dict) and chance.random() < 0.1:
        del container[key]
    return json.dumps(holder[0], allow_nan=True).encode()


def json_value(chance: random.Random, data: bytes) -> bytes:
    """Another type in a JSON document, or in one JSON line of a log."""
    documents = [(0, len(data))]
    in_lines = [m.span() for m in re.finditer(rb"\{.*\}", data)]
    documents += chance.sample(in_lines, min(20, len(in_lines)))
    for start, end in documents:
        try:
            return data[:start] + _other_value(chance, data[start:end]) + data[end:]
        except ValueError:
            continue
    return a_number(chance, data)


def json_number(chance: random.Random, data: bytes) -> bytes:
    """Another number in a JSON document, where a number stands."""
    document = json.loads(data)
    places = [(c, k) for c, k in _places(document) if type(c[k]) in (int, float)]
    container, key = chance.choice(places)
    number = container[key]
    container[key] = chance.choice([number + 1, number - 1, -number - 1, 2 * number, 0, 10**12])
    return json.dumps(document).encode()


def long_line(chance: random.Random, data: bytes) -> bytes:
    """Ten megabytes without a newline."""
    at, filling = chance.randrange(len(data)), chance.choice([b"x", b"1", b" ", b"[", b"|", b"\r"])
    return data[:at] + filling * 10_000_000 + data[at:]


Spoiler = Callable[[random.Random, bytes], bytes]
SPOILERS: list[Spoiler] = [a_line, a_line, a_byte_or_a_part_of_it, strange_bytes, beginning_or_end]
SPOILERS += [a_number, json_value]
HARD: list[Spoiler] = [long_line]  # slow: chosen seldom


def spoilt(chance: random.Random, data: bytes) -> tuple[str, bytes]:
    """(the way, the bytes)."""
    way = chance.choice(HARD if chance.random() < 0.05 else SPOILERS)
    return way.__name__, way(chance, data)


def harm(chance: random.Random, path: Path) -> str:
    """Damage a file, or put something else in its place; the way."""
    ways: dict[str, Callable[[], object]] = {
        "missing": lambda: None,
        "empty": path.touch,
        "folder": path.mkdir,
        "loop": lambda: path.symlink_to(chance.choice([path, path.parent, path.parent.parent])),
        "huge": lambda: (path.touch(), os.truncate(path, 1 << 28)),
    }
    data = path.read_bytes() or b"\n"
    path.unlink()
    if chance.random() < 0.6:
        way, data = spoilt(chance, data)
        path.write_bytes(data)
    else:
        way = chance.choice(list(ways))
        ways[way]()
    return f"{way} file"


def damaged_numbers(line: str) -> Iterator[tuple[str, str]]:
    """(the way, a log): of three lines the first has one number that is cut, runs into other text,
    has a unit of nobody's or a decimal comma."""
    *head, last = line.splitlines(keepends=True)
    for number in re.finditer(r"\d[\d,.]*(?:[eE][-+]?\d+)?", last):
        before, digits, after = last[: number.start()], number[0], last[number.end() :]
        ways = {
            "a unit": before + digits + "k" + after,
            "a decimal comma": before + digits.replace(".", ",") + after,
            "a comma": before + digits.replace(".", ",") + "5" * ("." in digits) + after,
        }
        for cut in range(1, len(digits)) if after.strip() else ():  # else the line's end is whole
            ways[f"cut to {digits[:cut]}"] = before + digits[:cut] + "\n"
            ways[f"joined behind {digits[:cut]}"] = before + digits[:cut] + "time to load\n"
        for way, damaged in ways.items():
            if damaged != last:
                yield (
                    way,
                    "".join([*head, damaged, last, last]),
                )  # of one iteration the first counts


# Neutral changes: a pattern, and what takes its place.
NEUTRAL: dict[str, tuple[bytes, bytes]] = {
    "crlf": (rb"\r?\n", b"\r\n"),
    "byte order mark": (rb"\A(?!\xef\xbb\xbf)", b"\xef\xbb\xbf"),
    "trailing spaces": (rb"(\r?\n)", rb"  \1"),
    "blank lines": (rb"\n", b"\n\n"),
    "no final newline": (rb"[\r\n]+\Z", b""),
}
NEUTRAL_OF_LINES: dict[str, tuple[bytes, bytes]] = {  # no JSON document has these
    "colours": (rb"([^\r\n]+)", b"\x1b[32m\\1\x1b[0m"),
    "nul padding": (rb"\A|\Z", bytes(4096) + b"\n"),  # as after a crash
    "progress bar": (rb"\n(?=[^\r\n])", b"\n 10%|#         | 1/10 [00:01<00:09,  1.00s/it]\r"),
    "rank prefix": (rb"(?m)^(?=[^\r\n])", b"0: "),  # as srun --label writes it
}
