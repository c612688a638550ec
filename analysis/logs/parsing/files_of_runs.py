"""Which files are of one run: its output and its errors, those of its ranks and of its attempts.
Names say it; whether ranks take the same time, their steps."""

import os
import re
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import numpy as np

from analysis.logs.parsing.steps import ONE_RUN
from analysis.logs.record import Record, Refusal

# A name of errors -> that of the output beside it: Slurm's, PBS's, and by its words.
_ERRORS = {
    re.compile(r"(?i)\.err\Z"): ".out",
    re.compile(r"(?i)\.e(?=\d{1,12}\Z)"): ".o",
    re.compile(r"(?i)(?<![a-z])stderr(?![a-z])"): "stdout",
}
_NODE = re.compile(r"(?i)(?<![a-z])node[-_]?\d{1,6}(?=[-_.]{0,2}rank)")
_RANK = re.compile(r"(?i)(?<![a-z])(?:global[-_]?)?rank[-_]?(\d{1,6})")
_ATTEMPT = re.compile(r"(?i)(?<![a-z])(?:attempt|restart|retry)[-_]?(\d{1,4})")
_TORCHRUN = re.compile(r"/attempt_(\d{1,4})/(\d{1,6})/std(?:out|err)\.log\Z")
_SHOWN = 3  # names of files
Outcome = list[Record] | Refusal


class LogFile(NamedTuple):
    """A file of a run. run: what the names of all of its files share. rank: None where its name has
    none."""

    path: Path
    run: str
    attempt: int = 0
    rank: int | None = None
    is_errors: bool = False


def group_by_run(paths: list[Path]) -> list[list[LogFile]]:
    """Returns the files of each run, in the order of their first ones; of a run, its last attempt,
    its first rank and its output stand first.

    Files of ranks are one run's where rank 0 is among them; `lora_rank8.log` is of no such rank.
    """
    names = set(map(str, paths))
    runs: dict[str, list[LogFile]] = defaultdict(list)
    for file in (_placed(path, names) for path in paths):
        runs[file.run].append(file)
    groups = []
    for files in runs.values():
        files = sorted(files, key=lambda file: (-file.attempt, file.rank or 0, file.is_errors))
        is_run = {file.rank for file in files} & {None, 0}
        groups += [files] if is_run else [[file] for file in files]
    return groups


def _placed(path: Path, names: set[str]) -> LogFile:
    """Returns of which run, attempt and rank a file is. names: the paths of all files."""
    text = str(path)
    if os.path.isdir(path):
        return LogFile(path, text)
    if match := _TORCHRUN.search(text):
        return LogFile(path, text[: match.start()], int(match[1]), int(match[2]), "err" in match[0])
    name, is_errors = path.name, False
    for pattern, output in _ERRORS.items():
        if pattern.search(name):
            name, is_errors = pattern.sub(output, name), True
            log = path.with_name(name).with_suffix(".log")
            if output == ".out" and str(log) in names:
                name = log.name
    rank, attempt = _RANK.search(name), _ATTEMPT.search(name)
    for pattern, word in ((_NODE, "node"), (_RANK, "rank"), (_ATTEMPT, "attempt")):
        name = pattern.sub(word, name)
    run = str(path.with_name(name))
    numbers = int(attempt[1]) if attempt else 0, int(rank[1]) if rank else None
    return LogFile(path, run, *numbers, is_errors)


def read_files(files: list[LogFile], read: Callable[[Path, list[Path]], Outcome]) -> list[Outcome]:
    """Returns what the files of a run hold: the runs of the first one with steps, or why there are
    none. read: reads a file, with others beside it that state facts and an end.

    Where ranks take other times than the others, each file is of a run of its own.
    """
    beside = [[f.path for f in files if f.attempt == file.attempt and f != file] for file in files]
    outcomes = [read(files[0].path, beside[0]), *(read(file.path, []) for file in files[1:])]
    if len(files) == 1:
        return outcomes
    chosen = [i for i, outcome in enumerate(outcomes) if _has_steps(outcome)]
    times = [_median_s(outcomes[i]) for i in chosen if files[i].attempt == files[chosen[0]].attempt]
    if times and max(times) > ONE_RUN * min(times):
        return [read(files[0].path, []), *outcomes[1:]]
    chosen += [i for i, outcome in enumerate(outcomes) if not isinstance(outcome, Refusal)]
    if not chosen:
        return outcomes
    main = chosen[0]
    outcome = read(files[main].path, beside[main]) if main else outcomes[0]
    if isinstance(outcome, Refusal):
        return [outcome]
    return [_with_note(outcome, files[main], files)]


def _has_steps(outcome: Outcome) -> bool:
    runs = [] if isinstance(outcome, Refusal) else outcome
    return any(len(record.steps) or record.whole_run for record in runs)


def _median_s(outcome: list[Record]) -> float:
    """Returns the median of a file's step times, seconds; 1 where it has none."""
    times = np.concatenate([record.steps["step_s"] for record in outcome])
    return float(np.nanmedian(times)) if np.isfinite(times).any() else 1.0


def one_run_with(file: Path, others: list[Path]) -> str:
    """Returns the words that name the other files of a run beside the one that is read."""
    names = [os.path.relpath(other, file.parent) for other in others]
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return f"one run with {', '.join(names[:_SHOWN])}{more}"


def _with_note(runs: list[Record], file: LogFile, files: list[LogFile]) -> list[Record]:
    """Returns the runs of the file that is read, each with a note that names the run's others."""
    words = one_run_with(file.path, [other.path for other in files if other != file])
    attempts = sorted({f.attempt for f in files})
    for record in runs:
        record.note(words)
        if _TORCHRUN.search(str(file.path)):
            record.run = Path(file.run).name
        if len(attempts) > 1:
            numbers = f"attempts {', '.join(map(str, attempts))}, each in files of its own"
            record.doubt("attempts", f"{numbers}: {file.attempt} is read")
    return runs
