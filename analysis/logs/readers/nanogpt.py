"""nanoGPT: `iter 10: loss 9.7188, time 2950.15ms, mfu 22.82%`.

It prints every log_interval-th iteration's own time, which includes an evaluation or checkpoint
where one fell into it.
"""

import re

from analysis.logs.parsing.fields import named_number, word
from analysis.logs.parsing.line_format import LineFormat

_ITERATION = re.compile(
    word(b"iter ")
    + rb"(?P<iteration>\d{1,9}): loss "
    + named_number("loss")
    + rb", time (?P<ms>[\d.]{1,20})ms"
)

FORMAT = LineFormat(
    name="nanoGPT",
    marks=((b"iter ", b": loss ", b"ms, mfu "), (b"iter ", b": loss ", b", time ")),
    banners=(b"tokens per iteration will be:",),
    lines=((_ITERATION, {}),),
    facts={
        "planned_steps": rb"max_iters(?<!\wmax_iters) {0,3}= {0,3}(\d{1,9})",
        "params": rb"number of parameters: ([\d.,]{1,16}[KMBG]?)",
        "batch_tokens": rb"tokens per iteration will be: ([\d,]{1,20})",
    },
)
