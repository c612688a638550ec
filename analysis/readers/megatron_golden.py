"""Megatron-LM's golden values: a JSON object of metrics, each with values by iteration.

    {"lm loss": {"start_step": 1, "end_step": 50, "step_interval": 5, "values": {"1": 10.49, ...}},
     "iteration-time": {...}}

    {"0": {"lm loss": 11.89, "elapsed time per iteration (ms)": 284.2}, ...}   (Megatron-Bridge)

Older files list the values without their iteration. Steps are sampled, not averaged.
"""

from typing import Any

import numpy as np

from analysis.readers._log import Log
from analysis.readers._steps import PER_STEP
from analysis.records import Record, Refusal
from models.files import parse_json

FORMAT = "Megatron-LM golden values"
MARKS = (
    (b'"start_step"', b'"step_interval"', b'"values"'),
    (b'"lm loss"', b'"start_step"'),
    (b'"lm loss"', b'"elapsed time per iteration (ms)"'),
)

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
        Refusal: it is damaged.
    """
    try:
        content = parse_json(log.text())
    except ValueError as error:
        raise Refusal(str(log.path), f"damaged golden values: {error}") from error
    record = Record(source=str(log.path), format=FORMAT, engine="Megatron-LM")
    series = {name: _series(content, keys) for name, keys in _COLUMNS.items()}
    by_step = {int(k): v for k, v in content.items() if k.isdigit() and isinstance(v, dict)}
    for name, key, unit in _BY_STEP if by_step else ():
        values = {step: row.get(key) for step, row in by_step.items()}
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
            start, stride = entry.get("start_step", 0), entry.get("step_interval", 1)
            values = {start + i * stride: value for i, value in enumerate(values)}
        found = {}
        for step, value in values.items():
            try:
                number = float(value)
            except (TypeError, ValueError):
                continue
            if np.isfinite(number):
                found[int(step)] = number
        return found
    return {}
