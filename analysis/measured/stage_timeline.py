"""The pipeline of a run: what each stage did when, and what its schedule would do with these times.

A run with `--breakdown` records the intervals of a few steps on every rank, on rank 0's clock
(parallel/measure/traced_steps.py). `of_run` reads them and simulates the same steps: the schedule
of the run's engine with each stage's own mean forward and backward, and the message time that the
run measured before it trained. `write` puts both into one trace for Perfetto.
"""

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from statistics import mean

from analysis.common.table import Column, Table
from analysis.measured.rank_times import Breakdown
from analysis.planner import pipeline
from base.errors import UsageError
from parallel.record import trace_file
from parallel.record.reader import read_breakdown
from parallel.record.trace_file import COMPUTE, Interval

WITHOUT = "no traced steps (an older version wrote the run, or it ended before them)"


@dataclass
class Timeline:
    """One run's traced steps; seconds since the first of them began on rank 0.

    measured: every rank's intervals. simulated: one for each stage, for every step that was
    traced, from where its first forward was measured. transfer_s: a message between stages.
    clock_error_s: what a rank's clock may be off at most, against rank 0's.
    """

    name: str
    pp: int
    steps: list[int]
    measured: list[Interval]
    simulated: list[Interval]
    forward_s: list[float]
    backward_s: list[float]
    transfer_s: float
    clock_error_s: float
    notes: list[str] = field(default_factory=list)

    def ranks(self, stage: int) -> list[int]:
        """The ranks of a stage that were traced."""
        return sorted({i.rank for i in self.measured if i.stage == stage and i.rank is not None})


def of_run(one: Breakdown) -> Timeline:
    """The traced steps of a run with a breakdown.

    Raises:
        UsageError: it has none, or a rank's are missing or damaged; it names the file.
    """
    layout, folder = one.spec.layout, one.run.path
    if not trace_file.file_of(folder, 0).exists():
        raise UsageError(f"{folder}: {WITHOUT}")
    read = {
        rank: trace_file.read(trace_file.file_of(folder, rank)) for rank in range(layout.world_size)
    }
    try:
        steps = {rank: tuple(about["steps"]) for rank, (_, about) in read.items()}
        error_s = max(float(about["clock"]["error_s"]) for _, about in read.values())
    except (KeyError, TypeError, ValueError) as error:
        raise UsageError(f"{folder}: a trace without its steps or its clock") from error
    if len(set(steps.values())) > 1:
        raise UsageError(f"{folder}: the ranks traced different steps: {steps}")
    found = [interval for intervals, _ in read.values() for interval in intervals]
    for rank, (intervals, _) in read.items():
        for kind in ("forward", "backward"):
            if {i.step for i in intervals if i.kind == kind} != set(steps[rank]) or not steps[rank]:
                raise UsageError(f"{folder}: rank {rank} has no {kind} in a step that it traced")
    begin = min(i.start_s for i in found)
    schedule = "interleaved" if layout.vpp > 1 else "1f1b"
    orders = [
        pipeline.order(schedule, stage, layout.pp, layout.n_micro, layout.vpp)
        for stage in range(layout.pp)
    ]
    measured = [_named(i, orders[i.stage], begin) for i in found]
    forward_s = [_mean_s(measured, stage, "forward") for stage in range(layout.pp)]
    backward_s = [_mean_s(measured, stage, "backward") for stage in range(layout.pp)]
    rows, _ = read_breakdown(folder, layout.world_size)
    transfer_s = max((row["transfer_s"] for row in (r[-1] for r in rows.values())), default=0.0)
    events = pipeline.simulate(
        schedule, layout.pp, layout.n_micro, layout.vpp, forward_s, backward_s, transfer_s
    )
    update_s = [_optimizer_s(measured, stage, len(steps[0])) for stage in range(layout.pp)]
    step = list(pipeline.intervals(events, transfer_s, update_s))
    simulated = [
        i._replace(start_s=i.start_s + at, end_s=i.end_s + at, step=number)
        for number in steps[0]
        for at in [window(measured, number)[0]]
        for i in step
    ]
    return Timeline(
        one.name,
        layout.pp,
        list(steps[0]),
        measured,
        simulated,
        forward_s,
        backward_s,
        transfer_s,
        error_s,
    )


