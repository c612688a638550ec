"""NeMo-RL: a heading and a block of lines for each step of the driver.

    ========================= Step 2/100 =========================
      • Loss: 1.4154
      • Training FLOPS: 2709.39 TFLOPS (338.67 TFLOPS per rank)
      • Total step time: 158.50s
        - E2E (Tokens/sec/gpu): 1073.59

A step has all parts: generation, log-probabilities, training, saves. TFLOP/s are over its part of
training alone. Until September 2025 a rank's were those of all.
"""

import re

import numpy as np

from analysis.logs.parsing.fields import labelled, ranks_of_rates
from analysis.logs.parsing.line_format import Format
from analysis.logs.parsing.lines import Columns, Line, by_heading
from analysis.logs.parsing.logfile import Log
from analysis.logs.parsing.setting_names import state
from analysis.logs.record import UNPADDED, Record

_LINE = re.compile(
    rb"={10} Step (?P<iteration>\d{1,9})(?:/(?P<planned>\d{1,9}))? ={10}"
    rb"|\xe2\x80\xa2 (?=[LTGpge])|- (?=E2E \()"
)
_FIELDS = {
    "loss": labelled(b"Loss"),
    "grad_norm": labelled(b"Grad [Nn]orm"),
    "step_s": labelled(b"Total step time", unit=b"s"),
    "training_s": labelled(b"policy_training", unit=b"s"),
    "generation_s": labelled(b"(?:exposed_)?generation", unit=b"s"),
    "all_tflops": labelled(b"Training FLOPS", unit=b" TFLOPS"),
    "tflops": labelled(rb"Training FLOPS: [\d.]{1,24} TFLOPS", rb" \(", unit=b" TFLOPS per rank"),
    "mfu_pct": labelled(b"Training Model Floating Point Utilization", unit=b"%"),
    "tokens_per_s": labelled(rb"E2E \(Tokens/sec\)"),
    "tokens_per_s_per_gpu": labelled(rb"E2E \(Tokens/sec/gpu\)"),
}


def _steps(columns: Columns, record: Record, log: Log) -> Columns:
    """Returns a row for each heading that has a time. Fills the GPUs, and notes what takes it."""
    columns = by_heading(columns, np.isfinite(columns["iteration"]))
    columns = {name: values[columns["step_s"] > 0] for name, values in columns.items()}
    gpus = ranks_of_rates(columns["tokens_per_s"], columns["tokens_per_s_per_gpu"])
    state(record, {"gpus": gpus}, "log")
    all_tflops = columns.pop("all_tflops")
    if gpus != 1 and (all_tflops == columns["tflops"]).any():
        record.note(
            "TFLOP/s of a rank are printed as those of all ranks: they and the MFU are unknown"
        )
        wrong = all_tflops == columns["tflops"]
        columns["tflops"][wrong] = columns["mfu_pct"][wrong] = np.nan
    if np.isfinite(columns["tflops"]).any():
        record.note("the printed TFLOP/s are over the time of training alone, not over the step")
    for name in ("training", "generation"):
        part = columns.pop(f"{name}_s") / columns["step_s"]
        if np.isfinite(part).any():
            record.note(f"{name} takes {np.nanmedian(part):.0%} of a step")
            if name == "generation":
                record.uncounted.append("generation in its steps")
    record.doubt(UNPADDED, "its tokens/s leave out padding and count prompts and generation")
    return columns


FORMAT = Format(
    name="NeMo-RL",
    marks=((b"= Step ", b"\xe2\x80\xa2 Total step time: "),),
    starts=(b"\xe2\x9c\x93 Ray cluster initialized with ",),
    lines=(Line(_LINE, _FIELDS, _steps, mark=b" "),),
    arguments=False,
)
