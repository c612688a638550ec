"""What became of each run: Slurm and the run folder asked together, a constant number of times.

Slurm forgets jobs (in minutes, where there is no accounting) and the run folder knows nothing of a
node that died. So: squeue and, where accounting exists, sacct are asked once each for all jobs of
this user; what is final is written beside the run (<jobid>.state), where it outlives that memory
and from where the tables of analysis/ take it.
"""

import contextlib
import os
import re
import subprocess
from dataclasses import dataclass, replace
from pathlib import Path

from models.files import parse_json
from parallel import artifacts
from parallel.study import Study
from slurm import cluster
from slurm.render import ROOT, comment_of, planned_text

PENDING = {"PENDING", "CONFIGURING", "REQUEUED", "REQUEUE_HOLD", "REQUEUE_FED", "RESV_DEL_HOLD"}
PENDING |= {"SPECIAL_EXIT"}
ACTIVE = {"RUNNING", "COMPLETING", "SUSPENDED", "STOPPED", "SIGNALING", "STAGE_OUT", "RESIZING"}
ENDS = {"OUT_OF_MEMORY": "OOM", "TIMEOUT": "timeout", "DEADLINE": "timeout"}
ENDS |= {"NODE_FAIL": "node failure", "BOOT_FAIL": "node failure"}
ENDS |= {"CANCELLED": "cancelled", "PREEMPTED": "cancelled", "REVOKED": "cancelled"}
INTERRUPTED = "interrupted"  # stopped from outside, but it has saved and can go on
FAILURES = ("OOM", "timeout", "node failure", "cancelled", INTERRUPTED, "failed")

# What a job's log says of its end, the surest first. slurmstepd and srun write these lines.
EVIDENCE = (
    (
        "OOM",
        r"oom[-_]kill|exceeded memory limit|Exceeded job memory|: Out Of Memory|CUDA out of memory"
        r"|OutOfMemoryError|DefaultCPUAllocator: can't allocate|MemoryError",
    ),
    ("timeout", r"DUE TO TIME LIMIT|^slurm: time limit"),
    ("node failure", r"DUE TO NODE FAILURE|srun: error: Node failure|Node failure on"),
    ("cancelled", r"\*\*\* JOB .*CANCELLED AT|^slurm: SIGTERM"),
)
PATTERNS = [(kind, re.compile(pattern, re.MULTILINE)) for kind, pattern in EVIDENCE]
# A cancelled step is the job's, or what srun --kill-on-bad-exit did after a task had failed.
STEP = re.compile(r"^.*\*\*\* STEP .*CANCELLED AT.*$", re.MULTILINE)
BAD_EXIT = re.compile(
    r"^srun: .*(?:: (?:Exited with exit code|Killed|Segmentation fault|Aborted|Bus error)"
    r"|Terminating (?:StepId|job step))",
    re.MULTILINE,
)
# What a log says of why a run failed, the surest first. torchrun names the process that was first
# to die, as its root cause; our own line tells a mistake; then interpreters, and what was raised.
ROOT_CAUSE = re.compile(
    r"Root Cause \(first observed failure\):\s+\[\d+\]:\s+time .*\s+host .*\s+rank +: (\d+).*"
    r"\s+exitcode +: -(?!15 |2 ).*\s+error_file.*\s+traceback : (Signal .*)"
)
SIGNAL = re.compile(r"Signal (?!15 )\d+ \(SIG\w+\) received by PID \d+")
CAUSES = [
    re.compile(pattern, re.MULTILINE)
    for pattern in (
        r"^slurm: failed: .*$",
        r"^parallel\.train: .*$",
        r"^.*(?:bad interpreter|execve\(\): |command not found|No module named ).*$",
        r"^(?!\S*(?:ChildFailedError|SignalException))\S*(?:Error|Exception|Interrupt): .*$",
        r"^.*(?:No such file or directory|Permission denied).*$",
        r"^srun: error: .*: (?:Exited with|Killed|Segmentation fault|Aborted|Bus error).*$",
    )
]
COMPLAINT = re.compile(r"^.*(?:Error|error:|FAILED|Killed).*$", re.MULTILINE)


