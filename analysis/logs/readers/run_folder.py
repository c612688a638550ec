"""Our own run folder: facts from run.json, steps from steps.csv, the end from status.json."""

import contextlib
import re
from pathlib import Path

import numpy as np

from analysis.logs.parsing.fields import positive
from analysis.logs.parsing.json_values import mapping, real, steps_of
from analysis.logs.parsing.logfile import Log
from analysis.logs.parsing.run_json import peak_bytes, sharing, stated
from analysis.logs.record import SCHEDULE, Failure, Record, Refusal
from parallel.measure.step_changes import change_of
from parallel.record.ends import COMPLETE, FAILED, PENDING, RUNNING, Kind
from parallel.record.first_place import place_of
from parallel.record.reader import Run, job_ids, read_run, read_saves
from parallel.record.schema import LOG

FORMAT = "run folder"

# Slurm's verdict, then what the run knows of its end -> Failure's kind; other ends are a traceback.
_VERDICTS = {"OOM": "oom", "timeout": "timeout", "node failure": "node", "cancelled": "cancelled"}
FAILURES = {
    Kind.MEMORY: "oom",
    Kind.COMMUNICATION: "nccl",
    Kind.LOST_PEER: "nccl",
    Kind.TIME_LIMIT: "timeout",
    Kind.SIGNAL: "cancelled",
    Kind.DIVERGED: "diverged",
}
_COLUMNS = {"iteration": "step"} | {k: k for k in ("step_s", "loss", "grad_norm", "skipped")}
_PEAK = re.compile(rb"max memory \(GB\): (\d+(?:\.\d+)?) \|")  # parallel.record.lines
_BEFORE_A_STEP = (Kind.REFUSED, Kind.HANG, Kind.DISK)  # a run that took no step did not start


def read(path: Path) -> Record:
    """Reads one run folder.

    Raises:
        UsageError: no run.json, or a file that is damaged.
    """
    run = read_run(Path(path))
    facts = run.facts
    record = Record(source=str(path), format=FORMAT, own=run)

    columns = {ours: [step[name] for step in run.steps] for ours, name in _COLUMNS.items()}
    steps = record.steps = steps_of(**columns)
    tokens = np.array([step["tokens"] for step in run.steps], float)
    steps["tokens_per_s"] = tokens / positive(steps["step_s"])
    for name, value in stated(facts).items():
        if value is not None:
            setattr(record, name, value)
            record.origin[name] = "run.json"
    if loads := [step["expert_load"] for step in run.steps if step.get("expert_load")]:
        record.expert_load = float(np.mean(loads))
        change = change_of(np.array(loads), np.arange(len(loads)))
        if change and record.routing == "natural":
            words = f"expert load went from {change[0]:.3g} to {change[1]:.3g}"
            record.doubt("routing", f"routing had not settled: {words}")
        summary = mapping(run.metrics.get("summary"))
        record.dropped = real(summary["dropped"]) if "dropped" in summary else None
    record.run = facts.get("run", run.path.name)
    record.configuration = facts.get("configuration") or facts.get("run")
    for name in ("repeat", "study", "baseline", "profiler"):
        setattr(record, name, facts.get(name))
    record.facts, record.state = facts, run.state
    doubts = {"off the clock": run.off_clock, "rows missing": run.missing}
    doubts[SCHEDULE] = facts.get("go_on")
    for kind, text in doubts.items():
        if text:
            record.doubt(kind, text)
    record.sharing = sharing(facts)
    record.peak_bytes = peak_bytes(run.metrics)
    if record.peak_bytes is None and (printed := _printed_peak(run.path / LOG)):
        record.peak_bytes = printed
        record.note("the peak of memory is rank 0's, as train.log prints it")
    record.ended_utc = run.status.get("time_utc") if run.state != RUNNING else None
    record.completed = run.state == COMPLETE
    if run.state == FAILED:
        record.failure = _failure(run)
    if run.state == PENDING or (run.state == FAILED and not record.failure):
        record.note(run.reason)
    elif run.state not in (COMPLETE, FAILED):
        record.note(f"status.json says {run.state} {run.reason}".strip())
    if run.later:
        record.note(run.later)
    if remark := read_saves(run.path).remark:
        record.note(remark)
    return record


def _printed_peak(path: Path) -> int | None:
    """Returns the most bytes that rank 0 held, by the iteration lines of train.log; None where
    there is none."""
    try:
        with Log(path) as log:
            peaks = [float(match[1]) for _, match in log.matches(_PEAK)]
    except Refusal:
        return None
    return round(max(peaks) * 1e9) if peaks else None


def _failure(run: Run) -> Failure | None:
    """Returns why a failed run ended; None where only that it ended is known."""
    if kind := _VERDICTS.get(run.verdict):
        return Failure(kind, 0, run.reason, place_of(kind, run.reason, _end_of_log(run.path)))
    if run.kind == Kind.UNKNOWN:
        return None
    default_kind = "traceback" if run.steps or run.kind not in _BEFORE_A_STEP else "launcher"
    kind = FAILURES.get(run.kind, default_kind)
    if run.verdict and kind == "cancelled":  # Slurm would have said so: another rank died first
        kind = default_kind
    return Failure(kind, 0, run.reason, place_of(kind, run.reason, _end_of_log(run.path)))


def _end_of_log(path: Path) -> str:
    """Returns the end of what the run's last job printed, "" where no job ran it."""
    job = max(job_ids(path), default=None)
    with contextlib.suppress(Refusal), Log(path / f"{job}.out") as log:
        return log.tail.decode("utf-8", "replace")
    return ""
