"""Logs in, records out: the one door to every reader.

`read` tells a file's format from its content, never from its name, and hands it to the one reader
that fits; `read_all` does so for whole folders, on several cores, and reports what it refused.
One module reads one format. Each has

    FORMAT   the name that records and tables show
    MARKS    tuples of byte strings; a file with all of one tuple may hold its iterations
    EMBEDDED (optional) True where other formats' logs hold its lines too
    BANNERS  (optional) byte strings that name the tool even where no iteration was printed
    read     Log -> Record, whose arrays are empty when the marks stood in something else

Formats are asked in `_FORMATS`' order: one that embeds another's lines comes before it.
"""

import contextlib
import importlib
import os
import sys
import time
import traceback
from collections.abc import Iterable, Iterator
from functools import cache, partial
from pathlib import Path
from types import ModuleType
from typing import Any

from analysis.readers import run_folder
from analysis.readers._endings import judge_end
from analysis.readers._evidence import is_of_a_run, is_source
from analysis.readers._log import Log
from analysis.readers._rates import judge_rates
from analysis.readers._settings import complete_from_elsewhere, header_of, read_header
from analysis.records import Record, Refusal
from models.errors import UsageError
from models.files import below
from parallel.artifacts import is_run_folder

_FORMATS = (
    "nanotron",
    "megatron",
    "torchtitan",
    "modded_nanogpt",
    "nanochat",
    "nanogpt",
    "llmc",
    "picotron",
    "training_metrics",
    "megatron_golden",
    "nemo",
    "mlperf",
    "fairseq",
    "nsys",
    "rank_epochs",
    "deepspeed",
    "hf_trainer",
)
UNKNOWN = "unknown"

# In a folder, only these are taken for logs; a file named outright is always tried.
_LOG_SUFFIXES = (".out", ".log", ".err", ".txt", ".json", ".jsonl")
_NOT_LOGS = ("run.json", "status.json", "launcher_metadata.json", "scaling_report.json")


def read(path: Path | str, flags: dict[str, Any] | None = None) -> Record:
    """The run that one log file or run folder holds.

    `flags` are Record's field names with the values to use where the log is silent.

    Raises:
        Refusal: missing, unreadable, empty, or no format that is known; it says which.
    """
    path = Path(path)
    if os.path.isdir(path):
        try:
            record = run_folder.read(path)
        except UsageError as error:
            raise Refusal(str(path), str(error)) from error
    else:
        with Log(path) as log:
            record = _read_log(log)
    complete_from_elsewhere(record, path, flags or {})
    judge_rates(record)
    return record


def _read_log(log: Log) -> Record:
    if is_source(log):
        suffix = log.path.suffix
        reason = f"{suffix} is code or a page by its name, which may quote a log but is none"
        raise Refusal(str(log.path), f"{reason}; copy a log to a name in .log or .txt")
    tried = []
    for reader in _candidates(log):
        record = reader.read(log)
        if len(record.iteration) or record.extra.get("whole_run"):
            return record
        if not getattr(reader, "EMBEDDED", False):
            tried.append(record)
    if not tried:
        reader = _by_banner(log)
        name = reader.FORMAT if reader else UNKNOWN
        if reader and hasattr(reader, "dialect"):
            name = reader.dialect(header_of(log, None), b"")
        tried = [Record(source=str(log.path), format=name)]
        judge_end(tried[0], log, [])
    # A run that died before its first iteration is a run: its failure is what it shows.
    failed = next((record for record in tried if record.failure), None)
    if failed and not is_of_a_run(log):
        failed = None
    if failed and failed.format != UNKNOWN:
        read_header(failed, header_of(log, None))
    if failed:
        return failed
    raise Refusal(str(log.path), _why_not(log, tried))


