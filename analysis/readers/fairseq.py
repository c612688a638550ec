"""fairseq: its JSON lines and its `simple` lines, of the inner training loop.

    [train_inner][INFO] - {"epoch": 1, "loss": "9.427", "wps": "25389.4", ...}
    | INFO | train_inner | epoch 001:  200 / 694 loss=9.427, ppl=689, wps=25389.4, ...
    | epoch 010:   2000 / 8223 loss=1.27 (1.50), wps=962, wpb=908, bsz=32, ...             (2018)

Words (tokens) per second are averaged since the line before; no step time is printed.
"""

import re

import numpy as np

from analysis.readers._endings import judge_end
from analysis.readers._lines import find_int, labelled, table
from analysis.readers._log import Log
from analysis.readers._settings import header_of, read_header, state
from analysis.readers._steps import put_steps
from analysis.records import Record

FORMAT = "fairseq"
MARKS = ((b"num_updates", b"wps", b"ups"), (b"| epoch ", b" loss=", b", wps=", b", wpb="))
BANNERS = (b"[fairseq", b"fairseq_cli.train")

_START = re.compile(
    rb"(?:train_inner|\| epoch (?P<epoch>\d{1,6}):? {1,8}(?P<within>\d{1,9}) / (?P<updates>\d{1,9})"
    rb"|\d{2}<[\d:?]{1,12}, {1,4}[\d.]{1,12}(?:it/s|s/it)"
    rb"|(?:^|(?<=\r)|(?<=[\d;\[]m))(?:\xef\xbb\xbf)?(?=\{\"epoch))"
    rb"[^\r\n{}=]{0,200}?(?=\{\"|loss=)",
    re.MULTILINE,
)
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
    epoch, within, updates = (columns.pop(name) for name in ("epoch", "within", "updates"))
    counted = (epoch - 1) * updates + within  # where its updates are not numbered
    columns["iteration"] = np.where(np.isnan(columns["iteration"]), counted, columns["iteration"])
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
        record.completed = log.last(b"done training in", offsets[-1]) is not None or None
    judge_end(record, log, offsets)
    return record
