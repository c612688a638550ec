"""Whether `slurm.submit --watch` brings a study to its end while nodes, ranks and Slurm fail.

    python -m tests.tools.chaos --data data/stdlib [--runs 40] [--seed 0] [--out DIR]

It starts the local Slurm of four nodes with accounting (tests/tools/testbed.py), trains one run
undisturbed, then a study of equal runs (two ranks, preset tiny) under --watch, and one more run
that has too little memory. Meanwhile it sets nodes down, kills ranks, stops ranks, which then hang,
cancels jobs, restarts slurmctld, and kills the watch and starts it again; the seed draws in which
order and whom. The table says how the runs ended, whether a run ever went on from an older
checkpoint than its newest, whether losses equal the undisturbed run's, and what --watch and sacct
say of the hours. The exit status is 1 where something is not as it should be.
"""

import csv
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

import psutil

from analysis.logs.load import load
from analysis.runs import gpu_hours
from base.bounds import check_flags
from base.errors import Parser, UsageError, command_line
from base.files import ROOT
from parallel.config.study import Study, load_study
from slurm import squeue, states
from tests.tools import testbed

NODES = 4
STUDY = """question = "Does every run come to its end?"
cluster = "local-test"
[slurm]
memory = "1900M"
time = "00:10:00"
max_restarts = 10
[defaults]
engine = "ddp"
gpus = 2
preset = "tiny"
max_seq_len = 16
device = "cpu"
threads = 1
data = "{data}"
steps = {steps}
save_interval = {save}
hang_s = 20
timeout_s = 60
eval_steps = 0
log_interval = 50
[[sweep]]
repeats = {runs}
"""
TOO_SMALL = """[[sweep]]
defaults = { label = "memory" }
slurm = { memory = "150M" }
"""


