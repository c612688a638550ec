"""NeMo: DLLogger's JSON and text lines, NeMo 2's console, Lightning's bar.

    DLLL {"type": "LOG", "step": 0, "data": {"train_step_timing in s": 107.3, ...}}
    DLL 2025-06-11 05:23:04 - 18 reduced_train_loss : 9.04 ... train_step_timing in s : 27.49
    Training epoch 0, iteration 1/99 | lr: 1e-4 | ... | train_step_timing in s: 61.9
    Epoch 0: :  95%|███| 19/20 [09:07<00:28, global_step=18.00, ..., train_step_timing in s=27.50]
    [NeMo I 2025-06-11 05:23:31 nemo_logging:393] train_step_timing in s: [52.33, 39.9, ...]

The surest kind that a log holds is read. NeMo's step timer prints the mean of its last few steps
(five by default), so a slow first step lingers; it is noted. The list, printed once at the end,
has no step's number: its entries are counted from 0, as NeMo counts.
"""

import re
from typing import Any

import numpy as np

from analysis.readers._endings import judge_end
from analysis.readers._lines import find_int, labelled, table
from analysis.readers._log import Log
from analysis.readers._settings import MODEL_SIZES, header_of, read_header, state
from analysis.readers._steps import put_steps
from analysis.readers._typed import is_nan, mapping, real, whole
from analysis.records import Record
from models.files import parse_json

FORMAT = "NeMo"
MARKS = ((b"train_step_timing in s",), (b"Training epoch ", b"reduced_train_loss"))
BANNERS = (b"nemo_logging:",)

_JSON = re.compile(
    rb"DLLL (\{[^\r\n]{1,20000}\})(?=(?:[ \t\0]|\x1b\[[\d;]{0,20}[mK])*(?:\r|\n|\Z))"
)
_DLL = re.compile(rb"DLL \d{4}-\d\d-\d\d [\d:.]{8,16} - (?P<iteration>\d{1,9}) ")
_CONSOLE = re.compile(rb"Training epoch \d{1,9}, iteration \d{1,9}/(?P<last>\d{1,9}) \|")
_BAR = re.compile(rb"\[[\d:]{4,12}<[\d:?]{1,12}(?=,[^\r\n\]]{0,600}train_step_timing in s=)")
_LIST = re.compile(rb"train_step_timing in s['\"]? ?[:=] ?\[([\d., eE+-]{1,1000000})\]")
_VALUE = rb" ?[:=] ?"
_FIELDS = {
    "global_step": labelled(rb"global_step", _VALUE),
    "step_s": labelled(rb"train_step_timing in s", _VALUE),
    "loss": labelled(rb"reduced_train_loss", _VALUE),
    "grad_norm": labelled(rb"grad_norm", _VALUE),
    "tflops": labelled(rb"TFLOPS_per_GPU", _VALUE),
}
_PLANNED = re.compile(rb"max_steps['\"]?[:=] ?(\d{1,9})")
_NODES = re.compile(rb"num_nodes(?<!\wnum_nodes)['\"]?[:=] ?(\d{1,6})")
_DEVICES = re.compile(rb"devices(?<!\wdevices)['\"]?[:=] ?(\d{1,4})")
_CONFIG = {  # DLLogger's parameter line -> Record's fields
    "cfg/tensor_model_parallel_size": "tp",
    "cfg/pipeline_model_parallel_size": "pp",
    "cfg/virtual_pipeline_model_parallel_size": "vpp",
    "cfg/micro_batch_size": "micro_batch",
    "cfg/global_batch_size": "global_batch",
    "cfg/encoder_seq_length": "seq_len",
    "cfg/num_layers": "n_layer",
    "cfg/hidden_size": "hidden",
    "cfg/ffn_hidden_size": "ffn_hidden",
    "cfg/num_attention_heads": "n_head",
    "cfg/max_position_embeddings": "max_seq_len",
    "trainer/max_steps": "planned_steps",
}


