"""The state of each run, from what Slurm says (squeue.py) and from the run folders.

Slurm forgets jobs (in minutes, where there is no accounting), and a node that dies writes nothing
into the run folder. So how a job ended is written beside the run (<jobid>.state): it stays known
when Slurm has forgotten the job, and the tables of analysis/ read it.
"""

import contextlib
import math
import os
import re
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean
from typing import Any

from base.errors import UsageError
from base.files import read_json_if_whole
from base.storage import write_json
from parallel.config.changes import CIRCUMSTANCES, changes
from parallel.config.run_spec import RunSpec, settings_of
from parallel.config.study import Study
from parallel.record import ends, reader, schema
from parallel.record.ends import CONSEQUENCES, Kind, kind_of
from parallel.record.first_place import cause
from parallel.record.lock import one_at_a_time
from slurm.render import ROOT, comment_of, seconds
from slurm.squeue import ACTIVE, PENDING, UNMET, Job, active

ENDS = {"OUT_OF_MEMORY": "OOM", "TIMEOUT": "timeout", "DEADLINE": "timeout"}
ENDS |= {"NODE_FAIL": "node failure", "BOOT_FAIL": "node failure"}
ENDS |= {"CANCELLED": "cancelled", "PREEMPTED": "cancelled", "REVOKED": "cancelled"}
INTERRUPTED = "interrupted"  # stopped from outside, but it has saved and can go on
# Each failure, and the kind of end that it is; a run that failed by itself says its kind.
FAILURES = {"OOM": Kind.MEMORY, "timeout": Kind.TIME_LIMIT, "node failure": Kind.KILLED}
FAILURES |= {"cancelled": Kind.SIGNAL, INTERRUPTED: Kind.SIGNAL, "failed": Kind.UNKNOWN}
# What a log says, as find_sign calls it -> the state that it proves.
EVIDENCE = {"oom": "OOM", "timeout": "timeout", "node": "node failure", "scancel": "cancelled"}
STOPPED = ("cancelled", INTERRUPTED)  # of these: by somebody, or to go on; no failure of the run

RESTART = re.compile(r"(\d+)\.restart(\d+)\.out")
COMPLAINT = re.compile(r"^.*(?:Error|error:|FAILED|Killed).*$", re.MULTILINE)


@dataclass(frozen=True)
class Row:
    """One run: what it is doing or how it ended, and the line that proves it.

    `kind` says why it failed, empty where it did not; `job` is its last job, - where there is none.
    """

    run: str
    state: str
    job_id: int | None
    step: int
    steps: int
    eta_s: float | None
    line: str
    kind: str = ""

    @property
    def job(self) -> str:
        return str(self.job_id or "-")


@dataclass(frozen=True)
class End:
    """How a job ended: one of the states above, the line that proves it, and the kind."""

    state: str
    line: str
    kind: str = ""


@contextlib.contextmanager
def locked(studies: Iterable[Study], logs: Path) -> Iterator[None]:
    """Holds the locks of the studies' folders, which it makes where they are missing: no other
    command submits or changes their jobs meanwhile."""
    with contextlib.ExitStack() as stack:
        for folder in sorted({logs / study.name for study in studies}):
            folder.mkdir(parents=True, exist_ok=True)
            stack.enter_context(one_at_a_time(folder / ".submit.lock"))
        yield


def tail(path: Path, size: int = 65536) -> str:
    """Returns the end of a file; empty where there is none, or a device or pipe without an end."""
    try:
        with path.open("rb") as stream:
            stream.seek(max(0, stream.seek(0, os.SEEK_END) - size))
            return stream.read(size).decode(errors="replace")
    except (OSError, UsageError):
        return ""


def read_end(folder: Path, attempt: str) -> ends.End | None:
    """Returns the end that slurm/job.sh wrote when it ended a run itself, if it did."""
    lines = tail(folder / f"{attempt}.end").splitlines()
    return ends.End(*lines[:2]) if len(lines) > 1 else None


