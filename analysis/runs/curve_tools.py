"""The tools that show curves, each through its own client library."""

import logging
import os
import time
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from parallel.record.ends import COMPLETE, FAILED

Settings, Ids = dict[str, Any], dict[str, str]


class Point(NamedTuple):
    """What is known after an optimizer step: `values` by tag."""

    step: int
    time_s: float  # Unix time
    values: dict[str, float]


class Sink(Protocol):
    """One tool's record of one run."""

    def write(self, points: list[Point]) -> None:
        """Add points, in order of their steps, and bring them to the disk or the server."""

    def close(self, state: str) -> None:
        """End the record; `state` is how the run ended, of parallel.record.ends."""


class Tool(NamedTuple):
    """A tool: the modules that it needs, and what opens a run in it.

    open(study, run, config, folder, ids): `folder` is for files of this run alone, its parent is
    the tool's store of all runs. `ids`: what the tool knows the run by; it is filled at the first
    opening, and is the same at the next one.
    """

    modules: tuple[str, ...]
    open: Callable[[str, str, Settings, Path, Ids], Sink]


class TensorBoard:
    """Event files; TensorBoard joins those of a folder. The settings are hparams."""

    def __init__(self, study: str, run: str, config: Settings, folder: Path, ids: Ids):
        from tensorboard.compat.proto import event_pb2, summary_pb2
        from tensorboard.plugins.hparams import summary_v2 as hparams
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        self._event, self._summary = event_pb2.Event, summary_pb2.Summary
        self._writer = EventFileWriter(str(folder))
        if "hparams" not in ids:
            ids["hparams"] = "written"
            self._add(0, time.time(), hparams.hparams_pb(config, trial_id=run))

    def write(self, points: list[Point]) -> None:
        for point in points:
            summary = self._summary()
            for tag, value in point.values.items():
                summary.value.add(tag=tag, simple_value=value)
            self._add(point.step, point.time_s, summary)
        self._writer.flush()

    def close(self, state: str) -> None:
        self._writer.close()

    def _add(self, step: int, time_s: float, summary: Any) -> None:
        event = self._event(wall_time=time_s, step=step)
        event.summary.CopyFrom(summary)
        self._writer.add_event(event)


class WandB:
    """A run of Weights & Biases: offline files, or its server where a key is known.

    WANDB_MODE, WANDB_API_KEY, WANDB_PROJECT, WANDB_DIR ... mean what they mean to wandb.
    """

    def __init__(self, study: str, run: str, config: Settings, folder: Path, ids: Ids):
        import wandb

        without_key = "online" if os.environ.get("WANDB_API_KEY") else "offline"
        self._run = wandb.init(
            project=os.environ.get("WANDB_PROJECT", study),
            name=run,
            id=ids.setdefault("id", uuid.uuid4().hex[:12]),
            resume="allow",
            dir=os.environ.get("WANDB_DIR", str(folder.parent)),
            mode=os.environ.get("WANDB_MODE", without_key),
            config=config,
            settings=wandb.Settings(silent=True, console="off", x_disable_stats=True),
        )

    def write(self, points: list[Point]) -> None:
        for point in points:
            # The time of the step, not of this call.
            self._run.log(point.values | {"_timestamp": point.time_s}, step=point.step)

    def close(self, state: str) -> None:
        self._run.finish(exit_code=0 if state == COMPLETE else 1)


class MLflow:
    """A run in the study's experiment: a local SQLite file, or MLFLOW_TRACKING_URI's server."""

    _BATCH, _PARAMS = 1000, 100  # the most metrics, and parameters, of a request
    _LONGEST = 500  # characters of a parameter

    def __init__(self, study: str, run: str, config: Settings, folder: Path, ids: Ids):
        os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
        from mlflow.entities import Param
        from mlflow.tracking import MlflowClient

        for library in ("alembic", "mlflow"):
            logging.getLogger(library).setLevel(logging.WARNING)
        store = folder.parent.resolve()
        self._client = MlflowClient(
            os.environ.get("MLFLOW_TRACKING_URI", f"sqlite:///{store}/mlflow.db")
        )
        if "id" not in ids:
            name = os.environ.get("MLFLOW_EXPERIMENT_NAME", study)
            experiment = self._client.get_experiment_by_name(name)
            number = experiment and experiment.experiment_id
            if number is None:
                local = "MLFLOW_TRACKING_URI" not in os.environ
                artifacts = f"{store.as_uri()}/artifacts" if local else None
                number = self._client.create_experiment(name, artifact_location=artifacts)
            ids["id"] = self._client.create_run(number, run_name=run).info.run_id
            params = [Param(key, str(value)[: self._LONGEST]) for key, value in config.items()]
            for start in range(0, len(params), self._PARAMS):
                self._client.log_batch(ids["id"], params=params[start : start + self._PARAMS])
        self._id = ids["id"]

    def write(self, points: list[Point]) -> None:
        from mlflow.entities import Metric

        metrics = [
            Metric(tag, value, int(point.time_s * 1000), point.step)
            for point in points
            for tag, value in point.values.items()
        ]
        for start in range(0, len(metrics), self._BATCH):
            self._client.log_batch(self._id, metrics=metrics[start : start + self._BATCH])

    def close(self, state: str) -> None:
        ends = {COMPLETE: "FINISHED", FAILED: "FAILED"}
        self._client.set_terminated(self._id, ends.get(state, "KILLED"))


TOOLS = {
    "tensorboard": Tool(("tensorboard",), TensorBoard),
    "wandb": Tool(("wandb",), WandB),
    "mlflow": Tool(("mlflow", "sqlalchemy", "alembic"), MLflow),  # the last two: its local store
}
