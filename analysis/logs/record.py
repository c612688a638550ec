"""The one record type that every reader fills and every table is made from. SI units only.

A reader turns one log (or run folder) into one `Record`. What the log does not say stays None:
leave it unknown rather than guess. `origin` says where each fact came from.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from analysis.common.reasons import NOTE, Reason
from base.errors import UsageError, printable
from parallel.measure.slow_steps import PartTimes
from parallel.record.first_place import Place
from parallel.record.reader import Run

# Strongest evidence first.
ORIGINS = ("log", "run.json", "config", "sidecar", "flag", "default", "from name")
# The columns of a table of steps; NaN where a line of the log does not say.
STEP = np.dtype(
    [
        ("iteration", float),  # its number
        ("step_s", float),  # seconds per iteration
        ("micro_s", float),  # seconds of a micro-batch, where the iterations are these
        ("sequences", float),  # sequences in a step
        ("tokens", float),  # of a step, by the log's own counter
        ("loss", float),
        ("grad_norm", float),
        ("tflops", float),  # as printed, per GPU
        ("mfu", float),  # as printed, a share (1.52 is 152 %)
        ("samples_per_s", float),
        ("tokens_per_s", float),
        ("tokens_per_s_per_gpu", float),  # as printed; times the GPUs, it is the one above
        ("skipped", float),  # 0 or 1, or how many of the interval
        ("nan_loss", float),  # 1 where NaN was printed as the loss
        ("at", float),  # where its line begins in the log, bytes
    ]
)
# The columns of lines that print seconds of a step's parts -> what tables call the parts.
PRINTED_PARTS = {
    "data_s": "data",
    "compute_s": "compute",
    "communication_s": "communication",
    "forward_backward_s": "forward and backward",  # with the communication inside them
}

# A doubt: its learning rate changed when it was resumed, so no single schedule has its loss curve.
SCHEDULE = "schedule"
# A doubt: its tokens/s leave out padding or prompts, so no step time follows from them.
UNPADDED = "unpadded tokens"
COARSE = "coarse clock"  # the log's only clock tells too few seconds for a time
# A doubt: the steps that its time is of have several global batches.
SEVERAL_BATCHES = "several batches"


def steps_table(**columns: Sequence[float] | np.ndarray) -> np.ndarray:
    """Returns a table of steps. columns: one or more by STEP's names, of one length; the others are
    NaN."""
    steps = np.full(len(next(iter(columns.values()))), np.nan, STEP)
    for name, values in columns.items():
        steps[name] = values
    return steps


@dataclass
class Failure:
    """Why a run ended, and the line that proves it. `kind` is oom, nccl, node, timeout, cancelled,
    traceback, exited, diverged, launcher (nothing was trained) or aborted. `line_no` 0: no line of
    a log says it. place: the rank and the node that failed first."""

    kind: str
    line_no: int
    line: str
    place: Place = Place()


class Refusal(UsageError):
    """A file that cannot be read as a run.

    `source` names it, `reason` says why, in one line.
    """

    def __init__(self, source: str, reason: str):
        super().__init__(source, reason)  # both, to survive pickling between processes
        self.source, self.reason = source, reason

    def __str__(self) -> str:
        return printable(f"{self.source}: {self.reason}")


@dataclass
class Submission:
    """What an MLPerf result says beside the run itself, and what the folders around it say.

    "" or None where unknown. eval_share: of the run's time, that of evaluations, where the log
    marks them. top and folder: the submitter's folder, and the benchmark's name in it.
    """

    round: str = ""
    submitter: str = ""
    division: str = ""
    benchmark: str = ""
    system: str = ""  # the folder's name
    platform: str = ""  # what the log calls the system
    eval_share: float | None = None
    samples: int | None = None  # trained with
    gpus_per_node: int | None = None
    top: Path | None = None
    folder: str = ""


@dataclass
class Record:
    """One run, as its log states it.

    steps: a table with a row for each logged iteration, in the order of the file; its columns are
    STEP's: `record.steps["loss"]`. interval: how many iterations a row averages over.
    """

    source: str
    format: str
    engine: str | None = None
    steps: np.ndarray = field(default_factory=lambda: np.empty(0, STEP))
    interval: int = 1
    # What the log says once about all of the run: wall_s, samples_per_s, tokens_per_s; compute_s
    # and communication_s of an entry's slowest rank; and step_s_mean, step_s_median ... where it
    # prints statistics and no steps.
    totals: dict[str, float] = field(default_factory=dict)

    planned_steps: int | None = None
    completed: bool | None = None  # True only when the log itself proves it
    failure: Failure | None = None
    ending: Any = None  # analysis.runs.verdict decides it once

    gpus: int | None = None
    tp: int | None = None
    pp: int | None = None
    cp: int | None = None
    vpp: int | None = None
    ep: int | None = None
    etp: int | None = None
    dp: int | None = None
    micro_batch: int | None = None
    n_micro: int | None = None  # micro-batches of a step on one rank, where that is stated
    global_batch: int | None = None
    seq_len: int | None = None
    # Of a run whose attention ends with each document: the length of whole sequences with as much
    # work in attention; 0 where its folder does not say.
    attended_seq_len: float | None = None
    packed: str | None = None  # the setting that packs documents into a sequence
    model: dict[str, Any] = field(default_factory=dict)  # GPTConfig's names where known
    # The fewest and the most token ids of which padding to a multiple makes model["vocab_size"].
    token_ids: tuple[int, int] | None = None
    # What the model has that no FLOPs convention counts, in words: "64 experts".
    uncounted: list[str] = field(default_factory=list)
    params: float | None = None
    trained: int | None = None  # parameters that are trained, where these may be a part
    precision: str | None = None
    recompute: str | None = None
    zero_stage: int | None = None
    sequence_parallel: bool | None = None  # whether tp ranks share what tp leaves whole
    routing: str | None = None  # of experts: natural, or forced, whatever the router says
    dropped: float | None = None  # share of the tokens' choices that no expert took
    expert_load: float | None = None  # an expert's most tokens over the mean, of the worst layer
    dispatcher: str | None = None  # how tokens get to experts: alltoall, allgather, deepep ...
    gpu_type: str | None = None
    peak_tflops: float | None = None  # that was given, of a card that is not known
    mfu_flops: float | None = None  # FLOP/s of a GPU that the printed MFU is over, where it says so
    commit: str | None = None
    code: str | None = None  # a name for the code that trained, which other commits may share
    oversubscribed: bool | None = None
    peak_bytes: int | None = None  # of the fullest rank: allocated on CUDA, resident on CPU
    sharing: str = ""  # the ranks, and the cores or GPUs that they share, in words

    origin: dict[str, str] = field(default_factory=dict)  # field -> one of ORIGINS
    # Notes, as contradictions and odd lines, and doubts, which every table must say.
    reasons: list[Reason] = field(default_factory=list)

    # How to read the entries, and where they stand.
    per_epoch: bool = False  # an entry is the mean over an epoch's micro-steps, not one step
    epochs: bool = False  # an entry is a whole epoch, of which no batch or tokens are known
    mean_of: str = ""  # what totals' step_s_mean is, where it is the time of a step for want of one
    running_average: bool = False  # an entry is a running mean of the steps before it
    whole_run: bool = False  # the log states results of the whole run, so it needs no entries
    nan_iterations: int = 0  # how many iterations had a loss of NaN, by the log's own count
    last_at: int | None = None  # offset of the last entry in the file, bytes
    last_line: int = 0  # the line there; 0 where no line of a log is an entry

    # Only a run folder has these.
    own: Run | None = None  # all of it, as it was read
    run: str | None = None  # the run's own name
    configuration: str | None = None  # the run's name without its repeat
    repeat: int | None = None
    study: str | None = None
    baseline: str | None = None  # the name of the run that the study compares with
    state: str | None = None  # of parallel.record.ends: complete, running, failed ...
    ended_utc: str | None = None
    facts: dict[str, Any] = field(default_factory=dict)  # run.json as it stands
    shown: str = ""  # what tables call the run; `load` sets it
    evidence: str = ""  # a hash of what was measured, where a reader makes one
    copy_of: str = ""  # the source of a run with the same evidence; `load` sets it
    submission: Submission | None = None  # of an MLPerf result
    # Of its steps: those of ranks, or of each entry, seconds, that its line prints.
    parts: PartTimes | None = None
    printed_parts: dict[str, np.ndarray] = field(default_factory=dict)

    # What a profiler or a breakdown measured; seconds.
    profiler: dict[str, Any] | None = None  # which one watched the run, and how

    @property
    def batches(self) -> np.ndarray:
        """Returns the sequences in a step of each entry: what its line says, else the run's."""
        return self.batches_of(self.steps)

    def batches_of(self, entries: np.ndarray) -> np.ndarray:
        """Returns the sequences in a step of each of these rows of the table of steps."""
        printed = entries["sequences"]
        return np.where(np.isnan(printed), self.global_batch or np.nan, printed)

    @property
    def notes(self) -> list[str]:
        """Returns the notes in words."""
        return [reason.text for reason in self.reasons if reason.kind == NOTE]

    @property
    def doubts(self) -> dict[str, str]:
        """Returns the doubts in words, by their kinds."""
        return {reason.kind: reason.text for reason in self.reasons if reason.kind != NOTE}

    def note(self, text: str) -> None:
        self.reasons.append(Reason(NOTE, text))

    def doubt(self, kind: str, text: str) -> None:
        """Adds a doubt, in the place of an earlier one of its kind."""
        kinds = [reason.kind for reason in self.reasons]
        place = kinds.index(kind) if kind in kinds else len(kinds)
        self.reasons[place : place + 1] = [Reason(kind, text)]

    def doubt_numbers(self, counts: Mapping[str, int | bool], prefix: str = "") -> None:
        """Notes as a doubt how many values of each name are cut or no whole number, and so
        unknown."""
        unknown = ", ".join(f"{name} ({int(count)})" for name, count in counts.items() if count)
        if unknown:
            words = f"{prefix}what is cut or no whole number is unknown: {unknown}"
            earlier = self.doubts.get("numbers")
            self.doubt("numbers", f"{earlier}; {words}" if earlier else words)

    def step_stats(self, entries: np.ndarray | None = None) -> dict[str, float | int | None]:
        """Returns n, mean, median, min and max (seconds) over all logged steps; None where unknown.
        entries: over these rows of the table of steps alone.

        Where a log prints statistics instead of steps, the printed ones are used, but not for rows.
        """
        steps = self.steps if entries is None else entries
        times = steps["step_s"][~np.isnan(steps["step_s"])]
        stats: dict[str, float | int | None] = {"n": len(steps)}
        for name in ("mean", "median", "min", "max"):
            printed = self.totals.get(f"step_s_{name}") if entries is None else None
            measured = float(getattr(np, name)(times)) if len(times) else None
            stats[name] = measured if printed is None else printed
        return stats