def _named(i: Interval, order: list[pipeline.Task], begin: float) -> Interval:
    """An interval with its micro-batch and chunk: a rank recorded the how-manieth of its kind."""
    moved = i._replace(start_s=i.start_s - begin, end_s=i.end_s - begin)
    if i.micro is None or i.kind not in ("forward", "backward"):
        return moved
    tasks = [task for task in order if task[0] == ("F" if i.kind == "forward" else "B")]
    if i.micro >= len(tasks):
        raise UsageError(f"rank {i.rank}: {i.kind} {i.micro} of {len(tasks)} in step {i.step}")
    return moved._replace(micro=tasks[i.micro][1], chunk=tasks[i.micro][2])


def _mean_s(measured: Iterable[Interval], stage: int, kind: str) -> float:
    """A stage's mean forward or backward through one chunk, with what happened inside it."""
    ends: dict[tuple, list[float]] = defaultdict(lambda: [float("inf"), 0.0])
    for i in measured:
        if i.stage == stage and i.kind == kind:
            one = ends[i.rank, i.step, i.micro, i.chunk]
            one[0], one[1] = min(one[0], i.start_s), max(one[1], i.end_s)
    return mean(end - start for start, end in ends.values())


def _optimizer_s(measured: Iterable[Interval], stage: int, n_steps: int) -> float:
    mine = [i for i in measured if i.stage == stage]
    total = sum(i.end_s - i.start_s for i in mine if i.kind == "optimizer")
    return total / n_steps / len({i.rank for i in mine})


def window(intervals: Iterable[Interval], step: int) -> tuple[float, float]:
    """From the first start to the last end of a forward or backward in a step, of all stages."""
    mine = [i for i in intervals if i.step == step and i.kind in COMPUTE]
    return min(i.start_s for i in mine), max(i.end_s for i in mine)


def write(path: Path, found: Timeline) -> None:
    """One trace with a process per stage: the simulated stage above its ranks.

    Raises:
        OSError: as the disk has it.
    """
    about = {"run": found.name, "steps": found.steps, "clock_error_s": found.clock_error_s}
    trace_file.write(path, [*found.simulated, *found.measured], about)


def table(found: Iterable[Timeline]) -> Table:
    """Each stage of each run: measured beside simulated; means over ranks and traced steps."""
    rows, notes = [], []
    for one in found:
        for stage in range(one.pp):
            ranks = one.ranks(stage)
            rows.append(
                {
                    "run": one.name,
                    "stage": stage,
                    "forward_s": one.forward_s[stage],
                    "backward_s": one.backward_s[stage],
                    "pipeline_s": _mean_window(one.measured, one.steps),
                    "simulated_s": _mean_window(one.simulated, one.steps),
                    "bubble_s": idle_s(one.measured, stage) / len(one.steps) / len(ranks),
                    "simulated_bubble_s": idle_s(one.simulated, stage) / len(one.steps),
                }
            )
        steps = f"steps {one.steps[0]} to {one.steps[-1]}"
        clocks = f"clocks of ranks within {one.clock_error_s * 1e6:.0f} us"
        notes += [f"{one.name}: {steps}, {clocks}", *(f"{one.name}: {n}" for n in one.notes)]
    columns = [
        Column("run", "run"),
        Column("stage", "stage", "d"),
        Column("forward_s", "forward s", ".4g"),
        Column("backward_s", "backward s", ".4g"),
        Column("pipeline_s", "pipeline s", ".4g"),
        Column("simulated_s", "simulated s", ".4g"),
        Column("bubble_s", "bubble s", ".4g"),
        Column("simulated_bubble_s", "simulated bubble s", ".4g"),
    ]
    if rows:
        notes.append(
            "pipeline: from the first forward to the last backward of a step, of all stages;"
            " forward, backward: of a micro-batch through a chunk"
        )
    return Table(columns, rows, "Traced steps", notes)


def _mean_window(intervals: list[Interval], steps: list[int]) -> float:
    windows = [window(intervals, step) for step in steps]
    return mean(end - start for start, end in windows)


def idle_s(intervals: Iterable[Interval], stage: int) -> float:
    """Seconds of bubble on a stage, of all its ranks together."""
    return sum(i.end_s - i.start_s for i in intervals if i.stage == stage and i.kind == "bubble")
