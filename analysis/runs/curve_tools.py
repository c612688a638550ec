"""The tools that show curves, each through its own client library."""

import logging
import os
import time
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from parallel.record.ends import COMPLETE, FAILED

Settings, Ids = dict[str, Any], dict[str, str]


class Point(NamedTuple):
    """What is known after an optimizer step: `values` by tag."""

    step: int
    time_s: float  # Unix time
    values: dict[str, float]


class Sink(NamedTuple):
    """One tool's record of one run.

    write(points): adds points, in order of their steps, and brings them to the disk or the server.
    close(state): ends the record of a run that ended so (of parallel.record.ends).
    """

    write: Callable[[list[Point]], None]
    close: Callable[[str], None]


def tensorboard(study: str, run: str, config: Settings, folder: Path, ids: Ids) -> Sink:
    """Writes event files; TensorBoard joins those of a folder. The settings are hparams."""
    from tensorboard.compat.proto.event_pb2 import Event
    from tensorboard.compat.proto.summary_pb2 import Summary
    from tensorboard.plugins.hparams.summary_v2 import hparams_pb
    from tensorboard.summary.writer.event_file_writer import EventFileWriter

    writer = EventFileWriter(str(folder))
    if "hparams" not in ids:
        ids["hparams"] = "written"
        hparams = hparams_pb(config, trial_id=run)
        writer.add_event(Event(wall_time=time.time(), step=0, summary=hparams))

    def write(points: list[Point]) -> None:
        for step, time_s, values in points:
            scalars = [Summary.Value(tag=tag, simple_value=value) for tag, value in values.items()]
            writer.add_event(Event(wall_time=time_s, step=step, summary=Summary(value=scalars)))
        writer.flush()

    return Sink(write, lambda state: writer.close())


def wandb(study: str, run: str, config: Settings, folder: Path, ids: Ids) -> Sink:
    """Writes offline files for Weights & Biases, or to its server where a key is known.

    WANDB_MODE, WANDB_API_KEY, WANDB_PROJECT, WANDB_DIR ... mean what they mean to wandb.
    """
    import wandb

    without_mode = "online" if os.environ.get("WANDB_API_KEY") else "offline"
    record = wandb.init(
        project=os.environ.get("WANDB_PROJECT", study),
        name=run,
        id=ids.setdefault("id", uuid.uuid4().hex[:12]),
        resume="allow",
        dir=os.environ.get("WANDB_DIR", str(folder.parent)),
        mode=os.environ.get("WANDB_MODE", without_mode),
        config=config,
        settings=wandb.Settings(silent=True, console="off", x_disable_stats=True),
    )

    def write(points: list[Point]) -> None:
        for step, time_s, values in points:  # the time of the step, not of this call
            record.log(values | {"_timestamp": time_s}, step=step)

    return Sink(write, lambda state: record.finish(exit_code=0 if state == COMPLETE else 1))


def mlflow(study: str, run: str, config: Settings, folder: Path, ids: Ids) -> Sink:
    """Writes to the study's experiment: a local SQLite file, or MLFLOW_TRACKING_URI's server."""
    os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
    from mlflow.entities import Metric, Param
    from mlflow.tracking import MlflowClient

    for library in ("alembic", "mlflow"):
        logging.getLogger(library).setLevel(logging.WARNING)
    store, server = folder.parent.resolve(), os.environ.get("MLFLOW_TRACKING_URI")
    client = MlflowClient(server or f"sqlite:///{store}/mlflow.db")

    def send(kind: str, values: list[Any], most: int) -> None:  # `most`: of one request
        for start in range(0, len(values), most):
            client.log_batch(ids["id"], **{kind: values[start : start + most]})

    def write(points: list[Point]) -> None:
        metrics = [
            Metric(tag, value, int(time_s * 1000), step)
            for step, time_s, values in points
            for tag, value in values.items()
        ]
        send("metrics", metrics, 1000)

    if "id" not in ids:
        name = os.environ.get("MLFLOW_EXPERIMENT_NAME", study)
        if experiment := client.get_experiment_by_name(name):
            number = experiment.experiment_id
        else:
            artifacts = None if server else f"{store.as_uri()}/artifacts"
            number = client.create_experiment(name, artifact_location=artifacts)
        ids["id"] = client.create_run(number, run_name=run).info.run_id
        send("params", [Param(key, str(value)[:500]) for key, value in config.items()], 100)
    ends = {COMPLETE: "FINISHED", FAILED: "FAILED"}
    return Sink(write, lambda state: client.set_terminated(ids["id"], ends.get(state, "KILLED")))


class Tool(NamedTuple):
    """A tool: the modules that it needs, and what opens a run in it.

    open(study, run, config, folder, ids): `folder` is for files of this run alone, its parent is
    the tool's store of all runs. `ids`: what the tool knows the run by; it is filled at the first
    opening, and is the same at the next one.
    """

    modules: tuple[str, ...]
    open: Callable[[str, str, Settings, Path, Ids], Sink]


TOOLS = {
    "tensorboard": Tool(("tensorboard",), tensorboard),
    "wandb": Tool(("wandb",), wandb),
    "mlflow": Tool(("mlflow", "sqlalchemy", "alembic"), mlflow),  # the last two: its local store
}
