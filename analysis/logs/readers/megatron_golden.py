"""Megatron-LM's golden values: a JSON object of metrics, each with values by iteration.

    {"lm loss": {"start_step": 1, "end_step": 50, "step_interval": 5, "values": {"1": 10.49, ...}},
     "iteration-time": {...}}

    {"0": {"lm loss": 11.89, "elapsed time per iteration (ms)": 284.2}, ...}   (Megatron-Bridge)

Steps are sampled, not averaged.
"""

import re
from collections import defaultdict

from analysis.logs.parsing.json_values import document, is_nan, known, mapping, real, steps_of
from analysis.logs.parsing.line_format import Format
from analysis.logs.parsing.logfile import Log
from analysis.logs.record import Record

_STEP = re.compile("[0-9]{1,12}")
# (Record's column, metric, its unit): of a column's metrics the first that stands there counts.
_METRICS = (
    ("step_s", "elapsed time per iteration (ms)", 1e-3),
    ("step_s", "iteration-time", 1.0),
    ("step_s", "iteration_timing", 1.0),
    ("loss", "lm loss", 1.0),
    ("loss", "lm-loss", 1.0),
    ("grad_norm", "grad-norm", 1.0),
    ("grad_norm", "grad norm", 1.0),
    ("tflops", "GPU utilization", 1.0),  # in TFLOP/s
)


def _read(log: Log, record: Record) -> None:
    """Reads one file. A step whose time is `nan` is left out, as the tests that wrote it do.

    Raises:
        Refusal: it is damaged, or no JSON object.
    """
    content = document(str(log.path), log.text(), "golden values")
    record.engine = "Megatron-LM"
    by_step = {step: mapping(row) for step, row in content.items() if _STEP.fullmatch(step)}
    for metric in {metric for row in by_step.values() for metric in row}:
        content[metric] = {"values": {step: row.get(metric) for step, row in by_step.items()}}
    series: dict[str, dict[int, float]] = defaultdict(dict)
    for name, metric, unit in _METRICS:
        values = mapping(mapping(content.get(metric)).get("values"))
        series[name] = series[name] or {
            int(step): real(value) * unit
            for step, value in values.items()
            if _STEP.fullmatch(step)
            and (known(value) is not None or (name == "loss" and is_nan(value)))
        }
    steps = sorted(series["step_s"] or series["loss"])
    columns = {name: [values.get(step) for step in steps] for name, values in series.items()}
    record.steps = steps_of(iteration=steps, **columns)


FORMAT = Format(
    name="Megatron-LM golden values",
    marks=(
        (b'"start_step"', b'"step_interval"', b'"values"'),
        (b'"lm loss"', b'"start_step"'),
        (b'"lm loss"', b'"elapsed time per iteration (ms)"'),
    ),
    reader=_read,
)
