"""nanotron: `iteration: 1 / 15 | consumed_tokens: 512 | elapsed_time_per_iteration_ms: 4.71K |`.

Numbers keep three digits and carry K, M, G or T. Newer versions say `time_per_iteration_ms`.
"""

import re

from analysis.readers._endings import judge_end
from analysis.readers._lines import find_int, labelled, number, ranks_of_rates, table, word
from analysis.readers._log import Log
from analysis.readers._settings import header_of, read_header, state
from analysis.readers._steps import put_steps
from analysis.records import Record

FORMAT = "nanotron"
MARKS = ((b"iteration: ", b"time_per_iteration_ms: "),)
BANNERS = (b"nanotron", b"|DP=0|PP=0|TP=0]")

_START = re.compile(word(b"iteration:") + rb" (?P<iteration>\d{1,9}) / (?P<planned>\d{1,9}) ?\|")
_FIELDS = {
    "ms": labelled(rb"(?:elapsed_)?time_per_iteration_ms"),
    "loss": labelled(rb"lm_loss"),
    "grad_norm": labelled(rb"grad_norm"),
    "tflops": labelled(rb"model_tflops_per_gpu"),
    "tokens_per_s": labelled(rb"tokens_per_sec"),
    "per_gpu": labelled(rb"tokens_per_sec_per_gpu"),
    "batch": re.compile(rb"global_batch_size: (\d{1,9})(?=[ |])"),
}
_SIZES = {
    "micro_batch": re.compile(rb"\| mbs: (\d{1,9})"),
    "global_batch": re.compile(rb"\| global_batch_size: (\d{1,9})"),
    "seq_len": re.compile(rb"\| sequence_length: (\d{1,9})"),
    "planned_steps": re.compile(rb"\| train_steps: (\d{1,9})"),
    "tp": re.compile(rb"ParallelismArgs\([^)\r\n]{0,80}\btp=(\d{1,6})"),
    "pp": re.compile(rb"ParallelismArgs\([^)\r\n]{0,80}\bpp=(\d{1,6})"),
    "dp": re.compile(rb"ParallelismArgs\([^)\r\n]{0,80}\bdp=(\d{1,6})"),
}
_PARAMS = re.compile(rb"Total number of parameters: ([\d.,]{1,16}[KMGBT]?)")


def read(log: Log) -> Record:
    """Read one log; without an iteration line the arrays are empty."""
    record = Record(source=str(log.path), format=FORMAT, engine=FORMAT)
    columns, offsets = table(log, _START, _FIELDS)
    columns["step_s"] = columns.pop("ms") / 1000
    planned, batch = columns.pop("planned"), columns.pop("batch")
    ranks = ranks_of_rates(columns["tokens_per_s"], columns.pop("per_gpu"))
    header = header_of(log, int(offsets[0]) if len(offsets) else None)
    offsets = put_steps(record, columns, offsets, log)
    facts: dict = {name: find_int(pattern, header) for name, pattern in _SIZES.items()}
    if params := _PARAMS.search(header):
        facts["params"] = number(params[1])
    if facts["tp"] and facts["pp"] and facts["dp"]:
        facts["gpus"] = facts["tp"] * facts["pp"] * facts["dp"]
    state(record, facts, "log")
    read_header(record, header)
    if offsets:
        said = {"gpus": ranks, "global_batch": int(batch[-1]) if batch[-1] == batch[-1] else None}
        state(record, {k: v for k, v in said.items() if getattr(record, k) is None}, "log")
        record.planned_steps = int(planned[-1])
        record.completed = bool(record.iteration[-1] >= record.planned_steps)
        record.notes.append("numbers are printed with three digits")
    if record.seq_len:
        record.samples_per_s = record.tokens_per_s / record.seq_len
    judge_end(record, log, offsets)
    return record