class Chaos:
    """A study under --watch, and what disturbs it."""

    def __init__(self, folder: Path, data: Path, runs: int, steps: int, save: int, seed: int):
        self.cluster, self.logs, self.draw = folder / "slurm", folder / "logs", random.Random(seed)
        text = {"data": data, "steps": steps, "save": save}
        (folder / "calm.toml").write_text(STUDY.format(runs=2, **text))
        (folder / "chaos.toml").write_text(STUDY.format(runs=runs, **text) + TOO_SMALL)
        self.calm, self.study = load_study(folder / "calm.toml"), load_study(folder / "chaos.toml")
        shares = {self.node_down: 5, self.rank_killed: 5, self.rank_stopped: 8}
        shares |= {self.cancelled: 10, self.slurmctld_restarted: 20, self.watch_killed: 20}
        self.events = [do for do, share in shares.items() for _ in range(max(1, runs // share))]
        self.draw.shuffle(self.events)
        self.counts: Counter[str] = Counter()
        self.printed = folder / "watch.txt"

    def watch(self, study: Study) -> subprocess.Popen:
        """Start --watch of a study."""
        flags = ["--watch", "--logs", str(self.logs), "--at-most", "8", "--every", "3"]
        command = [sys.executable, "-m", "slurm.submit", str(study.path), *flags]
        with self.printed.open("a") as file:
            return subprocess.Popen(command, stdout=file, stderr=subprocess.STDOUT, cwd=ROOT)

    def undisturbed(self) -> None:
        """Train what the disturbed runs are compared with."""
        if status := self.watch(self.calm).wait():
            raise UsageError(f"undisturbed runs ended with {status}: {self.printed.read_text()}")

    def disturbed(self, every_s: float, limit_s: float) -> float:
        """Watch the study to its end, with an event every few seconds; the seconds it took."""
        began, self.process = time.monotonic(), self.watch(self.study)
        while self.process.poll() is None:
            time.sleep(every_s)
            if time.monotonic() - began > limit_s:
                self.process.kill()
                raise UsageError(f"no end in {limit_s:g} s: {self.printed.read_text()[-3000:]}")
            if self.events and self.events[0]():
                self.counts[self.events.pop(0).__name__] += 1
        return time.monotonic() - began

    # Each event returns whether it found what it disturbs.

    def ranks(self) -> list[psutil.Process]:
        """The ranks that train, some early and some late: their run has written so many steps."""
        ranks, least = [], self.draw.choice((1, 8, 20))
        for process in testbed.of_cluster(self.cluster):
            variables = process.info["environ"]
            if "RANK" in variables:
                folder = self.logs / self.study.name / variables["SLURM_JOB_NAME"]
                job = read(folder / "run.json").get("scheduler", {}).get("job_id")
                rows = folder / "steps.csv"
                if job == variables["SLURM_JOB_ID"] and rows.exists():
                    ranks += [process] if rows.read_text().count("\n") > least else []
        return sorted(ranks, key=lambda process: process.pid)

    def rank(self, number: int) -> bool:
        ranks = self.ranks()
        testbed.send(number, [self.draw.choice(ranks)] if ranks else [])
        return bool(ranks)

    def rank_killed(self) -> bool:
        return self.rank(signal.SIGKILL)

    def rank_stopped(self) -> bool:
        return self.rank(signal.SIGSTOP)

    def node_down(self) -> bool:
        """A node that runs something goes down, and comes back."""
        ranks = self.ranks()
        if not ranks:
            return False
        node = self.draw.choice(ranks).info["environ"]["SLURMD_NODENAME"]
        update = ["scontrol", "update", f"nodename={node}"]
        squeue.try_run([*update, "state=down", "reason=chaos"])
        time.sleep(6)  # its tasks end
        squeue.try_run([*update, "state=resume"])
        return True

    def cancelled(self) -> bool:
        ranks = self.ranks()
        if ranks:
            squeue.try_run(["scancel", self.draw.choice(ranks).info["environ"]["SLURM_JOB_ID"]])
        return bool(ranks)

    def slurmctld_restarted(self) -> bool:
        testbed.end([testbed.daemon(self.cluster / "slurmctld.pid")])
        time.sleep(8)
        testbed.start(["slurmctld"], self.cluster / "slurm.conf")
        return True

    def watch_killed(self) -> bool:
        self.process.kill()
        self.process.wait()
        self.process = self.watch(self.study)
        return True

    # --- what came of it ---

    def result(self, took_s: float) -> tuple[list[tuple[str, str]], list[str]]:
        """(the rows of the table, what is not as it should be)."""
        jobs = squeue.all_jobs()
        rows = states.rows(self.study, self.logs, jobs)
        wrong, ends = [], Counter()
        (calm, _) = (self.losses(self.calm, name) for name in self.calm.runs)
        equal = loads = repeated = 0
        for row in rows:
            folder = self.logs / self.study.name / row.run
            losses = self.losses(self.study, row.run)
            ends[row.state] += 1
            if row.state == "complete":
                same = set(losses) == set(calm)  # of steps that were done again, too
                equal += same
                wrong += [] if same else [f"{row.run}: other losses than undisturbed"]
            elif row.state not in ("cancelled", "OOM"):  # no retry mends these two
                wrong.append(f"{row.run}: {row.state}: {row.line}")
            repeated += len(losses) - len({step for step, _ in losses})
            for saved, loaded in resumed(folder):
                loads += 1
                if loaded < saved:
                    wrong.append(f"{row.run}: saved step {saved}, went on from {loaded}")
        used, lost = self.sacct(rows)
        printed = re.findall(r"([\d.]+) rank-hours used, ([\d.]+) of them lost", self.text())[-1]
        if [f"{used:.3f}", f"{lost:.3f}"] != list(printed):
            wrong.append(f"sacct: {used:.3f} hours used, {lost:.3f} lost; --watch: {printed}")
        runs, _ = gpu_hours.table(load([self.logs / self.study.name]).content).content
        split = runs.rows[-1]
        if abs(sum(split[part] for part in gpu_hours.PARTS) - used) > 0.01 * used:
            wrong.append(f"sacct: {used:.3f} hours used; analysis.goodput: {split}")
        with (self.logs / self.study.name / "tries.csv").open() as file:
            tries = list(csv.DictReader(file))
        kinds = Counter(row["kind"] for row in tries if row["job_before"])
        told = ", ".join
        events = {name.replace("_", " "): n for name, n in sorted(self.counts.items())}
        table = [
            ("runs", str(len(rows))),
            ("disturbed by", told(f"{n} x {name}" for name, n in events.items())),
            ("jobs submitted", str(len(tries))),
            ("submitted again after", told(f"{n} x {kind}" for kind, n in kinds.most_common())),
            ("ended", told(f"{n} {state}" for state, n in ends.most_common())),
            (
                "complete runs whose losses equal the undisturbed run's",
                f"{equal} of {ends['complete']}",
            ),
            (
                "resumed from a checkpoint, never from an older one than the newest",
                f"{loads} times",
            ),
            ("steps done again", str(repeated)),
            ("rank-hours used, by --watch and by sacct", f"{printed[0]}, {used:.3f}"),
            ("of them lost, by --watch and by sacct", f"{printed[1]}, {lost:.3f}"),
            (
                "rank-hours by analysis.goodput",
                told(f"{part} {split[part]:.3f}" for part in gpu_hours.PARTS),
            ),
            ("minutes", f"{took_s / 60:.1f}"),
        ]
        return table, wrong

    def text(self) -> str:
        return self.printed.read_text()

    def losses(self, study: Study, run: str) -> list[tuple[str, str]]:
        """(step, loss) of every row, also of steps that were done again."""
        rows = written(self.logs / study.name / run, "steps.csv")
        return [(row["step"], row["loss"]) for row in rows]

    def sacct(self, rows: list[states.Row]) -> tuple[float, float]:
        """Rank-hours of the study's jobs by accounting, and those of jobs that did not complete."""
        names = ",".join(row.run for row in rows)
        asked = [f"--name={names}", "--starttime=now-1days", "--format=JobIDRaw,ElapsedRaw,Comment"]
        printed = squeue.run(["sacct", "-XDnP", *asked])
        lines = [line.split("|") for line in printed.splitlines()]
        ours = [(int(job), 2 * int(s) / 3600) for job, s, of in lines if of.startswith("chaos%20")]
        complete = {row.job_id for row in rows if row.state == "complete"}
        used = sum(hours for _, hours in ours)
        good = sum(hours for job, hours in ours if job in complete)
        return used, used - good


def read(path: Path) -> dict:
    try:
        return json.loads(path.read_text())
    except (OSError, ValueError):
        return {}


def read_rows(path: Path) -> list[dict[str, str]]:
    """The rows of a CSV that ends with a whole line; none where there is no file."""
    if not path.exists():
        return []
    with path.open() as file:
        return [row for row in csv.DictReader(file) if None not in row.values()]


def written(folder: Path, name: str) -> list[dict[str, str]]:
    """The rows of a file of a run, those of attempts that were moved aside before the others."""
    attempts = [p for p in (folder / "attempts").glob("*") if p.name.isdigit()]
    places = [*sorted(attempts, key=lambda path: int(path.name)), folder]
    return [row for place in places for row in read_rows(place / name)]


def resumed(folder: Path) -> list[tuple[int, int]]:
    """Of each time that a run went on: (the newest checkpoint by then, the step it went on from).
    A save of a step that was saved before, without a load, is a start from step 0."""
    resumes, newest, at = [], 0, 0
    for row in written(folder, "checkpoints.csv"):
        step = int(row["step"])
        if row["event"] == "load":
            resumes.append((newest, step))
        elif not row["problem"]:
            if step <= at:
                resumes.append((newest, 0))
            newest = max(newest, step)
        at = step
    return resumes


@command_line("tests.tools.chaos")
def main(argv: list[str] | None = None) -> int:
    parser = Parser(prog="python -m tests.tools.chaos", description=__doc__)
    parser.add_argument("--data", type=Path, default=Path("data/stdlib"), metavar="DIR")
    parser.add_argument("--runs", type=int, default=40, metavar="N", help="disturbed runs (40)")
    parser.add_argument("--steps", type=int, default=60, metavar="N", help="of a run (60)")
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="of the disturbances (0)")
    parser.add_argument("--out", type=Path, metavar="DIR", help="for chaos.md")
    arguments = parser.parse_args(argv)
    check_flags(arguments, runs=(1, 1000), steps=(20, 10**6))
    folder = Path(tempfile.mkdtemp(prefix="chaos-"))
    os.environ["SLURM_CONF"] = str(testbed.up(NODES, folder / "slurm", accounting=True))
    os.environ["PYTHON"] = sys.executable
    try:
        chaos = Chaos(
            folder, arguments.data.absolute(), arguments.runs, arguments.steps, 5, arguments.seed
        )
        chaos.undisturbed()
        table, wrong = chaos.result(chaos.disturbed(4.0, 3600.0))
    finally:
        testbed.down(folder / "slurm")
    lines = ["| | |", "| --- | --- |", *(f"| {name} | {value} |" for name, value in table)]
    print("\n".join([*lines, *(f"wrong: {line}" for line in wrong)]))
    if wrong:
        print(f"everything is left in {folder}")
        return 1
    shutil.rmtree(folder)
    if arguments.out:
        (arguments.out / "chaos.md").write_text("\n".join([*lines, ""]))
    return 0


if __name__ == "__main__":
    sys.exit(main())
