"""Which run others are compared with, by one rule for every table.

`--baseline NAME` is a run by its name or path, or a configuration or an MLPerf system, which stand
for their first repeat. All repeats of that run are the baseline's side. Where the named run has no
time, a repeat that has one takes its place.
"""

import os
from collections import defaultdict
from pathlib import Path

from analysis.logs.naming import name_of, own_name
from analysis.logs.record import Record
from analysis.runs.judged import Run
from analysis.runs.repeats import by_configuration, group_with
from base.errors import UsageError


def baseline_of(wanted: str, records: list[Record]) -> Record:
    """Returns the one run that `--baseline wanted` means."""
    fits = _fits(wanted, records)
    if len(fits) == 1:
        return fits[0]
    names = ", ".join(map(name_of, fits or records))
    if not fits:
        raise UsageError(f"no run called {wanted!r}; there are: {names}")
    raise UsageError(f"--baseline {wanted} fits {len(fits)} runs: {names}; name one of these")


def has_baseline(wanted: str, records: list[Record]) -> bool:
    """Returns whether `baseline_of` means a run, or cannot choose between some."""
    return bool(_fits(wanted, records))


def _fits(wanted: str, records: list[Record]) -> list[Record]:
    """Returns which runs `--baseline wanted` may mean."""
    path = os.path.abspath(wanted)
    fits = [
        record
        for record in records
        if path == os.path.abspath(record.source)
        or wanted in (name_of(record), own_name(record), Path(record.source).name)
    ]
    if fits:
        exact = [record for record in fits if name_of(record) == wanted]
        return exact if len(exact) == 1 else fits
    repeats = [r for r in records if wanted in (r.configuration, _system(r))]
    first = min((record.repeat or 0 for record in repeats), default=0)
    return [record for record in repeats if (record.repeat or 0) == first]


def _system(record: Record) -> str | None:
    return record.submission and record.submission.system


def fitting_baselines(records: list[Record], named: Record | None = None) -> list[list[Record]]:
    """Returns, for each run, the runs that may be its baseline: the one that was named, else those
    that its run.json means.

    Two machines may have the same study: the baseline is in the run's own folder.
    """
    if named:
        return [[named]] * len(records)
    runs: dict[tuple[Path, str | None, str | None], list[Record]] = defaultdict(list)
    for record in records:
        runs[Path(record.source).parent, record.study, own_name(record)].append(record)
    return [
        runs.get((Path(record.source).parent, record.study, record.baseline), [])
        for record in records
    ]


def usual_baseline(runs: list[Run]) -> tuple[Record, str]:
    """Returns the timed run that is the baseline of all runs' study, else that on the fewest GPUs;
    which of the two it is, in words."""
    records = [run.record for run in runs]
    names = {record.baseline for record in records}
    of_study = [record for record in records if {own_name(record)} == names]
    if len(of_study) == 1:
        return of_study[0], "the study's"
    return min(records, key=lambda record: record.gpus), "fewest GPUs"


def timed_baseline(
    wanted: str, records: list[Record], runs: list[Run], left_out: list[tuple[str, str]]
) -> Record:
    """Returns the run with a time that the name `wanted` means. `left_out` says why other runs have
    none."""
    named, groups = baseline_of(wanted, records), by_configuration(runs)
    if (group := group_with(named, groups)) is None:
        reason = dict(left_out).get(name_of(named), "no steady time")
        names = ", ".join(name_of(run.record) for run in runs)
        raise UsageError(f"the baseline {name_of(named)} is left out: {reason}; there are: {names}")
    return standing_for(named, groups[group]).record


def standing_for(named: Record, repeats: list[Run]) -> Run:
    """Returns the run that was named as the baseline, or, where it is none of these repeats, which
    have a time, the first of them."""
    return next((run for run in repeats if run.record is named), repeats[0])
