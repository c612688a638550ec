"""llm.c: its console and its main.log.

step    2/18865 | loss 10.96 (+nanz)| norm 15.2 (+nanz)| ... | 1250.10 ms | ... | 419000 tok/s
step 1/74: train loss 4.367631 (80.639749 ms, 50793 tok/s)                 (2024's first)
s:1 trl:10.9598 lr:0.000002 norm:15.24            (main.log: losses only, no time)
"""

import re

import numpy as np

from analysis.logs.parsing.fields import BEHIND, NUMBER, labelled, named_number, word
from analysis.logs.parsing.line_format import Format
from analysis.logs.parsing.lines import Line
from analysis.logs.parsing.logfile import Log
from analysis.logs.record import Record

_CONSOLE = re.compile(
    word(b"step ")
    + rb" {0,7}(?P<iteration>\d{1,9})/(?P<planned>\d{1,9})(?: \||:) (?:train )?(?=loss )"
)
_CONSOLE_FIELDS = {
    "loss": labelled(rb"loss", rb" {1,3}"),
    "grad_norm": labelled(rb"norm", rb" {1,3}"),
    "mfu_pct": re.compile(rb"[|] {0,4}" + NUMBER + rb"% \w{2,8} MFU"),
    "ms": re.compile(rb"[|(] {0,4}" + NUMBER + rb" ms"),
    "tokens_per_s": re.compile(rb"[|,] {0,4}" + NUMBER + rb" tok/s"),
}
_MAIN = re.compile(word(b"s:") + rb"(?P<iteration>\d{1,9}) trl:" + named_number("loss") + BEHIND)


def _finish(record: Record, log: Log) -> None:
    """Notes that a log of losses alone has no times."""
    if np.isnan(record.steps["step_s"]).all():
        record.note("main.log holds losses only: no times")


FORMAT = Format(
    name="llm.c",
    marks=(
        (b"s:", b" trl:"),
        (b"step ", b"tok/s", b"| loss "),
        (b"step ", b"tok/s", b"train loss "),
    ),
    lines=(Line(_CONSOLE, _CONSOLE_FIELDS), Line(_MAIN, {"grad_norm": labelled(rb"norm")})),
    starts=(b"| Parameter ",),
    arguments=False,
    finish=_finish,
)