def evidence(text: str, noted: ends.End | None) -> End | None:
    """Returns an end that is no failure of the run itself, from its log and what was noted of
    it."""
    log = text.encode()
    sign, stopped = ends.outside_sign(log), ends.first_sign(log, "scancel")
    if sign is None and noted is not None:
        for state in EVIDENCE.values():
            if noted.kind == FAILURES[state]:
                return End(state, noted.reason)
    if sign := sign or stopped:
        return End(EVIDENCE[sign.kind], ends.line_of(log, sign.at).decode(errors="replace"))
    return None


def progress(folder: Path) -> tuple[int, float | None]:
    """Returns the steps done, and the mean of the last ten steps' seconds where there are any."""
    times: dict[int, float] = {}
    for line in tail(folder / "steps.csv", 4096).split("\n")[-11:-1]:  # the last may be cut
        with contextlib.suppress(ValueError):
            step, step_s = line.split(",")[:2]
            times[schema.count(step)] = schema.amount(step_s)
    return (list(times)[-1], fmean(times.values())) if times else (0, None)


def recall(folder: Path, job_id: int) -> Job | None:
    """Returns a job that Slurm has forgotten, as it was written down."""
    noted = reader.read_job_end(folder, job_id)
    if not (noted.get("state") and noted.get("exit")):
        return None
    state, exit_, reason = noted["state"], noted["exit"], noted.get("reason", "")
    return Job(job_id, state, exit_, reason, elapsed_s=noted.get("elapsed_s"))


def remember(folder: Path, job: Job, row: Row) -> None:
    """Writes down how a job ended, in the folder that its run has; who submits a run makes it."""
    path = folder / f"{job.job_id}.state"
    if job.state in PENDING | ACTIVE:
        path.unlink(missing_ok=True)  # an end before Slurm restarted the job
        return
    end = {name: getattr(job, name) for name in ("job_id", "state", "exit", "elapsed_s")}
    end |= {"reason": job.reason} if job.waited_in_vain else {}
    end |= {"verdict": row.state if row.state in FAILURES else ""}
    end |= {"kind": row.kind, "line": row.line}
    if folder.is_dir() and read_json_if_whole(path) != end:
        write_json(path, end)


def restarts(folder: Path, job_id: int | None) -> int:
    """Counts how often Slurm restarted a job, by what it left."""
    names = os.listdir(folder) if folder.is_dir() else []
    left = filter(None, map(RESTART.fullmatch, names))
    return max((int(match[2]) for match in left if match[1] == str(job_id)), default=0)


def judge(run: str, folder: Path, steps: int, job: Job | None, job_id: int | None) -> Row:
    """Returns what a run's last job is doing or how it ended, by Slurm and the run folder. `job`
    None: Slurm knows none.

    What an earlier job, or a sweep without Slurm, left in the folder says nothing about this one.
    """
    step, step_s = progress(folder)
    status, job = reader.read_status(folder), job or Job(0, "")
    if job_id is not None and ran_by(folder) != job_id and (folder / "run.json").exists():
        status, step, step_s = {}, 0, None  # this job came to no run
    end = _doing(folder, status, job, job_id)
    end = end or _end_of_folder(folder, status, job) or _end_of_job(folder, status, job, job_id)
    eta_s = max(0, steps - step) * step_s if end.state == "running" and step_s is not None else None
    kind = end.kind or FAILURES.get(end.state, "")
    line = " ".join(end.line.split())[:300]
    return Row(
        run=run,
        state=end.state,
        job_id=job_id,
        step=step,
        steps=steps,
        eta_s=eta_s,
        line=line,
        kind=str(kind),
    )


def _doing(folder: Path, status: dict, job: Job, job_id: int | None) -> End | None:
    """Returns what a run that has not ended does; None where it has ended."""
    if job.state in PENDING:
        remedy = f"; it never starts so: mend it, or scancel {job_id}" if job.never_starts else ""
        return End("pending", f"Slurm: {job.state} {job.reason}{remedy}")
    if job.state in ACTIVE:
        again = restarts(folder, job_id)
        return End("running", f"Slurm: {job.state}" + (f", restart {again}" if again else ""))
    if job_id is None and status.get("state") is None:
        return End("missing", "never started")
    if job.waited_in_vain:
        return End("missing", f"never started: a run that job {job_id} waited for was not complete")
    if job_id is None and status.get("state") == ends.RUNNING:
        return End("running", "the run folder says so; no job of Slurm")
    return None


