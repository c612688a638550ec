"""Predicted beside measured, as every table shows it: the columns, the error's sign, the notes."""

from collections import defaultdict
from collections.abc import Hashable, Iterable
from typing import NamedTuple

from analysis.common.statistics import repeat_noise
from analysis.common.table import Column
from analysis.logs.record import Record

Pair = tuple[Hashable, float | None, float | None]  # configuration, predicted, measured


def columns(seldom: bool = False) -> list[Column]:
    """The predicted seconds and their signed error, next to the measured ones."""
    return [
        Column("predicted_s", "predicted s/iter", ".4g", seldom),
        Column("predicted_error", "error", "+.1%", seldom),
    ]


def error(predicted: float | None, measured: float | None) -> float | None:
    """predicted / measured - 1: positive where the run was faster than predicted; None where either
    is unknown."""
    return predicted / measured - 1 if predicted and measured else None


class Prediction(NamedTuple):
    """Predicted seconds per iteration of a run, or None and what `predicted_s` lacks."""

    seconds: float | None
    missing: dict[str, str]


def of_runs(records: list[Record], cluster: str | None) -> list[Prediction]:
    """Each run's prediction on a calibrated cluster; none without a cluster.

    Raises:
        UsageError: no such calibration.
    """
    if not cluster:
        return [Prediction(None, {})] * len(records)
    from analysis.planner.calibration import load_calibration  # here: --help needs no planner
    from analysis.planner.runs import predicted_seconds

    calibration = load_calibration(cluster)
    pairs = [predicted_seconds(record, calibration) for record in records]
    return [Prediction(s, {"predicted_s": why} if why else {}) for s, why in pairs]


def source(cluster: str) -> str:
    """What the predictions of a cluster were fitted on; some of the runs shown may be among it.

    Raises:
        UsageError: no such calibration.
    """
    from analysis.planner.calibration import load_calibration

    found = load_calibration(cluster)
    return f"{found.name} ({found.source})"


def notes_on(cluster: str | None, pairs: Iterable[Pair], records: Iterable[Record]) -> list[str]:
    """A table's notes on predictions; a line where `cluster` is a calibrated host CPU and runs are
    of another processor. None without a cluster.

    Raises:
        UsageError: no such calibration.
    """
    if not cluster:
        return []
    from analysis.planner.calibration import load_calibration

    calibrated = load_calibration(cluster)
    lines = notes(source(cluster), pairs)
    others = {record.gpu_type for record in records} - {None, calibrated.processor}
    if calibrated.processor and others:
        lines.append(
            f"{calibrated.name} was calibrated on {calibrated.processor}, and runs here are of"
            f" {', '.join(sorted(others))}: their predicted times are of the other processor"
        )
    return lines


def notes(made_of: str, pairs: Iterable[Pair]) -> list[str]:
    """What a table's predictions were fitted on, their MAPE, and the repeat noise: the least MAPE
    that any prediction can reach on runs of one configuration."""
    errors: list[float] = []
    repeats: dict[Hashable, list[float]] = defaultdict(list)
    for configuration, predicted, measured in pairs:
        off = error(predicted, measured)
        if off is not None and measured is not None:
            errors.append(abs(off))
            repeats[configuration].append(measured)
    if not errors:
        return [f"predicted, not measured, by {made_of}"]
    noise = repeat_noise(repeats.values())
    mape = f"here MAPE {sum(errors) / len(errors):.1%}, n = {len(errors)}"
    repeated = "no run repeated"
    if noise.mape is not None:
        repeated = f"repeat noise {noise.mape:.1%} ({noise.n} repeated runs)"
    return [f"predicted, not measured, by {made_of}; {mape}; {repeated}"]
