"""Megatron-LM's golden values: a JSON object of metrics, each with values by iteration.

    {"lm loss": {"start_step": 1, "end_step": 50, "step_interval": 5, "values": {"1": 10.49, ...}},
     "iteration-time": {...}}

    {"0": {"lm loss": 11.89, "elapsed time per iteration (ms)": 284.2}, ...}   (Megatron-Bridge)

Older files list the values without their iteration. Steps are sampled, not averaged.
"""

import re
from typing import Any

import numpy as np

from analysis.readers._log import Log
from analysis.readers._steps import PER_STEP
from analysis.readers._typed import document, known, mapping, whole
from analysis.records import Record

FORMAT = "Megatron-LM golden values"
MARKS = (
    (b'"start_step"', b'"step_interval"', b'"values"'),
    (b'"lm loss"', b'"start_step"'),
    (b'"lm loss"', b'"elapsed time per iteration (ms)"'),
)

_STEP = re.compile("[0-9]{1,12}")
_BY_STEP = (
    ("step_s", "elapsed time per iteration (ms)", 1e-3),
    ("loss", "lm loss", 1.0),
    ("tflops", "GPU utilization", 1.0),  # in TFLOP/s
)
_COLUMNS = {
    "step_s": ("iteration-time", "iteration_timing"),
    "loss": ("lm loss", "lm-loss"),
    "grad_norm": ("grad-norm", "grad norm"),
}


def read(log: Log) -> Record:
    """Read one file; a step whose time is `nan` is left out, as the tests that wrote it do.

    Raises:
        Refusal: it is damaged, or no JSON object.
    """
    content = document(str(log.path), log.text(), "golden values")
    record = Record(source=str(log.path), format=FORMAT, engine="Megatron-LM")
    series = {name: _series(content, keys) for name, keys in _COLUMNS.items()}
    by_step = {int(k): mapping(v) for k, v in content.items() if _STEP.fullmatch(k)}
    for name, key, unit in _BY_STEP if any(by_step.values()) else ():
        values = {step: known(row.get(key)) for step, row in by_step.items()}
        series[name] = {step: value * unit for step, value in values.items() if value is not None}
    steps = sorted(series["step_s"] or series["loss"])
    for name in PER_STEP:
        values = series.get(name, {})
        setattr(record, name, np.array([values.get(step, np.nan) for step in steps], float))
    record.iteration = np.array(steps, float)
    return record


def _series(content: dict[str, Any], keys: tuple[str, ...]) -> dict[int, float]:
    """Iteration -> value, without what is not a finite number."""
    for key in keys:
        entry = content.get(key)
        if not isinstance(entry, dict) or "values" not in entry:
            continue
        values = entry["values"]
        if isinstance(values, list):
            start, stride = whole(entry.get("start_step", 0)), whole(entry.get("step_interval", 1))
            if start is None or stride is None:
                continue
            values = {str(start + i * stride): value for i, value in enumerate(values)}
        numbers = {step: known(value) for step, value in mapping(values).items()}
        return {
            int(step): value
            for step, value in numbers.items()
            if value is not None and _STEP.fullmatch(step)
        }
    return {}
