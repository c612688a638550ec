"""A stand-in for Slurm's commands in this process: they answer from `jobs` and `nodes`, and note
what they were given."""

import os
from dataclasses import dataclass

from base.errors import UsageError
from slurm import squeue


@dataclass
class FakeJob:
    """A job as squeue lists it. excluded: the nodes that it leaves out."""

    state: str
    name: str
    comment: str = ""
    reason: str = "None"
    folder: str = str(squeue.ROOT)
    excluded: str = ""


class FakeSlurm:
    """nodes: their states by name. hidden: jobs that squeue does not list. started: jobs that
    begin after squeue has listed them. accounts: what sbatch's environment names."""

    def __init__(self, monkeypatch):
        self.jobs: dict[int, FakeJob] = {}
        self.nodes = {f"node{n}": "idle" for n in range(1, 5)}
        self.hidden: set[int] = set()
        self.started: set[int] = set()
        self.calls: list[list[str]] = []
        self.scripts: list[str] = []
        self.accounts: list[str | None] = []
        self.first = 90001  # of the jobs that sbatch makes
        monkeypatch.setattr(squeue, "run", self.answer)

    def answer(self, command: list[str], text: str = "", cluster: str = "") -> str:
        self.calls.append([*command, f"--clusters={cluster}"] if cluster else command)
        return getattr(self, command[0])(command, text) or ""

    def given(self, name: str) -> list[list[str]]:
        """The arguments of each call of a command."""
        return [arguments for command, *arguments in self.calls if command == name]

    def squeue(self, command: list[str], text: str) -> str:
        listed = {n: job for n, job in self.jobs.items() if n not in self.hidden}
        if "--format=%i|%x" in command:
            waiting = {n: job for n, job in listed.items() if job.state == "PENDING"}
            return "".join(f"{n}|{job.excluded}\n" for n, job in waiting.items())
        return "".join(
            f"{n}|{job.state}|0|{job.reason}|{job.name}|{job.comment}|{job.folder}|30:00|\n"
            for n, job in listed.items()
        )

    def sacct(self, command: list[str], text: str) -> str:
        raise UsageError("sacct: Slurm accounting storage is disabled")

    def sbatch(self, command: list[str], text: str) -> str:
        words = (line[10:].partition("=") for line in text.splitlines() if "#SBATCH" in line)
        options = {name: value for name, _, value in words}
        self.scripts.append(text)
        self.accounts.append(os.environ.get("SBATCH_ACCOUNT"))
        number = max([self.first - 1, *self.jobs]) + 1
        self.jobs[number] = FakeJob("PENDING", options["job-name"], options["comment"])
        return f"{number}\n"

    def scancel(self, command: list[str], text: str) -> None:
        for number in command[1:]:
            self.jobs[int(number)].state = "CANCELLED"

    def sinfo(self, command: list[str], text: str) -> str:
        return "".join(f"{name}|test*|{state}|(null)\n" for name, state in self.nodes.items())

    def scontrol(self, command: list[str], text: str) -> None:
        job, names = (word.partition("=")[2] for word in command[2:])  # of update
        if int(job) in self.started:
            raise UsageError(f"scontrol: Job is no longer pending execution for job {job}")
        self.jobs[int(job)].excluded = names
