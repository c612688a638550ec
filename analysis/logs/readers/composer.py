"""Composer, which llm-foundry trains with: a heading and a line for each metric.

    [batch=20/20]:
         Train time/batch: 19
         Train loss/train/total: 10.4162
         Train throughput/tokens_per_sec: 222.2194

Its FileLogger writes the same names, each with its batch, into a file for each rank:

    [metric][batch=19]: loss/train/total: 10.4162

time/batch and others count what was done before this batch. Rates are running means over a window
of batches (100 by default), and absent until it is full; all numbers have four decimals. No step
time is printed: it is the batch over samples/s, which has more digits than batches/s.
"""

import re

import numpy as np

from analysis.logs.parsing.fields import labelled, positive, ranks_of_rates, whole
from analysis.logs.parsing.line_format import Format, last_number
from analysis.logs.parsing.lines import Columns, Line, by_heading
from analysis.logs.parsing.logfile import Log
from analysis.logs.parsing.setting_names import state
from analysis.logs.record import UNPADDED, Record
from base.units import GIB

_LINE = re.compile(
    rb"(?<!\])\[batch=(?P<iteration>\d{1,9})(?:/(?P<planned>\d{1,9}))?\]:?"
    rb"|\[(?:epoch=\d{1,9}\]\[batch|token|sample|iteration|second)=(?P<other>\d{1,15})[/\]]"
    rb"|\bTrain (?=[a-z\d_]{1,20}/)"
)
# A batch's rates are written with the number of the next one, so time/batch begins an entry.
_FILE_LINE = re.compile(
    rb"\[metric\]\[batch=(?P<iteration>\d{1,9})\]: (?=time/batch: (?P<other>\d))"
    rb"|\[metric\]\[batch=\d{1,9}\]: (?=[a-z\d_]{1,20}/)"
)
_FIELDS = {
    name: labelled(label)
    for name, label in (
        ("done", b"time/batch"),
        ("samples", b"time/sample"),
        ("tokens", b"time/token"),
        ("loss", b"loss/train/total"),
        ("grad_norm", b"l2_norm/grad/global"),
        ("tflops", b"throughput/device/flops_per_sec"),
        ("all_tflops", b"throughput/flops_per_sec"),
        ("samples_per_s", b"throughput/samples_per_sec"),
        ("device_samples_per_s", b"throughput/device/samples_per_sec"),
        ("tokens_per_s", b"throughput/tokens_per_sec"),
        ("device_tokens_per_s", b"throughput/device/tokens_per_sec"),
        ("mfu", b"throughput/device/mfu"),
        ("peak_gib", b"memory/peak_reserved_mem"),
    )
}
_RATES = (("all_tflops", "tflops"), ("tokens_per_s", "device_tokens_per_s"))  # most digits first
_RATES += (("samples_per_s", "device_samples_per_s"),)
_PRECISION = re.compile(rb"Using precision Precision\.(?:AMP_)?(BF16|FP16|FP32|FP8)\b")


def _entries(columns: Columns, record: Record, log: Log) -> Columns:
    """Returns a row for each heading that has metrics, with the batch that the counters tell."""
    columns = by_heading(columns, np.isfinite(columns["iteration"]) | ~np.isnan(columns["other"]))
    done, samples = columns.pop("done"), columns.pop("samples")
    numbered = np.where(np.isnan(done), columns["iteration"], done + 1)  # a batch of all epochs
    columns["iteration"] = numbered
    columns["peak_gib"] *= 1e9 / GIB
    gpus = (ranks_of_rates(columns[of_all], columns[of_one]) for of_all, of_one in _RATES)
    state(record, {"gpus": next(filter(None, gpus), None)}, "log")
    columns["tflops"] /= 1e12
    tokens = columns.pop("tokens") / positive(samples)
    global_batch, seq_len = whole(samples / positive(done)), whole(tokens)
    if np.isfinite(tokens).any() and seq_len is None:
        record.doubt(UNPADDED, "its tokens/s leave out padding")
    state(record, {"global_batch": global_batch, "seq_len": seq_len}, "log")
    columns["step_s"] = (global_batch or np.nan) / positive(columns["samples_per_s"])
    kept = np.isfinite(numbered) & ~(np.isnan(done) & np.isnan(columns["loss"]))
    return {name: values[kept] for name, values in columns.items()}


def _file_entries(columns: Columns, record: Record, log: Log) -> Columns:
    """Returns a row for each batch of a FileLogger's file; behind the last one it counts on."""
    columns = _entries(columns, record, log)
    kept = np.isfinite(columns["loss"]) | (columns["nan_loss"] > 0)
    return {name: values[kept] for name, values in columns.items()}


def _facts(record: Record, columns: Columns, header: bytes) -> None:
    """Fills the GPUs, which are nodes times GPUs of a node, and the precision. GPUs are unknown
    where these contradict the rates."""
    nodes, each = (
        last_number(rb"\bnum_%b: (\d{1,6})" % name, header) for name in (b"nodes", b"gpus_per_node")
    )
    stated = nodes * each if nodes and each else None
    if record.gpus and stated and record.gpus != stated:
        words = f"its rates are of {record.gpus}, but it states {nodes} nodes of {each}"
        record.doubt("gpus", f"how many GPUs there are is unknown: {words} (--gpus)")
        record.gpus = None
    else:
        state(record, {"gpus": stated}, "log")
    precision = next((name.decode().lower() for name in _PRECISION.findall(header)[-1:]), None)
    state(record, {"precision": precision}, "log")


def _finish(record: Record, log: Log) -> None:
    """Notes what its rates are."""
    record.running_average = bool(np.isfinite(record.steps["step_s"]).any())
    if record.running_average:
        record.note("step times follow from samples/s, a running mean of the last batches")


FORMAT = Format(
    name="Composer",
    marks=(
        (b"[batch=", b"Train "),
        (b"=", b"Train time/batch: "),
        (b"[metric][batch=", b"]: time/batch: "),
    ),
    starts=(
        b"composer.trainer.trainer: Run name: ",
        b"[composer.trainer.trainer][INFO] - Run name: ",
    ),
    lines=(
        Line(_LINE, _FIELDS, _entries, mark=b":"),
        Line(_FILE_LINE, _FIELDS, _file_entries, mark=b"[metric]"),
    ),
    facts={
        "planned_steps": rb"(?<![\w.])max_duration: [\"']?(\d{1,9})ba[\"']?",
        "global_batch": rb"(?<![\w.])global_train_batch_size: (\d{1,9})",
        "micro_batch": rb"(?<![\w.])device_train_microbatch_size: (\d{1,9})",
        "n_layer": rb"(?<![\w.])n_layers: (\d{1,6})",
        "hidden": rb"(?<![\w.])d_model: (\d{1,7})",
        "n_head": rb"(?<![\w.])n_heads: (\d{1,6})",
        "vocab_size": rb"(?<![\w.])vocab_size: (\d{1,9})",
        "params": rb"(?<![\w.])n_params: (\d{1,15})",
    },
    arguments=False,
    prepare=_facts,
    finish=_finish,
)
