"""Submit the runs of studies: `slurm.submit STUDY` is one round, `--watch` keeps them going.

Once a round it asks squeue and sacct, submits what may start, and submits again what a retry can
mend. It keeps nothing in memory that counts: Slurm, the run folders and DIR/<study>/tries.csv say
where a study is, so it can be ended and started again at any time.
"""

import argparse
import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterable
from datetime import datetime
from pathlib import Path
from typing import NamedTuple

from base.errors import UsageError, printable
from parallel.config.study import Study
from parallel.record import reader
from parallel.record.ends import RETRY_MENDS, Kind
from parallel.record.schema import utc_now
from parallel.record.writer import append_rows
from slurm import nodes, sbatch, squeue, states, status
from slurm.render import ROOT, ask_of, cluster_of, job_of, load, seconds

TRIES = "tries.csv"  # beside the runs of a study
UNDERWAY = ("pending", "running", "unknown")
WAITS = ("None", "Priority", "Resources", "Dependency", "BeginTime")  # as any job may
MOST_REFUSALS = 10
ONLY_IF_S = 60.0  # as any command of Slurm has


class Hours(NamedTuple):
    """The GPU-hours of a study's jobs.

    `lost` are the part of `used` of jobs that ended without completing their run; `reserved` is
    what jobs that have not ended may still use; `unknown` counts the jobs that count as their whole
    time limit, because nobody says how long they ran.
    """

    used: float
    lost: float
    reserved: float
    unknown: int


def tries_of(folder: Path) -> int:
    """Counts how often a run was started and failed; Slurm's own restarts count."""
    tries = 0
    for job_id in reader.job_ids(folder):
        ended = reader.read_job_end(folder, job_id)
        tries += states.restarts(folder, job_id) + (ended.get("verdict") != "")
    return tries


def advances(folder: Path) -> int:
    """Counts how often a run was started and saved a later step than any before."""
    starts = 0
    for path in (folder, *folder.glob("attempts/*")):
        newest, is_new = 0, True
        with contextlib.suppress(UsageError):  # a damaged file says nothing
            for row in reader.read_checkpoints(path):
                is_new = is_new or row["event"] == "load"
                if row["event"] == "save" and not row["problem"] and (row["step"] or 0) > newest:
                    newest, starts, is_new = row["step"], starts + is_new, False
    return starts


def why_not(study: Study, row: states.Row, folder: Path, job: squeue.Job | None) -> str:
    """Returns why a run that is missing or has failed is not submitted, or "" where it may be."""
    preempted = job is not None and job.state == "PREEMPTED"
    if row.state == "cancelled" and not preempted:
        return "somebody cancelled it"
    mended = row.state in ("missing", states.INTERRUPTED) or preempted
    if not mended and row.kind not in RETRY_MENDS:
        return f"no retry mends this: {row.kind}"
    if row.kind == Kind.TIME_LIMIT and not study.specs[row.run].save_interval:
        return "its time limit ends each try: it has no save_interval"
    tries = tries_of(folder) - advances(folder)
    restarts = ask_of(study, row.run).max_restarts
    return f"{tries} tries came to nothing (max_restarts {restarts})" if tries > restarts else ""


def awaited(studies: list[Study], cluster: str | None) -> dict[str, Study]:
    """Returns the studies and those that they wait for (`after`), by name."""
    by_name = {study.name: study for study in studies}
    for study in studies:
        for name in {ask_of(study, run).after for run in study.runs} - {""}:
            if name == study.name:
                raise UsageError(f"{study.path}: `after` names the study itself")
            if name not in by_name:
                by_name[name] = load(study.path.with_name(f"{name}.toml"), cluster)
    return by_name


