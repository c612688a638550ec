"""TEMPORARY front door until the log readers are merged: run folders only."""

from pathlib import Path

from analysis.readers.run_folder import read
from analysis.records import Record
from models.errors import UsageError
from parallel.artifacts import find_runs


def read_all(paths: list[Path]) -> tuple[list[Record], list[UsageError]]:
    records, refused = [], []
    for path in paths:
        try:
            folders = find_runs([path])
        except UsageError as error:
            refused.append(error)
            continue
        for folder in folders:
            try:
                records.append(read(folder))
            except UsageError as error:
                refused.append(error)
    return records, refused
