"""NeMo: DLLogger's JSON and text lines, NeMo 2's console.

    DLLL {"type": "LOG", "step": 0, "data": {"train_step_timing in s": 107.3, ...}}
    DLL 2025-06-11 05:23:04 - 18 reduced_train_loss : 9.04 ... train_step_timing in s : 27.49
    Training epoch 0, iteration 1/99 | lr: 1e-4 | ... | train_step_timing in s: 61.9

The surest kind that a log holds is read. NeMo's step timer prints the mean of its last few steps
(five by default), so a slow first step lingers; it is noted.
"""

import contextlib
import json
import re
from typing import Any

import numpy as np

from analysis.logs.parsing.fields import LINE_END, NUMBER, labelled
from analysis.logs.parsing.json_values import mapping, opens_with_json
from analysis.logs.parsing.line_format import Format, last_number
from analysis.logs.parsing.lines import Columns, Line
from analysis.logs.parsing.logfile import Log
from analysis.logs.parsing.setting_names import header_of, read_settings, state
from analysis.logs.record import Record

_JSON = re.compile(
    rb"DLLL \{(?=[^\r\n]{0,400}?\"step\": (?P<iteration>\d{1,15})[,}])"
    rb"(?=[^\r\n]{1,4000}?\"train_step_timing in s\": )"
    rb"(?=[^\r\n]{1,4000}\}" + LINE_END + rb")"
)
_PARAMETERS = re.compile(rb"DLLL (\{[^\r\n]{0,200}\"PARAMETER\"[^\r\n]{1,20000}\})")
_JSON_FIELDS = {
    name: re.compile(rb"\"%b\": (?:\"?%b\"?(?=[,}]))?" % (key, pattern))
    for name, key, pattern in (
        ("step_s", b"train_step_timing in s", NUMBER),
        ("loss", b"reduced_train_loss", NUMBER),
        ("grad_norm", b"grad_norm", NUMBER),
    )
}
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


def _timed(columns: Columns, record: Record, log: Log) -> Columns:
    """Returns the columns of the lines that print a step's time; of a console whose timer is off,
    of those with a loss."""
    is_console = "iteration" not in columns
    if is_console:
        columns["iteration"] = columns["global_step"]
    used = np.isfinite(columns["iteration"]) & ~np.isnan(columns["step_s"])
    if is_console and not used.any():
        used = ~np.isnan(columns["loss"])
    return {name: values[used] for name, values in columns.items()}


def _of_dllogger(columns: Columns, record: Record, log: Log) -> Columns:
    """Returns the columns of DLLogger's steps, and fills the settings of its parameter lines: the
    last one before training counts."""
    facts: dict[str, Any] = {}
    header = header_of(log, next(iter(columns["at"].astype(int)), None))
    for text in _PARAMETERS.findall(header):
        with contextlib.suppress(ValueError):
            data = mapping(mapping(json.loads(text)).get("data"))
            paths = {path.partition("/"): value for path, value in data.items()}
            facts |= read_settings(
                record,
                {
                    name: [str(value)]
                    for (group, _, name), value in paths.items()
                    if group in _CONFIG and isinstance(value, str | int)
                },
            )
    state(record, facts, "log")
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
    following = log.slice(record.last_at, record.last_at + (1 << 16))
    if not record.completed:
        record.completed = b"`Trainer.fit` stopped: `max_" in following or None


FORMAT = Format(
    name="NeMo",
    marks=((b"train_step_timing in s",), (b"Training epoch ", b"reduced_train_loss")),
    starts=(b"* Experiment configuration *", b'"PARAMETER"', b"GPU available: "),
    lines=(  # the surest first
        Line(_JSON, _JSON_FIELDS, _of_dllogger, valid=opens_with_json),
        Line(_DLL, _FIELDS, _timed),
        Line(_CONSOLE, _FIELDS, _timed),
    ),
    facts={"planned_steps": rb"max_steps['\"]?[:=] ?(\d{1,9})"},
    first=0,
    prepare=_gpus,
    finish=_finish,
)
