"""From paths to records, for every command, and what a table calls each run."""

import hashlib
import os
import re
import traceback
from collections import Counter, defaultdict
from collections.abc import Iterable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from analysis.logs.parsing.packed import STDIN
from analysis.logs.record import Record, Refusal
from base.errors import Reading, UsageError, printable
from base.files import below
from parallel.record.reader import is_run_folder

# Of a folder, only these are taken for logs (PBS: name.o123); a file named outright is tried.
_LOGS = re.compile(r"(?i:\.out|\.log)|\.(?:err|txt|jsonl?|[oe]\d+)\Z")
_NOT_LOGS = ("run.json", "config.json", "status.json", "launcher_metadata.json")
_MANY = 32  # files; fewer are read in this process, without a bar


def load(paths: list[Path], facts: dict[str, Any] | None = None) -> Reading[list[Record]]:
    """Every run at or below the paths, and one line for each thing that was refused.

    facts: values, by Record's names, that are used where a log is silent.

    Raises:
        UsageError: nothing at all could be read.
    """
    records, refusals = read_all(paths, facts)
    _find_copies(records)
    tell_apart(records)
    refused = [str(refusal) for refusal in refusals]
    if not records:
        raise UsageError("; ".join(refused) or "nothing to read")
    return Reading(records, refused)


def _find_copies(records: list[Record]) -> None:
    """Note which runs have the evidence of another: the same measurements, or the same bytes."""
    sizes = {r.source: os.path.getsize(r.source) for r in records if os.path.isfile(r.source)}
    often = Counter(sizes.values())
    first: dict[str, str] = {}  # a hash of the evidence -> the source that has it
    for record in records:
        digest = record.evidence
        if not digest and often[sizes.get(record.source, -1)] > 1:
            with open(record.source, "rb") as file:
                digest = hashlib.file_digest(file, "sha256").hexdigest()
        if digest and first.setdefault(digest, record.source) != record.source:
            record.copy_of = first[digest]
            record.notes.append(f"the same evidence as {record.copy_of} (SHA-256 {digest[:12]})")


class Name(NamedTuple):
    """What a run is called: in tables, by itself, and where it lies; which repeat of which
    configuration it is; the system of an MLPerf result."""

    shown: str
    own: str
    path: Path
    configuration: str | None = None
    repeat: int | None = None
    system: str | None = None

    def answers_to(self, wanted: str) -> bool:
        """Whether the name, the path or its last part is the run's."""
        same = os.path.abspath(wanted) == os.path.abspath(self.path)
        return same or wanted in (self.shown, self.own, self.path.name)


def own_name(record: Record) -> str:
    """What the run calls itself, or the file's name."""
    return record.run or Path(record.source).name


def name_of(record: Record) -> str:
    """What a table calls the run: its own name, with folders where others have that name, too."""
    return record.shown or own_name(record)


def tell_apart(records: list[Record]) -> None:
    """Gives each record the name that tables call it."""
    names = distinct([own_name(r) for r in records], [Path(r.source) for r in records])
    for record, name in zip(records, names, strict=True):
        record.shown = printable(name)  # a file may have a name that is no UTF-8


def distinct(names: list[str], paths: list[Path]) -> list[str]:
    """Each run's name, or, where several have it, the end of its path that tells them apart."""
    groups: dict[str, list[int]] = defaultdict(list)
    for i, name in enumerate(names):
        groups[name].append(i)
    shown = list(names)
    for name, members in groups.items():
        parts = {i: Path(os.path.abspath(paths[i])).parts for i in members}
        depth, tails = 0, dict.fromkeys(members, "")
        while len(set(tails.values())) < len(members) and depth < max(map(len, parts.values())):
            depth += 1
            tails = {i: "/".join(parts[i][-depth:]) for i in members}
        for i, tail in tails.items() if depth else ():
            shown[i] = tail if tail.endswith("/" + name) else f"{name} ({tail})"
    return shown


def _fits(wanted: str, names: list[Name]) -> list[int]:
    """Which runs `--baseline wanted` may mean: a run by its name or its path; or a configuration,
    or the system of MLPerf results, which is its first repeat, as in a study. A ratio's sides are
    of all repeats all the same."""
    fits = [i for i, name in enumerate(names) if name.answers_to(wanted)]
    exact = [i for i in fits if names[i].shown == wanted]
    if fits:
        return exact if len(exact) == 1 else fits
    repeats = {
        i: n.repeat or 0 for i, n in enumerate(names) if wanted in (n.configuration, n.system)
    }
    return [i for i, repeat in repeats.items() if repeat == min(repeats.values())]


