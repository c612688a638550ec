"""picotron: `[rank 0] Step: 1 | Loss: 10.9 | Global batch size: 16.38K | Tokens/s: 1.2K | ...`.

Its first version separates with commas. The global batch is in tokens; a step's time is printed by
some versions only and follows from tokens per second elsewhere.
"""

import re

import numpy as np

from analysis.logs.parsing.fields import labelled, positive, word
from analysis.logs.parsing.line_format import Columns, LineFormat
from analysis.logs.record import Record

_STEP = re.compile(word(b"Step:") + rb" {0,8}(?P<iteration>\d{1,9}) {0,8}[|,] (?=Loss:)")
_FIELDS = {
    "loss": labelled(rb"Loss"),
    "batch_tokens": labelled(rb"Global batch size"),
    "tokens_per_s": labelled(rb"Tokens/s"),
    "per_gpu": labelled(rb"Tokens/s/GPU"),
    "ms": labelled(rb"Time/step"),
}


def _derive(record: Record, columns: Columns, header: bytes) -> None:
    tokens = columns["batch_tokens"]
    if np.isnan(columns["step_s"]).all():
        record.notes.append("step times follow from the printed tokens per second")
    followed = tokens / positive(columns["tokens_per_s"])
    columns["step_s"] = np.where(np.isnan(columns["step_s"]), followed, columns["step_s"])
    tokens = tokens[np.isfinite(tokens)]
    if len(tokens) and record.global_batch is None and record.seq_len:
        record.global_batch = round(float(tokens[-1]) / record.seq_len)


FORMAT = LineFormat(
    name="picotron",
    marks=((b"Step: ", b"Tokens/s/GPU: "),),
    banners=(b"picotron",),
    lines=((_STEP, _FIELDS),),
    facts={
        "tp": rb'"tp_size": (\d{1,6})',
        "cp": rb'"cp_size": (\d{1,6})',
        "pp": rb'"pp_size": (\d{1,6})',
        "dp": rb'"dp_size": (\d{1,6})',
        "planned_steps": rb'"total_train_steps": (\d{1,9})',
    },
    prepare=_derive,
)
