"""What every rank prints of an epoch, with or without the average over ranks.

    Rank 0 Epoch 0 timing breakdown:                 Average metrics:
        Total epoch time: 1384.64 seconds                Total epoch time: 1095.70 seconds
        Training compute time: 1335.39 seconds           Training compute time: 1047.59 seconds
        Training communication time: 41.09 seconds       Training communication time: 40.02 seconds

An entry is an epoch, which lasts as long as its slowest rank; the average is shorter. Where no rank
is printed, there is one.
"""

import re
from collections import defaultdict
from typing import Any

import numpy as np

from analysis.logs.parsing.failure_line import judge_end
from analysis.logs.parsing.fields import is_nan, number
from analysis.logs.parsing.line_format import Format
from analysis.logs.parsing.logfile import Log
from analysis.logs.parsing.setting_names import state
from analysis.logs.parsing.steps import put_steps
from analysis.logs.record import Record, Refusal

_TIMES = {"step_s": b"Total epoch", "compute_s": b"Training compute"}
_TIMES["communication_s"] = b"Training communication"
_TIME = rb"|%b time: {0,4}(?P<%b>\d{1,9}(?:\.\d{0,9})?) {0,4}seconds"
_ANY = re.compile(
    rb"(?:Rank (?P<rank>\d{1,6}) )?Epoch (?P<epoch>\d{1,9}) timing breakdown:"
    rb"|(?P<average>Average metrics:)"
    rb"|(?:Train|Average) [Ll]oss: {0,4}(?P<loss>\d{1,9}(?:\.\d{0,9})?|nan)(?=[\s\x1b])"
    + b"".join(_TIME % (words, name.encode()) for name, words in _TIMES.items())
)


def _read(log: Log, record: Record) -> None:
    """Read one log.

    Raises:
        Refusal: it holds several runs.
    """
    blocks: list[dict[str, Any]] = []
    for at, match in log.matches(_ANY):
        texts = {name: text for name, text in match.groupdict().items() if text}
        values = {k: True if k == "average" else number(text) for k, text in texts.items()}
        values["nan_loss"] = float(is_nan(texts.get("loss")))
        if {"epoch", "average"} & texts.keys():
            blocks.append({"at": float(at)} | values)
        elif blocks:  # the first of a name counts
            blocks[-1] = values | blocks[-1]
    blocks = [block for block in blocks if block.get("step_s")]
    averages = [block for block in blocks if "average" in block]
    ranks: dict[float, dict[float | None, dict[str, Any]]] = defaultdict(dict)
    for block in blocks:
        if "epoch" in block:
            first = ranks[block["epoch"]].setdefault(block.get("rank"), block)
            if first["step_s"] != block["step_s"]:
                lines = [log.line_no(int(of["at"])) for of in (first, block)]
                why = f"several runs: lines {lines[0]} and {lines[1]} are of one rank and epoch"
                raise Refusal(str(log.path), f"{why}; copy each run to a file of its own")
    most = max(map(len, ranks.values()), default=0)
    slowest = [
        max(of.values(), key=lambda block: block["step_s"]) | {"iteration": epoch}
        for epoch, of in sorted(ranks.items())
        if len(of) == most
    ]
    if slowest and averages:
        mean_s, step_s = (np.mean([b["step_s"] for b in of]) for of in (averages, slowest))
        words = f"the printed {mean_s:.2f} s are the mean over ranks; the slowest takes"
        record.doubts["ranks"] = f"{words} {step_s:.2f} s"
        for entry, average in zip(slowest, averages, strict=False):
            entry |= {k: average[k] for k in ("loss", "nan_loss") if "loss" in average}
    elif averages:
        slowest = [{"iteration": float(i)} | block for i, block in enumerate(averages)]
        record.doubts["ranks"] = "the mean over ranks is printed, not the slowest"
    names = {name for entry in slowest for name in entry} - {"average", "epoch", "rank"}
    columns = {k: np.array([e.get(k, np.nan) for e in slowest], float) for k in names | {"at"}}
    put_steps(record, columns, log)
    for name in ("compute_s", "communication_s"):
        if name in columns and np.isfinite(columns[name]).all():
            record.totals[name] = float(columns[name].mean())
    seen = {rank for of in ranks.values() for rank in of}
    gpus = {(None,): 1}.get(tuple(seen), most if most > 1 and seen == set(range(most)) else None)
    state(record, {"gpus": gpus}, "log")
    record.epochs = bool(slowest)
    judge_end(record, log)


FORMAT = Format(
    name="rank epochs",
    marks=((b"Total epoch time:", b"Training compute time:"),),
    reader=_read,
)
