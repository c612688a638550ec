"""Megatron-LM from 2020 to today, and those that print its iteration line: Megatron-DeepSpeed,
GPT-NeoX, Megatron-Bridge and our own engines.

     iteration        1/    1000 | elapsed time per iteration (ms): 121899.8 | learning rate: ...
     iteration=       4/  317892 | consumed_samples= 3072 | elapsed_time_per_iteration_ms=49871.4 |
     samples/sec: 206.693 | iteration        1/     512 | elapsed time per iteration (ms): 2477.1 |

The grammar is one (fields between bars, `_bars`), the dialects are a table. Lines that were copied
without their bars, or cut behind the time, are read one by one.
"""

import re

import numpy as np

from analysis.readers import _bars
from analysis.readers._endings import judge_end
from analysis.readers._lines import WORD, labelled, ranks_of_rates, table
from analysis.readers._log import Log
from analysis.readers._settings import header_of, read_header
from analysis.readers._steps import put_steps
from analysis.records import Record

FORMAT = "Megatron-LM"
MARKS = ((b"elapsed time per iteration (",), (b"elapsed_time_per_iteration_ms=",))
BANNERS = (
    b"using world size:",
    b"> initializing torch distributed",
    b"NeoXArgs.configure_distributed_args()",
    b"> padded vocab (size:",
)

# Dialect -> what only it prints: in an iteration line, or before training.
_DIALECTS: tuple[tuple[str, tuple[bytes, ...], tuple[bytes, ...]], ...] = (
    ("GPT-NeoX", (b"approx flops per GPU", b"samples/sec:"), (b"NeoXArgs",)),
    (
        "Megatron-DeepSpeed",
        (b"consumed tokens:", b"consumed_tokens=", b"| TFLOPs:", b"samples per second:"),
        (b"DeepSpeed info: version", b"DeepSpeedEngine", b"deepspeed.initialize"),
    ),
)
_PLAIN = re.compile(
    WORD + rb"iteration[ :=]{1,16}(?P<iteration>\d{1,12}) {0,8}/ {0,8}(?P<planned>\d{1,12})(?!\d)"
    rb"(?=[^\r\n]{1,300}?elapsed[ _]time[ _]per[ _]iteration[ _]\(?m?s)"
)  # fmt: skip
_PLAIN_FIELDS = {
    "ms": labelled(rb"elapsed[ _]time[ _]per[ _]iteration[ _](?:\(ms\)|ms)"),
    "step_s": labelled(rb"elapsed[ _]time[ _]per[ _]iteration[ _](?:\(s\)|s)"),
    "loss": labelled(rb"(?:lm[ _-])?loss"),
    "grad_norm": labelled(rb"grad[ _]norm"),
    "skipped": labelled(rb"number[ _]of[ _]skipped[ _]iterations"),
    "global_batch": labelled(rb"global[ _]batch[ _]size"),
}
_DONE = (b"[after training is done]", b"[exiting program at iteration", b"training finished")


def read(log: Log) -> Record:
    """Read one log; without an iteration line the arrays are empty."""
    found = _bars.scan(log)
    if not len(found.offset):
        found = _without_bars(log)
    record = Record(source=str(log.path), format=FORMAT)
    first = int(found.offset[0]) if len(found.offset) else None
    header = header_of(log, first)
    line = b""
    if first is not None:
        line = log.slice(first - 400, first).rpartition(b"\n")[2]
        line += log.slice(first, first + 1500).partition(b"\n")[0]
    record.format = record.engine = dialect(header, line)
    columns = found.columns
    columns["tokens_per_s"] = columns.pop("tokens_per_s_per_gpu")
    offsets = put_steps(record, columns, found.offset, log, averages=True)
    if len(record.iteration):
        record.planned_steps = int(columns["planned"][-1])
        record.origin["planned_steps"] = "log"
        record.completed = bool(record.iteration[-1] >= record.planned_steps)
        for name in ("global_batch", "seq_len"):
            said = columns[name][np.isfinite(columns[name])]
            if len(said) and name == "global_batch" and (said != said[-1]).any():
                record.notes.append(f"the global batch grows from {said[0]:.0f} to {said[-1]:.0f}")
            if len(said) and getattr(record, name) is None:
                setattr(record, name, int(said[-1]))
        tail = log.slice(offsets[-1], offsets[-1] + (1 << 16))
        if not record.completed and any(done in tail for done in _DONE):
            record.completed = record.planned_steps is None or None
    if found.pairs:
        record.notes.append(f"{found.pairs} values print current/average: the current one is used")
    if len(nan := columns["nan"]):
        printed = record.extra.get("nan_iterations", 0)
        record.extra["nan_iterations"] = max(printed, int(nan[np.isfinite(nan)].sum()))
    read_header(record, header)
    if not np.isnan(record.tokens_per_s).all():
        if record.gpus is None and record.seq_len:
            together = record.samples_per_s * record.seq_len
            record.gpus = ranks_of_rates(together, record.tokens_per_s, rounded=1e-3)
        record.tokens_per_s = record.tokens_per_s * (record.gpus or np.nan)
    judge_end(record, log, offsets)
    return record


def _without_bars(log: Log) -> _bars.Table:
    columns, offsets = table(log, _PLAIN, _PLAIN_FIELDS)
    ms = columns.pop("ms") / 1000
    columns["step_s"] = np.where(np.isnan(ms), columns["step_s"], ms)
    for name in ("tokens_per_s_per_gpu", "seq_len", "nan"):
        columns[name] = np.full(len(offsets), np.nan)
    return _bars.Table(columns, offsets, 0)


def dialect(header: bytes, line: bytes) -> str:
    """Whose log it is, from the text before training and an iteration line (or nothing)."""
    for name, in_line, in_header in _DIALECTS:
        if any(mark in line for mark in in_line) or any(mark in header for mark in in_header):
            return name
    return FORMAT
