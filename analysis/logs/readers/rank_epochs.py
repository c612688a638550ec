"""Per-epoch breakdowns that every rank prints, with or without their average.

    Rank 0 Epoch 0 timing breakdown:                 Average metrics:
        Total epoch time: 1384.64 seconds                Total epoch time: 1095.70 seconds
        Training communication time: 41.09 seconds

An epoch lasts as long as its slowest rank: that is its time here, and the printed average over
ranks, which is shorter, is kept apart and noted where the two differ.
"""

import math
import re

from analysis.logs.parsing.endings import judge_end
from analysis.logs.parsing.fields import number, plain
from analysis.logs.parsing.line_format import Format
from analysis.logs.parsing.logfile import Log
from analysis.logs.record import Record, Refusal

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
    """Read one log. `totals["wall_s"]` is the sum over epochs of the slowest rank's time.

    Raises:
        Refusal: a document that holds several runs under Markdown headings.
    """
    runs: dict[str, list[dict[str, float]]] = {"": []}
    last, heading = 0, ""
    for at, match in log.matches(_ANY):
        if match["heading"]:
            heading = plain(match["heading"]).decode("utf-8", "replace").strip()
            continue
        rows, last = runs.setdefault(heading, []), at
        if match["of_epoch"]:
            epoch, rank = float(match["of_epoch"]), float(match["rank"] or 0)
            rows.append({"rank": rank, "epoch": epoch})
        elif match["average"]:
            rows.append({"rank": math.nan})
        elif match["train"]:
            losses = {"train_loss": number(match["train"]), "val_loss": number(match["val"])}
            rows.append(losses)
        elif rows:
            name = _NAMES[match["part"] or match["loss_of"]]
            rows[-1].setdefault(name, number(match["seconds"] or match["loss"]))
    runs = {name: rows for name, rows in runs.items() if any("rank" in row for row in rows)}
    if len(runs) > 1:
        reason = f"holds {len(runs)} runs ({', '.join(runs)}): copy each to a file of its own"
        raise Refusal(str(log.path), reason)
    for rows in runs.values():
        record.totals = _totals(rows)
        mean_s = record.totals.get("epoch_s_mean_of_ranks", math.inf)
        slowest_s = record.totals.get("epoch_s_slowest_rank", 0.0)
        if slowest_s > 1.02 * mean_s:
            record.notes.append(
                f"the printed epoch time {mean_s:.2f} s is a mean over ranks;"
                f" the slowest rank needs {slowest_s:.2f} s"
            )
        ranks = [row["rank"] for row in rows if "epoch" in row]
        record.gpus = 1 + int(max(ranks)) if ranks else None
        record.nan_iterations = sum(math.isnan(row.get("train_loss", 0.0)) for row in rows)
        record.completed = record.whole_run = True
        judge_end(record, log, [last])


def _totals(rows: list[dict[str, float]]) -> dict[str, float]:
    """The losses that were printed last, the sum of the epochs, and the mean of an epoch by its
    slowest rank and by the printed averages."""
    each = [row for row in rows if "epoch" in row and "epoch_s" in row]
    means = [row["epoch_s"] for row in rows if math.isnan(row.get("rank", 0)) and "epoch_s" in row]
    slowest: dict[float, float] = {}
    for row in each:
        slowest[row["epoch"]] = max(slowest.get(row["epoch"], 0.0), row["epoch_s"])
    totals = dict([{}, *(row for row in rows if "rank" not in row)][-1])
    totals["wall_s"] = float(sum(slowest.values()) or max(means, default=0.0))
    if slowest:
        totals["epoch_s_slowest_rank"] = sum(slowest.values()) / len(slowest)
    if means:
        totals["epoch_s_mean_of_ranks"] = sum(means) / len(means)
    return totals


FORMAT = Format(
    name="rank epochs",
    marks=((b"Total epoch time:", b"Training compute time:"),),
    reader=_read,
)
