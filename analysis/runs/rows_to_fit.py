"""Runs as the rows that the constants of a cluster are fitted to: their settings and their time."""

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from analysis.logs.load import load
from analysis.logs.naming import name_of
from analysis.planner.columns import Columns
from analysis.planner.runs import Place, counted_row_of, threads_per_core
from analysis.runs.judged import judged
from base.errors import UsageError


@dataclass
class Runs:
    """Runs with a steady time. measured: seconds per step; crowd: threads that share a core;
    left_out: what has no time or lacks a fact, with the reason."""

    ids: list[str]
    steps: Columns
    measured: np.ndarray
    crowd: np.ndarray
    left_out: list[str]


def read_runs(paths: list[Path], place: Place) -> Runs:
    """Returns the runs of run folders and logs; place: as `row_of` takes it."""
    runs, (records, left_out) = [], load(paths)
    for run in judged(records):
        record, name = run.record, name_of(run.record)
        try:
            if not (run.is_fit and run.time.step_s > 0):
                raise ValueError(run.judgement.unfit or "no steady step time")
            crowding = max(1.0, threads_per_core(record) or 1.0)
            runs.append((name, counted_row_of(record, place), run.time.step_s, crowding))
        except ValueError as error:
            left_out.append(f"{name}: {error}")
    if not runs:
        raise UsageError("; ".join(["no run with a time and all its settings", *left_out]))
    ids, steps, seconds, crowd = zip(*runs, strict=True)
    return Runs(list(ids), Columns.stack(steps), np.array(seconds), np.array(crowd), left_out)
