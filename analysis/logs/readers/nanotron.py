"""nanotron: `iteration: 1 / 15 | consumed_tokens: 512 | elapsed_time_per_iteration_ms: 4.71K |`.

Numbers keep three digits and carry K, M, G or T. Newer versions say `time_per_iteration_ms`.
"""

import re

from analysis.logs.parsing.fields import NOT_LAST, labelled, word
from analysis.logs.parsing.line_format import Format
from analysis.logs.parsing.lines import Columns, Line
from analysis.logs.parsing.setting_names import state
from analysis.logs.record import Record

_ITERATION = re.compile(
    word(b"iteration:") + rb" (?P<iteration>\d{1,9}) / (?P<planned>\d{1,9}) ?\|"
)
_MODE = re.compile(rb"\btp_mode=<TensorParallelLinearMode\.(\w{1,40})")
_FIELDS = {
    "ms": labelled(rb"(?:elapsed_)?time_per_iteration_ms"),
    "loss": labelled(rb"lm_loss"),
    "grad_norm": labelled(rb"grad_norm"),
    "tflops": labelled(rb"model_tflops_per_gpu"),
    "tokens_per_s": labelled(rb"tokens_per_sec"),
    "per_gpu": labelled(rb"tokens_per_sec_per_gpu"),
    "global_batch": re.compile(rb"global_batch_size: (\d{1,9})(?=[ |])"),
}


def _derive(record: Record, columns: Columns, header: bytes) -> None:
    """Fills whether tensor-parallel ranks share the sequences, and notes how exact the numbers
    are."""
    for mode in _MODE.findall(header)[-1:]:
        state(record, {"sequence_parallel": mode == b"REDUCE_SCATTER"}, "log")
    record.note("numbers are printed with three digits")


FORMAT = Format(
    name="nanotron",
    marks=((b"iteration: ", b"time_per_iteration_ms: "),),
    starts=(b"Config(general=GeneralArgs(", b"[Start training]"),
    lines=(Line(_ITERATION, _FIELDS),),
    facts={
        "micro_batch": rb"\| mbs: (\d{1,9})" + NOT_LAST,
        "global_batch": rb"\| global_batch_size: (\d{1,9})" + NOT_LAST,
        "seq_len": rb"\| sequence_length: (\d{1,9})" + NOT_LAST,
        "planned_steps": rb"\| train_steps: (\d{1,9})" + NOT_LAST,
        "tp": rb"ParallelismArgs\([^)\r\n]{0,80}\btp=(\d{1,6})" + NOT_LAST,
        "pp": rb"ParallelismArgs\([^)\r\n]{0,80}\bpp=(\d{1,6})" + NOT_LAST,
        "dp": rb"ParallelismArgs\([^)\r\n]{0,80}\bdp=(\d{1,6})" + NOT_LAST,
        "params": rb"Total number of parameters: ([\d.,]{1,16}[KMGBT]?)",
    },
    prepare=_derive,
)
