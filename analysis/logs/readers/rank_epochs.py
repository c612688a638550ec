"""Per-epoch breakdowns that every rank prints, with or without their average.

    Rank 0 Epoch 0 timing breakdown:                 Average metrics:
        Total epoch time: 1384.64 seconds                Total epoch time: 1095.70 seconds
        Training communication time: 41.09 seconds

An epoch lasts as long as its slowest rank: a note says how long beside the printed average over
ranks, which is shorter.
"""

import math
import re
from collections import defaultdict

import numpy as np

from analysis.logs.parsing.endings import judge_end
from analysis.logs.parsing.fields import number, plain
from analysis.logs.parsing.line_format import Format
from analysis.logs.parsing.logfile import Log
from analysis.logs.record import Record, Refusal

_BREAKDOWN = {"epoch", "average"}
_ANY = re.compile(
    rb"(?:Rank (?P<rank>\d{1,6}) )?Epoch (?P<epoch>\d{1,9}) timing breakdown:"
    rb"|(?P<average>Average metrics:)"
    rb"|Total epoch time: {0,4}(?P<epoch_s>[\d.]{1,20}) {0,4}seconds"
    rb"|(?:Train|Average) [Ll]oss: {0,4}(?P<loss>[\d.]{1,20}|-?nan)"
    rb"|Epoch \d{1,9}: train loss (?P<of_epoch>[\d.]{1,20}|-?nan)"
    rb"|(?:^|(?<=\r)|(?<=[\d;\[]m))(?:\xef\xbb\xbf)?#{1,6} (?P<heading>[^\r\n]{1,120})",
    re.MULTILINE,
)


def _read(log: Log, record: Record) -> None:
    """Read one log.

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
        values = {name: number(text) for name, text in match.groupdict().items() if text}
        if values.keys().isdisjoint(("epoch_s", "loss")):
            rows.append(values)
        elif rows:  # the first of a name counts
            rows[-1] = values | rows[-1]
    runs = {
        name: rows for name, rows in runs.items() if any(_BREAKDOWN & row.keys() for row in rows)
    }
    if len(runs) > 1:
        reason = f"holds {len(runs)} runs ({', '.join(runs)}): copy each to a file of its own"
        raise Refusal(str(log.path), reason)
    for rows in runs.values():
        losses = [row[name] for row in rows for name in ("loss", "of_epoch") if name in row]
        record.totals = {"loss": losses[-1]} if losses else {}
        record.nan_iterations = sum(map(math.isnan, losses))
        slowest: dict[float, float] = defaultdict(float)
        for row in (row for row in rows if "epoch" in row):
            record.gpus = max(record.gpus or 1, 1 + int(row.get("rank", 0)))
            slowest[row["epoch"]] = max(slowest[row["epoch"]], row.get("epoch_s", 0.0))
        means = [row["epoch_s"] for row in rows if "average" in row and "epoch_s" in row]
        if slowest and means:
            record.notes.append(
                f"the printed epoch time {np.mean(means):.2f} s is a mean over ranks;"
                f" the slowest rank needs {np.mean(list(slowest.values())):.2f} s"
            )
        record.completed = record.whole_run = True
        judge_end(record, log, [last])


FORMAT = Format(
    name="rank epochs",
    marks=((b"Total epoch time:", b"Training compute time:"),),
    reader=_read,
)
