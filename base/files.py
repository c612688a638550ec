"""Files that a user wrote or names: read, or refused in one line."""

import argparse
import json
import os
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from base.errors import UsageError

ROOT = Path(__file__).resolve().parent.parent  # of the repository
MOST_BYTES = 4 << 20  # a study of 10,000 runs, each written out, has 1 MB
DEEPEST = 100  # levels; no document here needs ten, and what walks through one calls itself


def parse_json(text: str | bytes) -> Any:
    """What a JSON text (bytes: UTF-8) holds.

    Raises:
        ValueError: not JSON, or nested deeper than DEEPEST.
    """
    return _shallow(json.loads, text if isinstance(text, str) else text.decode(), "{[")


def parse_toml(text: str) -> dict[str, Any]:
    """What a TOML text holds. Raises: ValueError: not TOML, or nested deeper than DEEPEST."""
    return _shallow(tomllib.loads, text, "{[.")


def _shallow(parse: Callable[[str], Any], text: str, openers: str) -> Any:
    try:
        content = parse(text)
    except RecursionError:
        content = None
    else:
        if sum(map(text.count, openers)) <= DEEPEST or not _is_deep(content):
            return content
    raise ValueError(f"nested deeper than {DEEPEST} levels")


def _is_deep(content: Any, levels: int = DEEPEST) -> bool:
    """Whether tables and lists are nested deeper than so many levels."""
    if isinstance(content, dict):
        content = list(content.values())
    if not isinstance(content, list):
        return False
    return levels == 0 or any(_is_deep(part, levels - 1) for part in content)


def read_text(path: Path, what: str) -> str:
    """The text of a small file; `what` it is comes first in the words of a refusal.

    Raises:
        UsageError: unreadable, larger than MOST_BYTES (/dev/zero never ends), or not UTF-8.
    """
    try:
        with path.open("rb") as file:
            content = file.read(MOST_BYTES + 1)
    except OSError as error:
        raise UsageError(f"{what} {path}: {error.strerror}") from error
    except ValueError as error:  # a path with a zero byte in it
        raise UsageError(f"{what} {str(path)!r}: {error}") from error
    if len(content) > MOST_BYTES:
        raise UsageError(f"{what} {path} is larger than the {MOST_BYTES >> 20} MiB it may have")
    try:
        return content.decode()
    except UnicodeDecodeError as error:
        raise UsageError(f"{what} {path} is not text: {error}") from error


def read_json(path: Path) -> dict[str, Any]:
    """The object of a JSON file.

    Raises:
        UsageError: unreadable, not JSON, or no object; it names the file.
    """
    try:
        content = parse_json(check_file(path).read_text())
    except OSError as error:
        raise UsageError(f"{path}: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise UsageError(f"{path} is damaged: {error}") from error
    if not isinstance(content, dict):
        raise UsageError(f"{path} is damaged: it holds {shown(content)}, no object")
    return content


def read_json_if_whole(path: Path) -> dict[str, Any]:
    """The object of a JSON file; an empty dict where there is none (or half of one)."""
    try:
        return read_json(path)
    except UsageError:
        return {}


def shown(value: Any) -> str:
    """A value in a message, in a few characters."""
    text = ascii(value)
    return text if len(text) <= 40 else f"{text[:37]}..."


def check_ends(path: Path) -> Path:
    """The path, of a file that is read to its end.

    Raises:
        UsageError: it is a device, as /dev/zero, which has none.
    """
    if Path(path).is_char_device():
        raise UsageError(f"{path}: a device, no file")
    return Path(path)


def check_file(path: Path) -> Path:
    """The path, of a file that a program wrote.

    Raises:
        UsageError: it is a device or a pipe, which may have no end.
    """
    if not path.is_file() and path.exists():
        raise UsageError(f"{path}: not a regular file")
    return path


def read_toml(path: Path, what: str) -> dict[str, Any]:
    """The table of a TOML file; `what` it is comes first in the words of a refusal.

    Raises:
        UsageError: unreadable, larger than MOST_BYTES, or not TOML.
    """
    text = read_text(path, what)
    try:
        return parse_toml(text)
    except ValueError as error:
        raise UsageError(f"{what} {path} is not TOML: {error}") from error


def add_force_flag(parser: argparse.ArgumentParser) -> None:
    """Add --force, for `storage.output`."""
    help = "replace a file that this command did not write, too"
    parser.add_argument("--force", action="store_true", help=help)


def named_folder(text: str) -> Path:
    """The folder that a flag names; for argparse.

    Raises:
        argparse.ArgumentTypeError: an empty name, which Path would take for the working directory,
            or that of a file.
    """
    if not text.strip():
        raise argparse.ArgumentTypeError("is empty: name a folder")
    if os.path.exists(text) and not os.path.isdir(text):
        raise argparse.ArgumentTypeError(f"{text} is a file: name a folder")
    return Path(text)


def below(
    top: Path, is_leaf: Callable[[Path], bool], skip: Callable[[str], bool]
) -> Iterator[tuple[Path, str]]:
    """(path, "") of each file and each folder that `is_leaf` at or below `top`, in name order; and
    (folder, why) of each folder that cannot be read.

    What `is_leaf` is true of is not looked into; what is named so that `skip` is true is left out.
    A folder is entered once, under its own name rather than a link's: links may form a loop.
    """
    entered: set[tuple[int, int]] = set()

    stack = [top]  # folders may be nested deeper than calls may
    while stack:
        path = stack.pop()
        try:
            if not path.is_dir():
                yield path, ""  # also a link to nothing, or to itself: who opens it will say so
                continue
            about = path.stat()
            again = (about.st_dev, about.st_ino) in entered
            if again or (path != top and path.is_symlink() and _inside(path, top)):
                continue
            entered.add((about.st_dev, about.st_ino))
            if is_leaf(path):
                yield path, ""
                continue
            names = sorted(name for name in os.listdir(path) if not skip(name))
        except OSError as error:
            yield path, error.strerror or str(error)
            continue
        stack += [path / name for name in reversed(names)]


def _inside(link: Path, top: Path) -> bool:
    """Whether a link leads to a folder at or below `top`, where that is met under its own name, or
    above it."""
    there, here = link.resolve(), top.resolve()
    return there.is_relative_to(here) or here.is_relative_to(there)
