"""llm.c: its console and its main.log.

step    2/18865 | loss 10.96 (+nanz)| norm 15.2 (+nanz)| ... | 1250.10 ms | ... | 419000 tok/s
step 1/74: train loss 4.367631 (80.639749 ms, 50793 tok/s)                 (2024's first)
s:1 trl:10.9598 lr:0.000002 norm:15.24            (main.log: losses only, no time)
"""

import re

from analysis.readers._endings import judge_end
from analysis.readers._lines import NUMBER, labelled, table, word
from analysis.readers._log import Log
from analysis.readers._settings import state
from analysis.readers._steps import put_steps
from analysis.records import Record

FORMAT = "llm.c"
MARKS = ((b"s:", b" trl:"), (b"step ", b"tok/s", b"| loss "), (b"step ", b"tok/s", b"train loss "))

_CONSOLE = re.compile(
    word(b"step ")
    + rb" {0,7}(?P<iteration>\d{1,9})/(?P<planned>\d{1,9})(?: \||:) (?:train )?(?=loss )"
)
_CONSOLE_FIELDS = {
    "loss": labelled(rb"loss", rb" {1,3}"),
    "grad_norm": labelled(rb"norm", rb" {1,3}"),
    "ms": re.compile(rb"[|(] {0,4}" + NUMBER + rb" ms"),
    "tokens_per_s": re.compile(rb"[|,] {0,4}" + NUMBER + rb" tok/s"),
}
_MAIN = re.compile(
    word(b"s:") + rb"(?P<iteration>\d{1,9}) trl:" + NUMBER.replace(b"(", b"(?P<loss>", 1)
)
_MAIN_FIELDS = {"grad_norm": labelled(rb"norm")}


def read(log: Log) -> Record:
    """Read one log; without a step line the arrays are empty."""
    record = Record(source=str(log.path), format=FORMAT, engine=FORMAT)
    columns, offsets = table(log, _CONSOLE, _CONSOLE_FIELDS)
    if len(offsets):
        columns["step_s"] = columns.pop("ms") / 1000
        state(record, {"planned_steps": int(columns["planned"][-1])}, "log")
    else:
        columns, offsets = table(log, _MAIN, _MAIN_FIELDS)
        record.notes.append("main.log holds losses only: no times")
    offsets = put_steps(record, columns, offsets, log)
    if record.planned_steps:
        record.completed = bool(record.iteration[-1] >= record.planned_steps)
    judge_end(record, log, offsets)
    return record
