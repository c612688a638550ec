"""Logs in, records out: the one door to every reader.

`read` tells a file's format from its content, never from its name, and hands it to the one reader
that fits; `read_all` does so for whole folders, on several cores, and reports what it refused.
One module reads one format. Each has

    FORMAT   the name that records and tables show
    MARKS    byte strings; a file that holds one may hold this format's iterations
    BANNERS  (optional) byte strings that name the tool even where no iteration was printed
    read     Log -> Record, whose arrays are empty when the marks stood in something else

Formats are asked in `_FORMATS`' order: one that embeds another's lines comes before it.
"""

import importlib
import os
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

from analysis.readers import run_folder
from analysis.readers._log import Log
from analysis.readers._settings import complete_from_elsewhere
from analysis.records import Record, Refusal
from models.errors import UsageError

_FORMATS: tuple[str, ...] = ()

# In a folder, only these are taken for logs; a file named outright is always tried.
_LOG_SUFFIXES = (".out", ".log", ".err", ".txt", ".json", ".jsonl")
_NOT_LOGS = ("run.json", "status.json")


def read(path: Path | str, flags: dict[str, Any] | None = None) -> Record:
    """The run that one log file or run folder holds.

    `flags` are Record's field names with the values to use where the log is silent.

    Raises:
        Refusal: missing, unreadable, empty, or no format that is known; it says which.
    """
    path = Path(path)
    if path.is_dir():
        try:
            record = run_folder.read(path)
        except UsageError as error:
            raise Refusal(str(path), str(error)) from error
    else:
        with Log(path) as log:
            record = _read_log(log)
    complete_from_elsewhere(record, path, flags or {})
    return record


def _read_log(log: Log) -> Record:
    failed = None
    for reader in _candidates(log):
        record = reader.read(log)
        if len(record.iteration) or record.extra.get("whole_run"):
            return record
        failed = failed or record
    raise Refusal(str(log.path), "no format that is known: no iteration line of any reader")


def _candidates(log: Log) -> Iterator[ModuleType]:
    return iter(())


def find_logs(paths: Iterable[Path | str]) -> tuple[list[Path], list[Refusal]]:
    """The run folders and log files at or below each path, in name order, and what is wrong."""
    found: list[Path] = []
    refused: list[Refusal] = []
    for path in map(Path, paths):
        if not path.is_dir():
            found.append(path)
            continue
        below = list(_below(path))
        if not below:
            refused.append(Refusal(str(path), "no logs in this folder"))
        found += below
    return list(dict.fromkeys(found)), refused


def _below(folder: Path) -> Iterator[Path]:
    if (folder / "run.json").is_file():
        yield folder
        return
    try:
        entries = sorted(folder.iterdir())
    except OSError:
        yield folder  # reading it will say why it cannot be read
        return
    for entry in entries:
        if entry.name.startswith(".") or entry.name in _NOT_LOGS:
            continue
        if entry.is_dir():
            yield from _below(entry)
        elif _looks_like_log(entry):
            yield entry


def _looks_like_log(path: Path) -> bool:
    name = path.name.lower()
    scheduler = path.suffix[1:2] in ("o", "e") and path.suffix[2:].isdigit()  # PBS: name.o123
    return path.suffix in _LOG_SUFFIXES or scheduler or ".out" in name or ".log" in name


def read_all(
    paths: Iterable[Path | str],
    flags: dict[str, Any] | None = None,
    jobs: int | None = None,
    progress: bool | None = None,
) -> tuple[list[Record], list[Refusal]]:
    """Every run at or below `paths`, in the order of `find_logs`, and what was refused.

    jobs: processes; None takes the cores at hand where there is enough to read. progress: a bar
    on a terminal, a line now and then elsewhere; None shows it when there are many files.
    """
    logs, refused = find_logs(paths)
    done: Iterable[Record | Refusal] = (_attempt(path, flags) for path in logs)
    records = []
    for outcome in done:
        (refused if isinstance(outcome, Refusal) else records).append(outcome)
    return records, refused


def _attempt(path: Path, flags: dict[str, Any] | None) -> Record | Refusal:
    try:
        return read(path, flags)
    except Refusal as refusal:
        return refusal
