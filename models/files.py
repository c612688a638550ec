"""Files that a user wrote: read, or refused in one line."""

import tomllib
from pathlib import Path
from typing import Any

from models.errors import UsageError


def read_toml(path: Path, what: str) -> dict[str, Any]:
    """The table of a TOML file; `what` it is comes first in the words of a refusal.

    Raises:
        UsageError: unreadable, or not TOML.
    """
    try:
        return tomllib.loads(path.read_text())
    except OSError as error:
        raise UsageError(f"{what} {path}: {error.strerror}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise UsageError(f"{what} {path} is not TOML: {error}") from error