def _how_failed(command: str) -> str:
    """Returns how the shell command of `only_if` failed; "" where it succeeded. Other studies wait
    meanwhile, so it has a minute."""
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    with tempfile.TemporaryFile() as printed:
        process = subprocess.Popen(
            command,
            shell=True,
            cwd=ROOT,
            env=os.environ | {"PATH": path},
            stdin=subprocess.DEVNULL,
            stdout=printed,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            if process.wait(ONLY_IF_S) == 0:
                return ""
            failure = f"ended with status {process.returncode}"
        except subprocess.TimeoutExpired:
            failure = f"did not end within {ONLY_IF_S:g} s"
        finally:
            if process.returncode is None:  # the shell and what it has started
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        printed.seek(0)
        words = " ".join(printed.read().decode(errors="replace").split())[-200:]
    return f"only_if {failure}: {command}" + (f": {words}" if words else "")


class Watch:
    """Rounds over studies until nothing waits, runs or can be submitted.

    jobs, rows: what Slurm and the run folders said last, by study; also of those that others wait
    for.
    conditions: of each `only_if` that was asked in this round, how it failed.
    """

    def __init__(self, studies: list[Study], arguments: argparse.Namespace):
        self.studies, self.arguments = studies, arguments
        self.logs = ROOT / arguments.logs
        self.awaited = awaited(studies, arguments.cluster)
        self.jobs: dict[str, dict[int, squeue.Job]] = {}
        self.rows: dict[str, list[states.Row]] = {}  # of studies, by name
        self.conditions: dict[str, str] = {}
        self.printed: dict[str, str] = {}

    def tell(self, about: str, line: str) -> None:
        """Prints a line with the time, unless it is the last one about this."""
        if self.printed.get(about) != line:
            self.printed[about] = line
            print(printable(f"{datetime.now():%H:%M:%S} {about}: {line}"), flush=True)

    def until_the_end(self) -> int:
        """Returns the exit status, 0 when every run is complete. When sbatch has refused
        MOST_REFUSALS times in a row while nothing waited or ran, its refusal ends the watch."""
        refusals = 0
        while True:
            answers = False
            try:
                with states.locked(self.studies, self.logs):
                    for line in self.ask():
                        self.tell(*line.rsplit(": ", 1))
                    answers = True
                    if not self.submit_what_may_start():
                        return self.finish()
                refusals = 0
                self.printed.pop("slurm", None)
            except UsageError as error:  # Slurm's controller is away, or takes no more jobs now
                refusals = refusals + 1 if answers and not self.underway(self.rows) else 0
                if refusals == MOST_REFUSALS:
                    raise
                self.tell("slurm", f"{error}; tried again every {self.arguments.every:g} s")
            time.sleep(self.arguments.every)

    def ask(self) -> list[str]:
        """Asks for the state of every run; returns a line for each damaged file that nodes are
        judged by."""
        self.jobs, self.conditions = squeue.jobs_of(self.awaited.values()), {}
        self.rows = {
            name: states.rows(study, self.logs, self.jobs[name])
            for name, study in self.awaited.items()
        }
        return [
            line
            for study in self.studies
            for line in nodes.update(study, self.logs, self.rows[study.name])
        ]

    def gate(self, study: Study, run: str) -> str:
        """Returns why a run may not start yet, or "": it waits for a run of its study, or for
        another study (`after`), or its `only_if` fails."""
        if waits := self.incomplete(study, run):
            return f"waits for {', '.join(f'{row.run} ({row.state})' for row in waits)}"
        return self.gate_of_studies(study, run)

    def incomplete(self, study: Study, run: str) -> list[states.Row]:
        """Returns the rows of the runs that a run waits for and that are not complete."""
        awaited = study.runs[run].after
        rows = self.rows[study.name]
        return [row for row in rows if row.run in awaited and row.state != "complete"]

    def gate_of_studies(self, study: Study, run: str) -> str:
        """Returns why another study, or `only_if`, keeps a run from starting, or ""."""
        ask = ask_of(study, run)
        if ask.after:
            rows = self.rows[ask.after]
            done = sum(row.state == "complete" for row in rows)
            if done < len(rows):
                return f"waits for {ask.after}: {done} of {len(rows)} runs are complete"
        if ask.only_if and ask.only_if not in self.conditions:
            self.conditions[ask.only_if] = _how_failed(ask.only_if)
        return self.conditions.get(ask.only_if, "")

    def underway(self, names: Iterable[str]) -> int:
        """Counts the jobs of these studies that run, or wait and may start."""
        rows = ((self.jobs[name].get(row.job_id), row) for name in names for row in self.rows[name])
        return sum(
            row.state in UNDERWAY
            and row.job_id is not None
            and not (job is not None and job.never_starts)
            for job, row in rows
        )

    def hours(self, study: Study) -> Hours:
        """Adds up the hours of all jobs that the runs ever had. Without sacct a job that Slurm
        restarted counts from its last start."""
        used = lost = reserved = 0.0
        unknown = 0
        for row in self.rows[study.name]:
            folder, place = self.logs / study.name / row.run, job_of(study, row.run)
            for job_id in {*reader.job_ids(folder), row.job_id} - {None}:
                job = self.jobs[study.name].get(job_id) or states.recall(folder, job_id)
                elapsed_s = job.elapsed_s if job else None
                if elapsed_s is None:
                    elapsed_s, unknown = seconds(place.ask.time), unknown + 1
                gpu_hours = place.gpus * elapsed_s / 3600
                used += gpu_hours
                if job and job.state in squeue.PENDING | squeue.ACTIVE:
                    reserved += max(0.0, place.gpu_hours - gpu_hours)
                elif (row.state, row.job_id) != ("complete", job_id):
                    lost += gpu_hours
        return Hours(used, lost, reserved, unknown)

    def submit_what_may_start(self) -> bool:
        """Submits what may start; returns whether anything was submitted, waits or runs."""
        refused: dict[str, UsageError] = {}
        free = (self.arguments.at_most or sys.maxsize) - self.underway(s.name for s in self.studies)
        any_submitted = False
        for study in self.studies:
            hours = self.hours(study)
            budget, reserved = self.arguments.budget_gpu_hours, hours.used + hours.reserved
            if budget is None:
                budget = min(ask_of(study, run).budget_gpu_hours for run in study.runs)
            for row in self.rows[study.name]:
                line, cost = self.why_not_now(study, row), job_of(study, row.run).gpu_hours
                if not line and reserved + cost > budget:
                    line = f"not submitted: it may cost {cost:.2f} {cluster_of(study).hours}, and"
                    line += f" {reserved:.2f} of {budget:g} are used or asked for"
                elif not line and free > 0 and study.name not in refused:
                    try:
                        line = self.start(study, row)
                        free, reserved, any_submitted = free - 1, reserved + cost, True
                    except UsageError as error:  # another study's runs may be taken
                        refused[study.name] = error
                if line:
                    self.tell(f"{study.name}/{row.run}", line)
        counts = Counter(row.state for study in self.studies for row in self.rows[study.name])
        self.tell("runs", ", ".join(f"{n} {state}" for state, n in counts.most_common()))
        if refused:
            raise UsageError("; ".join(map(str, refused.values())))
        return any_submitted or self.underway(self.rows) > 0

    def why_not_now(self, study: Study, row: states.Row) -> str:
        """Returns why a run is not to be submitted in this round, or "" where it may be."""
        job = self.jobs[study.name].get(row.job_id)
        if row.state in ("complete", *UNDERWAY):
            line = f"{row.state} (job {row.job})"
            waits = job is not None and job.state in squeue.PENDING and job.reason not in WAITS
            return f"{line}: {row.line}" if waits or row.state == "unknown" else line
        if reason := why_not(study, row, self.logs / study.name / row.run, job):
            return f"{row.state}, left so: {reason}: {row.line}"
        return self.gate(study, row.run)

    def start(self, study: Study, row: states.Row) -> str:
        """Submits a run, writes the try down, and returns a line with its job and the reason."""
        job = sbatch.submit(study, row.run, self.arguments.logs)
        folder = self.logs / study.name
        # The new job has no end yet, and counts as a try that came to nothing until it has one.
        number = tries_of(folder / row.run)
        earlier_job = "" if row.state == "missing" else row.job
        line = {"time_utc": utc_now(), "run": row.run, "try": number, "job": job}
        line |= {"job_before": earlier_job, "state": row.state, "kind": row.kind, "why": row.line}
        append_rows(folder / TRIES, line, [line])
        return f"submitted: job {job}, try {number}, after {row.line}"

    def finish(self) -> int:
        """Prints the table of each study and what it cost; returns 0 when every run is complete."""
        complete = True
        for study in self.studies:
            rows = self.rows[study.name]
            complete = complete and all(row.state == "complete" for row in rows)
            print("\n".join(["", f"{study.name}:", *status.table(rows)]))
            for row in (row for row in rows if row.state == "missing"):
                reason = self.printed.get(f"{study.name}/{row.run}", row.line)
                reason = reason.removeprefix("not submitted: ")
                print(printable(f"{row.run} was not submitted: {reason}"))
            hours = self.hours(study)
            line = f"{hours.used:.3f} {cluster_of(study).hours} used, {hours.lost:.3f} of them lost"
            if hours.unknown:
                line += f" ({hours.unknown} jobs count as their time limit: nobody says their time)"
            print(line)
        return int(not complete)
