"""OLMo-core, and OLMo before it: a heading and a line for each metric.

    [step=20/20,epoch=1]                          [step=2/739328]
        throughput/device/BPS=10.82                   throughput/device/batches_per_second=0.0869
        throughput/device/TPS=5,540                   throughput/device/tokens_per_second=45,538
        train/CE loss=6.944                           train/CrossEntropyLoss=10.73

A step's time is one over its batches per second: OLMo-core's are of the step alone, with loading
data, evaluations and saves; OLMo's are a running mean. Tokens are of a device, with padding; total
tokens are of all. Its batch sizes are in tokens.
"""

import math
import re

import numpy as np

from analysis.logs.parsing.fields import THOUSANDS, labelled, positive, ranks_of_rates, whole
from analysis.logs.parsing.line_format import Format
from analysis.logs.parsing.lines import Columns, Line, by_heading
from analysis.logs.parsing.logfile import Log
from analysis.logs.parsing.setting_names import state
from analysis.logs.record import Record

_LINE = re.compile(
    rb"\[step=(?P<iteration>\d{1,9})/(?P<planned>\d{1,9})?|(?<=    )(?=(?:optim|train|throughput)/)"
    rb"|(?<=    )(?=(?:gpu_memory|system|System)/)"
)
_FIELDS = {
    name: labelled(label, b"=", number=THOUSANDS)
    for name, label in (
        ("loss", rb"train/(?:CE loss|CrossEntropyLoss)"),
        ("grad_norm", rb"optim/total[ _]grad[ _]norm"),
        ("skipped", rb"optim/step skipped"),
        ("batches_per_s", rb"throughput/device/(?:BPS|batches_per_second)"),
        ("tokens_per_s_per_gpu", rb"throughput/device/(?:TPS|tokens_per_second)"),
        ("mfu_pct", rb"throughput/device/MFU"),
        ("data_s", rb"throughput/device/data loading \(s\)"),  # of the slowest rank
        ("tflops", rb"throughput/device/flopsPS"),
        ("total_tokens", rb"throughput/total[ _]tokens"),
        ("peak_gib", rb"(?:gpu_memory|system)/GPU reserved mem \(GiB\)"),
    )
}
_EXACT = 1e9  # total tokens; newer versions print larger ones with four digits
_FEW_DIGITS = 0.01  # batches per second, of which four decimals are two digits
_MESH = re.compile(rb"device mesh with shape \(((?:\w{2,16}=\d{1,6},? ?){1,6})\)")
_UNLIKE = re.compile(
    rb"(feed_forward_moe|sliding_window|block_pattern|block_overrides|freeze_params)=(?!None)"
)


def _entries(columns: Columns, record: Record, log: Log) -> Columns:
    """Returns a row for each heading with a loss or a rate."""
    columns = by_heading(columns, np.isfinite(columns["iteration"]))
    batches_per_s = columns.pop("batches_per_s")
    columns["step_s"] = 1 / positive(batches_per_s)
    columns["tflops"] /= 1e12
    if (batches_per_s < _FEW_DIGITS).any():
        record.note("batches per second are printed with two digits, and so are step times")
    loss_or_rate = np.isfinite(columns["step_s"]) | ~np.isnan(columns["loss"])
    return {name: values[loss_or_rate] for name, values in columns.items()}


def _derive(record: Record, columns: Columns, header: bytes) -> None:
    """Fills the program, the GPUs and the tokens of a batch."""
    total = np.where(columns["total_tokens"] < _EXACT, columns.pop("total_tokens"), np.nan)
    batch_tokens = whole(np.diff(total) / positive(np.diff(columns["iteration"])))
    record.engine = "OLMo-core" if b"olmo_core" in header else "OLMo"
    record.running_average = record.engine == "OLMo"
    gpus = None
    for mesh in _MESH.findall(header)[-1:]:
        gpus = math.prod(map(int, re.findall(rb"\d+", re.sub(rb"\w+=", b"", mesh))))
    if gpus is None and batch_tokens:
        in_all = batch_tokens / positive(columns["step_s"])
        gpus = ranks_of_rates(in_all, columns["tokens_per_s_per_gpu"])
    state(record, {"gpus": gpus}, "log")
    if record.global_batch is None and batch_tokens and record.seq_len:
        state(record, {"global_batch": whole(np.array([batch_tokens / record.seq_len]))}, "log")
    for part in dict.fromkeys(_UNLIKE.findall(header)):
        record.uncounted.append(f"a {part.decode()}")
    if "ffn_hidden" in record.model:  # its feed-forward has a gate
        state(
            record, {"activation": "swiglu", "tied": b"tie_word_embeddings=True" in header}, "log"
        )


def _finish(record: Record, log: Log) -> None:
    """Sets that the run completed where it says so behind its last step, and notes what OLMo's
    rates are."""
    if len(record.steps) and log.places(FORMAT.done, record.last_at):
        record.completed = True
    if record.running_average:
        record.note("step times are one over a running mean of the last batches per second")


FORMAT = Format(
    name="OLMo",
    marks=tuple((b"[step=", b"train/", b"throughput/" + part) for part in (b"total", b"device/")),
    starts=(b"Building transformer with ",),
    done=(b"Training complete",),
    lines=(Line(_LINE, _FIELDS, _entries, mark=b"="),),
    facts={
        "seq_len": rb"\bsequence_length=(\d{1,9})",
        "batch_tokens": rb"\bglobal_batch_size=(\d{1,12})",
        "dp": rb"Data parallel world size = (\d{1,6})",
        "params": rb"(?:Building transformer with|Total number of parameters:) ([\d,]{4,20})",
        "hidden": rb"\bd_model=(\d{1,7})",
        "vocab_size": rb"\bd_model=\d{1,7},\s{1,40}vocab_size=(\d{1,9})",
        "n_layer": rb"\bn_layers=(\d{1,6})",
        "n_head": rb"\bn_heads=(\d{1,6})",
        "n_kv_head": rb"\bn_kv_heads=(\d{1,6})",
        "kv_channels": rb"\bhead_dim=(\d{1,6})",
        "ffn_hidden": rb"FeedForwardConfig\(\s{0,40}hidden_size=(\d{1,7})",
        "mfu_flops": rb"[Dd]evice peak (?:Flops/s|FLOPS): (\d{1,20})",
    },
    arguments=False,
    prepare=_derive,
    finish=_finish,
)
