"""OpenTelemetry metrics as OTLP JSON: one ExportMetricsServiceRequest a line, as the Collector's
file exporter writes and its OTLP JSON file receiver reads. No library is needed.

Names under `megatron.training.` are those of Megatron-LM since August 2026
(megatron/core/telemetry/training_metrics.py, commit d7d7a6a7e2), with its types and units; `OURS`
are not Megatron-LM's. Each point is one step: the histogram has delta temporality and a count of 1.
"""

import bisect
import json
import math
from pathlib import Path
from typing import Any

from parallel.record.sinks import Described, Point

FILE = "metrics.jsonl"
MEGATRON, OURS = "megatron.training.", "scaling_study."
STEP_MS, SKIPPED = MEGATRON + "step_duration_ms", MEGATRON + "skipped_iters"
ITERATION = OURS + "iteration"
# Our tag -> (the name of the gauge, its unit, what it is).
GAUGES = {
    "train/loss": (MEGATRON + "loss", "", "Training loss, mean over tokens."),
    "throughput/tflops_per_gpu": (
        MEGATRON + "throughput_tflops",
        "",
        "Training throughput in TFLOP/s/GPU.",
    ),
    "throughput/tokens_per_s": (
        MEGATRON + "tokens_per_sec",
        "",
        "Training throughput in tokens/second, all GPUs.",
    ),
    "train/grad_norm": (MEGATRON + "grad_norm", "", "Global gradient norm, before clipping."),
    "train/learning_rate": (MEGATRON + "learning_rate", "", "Learning rate of the step."),
    "memory/peak_gb": (
        MEGATRON + "memory_allocated_gb",  # GiB there, and so here
        "",
        "Most memory that rank 0 has held, in GiB: allocated on CUDA, resident on a CPU.",
    ),
    "val/loss": (OURS + "validation_loss", "", "Loss on held-out text."),
    "throughput/mfu": (OURS + "mfu", "1", "Model FLOPs utilisation."),
}
STEP_HELP = "Duration of one training step in milliseconds."
SKIPPED_HELP = "Number of training iterations skipped."
# The default boundaries of an OpenTelemetry histogram, which Megatron-LM's has.
BOUNDS_MS = (0, 5, 10, 25, 50, 75, 100, 250, 500, 750, 1000, 2500, 5000, 7500, 10000)
_DELTA = 1  # AGGREGATION_TEMPORALITY_DELTA


def attribute(key: str, value: Any) -> dict[str, Any]:
    """A KeyValue of OTLP JSON, in which 64-bit integers are texts."""
    kinds = {bool: "boolValue", int: "intValue", float: "doubleValue"}
    kind = kinds.get(type(value), "stringValue")
    return {
        "key": key,
        "value": {kind: value if kind in ("boolValue", "doubleValue") else str(value)},
    }


def _number(value: float) -> float | str:
    """A double of OTLP JSON; what is not finite is a text there."""
    if math.isfinite(value):
        return value
    return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"


def gauge_value(tag: str, value: float) -> float:
    """A value in the unit of its gauge."""
    return value * 1e9 / 2**30 if tag == "memory/peak_gb" else value


def _nanoseconds(time_s: float) -> str:
    return str(round(time_s * 1e6) * 1000)  # a double holds microseconds of today, no more


def _gauge(name: str, unit: str, text: str, points: list[dict[str, Any]]) -> dict[str, Any]:
    return {"name": name, "unit": unit, "description": text, "gauge": {"dataPoints": points}}


def request(run: Described, points: list[Point]) -> dict[str, Any]:
    """The request that holds the points of a run."""
    metrics = []
    times = [{"timeUnixNano": _nanoseconds(point.time_s)} for point in points]
    steps = [at | {"asInt": str(p.step)} for at, p in zip(times, points, strict=True)]
    metrics.append(_gauge(ITERATION, "", "Number of the optimizer step, from 1.", steps))
    for tag, (name, unit, text) in GAUGES.items():
        known = [
            at | {"asDouble": _number(gauge_value(tag, point.values[tag]))}
            for at, point in zip(times, points, strict=True)
            if tag in point.values
        ]
        if known:
            metrics.append(_gauge(name, unit, text, known))
    durations, skipped = [], []
    for at, point in zip(times, points, strict=True):
        if step_s := point.values.get("time/step_s"):
            span = {"startTimeUnixNano": _nanoseconds(point.time_s - step_s)} | at
            counts = ["0"] * (len(BOUNDS_MS) + 1)
            counts[bisect.bisect_left(BOUNDS_MS, step_s * 1000)] = "1"
            ends = dict.fromkeys(("sum", "min", "max"), step_s * 1000)
            bounds = {"bucketCounts": counts, "explicitBounds": list(BOUNDS_MS)}
            durations.append(span | {"count": "1"} | ends | bounds)
            if point.values.get("train/skipped"):
                skipped.append(span | {"asInt": "1"})
    if durations:
        histogram = {"aggregationTemporality": _DELTA, "dataPoints": durations}
        metrics.append(
            {"name": STEP_MS, "unit": "ms", "description": STEP_HELP, "histogram": histogram}
        )
    if skipped:
        total = {"aggregationTemporality": _DELTA, "isMonotonic": True, "dataPoints": skipped}
        metrics.append({"name": SKIPPED, "description": SKIPPED_HELP, "sum": total})
    named = {"service.name": "gpt-scaling-study", "nemo.run.id": run.name, "study": run.study}
    config = {f"{OURS}{name}": value for name, value in run.config.items()}
    attributes = [attribute(key, value) for key, value in (named | config).items()]
    scope = {"scope": {"name": "parallel.record.sinks"}, "metrics": metrics}
    return {"resourceMetrics": [{"resource": {"attributes": attributes}, "scopeMetrics": [scope]}]}


class OtlpFile:
    """A file that grows by a line at each writing."""

    def __init__(self, run: Described, path: Path):
        self._run, self._path = run, path

    def write(self, points: list[Point]) -> None:
        line = json.dumps(request(self._run, points), allow_nan=False, separators=(",", ":"))
        with self._path.open("a") as file:
            file.write(line + "\n")

    def close(self, state: str) -> None:
        """Nothing is open."""


def open_sink(run: Described, files: Path, store: Path, kept: dict[str, Any]) -> OtlpFile:
    """The file metrics.jsonl in `files`."""
    kept["file"] = FILE
    return OtlpFile(run, files / FILE)
