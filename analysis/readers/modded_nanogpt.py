"""modded-nanogpt: `step:11/5100 train_loss:7.01 train_time:139ms step_avg:139.11ms`.

train_time is cumulative and step_avg a running mean, so a step's time is the difference of two
train_times. The steps whose step_avg is `nan` are the ones the script itself does not count (it
compiles in them and then restarts its clock). The log opens with the script's source, which
prints the same words with braces where numbers stand.
"""

import re

import numpy as np

from analysis.readers._endings import judge_end
from analysis.readers._lines import NUMBER, is_nan, lines, number, word
from analysis.readers._log import Log
from analysis.readers._settings import header_of, state
from analysis.readers._steps import put_steps
from analysis.records import Record

FORMAT = "modded-nanogpt"
MARKS = ((b"train_time:", b"step_avg:"),)

_STEP = re.compile(
    word(b"step:") + rb"(\d{1,9})/(\d{1,9}) (?:(train|val)_loss:" + NUMBER + rb" )?"
    rb"train_time:(\d{1,12})ms step_avg:" + NUMBER + rb"ms"
)  # fmt: skip
# It prints what nvidia-smi says as it starts: the machine's GPUs, and which have its processes.
_PROCESS = re.compile(rb"\| {1,8}(\d{1,3}) {1,4}N/A {1,4}N/A {1,12}\d{1,9} {1,8}C ")
_GPU = re.compile(rb"\| {1,4}\d{1,3} {1,3}((?:NVIDIA|AMD) [\w -]{1,40}?) {2,40}O[nf]")


def read(log: Log) -> Record:
    """Read one log; without a step line the arrays are empty."""
    record = Record(source=str(log.path), format=FORMAT, engine=FORMAT)
    rows, offsets, val_loss, average = [], [], None, float("nan")
    for offset, match, *_ in lines(log, _STEP):
        average = number(match[6])
        if match[3] == b"val":
            val_loss = number(match[4])
            continue
        rows.append([*(number(match[i]) for i in (1, 2, 4, 5, 6)), is_nan(match[4])])
        offsets.append(offset)
    iteration, planned, loss, time_ms, averages, nan = np.array(rows, float).reshape(-1, 6).T
    steps = np.diff(iteration, prepend=np.inf)
    step_s = np.diff(time_ms, prepend=np.nan) / 1000 / np.maximum(steps, 1)
    step_s[np.isnan(averages) | (steps <= 0) | (step_s < 0)] = np.nan
    first = (iteration == 1) & ~np.isnan(averages)  # its clock starts with it
    step_s[first] = time_ms[first] / 1000
    columns = {"iteration": iteration, "loss": loss, "step_s": step_s, "nan_loss": nan}
    kept = put_steps(record, columns, np.array(offsets), log)
    if kept:
        state(record, {"planned_steps": int(planned[-1])}, "log")
        record.completed = bool(record.iteration[-1] >= planned[-1])
        record.notes.append("step times are differences of the cumulative train_time")
        record.totals = {"step_s_mean": average / 1000, "train_s": float(time_ms[-1]) / 1000}
        if val_loss is not None:
            record.totals["val_loss"] = val_loss
        header = header_of(log, kept[0])
        cards, busy = _GPU.findall(header), set(_PROCESS.findall(header))
        facts = {"gpus": len(cards) if len(busy) == len(cards) else None}  # else some came later
        state(record, facts | {"gpu_type": cards[0].decode() if cards else None}, "log")
    judge_end(record, log, kept)
    return record
