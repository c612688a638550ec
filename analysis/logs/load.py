"""From paths to records, for every command."""

import os
import re
import traceback
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any

from analysis.logs.copies import note_same_evidence, without_copies
from analysis.logs.naming import tell_apart
from analysis.logs.parsing.files_of_runs import LogFile, Outcome, group_by_run, read_files
from analysis.logs.parsing.packed import STDIN
from analysis.logs.rank_files import join_ranks
from analysis.logs.record import Record, Refusal
from base.errors import Reading, UsageError
from base.files import below
from parallel.record.reader import find_runs, has_run, is_run_folder

# Of a folder, only these are taken for logs (PBS: name.o123); a file named outright is tried.
_LOGS = re.compile(r"(?i:\.out|\.log)|\.(?:err|txt|jsonl?|[oe]\d+)\Z")
_NOT_LOGS = ("run.json", "config.json", "status.json", "launcher_metadata.json")
_MANY = 32  # files; fewer are read in this process, without a bar


def load(paths: list[Path], facts: dict[str, Any] | None = None) -> Reading[list[Record]]:
    """Returns every run at or below the paths, and one line for each path that was refused.

    facts: values, by Record's names, that are used where a log is silent.

    Raises:
        UsageError: nothing at all could be read.
    """
    records, refusals = read_all(paths, facts)
    records = join_ranks(without_copies(records, {str(path) for path in paths}))
    note_same_evidence(records)
    tell_apart(records)
    refused = [str(refusal) for refusal in refusals]
    if not records:
        raise UsageError("; ".join(refused) or "nothing to read")
    return Reading(records, refused)


def load_own(paths: list[Path], is_run: Callable[[Path], bool] = has_run) -> Reading[list[Record]]:
    """Returns every run folder at or below the paths, and one line for each that cannot be read.

    is_run: `is_run_folder` takes also jobs that have not begun a run.

    Raises:
        UsageError: no folder could be read.
    """
    from analysis.logs.readers import run_folder  # slow to load: not for --help

    records, refused = [], []
    for folder in find_runs(paths, is_run, refused):
        try:
            records.append(run_folder.read(folder))
        except UsageError as error:  # the others are still reported
            refused.append(str(error))
    if not records:
        raise UsageError("; ".join(refused))
    tell_apart(records)
    return Reading(records, refused)


def load_with_ranks(paths: list[Path]) -> Reading[list[Record]]:
    """Returns the run folders at or below the paths; where one of these is a log, or holds no run
    folder, the logs, too."""
    return load(paths) if any(map(is_log, paths)) else load_own(paths)


def is_log(path: Path) -> bool:
    """Tells whether a path is a log, or a folder with no run folder below it."""
    places = below(path, is_run_folder, "attempts".__eq__)
    return str(path) == "-" or (path.exists() and not any(place.is_dir() for place, _ in places))


def find_logs(paths: Iterable[Path | str]) -> Reading[list[Path]]:
    """Returns the run folders and log files at or below each path, in name order, and what was
    refused.

    `-` is standard input.
    """
    from analysis.logs.parsing.mlperf_tree import is_result  # slow to load: not for --help

    logs: list[Path] = []
    refused: list[Refusal] = []
    for path in (STDIN if str(path) == "-" else Path(path) for path in paths):
        files = []
        for place, reason in below(
            path, is_run_folder, lambda name: name[0] == "." or name in _NOT_LOGS
        ):
            if reason:
                refused.append(Refusal(str(place), reason))
            elif place == path or place.is_dir() or _LOGS.search(place.name):
                files.append(place)
        if results := [place for place in files if is_result(place)]:
            extras = {place for place in files if {"systems", "power"} & set(place.parts)}
            if n_others := len(set(files) - extras - set(results)):
                reason = f"{n_others} files that are no MLPerf results are not read: name them"
                refused.append(Refusal(str(path), f"{reason} to read them"))
            files = results
        if not files and not (refused and refused[-1].source == str(path)):
            refused.append(Refusal(str(path), "no logs in this folder"))
        logs += files
    return Reading(list(dict.fromkeys(logs)), refused)


def read_all(
    paths: Iterable[Path | str], flags: dict[str, Any] | None = None, jobs: int | None = None
) -> Reading[list[Record]]:
    """Returns every run at or below `paths`, in the order of `find_logs`, and what was refused.
    Several files of one run are one run.

    jobs: processes; None takes the cores at hand where there is enough to read, with a bar on a
    terminal.
    """
    logs, refused = find_logs(paths)
    groups = group_by_run(logs)
    read_one = partial(_attempt, flags=flags)
    many = len(groups) >= _MANY and STDIN not in logs  # another process has another standard input
    jobs = jobs or (len(os.sched_getaffinity(0)) if many else 1)
    if jobs == 1:
        read_groups = list(map(read_one, groups))
    else:
        from tqdm.contrib.concurrent import process_map  # slow to load, seldom needed

        chunk = max(1, min(16, len(groups) // (4 * jobs)))
        bar = {"desc": "reading", "unit": "file", "disable": None}
        read_groups = process_map(read_one, groups, max_workers=jobs, chunksize=chunk, **bar)
    outcomes = [outcome for of_group in read_groups for outcome in of_group]
    refused += [outcome for outcome in outcomes if isinstance(outcome, Refusal)]
    runs = [outcome for outcome in outcomes if not isinstance(outcome, Refusal)]
    return Reading([record for records in runs for record in records], refused)


def _attempt(files: list[LogFile], flags: dict[str, Any] | None) -> list[Outcome]:
    """Returns the runs of each file, or why it cannot be read."""
    return read_files(files, partial(_attempt_file, flags=flags))


def _attempt_file(path: Path, beside: list[Path], flags: dict[str, Any] | None) -> Outcome:
    """Returns the runs of one log, or why it cannot be read. It raises nothing, so that one bad
    file does not stop the others."""
    from analysis.logs.readers import read_file  # slow to load: not for --help

    try:
        return read_file(path, flags, beside)
    except Refusal as refusal:
        return refusal
    except Exception as error:  # the other files are still shown, and this one is named
        frame = traceback.extract_tb(error.__traceback__)[-1]
        message = " ".join(f"{type(error).__name__}: {error}".split())[:200]
        reason = f"a defect of the reader, not of the file; please report it: {message}"
        return Refusal(str(path), f"{reason} ({Path(frame.filename).name}:{frame.lineno})")
