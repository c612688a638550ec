"""NeMo AutoModel: `step 1 | epoch 0 | loss 10.9521 | grad_norm 12.9375 | lr 6.08e-05 |
mem 38.39 GiB | tps 132005.57(66002.79/gpu) | num_label_tokens 524288`.

tps are tokens per second of all GPUs, between two steps (with loading data, evaluation and saves):
prompts count, padding at a sequence's end does not. What it prints as /gpu is of a rank of data and
context parallelism, so it tells no number of GPUs. num_label_tokens counts what is trained on. Its
training.jsonl, which has no public sample, is not read.
"""

import re

import numpy as np

from analysis.logs.parsing.fields import labelled, whole, word
from analysis.logs.parsing.line_format import Format
from analysis.logs.parsing.lines import Columns, Line
from analysis.logs.parsing.setting_names import state
from analysis.logs.record import UNPADDED, Record


def _derive(record: Record, columns: Columns, header: bytes) -> None:
    """Fills a step's tokens where each of several steps trains on as many: nothing is padded then,
    and they over tps are its time. Else says that tps leave out padding."""
    label_tokens = columns.pop("label_tokens")
    tokens = whole(label_tokens)
    if tokens is None or np.isfinite(label_tokens).sum() < 2:
        record.doubt(UNPADDED, "its tokens/s leave out padding, and steps differ in tokens")
        return
    columns["tokens"] = label_tokens
    record.note(f"each step trains on {tokens:,} tokens; over tps they are its time")
    if record.seq_len and not tokens % record.seq_len:
        state(record, {"global_batch": tokens // record.seq_len}, "log")


_STEP = re.compile(
    word(b"step ")
    + rb"(?P<iteration>\d{1,9}) \| epoch \d{1,6} \| loss (?=[^\r\n]{1,400}? GiB \| tps )"
)
_FIELDS = {
    "loss": labelled(b"loss", b" "),
    "grad_norm": labelled(b"grad_norm", b" "),
    "peak_gib": labelled(b"mem", b":? ", unit=b" GiB"),
    "tokens_per_s": labelled(b"tps", b" "),
    "label_tokens": labelled(b"num_label_tokens", b" "),
}

FORMAT = Format(
    name="NeMo AutoModel",
    marks=((b"step ", b" | epoch ", b" GiB | tps "),),
    starts=(b"Experiment_details:",),
    lines=(Line(_STEP, _FIELDS),),
    facts={
        "gpus": rb"(?<![\w.])World size: (\d{1,7})",
        "n_micro": rb"- Gradient accumulation steps: (\d{1,6})",
        "planned_steps": rb"- Max train steps: (\d{1,9})",
    },
    first=0,
    prepare=_derive,
)
