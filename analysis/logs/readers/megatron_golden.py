"""Megatron-LM's golden values: a JSON object of metrics, each with values by iteration.

    {"lm loss": {"start_step": 1, "end_step": 50, "step_interval": 5, "values": {"1": 10.49, ...}},
     "iteration-time": {...}}

    {"0": {"lm loss": 11.89, "elapsed time per iteration (ms)": 284.2}, ...}   (Megatron-Bridge)

Steps are sampled, not averaged.
"""

import re
from typing import Any

from analysis.logs.parsing.json_values import document, is_nan, known, mapping, real, steps_of
from analysis.logs.parsing.line_format import Format
from analysis.logs.parsing.logfile import Log
from analysis.logs.record import Record

_STEP = re.compile("[0-9]{1,12}")
# Record's columns -> (metric, its unit); of several metrics the first that stands there counts.
_COLUMNS = {
    "step_s": (
        ("elapsed time per iteration (ms)", 1e-3),
        ("iteration-time", 1.0),
        ("iteration_timing", 1.0),
    ),
    "loss": (("lm loss", 1.0), ("lm-loss", 1.0)),
    "grad_norm": (("grad-norm", 1.0), ("grad norm", 1.0)),
    "tflops": (("GPU utilization", 1.0),),  # in TFLOP/s
}


def _read(log: Log, record: Record) -> None:
    """Read one file; a step whose time is `nan` is left out, as the tests that wrote it do.

    Raises:
        Refusal: it is damaged, or no JSON object.
    """
    content = document(str(log.path), log.text(), "golden values")
    record.engine = "Megatron-LM"
    by_step = {step: mapping(row) for step, row in content.items() if _STEP.fullmatch(step)}
    for metric in {metric for row in by_step.values() for metric in row}:
        content[metric] = {"values": {step: row.get(metric) for step, row in by_step.items()}}
    series = {name: _series(content, metrics) for name, metrics in _COLUMNS.items()}
    series["step_s"] = {k: v for k, v in series["step_s"].items() if not is_nan(v)}
    steps = sorted(series["step_s"] or series["loss"])
    columns = {name: [values.get(step) for step in steps] for name, values in series.items()}
    record.steps = steps_of(iteration=steps, **columns)


def _series(content: dict[str, Any], metrics: tuple[tuple[str, float], ...]) -> dict[int, float]:
    """Iteration -> value; NaN where `nan` stands, nothing where no number does."""
    for metric, unit in metrics:
        entry = mapping(content.get(metric))
        if "values" in entry:
            return {
                int(step): real(value) * unit
                for step, value in mapping(entry["values"]).items()
                if _STEP.fullmatch(step) and (is_nan(value) or known(value) is not None)
            }
    return {}


FORMAT = Format(
    name="Megatron-LM golden values",
    marks=(
        (b'"start_step"', b'"step_interval"', b'"values"'),
        (b'"lm loss"', b'"start_step"'),
        (b'"lm loss"', b'"elapsed time per iteration (ms)"'),
    ),
    reader=_read,
)