def chosen(wanted: str, names: list[Name]) -> int:
    """Which run `--baseline wanted` means.

    Raises:
        UsageError: none or several, with the names to choose from.
    """
    fits = _fits(wanted, names)
    if len(fits) == 1:
        return fits[0]
    known = ", ".join(names[i].shown for i in fits or range(len(names)))
    if not fits:
        raise UsageError(f"no run called {wanted!r}; there are: {known}")
    raise UsageError(f"--baseline {wanted} fits {len(fits)} runs: {known}; name one of these")


def baseline_of(wanted: str, records: list[Record]) -> Record:
    """The one record that `--baseline wanted` means.

    Raises:
        UsageError: none or several, with the names to choose from.
    """
    return records[chosen(wanted, _names(records))]


def has_baseline(wanted: str, records: list[Record]) -> bool:
    """Whether `baseline_of` means a run, or cannot choose between some."""
    return bool(_fits(wanted, _names(records)))


def _names(records: list[Record]) -> list[Name]:
    return [
        Name(
            name_of(r),
            own_name(r),
            Path(r.source),
            r.configuration,
            r.repeat,
            r.submission and r.submission.system,
        )
        for r in records
    ]


def find_logs(paths: Iterable[Path | str]) -> Reading[list[Path]]:
    """The run folders and log files at or below each path, in name order, and what is wrong.

    `-` is standard input.
    """
    from analysis.logs.parsing.mlperf_tree import is_result  # slow to load: not for --help

    logs: list[Path] = []
    refused: list[Refusal] = []
    for path in (STDIN if str(path) == "-" else Path(path) for path in paths):
        here = []
        for place, why in below(
            path, is_run_folder, lambda name: name[0] == "." or name in _NOT_LOGS
        ):
            if why:
                refused.append(Refusal(str(place), why))
            elif place == path or place.is_dir() or _LOGS.search(place.name):
                here.append(place)
        if results := [place for place in here if is_result(place)]:
            around = {place for place in here if {"systems", "power"} & set(place.parts)}
            if others := len(set(here) - around - set(results)):
                why = f"{others} files that are no MLPerf results are not read: name them"
                refused.append(Refusal(str(path), f"{why} to read them"))
            here = results
        if not here and not (refused and refused[-1].source == str(path)):
            refused.append(Refusal(str(path), "no logs in this folder"))
        logs += here
    return Reading(list(dict.fromkeys(logs)), refused)


def read_all(
    paths: Iterable[Path | str], flags: dict[str, Any] | None = None, jobs: int | None = None
) -> Reading[list[Record]]:
    """Every run at or below `paths`, in the order of `find_logs`, and what was refused.

    jobs: processes; None takes the cores at hand where there is enough to read, with a bar on a
    terminal.
    """
    logs, refused = find_logs(paths)
    read_one = partial(_attempt, flags=flags)
    many = len(logs) >= _MANY and STDIN not in logs  # another process has another standard input
    jobs = jobs or (len(os.sched_getaffinity(0)) if many else 1)
    if jobs == 1:
        outcomes = list(map(read_one, logs))
    else:
        from tqdm.contrib.concurrent import process_map  # slow to load, seldom needed

        chunk = max(1, min(16, len(logs) // (4 * jobs)))
        bar = {"desc": "reading", "unit": "file", "disable": None}
        outcomes = process_map(read_one, logs, max_workers=jobs, chunksize=chunk, **bar)
    refused += [outcome for outcome in outcomes if isinstance(outcome, Refusal)]
    return Reading([outcome for outcome in outcomes if isinstance(outcome, Record)], refused)


def _attempt(path: Path, flags: dict[str, Any] | None) -> Record | Refusal:
    from analysis.logs.readers import read  # slow to load: not for --help

    try:
        return read(path, flags)
    except Refusal as refusal:
        return refusal
    except Exception as error:  # the other files are still shown, and this one is named
        where = traceback.extract_tb(error.__traceback__)[-1]
        what = " ".join(f"{type(error).__name__}: {error}".split())[:200]
        reason = f"a defect of the reader, not of the file; please report it: {what}"
        return Refusal(str(path), f"{reason} ({Path(where.filename).name}:{where.lineno})")
