"""torchtune: the lines of its DiskLogger and StdoutLogger, else its progress bar.

    Step 11 | loss:11.87 lr:2e-05 tokens_per_second_per_gpu:242.4 grad_norm:0.48
    1|3251|Loss: 1.5955: 100%|######| 3251/3251 [2:07:13<00:00,  2.35s/it]

No step time is printed, and none follows from tokens/s: since 0.4 they count the tokens that are
trained on, without padding and prompts. The bar's clock, in whole seconds, gives the mean of a run.
It does not print how many GPUs there are; its memory is in GB or GiB, by the version.
"""

import re
from collections import deque

import numpy as np

from analysis.logs.parsing.fields import labelled, named_number, word
from analysis.logs.parsing.line_format import Format, last_number
from analysis.logs.parsing.lines import Columns, Line
from analysis.logs.parsing.logfile import Log
from analysis.logs.parsing.model_names import read_name
from analysis.logs.parsing.progress_bar import FINE, read_bars
from analysis.logs.parsing.setting_names import header_of, state
from analysis.logs.record import COARSE, UNPADDED, Record

_STEP = re.compile(word(b"Step ") + rb"(?P<iteration>\d{1,9}) \| loss:(?! )")
_FIELDS = {
    name: labelled(label, b":")
    for name, label in (
        ("loss", b"loss"),
        ("tokens_per_s_per_gpu", b"tokens_per_second_per_gpu"),
        ("grad_norm", b"grad_norm"),
    )
}
_LOSS = re.compile(rb"\|(?P<iteration>\d{1,9})\|Loss: " + named_number("loss") + rb"(?=: )")
_BAR = rb"(\d{1,6})\|\d{1,9}\|Loss: [^\r\n|]{1,40}"
_MODEL = re.compile(rb"torchtune\.models\.\w{1,40}\.(\w{1,60})")
_DTYPE = re.compile(rb"(?<![\w.])dtype: (bf16|fp16|fp32)\b")
_EPOCHS = rb"(?<![\w.])epochs: (\d{1,6})"


def _derive(record: Record, columns: Columns, header: bytes) -> None:
    """Fills the precision and the model from the configuration that it prints."""
    for dtype in _DTYPE.findall(header)[-1:]:
        state(record, {"precision": dtype.decode()}, "log")
    for name in _MODEL.findall(header)[:1]:
        words = re.sub(r"(\d)_(\d)(?=_)", r"\1.\2", name.decode())  # llama3_1_8b
        read_name(record, words)
        if "lora" in words:
            record.uncounted.append("frozen weights")


def _clocked(record: Record, log: Log) -> None:
    """Fills the mean step time of the last epoch from the progress bar, and whether the run is over
    by it. The bar counts the steps of an epoch."""
    bars = deque(read_bars(log, _BAR) if log.contains(b"|Loss: ") else (), maxlen=1)
    for bar in bars:
        if bar.steps and bar.elapsed_s >= FINE:
            record.totals["step_s_mean"] = bar.elapsed_s / bar.steps
            record.mean_of = f"the progress bar's time over {bar.steps} steps"
        else:
            words = f"its progress bar's clock, to 1 s, tells {bar.elapsed_s} s"
            record.doubt(COARSE, f"{words}: too few for a time")
        first = record.steps["at"][:1].astype(int).tolist() or [None]
        if epochs := last_number(_EPOCHS, header_of(log, first[0])):
            record.completed = bar.steps >= bar.planned and bar.epoch >= epochs
    if np.isfinite(record.steps["tokens_per_s_per_gpu"]).any():
        record.doubt(UNPADDED, "its tokens/s leave out padding and, since 0.4, prompts")


FORMAT = Format(
    name="torchtune",
    marks=((b"Step ", b" | loss:", b" lr:"), (b"|Loss: ", b"%|")),
    starts=(b" with resolved config:",),
    lines=(Line(_STEP, _FIELDS), Line(_LOSS, mark=b"|Loss: ")),
    facts={
        "micro_batch": rb"(?<![\w.])batch_size: (\d{1,6})",
        "n_micro": rb"(?<![\w.])gradient_accumulation_steps: (\d{1,6})",
        "tp": rb"(?<![\w.])tensor_parallel_dim: (\d{1,6})",
        "cp": rb"(?<![\w.])context_parallel_dim: (\d{1,6})",
    },
    arguments=False,
    prepare=_derive,
    finish=_clocked,
)
