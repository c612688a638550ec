"""The parts of a run's steps, on each rank: of torchtitan's files of one run, of our own runs with
`--breakdown`, and of logs that print parts of a step."""

import os
from collections import defaultdict
from itertools import count
from pathlib import Path

import numpy as np

from analysis.logs.parsing.files_of_runs import one_run_with
from analysis.logs.parsing.steps import ONE_RUN
from analysis.logs.record import Record
from analysis.logs.step_time import step_times
from parallel.measure.slow_steps import PartTimes
from parallel.record.reader import read_breakdown
from parallel.record.schema import CATEGORIES, EXPERT_MESSAGE_AXES, MESSAGE_AXES

_KINDS = ("attempts", "restart", "ranks", "steps", "numbers")  # doubts of what was read
_FOLDER = "structured_logs"  # below the folder that torchtitan writes a run to


def join_ranks(records: list[Record]) -> list[Record]:
    """Returns the records with those of one run's ranks as one: files of one folder. Where it was
    started several times, that is the last start. Its console log, where the folder above has it
    alone, is that run, too, and gets the parts of its steps."""
    folders: dict[str, list[Record]] = defaultdict(list)
    others = []
    for record in records:
        if record.parts:
            folders[os.path.dirname(os.path.abspath(record.source))].append(record)
        else:
            others.append(record)
    for folder, files in folders.items():
        record = _last_start(files)
        dump = folder.removesuffix(f"/{_FOLDER}")
        consoles = [other for other in others if _is_console(other, dump, record)]
        if dump != folder and len(consoles) == 1:
            (console,) = consoles
            console.parts = record.parts
            console.note(f"one run with {_FOLDER}: the parts of its steps")
            continue
        if len(files) > 1:
            record.run = os.path.basename(dump)
        others.append(record)
    return others


def _last_start(files: list[Record]) -> Record:
    """Returns the record of the last start: of the files that were written at one time, each by
    another rank."""
    starts: list[list[Record]] = []
    for file in sorted(files, key=lambda file: file.parts.began_s):
        last = starts[-1] if starts else []
        ranks = {other.parts.ranks for other in last}
        ended_s = max((other.parts.ended_s for other in last), default=0.0)
        if not last or file.parts.ranks in ranks or file.parts.began_s > ended_s:
            starts.append([file])
        else:
            last.append(file)
    members = sorted(starts[-1], key=lambda file: file.parts.ranks[0] or 0)
    record = members[0]
    if len(members) > 1:
        record.note(one_run_with(Path(record.source), [Path(file.source) for file in members[1:]]))
        _join(record, members)
    if len(starts) > 1:
        numbers = f"iterations {record.parts.iteration[0]:.0f} to {record.parts.iteration[-1]:.0f}"
        words = f"{len(starts)} starts in one folder: the last one, {numbers}, is read"
        record.doubt("attempts", words)
    ranks = {rank for rank in record.parts.ranks if rank is not None}
    if n_missing := max(ranks, default=-1) + 1 - len(ranks):
        first = next(rank for rank in count() if rank not in ranks)
        record.doubt(
            "ranks", f"no file of {n_missing} of {max(ranks) + 1} ranks, as of rank {first}"
        )
    return record


def _join(record: Record, members: list[Record]) -> None:
    """Gives the record the steps that all ranks have, each as long as its slowest rank's."""
    times = [file.parts for file in members]
    iteration = times[0].iteration
    for other in times[1:]:
        iteration = np.intersect1d(iteration, other.iteration)
    if not len(iteration):
        record.doubt("steps", f"the files of {len(members)} ranks share no step: the first is read")
        return
    shared = [np.searchsorted(of_rank.iteration, iteration) for of_rank in times]

    def stacked(part: str | None) -> np.ndarray:
        """Returns the seconds of a part, or of the whole step, (ranks, steps)."""
        rows = [of_rank.parts.get(part) if part else of_rank.step_s for of_rank in times]
        nothing = np.zeros((1, len(iteration)))
        pairs = zip(rows, shared, strict=True)
        return np.concatenate([nothing if row is None else row[:, at] for row, at in pairs])

    record.parts = PartTimes(
        iteration,
        stacked(None),
        {name: stacked(name) for name in dict.fromkeys(n for t in times for n in t.parts)},
        tuple(rank for of_rank in times for rank in of_rank.ranks),
        tuple(node for of_rank in times for node in of_rank.nodes),
        began_s=min(of_rank.began_s for of_rank in times),
        ended_s=max(of_rank.ended_s for of_rank in times),
    )
    pairs = zip(members, shared, strict=True)
    slowest_s = np.max([file.steps["step_s"][at] for file, at in pairs], axis=0)
    record.steps = record.steps[shared[0]]
    record.steps["step_s"] = slowest_s


def _is_console(record: Record, dump: str, spans: Record) -> bool:
    """Returns whether a record is of the console log of the run with these spans: its file is in
    the run's folder, its steps are among them and take as long."""
    if record.format != "torchtitan" or not os.path.abspath(record.source).startswith(f"{dump}/"):
        return False
    if not len(record.steps) or not np.isin(record.steps["iteration"], spans.parts.iteration).all():
        return False
    times, spans_s = step_times(record), np.median(spans.steps["step_s"])
    return not len(times) or 1 / ONE_RUN < np.nanmedian(times) / spans_s < ONE_RUN


def doubts_of_parts(record: Record) -> list[str]:
    """Returns what a view of a run's parts must say of the files that they are from."""
    return [text for kind, text in record.doubts.items() if kind in _KINDS]


def parts_of(record: Record) -> PartTimes | None:
    """Returns the parts of a run's steps: of each rank, or of the one process that printed them;
    None where there are none."""
    if record.parts:
        return record.parts
    if record.own:
        return _of_breakdown(record.own.path)
    step_s, parts = step_times(record), record.printed_parts
    parts = {name: values[None] for name, values in parts.items() if np.isfinite(values).any()}
    if not parts or not len(step_s) or record.epochs:
        return None
    is_whole = np.isfinite(step_s) & np.isfinite(np.concatenate([*parts.values()])).all(axis=0)
    parts = {name: values[:, is_whole] for name, values in parts.items()}
    iteration = record.steps["iteration"][is_whole]
    return PartTimes(iteration, step_s[None, is_whole], parts, interval=record.interval)


def _of_breakdown(path: Path) -> PartTimes | None:
    """Returns the parts that each rank of ours wrote, per step of a window; None without a file of
    each rank that wrote one."""
    world_size = len(list((path / "breakdown").glob("rank*.csv")))
    ranks, _ = read_breakdown(path, world_size)
    if not ranks:
        return None
    by_step = [{row["last_step"]: row for row in windows} for windows in ranks.values()]
    shared = sorted(set.intersection(*map(set, by_step)))
    rows = [[windows[last] for last in shared] for windows in by_step]

    def seconds(name: str) -> np.ndarray:
        """Returns what a column says of each rank and window, per step."""
        return np.array(
            [
                [
                    row.get(f"{name}_s", 0.0) / (row["last_step"] - row["first_step"] + 1)
                    for row in windows
                ]
                for windows in rows
            ]
        )

    names = {name: name for name in CATEGORIES if name not in MESSAGE_AXES}
    names |= {f"{axis} communication": axis for axis in (*MESSAGE_AXES, *EXPERT_MESSAGE_AXES)}
    parts = {shown: seconds(name) for shown, name in names.items()}
    parts = {name: values for name, values in parts.items() if values.any()}
    nodes = ("",) * len(ranks)
    return PartTimes(np.array(shared, float), seconds("elapsed"), parts, tuple(ranks), nodes)
