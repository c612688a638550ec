"""Values of a JSON document, as the type that each should be.

A value of another type counts as missing: None, NaN or empty. It raises nothing.
"""

import json
import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from analysis.logs.record import Refusal, steps_table

_LARGEST = 10**15  # no count of anything here is larger


def document(source: str, text: str, title: str) -> dict[str, Any]:
    """Returns the object that a JSON file holds. title: what such a file is called.

    Raises:
        Refusal: it is damaged, or something else.
    """
    try:
        content = json.loads(text.strip("\0\ufeff \t\r\n"))
    except ValueError as error:
        raise Refusal(source, f"damaged {title}: {error}") from error
    if not isinstance(content, dict):
        raise Refusal(source, f"not {title}: no JSON object")
    return content


def opens_with_json(text: bytes) -> bool:
    """Returns whether a JSON object stands behind the first word of a line."""
    try:
        line = text.partition(b" ")[2].decode("utf-8", "replace")
        return isinstance(json.JSONDecoder().raw_decode(line)[0], dict)
    except (ValueError, RecursionError):
        return False


def real(value: Any) -> float:
    """Returns a number, or that of a string; NaN for anything else."""
    if isinstance(value, bool):
        return math.nan
    try:
        return float(value)
    except (TypeError, ValueError, OverflowError):
        return math.nan


def is_nan(value: Any) -> bool:
    """Returns whether the value is NaN, as a number or a string; a missing value is not."""
    return math.isnan(real(value)) and str(value).strip().lower().lstrip("+-") == "nan"


def known(value: Any) -> float | None:
    """Returns a finite number; None for anything else."""
    return number if math.isfinite(number := real(value)) else None


def integer(value: Any) -> int | None:
    """Returns a whole number that can be a count (or minus one); None for anything else."""
    if type(value) in (int, float) and abs(value) < _LARGEST and value == int(value):
        return int(value)
    return None


def text(value: Any) -> str | None:
    """Returns a string; None for anything else."""
    return value if isinstance(value, str) else None


def mapping(value: Any) -> dict[str, Any]:
    """Returns an object; an empty one for anything else."""
    return value if isinstance(value, dict) else {}


def rows(value: Any) -> list[dict[str, Any]]:
    """Returns the objects of a list; no objects for anything else."""
    return [item for item in value if isinstance(item, dict)] if isinstance(value, list) else []


def steps_of(loss: Sequence[Any], **columns: Sequence[Any]) -> np.ndarray:
    """Returns a table of steps, with NaN for what is no number."""
    numbers = {name: [real(value) for value in values] for name, values in columns.items()}
    nan_loss = [is_nan(value) for value in loss]
    return steps_table(loss=[real(value) for value in loss], nan_loss=nan_loss, **numbers)
