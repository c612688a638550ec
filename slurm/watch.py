"""Keep the runs of studies going: what `python -m slurm.submit STUDY... --watch` does.

Once a round it asks squeue and sacct, submits what may start, and submits again what a retry can
mend. It keeps nothing in memory that counts: Slurm, the run folders and DIR/<study>/tries.csv say
where a study is, so it can be ended and started again at any time.
"""

import argparse
import contextlib
import fcntl
import os
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from datetime import datetime
from pathlib import Path
from typing import NamedTuple

from base.errors import UsageError, printable
from base.files import read_json_if_whole
from parallel.config.study import Study, load_study
from parallel.record import reader
from parallel.record.ends import RETRY_MENDS, Kind
from parallel.record.schema import utc_now
from parallel.record.writer import append_rows
from slurm import nodes, states, status
from slurm.render import ROOT, ask_of, cluster_of, job_of, seconds

TRIES = "tries.csv"  # beside the runs of a study
COLUMNS = ("time_utc", "run", "try", "job", "job_before", "state", "kind", "why")
UNDERWAY = ("pending", "running")
MOST_REFUSALS = 3  # of Slurm's commands, in rounds after one another


class Hours(NamedTuple):
    """GPU-hours of a study's jobs. lost: of `used`, those of jobs that ended without completing
    their run. reserved: what jobs that have not ended may still use. unknown: how many jobs count
    as their whole time limit, because nobody says how long they ran.
    """

    used: float
    lost: float
    reserved: float
    unknown: int


def hours_of(
    study: Study, logs: Path, rows: list[states.Row], jobs: dict[int, states.Job]
) -> Hours:
    """Of all jobs that the runs ever had. Without sacct a job that Slurm restarted counts from its
    last start."""
    used = lost = reserved = 0.0
    unknown = 0
    for row in rows:
        folder, place = logs / study.name / row.run, job_of(study, row.run)
        for job_id in {*reader.job_ids(folder), row.job_id} - {None}:
            job = jobs.get(job_id) or states.recall(folder, job_id)
            elapsed_s = job.elapsed_s if job else None
            if elapsed_s is None:
                elapsed_s, unknown = seconds(place.time), unknown + 1
            its = place.gpus * elapsed_s / 3600
            used += its
            if job and job.state in states.PENDING | states.ACTIVE:
                reserved += max(0.0, place.gpu_hours - its)
            elif (row.state, row.job_id) != ("complete", job_id):
                lost += its
    return Hours(used, lost, reserved, unknown)


def tries_of(folder: Path) -> int:
    """How often a run was started and failed; Slurm's own restarts count."""
    tries = 0
    for job_id in reader.job_ids(folder):
        ended = read_json_if_whole(folder / f"{job_id}.state")
        tries += states.restarts(folder, job_id) + (ended.get("verdict") != "")
    return tries


def why_not(study: Study, row: states.Row, folder: Path, job: states.Job | None) -> str:
    """Why a run that waits and runs nowhere is not submitted; empty where it may be."""
    if row.state in ("complete", "unknown", *UNDERWAY):
        return row.state
    preempted = job is not None and job.state == "PREEMPTED"
    if row.state == "cancelled" and not preempted:
        return "somebody cancelled it"
    mended = row.state in ("missing", states.INTERRUPTED) or preempted
    if not mended and row.kind not in RETRY_MENDS:
        return f"no retry mends this: {row.kind}"
    if row.kind == Kind.TIME_LIMIT and not study.specs[row.run].save_interval:
        return "its time limit ends each try: it has no save_interval"
    tries, restarts = tries_of(folder), ask_of(study, row.run).max_restarts
    return f"{tries} tries came to nothing (max_restarts {restarts})" if tries > restarts else ""


class Round(NamedTuple):
    """What Slurm and the run folders say at one time."""

    jobs: dict[int, states.Job]
    rows: dict[str, list[states.Row]]  # of each study, also of those that others wait for

    def underway(self, names: set[str]) -> int:
        rows = (row for name in names for row in self.rows[name])
        return sum(row.state in UNDERWAY and row.job_id is not None for row in rows)