@dataclass(frozen=True)
class Job:
    """A job as Slurm tells it. exit: its own status and the signal that ended it, as in 0:125."""

    job_id: int
    state: str
    exit: str = ""
    reason: str = ""
    name: str = ""
    comment: str = ""
    folder: str = ""


@dataclass(frozen=True)
class Row:
    """One run: what it is doing or how it ended, and the line that proves it."""

    run: str
    state: str
    job_id: int | None
    step: int
    steps: int
    eta_s: float | None
    line: str


def environment() -> dict[str, str]:
    """For Slurm's commands: no variables of a job we may be in, and the test cluster if it is up
    and there is no other."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith("SLURM_")}
    conf = os.environ.get("SLURM_CONF")
    if conf is None and not Path("/etc/slurm/slurm.conf").exists() and cluster.alive():
        conf = str(cluster.HOME / "slurm.conf")
    return kept | ({"SLURM_CONF": conf} if conf else {})


def ask(command: list[str]) -> str | None:
    """What a Slurm command prints; None where it is absent or fails."""
    try:
        done = subprocess.run(
            command, env=environment(), capture_output=True, text=True, timeout=60
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout if done.returncode == 0 else None


QUEUE = ("JobID", "State", "exit_code", "Reason", "Name", "Comment", "WorkDir")
ACCOUNTS = ("JobIDRaw", "State", "ExitCode", "Reason", "JobName", "Comment", "WorkDir")


def ask_slurm() -> dict[int, Job] | None:
    """Every job of this user that Slurm knows, by id; None where no Slurm answers.

    Two questions, however many jobs: squeue for those that wait, run or ended lately, sacct for
    those that ended within a month.
    """
    wanted = ",".join(f"{column}:|" for column in QUEUE)
    queue = ask(["squeue", "--noheader", "--me", "--states=all", f"--Format={wanted}"])
    accounts = ask(
        ["sacct", "-X", "-n", "-P", "--starttime=now-30days", f"--format={','.join(ACCOUNTS)}"]
    )
    if queue is None and accounts is None:
        return None
    jobs = parse(accounts or "")
    jobs.update(parse(queue or "", of_queue=True))  # squeue is the fresher
    return jobs


def parse(text: str, of_queue: bool = False) -> dict[int, Job]:
    """Jobs from lines of |-separated columns; a line that is none is skipped."""
    jobs = {}
    for line in text.splitlines():
        job_id, *columns = line.split("|")
        if not job_id.strip().isdigit() or len(columns) < 6:
            continue
        state, status, reason, name, comment, folder = (c.strip() for c in columns[:6])
        if of_queue and status.isdigit():  # as wait() gives it
            status = f"{int(status) >> 8}:{int(status) & 127}"
        jobs[int(job_id)] = Job(
            int(job_id), state.split()[0] if state else "", status, reason, name, comment, folder
        )
    return jobs


def tail(path: Path, size: int = 65536) -> str:
    """The end of a file; empty where there is none."""
    try:
        with path.open("rb") as stream:
            stream.seek(max(0, path.stat().st_size - size))
            return stream.read().decode(errors="replace")
    except OSError:
        return ""


def killed_rank(text: str) -> str:
    """The rank that a signal killed, as torchrun names it in a log; empty where it names none."""
    if found := ROOT_CAUSE.search(text):
        return f"rank {found[1]} was killed: {found[2].strip()}"
    found = SIGNAL.search(text)
    return found[0] if found else ""


def cause(text: str) -> str:
    """The line of a job's log that says why its run failed; empty where none does."""
    if killed := killed_rank(text):
        return killed
    found = (pattern.search(text) for pattern in CAUSES)
    return next((match[0].strip() for match in found if match), "")


def evidence(text: str, why: str) -> tuple[str, str] | None:
    """(state, line) of an end that is no failure of the run itself, from its log and its reason."""
    for kind, pattern in PATTERNS:
        if match := pattern.search(text) or pattern.search(why):
            source = match.string
            return kind, source[source.rfind("\n", 0, match.start()) + 1 :].split("\n", 1)[0]
    step, bad_exit = STEP.search(text), BAD_EXIT.search(text)
    if step and (bad_exit is None or step.start() < bad_exit.start()):
        return "cancelled", step[0]
    return None


