"""nanoGPT: `iter 10: loss 9.7188, time 2950.15ms, mfu 22.82%`.

It prints every log_interval-th iteration's own time, which includes an evaluation or checkpoint
where one fell into it. Its MFU is of the A100's 312 TFLOP/s on any card, by PaLM's convention; the
first one that is not negative is of one iteration, the others are running means.
"""

import re

import numpy as np

from analysis.logs.parsing.fields import named_number, positive, ranks_of_rates, word
from analysis.logs.parsing.line_format import Format, last_number
from analysis.logs.parsing.lines import Columns, Line
from analysis.logs.parsing.setting_names import state
from analysis.logs.record import Record
from base.errors import UsageError
from models.config import GPTConfig
from models.flops import palm
from models.mfu_peaks import peak_on_every_card

# What it trains unless its configuration or command line, which it prints, says otherwise.
_DEFAULTS = {"n_layer": 12, "n_head": 12, "hidden": 768, "vocab_size": 50304, "max_seq_len": 1024}
_ALWAYS = {"position": "learned", "norm": "layernorm", "activation": "gelu", "tied": True}
_VOCABULARY = rb"found vocab_size = (\d{1,9})"
_PRINTED_PARAMS = 1e-3  # it prints four digits


def _model(record: Record, columns: Columns, header: bytes) -> None:
    """Fills the model, where its defaults make the printed number of parameters, and the GPUs, from
    the first MFU."""
    record.n_micro = None  # its gradient_accumulation_steps are those of all ranks
    mfu = columns["mfu"] = positive(columns["mfu"])  # -100 % where there is none yet
    columns["tflops"] = mfu * peak_on_every_card("nanoGPT")
    if np.isfinite(columns["tflops"]).any():
        record.note("the printed TFLOP/s are running means: its MFU times 312")
    vocabulary = last_number(_VOCABULARY, header) or _DEFAULTS["vocab_size"]
    bias = re.search(rb"(?m)^(?:Overriding: )?bias = True", header) is not None
    settings = {**_DEFAULTS, "vocab_size": vocabulary, "bias": bias, **_ALWAYS, **record.model}
    try:
        config = GPTConfig(**settings)
    except UsageError:
        return
    looked_up = config.max_seq_len * config.hidden  # it counts no positions
    if abs((record.params or 0) / (config.n_params - looked_up) - 1) > _PRINTED_PARAMS:
        return
    state(record, {name: settings[name] for name in _DEFAULTS}, "default")
    state(record, _ALWAYS | {"bias": bias}, "log")
    first = np.flatnonzero(mfu > 0)[:1]
    if record.gpus is None and record.global_batch and record.seq_len and len(first):
        flops = palm(config, record.seq_len, recompute=False)
        flops *= record.global_batch * record.seq_len
        total = flops / (positive(columns["step_s"])[first] * 1e12)
        gpus = ranks_of_rates(total, columns["tflops"][first])
        state(record, {"gpus": gpus}, "log")
        record.note("the number of GPUs follows from its first MFU")


_ITERATION = re.compile(
    word(b"iter ")
    + rb"(?P<iteration>\d{1,9}): loss "
    + named_number("loss")
    + rb", time (?P<ms>[\d.]{1,20})ms(?:, mfu (?P<mfu_pct>-?[\d.]{1,8})%)?"
)

FORMAT = Format(
    name="nanoGPT",
    marks=((b"iter ", b": loss ", b"ms, mfu "), (b"iter ", b": loss ", b", time ")),
    starts=(b"tokens per iteration will be:",),
    lines=(Line(_ITERATION),),
    facts={
        "planned_steps": rb"max_iters(?<!\wmax_iters) {0,3}= {0,3}(\d{1,9})",
        "params": rb"number of parameters: ([\d.,]{1,16}[KMBG]?)",
        "batch_tokens": rb"tokens per iteration will be: ([\d,]{1,20})",
    },
    prepare=_model,
)
