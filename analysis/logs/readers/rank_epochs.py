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
    """Reads one log: a step is an epoch, with the time of its slowest rank.

    Raises:
        Refusal: it holds several runs.
    """
    blocks: list[dict[str, Any]] = []  # what one rank says of one epoch, or the averages' numbers
    for at, match in log.matches(_ANY):
        texts = {name: text for name, text in match.groupdict().items() if text}
        values = {name: True if name == "average" else number(text) for name, text in texts.items()}
        values["nan_loss"] = float(is_nan(texts.get("loss")))
        if {"epoch", "average"} & texts.keys():
            blocks.append({"at": float(at)} | values)
        elif blocks:  # the first of a name counts
            blocks[-1] = values | blocks[-1]
    blocks = [block for block in blocks if block.get("step_s")]
    averages = [block for block in blocks if "average" in block]
    # an epoch -> its ranks -> the first block of each
    epochs: dict[float, dict[float | None, dict[str, Any]]] = defaultdict(dict)
    for block in blocks:
        if "epoch" in block:
            first = epochs[block["epoch"]].setdefault(block.get("rank"), block)
            if first["step_s"] != block["step_s"]:
                lines = [log.line_no(int(entry["at"])) for entry in (first, block)]
                reason = f"several runs: lines {lines[0]} and {lines[1]} are of one rank and epoch"
                raise Refusal(str(log.path), f"{reason}; copy each run to a file of its own")
    n_ranks = max(map(len, epochs.values()), default=0)
    # An epoch with fewer ranks is left out: the slowest may be among those that are missing.
    slowest = [
        max(ranks.values(), key=lambda block: block["step_s"]) | {"iteration": epoch}
        for epoch, ranks in sorted(epochs.items())
        if len(ranks) == n_ranks
    ]
    if slowest and averages:
        mean_s = np.mean([average["step_s"] for average in averages])
        step_s = np.mean([entry["step_s"] for entry in slowest])
        words = f"the printed {mean_s:.2f} s are the mean over ranks; the slowest takes"
        record.doubt("ranks", f"{words} {step_s:.2f} s")
        for entry, average in zip(slowest, averages, strict=False):
            entry |= {name: average[name] for name in ("loss", "nan_loss") if "loss" in average}
    elif averages:
        slowest = [{"iteration": float(i)} | average for i, average in enumerate(averages)]
        record.doubt("ranks", "the mean over ranks is printed, not the slowest")
    names = {name for entry in slowest for name in entry} - {"average", "epoch", "rank"}
    columns = {
        name: np.array([entry.get(name, np.nan) for entry in slowest], float)
        for name in names | {"at"}
    }
    put_steps(record, columns, log)
    for name in ("compute_s", "communication_s"):
        if name in columns and np.isfinite(columns[name]).all():
            record.totals[name] = float(columns[name].mean())
    numbers = {rank for ranks in epochs.values() for rank in ranks}
    gpus = None
    if numbers == {None}:  # one process, which does not number itself
        gpus = 1
    elif n_ranks > 1 and numbers == set(range(n_ranks)):
        gpus = n_ranks
    state(record, {"gpus": gpus}, "log")
    record.epochs = bool(slowest)
    judge_end(record, log)


FORMAT = Format(
    name="rank epochs",
    marks=((b"Total epoch time:", b"Training compute time:"),),
    reader=_read,
)
