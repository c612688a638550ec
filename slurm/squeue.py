"""What Slurm says of jobs: squeue and, where there is accounting, sacct, each asked once for all
jobs of this user on a cluster; and how every other command of Slurm is called.
"""

import contextlib
import os
import shutil
import subprocess
from collections.abc import Iterable
from dataclasses import dataclass, replace

from base.errors import UsageError
from parallel.config.study import Study
from slurm.render import ROOT, seconds

PENDING = {"PENDING", "CONFIGURING", "REQUEUED", "REQUEUE_HOLD", "REQUEUE_FED", "RESV_DEL_HOLD"}
PENDING |= {"SPECIAL_EXIT"}
ACTIVE = {"RUNNING", "COMPLETING", "SUSPENDED", "STOPPED", "SIGNALING", "STAGE_OUT", "RESIZING"}
# Why a job waits that starts only after somebody has changed it, or Slurm's configuration.
UNMET = "DependencyNeverSatisfied"
NEVER_STARTS = {UNMET, "BadConstraints", "PartitionConfig"}
NEVER_STARTS |= {"PartitionNodeLimit", "PartitionTimeLimit", "InvalidAccount", "InvalidQOS"}
NEVER_STARTS |= {"AccountNotAllowed", "QOSNotAllowed", "ReservationDeleted"}


@dataclass(frozen=True)
class Job:
    """A job in Slurm's words. exit: its own status and the signal that ended it, as in 0:125.

    elapsed_s: how long it has held its nodes; None where Slurm did not say.
    """

    job_id: int
    state: str
    exit: str = ""
    reason: str = ""
    name: str = ""
    comment: str = ""
    folder: str = ""
    elapsed_s: int | None = None

    @property
    def never_starts(self) -> bool:
        """Returns whether the job waits for a change that somebody has to make."""
        return self.state in PENDING and self.reason in NEVER_STARTS

    @property
    def waited_in_vain(self) -> bool:
        """Returns whether Slurm cancelled the job since one that it waited for had failed."""
        return self.state == "CANCELLED" and self.reason == UNMET

    @property
    def says(self) -> str:
        """Returns what Slurm says of the job in one line; "" where it knows no state."""
        words = f"Slurm: {self.state} {self.exit}" if self.state else ""
        if self.exit.endswith(":53"):  # slurmd's own number
            words += f": its log could not be opened: the node must be able to write {self.folder}"
        return words


def environment() -> dict[str, str]:
    """Returns the environment of Slurm's commands, without the variables of a job that we may be
    in."""
    return {
        name: value
        for name, value in os.environ.items()
        if not name.startswith("SLURM_") or name == "SLURM_CONF"
    }


def run(command: list[str], text: str = "", cluster: str = "") -> str:
    """Returns what one of Slurm's commands prints, given `text` as input, about another `cluster`
    than its own if one is named; raises UsageError where it is absent, refuses, or does not answer
    within a minute."""
    if cluster:
        command = [command[0], f"--clusters={cluster}", *command[1:]]
    options = {"env": environment(), "input": text, "cwd": ROOT, "timeout": 60}
    try:
        done = subprocess.run(command, capture_output=True, text=True, **options)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise UsageError(f"{command[0]}: {error}") from error
    if done.returncode:
        words = " ".join(done.stderr.split()).replace(f"{command[0]}: ", "")  # before each line
        raise UsageError(f"{command[0]}: {words}")
    return done.stdout


def try_run(command: list[str], cluster: str = "") -> str | None:
    """Returns what a Slurm command prints; None where it is absent or fails."""
    try:
        return run(command, cluster=cluster)
    except UsageError:
        return None


QUEUE = ("JobID", "State", "exit_code", "Reason", "Name", "Comment", "WorkDir", "TimeUsed")
ACCOUNTS = ("JobIDRaw", "State", "ExitCode", "Reason", "JobName", "Comment", "WorkDir", "Elapsed")


def jobs_of(studies: Iterable[Study]) -> dict[str, dict[int, Job]]:
    """Returns what `all_jobs` says of the Slurm cluster of each study, by the study's name. Each
    cluster is asked once: two may have jobs of the same number."""
    clusters = {s.name: s.cluster.slurm_cluster if s.cluster else "" for s in studies}
    jobs = {cluster: all_jobs(cluster) for cluster in set(clusters.values())}
    return {study: jobs[cluster] for study, cluster in clusters.items()}


def all_jobs(cluster: str = "") -> dict[int, Job]:
    """Returns every job of this user that Slurm knows, by id.

    squeue knows those that wait, run or ended lately, sacct those that ended within a month; it
    knows late of jobs that were just submitted. UsageError: squeue does not answer.
    """
    wanted = ",".join(f"{column}:|" for column in QUEUE)
    try:
        asked = ["squeue", "--noheader", "--me", "--states=all", f"--Format={wanted}"]
        queue = run(asked, cluster=cluster)
    except UsageError as error:
        hint = "; python -m tests.tools.testbed up starts one here"
        hint = "" if shutil.which("squeue") else hint
        raise UsageError(f"no Slurm answers ({error}{hint})") from error
    asked = ["sacct", "-XDnP", "--starttime=now-30days", f"--format={','.join(ACCOUNTS)}"]
    jobs = parse(try_run(asked, cluster) or "")
    for job in parse(queue).values():  # squeue is the fresher
        earlier_s = jobs.get(job.job_id, job).elapsed_s  # of all restarts
        jobs[job.job_id] = replace(job, elapsed_s=max(job.elapsed_s or 0, earlier_s or 0))
    return jobs


def parse(text: str) -> dict[int, Job]:
    """Reads jobs from lines of |-separated columns; a line that is none is skipped."""
    jobs: dict[int, Job] = {}
    for line in text.splitlines():
        number, *columns = (column.strip() for column in line.split("|"))
        if not number.isdigit() or len(columns) < 7:
            continue
        job_id, (state, status, reason, name, comment, folder, time) = int(number), columns[:7]
        if status.isdigit():  # squeue's, as wait() gives it
            status = f"{int(status) >> 8}:{int(status) & 127}"
        elapsed_s = None
        with contextlib.suppress(UsageError):  # squeue may print N/A
            elapsed_s = seconds(time)
            if job_id in jobs:  # sacct has a line for each restart
                elapsed_s += jobs[job_id].elapsed_s or 0
        state = state.partition(" ")[0]
        jobs[job_id] = Job(
            job_id,
            state,
            exit=status,
            reason=reason,
            name=name,
            comment=comment,
            folder=folder,
            elapsed_s=elapsed_s,
        )
    return jobs


def active(ids: Iterable[int], jobs: dict[int, Job]) -> list[int]:
    """Returns the ids whose jobs wait or run."""
    return [i for i in ids if i in jobs and jobs[i].state in PENDING | ACTIVE]