def progress(folder: Path) -> tuple[int, float | None]:
    """Steps done, and the mean of the last ten steps' seconds where there are any."""
    times, step = [], 0
    for line in tail(folder / "steps.csv", 4096).split("\n")[:-1][-10:]:
        columns = line.split(",")
        if columns[0].isdigit() and len(columns) > 1:
            try:
                times.append(float(columns[1]))
            except ValueError:
                continue
            step = int(columns[0])
    return step, sum(times) / len(times) if times else None


def recall(folder: Path, job_id: int) -> Job | None:
    """A job that Slurm has forgotten, as it was written down."""
    noted = artifacts.read_json(folder / f"{job_id}.state")
    known = {name: noted[name] for name in ("job_id", "state", "exit") if name in noted}
    return Job(**known) if len(known) == 3 else None


def remember(folder: Path, job: Job, row: Row, planned: str) -> None:
    """Write down how a job ended; for one that never started, what it was to run as well."""
    path = folder / f"{job.job_id}.state"
    if job.state in PENDING | ACTIVE:
        path.unlink(missing_ok=True)  # it had ended, and Slurm was told to restart it
        return
    verdict = row.state if row.state in FAILURES else ""
    end = {"job_id": job.job_id, "state": job.state, "exit": job.exit}
    end |= {"verdict": verdict, "line": row.line}
    if artifacts.read_json(path) != end:
        folder.mkdir(parents=True, exist_ok=True)
        if not artifacts.is_run_folder(folder):
            (folder / f"{job.job_id}.submitted").write_text(planned + "\n")
        artifacts.write_json(path, end)


def restarts(folder: Path, job_id: int) -> int:
    """How often Slurm restarted a job, by what it left."""
    prefix, suffix = f"{job_id}.restart", ".out"
    try:
        names = os.listdir(folder)
    except OSError:
        return 0
    left = [n for n in names if n.startswith(prefix) and n.endswith(suffix)]
    numbers = [n.removeprefix(prefix).removesuffix(suffix) for n in left]
    return max((int(n) for n in numbers if n.isdigit()), default=0)


def judge(run: str, folder: Path, steps: int, job: Job | None, job_id: int | None) -> Row:
    """What became of a run's last job, from it and the run folder. `job` None: Slurm knows none.

    What an earlier job, or a sweep without Slurm, left in the folder says nothing of this one."""
    step, step_s = progress(folder)
    status = artifacts.read_status(folder)
    says, why = status.get("state"), str(status.get("reason", ""))
    ran = ran_by(folder)
    if job_id is not None and ran != job_id and (folder / "run.json").exists():
        says, why, step, step_s = None, "", 0, None  # ours came to no run

    def row(state: str, line: str) -> Row:
        eta = max(0, steps - step) * step_s if state == "running" and step_s is not None else None
        return Row(run, state, job_id, step, steps, eta, " ".join(line.split())[:300])

    if job is not None and job.state in PENDING:
        return row("pending", f"Slurm: {job.state} {job.reason}")
    again = restarts(folder, job_id) if job_id is not None else 0
    if job is not None and job.state in ACTIVE:
        return row("running", f"Slurm: {job.state}" + (f", restart {again}" if again else ""))
    killed = job is not None and (job.state == "OUT_OF_MEMORY" or job.exit == "0:125")
    slurm_says = f"Slurm: {job.state} {job.exit}" if job is not None else ""
    if says == artifacts.COMPLETE and (folder / "RUN_COMPLETE.txt").exists():
        if killed and ran == job_id:
            return row("OOM", f"{slurm_says}, though RUN_COMPLETE.txt is there")
        return row("complete", "; ".join(filter(None, ("RUN_COMPLETE.txt", why))))
    if job_id is None and says is None:
        return row("missing", "never started")
    if killed:
        return row("OOM", slurm_says)
    if says == INTERRUPTED:  # and saved, which scancel's victim may have as well
        ended = "cancelled" if job is not None and job.state == "CANCELLED" else INTERRUPTED
        return row(ended, "; ".join(filter(None, (why, slurm_says))) or "status.json says so")
    if why.startswith("time limit"):
        return row("timeout", why)
    attempt = f"{job_id}.restart{again}" if again else f"{job_id}"
    text = tail(folder / f"{attempt}.out") if job_id is not None else ""
    seen = evidence(text, why)
    own = says == artifacts.FAILED and why and not artifacts.is_consequence(why)
    if own and not (job is not None and job.state == "NODE_FAIL"):
        # The run said why before Slurm ended what was left of it; of memory the log knows more.
        if seen and seen[0] in ("OOM", "node failure"):
            return row(*seen)
        ended = slurm_says if job is not None and job.state in ENDS else ""
        return row("failed", "; ".join(filter(None, (why, ended))))
    if job is not None and job.state in ENDS:
        return row(ENDS[job.state], slurm_says)
    if seen:
        return row(*seen)
    if says == artifacts.RUNNING and job_id is None:
        return row("running", "the run folder says so; no job of Slurm")
    if line := cause(text):
        return row("failed", line)
    if says == artifacts.FAILED and why:
        return row("failed", why)
    if says == artifacts.RUNNING and job is None and not (folder / f"{attempt}.exit").exists():
        return row("failed", f"Slurm no longer knows job {job_id}, which left no exit status")
    line = next(iter(COMPLAINT.findall(text)), "") or slurm_says or "no status and no log"
    return row("failed", line)


