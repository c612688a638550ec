"""MLflow, through its own client: a local SQLite file, or the server of MLFLOW_TRACKING_URI."""

import logging
import os
import time
from pathlib import Path
from typing import Any

from parallel.record.ends import COMPLETE, FAILED
from parallel.record.sinks import Described, Point

_BATCH, _PARAMS = 1000, 100  # the most that one request may hold
_LONGEST = 500  # characters of a parameter that every store takes


class MLflow:
    """One run of MLflow; `client` is MLflow's."""

    def __init__(self, client: Any, run_id: str):
        self._client, self._id = client, run_id

    def begin(self, run: Described) -> None:
        """Write the settings as parameters."""
        from mlflow.entities import Param

        params = [Param(name, str(value)[:_LONGEST]) for name, value in run.config.items()]
        for at in range(0, len(params), _PARAMS):
            self._client.log_batch(self._id, params=params[at : at + _PARAMS])

    def write(self, points: list[Point]) -> None:
        from mlflow.entities import Metric

        metrics = [
            Metric(tag, value, int(point.time_s * 1000), point.step)
            for point in points
            for tag, value in point.values.items()
        ]
        for at in range(0, len(metrics), _BATCH):
            self._client.log_batch(self._id, metrics=metrics[at : at + _BATCH])

    def close(self, state: str) -> None:
        ends = {COMPLETE: "FINISHED", FAILED: "FAILED"}
        self._client.set_terminated(self._id, ends.get(state, "KILLED"))


def open_sink(run: Described, files: Path, store: Path, kept: dict[str, Any]) -> MLflow:
    """A run in the experiment of the study, or the same one again: its id is in `kept`."""
    os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
    from mlflow.tracking import MlflowClient

    for name in ("alembic", "mlflow"):
        logging.getLogger(name).setLevel(logging.WARNING)
    local = store.resolve()
    client = MlflowClient(os.environ.get("MLFLOW_TRACKING_URI", f"sqlite:///{local}/mlflow.db"))
    if "id" in kept:
        client.update_run(kept["id"], status="RUNNING")
        return MLflow(client, kept["id"])
    name = os.environ.get("MLFLOW_EXPERIMENT_NAME", run.study)
    experiment = client.get_experiment_by_name(name)
    if experiment is None:
        artifacts = None if "MLFLOW_TRACKING_URI" in os.environ else f"{local.as_uri()}/artifacts"
        number = client.create_experiment(name, artifact_location=artifacts)
    else:
        number = experiment.experiment_id
    created = client.create_run(number, int(time.time() * 1000), run_name=run.name)
    kept["id"] = created.info.run_id
    sink = MLflow(client, kept["id"])
    sink.begin(run)
    return sink
