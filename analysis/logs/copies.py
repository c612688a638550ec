"""Which records are of one run, by what was measured: logs of its nodes, copies, checkpoints of a
Hugging Face trainer."""

import hashlib
import os
import re
from collections import Counter, defaultdict
from dataclasses import replace
from pathlib import Path

import numpy as np

from analysis.logs.facts import SETTINGS
from analysis.logs.parsing.files_of_runs import one_run_with
from analysis.logs.record import Record

_CHECKPOINT = re.compile(r"/checkpoint-\d{1,12}(?=/trainer_state\.json\Z)")
_ENTRIES = 5  # fewer that agree prove nothing
_DISTINCT = 3  # values; times that are all alike prove nothing
_HEAD = 64  # entries that are compared first
_ENDS = 8  # entries at each end of a log, one of which its copies have
_TIME = 1e-9  # a share; the same number, by another sum
_LOSS = 1e-3  # a share; one program prints 4 digits, and saves all of them


def without_copies(records: list[Record], named: set[str]) -> list[Record]:
    """Returns the records, in their order, without those whose steps are another's of the same
    folder, or of one below it. Of those that agree, the one with most steps stays, and a note names
    the others.

    named: files that the user named by themselves; they stay.
    """
    groups: list[list[Record]] = []
    places: dict[object, set[int]] = defaultdict(set)  # what copies share -> groups that have it
    others = [
        record
        for record in records
        if len(record.steps) and not record.own and not record.parts and record.source not in named
    ]
    timeless = {os.path.dirname(_output(record)) for record in others if _is_timeless(record)}
    for record in sorted(others, key=_rank, reverse=True):
        keys = _keys(record, timeless)
        for place in sorted(set().union(*(places[key] for key in keys))):
            if any(_is_copy(record, member) for member in groups[place]):
                break
        else:
            place = len(groups)
            groups.append([])
        groups[place].append(record)
        for key in keys:
            places[key].add(place)
    left_out = set()
    for kept, *copies in groups:
        if copies:
            _note_copies(kept, copies)
            left_out |= set(map(id, copies))
    return [record for record in records if id(record) not in left_out]


def note_same_evidence(records: list[Record]) -> None:
    """Notes which runs have the evidence of another: the same measurements, or the same bytes.

    Of a log that others wrote, these are the times and losses of its steps: a copy that was cut or
    edited elsewhere is no repeat, and would tell a noise of 0.
    """
    sizes = {r.source: os.path.getsize(r.source) for r in records if os.path.isfile(r.source)}
    often = Counter(sizes.values())
    first: dict[str, str] = {}  # a hash of the evidence -> the source that has it
    for record in records:
        digest = record.evidence or _measured(record)
        if not digest and often[sizes.get(record.source, -1)] > 1:
            with open(record.source, "rb") as file:
                digest = hashlib.file_digest(file, "sha256").hexdigest()
        if digest and first.setdefault(digest, record.source) != record.source:
            record.copy_of = first[digest]
            record.note(f"the same evidence as {record.copy_of} (SHA-256 {digest[:12]})")


def _measured(record: Record) -> str:
    """Returns a hash of the GPUs, steps, times and losses of a log that others wrote; "" where so
    few or so equal times prove nothing."""
    times = record.steps["step_s"]
    times = times[np.isfinite(times)]
    if record.own or len(np.unique(times)) < _ENTRIES:
        return ""
    steps = record.steps[["iteration", "step_s", "loss"]].tolist()
    return hashlib.sha256(repr((record.gpus, steps)).encode()).hexdigest()


def _rank(record: Record) -> tuple[int, ...]:
    """Returns what the records of one run are ordered by, the one that stays last: number of steps,
    times, a failure, number of facts, and how near to the top of the folders the file is."""
    n_facts = sum(getattr(record, name) is not None for name in SETTINGS)
    failed = record.failure is not None
    depth = len(Path(record.source).parts)
    has_times = not _is_timeless(record)
    return len(record.steps), has_times, failed, n_facts, len(record.totals), -depth


def _is_timeless(record: Record) -> bool:
    return not np.isfinite(record.steps["step_s"]).any()


def _output(record: Record) -> str:
    """Returns the path of the whole file that a checkpoint's is an earlier state of."""
    return _CHECKPOINT.sub("", os.path.abspath(record.source))


def _keys(record: Record, timeless: set[str]) -> set[object]:
    """Returns values that a record shares with its copies, at least one of them: they are cheap to
    compare. timeless: folders of files that have no times, whose losses are compared."""
    folder = os.path.dirname(_output(record))
    ends = np.concatenate([record.steps[:_ENDS], record.steps[-_ENDS:]])
    keys: set[object] = {_output(record), record.evidence} - {""}
    has_times = len(np.unique(record.steps["step_s"])) >= _DISTINCT
    has_losses = folder in timeless
    for number, time, loss in ends[["iteration", "step_s", "loss"]].tolist():
        keys |= {(number, f"{time:.9g}")} if has_times and time == time else set()
        keys |= {(number, f"{loss:.3g}", folder)} if has_losses and loss == loss else set()
    return keys


def _is_copy(a: Record, b: Record) -> bool:
    """Returns whether the steps that two files share are the same, so that they are of one run.

    Where one of them has no times, the losses say it, of files of one folder.
    """
    if a.source == b.source or not _heads_agree(a.steps[:_HEAD], b.steps[:_HEAD]):
        return False
    folders = {os.path.dirname(_output(record)) for record in (a, b)}
    if os.path.commonpath(folders) not in folders:
        return False
    if a.evidence and a.evidence == b.evidence:
        return True
    _, in_a, in_b = np.intersect1d(a.steps["iteration"], b.steps["iteration"], return_indices=True)
    steps, others = a.steps[in_a], b.steps[in_b]
    if not len(steps) or not _agree(steps, others):
        return False
    if _output(a) == _output(b):
        return True
    name = "step_s"
    if _is_timeless(a) != _is_timeless(b) and len(folders) == 1:
        name = "loss"
    values = steps[name][np.isfinite(steps[name]) & np.isfinite(others[name])]
    few = max(_ENTRIES, min(len(a.steps), len(b.steps)) / 2)
    return len(values) >= few and len(np.unique(values)) >= _DISTINCT


def _heads_agree(steps: np.ndarray, others: np.ndarray) -> bool:
    """Returns whether the first steps may be the same: it is quick, and most files' are not."""
    if not np.array_equal(steps["iteration"], others["iteration"]):
        return True
    return _agree(steps[:1], others[:1]) and _agree(steps, others)


def _agree(steps: np.ndarray, others: np.ndarray) -> bool:
    """Returns whether the times and losses are equal where they are stated twice."""
    for name, share in (("step_s", _TIME), ("loss", _LOSS)):
        gaps = np.abs(steps[name] - others[name])
        if (gaps > share * np.abs(others[name])).any():  # never true of NaN
            return False
    return True


def _note_copies(kept: Record, copies: list[Record]) -> None:
    """Notes in a record which files are copies, and takes from them why the run failed."""
    words = one_run_with(Path(kept.source), [Path(copy.source) for copy in copies])
    kept.note(f"{words}: the same steps")
    failed = [copy for copy in copies if copy.failure]
    if failed and not kept.failure and not kept.completed:
        name, failure = Path(failed[0].source).name, failed[0].failure
        kept.failure = replace(failure, line_no=0, line=f"{name}: {failure.line}")
