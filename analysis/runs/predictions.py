"""Predicted beside measured, as the table of runs shows it: the error's sign and the notes."""

from collections.abc import Iterable

from analysis.common.terminal import who
from analysis.logs.naming import name_of
from analysis.logs.record import Record
from base.errors import Answer


def of_runs(records: list[Record], cluster: str | None) -> list[Answer[float]]:
    """Returns the predicted seconds per iteration of each run on a calibrated cluster, or why
    there is none; neither without a cluster."""
    if not cluster:
        return [Answer(None) for _ in records]
    from analysis.planner.calibration import load_calibration  # here: --help needs no planner
    from analysis.planner.runs import priced

    calibration = load_calibration(cluster)
    answers = [priced(record, calibration) for record in records]
    return [Answer(row and row["predicted_s"], reason) for row, reason in answers]


def notes_on(
    cluster: str | None, errors: Iterable[float | None], records: Iterable[Record]
) -> list[str]:
    """Returns a table's notes on predictions: what they were fitted on, and their MAPE. Where
    `cluster` is a calibrated host CPU, they name the runs of another processor."""
    if not cluster:
        return []
    from analysis.planner.calibration import load_calibration
    from analysis.planner.runs import ASSUMED, assumed

    calibrated = load_calibration(cluster)
    lines = [f"predicted, not measured, by {calibrated.name} ({calibrated.source})"]
    if misses := [abs(value) for value in errors if value is not None]:
        lines[0] += f"; here MAPE {sum(misses) / len(misses):.1%}, n = {len(misses)}"
    records = list(records)
    if names := [name_of(record) for record in records if assumed(record)]:
        lines.append(f"{ASSUMED}: {who(names, len(records))}")
    return lines + calibrated.processor_note(record.gpu_type for record in records)
