"""Megatron-LM from 2020 to today, and those that print its iteration line: Megatron-DeepSpeed,
GPT-NeoX, Megatron-Bridge and our own engines.

     iteration        1/    1000 | elapsed time per iteration (ms): 121899.8 | learning rate: ...
     iteration=       4/  317892 | consumed_samples= 3072 | elapsed_time_per_iteration_ms=49871.4 |
     samples/sec: 206.693 | iteration        1/     512 | elapsed time per iteration (ms): 2477.1 |

The grammar is one (fields between bars, `_bars`), the dialects are a table.
"""

import numpy as np

from analysis.readers import _bars
from analysis.readers._endings import judge_end
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
_DONE = (b"[after training is done]", b"[exiting program at iteration", b"training finished")


def read(log: Log) -> Record:
    """Read one log; without an iteration line the arrays are empty."""
    table = _bars.scan(log)
    record = Record(source=str(log.path), format=FORMAT)
    first = int(table.offset[0]) if len(table.offset) else None
    header = header_of(log, first)
    line = log.slice(first - 200, first + 1500) if first is not None else b""
    record.format = record.engine = dialect(header, line)
    columns = table.columns
    columns["tokens_per_s"] = columns.pop("tokens_per_s_per_gpu")
    offsets = put_steps(record, columns, table.offset, log, averages=True)
    if len(record.iteration):
        record.planned_steps = int(columns["planned"][-1])
        record.origin["planned_steps"] = "log"
        record.completed = bool(record.iteration[-1] >= record.planned_steps)
        for name in ("global_batch", "seq_len"):
            said = columns[name][~np.isnan(columns[name])]
            if len(said) and name == "global_batch" and (said != said[-1]).any():
                record.notes.append(f"the global batch grows from {said[0]:.0f} to {said[-1]:.0f}")
            if len(said) and getattr(record, name) is None:
                setattr(record, name, int(said[-1]))
        tail = log.slice(offsets[-1], offsets[-1] + (1 << 16))
        if not record.completed and any(done in tail for done in _DONE):
            record.completed = record.planned_steps is None or None
    if table.pairs:
        record.notes.append(f"{table.pairs} values print current/average: the current one is used")
    if len(nan := columns["nan"]):
        record.extra["nan_iterations"] = int(np.nansum(nan))
    read_header(record, header)
    if not np.isnan(record.tokens_per_s).all():
        record.tokens_per_s = record.tokens_per_s * (record.gpus or np.nan)
    judge_end(record, log, offsets)
    return record


def dialect(header: bytes, line: bytes) -> str:
    """Whose log it is, from the text before training and an iteration line (or nothing)."""
    for name, in_line, in_header in _DIALECTS:
        if any(mark in line for mark in in_line) or any(mark in header for mark in in_header):
            return name
    return FORMAT
