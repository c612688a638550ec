"""Which ranks of a run were slow, by the slow_ranks.csv that it wrote. Python alone.

rank_judge.py says when windows of steps make a rank slow.
"""

from pathlib import Path
from typing import Any

from base.errors import UsageError
from parallel.measure import rank_judge
from parallel.measure.rank_judge import Verdict
from parallel.record.reader import read_rows
from parallel.record.schema import SLOW_COLUMNS, SLOW_RANKS


def read(folder: Path) -> list[dict[str, Any]]:
    """Returns the rows of a run's slow_ranks.csv; of steps that were run again, the last."""
    path = folder / SLOW_RANKS
    if not path.exists():
        reason = "one rank, no step yet, or a run of an earlier version"
        raise UsageError(f"{folder}: no {SLOW_RANKS}: {reason}")
    rows: dict[tuple[int, str, int], dict[str, Any]] = {}
    for number, row in enumerate(read_rows(path, SLOW_COLUMNS), 2):
        if None in (row[name] for name in SLOW_COLUMNS if name != "node"):
            raise UsageError(f"{path}:{number}: a value is missing")
        while rows and row["first_step"] <= (newest := next(reversed(rows)))[0] != row["last_step"]:
            del rows[newest]
        rows[row["last_step"], row["kind"], row["rank"]] = row
    return [rows[key] for key in sorted(rows)]


def verdicts(folder: Path) -> list[Verdict]:
    """Returns who was slow in a run, the longest first."""
    return rank_judge.verdicts(read(folder))