def _end_of_folder(folder: Path, status: dict, job: Job) -> End | None:
    """Returns the end of a run whose folder says all of it; None where the job's log is needed."""
    state, reason = status.get("state"), str(status.get("reason", ""))
    # Slurm gives 0:125 to a job of which the kernel killed a process for memory, complete or not.
    killed = job.state == "OUT_OF_MEMORY" or job.exit == "0:125"
    complete = state == ends.COMPLETE and (folder / "RUN_COMPLETE.txt").exists()
    if killed:
        note = ", though RUN_COMPLETE.txt is there" if complete else ""
        return End("OOM", job.says + note)
    if complete:
        return End("complete", "; ".join(filter(None, ("RUN_COMPLETE.txt", reason))))
    if state == INTERRUPTED:  # and saved, which scancel's victim may have as well
        ended = "cancelled" if job.state == "CANCELLED" else INTERRUPTED
        line = "; ".join(filter(None, (reason, job.says))) or "status.json says so"
        return End(ended, line, str(status.get("kind", "")))
    return End("timeout", reason) if status.get("kind") == Kind.TIME_LIMIT else None


def _end_of_job(folder: Path, status: dict, job: Job, job_id: int | None) -> End:
    """Returns the end of a run, by its folder, by Slurm and by the log of its job's last
    attempt."""
    state, reason, kind = (str(status.get(name, "")) for name in ("state", "reason", "kind"))
    restart = restarts(folder, job_id)
    attempt = f"{job_id}.restart{restart}" if restart else f"{job_id}"
    text, noted = tail(folder / f"{attempt}.out"), read_end(folder, attempt)
    outside = evidence(text, ends.End(kind, reason) if kind == Kind.MEMORY else noted)
    said_by_run = state == ends.FAILED and reason and kind not in CONSEQUENCES
    if said_by_run and job.state != "NODE_FAIL":
        # The run said why before Slurm ended what was left of it; of memory the log knows more.
        if outside and outside.state in ("OOM", "node failure"):
            return outside
        return End("failed", f"{reason}; {job.says}" if job.state in ENDS else reason, kind)
    if job.state in ENDS:
        return End(ENDS[job.state], job.says)
    if outside or noted:
        return outside or End("failed", noted.reason, noted.kind)
    is_listed = job.state or (folder / f"{attempt}.exit").exists()
    if not is_listed and time.time() < _latest_end(folder, attempt):
        line = f"Slurm here lists no job {job_id} (another cluster?), and it has left no end"
        return End("unknown", f"{line}; if there is none, delete {job_id}.* in its folder")
    if line := cause(text):
        return End("failed", line, kind_of(line))
    if state == ends.FAILED and reason:
        return End("failed", reason, kind)
    if state == ends.RUNNING and not job.state and not (folder / f"{attempt}.exit").exists():
        return End("failed", f"Slurm no longer knows job {job_id}, which left no exit status")
    line = next(iter(COMPLAINT.findall(text)), "") or job.says or "no status and no log"
    return End("failed", line)


def _latest_end(folder: Path, attempt: str) -> float:
    """Returns when the time limit of a job's attempt is over, by what Slurm said as it began (unix
    time); infinite where it has not begun, or has no limit."""
    limit = re.search(r" TimeLimit=(\S+)", tail(folder / f"{attempt}.job"))
    with contextlib.suppress(UsageError, OSError):  # UNLIMITED
        if limit is not None:
            return (folder / f"{attempt}.job").stat().st_mtime + seconds(limit[1])
    return math.inf


def with_result(row: Row, folder: Path, spec: RunSpec) -> Row:
    """Returns the row of a run. Where its last job came to no result while the folder holds a
    complete one of an earlier job, the row is of that result and its job, with a word on the later
    job. Where that result is of other settings than the study's and the later job was to train
    these, the later job counts."""
    if row.state not in FAILURES or row.job_id is None or not (folder / "run.json").exists():
        return row
    if (ran := ran_by(folder)) == row.job_id:
        return row
    earlier = judge(row.run, folder, row.steps, recall(folder, ran) if ran else None, ran)
    if earlier.state != "complete":
        return row
    if row.line == "Slurm: COMPLETED 0:0":  # a run without Slurm has replaced what it did
        return earlier
    submitted = settings_of(read_json_if_whole(folder / f"{row.job_id}.submitted"))
    for_other = submitted and _changed(submitted, spec)
    if changed_settings(folder, spec) and not for_other:
        return row
    later = f"job {row.job}, after it: {row.state}: {row.line}"
    return replace(earlier, line=f"{earlier.line}; {later}")


