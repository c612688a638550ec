"""The one record type that every reader fills and every table is made from. SI units only.

A reader turns one log (or run folder) into one `Record`. What the log does not say stays None:
no number is better than a guessed one. `origin` says where each fact came from.
"""

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from models.errors import UsageError, printable

ORIGINS = ("log", "run.json", "sidecar", "flag", "from name")  # strongest evidence first


def _empty() -> np.ndarray:
    return np.empty(0)


@dataclass
class Failure:
    """Why a run ended, and the line that proves it. `kind` is oom, nccl, node, timeout, cancelled,
    traceback, diverged, launcher (nothing was trained) or aborted. `line_no` 0: no line of a log
    says it."""

    kind: str
    line_no: int
    line: str


class Refusal(UsageError):
    """A file that cannot be read as a run. `source` names it, `reason` says why, in one line."""

    def __init__(self, source: str, reason: str):
        super().__init__(source, reason)  # both, so that it survives pickling between processes
        self.source, self.reason = source, reason

    def __str__(self) -> str:
        # A reason that names a file below the source has named the source.
        named = self.reason.startswith(self.source)
        return printable(self.reason if named else f"{self.source}: {self.reason}")


@dataclass
class Record:
    """One run, as its log tells it.

    Per-step arrays all have the same length, one entry per logged iteration in file order, NaN
    where that line did not say: `iteration` (number), `step_s` (seconds per iteration), `loss`,
    `grad_norm`, `tflops` (as printed, per GPU), `samples_per_s`, `tokens_per_s`, `skipped` (0 or
    1). `interval` is how many iterations one entry averages over.
    """

    source: str
    format: str
    engine: str | None = None
    iteration: np.ndarray = field(default_factory=_empty)
    step_s: np.ndarray = field(default_factory=_empty)
    loss: np.ndarray = field(default_factory=_empty)
    grad_norm: np.ndarray = field(default_factory=_empty)
    tflops: np.ndarray = field(default_factory=_empty)
    samples_per_s: np.ndarray = field(default_factory=_empty)
    tokens_per_s: np.ndarray = field(default_factory=_empty)
    skipped: np.ndarray = field(default_factory=_empty)
    interval: int = 1
    # What the log says once about all of the run: wall_s, samples_per_s, tokens_per_s, and
    # step_s_mean, step_s_median ... where it prints statistics and no steps.
    totals: dict[str, float] = field(default_factory=dict)

    planned_steps: int | None = None
    completed: bool | None = None  # True only when the log itself proves it
    failure: Failure | None = None

    gpus: int | None = None
    tp: int | None = None
    pp: int | None = None
    vpp: int | None = None
    dp: int | None = None
    micro_batch: int | None = None
    global_batch: int | None = None
    seq_len: int | None = None
    model: dict[str, Any] = field(default_factory=dict)  # GPTConfig's names where known
    params: float | None = None
    precision: str | None = None
    recompute: str | None = None
    zero_stage: int | None = None
    gpu_type: str | None = None
    commit: str | None = None
    code: str | None = None  # a name for the code that trained, which other commits may share
    oversubscribed: bool | None = None

    origin: dict[str, str] = field(default_factory=dict)  # field -> one of ORIGINS
    notes: list[str] = field(default_factory=list)  # contradictions, restarts, odd lines
    extra: dict[str, Any] = field(default_factory=dict)  # what only this format has

    def count_nans(self, printed: np.ndarray) -> None:
        """Keep which entries' loss was printed as NaN (a mask), apart from those without a loss."""
        self.extra["nan_at"] = np.flatnonzero(printed)
        self.extra["nan_iterations"] = int(np.count_nonzero(printed))

    def step_stats(self) -> dict[str, float | int | None]:
        """n, mean, median, min and max (seconds) over all logged steps; None where unknown.

        A log that prints statistics of steps it does not show is taken at its word.
        """
        times = self.step_s[~np.isnan(self.step_s)]
        found: dict[str, float | int | None] = {"n": len(self.iteration)}
        for name in ("mean", "median", "min", "max"):
            printed = self.totals.get(f"step_s_{name}")
            measured = float(getattr(np, name)(times)) if len(times) else None
            found[name] = measured if printed is None else printed
        return found
