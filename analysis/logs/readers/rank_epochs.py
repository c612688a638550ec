"""Per-epoch breakdowns that every rank prints, with or without their average.

    Rank 0 Epoch 0 timing breakdown:                 Average metrics:
        Total epoch time: 1384.64 seconds                Total epoch time: 1095.70 seconds
        Training communication time: 41.09 seconds

An epoch lasts as long as its slowest rank: that is its time here, and the printed average over
ranks, which is shorter, is kept apart and noted where the two differ.
"""

import math
import re
from dataclasses import dataclass, field

import numpy as np

from analysis.logs.parsing.endings import judge_end
from analysis.logs.parsing.fields import number, plain
from analysis.logs.parsing.line_format import Format
from analysis.logs.parsing.logfile import Log
from analysis.logs.record import Record

_ANY = re.compile(
    rb"(?:Rank (?P<rank>\d{1,6}) )?Epoch (?P<of_epoch>\d{1,9}) timing breakdown:"
    rb"|(?P<average>Average metrics:)"
    rb"|(?P<part>Total epoch|Data loading|Data movement|Training compute|Training communication)"
    rb" time: {0,4}(?P<seconds>[\d.]{1,20}) {0,4}seconds"
    rb"|(?P<loss_of>Train|Val|Average) [Ll]oss: {0,4}(?P<loss>[\d.]{1,20}|-?nan)"
    rb"|Epoch \d{1,9}: train loss (?P<train>[\d.]{1,20}|-?nan) ?,"
    rb" val loss (?P<val>[\d.]{1,20}|-?nan)"
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


def _read(log: Log, record: Record) -> None:
    """Read one log.

    `totals["wall_s"]` is the sum over epochs of the slowest rank's time. A document that holds
    several runs under Markdown headings has them in `Record.runs`, by heading, and no totals.
    """
    parsed = [_Run()]
    last = 0
    for offset, match in log.matches(_ANY):
        if match["heading"]:
            parsed.append(_Run(plain(match["heading"]).decode("utf-8", "replace").strip()))
        else:
            parsed[-1].add(match)
            last = offset
    runs = [(run, run.totals()) for run in parsed if run.ranks or run.averages]
    if not runs:
        return
    for run, totals in runs:
        record.runs[run.name] = {"ranks": run.ranks, "averages": run.averages, "totals": totals}
        slowest, mean = totals["epoch_s_slowest_rank"], totals.get("epoch_s_mean_of_ranks")
        if mean is not None and run.ranks and slowest > 1.02 * mean:
            of = f"{run.name}: " if run.name else ""
            record.notes.append(
                f"{of}the printed epoch time {mean:.2f} s is a mean over ranks;"
                f" the slowest rank needs {slowest:.2f} s"
            )
    if len(runs) > 1:
        names = ", ".join(run.name for run, _ in runs)
        record.notes.insert(0, f"holds {len(runs)} runs: {names}")
    else:
        ((run, record.totals),) = runs
        record.runs, record.ranks, record.averages = {}, run.ranks, run.averages
        if run.ranks:
            record.gpus = 1 + int(max(row["rank"] for row in run.ranks))
    losses = [row.get("train_loss", 0.0) for run, _ in runs for row in (*run.ranks, run.losses)]
    record.nan_iterations = sum(map(math.isnan, losses))
    record.completed = record.whole_run = True
    judge_end(record, log, [last])


@dataclass
class _Run:
    """The breakdowns under one heading: dicts of seconds (and losses), by _NAMES."""

    name: str = ""
    ranks: list[dict[str, float]] = field(default_factory=list)
    averages: list[dict[str, float]] = field(default_factory=list)
    losses: dict[str, float] = field(default_factory=dict)
    current: dict[str, float] = field(default_factory=dict)  # the breakdown that is being read

    def add(self, match: re.Match[bytes]) -> None:
        if match["of_epoch"]:
            self.current = {"rank": float(match["rank"] or 0), "epoch": float(match["of_epoch"])}
            self.ranks.append(self.current)
        elif match["average"]:
            self.current = {}
            self.averages.append(self.current)
        elif match["train"]:
            self.losses = {"train_loss": number(match["train"]), "val_loss": number(match["val"])}
            self.current = {}
        else:
            name = _NAMES[match["part"] or match["loss_of"]]
            self.current.setdefault(name, number(match["seconds"] or match["loss"]))

    def totals(self) -> dict[str, float]:
        slowest: dict[float, float] = {}  # rank's time, by epoch
        for row in self.ranks or self.averages:
            if "epoch_s" in row:
                epoch = row.get("epoch", 0.0)
                slowest[epoch] = max(slowest.get(epoch, row["epoch_s"]), row["epoch_s"])
        found = dict(self.losses)
        found["wall_s"] = float(sum(slowest.values()))
        found["epoch_s_slowest_rank"] = float(np.mean([*slowest.values()])) if slowest else math.nan
        if means := [row["epoch_s"] for row in self.averages if "epoch_s" in row]:
            found["epoch_s_mean_of_ranks"] = float(np.mean(means))
        return found


FORMAT = Format(
    name="rank epochs",
    marks=((b"Total epoch time:", b"Training compute time:"),),
    reader=_read,
)
