"""Hugging Face Trainer's console.

    {'loss': 2.5893, 'learning_rate': 5e-06, 'epoch': 0.01}
    {'train_runtime': 919.097, 'train_samples_per_second': 1.088, 'train_steps_per_second': 0.017}

The loss lines carry no step and no time; the end line, one per rank, is about the whole run. The
mean step time is the runtime over the number of optimizer steps, where both are said.
"""

import re
from collections.abc import Hashable, Iterable

import numpy as np

from analysis.logs.parsing.endings import judge_end
from analysis.logs.parsing.fields import labelled, named_number, number, table
from analysis.logs.parsing.line_format import Columns, Format, last_number
from analysis.logs.parsing.logfile import Log
from analysis.logs.parsing.model_names import read_name
from analysis.logs.parsing.setting_names import header_of, read_header, state
from analysis.logs.parsing.steps import put_steps
from analysis.logs.record import Record

_LOSS = re.compile(rb"\{'loss': '?" + named_number("loss"))
_LOSS_FIELDS = {"grad_norm": labelled(rb"grad_norm'", rb": '?")}
_END = re.compile(rb"\{'train_runtime': '?([\d.]{1,20})[^\r\n{}]{0,600}\}")
_RATE = {
    "samples_per_s": re.compile(rb"'train_samples_per_second': '?([\d.e+-]{1,24})"),
    "loss": re.compile(rb"'train_loss': '?(-?[\d.e+-]{1,24})"),
}
_SIZES = {
    "micro_batch": rb"Instantaneous batch size per device = ([\d,]{1,9})",
    "global_batch": rb"Total train batch size \(w\. [^)]{1,60}\) = ([\d,]{1,9})",
    "n_micro": rb"Gradient Accumulation steps = ([\d,]{1,9})",
    "planned_steps": rb"Total optimization steps = ([\d,]{1,12})",
    "params": rb"Number of trainable parameters = ([\d,]{1,20})",
}
_OVERRIDES = re.compile(rb"config_overrides[= ]([^\s'\"]{1,300})")
_OVERRIDE = re.compile(rb"(n_embd|n_head|n_layer|n_positions)=(\d{1,7})")
_MODEL_NAME = re.compile(rb"model_name_or_path[= '\"]{1,4}([\w./-]{2,100})")
_DEEPSPEED_RANKS = rb"config\.py:\d{1,5}:print\][ \t]{1,8}world_size \.{2,40} (\d{1,6})"
_RUN_CLM = 1024  # run_clm.py cuts longer contexts to it, unless --block_size is given
_RENAMED = {"n_embd": "hidden", "n_positions": "max_seq_len"}


def _read(log: Log, record: Record) -> None:
    """Read one log. The totals are filled where an end line stands in it."""
    record.engine = "HF Trainer"
    columns = table(log, _LOSS, _LOSS_FIELDS)
    # They carry no step, but epoch, rate and loss to many digits; a loss of zero has none.
    texts = [log.slice(at, at + 1000).partition(b"}")[0] for at in columns["at"].astype(int)]
    keys = [
        text if loss != 0 and b"'epoch'" in text else number
        for number, (text, loss) in enumerate(zip(texts, columns["loss"], strict=True))
    ]
    columns = once(columns, keys, record)
    put_steps(record, columns, log)
    ends = read_ends(record, log)
    header = header_of(log, min([*columns["at"][:1].astype(int), *ends[:1]], default=None))
    facts = {name: last_number(pattern, header) for name, pattern in _SIZES.items()}
    overrides = b"".join(_OVERRIDES.findall(header)[-1:])  # configs printed later do not count
    for name, value in _OVERRIDE.findall(overrides):
        facts[_RENAMED.get(name.decode(), name.decode())] = int(value)
    state(record, facts, "log")
    read_header(record, header)
    if b"gradient_checkpointing=true" in overrides:
        record.recompute = "full"
    for name in _MODEL_NAME.findall(header)[-1:]:
        read_name(record, name.decode())
    state(record, {"gpus": deepspeed_ranks(header)}, "log")
    if not record.seq_len and b"run_clm" in header:
        block = last_number(rb"--block_size[= ]{1,3}(\d{1,7})", header)
        usual = min(record.model.get("max_seq_len", 0), _RUN_CLM) or None
        state(record, {"seq_len": block or usual}, "log" if block else "default")
    if ends:
        record.last_at = ends[-1]
    if record.totals:
        record.completed = record.whole_run = True
    if record.planned_steps and "wall_s" in record.totals:
        record.totals["step_s_mean"] = record.totals["wall_s"] / record.planned_steps
        record.notes.append("the mean step time is the runtime over the number of steps")
    judge_end(record, log, None if len(record.steps) else ends)


def deepspeed_ranks(header: bytes) -> int | None:
    """The ranks that DeepSpeed counts; they are all GPUs where it splits no model."""
    split = b"PipelineEngine" in header or b"PipelineModule" in header or b"autotp" in header
    return None if split else last_number(_DEEPSPEED_RANKS, header)


def once(columns: Columns, keys: Iterable[Hashable], record: Record) -> Columns:
    """The columns without lines whose key stood before, and numbered from 1."""
    first: dict[Hashable, int] = {}
    for i, key in enumerate(keys):
        first.setdefault(key, i)
    kept = np.array(list(first.values()), int)
    if dropped := len(columns["at"]) - len(kept):
        record.notes.append(f"{dropped} duplicate lines dropped")
    columns = {name: values[kept] for name, values in columns.items()}
    return columns | {"iteration": np.arange(1.0, len(kept) + 1)}


def read_ends(record: Record, log: Log) -> list[int]:
    """Where the end lines are: one per rank, all of the same run. Their mean is its rate, the
    longest its time."""
    ends = list(log.matches(_END)) if log.contains(b"{'train_runtime'") else []
    if ends:
        record.totals["wall_s"] = max(number(match[1]) for _, match in ends)
    for name, pattern in _RATE.items():
        rates = [number(rate[1]) for _, match in ends if (rate := pattern.search(match[0]))]
        if rates:
            record.totals[name] = float(np.mean(rates))
    return [at for at, _ in ends]


FORMAT = Format(
    name="HF Trainer",
    marks=((b"train_runtime",), (b"{'loss': ", b"'learning_rate': ")),
    banners=(b"***** Running training *****",),
    starts=(b"***** Running training *****",),
    ends=(b"'train_runtime'",),
    embedded=True,
    reader=_read,
)
