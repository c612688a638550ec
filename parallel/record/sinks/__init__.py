"""Curves and metrics of a run in the tools where people look: one file a tool. Torch-free.

tensorboard, wandb, mlflow and trackio write through the tool's own library, which is imported only
where the tool was asked for. otlp (OpenTelemetry) and openmetrics (Prometheus) are files of text
and need no library.

follow.py writes while a run trains, in a process of its own; analysis/sinks.py writes afterwards.
Both write the same points under the same tags, through the same files.
"""

import hashlib
import importlib
import importlib.util
import json
import os
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from models.errors import UsageError
from models.files import read_json_if_whole

# Each tool, and the modules that it needs.
TOOLS = {
    "tensorboard": ("tensorboard",),
    "wandb": ("wandb",),
    "mlflow": ("mlflow", "sqlalchemy", "alembic"),  # the last two: its store in a local file
    "trackio": ("trackio",),
    "otlp": (),
    "openmetrics": (),
}
WRITTEN = ".written.json"  # what a tool has got of a run so far

# The tags, and what each is. A value that is not known has no point.
TAGS = {
    "train/loss": "mean over the step's tokens",
    "train/grad_norm": "before clipping",
    "train/learning_rate": "of the step",
    "train/loss_scale": "fp16 alone",
    "train/skipped": "1 where the optimizer skipped the step",
    "val/loss": "on held-out text",
    "time/step_s": "seconds of an optimizer step",
    "throughput/tokens_per_s": "of all GPUs",
    "throughput/tokens_per_s_per_gpu": "of one GPU",
    "throughput/tflops_per_gpu": "model FLOPs, in TFLOP/s",
    "throughput/mfu": "0 to 1, where the GPU's peak is known",
    "memory/peak_gb": "most that rank 0 has held, 1e9 bytes",
}


@dataclass(frozen=True)
class Described:
    """What a tool shows of a run beside its curves: name, study (the tool's project) and
    settings, which hold numbers, texts and booleans."""

    name: str
    study: str
    config: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Point:
    """What is known after an optimizer step: time_s is Unix time, `values` has TAGS' names."""

    step: int
    time_s: float
    values: dict[str, float]


class Sink(Protocol):
    """One tool's record of one run.

    Its file has `open_sink(run, files, store, kept)`, which begins a run or goes on with it.
    files: the folder for what is this run's alone. store: the folder of the tool, which several
    runs may share; neither need exist. kept: what the tool knows a run by; it is filled at the
    first opening and is the same at the next one.
    """

    def write(self, points: list[Point]) -> None:
        """Add points, in order of their steps, and bring them to the disk or the server."""

    def close(self, state: str) -> None:
        """End the record; `state` is how the run ended, of parallel.record.ends."""


def require(tools: Iterable[str]) -> None:
    """Raises: UsageError: a tool's library is not installed; it names the command that does it."""
    for tool in tools:
        absent = [m for m in TOOLS[tool] if importlib.util.find_spec(m) is None]
        if absent:
            raise UsageError(
                f"--{tool} needs {' and '.join(absent)}, not installed here:"
                f" pip install -c constraints.txt -e '.[{tool}]'"
            )


class Writer:
    """One tool of one run: what it has got already is not written again.

    Raises: whatever the tool's library raises, in every method.
    """

    def __init__(self, tool: str, run: Described, base: Path, part: str = ""):
        """base: the folder of all tools. part: the run's own name in it, where several share it."""
        self.tool, self._run = tool, run
        self._store = base / tool
        self._files = self._store / part
        self._kept: dict[str, Any] = read_json_if_whole(self._files / WRITTEN)
        self._sink: Sink | None = None

    @property
    def last_step(self) -> int:
        """The last step that the tool has; -1 before the first."""
        return self._kept.get("last_step", -1)

    def open(self) -> None:
        """Import the library and begin the tool's run, or go on with it."""
        module = importlib.import_module(f"{__name__}.{self.tool}")
        self._files.mkdir(parents=True, exist_ok=True)
        ids = self._kept.setdefault("ids", {})
        self._sink = module.open_sink(self._run, self._files, self._store, ids)
        self._keep()

    def write(self, points: list[Point]) -> int:
        """Write the points that the tool has not got; how many these were."""
        new = [p for p in points if p.step > self.last_step]
        if new:
            if self._sink is None:
                self.open()
            self._sink.write(new)
            self._kept["digest"] = digest(new, self._kept.get("digest", ""))
            self._kept["last_step"] = new[-1].step
            self._keep()
        return len(new)

    def is_of(self, points: list[Point]) -> bool:
        """Whether what the tool has got is the beginning of these points."""
        begun = [p for p in points if p.step <= self.last_step]
        return self._kept.get("digest", "") == digest(begun)

    def close(self, state: str) -> None:
        """End the tool's run, if it was opened."""
        if self._sink is not None:
            self._sink.close(state)

    def _keep(self) -> None:
        """Write down what the tool has got."""
        aside = self._files / f"{WRITTEN}.{os.getpid()}"
        aside.write_text(json.dumps(self._kept) + "\n")
        os.replace(aside, self._files / WRITTEN)


def digest(points: Iterable[Point], before: str = "") -> str:
    """A hash of the steps and losses of points, which goes on from that of the points before."""
    for point in points:
        said = f"{before} {point.step} {point.values.get('train/loss')!r}"
        before = hashlib.sha256(said.encode()).hexdigest()[:16]
    return before


def step_values(
    *,
    step_s: float | None,
    tokens_per_s: float | None,
    gpus: int | None,
    tflops: float | None,
    mfu: float | None,
    **train: float | None,
) -> dict[str, float]:
    """The values of a step by tag, without those that are None. `train`: names after `train/`."""
    per_gpu = tokens_per_s / gpus if tokens_per_s is not None and gpus else None
    values = {f"train/{name}": value for name, value in train.items()} | {
        "time/step_s": step_s,
        "throughput/tokens_per_s": tokens_per_s,
        "throughput/tokens_per_s_per_gpu": per_gpu,
        "throughput/tflops_per_gpu": tflops,
        "throughput/mfu": mfu,
    }
    return {tag: float(value) for tag, value in values.items() if value is not None}


def timed_back(points: list[Point], end_s: float) -> list[Point]:
    """The points with times that end at `end_s`, each a step's seconds after the one before. A
    step without a time takes none."""
    found = []
    for point in reversed(points):
        found.append(Point(point.step, end_s, point.values))
        end_s -= point.values.get("time/step_s", 0.0)
    return found[::-1]
