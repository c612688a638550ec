"""Weights & Biases, through its own library: offline files, or its server where a key is known.

WANDB_MODE, WANDB_API_KEY, WANDB_PROJECT, WANDB_ENTITY, WANDB_DIR ... mean what they mean to wandb.
"""

import os
import uuid
from pathlib import Path
from typing import Any

from parallel.record.ends import COMPLETE
from parallel.record.sinks import Described, Point


class WandB:
    """One run of W&B; `run` is wandb's object."""

    def __init__(self, run: Any):
        self._run = run

    def write(self, points: list[Point]) -> None:
        for point in points:
            # The time of the step, not of this call.
            self._run.log(point.values | {"_timestamp": point.time_s}, step=point.step)

    def close(self, state: str) -> None:
        self._run.finish(exit_code=0 if state == COMPLETE else 1)


def open_sink(run: Described, files: Path, store: Path, kept: dict[str, Any]) -> WandB:
    """A run of W&B, or the same one again: its id is in `kept`."""
    import wandb

    offline = "online" if os.environ.get("WANDB_API_KEY") else "offline"
    # Its own sampling of the machine would be one more program beside a measurement.
    quiet = {"silent": True, "console": "off"}
    if "WANDB__DISABLE_STATS" not in os.environ:
        quiet["x_disable_stats"] = True
    return WandB(
        wandb.init(
            project=os.environ.get("WANDB_PROJECT", run.study),
            name=run.name,
            id=kept.setdefault("id", uuid.uuid4().hex[:12]),
            resume="allow",
            dir=os.environ.get("WANDB_DIR", str(store)),
            mode=os.environ.get("WANDB_MODE", offline),
            config=run.config,
            settings=wandb.Settings(**quiet),
        )
    )
