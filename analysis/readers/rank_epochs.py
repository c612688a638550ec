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
from analysis.readers._lines import number, plain
from analysis.readers._log import Log
from analysis.records import Record

FORMAT = "rank epochs"
MARKS = ((b"Total epoch time:", b"Training compute time:"),)

_ANY = re.compile(
    rb"(?:Rank (?P<rank>\d{1,6}) )?Epoch (?P<of_epoch>\d{1,9}) timing breakdown:"
    rb"|(?P<average>Average metrics:)"
    rb"|(?P<part>Total epoch|Data loading|Data movement|Training compute|Training communication)"
    rb" time: {0,4}(?P<seconds>[\d.]{1,20}) {0,4}seconds"
    rb"|(?P<loss_of>Train|Val|Average) [Ll]oss: {0,4}(?P<loss>[\d.]{1,20})"
    rb"|Epoch \d{1,9}: train loss (?P<train>[\d.]{1,20}) ?, val loss (?P<val>[\d.]{1,20})"
    rb"|(?:^|(?<=\r)|(?<=[\d;\[]m))(?:\xef\xbb\xbf)?#{1,6} (?P<heading>[^\r\n]{1,120})",
    re.MULTILINE,
)
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
    """Read one log.

    `extra["ranks"]` has one dict per rank and epoch, `extra["averages"]` one per printed average;
    `totals["wall_s"]` is the sum over epochs of the slowest rank's time. A document that holds
    several runs under Markdown headings has them in `extra["runs"]`, by heading, and no totals.
    """
    record = Record(source=str(log.path), format=FORMAT)
    runs = [_Run("")]
    last = 0
    for offset, match in log.matches(_ANY):
        if match["heading"]:
            runs.append(_Run(plain(match["heading"]).decode("utf-8", "replace").strip()))
        else:
            runs[-1].add(match)
            last = offset
    runs = [run for run in runs if run.ranks or run.averages]
    if not runs:
        return record
    record.extra["whole_run"] = True
    if len(runs) > 1:
        record.extra["runs"] = {run.name: run.facts() for run in runs}
        record.notes.append(f"holds {len(runs)} runs: {', '.join(run.name for run in runs)}")
    else:
        run = runs[0]
        record.totals = run.totals()
        record.extra |= {"ranks": run.ranks, "averages": run.averages}
        if run.ranks:
            record.gpus = 1 + int(max(r["rank"] for r in run.ranks))
    for run in runs:
        totals = run.totals()
        slowest, mean = totals["epoch_s_slowest_rank"], totals.get("epoch_s_mean_of_ranks")
        if mean is not None and run.ranks and slowest > 1.02 * mean:
            record.notes.append(
                f"{run.name}: the printed epoch time {mean:.2f} s is a mean over ranks;"
                f" the slowest rank needs {slowest:.2f} s".removeprefix(": ")
            )
    record.completed = True
    judge_end(record, log, [last])
    return record


class _Run:
    """The breakdowns under one heading: dicts of seconds (and losses), by _NAMES."""

    def __init__(self, name: str):
        self.name = name
        self.ranks: list[dict[str, float]] = []
        self.averages: list[dict[str, float]] = []
        self.losses: dict[str, float] = {}
        self._current: dict[str, float] | None = None

    def add(self, match: re.Match[bytes]) -> None:
        if match["of_epoch"]:
            self._current = {"rank": float(match["rank"] or 0), "epoch": float(match["of_epoch"])}
            self.ranks.append(self._current)
        elif match["average"]:
            self._current = {}
            self.averages.append(self._current)
        elif match["train"]:
            self.losses = {"train_loss": number(match["train"]), "val_loss": number(match["val"])}
            self._current = None
        elif self._current is not None:
            name = _NAMES[match["part"] or match["loss_of"]]
            self._current.setdefault(name, number(match["seconds"] or match["loss"]))

    def totals(self) -> dict[str, float]:
        rows = [row for row in self.ranks or self.averages if "epoch_s" in row]
        epochs = sorted({row.get("epoch", 0.0) for row in rows})
        slowest = [max(r["epoch_s"] for r in rows if r.get("epoch", 0.0) == e) for e in epochs]
        found = dict(self.losses)
        found["wall_s"] = float(sum(slowest))
        found["epoch_s_slowest_rank"] = float(np.mean(slowest)) if slowest else float("nan")
        if means := [row["epoch_s"] for row in self.averages if "epoch_s" in row]:
            found["epoch_s_mean_of_ranks"] = float(np.mean(means))
        return found

    def facts(self) -> dict[str, object]:
        return {"ranks": self.ranks, "averages": self.averages, "totals": self.totals()}
