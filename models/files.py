"""Files that a user wrote: read, or refused in one line."""

import json
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

from models.errors import UsageError

DEEPEST = 100  # levels; no document here needs ten, and what walks through one calls itself


def parse_json(text: str | bytes) -> Any:
    """What a JSON text (bytes: UTF-8) holds.

    Raises:
        ValueError: not JSON, or nested deeper than DEEPEST.
    """
    return _shallow(json.loads, text if isinstance(text, str) else text.decode(), "{[")


def parse_toml(text: str) -> dict[str, Any]:
    """What a TOML text holds.

    Raises:
        ValueError: not TOML, or nested deeper than DEEPEST.
    """
    return _shallow(tomllib.loads, text, "{[.")


def _shallow(parse: Callable[[str], Any], text: str, openers: str) -> Any:
    deep = ValueError(f"nested deeper than {DEEPEST} levels")
    try:
        content = parse(text)
    except RecursionError:
        raise deep from None
    if sum(map(text.count, openers)) <= DEEPEST:
        return content
    level = [content]
    for _ in range(DEEPEST + 1):
        level = [
            inner
            for outer in level
            if isinstance(outer, (dict, list))
            for inner in (outer.values() if isinstance(outer, dict) else outer)
        ]
        if not level:
            return content
    raise deep


def read_toml(path: Path, what: str) -> dict[str, Any]:
    """The table of a TOML file; `what` it is comes first in the words of a refusal.

    Raises:
        UsageError: unreadable, or not TOML.
    """
    try:
        return parse_toml(path.read_text())
    except OSError as error:
        raise UsageError(f"{what} {path}: {error.strerror}") from error
    except ValueError as error:
        raise UsageError(f"{what} {path} is not TOML: {error}") from error