def read(log: Log) -> Record:
    """Read one log; without a timed step the arrays are empty."""
    record = Record(source=str(log.path), format=FORMAT, engine=FORMAT)
    columns, offsets = _dllogger(log, record) if log.contains(b"DLLL {") else ({}, np.empty(0))
    for start in (_DLL, _CONSOLE, _BAR):
        if len(offsets):
            break
        columns, offsets = table(log, start, _FIELDS)
        timed = ~np.isnan(columns["step_s"])
        if start is _CONSOLE and not timed.any():  # its timer can be off
            timed = ~np.isnan(columns["loss"])
        columns = {name: values[timed] for name, values in columns.items()}
        offsets = offsets[timed]
        columns.setdefault("iteration", columns["global_step"])
        if start is _BAR and len(offsets):
            # The bar is redrawn, also with the last step's numbers: the first drawing counts.
            changed = np.diff(columns["iteration"], prepend=-1) != 0
            columns = {name: values[changed] for name, values in columns.items()}
            offsets = offsets[changed]
            record.notes.append("read from the progress bar, which prints few digits")
    if not len(offsets):
        columns, offsets = _listed(log, record)
    header = header_of(log, int(offsets[0]) if len(offsets) else None)
    kept = put_steps(record, columns, offsets, log)
    if kept and np.isnan(record.step_s).all():
        record.notes.append("no step time is printed")
    elif kept:
        record.extra["running_average"] = True
        record.notes.append("step times are NeMo's running means of the last few steps")
    if kept:
        nodes, devices = find_int(_NODES, header), find_int(_DEVICES, header)
        gpus = nodes * devices if nodes and devices else None
        state(record, {"planned_steps": find_int(_PLANNED, header), "gpus": gpus}, "log")
    read_header(record, header)
    if kept:
        after = log.slice(kept[-1], kept[-1] + (1 << 16))
        record.completed = b"`Trainer.fit` stopped: `max_" in after or None
        if record.planned_steps and record.iteration[-1] >= record.planned_steps - 1:
            record.completed = True
    judge_end(record, log, kept)
    return record


def _listed(log: Log, record: Record) -> tuple[dict[str, np.ndarray], np.ndarray]:
    """The last whole list of step times, of which every rank may print one."""
    times, at = np.empty(0), 0
    for offset, match in log.matches(_LIST):
        try:
            times, at = np.array([float(text) for text in match[1].split(b",")]), offset
        except ValueError:
            continue
    if len(times):
        record.notes.append("only the list of step times is there: its entries are counted from 0")
    columns = {"iteration": np.arange(len(times), dtype=float), "step_s": times}
    return columns, np.full(len(times), at, np.int64)


def _dllogger(log: Log, record: Record) -> tuple[dict[str, np.ndarray], np.ndarray]:
    rows: list[list[float]] = []
    offsets: list[int] = []
    broken = 0
    for offset, match in log.matches(_JSON):
        try:
            line = mapping(parse_json(match[1]))
        except ValueError:
            broken += 1
            continue
        data, step = mapping(line.get("data")), whole(line.get("step"))
        if line.get("step") == "PARAMETER":
            _parameters(record, data)
        elif "train_step_timing in s" in data and step is not None:
            names = ("train_step_timing in s", "reduced_train_loss", "grad_norm")
            nan = is_nan(data.get("reduced_train_loss"))
            rows.append([step, *(real(data.get(name)) for name in names), nan])
            offsets.append(offset)
    if broken:
        record.notes.append(f"{broken} DLLogger lines are not JSON")
    columns = np.array(rows, float).reshape(-1, 5).T
    names = ("iteration", "step_s", "loss", "grad_norm", "nan_loss")
    return dict(zip(names, columns, strict=True)), np.array(offsets, np.int64)


def _parameters(record: Record, data: dict[str, Any]) -> None:
    facts = {f: n for k, f in _CONFIG.items() if (n := whole(data.get(k))) is not None}
    nodes, devices = whole(data.get("trainer/num_nodes")), whole(data.get("trainer/devices"))
    if nodes and devices:
        facts["gpus"] = nodes * devices
    for name, value in facts.items():  # the last parameter line before training wins
        if name in MODEL_SIZES:
            record.model[name] = value
        else:
            setattr(record, name, value)
