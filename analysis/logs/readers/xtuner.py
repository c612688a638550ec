"""XTuner: mmengine's lines until 0.2, its own since 1.0.

    05/04 08:52:15 - mmengine - INFO - Iter(train) [  10/1920]  lr: 3.2e-05  ... time: 0.3458  ...
    [XTuner][RANK 0][2025-09-08 03:04:13][INFO] Step 2/13 data_time: 0.0065 ... time: 0.0515 ...

mmengine's iteration is a micro-batch: a step takes accumulative_counts of them. Its `time` is the
mean of the last ones, with loading data. In XTuner's own lines `time` leaves out data_time; each
rank prints its own tokens, without padding, over it (tgs).
"""

import re

import numpy as np

from analysis.logs.parsing.fields import labelled, positive
from analysis.logs.parsing.line_format import Format
from analysis.logs.parsing.lines import Columns, Line
from analysis.logs.parsing.logfile import Log
from analysis.logs.record import UNPADDED, Record


def _micro_batches(columns: Columns, record: Record, log: Log) -> Columns:
    """Returns the columns with memory in GiB, which is printed in MiB."""
    columns["peak_gib"] /= 1024
    return columns


def _own_lines(columns: Columns, record: Record, log: Log) -> Columns:
    """Returns the columns with the time of loading data in times and rates."""
    training_s = columns.pop("training_s")
    columns["step_s"] = training_s + columns["data_s"]
    columns["tokens_per_s_per_gpu"] *= training_s / positive(columns["step_s"])
    record.doubt(UNPADDED, "its tokens/s are of one rank and leave out padding")
    return columns


def _derive(record: Record, columns: Columns, header: bytes) -> None:
    """Fills the program, for others print mmengine's lines, too. Notes what is counted."""
    if "micro_s" in columns:
        record.engine = "XTuner" if b"xtuner" in header.lower() else "mmengine"
        record.note("its iterations are micro-batches, of which a step may take several")
    if "tflops" in columns and np.isfinite(columns["tflops"]).any():
        record.note("printed TFLOP/s count a second forward pass where activations are recomputed")


_BATCH = re.compile(
    rb"Iter\(train\) {0,2}\[ {0,12}(?P<iteration>\d{1,9})/(?P<planned>\d{1,9})\](?=  )"
)
_BATCH_FIELDS = {
    "micro_s": labelled(b"time"),
    "loss": labelled(b"loss"),
    "grad_norm": labelled(b"grad_norm"),
    "tflops": labelled(b"tflops"),
    "tokens_per_s_per_gpu": labelled(b"tokens_per_sec"),
    "peak_gib": labelled(b"memory"),
}
# mmengine's scalars.json, one JSON object a line.
_SCALARS = re.compile(rb"\{\"(?=[^\r\n]{0,900}\"data_time\": [^\r\n]{0,900}\"iter\": )")
_SCALAR_FIELDS = {
    name: labelled(rb"\"" + label + rb"\"", rb": ")
    for name, label in (
        ("iteration", b"iter"),
        ("micro_s", b"time"),
        ("loss", b"loss"),
        ("grad_norm", b"grad_norm"),
        ("tflops", b"tflops"),
        ("tokens_per_s_per_gpu", b"tokens_per_sec"),
        ("peak_gib", b"memory"),
    )
}
_STEP = re.compile(rb"Step (?P<iteration>\d{1,9})/(?P<planned>\d{1,9}) (?=data_time: )")
_STEP_FIELDS = {
    "training_s": labelled(b"time"),
    "data_s": labelled(b"data_time"),
    "loss": labelled(b"reduced_llm_loss"),  # of all ranks
    "grad_norm": labelled(b"grad_norm"),
    "tokens_per_s_per_gpu": labelled(b"tgs"),
    "peak_gib": labelled(b"max_memory", unit=rb" GB"),  # GiB, by its source
}

FORMAT = Format(
    name="XTuner",
    marks=(
        (b" - mmengine - ", b"Iter(train) "),
        (b"[XTuner]", b"Step ", b" data_time: "),
        (b'"data_time": ', b'"iter": ', b'"memory": '),
    ),
    starts=(b"mmengine - INFO - \n------",),
    lines=(
        Line(_BATCH, _BATCH_FIELDS, _micro_batches),
        Line(_STEP, _STEP_FIELDS, _own_lines),
        Line(_SCALARS, _SCALAR_FIELDS, _micro_batches, mark=b'{"'),
    ),
    facts={
        "gpus": rb"(?<![\w.])GPU number: (\d{1,6})",
        "n_micro": rb"(?<![\w.])accumulative_counts ?= ?(\d{1,6})",
    },
    averages=True,
    arguments=False,
    prepare=_derive,
)
