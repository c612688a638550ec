"""Files that a user wrote or names: read, or refused in one line."""

import argparse
import json
import os
import re
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from base.errors import UsageError

ROOT = Path(__file__).resolve().parent.parent  # of the repository


def read_text(path: Path, what: str) -> str:
    """Returns the text of a small file. A refusal begins with `what` the file is.

    Raises:
        UsageError: the file is unreadable or not UTF-8.
    """
    try:
        return path.read_text("utf-8")
    except OSError as error:
        raise UsageError(f"{what} {path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise UsageError(f"{what} {path} is not text: {error}") from error


def read_json(path: Path) -> dict[str, Any]:
    """Returns the object of a JSON file.

    Raises:
        UsageError: the file is unreadable, not JSON, or no object; the message names it.
    """
    try:
        content = json.loads(path.read_text())
    except OSError as error:
        raise UsageError(f"{path}: {error.strerror}") from error
    except ValueError as error:
        raise UsageError(f"{path} is damaged: {error}") from error
    if not isinstance(content, dict):
        raise UsageError(f"{path} is damaged: it holds {shown(content)}, no object")
    return content


def read_json_if_whole(path: Path) -> dict[str, Any]:
    """Returns the object of a JSON file; an empty dict where the file is missing or damaged."""
    try:
        return read_json(path)
    except UsageError:
        return {}


def shown(value: Any) -> str:
    """Returns a value as Python writes it in ASCII, cut to 40 characters, for a message."""
    text = ascii(value)
    return text if len(text) <= 40 else f"{text[:37]}..."


def read_toml(path: Path, what: str) -> dict[str, Any]:
    """Returns the table of a TOML file. A refusal begins with `what` the file is.

    Raises:
        UsageError: the file is unreadable or not TOML.
    """
    text = read_text(path, what)
    try:
        return tomllib.loads(text)
    except ValueError as error:
        raise UsageError(f"{what} {path} is not TOML: {error}") from error


def add_force_flag(parser: argparse.ArgumentParser) -> None:
    """Adds the flag --force, whose value `storage.output` takes."""
    help = "replace a file that this command did not write, too"
    parser.add_argument("--force", action="store_true", help=help)


def named_folder(text: str) -> Path:
    """Returns the folder that a flag names; argparse calls it.

    Raises:
        argparse.ArgumentTypeError: the name is that of a file, no text, or empty: Path would take
            an empty one for the working directory.
    """
    if not text.strip():
        raise argparse.ArgumentTypeError("is empty: name a folder")
    if os.path.exists(text) and not os.path.isdir(text):
        raise argparse.ArgumentTypeError(f"{text} is a file: name a folder")
    if not is_text(text):
        raise argparse.ArgumentTypeError(f"{text} is no UTF-8, as logs are: name another folder")
    return Path(text)


def is_text(text: str) -> bool:
    """Returns whether a text can be written into a file: it has no zero byte and no surrogate. (A
    file's name in bytes that are no UTF-8 has surrogates.)"""
    return not re.search("[\0\ud800-\udfff]", text)


def below(
    top: Path, is_leaf: Callable[[Path], bool], skip: Callable[[str], bool]
) -> Iterator[tuple[Path, str]]:
    """Yields (path, "") of each file at or below `top`, and of each folder there that `is_leaf`
    accepts, in name order. Of a folder that cannot be read it yields (folder, reason).

    Leaves are not entered, and names that `skip` accepts are left out. A folder is entered once,
    under its own name rather than a link's: links may form a loop.
    """
    entered: set[tuple[int, int]] = set()

    stack = [top]  # folders may be nested deeper than calls may
    while stack:
        path = stack.pop()
        try:
            if not path.is_dir():
                yield path, ""  # also a link to nothing, or to itself: who opens it will say so
                continue
            status = path.stat()
            was_entered = (status.st_dev, status.st_ino) in entered
            if was_entered or (path != top and path.is_symlink() and _inside(path, top)):
                continue
            entered.add((status.st_dev, status.st_ino))
            if is_leaf(path):
                yield path, ""
                continue
            names = sorted(name for name in os.listdir(path) if not skip(name))
        except OSError as error:
            yield path, error.strerror or str(error)
            continue
        stack += [path / name for name in reversed(names)]


def _inside(link: Path, top: Path) -> bool:
    """Returns whether a link leads to a folder at or below `top`, where that is met under its own
    name, or to one above `top`."""
    target, root = link.resolve(), top.resolve()
    return target.is_relative_to(root) or root.is_relative_to(target)
