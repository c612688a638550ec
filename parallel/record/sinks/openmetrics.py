"""The last values of a run as OpenMetrics text, for Prometheus through node_exporter's textfile
collector. No library is needed.

That collector reads *.prom in Prometheus' older text format. The file is valid in both: it has no
timestamps, which the collector refuses, and the same help in every file, which it asks for. The
names are otlp.py's, as OpenTelemetry's exporter for Prometheus writes them.
"""

import bisect
import math
import os
from pathlib import Path
from typing import Any

from parallel.record.sinks import Described, Point
from parallel.record.sinks.otlp import (
    BOUNDS_MS,
    GAUGES,
    ITERATION,
    OURS,
    SKIPPED,
    SKIPPED_HELP,
    STEP_HELP,
    STEP_MS,
    gauge_value,
)

FILE = "metrics.prom"
_LABELS = ("engine", "gpus", "tp", "pp", "dp")


def _name(otlp: str) -> str:
    return otlp.replace(".", "_")


def _escaped(text: str) -> str:
    return text.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")


def _number(value: float) -> str:
    if math.isfinite(value):
        return repr(float(value))
    return "NaN" if math.isnan(value) else "+Inf" if value > 0 else "-Inf"


class OpenMetricsFile:
    """The file is replaced at each writing; `sums` survive from one opening to the next."""

    def __init__(self, run: Described, path: Path, sums: dict[str, Any]):
        known = {"run": run.name, "study": run.study}
        known |= {name: run.config[name] for name in _LABELS if name in run.config}
        self._labels = ",".join(f'{k}="{_escaped(str(v))}"' for k, v in known.items())
        self._path, self._sums = path, sums
        sums.setdefault("buckets", [0] * (len(BOUNDS_MS) + 1))
        sums.setdefault("last", {})

    def write(self, points: list[Point]) -> None:
        for point in points:
            self._sums["last"] |= point.values | {"step": point.step}
            self._sums["skipped"] = self._sums.get("skipped", 0) + point.values.get(
                "train/skipped", 0.0
            )
            if step_s := point.values.get("time/step_s"):
                self._sums["buckets"][bisect.bisect_left(BOUNDS_MS, step_s * 1000)] += 1
                self._sums["ms"] = self._sums.get("ms", 0.0) + step_s * 1000
        self._replace(training=True)

    def close(self, state: str) -> None:
        self._replace(training=False)

    def _replace(self, training: bool) -> None:
        aside = self._path.with_name(f".{self._path.name}.{os.getpid()}")
        aside.write_text("\n".join(self._lines(training)) + "\n")
        os.replace(aside, self._path)

    def _lines(self, training: bool) -> list[str]:
        last, lines = self._sums["last"], []

        def family(name: str, kind: str, text: str, *samples: tuple[str, str, float]) -> None:
            lines.extend((f"# HELP {name} {text}", f"# TYPE {name} {kind}"))
            for suffix, label, value in samples:
                lines.append(f"{name}{suffix}{{{self._labels}{label}}} {_number(value)}")

        running = "1 while the run trains."
        family(_name(OURS + "training"), "gauge", running, ("", "", float(training)))
        if "step" in last:
            text = "Number of the last optimizer step."
            family(_name(ITERATION), "gauge", text, ("", "", last["step"]))
        for tag, (name, _, text) in GAUGES.items():
            if tag in last:
                family(_name(name), "gauge", text, ("", "", gauge_value(tag, last[tag])))
        skipped = ("_total", "", self._sums.get("skipped", 0))
        family(_name(SKIPPED), "counter", SKIPPED_HELP, skipped)
        below, buckets = 0, []
        for bound, count in zip((*BOUNDS_MS, math.inf), self._sums["buckets"], strict=True):
            below += count
            buckets.append(("_bucket", f',le="{_number(bound)}"', below))
        total = ("_count", "", below), ("_sum", "", self._sums.get("ms", 0.0))
        family(f"{_name(STEP_MS)}_milliseconds", "histogram", STEP_HELP, *buckets, *total)
        return [*lines, "# EOF"]


def open_sink(run: Described, files: Path, store: Path, kept: dict[str, Any]) -> OpenMetricsFile:
    """The file metrics.prom in `files`; the sums so far are in `kept`."""
    return OpenMetricsFile(run, files / FILE, kept)
