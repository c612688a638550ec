"""fairseq: its JSON lines and its `simple` lines, of the inner training loop.

    [train_inner][INFO] - {"epoch": 1, "loss": "9.427", "wps": "25389.4", ...}
    | INFO | train_inner | epoch 001:  200 / 694 loss=9.427, ppl=689, wps=25389.4, ...

Words (tokens) per second are averaged since the line before; no step time is printed.
"""

import re

from analysis.readers._endings import judge_end
from analysis.readers._lines import find_int, labelled, table
from analysis.readers._log import Log
from analysis.readers._settings import header_of, read_header, state
from analysis.readers._steps import put_steps
from analysis.records import Record

FORMAT = "fairseq"
MARKS = ((b"num_updates", b"wps", b"ups"),)
BANNERS = (b"[fairseq", b"fairseq_cli.train")

_START = re.compile(rb"(?:train_inner|\| epoch \d{1,6})[^\r\n{}=]{0,200}?(?=\{\"|loss=)")
_VALUE = rb"(?:\"?: \"?|=)"


def _field(name: bytes) -> re.Pattern[bytes]:
    return labelled(name, _VALUE)


_FIELDS = {
    "iteration": _field(rb"num_updates"),
    "loss": _field(rb"loss"),
    "grad_norm": _field(rb"gnorm"),
    "tokens_per_s": _field(rb"wps"),
    "batch": _field(rb"bsz"),
    "ups": _field(rb"ups"),
}
_WORLD = re.compile(rb"'distributed_world_size': (\d{1,6})")
_STEPS = re.compile(rb"'max_update': (\d{1,9})")


def read(log: Log) -> Record:
    """Read one log; without an inner-loop line the arrays are empty."""
    record = Record(source=str(log.path), format=FORMAT, engine=FORMAT)
    columns, offsets = table(log, _START, _FIELDS)
    whole = columns["iteration"] == columns["iteration"]
    columns = {name: values[whole] for name, values in columns.items()}
    columns["samples_per_s"] = columns.pop("batch") * columns.pop("ups")
    offsets = offsets[whole]
    header = header_of(log, int(offsets[0]) if len(offsets) else None)
    offsets = put_steps(record, columns, offsets, log, averages=True)
    facts = {"gpus": find_int(_WORLD, header), "planned_steps": find_int(_STEPS, header)}
    state(record, facts, "log")
    read_header(record, header)
    if offsets:
        record.notes.append("no step time is printed, only words per second")
        record.completed = b"done training in" in log.tail or None
    judge_end(record, log, offsets)
    return record
