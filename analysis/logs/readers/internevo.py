"""InternEvo, and InternLM's trainer before it:

    tflops=189.8 step=1 loss=11.61 tgs (tokens/gpu/second)=4274.45 ... num_consumed_tokens=262144

In July 2023 commas stand between the fields. tgs are tokens per second of a GPU, with padding, over
a step with loading its data; fwd_bwd_time leaves out the optimizer and the data. No step time is
printed: it is a step's tokens, by the counter, over tgs and GPUs.
"""

import math
import re

import numpy as np

from analysis.logs.parsing.fields import labelled, positive, whole
from analysis.logs.parsing.line_format import Format
from analysis.logs.parsing.lines import Columns, Line
from analysis.logs.parsing.setting_names import state
from analysis.logs.record import Record

# A rank says where it stands: its own number, or its place along each axis.
_BOUND = re.compile(rb"process rank (\d{1,6}) is bound to host:")
_PLACE = re.compile(rb"=New Run [^\r\n]{1,200}?,tp:(\d{1,6}),pp=(\d{1,6}),dp=(\d{1,6})=")


def _derive(record: Record, columns: Columns, header: bytes) -> None:
    """Fills the GPUs, the tokens of each step and its batch."""
    gpus = (record.tp or 0) * (record.pp or 0) * (record.dp or 0) or _places(header)
    state(record, {"gpus": gpus, "n_micro": whole(columns.pop("micro_num"))}, "log")
    consumed, iteration = positive(columns.pop("consumed")), columns["iteration"]
    n_steps = positive(np.diff(iteration, prepend=-1))
    columns["tokens"] = positive(np.diff(consumed, prepend=0)) / n_steps
    tokens = whole(columns["tokens"])
    if tokens and record.seq_len and not tokens % record.seq_len:
        state(record, {"global_batch": tokens // record.seq_len}, "log")
    elif tokens:
        record.note(f"a step has {tokens:,} tokens; the length of a sequence is not stated")
    if np.isfinite(columns["tflops"]).any():
        record.note("printed TFLOP/s count a second forward pass where activations are recomputed")


def _places(header: bytes) -> int | None:
    """Returns how many ranks say where they stand; None where one of them is missing."""
    for pattern in (_BOUND, _PLACE):
        places = {tuple(map(int, match.groups())) for match in pattern.finditer(header)}
        sizes = [max(axis) + 1 for axis in zip(*places, strict=True)]
        if places and math.prod(sizes) == len(places):
            return len(places)
    return None


_STEP = re.compile(rb"tflops=[\d.e+-]{1,30}[ ,]step=(?P<iteration>\d{1,9})[ ,]loss=")
_FIELDS = {
    "tflops": labelled(rb"tflops", b"="),
    "loss": labelled(rb"loss", b"="),
    "tokens_per_s_per_gpu": labelled(rb"tgs \(tokens/gpu/second\)", b"="),
    # Of several groups of parameters, each with its norm, the first has the model's.
    "grad_norm": labelled(rb"grad_norm", rb"=(?:\{'\w{1,40}': )?"),
    "micro_num": labelled(rb"micro_num", b"="),
    "consumed": labelled(rb"num_consumed_tokens", b"="),
}

FORMAT = Format(
    name="InternEvo",
    marks=((b"tflops=", b"tgs (tokens/gpu/second)="),),
    starts=(b"===========New Run ",),
    lines=(Line(_STEP, _FIELDS),),
    facts={
        "dp": rb"is initialized, data parallel size: (\d{1,6})",
        "pp": rb"is initialized, data[^\r\n]{1,40}, pipeline parallel size: (\d{1,6})",
        "tp": rb"is initialized, data[^\r\n]{1,80}, tensor parallel size: (\d{1,6})",
    },
    first=0,
    prepare=_derive,
)