def with_result(row: Row, folder: Path) -> Row:
    """The row of a run whose folder holds an earlier job's complete result, where the last job came
    to none: the result is shown, with its own job, and the later one is told."""
    ran = ran_by(folder)
    if row.state not in FAILURES or row.job_id is None or ran == row.job_id:
        return row
    if not (folder / "run.json").exists():
        return row
    earlier = judge(row.run, folder, row.steps, recall(folder, ran) if ran else None, ran)
    if earlier.state != "complete":
        return row
    later = f"job {row.job_id}, after it: {row.state}: {row.line}"
    return replace(earlier, line=f"{earlier.line}; {later}")


def ran_by(folder: Path) -> int | None:
    """The job whose results are in the folder."""
    try:
        found = parse_json((folder / "run.json").read_text())["scheduler"].get("job_id")
        return None if found is None else int(found)
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None


def rows(study: Study, logs: Path) -> tuple[list[Row], bool]:
    """One row per run of the study, and whether a Slurm answered."""
    jobs = ask_slurm()
    known = jobs or {}
    comment = comment_of(study, logs)
    # A job that was submitted by hand and never started has left nothing in its folder.
    unseen: dict[str, list[int]] = {}
    for job in known.values():
        if job.comment == comment and job.folder == str(ROOT) and job.state != "COMPLETED":
            unseen.setdefault(job.name, []).append(job.job_id)
    found = []
    for name, spec in study.specs.items():
        folder = logs / study.name / name
        ids = artifacts.job_ids(folder)
        ids += [i for i in unseen.get(name, ()) if i > max(ids, default=0)]
        active = [i for i in ids if i in known and known[i].state in PENDING | ACTIVE]
        job_id = max(active or ids, default=None)
        job = None if job_id is None else known.get(job_id) or recall(folder, job_id)
        if jobs is None and job is None and job_id is not None:
            says = artifacts.read_status(folder).get("state")
            if says in (artifacts.RUNNING, None):
                step, _ = progress(folder)
                line = "no Slurm answers; it was submitted"
                found.append(Row(name, "unknown", job_id, step, spec.steps, None, line))
                continue
        row = judge(name, folder, spec.steps, job, job_id)
        if job is not None:
            with contextlib.suppress(OSError):  # another's logs, or a full disk: it is told anyway
                remember(folder, job, row, planned_text(study, name))
        found.append(with_result(row, folder))
    return found, jobs is not None
