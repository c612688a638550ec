"""What a user may give as a value: its type, and its range, words or pattern. Each is stated once,
beside the setting, as a dataclass's field; this checks it wherever the value comes from.

(pydantic would do it, too. It takes 0.13 s to import and to build the models, which commands on a
login node would take two thirds longer for.)
"""

import argparse
import re
import time
from dataclasses import MISSING, Field, dataclass, field, fields, is_dataclass
from datetime import datetime
from functools import cache
from types import UnionType
from typing import Any, NamedTuple, get_args, get_origin

from base.errors import UsageError
from base.files import is_text, shown


@dataclass(frozen=True)
class Bounds:
    """A range of numbers from `least` to `most`. Both ends are allowed, unless `above` or `below`
    excludes one."""

    least: float
    most: float
    above: bool = False
    below: bool = False

    def problem(self, name: str, value: float) -> str:
        """Returns what is wrong with the value, with the bounds; "" when it is within (NaN never
        is)."""
        within = self.least < value if self.above else self.least <= value
        if within and (value < self.most if self.below else value <= self.most):
            return ""
        least = f"above {self.least:g}" if self.above else f"at least {_plain(self.least)}"
        most = f"below {self.most:g}" if self.below else f"at most {_plain(self.most)}"
        return f"{name} must be {least} and {most}, not {_plain(value)}"


class Count(Bounds):
    """Bounds of a whole number. Of a JSON file's numbers `misfit` refuses those that are no int."""


class Text(NamedTuple):
    """What a text, each text of a list, or each name of a table must match, and that in words."""

    pattern: str
    wanted: str

    def problem(self, name: str, text: str) -> str:
        """Returns that the text, called `name`, does not match; "" when it does."""
        matches = re.fullmatch(self.pattern, text)
        return "" if matches else f"{name} {shown(text)} is not {self.wanted}"


class Moment(NamedTuple):
    """A time with its zone, as 2026-01-31T12:00:00Z, that has been: no clock is a day ahead."""

    first_year: int = 2000

    def problem(self, name: str, text: str) -> str:
        """Returns what is wrong with the text, called `name`, as a time; "" when nothing is."""
        try:
            moment = datetime.fromisoformat(text)
        except ValueError:
            return f"{name} {shown(text)} is no time"
        if moment.tzinfo is None or moment.year < self.first_year:
            return f"{name} {shown(text)} is no time of a run"
        ahead_s = moment.timestamp() - time.time()
        return f"{name} {shown(text)} is in the future" if ahead_s > 86400 else ""


class Words(tuple[str, ...]):
    """The words to choose from."""

    def problem(self, name: str, word: str) -> str:
        """Returns that the word is none of these; "" when it is one."""
        return "" if word in self else f"{name} must be one of {', '.join(self)}, not {shown(word)}"


_KINDS = {
    int: "a whole number",
    float: "a number",
    str: "text",
    bool: "true or false",
    tuple: "a list of texts, in [ ]",
    dict: "a table",
    list: "a list of tables, as [[ ]] writes one",
}
_GIVEN_AS = {float: (int, float), tuple: (list,)}  # what TOML and JSON hold for a type


def key(
    default: Any, help: str = "", allowed: Bounds | Text | tuple[str, ...] = (), **more: str
) -> Any:
    """Returns the field of a dataclass that holds a user's setting: its default and what --help
    says of it. `allowed` is what `checked` allows for it, or for each text or name in it. `more`
    is what else is stated of it, by name."""
    if type(allowed) is tuple:
        allowed = Words(allowed) if allowed else None
    meta = {"help": help, "allowed": allowed, **more}
    if isinstance(default, dict | list):
        return field(default_factory=type(default), metadata=meta, hash=False)
    return field(default=default, metadata=meta)


@cache
def kind_of(setting: Field) -> type:
    """Returns the type of a setting's value: int of `int | None`, tuple of `tuple[str, ...]`."""
    kind = setting.type
    if get_origin(kind) is UnionType:
        kind = get_args(kind)[0]
    return get_origin(kind) or kind


