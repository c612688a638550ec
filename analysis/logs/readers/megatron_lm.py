"""Megatron-LM from 2020 to today, and those that print its iteration line: Megatron-DeepSpeed,
GPT-NeoX, Megatron-Bridge and our own engines.

     iteration        1/    1000 | elapsed time per iteration (ms): 121899.8 | learning rate: ...
     iteration=       4/  317892 | consumed_samples= 3072 | elapsed_time_per_iteration_ms=49871.4 |
     samples/sec: 206.693 | iteration        1/     512 | elapsed time per iteration (ms): 2477.1 |

All have fields between bars (parsing/megatron_lines.py). Lines that were copied without their bars,
or cut behind the time, are read one by one.
"""

import re

import numpy as np

from analysis.logs.parsing import megatron_lines
from analysis.logs.parsing.fields import WORD, labelled, number, ranks_of_rates, table
from analysis.logs.parsing.line_format import Columns, LineFormat
from analysis.logs.parsing.logfile import Log
from analysis.logs.parsing.setting_names import header_of
from analysis.logs.record import Record

# Tool -> what only it prints: in an iteration line, or before training.
_TOOLS: tuple[tuple[str, tuple[bytes, ...], tuple[bytes, ...]], ...] = (
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
# A line that an excerpt broke in two, of which the first part alone has no time; its number has its
# bar behind it, or its decimal: one that was cut is not read.
_BEGINS = re.compile(rb"iteration[ :=]{1,16}\d{1,12}[ \t]{0,16}/")
_BROKEN = re.compile(rb"[ \t]{0,80}[\r\n]{1,2}[ \t>]{0,80}")
_WHOLE = re.compile(
    rb"iteration[ :=]{1,16}(\d{1,12}) {0,16}/ {0,16}(\d{1,12}) {0,16}\|"
    rb"(?:[^|`]{1,80}\|){0,4}? {0,8}elapsed[ _]time[ _]per[ _]iteration[ _]"
    rb"(?:(\(ms\)|ms)|\(s\)|s) ?[:=] {0,8}"
    rb"(\d{1,12}\.\d{1,6}(?=[^\d.])|\d{1,12}(?= {0,8}\|))"
)
_FEW, _SPLIT = 1000, 2000  # lines; bytes of one
_PEAK = re.compile(
    rb"\(after \d{1,9} iterations\) memory \(MB\) [^\r\n]{1,80}max allocated: ([\d.]{1,16})"
)
_SOON = 1 << 20  # bytes behind the first iteration, in which it prints its memory
_DONE = (b"[after training is done]", b"[exiting program at iteration", b"training finished")


def _scan(log: Log, record: Record) -> tuple[Columns, np.ndarray]:
    columns, offsets, pairs, missed = megatron_lines.scan(log)
    if not len(offsets):
        columns, offsets = table(log, _PLAIN, _PLAIN_FIELDS)
    elif 0 < len(missed) <= _FEW:
        columns, offsets = _with_split(log, record, columns, offsets, missed)
    if pairs:
        record.notes.append(f"{pairs} values print current/average: the current one is used")
    if len(nan := columns.get("nan", ())):
        record.nan_iterations = int(nan[np.isfinite(nan)].sum())
    batch = columns["global_batch"][np.isfinite(columns["global_batch"])]
    if len(batch) and (batch != batch[-1]).any():
        record.notes.append(f"the global batch grows from {batch[0]:.0f} to {batch[-1]:.0f}")
    line = b""
    if len(offsets):
        first = int(offsets[0])
        line = log.slice(first - 400, first).rpartition(b"\n")[2]
        line += log.slice(first, first + 1500).partition(b"\n")[0]
        if peaks := _PEAK.findall(log.slice(first, first + _SOON)):
            record.peak_bytes = int(max(map(float, peaks)) * 2**20)
    header = header_of(log, int(offsets[0]) if len(offsets) else None)
    if b"reserve_length:" in line or b"Loading extension module token_dropping" in header:
        record.uncounted.append("layers that drop tokens (random-LTD)")
    record.format = record.engine = _tool(header, line)
    return columns, offsets


def _with_split(
    log: Log, record: Record, columns: Columns, offsets: np.ndarray, missed: list[int]
) -> tuple[Columns, np.ndarray]:
    """The columns with the lines that an excerpt broke in two, or cut right behind their time."""
    rows = {}
    for at in missed:
        text = log.slice(at, at + _SPLIT)
        if following := _BEGINS.search(text, 1):
            text = text[: following.start()]
        text = b" ".join(_BROKEN.split(text.split(b"```")[0]))
        if match := _WHOLE.match(text):
            row = {"iteration": float(match[1]), "planned": float(match[2])}
            row["step_s"] = float(match[4]) / (1000 if match[3] else 1)
            for name in ("loss", "grad_norm", "global_batch"):
                if found := _PLAIN_FIELDS[name].search(text):
                    row[name] = number(found[1])
            rows[at] = row
    if lost := len(missed) - len(rows):
        record.notes.append(f"{lost} iteration lines hold no whole time: left out")
    if not rows:
        return columns, offsets
    record.notes.append(f"{len(rows)} lines are split or cut behind their time: read all the same")
    places = np.concatenate([offsets, np.array(list(rows), np.int64)])
    order = np.argsort(places, kind="stable")
    for name, values in columns.items():
        more = [row.get(name, 0.0 if name == "nan_loss" else np.nan) for row in rows.values()]
        columns[name] = np.concatenate([values, more])[order]
    return columns, places[order]


def _tool(header: bytes, line: bytes = b"") -> str:
    """Whose log it is, from the text before training and an iteration line (or nothing)."""
    for name, in_line, in_header in _TOOLS:
        if any(mark in line for mark in in_line) or any(mark in header for mark in in_header):
            return name
    return "Megatron-LM"


def _rates(record: Record, columns: Columns, header: bytes) -> None:
    each = columns.get("tokens_per_s_per_gpu", np.empty(0))
    if np.isfinite(each).any():
        if record.gpus is None and record.seq_len:
            together = columns["samples_per_s"] * record.seq_len
            record.gpus = ranks_of_rates(together, each, rounded=1e-3)
        columns["tokens_per_s"] = each * (record.gpus or np.nan)


def _finish(record: Record, log: Log, kept: list[int]) -> None:
    if kept and not record.completed:
        tail = log.slice(kept[-1], kept[-1] + (1 << 16))
        record.completed = None if any(done in tail for done in _DONE) else False


FORMAT = LineFormat(
    name="Megatron-LM",
    marks=((b"elapsed time per iteration (",), (b"elapsed_time_per_iteration_ms=",)),
    banners=(
        b"using world size:",
        b"> initializing torch distributed",
        b"NeoXArgs.configure_distributed_args()",
        b"> padded vocab (size:",
    ),
    scan=_scan,
    averages=True,
    prepare=_rates,
    finish=_finish,
)