def _candidates(log: Log) -> Iterator[ModuleType]:
    """The readers whose marks the log holds: by its ends first, then by all of it."""
    seen = set()
    sample = log.head + log.tail
    for whole in (False, True):
        for reader in _readers():
            if reader in seen:
                continue
            if whole:
                marked = any(all(log.contains(m) for m in marks) for marks in reader.MARKS)
            else:
                marked = any(all(m in sample for m in marks) for marks in reader.MARKS)
                if marked and getattr(reader, "EMBEDDED", False):
                    break  # its lines stand in other formats' logs too: look at all of it
            if marked:
                seen.add(reader)
                yield reader


@cache
def _readers() -> tuple[ModuleType, ...]:
    return tuple(importlib.import_module(f"analysis.readers.{name}") for name in _FORMATS)


def _by_banner(log: Log) -> ModuleType | None:
    """The format whose tool says its name in a log without iterations."""
    for reader in _readers():
        if any(log.contains(banner) for banner in getattr(reader, "BANNERS", ())):
            return reader
    return None


def _why_not(log: Log, tried: list[Record]) -> str:
    names = ", ".join(dict.fromkeys(r.format for r in tried if r.format != UNKNOWN))
    if names:
        return f"looks like {names}, but holds no iteration that could be read"
    if b"it/s" in log.tail or b"s/it" in log.tail:
        return "no format that is known: only progress bars, which print running rates"
    return "no format that is known: no reader's iteration line stands in it"


def find_logs(paths: Iterable[Path | str]) -> tuple[list[Path], list[Refusal]]:
    """The run folders and log files at or below each path, in name order, and what is wrong."""
    found: list[Path] = []
    refused: list[Refusal] = []
    for path in map(Path, paths):
        here = []
        for place, why in below(path, is_run_folder, _is_no_log):
            if why:
                refused.append(Refusal(str(place), why))
            elif place == path or place.is_dir() or _looks_like_log(place):
                here.append(place)
        if not here and not (refused and refused[-1].source == str(path)):
            refused.append(Refusal(str(path), "no logs in this folder"))
        found += here
    return list(dict.fromkeys(found)), refused


def _is_no_log(name: str) -> bool:
    return name.startswith(".") or name in _NOT_LOGS


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
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    jobs = jobs or (cores if len(logs) >= _MANY else 1)
    progress = len(logs) >= _MANY if progress is None else progress
    one = partial(_attempt, flags=flags)
    records = []
    with contextlib.ExitStack() as stack:
        outcomes: Iterable[Record | Refusal] = map(one, logs)
        if jobs > 1:
            from concurrent.futures import ProcessPoolExecutor  # slow to load, seldom needed

            pool = stack.enter_context(ProcessPoolExecutor(jobs))
            outcomes = pool.map(one, logs, chunksize=max(1, min(16, len(logs) // (4 * jobs))))
        for outcome in _shown(outcomes, len(logs)) if progress else outcomes:
            (refused if isinstance(outcome, Refusal) else records).append(outcome)
    return records, refused


_MANY = 32  # files; fewer are read in this process, without a bar


def _shown(outcomes: Iterable[Any], total: int) -> Iterator[Any]:
    """Pass `outcomes` on and say on stderr how far they are."""
    if sys.stderr.isatty():
        from tqdm import tqdm

        yield from tqdm(outcomes, total=total, unit="file", desc="reading")
        return
    said = time.monotonic()
    for n, outcome in enumerate(outcomes, 1):
        if time.monotonic() - said > 2 or n == total:
            said = time.monotonic()
            print(f"read {n} of {total} files", file=sys.stderr, flush=True)
        yield outcome


def _attempt(path: Path, flags: dict[str, Any] | None) -> Record | Refusal:
    try:
        return read(path, flags)
    except Refusal as refusal:
        return refusal
    except Exception as error:  # the other files are still shown, and this one is named
        where = traceback.extract_tb(error.__traceback__)[-1]
        what = " ".join(f"{type(error).__name__}: {error}".split())[:200]
        reason = f"a defect of the reader, not of the file; please report it: {what}"
        return Refusal(str(path), f"{reason} ({Path(where.filename).name}:{where.lineno})")
