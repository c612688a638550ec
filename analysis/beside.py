"""Predicted beside measured, as every table shows it: two columns, one sign, what it is worth."""

import argparse
from collections import defaultdict
from collections.abc import Hashable, Iterable
from typing import Any

from analysis.records import Record
from analysis.repeats import repeat_noise
from analysis.tables import Column

Pair = tuple[Hashable, float | None, float | None]  # configuration, predicted, measured


def columns(
    heading: str = "predicted s/iter", key: str = "predicted_s", spec: str = ".4g"
) -> list[Column]:
    """The predicted value and its signed error, next to the measured one."""
    return [Column(key, heading, spec), Column("predicted_error", "error", "+.1%")]


def error(predicted: float | None, measured: float | None) -> float | None:
    """predicted / measured - 1: positive where the run was faster than predicted; None where either
    is unknown."""
    return predicted / measured - 1 if predicted and measured else None


def add_flag(parser: argparse.ArgumentParser) -> None:
    """The flag of every command that shows predictions."""
    parser.add_argument("--predict", metavar="CLUSTER", help="predicted beside measured; or FILE")


def seconds(records: list[Record], cluster: str | None) -> list[float | None]:
    """Predicted seconds per iteration of each run on a calibrated cluster; None without one.

    Raises:
        UsageError: no such calibration.
    """
    if not cluster:
        return [None] * len(records)
    from analysis import calibration, predict  # numpy: only where something is predicted

    return predict.beside(records, calibration.load_calibration(cluster))


def source(cluster: str) -> str:
    """What the predictions of a cluster were made of: some of the runs shown may be fitted ones.

    Raises:
        UsageError: no such calibration.
    """
    from analysis.calibration import load_calibration

    found = load_calibration(cluster)
    return f"{found.name} ({found.source})"


def notes(made_of: str, pairs: Iterable[Pair]) -> list[str]:
    """Where a table's predictions come from and how far off they are, beside the repeat noise: the
    least MAPE that any prediction can reach on runs of one configuration."""
    errors: list[float] = []
    repeats: dict[Hashable, list[float]] = defaultdict(list)
    for configuration, predicted, measured in pairs:
        off = error(predicted, measured)
        if off is not None and measured is not None:
            errors.append(abs(off))
            repeats[configuration].append(measured)
    if not errors:
        return [f"predicted, not measured, by {made_of}"]
    noise, n = repeat_noise(repeats.values())
    said = "no run repeated" if noise is None else f"repeat noise {noise:.1%} ({n} repeated runs)"
    return [
        f"predicted, not measured, by {made_of}; here MAPE {sum(errors) / len(errors):.1%},"
        f" n = {len(errors)}; {said}"
    ]


def fill(rows: list[dict[str, Any]], predicted: list[float | None], measured: str) -> None:
    """Predicted seconds and their signed error into rows that have `measured` seconds."""
    for row, value in zip(rows, predicted, strict=True):
        row["predicted_s"] = value
        row["predicted_error"] = error(value, row.get(measured))
