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

        def within(step: int, first: int = first) -> bool:
            return first < step <= first + size

        loss = [row["loss"] for row in steps if within(row["step"])]
        val_loss = [loss for step, loss in validations if within(step)]
        windows = {r: [w for w in rows if within(w["last_step"])] for r, rows in ranks.items()}
        # An epoch whose beginning another attempt trained, without a breakdown, has no report.
        if loss and all(w and w[0]["first_step"] == first + 1 for w in windows.values()):
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
    def seconds(rows: list[dict[str, Any]]) -> dict[str, float]:
        return {
            title: sum(row[f"{name}_s"] for row in rows for name in names)
            for title, names in _EPOCH_TIMES.items()
        }

    stamp = time.strftime("%Y-%m-%d %H:%M:%S,000", time.localtime())
    each = {rank: seconds(rows) for rank, rows in sorted(ranks.items())}
    lines = [f"{stamp} - Average metrics:"]
    for name in next(iter(each.values()), {}):
        mean = sum(one[name] for one in each.values()) / len(each)
        lines.append(f"    {name} time: {mean:.4f} seconds")
    lines.append(f"    Train loss: {loss:.4f}")
    if val_loss is not None:
        lines.append(f"    Val loss: {val_loss:.4f}")
    for rank, one in each.items():
        lines += [f"{stamp} - Rank {rank} -", f"    Rank {rank} Epoch {epoch} timing breakdown:"]
        lines.append(f"        Average Loss: {loss:.4f}")
        lines += [f"        {name} time: {value:.4f} seconds" for name, value in one.items()]
    if val_loss is not None:
        lines.append(
            f"{stamp} - Rank 0 - Epoch {epoch}: train loss {loss:.4f}, val loss {val_loss:.4f}"
        )
    return lines