class Watch:
    """Rounds over studies until nothing waits, runs or can be submitted. submit: slurm.submit's."""

    def __init__(self, studies: list[Study], arguments: argparse.Namespace, submit: Callable):
        self.studies, self.arguments, self.submit = studies, arguments, submit
        self.logs = ROOT / arguments.logs
        self.told: dict[tuple[str, str], str] = {}  # so that each line is printed once

    def tell(self, study: str, run: str, line: str) -> None:
        """Print a line about a run, or a study, with the time, unless it is the last one on it."""
        if self.told.get((study, run)) != line:
            self.told[study, run] = line
            about = "/".join(filter(None, (study, run)))
            print(printable(f"{datetime.now():%H:%M:%S} {about}: {line}"), flush=True)

    def until_the_end(self) -> int:
        """The exit status: 0 when every run is complete."""
        refusals = 0
        while True:
            try:
                with self.locked():
                    now = self.ask()
                    goes_on = now is None or self.submit_what_may_start(now)
                    refusals = 0
            except UsageError as error:  # sbatch, say, while Slurm's controller starts again
                refusals += 1
                if refusals == MOST_REFUSALS:
                    raise
                self.tell("slurm", "", f"{error}; tried again in {self.arguments.every:g} s")
                goes_on = True
            if not goes_on:
                return self.finish(now)
            time.sleep(self.arguments.every)

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """No other submit of these studies at the same time."""
        with contextlib.ExitStack() as stack:
            for study in sorted(self.studies, key=lambda study: study.name):
                lock = stack.enter_context((self.logs / study.name / ".submit.lock").open("w"))
                fcntl.flock(lock, fcntl.LOCK_EX)
            yield

    def ask(self) -> Round | None:
        """The state of every run; None while no Slurm answers."""
        jobs = states.ask_slurm(queue_needed=True)
        if jobs is None:
            self.tell("slurm", "", f"{states.no_answer().partition(' (')[0]}; waiting for it")
            return None
        self.told.pop(("slurm", ""), None)
        wanted = {study.name: study for study in self.studies}
        for study in self.studies:
            for name in study.runs:
                if (after := ask_of(study, name).after) and after not in wanted:
                    wanted[after] = beside(study, after, self.arguments.cluster)
        rows = {name: states.rows(study, self.logs, jobs) for name, study in wanted.items()}
        for study in self.studies:
            nodes.update(study, self.logs, rows[study.name])
        return Round(jobs, rows)

    def submit_what_may_start(self, now: Round) -> bool:
        """Submit what may start. Whether anything was submitted, waits or runs."""
        most, conditions = self.arguments.at_most or sys.maxsize, {}
        active, any_submitted = now.underway({study.name for study in self.studies}), False
        for study in self.studies:
            rows = now.rows[study.name]
            hours = hours_of(study, self.logs, rows, now.jobs)
            budget, reserved = self.arguments.budget_gpu_hours, hours.used + hours.reserved
            if budget is None:
                budget = min(ask_of(study, name).budget_gpu_hours for name in study.runs)
            for row in rows:
                folder = self.logs / study.name / row.run
                line = why_not(study, row, folder, now.jobs.get(row.job_id))
                if line and row.state in ("complete", *UNDERWAY):
                    self.tell(study.name, row.run, f"{line} (job {row.job})")
                elif line:
                    self.tell(study.name, row.run, f"{row.state}, left so: {line}: {row.line}")
                elif line := gate(study, row.run, now.rows, conditions):
                    self.tell(study.name, row.run, line)
                elif reserved + (cost := job_of(study, row.run).gpu_hours) > budget:
                    line = f"it may cost {cost:.2f} {cluster_of(study).hours}, and {reserved:.2f}"
                    line += f" of {budget:g} are used or asked for"
                    self.tell(study.name, row.run, f"not submitted: {line}")
                elif active < most:
                    self.start(study, row)
                    active, reserved, any_submitted = active + 1, reserved + cost, True
        counts = Counter(row.state for study in self.studies for row in now.rows[study.name])
        self.tell("runs", "", ", ".join(f"{n} {state}" for state, n in counts.most_common()))
        return any_submitted or now.underway(set(now.rows)) > 0

    def start(self, study: Study, row: states.Row) -> None:
        """Submit a run, print why, and write it down."""
        ((_, job),) = self.submit(study, [row.run], self.arguments.logs)
        folder = self.logs / study.name
        number = tries_of(folder / row.run)
        # The new job has no end yet, and counts as a try that came to nothing until it has one.
        self.tell(study.name, row.run, f"submitted: job {job}, try {number}, after {row.line}")
        before = "" if row.state == "missing" else row.job
        values = (utc_now(), row.run, number, job, before, row.state, row.kind, row.line)
        append_rows(folder / TRIES, COLUMNS, [dict(zip(COLUMNS, values, strict=True))])

    def finish(self, now: Round) -> int:
        """Print the table of each study and what it cost."""
        for study in self.studies:
            rows = now.rows[study.name]
            print("\n".join(["", f"{study.name}:", *status.table(rows)]))
            hours = hours_of(study, self.logs, rows, now.jobs)
            line = f"{hours.used:.3f} {cluster_of(study).hours} used, {hours.lost:.3f} of them lost"
            if hours.unknown:
                line += f" ({hours.unknown} jobs count as their time limit: nobody says their time)"
            print(line)
        return int(any(r.state != "complete" for s in self.studies for r in now.rows[s.name]))


def beside(study: Study, name: str, cluster: str | None) -> Study:
    """The study that another one names in `after`. Raises: UsageError: it cannot be read."""
    return load_study(study.path.with_name(f"{name}.toml"), cluster)


def gate(
    study: Study, run: str, rows: dict[str, list[states.Row]], conditions: dict[str, int]
) -> str:
    """Why a run may not start yet, from `after` and `only_if`; empty where it may. conditions: the
    exit status of each command that was asked already."""
    ask = ask_of(study, run)
    if ask.after:
        done = Counter(row.state for row in rows[ask.after])["complete"]
        if done < len(rows[ask.after]):
            return f"waits for {ask.after}: {done} of {len(rows[ask.after])} runs are complete"
    if ask.only_if and ask.only_if not in conditions:
        ours = {"PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])}
        options = {"shell": True, "cwd": ROOT, "env": os.environ | ours, "capture_output": True}
        conditions[ask.only_if] = subprocess.run(ask.only_if, **options).returncode
    if ask.only_if and (code := conditions[ask.only_if]):
        return f"not submitted: only_if ended with status {code}: {ask.only_if}"
    return ""
