"""TensorBoard's event files, through its own library; neither torch nor TensorFlow is needed."""

import time
from pathlib import Path
from typing import Any

from parallel.record.ends import COMPLETE
from parallel.record.sinks import Described, Point

# The metrics of its tab HPARAMS.
_METRICS = ("train/loss", "val/loss", "throughput/tflops_per_gpu", "throughput/mfu", "time/step_s")


class TensorBoard:
    """A new event file at each opening; TensorBoard joins those of a folder."""

    def __init__(self, files: Path):
        from tensorboard.compat.proto import event_pb2, summary_pb2
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        self._event, self._summary = event_pb2.Event, summary_pb2.Summary
        self._writer = EventFileWriter(str(files), max_queue_size=1000)

    def begin(self, run: Described) -> None:
        """Write the settings as hparams."""
        from tensorboard.plugins.hparams import summary_v2 as hparams

        names = [hparams.HParam(name) for name in run.config]
        metrics = [hparams.Metric(tag) for tag in _METRICS]
        self._add(0, time.time(), hparams.hparams_config_pb(names, metrics))
        self._add(0, time.time(), hparams.hparams_pb(run.config, trial_id=run.name))

    def write(self, points: list[Point]) -> None:
        for point in points:
            summary = self._summary()
            for tag, value in point.values.items():
                summary.value.add(tag=tag, simple_value=value)
            self._add(point.step, point.time_s, summary)
        self._writer.flush()

    def close(self, state: str) -> None:
        from tensorboard.plugins.hparams import api_pb2, metadata, plugin_data_pb2

        status = api_pb2.STATUS_SUCCESS if state == COMPLETE else api_pb2.STATUS_FAILURE
        ended = plugin_data_pb2.SessionEndInfo(status=status, end_time_secs=time.time())
        summary = self._summary()
        summary.value.add(
            tag=metadata.SESSION_END_INFO_TAG,
            metadata=metadata.create_summary_metadata(
                plugin_data_pb2.HParamsPluginData(session_end_info=ended)
            ),
            tensor=metadata.NULL_TENSOR,
        )
        self._add(0, time.time(), summary)
        self._writer.close()

    def _add(self, step: int, time_s: float, summary: Any) -> None:
        event = self._event(wall_time=time_s, step=step)
        event.summary.CopyFrom(summary)
        self._writer.add_event(event)


def open_sink(run: Described, files: Path, store: Path, kept: dict[str, Any]) -> TensorBoard:
    """Event files in `files`; the settings are written once."""
    sink = TensorBoard(files)
    if not kept:
        sink.begin(run)
        kept["hparams"] = "written"
    return sink