def checked(setting: Field, value: Any, name: str) -> Any:
    """Returns `value` in the setting's type. A refusal calls the value `name`.

    Raises:
        UsageError: the value is of another type, or not within what the setting allows.
    """
    kind, allowed = kind_of(setting), setting.metadata["allowed"]
    if value is None and setting.default is None:
        return None
    if is_dataclass(kind):
        return value if type(value) is kind else kind(**values_of(kind, value, name))
    if type(value) not in _GIVEN_AS.get(kind, (kind,)):
        raise UsageError(f"{name} must be {_KINDS[kind]}, not {shown(value)}")
    elements = list(value) if kind in (tuple, list, dict) else [value]
    texts = elements if kind in (str, tuple) else []
    if kind is dict and get_args(setting.type):  # dict alone holds anything
        texts = [*elements, *value.values()]
    for text in texts:
        if type(text) is not str or not is_text(text):
            raise UsageError(f"{name}: {shown(text)} must be text in UTF-8 without a zero byte")
    if kind is list and (wrong := [element for element in elements if type(element) is not dict]):
        raise UsageError(f"{name} must be {_KINDS[list]}: {shown(wrong[0])} is no table")
    for element in elements:
        if problem := allowed and allowed.problem(name, element):
            raise UsageError(problem)
    return kind(value)


def values_of(kind: type, table: Any, where: str) -> dict[str, Any]:
    """Returns a table's values in the types of a dataclass's settings. `where` begins a refusal.

    Raises:
        UsageError: it is no table, a key is unknown or missing, or a key cannot have its value.
    """
    if not isinstance(table, dict):
        raise UsageError(f"{where} is no table")
    settings = {f.name: f for f in fields(kind) if f.metadata}
    if unknown := sorted(table.keys() - settings.keys()):
        raise UsageError(f"{where}: unknown {', '.join(unknown)}; known: {', '.join(settings)}")
    needed = [name for name, f in settings.items() if f.default is f.default_factory is MISSING]
    if missing := [name for name in needed if name not in table]:
        raise UsageError(f"{where}: missing {', '.join(missing)}")
    return {key: checked(settings[key], value, f"{where}: {key}") for key, value in table.items()}


def misfit(value: Any, allowed: Any, name: str = "") -> str:
    """Returns "NAME cannot be VALUE" for the first part of a JSON file's value that is not allowed;
    "" where all of it is. `name` is the value's name.

    allowed: a type; Bounds; Text; Moment; Words; a dict of an object's keys, which may be absent or
    null; or [what each item of a list can be]. A text must be printable.
    """
    if isinstance(allowed, dict) and isinstance(value, dict):
        stated = {k: value[k] for k in allowed if value.get(k) is not None}
        parts = ((v, allowed[k], f"{name}.{k}".lstrip(".")) for k, v in stated.items())
    elif isinstance(allowed, list) and isinstance(value, list):
        parts = ((v, allowed[0], f"{name}[{at}]") for at, v in enumerate(value))
    else:
        return "" if _fits(value, allowed) else f"{name} cannot be {shown(value)}"
    return next(filter(None, (misfit(*part) for part in parts)), "")


def _fits(value: Any, allowed: Any) -> bool:
    """Returns whether a value that `misfit` does not take apart is allowed."""
    if isinstance(allowed, type):
        return isinstance(value, allowed) and (allowed is not str or value.isprintable())
    kinds = {Count: (int,), Bounds: (int, float), Text: (str,), Words: (str,), Moment: (str,)}
    return type(value) in kinds.get(type(allowed), ()) and not allowed.problem("", value)


def _plain(value: float) -> str:
    """Returns a number in digits, without an exponent where it is whole; long ones are cut."""
    integral = isinstance(value, float) and value.is_integer() and abs(value) < 1e15
    text = f"{value:.0f}" if integral else str(value)
    return text if len(text) <= 24 else f"{text[:12]}... ({len(text)} digits)"


def check_flags(arguments: argparse.Namespace, **bounds: tuple[float, float] | Bounds) -> None:
    """Checks the numbers of flags. None, the value of a flag that was not given, is skipped.

    Raises:
        UsageError: a number is out of its bounds; the message has the flag, the bounds and it.
    """
    for name, allowed in bounds.items():
        value = getattr(arguments, name, None)
        allowed = allowed if isinstance(allowed, Bounds) else Bounds(*allowed)
        flag = "--" + name.replace("_", "-")
        if value is not None and (problem := allowed.problem(flag, value)):
            raise UsageError(problem)
