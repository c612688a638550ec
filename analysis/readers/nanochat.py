"""nanochat and its ancestor build-nanogpt.

step 00010/21400 (0.05%) | loss: 9.1 | grad norm: 0.4 | lrm: 1.00 | dt: 5.04ms | tok/sec: 25,388
step    12 | loss: 9.3 | lr 6.0e-04 | norm: 1.2 | dt: 95.21ms | tok/sec: 172000.10
"""

import re

from analysis.readers._endings import judge_end
from analysis.readers._lines import find_int, labelled, table, word
from analysis.readers._log import Log
from analysis.readers._settings import header_of, read_header, state
from analysis.readers._steps import put_steps
from analysis.records import Record

FORMAT = "nanochat"
MARKS = ((b"| dt: ", b"| tok/sec: "),)
BANNERS = (b"nanochat.common",)

_START = re.compile(
    word(b"step ") + rb" {0,7}(?P<iteration>\d{1,9})(?:/(?P<planned>\d{1,9}))?"
    rb"(?: \([^)|\r\n]{1,12}\))? ?\| ?loss: "
)
_FIELDS = {
    "loss": labelled(rb"loss"),
    "grad_norm": labelled(rb"(?:grad )?norm"),
    "ms": labelled(rb"dt"),
    "tokens_per_s": labelled(rb"tok/sec"),
}
_WORLD = re.compile(rb"[Ww]orld size: (\d{1,6})")
_BATCH = re.compile(rb"[Tt]otal (?:desired )?batch size:? ([\d,]{1,16})")
_MICRO = re.compile(rb"Tokens / micro-batch / rank: (\d{1,6}) x (\d{1,8})")
_ALL_MICRO = re.compile(rb"Tokens / micro-batch: ([\d,]{1,16})")
_STEPS = re.compile(rb"number of iterations:? ([\d,]{1,16})")
_PARAMS = re.compile(rb"[Nn]umber of parameters: ([\d,]{1,20})")


def read(log: Log) -> Record:
    """Read one log; without a step line the arrays are empty."""
    record = Record(source=str(log.path), format=FORMAT, engine=FORMAT)
    columns, offsets = table(log, _START, _FIELDS)
    columns["step_s"] = columns.pop("ms") / 1000
    planned = columns.pop("planned")
    header = header_of(log, int(offsets[0]) if len(offsets) else None)
    offsets = put_steps(record, columns, offsets, log)
    facts = {"gpus": find_int(_WORLD, header), "params": find_int(_PARAMS, header)}
    facts["planned_steps"] = find_int(_STEPS, header)
    if len(planned) and planned[-1] == planned[-1]:
        facts["planned_steps"] = int(planned[-1])
    if micro := _MICRO.search(header):
        facts["micro_batch"], facts["seq_len"] = int(micro[1]), int(micro[2])
        if everyone := find_int(_ALL_MICRO, header):
            facts["gpus"] = everyone // (int(micro[1]) * int(micro[2]))
    state(record, facts, "log")
    read_header(record, header)
    tokens = find_int(_BATCH, header)  # in tokens
    if tokens and record.seq_len and not tokens % record.seq_len:
        record.global_batch = tokens // record.seq_len
    if record.planned_steps and offsets:
        record.completed = bool(record.iteration[-1] >= record.planned_steps - 1)
    judge_end(record, log, offsets)
    return record
