"""picotron: `[rank 0] Step: 1 | Loss: 10.9 | Global batch size: 16.38K | Tokens/s: 1.2K | ...`.

Its first version separates with commas. The global batch is in tokens; a step's time is printed by
some versions only and follows from tokens per second elsewhere.
"""

import re

import numpy as np

from analysis.readers._endings import judge_end
from analysis.readers._lines import find_int, labelled, positive, ranks_of_rates, table, word
from analysis.readers._log import Log
from analysis.readers._settings import header_of, read_header, state
from analysis.readers._steps import put_steps
from analysis.records import Record

FORMAT = "picotron"
MARKS = ((b"Step: ", b"Tokens/s/GPU: "),)
BANNERS = (b"picotron",)

_START = re.compile(word(b"Step:") + rb" {0,8}(?P<iteration>\d{1,9}) {0,8}[|,] (?=Loss:)")
_FIELDS = {
    "loss": labelled(rb"Loss"),
    "tokens": labelled(rb"Global batch size"),
    "tokens_per_s": labelled(rb"Tokens/s"),
    "per_gpu": labelled(rb"Tokens/s/GPU"),
    "ms": labelled(rb"Time/step"),
}
_SIZES = {
    "tp": re.compile(rb'"tp_size": (\d{1,6})'),
    "pp": re.compile(rb'"pp_size": (\d{1,6})'),
    "dp": re.compile(rb'"dp_size": (\d{1,6})'),
    "planned_steps": re.compile(rb'"total_train_steps": (\d{1,9})'),
}


def read(log: Log) -> Record:
    """Read one log; without a step line the arrays are empty."""
    record = Record(source=str(log.path), format=FORMAT, engine=FORMAT)
    columns, offsets = table(log, _START, _FIELDS)
    printed, derived = columns["ms"] / 1000, columns["tokens"] / positive(columns["tokens_per_s"])
    columns["step_s"] = np.where(np.isnan(printed), derived, printed)
    header = header_of(log, int(offsets[0]) if len(offsets) else None)
    ranks = ranks_of_rates(columns["tokens_per_s"], columns.pop("per_gpu"))
    tokens = columns["tokens"]
    if len(offsets) and np.isnan(printed).all():
        record.notes.append("step times follow from the printed tokens per second")
    offsets = put_steps(record, columns, offsets, log)
    state(record, {name: find_int(p, header) for name, p in _SIZES.items()}, "log")
    read_header(record, header)
    if record.gpus is None:
        record.gpus = ranks
    tokens = tokens[np.isfinite(tokens)]
    if len(tokens) and offsets and record.global_batch is None and record.seq_len:
        record.global_batch = round(float(tokens[-1]) / record.seq_len)
    if record.planned_steps and offsets:
        record.completed = bool(record.iteration[-1] >= record.planned_steps)
    judge_end(record, log, offsets)
    return record