def of_the_study(row: Row, folder: Path, spec: RunSpec) -> Row:
    """Returns the row of a run. A complete run counts as missing where the study's file states
    other settings by now: what it asks for has not run."""
    if row.state != "complete" or not (changed := changed_settings(folder, spec)):
        return row
    line = f"a run of other settings is complete: {', '.join(changed)}; submit trains this one"
    return replace(row, state="missing", line=line)


def changed_settings(folder: Path, spec: RunSpec) -> list[str]:
    """Returns the settings that a folder's run had and the study's file says otherwise by now."""
    earlier = settings_of(read_json_if_whole(folder / "run.json"))
    return _changed(earlier, spec) if earlier else []


def _changed(earlier: dict[str, Any], spec: RunSpec) -> list[str]:
    """Returns the settings that differ, each with the value before and that of the study now."""
    now = spec.settings()
    for name in ("vocab_size", "end_of_text"):  # these may follow from data that are not here
        now[name] = earlier.get(name) if now[name] is None else now[name]
    return [
        f"{change.name} {change.before}, now {change.now}"
        for change in changes(earlier, now)
        if change.name in now.keys() - CIRCUMSTANCES
    ]


def ran_by(folder: Path) -> int | None:
    """Returns the job whose results are in the folder."""
    scheduler = read_json_if_whole(folder / "run.json").get("scheduler")
    job_id = str(scheduler.get("job_id")) if isinstance(scheduler, dict) else ""
    return int(job_id) if re.fullmatch(r"\d{1,18}", job_id) else None


def job_ids(study: Study, logs: Path, jobs: dict[int, Job]) -> dict[str, list[int]]:
    """Returns the jobs of each run: what they left in its folder names them. Of those that were
    submitted by hand and have not started, Slurm knows the comment."""
    ids = {name: set(reader.job_ids(logs / study.name / name)) for name in study.runs}
    comment = comment_of(study, logs)
    for job in jobs.values():
        is_ours = job.comment == comment and job.folder == str(ROOT) and job.name in ids
        if is_ours and job.state != "COMPLETED":  # a job that found nothing to do
            ids[job.name].add(job.job_id)
    return {name: sorted(numbers) for name, numbers in ids.items()}


def rows(study: Study, logs: Path, jobs: dict[int, Job] | None) -> list[Row]:
    """Returns one row per run of the study; `jobs`: what `all_jobs` said, None where no Slurm
    answers."""
    listed, table = jobs or {}, []
    for name, ids in job_ids(study, logs, listed).items():
        folder, spec = logs / study.name / name, study.specs[name]
        waiting = active(ids, listed)
        job_id = max(waiting or ids, default=None)
        job = None if job_id is None else listed.get(job_id) or recall(folder, job_id)
        if job is None and job_id is not None and jobs is not None:
            # Accounting lists no job that never could start. Runs stand behind those they wait for.
            awaited = [row for row in table if row.run in study.runs[name].after]
            failed = any(row.state in (*FAILURES, "missing") for row in awaited)
            if failed and not (folder / f"{job_id}.out").exists():
                job = Job(job_id, "CANCELLED", "0:0", UNMET, elapsed_s=0)
        row = judge(name, folder, spec.steps, job, job_id)
        if row.state == "unknown" and jobs is None:
            row = replace(row, line="no Slurm answers; it was submitted")
        if other_ids := [str(i) for i in waiting if i != job_id]:
            row = replace(row, line=f"{row.line}; job {', '.join(other_ids)} of this run, too")
        if job is not None:
            with contextlib.suppress(OSError):  # another user's logs, or a full disk: shown anyway
                remember(folder, job, row)
        table.append(of_the_study(with_result(row, folder, spec), folder, spec))
    return table
