"""trackio, through its own library: SQLite files, or the server that its variables name."""

import contextlib
import io
import os
import re
from pathlib import Path
from typing import Any

from parallel.record.sinks import Described, Point


class Trackio:
    """One run of trackio; `run` is trackio's object. It keeps the time of the call, not the
    step's."""

    def __init__(self, run: Any):
        self._run = run

    def write(self, points: list[Point]) -> None:
        for point in points:
            self._run.log(point.values, step=point.step)

    def close(self, state: str) -> None:
        import trackio

        with contextlib.redirect_stdout(io.StringIO()):
            trackio.finish()


def open_sink(run: Described, files: Path, store: Path, kept: dict[str, Any]) -> Trackio:
    """A run in the project of the study, or the same one again: by its name."""
    os.environ.setdefault("TRACKIO_DIR", str(store.resolve()))  # read when it is imported
    os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")
    import trackio

    kept["name"] = run.name
    with contextlib.redirect_stdout(io.StringIO()):
        opened = trackio.init(
            project=re.sub(r"[^\w-]", "-", run.study),
            name=run.name,
            config=run.config,
            resume="allow",
            embed=False,
            auto_log_gpu=False,
            auto_log_cpu=False,
        )
    return Trackio(opened)
