"""nanochat and its ancestor build-nanogpt.

step 00010/21400 (0.05%) | loss: 9.1 | grad norm: 0.4 | lrm: 1.00 | dt: 5.04ms | tok/sec: 25,388
step    12 | loss: 9.3 | lr 6.0e-04 | norm: 1.2 | dt: 95.21ms | tok/sec: 172000.10
"""

import re

from analysis.logs.parsing.fields import THOUSANDS, labelled, word
from analysis.logs.parsing.line_format import Format, last_number
from analysis.logs.parsing.lines import Columns, Line
from analysis.logs.parsing.setting_names import state
from analysis.logs.record import Record

_STEP = re.compile(
    word(b"step ") + rb" {0,7}(?P<iteration>\d{1,9})(?:/(?P<planned>\d{1,9}))?"
    rb"(?: \([^)|\r\n]{1,12}\))? ?\| ?loss: "
)
_FIELDS = {
    "loss": labelled(rb"loss"),
    "grad_norm": labelled(rb"(?:grad )?norm"),
    "ms": labelled(rb"dt", unit=rb"ms"),
    "tokens_per_s": labelled(rb"tok/sec", number=THOUSANDS),
    "mfu_pct": labelled(rb"(?:bf16_)?mfu"),
}
_TOKEN_FLOPS = rb"Estimated FLOPs per token: ([\d.e+]{1,16})"
_MICRO = re.compile(rb"Tokens / micro-batch / rank: (\d{1,6}) x (\d{1,8})")


def _split(record: Record, columns: Columns, header: bytes) -> None:
    """Fills the GPUs, from the tokens of a micro-batch on one rank and on all, what all of
    nanochat's models share, and the TFLOP/s that its MFU is of."""
    if b"nanochat" in header:  # its ancestor trains GPT-2
        shared_sizes = {"tied": False, "bias": False, "activation": "gelu"}
        state(record, shared_sizes | {"norm": "rmsnorm", "position": "rope"}, "log")
    if micro := _MICRO.search(header):
        rows, seq_len = int(micro[1]), int(micro[2])
        all_tokens = last_number(rb"Tokens / micro-batch: ([\d,]{1,16})", header)
        gpus = all_tokens // (rows * seq_len) if all_tokens and record.gpus is None else None
        state(record, {"micro_batch": rows, "seq_len": seq_len, "gpus": gpus}, "log")
    if (token_flops := last_number(_TOKEN_FLOPS, header)) and record.gpus:
        columns["tflops"] = columns["tokens_per_s"] * token_flops / record.gpus / 1e12
        record.note("the printed TFLOP/s are its tokens/s times its FLOPs per token")


FORMAT = Format(
    name="nanochat",
    marks=((b"| dt: ", b"| tok/sec: "),),
    starts=(b"istributed world size: ", b"otal batch size", b"otal desired batch size"),
    lines=(Line(_STEP, _FIELDS),),
    facts={
        "gpus": rb"[Ww]orld size: (\d{1,6})",
        "planned_steps": rb"number of iterations:? ([\d,]{1,16})",
        "params": rb"[Nn]umber of parameters: ([\d,]{1,20})",
        "batch_tokens": rb"[Tt]otal (?:desired )?batch size:? ([\d,]{1,16})",
        "mfu_flops": rb"Peak FLOPS \(BF16\): ([\d.e+]{1,16})",
    },
    first=0,
    prepare=_split,
)
