"""modded-nanogpt: `step:11/5100 train_loss:7.01 train_time:139ms step_avg:139.11ms`.

train_time is cumulative and step_avg a running mean, so a step's time is the difference of two
train_times. The steps whose step_avg is `nan` are the ones the script itself does not count (it
compiles in them and then restarts its clock). The log opens with the script's source, which
prints the same words with braces where numbers stand.
"""

import math
import re

import numpy as np

from analysis.logs.parsing.fields import named_number, word
from analysis.logs.parsing.line_format import Format
from analysis.logs.parsing.lines import Columns, Line
from analysis.logs.parsing.logfile import Log
from analysis.logs.parsing.setting_names import state
from analysis.logs.record import Record

_STEP = re.compile(
    word(b"step:")
    + rb"(?P<iteration>\d{1,9})/(?P<planned>\d{1,9}) (?:train_loss:"
    + named_number("loss")
    + rb" |val_loss:"
    + named_number("validation")
    + rb" )?train_time:(?P<train_ms>\d{1,12})ms step_avg:"
    + named_number("average_ms")
    + rb"ms"
)
# It prints what nvidia-smi says as it starts: the machine's GPUs, and which have its processes.
_PROCESS = re.compile(rb"\| {1,8}(\d{1,3}) {1,4}N/A {1,4}N/A {1,12}\d{1,9} {1,8}C ")
_GPU = re.compile(rb"\| {1,4}\d{1,3} {1,3}((?:NVIDIA|AMD) [\w -]{1,40}?) {2,40}O[nf]")


def _clocked(columns: Columns, record: Record, log: Log) -> Columns:
    """Returns the columns of the training lines. A step's time is the difference of the cumulative
    train_time; the mean of the run is that of the last line."""
    if len(columns["at"]):  # a validation prints the mean of the steps before it, too
        last_average = float(columns["average_ms"][-1])
    trained = np.isnan(columns["validation"])
    columns = {name: values[trained] for name, values in columns.items()}
    if trained.any():
        record.totals["step_s_mean"] = last_average / 1000
    iteration, train_ms = columns["iteration"], columns["train_ms"]
    uncounted = np.isnan(columns["average_ms"])
    steps = np.diff(iteration, prepend=np.inf)
    step_s = np.diff(train_ms, prepend=np.nan) / 1000 / np.maximum(steps, 1)
    step_s[uncounted | (steps <= 0) | (step_s < 0)] = np.nan
    first = (iteration == 1) & ~uncounted  # its clock starts with it
    step_s[first] = train_ms[first] / 1000
    columns["step_s"] = step_s
    return columns


_SOURCE = {
    name: rb"%b {0,3}(?:: {0,3}int {0,3})?= {0,3}(\d{1,8})" % name.encode()
    for name in ("n_layer", "n_head", "n_embd", "vocab_size")
}
_SOURCE["hidden"] = _SOURCE.pop("n_embd")
_SOURCE["global_batch"] = rb"batch_size(?<!\wbatch_size) {0,3}: {0,3}int {0,3}= {0,3}([\d *]{1,20})"
_SOURCE["seq_len"] = (
    rb"sequence_length(?<!\wsequence_length) {0,3}: {0,3}int {0,3}= {0,3}([\d *]{1,20})"
)


def _prepare(record: Record, columns: Columns, header: bytes) -> None:
    """Fills the model and the batch from the script's source, with which the log opens, and the
    GPUs from what nvidia-smi says."""
    texts = {name: re.findall(pattern, header) for name, pattern in _SOURCE.items()}
    if b"class GPTConfig" in header and all(texts.values()):
        facts = {name: math.prod(map(int, text[-1].split(b"*"))) for name, text in texts.items()}
        tied = b"wte.weight = self.lm_head.weight" in header
        fixed_sizes = {"bias": False, "position": "rope", "norm": "rmsnorm", "activation": "gelu"}
        state(record, facts | fixed_sizes | {"tied": tied}, "log")
    if b"flex_attention" in header:
        record.uncounted.append("attention in windows")
    if b"value_embed" in header:
        record.uncounted.append("value embeddings")

    if len(columns["train_ms"]):
        record.note("step times are differences of the cumulative train_time")
        cards, busy_gpus = _GPU.findall(header), set(_PROCESS.findall(header))
        gpus = len(cards) if len(busy_gpus) == len(cards) else None  # else some came later
        gpu_type = cards[0].decode() if cards else None
        state(record, {"gpus": gpus, "gpu_type": gpu_type}, "log")


FORMAT = Format(
    name="modded-nanogpt",
    marks=((b"train_time:", b"step_avg:"),),
    starts=(b"compiled for CUDA",),
    lines=(Line(_STEP, derive=_clocked),),
    arguments=False,
    prepare=_prepare,
)
