"""Per-epoch breakdowns that every rank prints, with or without their average.

    Rank 0 Epoch 0 timing breakdown:                 Average metrics:
        Total epoch time: 1384.64 seconds                Total epoch time: 1095.70 seconds
        Training communication time: 41.09 seconds

An epoch lasts as long as its slowest rank: that is its time here, and the printed average over
ranks, which is shorter, is kept apart and noted where the two differ.
"""

import re

import numpy as np

from analysis.readers._endings import judge_end
from analysis.readers._lines import number
from analysis.readers._log import Log
from analysis.records import Record

FORMAT = "rank epochs"
MARKS = ((b"Total epoch time:", b"Training compute time:"),)

_HEAD = re.compile(rb"(?:Rank (\d{1,6}) )?Epoch (\d{1,9}) timing breakdown:|(Average metrics:)")
_PART = re.compile(
    rb"(Total epoch|Data loading|Data movement|Training compute|Training communication) time: "
    rb"{0,4}([\d.]{1,20}) {0,4}seconds|(Train|Val|Average) [Ll]oss: {0,4}([\d.]{1,20})"
)
_EPOCH = re.compile(rb"Epoch (\d{1,9}): train loss ([\d.]{1,20}) ?, val loss ([\d.]{1,20})")
_NAMES = {
    b"Total epoch": "epoch_s",
    b"Data loading": "data_s",
    b"Data movement": "move_s",
    b"Training compute": "compute_s",
    b"Training communication": "comm_s",
    b"Train": "train_loss",
    b"Val": "val_loss",
    b"Average": "train_loss",
}


def read(log: Log) -> Record:
    """Read one log. `extra["ranks"]` has one dict per rank and epoch, `extra["averages"]` one per
    printed average; `totals["wall_s"]` is the sum over epochs of the slowest rank's time."""
    record = Record(source=str(log.path), format=FORMAT)
    ranks: list[dict[str, float]] = []
    averages: list[dict[str, float]] = []
    current: dict[str, float] | None = None
    last = 0
    pattern = re.compile(b"|".join(p.pattern for p in (_HEAD, _PART, _EPOCH)))
    for offset, match in log.matches(pattern):
        if match[1] or match[2]:
            current = {"rank": float(match[1] or 0), "epoch": float(match[2])}
            ranks.append(current)
        elif match[3]:
            current = {}
            averages.append(current)
        elif match[4] and current is not None:
            current.setdefault(_NAMES[match[4]], number(match[5]))
        elif match[6] and current is not None:
            current.setdefault(_NAMES[match[6]], number(match[7]))
        elif match[8]:
            record.totals["train_loss"] = number(match[9])
            record.totals["val_loss"] = number(match[10])
            current = None
        last = offset
    ranks = [r for r in ranks if "epoch_s" in r]
    averages = [a for a in averages if "epoch_s" in a]
    rows = ranks or averages
    if not rows:
        return record
    record.extra |= {"whole_run": True, "ranks": ranks, "averages": averages}
    if ranks:
        record.gpus = 1 + int(max(r["rank"] for r in ranks))
    epochs = sorted({r.get("epoch", 0.0) for r in rows})
    slowest = [max(r["epoch_s"] for r in rows if r.get("epoch", 0.0) == e) for e in epochs]
    record.totals["wall_s"] = float(sum(slowest))
    record.totals["epoch_s_slowest_rank"] = float(np.mean(slowest))
    if averages:
        record.totals["epoch_s_mean_of_ranks"] = float(np.mean([a["epoch_s"] for a in averages]))
        mean = record.totals["epoch_s_mean_of_ranks"]
        if ranks and record.totals["epoch_s_slowest_rank"] > 1.02 * mean:
            record.notes.append(
                f"the printed epoch time {mean:.2f} s is a mean over ranks;"
                f" the slowest rank needs {record.totals['epoch_s_slowest_rank']:.2f} s"
            )
    record.completed = True
    judge_end(record, log, [last])
    return record
