"""OpenTelemetry metrics by Megatron-LM's names, as OTLP JSON: one request a line.

The OpenTelemetry Collector's file exporter writes such files for Megatron-LM
(megatron/core/telemetry/training_metrics.py, commit d7d7a6a7e2). Points of one time belong
together. Megatron-LM exports every so many seconds: a gauge is then the last value, and the
histogram of step times is cumulative, so that its increase over the points before gives the mean.
It exports no iteration: entries are counted from 1.
"""

from collections import defaultdict
from typing import Any

from analysis.logs.parsing.json_values import mapping, real, rows, steps_of, text
from analysis.logs.parsing.line_format import Format
from analysis.logs.parsing.logfile import Log
from analysis.logs.record import Record, Refusal
from base.files import parse_json

MEGATRON = "megatron.training."
STEP_MS, SKIPPED = MEGATRON + "step_duration_ms", MEGATRON + "skipped_iters"
MEMORY = MEGATRON + "memory_allocated_gb"  # GiB
COLUMNS = {
    "loss": MEGATRON + "loss",
    "grad_norm": MEGATRON + "grad_norm",
    "tflops": MEGATRON + "throughput_tflops",
    "tokens_per_s": MEGATRON + "tokens_per_sec",
}
_CUMULATIVE = (2, "AGGREGATION_TEMPORALITY_CUMULATIVE")
_RUN = ("nemo.run.id", "service.instance.id")

Series = dict[str, dict[int, float]]  # metric -> Unix time in ns -> value


def _read(log: Log, record: Record) -> None:
    """Read one file.

    Raises:
        Refusal: it holds the points of several runs.
    """
    series: Series = defaultdict(dict)
    sums: dict[int, tuple[float, float]] = {}  # time -> (ms, steps), of a cumulative histogram
    runs: dict[str, dict[str, Any]] = {}
    broken = 0
    for line in log.text().splitlines():
        try:
            content = mapping(parse_json(line)) if line.strip() else {}
        except ValueError:
            broken += 1
            continue
        for resource in rows(content.get("resourceMetrics")):
            metrics = [
                metric
                for scope in rows(resource.get("scopeMetrics"))
                for metric in rows(scope.get("metrics"))
                if str(metric.get("name")).startswith(MEGATRON)
            ]
            if metrics:
                about = _attributes(mapping(resource.get("resource")))
                runs.setdefault(next((str(about[k]) for k in _RUN if k in about), ""), about)
            for metric in metrics:
                _points(metric, series, sums)
    if len(runs) > 1:
        named = ", ".join(sorted(runs)[:3])
        raise Refusal(str(log.path), f"holds the points of {len(runs)} runs ({named}): split it")
    if broken:
        record.notes.append(f"{broken} lines are not JSON")
    _step_times(series, sums)
    times = sorted(series[STEP_MS] or series[COLUMNS["loss"]])
    columns = {name: [series[metric].get(t) for t in times] for name, metric in COLUMNS.items()}
    columns["iteration"] = list(range(1, len(times) + 1))
    record.notes.append("no iteration is exported: entries are counted from 1")
    record.running_average = record.running_average or bool(sums)
    columns["step_s"] = [real(series[STEP_MS].get(t)) / 1000 for t in times]
    columns["skipped"] = [series[SKIPPED].get(t, 0.0) for t in times]
    record.steps = steps_of(**columns)
    for name, about in runs.items():
        record.run = name or None
        record.engine = record.engine or text(about.get("service.name"))
    if peaks := series[MEMORY].values():
        record.peak_bytes = round(max(peaks) * 2**30)


def _attributes(resource: dict[str, Any]) -> dict[str, Any]:
    """Key -> value of a resource; 64-bit integers are texts in OTLP JSON."""
    found = {}
    for entry in rows(resource.get("attributes")):
        for kind, value in mapping(entry.get("value")).items():
            is_int = kind == "intValue" and str(value).lstrip("-").isdigit()
            found[str(entry.get("key"))] = int(value) if is_int else value
    return found


def _points(metric: dict[str, Any], series: Series, sums: dict[int, tuple[float, float]]) -> None:
    name = metric["name"]
    for kind in ("gauge", "sum", "histogram"):
        held = mapping(metric.get(kind))
        for point in rows(held.get("dataPoints")):
            nanoseconds = str(point.get("timeUnixNano"))
            if not (nanoseconds.isdecimal() and len(nanoseconds) < 20):
                continue
            time = int(nanoseconds)  # a double would round it
            if kind != "histogram":
                value = point.get("asDouble", point.get("asInt"))
                series[name][time] = real(value)
                continue
            ms, steps = real(point.get("sum")), real(point.get("count"))
            if held.get("aggregationTemporality") in _CUMULATIVE:
                sums[time] = ms, steps
            elif steps > 0:
                series[name][time] = ms / steps


def _step_times(series: Series, sums: dict[int, tuple[float, float]]) -> None:
    """Step times from a cumulative histogram: the increase since the point before."""
    before = 0.0, 0.0
    for time in sorted(sums):
        ms, steps = sums[time]
        if steps < before[1]:  # the process began anew
            before = 0.0, 0.0
        if steps > before[1]:
            series[STEP_MS][time] = (ms - before[0]) / (steps - before[1])
        before = ms, steps


FORMAT = Format(
    name="OpenTelemetry",
    marks=((b'"resourceMetrics"', MEGATRON.encode()),),
    reader=_read,
)
