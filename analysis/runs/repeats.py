"""Which runs are repeats of each other, and what a table calls them together."""

from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypeVar

from analysis.logs.naming import name_of
from analysis.logs.record import Record
from analysis.runs.fairness import FIXED, LAYOUT, POLICY, WORDS, changes
from parallel.config.changes import CIRCUMSTANCES
from parallel.config.duration import WORK
from parallel.config.run_spec import DEFAULTS, settings_of

Run = TypeVar("Run", bound=tuple)  # whose first part is a Record
# Settings that leave a step's time as it is: repeats may differ in them.
_NOT_TIMED = CIRCUMSTANCES - {"threads", "breakdown"} | {*WORK, "seed", "save", "export_weights"}


def configuration(record: Record) -> tuple:
    """Returns what two runs must share to be repeats of each other."""
    return (named(record), *map(repr, _work(record).values()))


def _work(record: Record) -> dict[str, Any]:
    """Returns what repeats share beside their name: the split, the model, the code, and of our own
    runs every setting that can change a step's time."""
    work = {name: getattr(record, name) for name in (*LAYOUT, *POLICY, *FIXED, "params")}
    spec = settings_of(record.facts)
    # An older run.json lacks settings that were added since: they had their defaults.
    stated = {name: value for name, value in spec.items() if value != DEFAULTS.get(name)}
    settings = {name: value for name, value in stated.items() if name not in _NOT_TIMED}
    inputs = record.facts.get("inputs") or {}
    return work | {
        "commit": record.code or record.commit,
        "model": sorted(record.model.items()),
        "settings": sorted(settings.items()),
        "deepspeed_config": inputs.get("deepspeed_config"),
    }


def unlike(record: Record, repeat: Record, any_commit: bool = False) -> list[str]:
    """Returns the names of what differs between two runs of one side, which should be repeats of
    each other. What one of them does not state is not compared."""
    work, repeat_work = _work(record), _work(repeat)
    differing = [
        name
        for name, value in work.items()
        if None not in (value, repeat_work[name]) and value != repeat_work[name]
    ]
    if any_commit and "commit" in differing:
        differing.remove("commit")
    if "settings" in differing:
        differing.remove("settings")
        settings = dict(work["settings"]) | dict(repeat_work["settings"])  # each without defaults
        differing += [name for name in changes(record, repeat) if name in settings]
    return [WORDS.get(name, name) for name in dict.fromkeys(differing)]


def named(record: Record) -> str | None:
    """Returns what a study calls the configuration: the run's name without its repeat."""
    return record.configuration or record.run


def by_configuration(runs: Sequence[Run]) -> dict[str, list[Run]]:
    """Returns the runs (tuples that begin with a record) of each configuration by its name, or,
    where others have that name, by its first run's."""
    kinds: dict[tuple, list[Run]] = defaultdict(list)
    for run in runs:
        kinds[configuration(run[0])].append(run)
    names = [named(repeats[0][0]) for repeats in kinds.values()]
    return {
        (name if names.count(name) == 1 else None) or name_of(repeats[0][0]): repeats
        for name, repeats in zip(names, kinds.values(), strict=True)
    }


def group_with(record: Record, groups: dict[str, list[Run]]) -> str | None:
    """Returns which of `by_configuration`'s names has the run, or repeats of it; None where none
    has."""
    for name, runs in groups.items():
        if any(run[0] is record for run in runs):
            return name
    if record.configuration is None:
        return None
    wanted = configuration(record)
    return next((n for n, runs in groups.items() if configuration(runs[0][0]) == wanted), None)


def by_study(runs: Sequence[Run]) -> dict[tuple, list[Run]]:
    """Returns the runs by `study_key`."""
    groups: dict[tuple, list[Run]] = defaultdict(list)
    for run in runs:
        groups[study_key(run[0])].append(run)
    return groups


def study_key(record: Record) -> tuple:
    """Returns what the repeats that a study made of a configuration share; another run has it
    alone."""
    if record.configuration is None:
        return (record.source,)
    return (Path(record.source).parent, record.study, configuration(record))
