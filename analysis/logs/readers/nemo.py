"""NeMo: DLLogger's JSON and text lines, NeMo 2's console.

    DLLL {"type": "LOG", "step": 0, "data": {"train_step_timing in s": 107.3, ...}}
    DLL 2025-06-11 05:23:04 - 18 reduced_train_loss : 9.04 ... train_step_timing in s : 27.49
    Training epoch 0, iteration 1/99 | lr: 1e-4 | ... | train_step_timing in s: 61.9

The surest kind that a log holds is read. NeMo's step timer prints the mean of its last few steps
(five by default), so a slow first step lingers; it is noted.
"""

import json
import math
import re
from typing import Any

import numpy as np

from analysis.logs.parsing.fields import labelled
from analysis.logs.parsing.json_values import integer, is_nan, mapping, real
from analysis.logs.parsing.line_format import Columns, LineFormat, last_number
from analysis.logs.parsing.lines import table
from analysis.logs.parsing.logfile import Log
from analysis.logs.parsing.setting_names import read_settings, state
from analysis.logs.record import Record

_JSON = re.compile(
    rb"DLLL (\{[^\r\n]{1,20000}\})(?=(?:[ \t\0]|\x1b\[[\d;]{0,20}[mK])*(?:\r|\n|\Z))"
)
_DLL = re.compile(rb"DLL \d{4}-\d\d-\d\d [\d:.]{8,16} - (?P<iteration>\d{1,9}) ")
_CONSOLE = re.compile(rb"Training epoch \d{1,9}, iteration \d{1,9}/(?P<last>\d{1,9}) \|")
_VALUE = rb" ?[:=] ?"
_FIELDS = {
    "global_step": labelled(rb"global_step", _VALUE),
    "step_s": labelled(rb"train_step_timing in s", _VALUE),
    "loss": labelled(rb"reduced_train_loss", _VALUE),
    "grad_norm": labelled(rb"grad_norm", _VALUE),
    "tflops": labelled(rb"TFLOPS_per_GPU", _VALUE),
}
_CONFIG = ("cfg", "trainer")  # what the names in DLLogger's parameter line begin with


def _scan(log: Log, record: Record) -> Columns:
    """Returns the columns of the surest kind of lines that the log holds: DLLogger's JSON, its
    text, else the console's."""
    columns = _dllogger(log, record) if log.contains(b"DLLL {") else {"at": np.empty(0)}
    for start in (_DLL, _CONSOLE):
        if len(columns["at"]):
            return columns
        columns = table(log, start, _FIELDS, record)
        columns.setdefault("iteration", columns["global_step"])
        used = ~np.isnan(columns["step_s"])
        if start is _CONSOLE and not used.any():  # its timer can be off
            used = ~np.isnan(columns["loss"])
        columns = {name: values[used] for name, values in columns.items()}
    return columns


def _gpus(record: Record, columns: Columns, header: bytes) -> None:
    """Fills the GPUs: nodes times devices of a node."""
    nodes = last_number(rb"num_nodes(?<!\wnum_nodes)['\"]?[:=] ?(\d{1,6})", header)
    devices = last_number(rb"devices(?<!\wdevices)['\"]?[:=] ?(\d{1,4})", header)
    if nodes and devices and len(columns["iteration"]):
        state(record, {"gpus": nodes * devices}, "log")


def _finish(record: Record, log: Log) -> None:
    """Notes what NeMo's timer measures. Sets that the run completed where NeMo says that a limit
    stopped it."""
    if not len(record.steps):
        return
    record.running_average = not np.isnan(record.steps["step_s"]).all()
    timer = "step times are NeMo's running means of the last few steps"
    record.note(timer if record.running_average else "no step time is printed")
    after = log.slice(record.last_at, record.last_at + (1 << 16))
    if not record.completed:
        record.completed = b"`Trainer.fit` stopped: `max_" in after or None


def _dllogger(log: Log, record: Record) -> Columns:
    """Returns the columns of DLLogger's JSON lines, and fills the settings of its parameter
    lines."""
    names = ("train_step_timing in s", "reduced_train_loss", "grad_norm")
    rows: list[list[float]] = []
    n_broken, facts = 0, {}
    for offset, block in log.blocks():
        matches = list(_JSON.finditer(block))
        for match, content in zip(matches, _parsed([m[1] for m in matches]), strict=True):
            if content is None:
                n_broken += 1
                continue
            line = mapping(content)
            data, step = mapping(line.get("data")), line.get("step")
            if step == "PARAMETER":  # the last parameter line before training counts
                settings = {}
                for path, value in data.items():
                    group, _, name = path.partition("/")
                    if group in _CONFIG and isinstance(value, str | int):
                        settings[name] = [str(value)]
                facts |= read_settings(record, settings)
            elif names[0] in data and integer(step) is not None:
                step_s, loss, grad_norm = (real(data.get(name)) for name in names)
                is_nan_loss = math.isnan(loss) and is_nan(data.get(names[1]))
                rows.append([offset + match.start(), step, step_s, loss, grad_norm, is_nan_loss])
    state(record, facts, "log")
    if n_broken:
        record.note(f"{n_broken} DLLogger lines are not JSON")
    column_names = ("at", "iteration", "step_s", "loss", "grad_norm", "nan_loss")
    return dict(zip(column_names, np.array(rows, float).reshape(-1, 6).T, strict=True))


def _parsed(texts: list[bytes]) -> list[Any]:
    """Returns what each text holds as JSON; None where it is no JSON. All are parsed at once where
    all are JSON, which is quicker."""
    try:
        contents = json.loads(b"[%b]" % b",".join(texts))
        if len(contents) == len(texts):
            return contents
    except ValueError:
        pass
    contents = []
    for text in texts:
        try:
            contents.append(json.loads(text))
        except ValueError:
            contents.append(None)
    return contents


FORMAT = LineFormat(
    name="NeMo",
    marks=((b"train_step_timing in s",), (b"Training epoch ", b"reduced_train_loss")),
    banners=(b"nemo_logging:",),
    starts=(b'"PARAMETER"', b"GPU available: "),
    scan=_scan,
    facts={"planned_steps": rb"max_steps['\"]?[:=] ?(\d{1,9})"},
    first=0,
    prepare=_gpus,
    finish=_finish,
)
