"""Which ranks of a run were slow, by the slow_ranks.csv that it wrote. Python alone.

rank_judge.py says when windows of steps make a rank slow.
"""

from pathlib import Path
from typing import Any

from base.errors import UsageError
from parallel.measure import rank_judge
from parallel.measure.rank_judge import STEPS, Verdict
from parallel.record.ends import RUNNING
from parallel.record.reader import read_rows, read_run
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


def slow_nodes(path: Path) -> list[tuple[str, str, str, str]]:
    """Returns (node, evidence, run, time of the first window) of each rank that was slow in at
    least half of a run's steps; none where the run folder has no slow_ranks.csv. Of a running run
    all steps count that it is to do."""
    if not (path / SLOW_RANKS).exists():
        return []
    slow = [verdict for verdict in verdicts(path) if verdict.kind != "link"]
    if not slow:
        return []
    run = read_run(path)
    planned = (run.facts.get("spec") or {}).get("steps")
    steps = planned if run.state == RUNNING and planned else len(run.steps)
    began = {(row["rank"], row["node"]): row["time_utc"] for row in reversed(read(path))}
    return [
        (verdict.node, str(verdict), run.name, began[verdict.rank, verdict.node])
        for verdict in slow
        if verdict.n * STEPS >= steps / 2
    ]
