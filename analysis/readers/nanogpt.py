"""nanoGPT: `iter 10: loss 9.7188, time 2950.15ms, mfu 22.82%`.

It prints every log_interval-th iteration's own time, which includes an evaluation or checkpoint
where one fell into it.
"""

import re

from analysis.readers._endings import judge_end
from analysis.readers._lines import NUMBER, find_int, number, positive, table, word
from analysis.readers._log import Log
from analysis.readers._settings import header_of, read_header, state
from analysis.readers._steps import put_steps
from analysis.records import Record

FORMAT = "nanoGPT"
MARKS = ((b"iter ", b": loss ", b"ms, mfu "), (b"iter ", b": loss ", b", time "))
BANNERS = (b"tokens per iteration will be:",)

_START = re.compile(
    word(b"iter ") + rb"(?P<iteration>\d{1,9}): loss " + NUMBER.replace(rb"(", rb"(?P<loss>", 1)
    + rb", time (?P<ms>[\d.]{1,20})ms"
)  # fmt: skip
_TOKENS = re.compile(rb"tokens per iteration will be: ([\d,]{1,20})")
_PARAMS = re.compile(rb"number of parameters: ([\d.,]{1,16}[KMBG]?)")
_STEPS = re.compile(rb"max_iters(?<!\wmax_iters) {0,3}= {0,3}(\d{1,9})")


def read(log: Log) -> Record:
    """Read one log; without an iteration line the arrays are empty."""
    record = Record(source=str(log.path), format=FORMAT, engine=FORMAT)
    columns, offsets = table(log, _START, {})
    columns["step_s"] = columns.pop("ms") / 1000
    header = header_of(log, int(offsets[0]) if len(offsets) else None)
    tokens = find_int(_TOKENS, header)
    if tokens:
        columns["tokens_per_s"] = tokens / positive(columns["step_s"])
    offsets = put_steps(record, columns, offsets, log)
    params = _PARAMS.search(header)
    facts = {"planned_steps": find_int(_STEPS, header)}
    facts["params"] = number(params[1]) if params else None
    state(record, facts, "log")
    read_header(record, header)
    if tokens and record.seq_len is None and record.model.get("max_seq_len"):
        record.seq_len = record.model["max_seq_len"]
    if tokens and record.seq_len and not tokens % record.seq_len:
        record.global_batch = tokens // record.seq_len
    if record.planned_steps and len(record.iteration):
        record.completed = bool(record.iteration[-1] >= record.planned_steps)
    judge_end(record, log, offsets)
    return record
