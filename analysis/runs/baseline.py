"""Which run others are compared with, by one rule for every table.

`--baseline NAME` is a run by its name or path, or a configuration or an MLPerf system, which stand
for their first repeat. All repeats of that run are the baseline's side. Where the named run has no
time, a repeat that has one takes its place.
"""

from collections import defaultdict
from pathlib import Path

from analysis.logs.load import baseline_of, name_of, own_name
from analysis.logs.record import Record
from analysis.runs.fairness import by_configuration, group_with
from analysis.runs.judged import Run
from base.errors import UsageError


def own_baselines(records: list[Record]) -> list[list[Record]]:
    """Returns, for each run, the runs that may be the baseline that its run.json names.

    Two machines may have the same study: the baseline is in the run's own folder.
    """
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
    """Returns the run among those with a time that NAME means; left_out: why others have none."""
    named, groups = baseline_of(wanted, records), by_configuration(runs)
    if (group := group_with(named, groups)) is None:
        reason = dict(left_out).get(name_of(named), "no steady time")
        names = ", ".join(name_of(run.record) for run in runs)
        raise UsageError(f"the baseline {name_of(named)} is left out: {reason}; there are: {names}")
    repeats = [run.record for run in groups[group]]
    return named if any(record is named for record in repeats) else repeats[0]
