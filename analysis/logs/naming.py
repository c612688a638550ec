"""What a run is called in every table."""

import os
from collections import defaultdict
from pathlib import Path

from analysis.logs.record import Record
from base.errors import printable


def own_name(record: Record) -> str:
    """Returns what the run calls itself, or the file's name."""
    return record.run or Path(record.source).name


def name_of(record: Record) -> str:
    """Returns what a table calls the run: its own name, with folders where others have that name,
    too."""
    return record.shown or own_name(record)


def tell_apart(records: list[Record]) -> None:
    """Sets the name that tables show for each record, so that no two are alike."""
    names = distinct([own_name(r) for r in records], [Path(r.source) for r in records])
    for record, name in zip(records, names, strict=True):
        record.shown = printable(name)  # a file may have a name that is no UTF-8


def distinct(names: list[str], paths: list[Path]) -> list[str]:
    """Returns each run's name, or, where several have it, the end of its path that tells them
    apart."""
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
