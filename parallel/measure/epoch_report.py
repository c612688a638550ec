"""A breakdown by epoch, as lines of the log: the report that the GPT-2 study of 2024 printed."""

import time
from typing import Any

from parallel.config.settings import RunSpec
from parallel.record.schema import AXES


def steps_per_epoch(spec: RunSpec) -> int:
    """Optimizer steps of an epoch, as training_metrics.py counts them; all, without --epochs."""
    return -(-spec.steps // (spec.epochs or 1))


def epoch_lines(
    spec: RunSpec,
    ranks: dict[int, list[dict[str, Any]]],
    steps: list[dict[str, Any]],
    validations: list[tuple[int, float]],
) -> list[str]:
    """The per-rank epoch reports that the GPT-2 study of 2024 printed.

    `ranks`: read_breakdown's rows; `steps`: steps.csv's; `validations`: (steps done, loss).
    Compute is forward, backward and optimizer; communication is the exposed time of all axes; the
    bubble and the rest have lines of their own; that study did not separate them.
    """
    lines, size = [], steps_per_epoch(spec)
    for epoch, first in enumerate(range(0, spec.steps, size)):
        steps_within = range(first + 1, first + size + 1)
        loss = [row["loss"] for row in steps if row["step"] in steps_within]
        val_loss = [loss for step, loss in validations if step in steps_within]
        windows = {
            rank: [row for row in rows if row["last_step"] in steps_within]
            for rank, rows in ranks.items()
        }
        # An epoch whose beginning another attempt trained, without a breakdown, has no report.
        if loss and all(rows and rows[0]["first_step"] == first + 1 for rows in windows.values()):
            mean = sum(loss) / len(loss)
            lines += _epoch_lines(windows, epoch, mean, val_loss[-1] if val_loss else None)
    return lines


_EPOCH_TIMES = {  # the titles of an epoch's report, and what is added under each
    "Total epoch": ("elapsed",),
    "Data loading": ("data",),
    "Data movement": ("move",),
    "Training compute": ("forward", "backward", "optimizer"),
    "Training communication": AXES,
    "Pipeline bubble": ("bubble",),
    "Other": ("other",),
    "Forward": ("forward",),
    "Backward": ("backward",),
    "Optimizer": ("optimizer",),
}


def _epoch_lines(
    ranks: dict[int, list[dict[str, Any]]], epoch: int, loss: float, val_loss: float | None
) -> list[str]:
    stamp = time.strftime("%Y-%m-%d %H:%M:%S,000", time.localtime())
    seconds = {
        rank: {
            title: sum(row[f"{name}_s"] for row in rows for name in names)
            for title, names in _EPOCH_TIMES.items()
        }
        for rank, rows in sorted(ranks.items())
    }
    lines = [f"{stamp} - Average metrics:"]
    for title in _EPOCH_TIMES:
        mean = sum(times[title] for times in seconds.values()) / len(seconds)
        lines.append(f"    {title} time: {mean:.4f} seconds")
    lines.append(f"    Train loss: {loss:.4f}")
    if val_loss is not None:
        lines.append(f"    Val loss: {val_loss:.4f}")
    for rank, times in seconds.items():
        lines += [f"{stamp} - Rank {rank} -", f"    Rank {rank} Epoch {epoch} timing breakdown:"]
        lines.append(f"        Average Loss: {loss:.4f}")
        lines += [f"        {title} time: {value:.4f} seconds" for title, value in times.items()]
    if val_loss is not None:
        losses = f"train loss {loss:.4f}, val loss {val_loss:.4f}"
        lines.append(f"{stamp} - Rank 0 - Epoch {epoch}: {losses}")
    return lines
