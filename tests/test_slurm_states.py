"""What became of a run: Slurm's columns, the run folder's files and the log, without a Slurm."""

import errno
import fcntl
import json
import os
import re
import signal
import subprocess
import sys
import tomllib
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import pytest

from analysis import goodput, tflops
from analysis.logs.parsing.failure_line import find_failure
from analysis.logs.parsing.logfile import Log
from base.errors import UsageError
from parallel.config import clusters
from parallel.config.study import load_study
from parallel.record import facts, lock
from parallel.record.ends import kind_of
from parallel.record.first_place import cause
from parallel.record.reader import read_status
from parallel.record.writer import RunFolder
from slurm import (
    cancel,
    nodes,
    record_end,
    render,
    states,
    status,
    submit,
    watch,
)
from slurm.render import comment_of, planned_text
from slurm.squeue import Job, parse
from slurm.states import judge
from tests import fixture_runs
from tests.conftest import study_file
from tests.tools import testbed
from tests.tools.fake_slurm import FakeJob, FakeSlurm

QUEUE = (
    "12|OUT_OF_MEMORY|253|OutOfMemory|a|grid|/r|\n"
    "13|FAILED|256|NonZeroExitCode|b|grid|/r|\n"
    "14_3|RUNNING|0|None|array|grid|/r|\n"
    "slurm_load_jobs error: something\n"
    "15|PENDING|0|Dependency|c||/r|N/A|\n"
)


def test_squeue_and_sacct_are_read_by_column():
    jobs = parse(QUEUE)
    assert list(jobs) == [12, 13, 15]
    assert (jobs[12].exit, jobs[13].exit) == ("0:125", "1:0")  # as wait gives them
    assert jobs[15].state == "PENDING" and jobs[15].reason == "Dependency"
    ended = parse(SACCT)
    assert (ended[2].exit, ended[4].state, ended[4].name) == ("3:0", "CANCELLED", "cancel")
    assert (ended[1].comment, ended[1].folder) == ("grid%20x", "/tmp/i")


# As sacct -X -n -P of Slurm 22.05 with slurmdbd printed it, asked for squeue.ACCOUNTS.
SACCT = """\
1|COMPLETED|0:0|None|ok|grid%20x|/tmp/i|00:00:01
2|FAILED|3:0|None|bad|grid%20x|/tmp/i|00:00:00
3|OUT_OF_MEMORY|0:125|None|oom|grid%20x|/tmp/i|00:00:02
4|CANCELLED by 0|0:0|None|cancel|grid%20x|/tmp/i|00:00:30
"""


def folder_of(tmp_path, state: str | None = None, reason: str = "", log: str = ""):
    folder = tmp_path / "run"
    folder.mkdir(exist_ok=True)
    (folder / "9.out").write_text(log)
    if state:
        RunFolder(folder)._write_status(state, kind_of(reason), reason, 0)
    if state == "complete":
        (folder / "RUN_COMPLETE.txt").write_text("[Rank 0] RUN_COMPLETE\n")
        (folder / "run.json").write_text(json.dumps({"scheduler": {"job_id": "9"}}))
    return folder


def ended_by_the_script(folder, attempt: str, kind: str, reason: str) -> None:
    """As slurm/job.sh does where it ends a run itself."""
    (folder / f"{attempt}.end").write_text(f"{kind}\n{reason}\n")
    record_end.main([str(folder), attempt, "1"])


# name | Slurm's state and exit, if known | status.json | its reason | the log | what it is
KINDS = """
complete                     | COMPLETED 0:0       | complete | | | complete
complete, Slurm forgot       |                     | complete | | | complete
0:125 is not success         | COMPLETED 0:125     | complete | | | OOM
0:125                        | OUT_OF_MEMORY 0:125 | running | | | OOM
one task's OOM               | FAILED 1:0 | failed | exit status 1 | \
slurmstepd: error: Detected 1 oom-kill event(s) in StepId=5.0. | OOM
CUDA                         | FAILED 1:0 | failed | OutOfMemoryError: CUDA out of memory. | | OOM
time limit                   | TIMEOUT 0:1 | running | | | timeout
time limit, it stopped itself | FAILED 143:0 | failed | time limit: stopped 60 s before it | \
*** STEP 9.0 ON node1 CANCELLED AT 2026 *** | timeout
time limit, Slurm forgot     | | running | | \
slurmstepd: error: *** JOB 9 ON node1 CANCELLED AT 2026 DUE TO TIME LIMIT *** | timeout
scancel                      | CANCELLED 0:15 | failed | SIGTERM (rank 0) | | cancelled
dead node                    | NODE_FAIL 0:0 | running | | | node failure
a rank crashed               | FAILED 1:0 | failed | RuntimeError: boom (rank 1) | \
RuntimeError: boom | failed
no folder status             | FAILED 2:0 | | | parallel.train: error: no data | failed
exit 0 without the marker    | COMPLETED 0:0 | running | | | failed
interrupted                  | FAILED 1:0 | interrupted | SIGUSR1, saved step 5 | | interrupted
scancel, and saved           | CANCELLED 0:15 | interrupted | SIGTERM, saved step 5 | | cancelled
preempted, and saved         | PREEMPTED 0:15 | interrupted | SIGTERM, saved step 5 | | interrupted
requeued                     | PENDING 0:0 | failed | SIGTERM (rank 0) | | pending
its log cannot be opened     | FAILED 0:53 | | | | failed
running                      | RUNNING 0:0 | running | | | running
"""
KINDS = [[cell.strip() for cell in line.split("|")] for line in KINDS.strip().splitlines()]


@pytest.mark.parametrize(
    ("slurm", "state", "reason", "log", "expected"),
    [kind[1:] for kind in KINDS],
    ids=[kind[0] for kind in KINDS],
)
def test_each_end_is_told_from_the_others(tmp_path, slurm, state, reason, log, expected):
    job = Job(9, *slurm.split()) if slurm else None
    row = judge("run", folder_of(tmp_path, state, reason, log), 10, job, 9)
    assert row.state == expected and row.line
    assert ("its log could not be opened" in row.line) is (":53" in slurm)


@pytest.mark.parametrize(
    ("kind", "reason", "state"),
    [
        ("time limit", "stopped 60 s before it", "timeout"),
        ("signal", "SIGTERM: cancelled, preempted or requeued", "cancelled"),
        ("refused", "module load cuda ended with status 1", "failed"),
        ("unknown", "max_restarts: 3 used up", "failed"),
    ],
)
def test_an_end_that_the_script_made_is_known_by_its_kind(tmp_path, kind, reason, state):
    """Also before Python could write status.json, and whatever the words are."""
    folder = folder_of(tmp_path, "running", log="RuntimeError: a consequence\n")
    (folder / "9.end").write_text(f"{kind}\n{reason}\n")
    for _ in range(2):
        for job in (Job(9, "FAILED", "1:0"), None):
            row = judge("run", folder, 10, job, 9)
            assert (row.state, row.line, row.kind) == (state, reason, kind)
        record_end.main([str(folder), "9", "1"])
        assert (read_status(folder)["kind"], read_status(folder)["reason"]) == (kind, reason)


@pytest.mark.parametrize(
    ("log", "kind"),
    [
        ('Traceback (most recent call last):\n  File "x.py", line 1, in f\nValueError\n', "raised"),
        ("Traceback (most recent call last):\n  assert x\nAssertionError\n", "raised"),
        ("Traceback (most recent call last):\n  float(x)\nKeyboardInterrupt\n", "signal"),
        ("parallel.train: no token files at data/nccl-connection\n", "refused"),
        ("parallel.train: loss is nan at the end (step 3)\n", "diverged"),
        ("RuntimeError: NCCL error in: x.cpp:1\n", "communication"),
        ("[rank 0] a line without a cause\n", "unknown"),
    ],
)
def test_a_run_that_wrote_no_status_has_the_kind_of_its_logs_cause(tmp_path, log, kind):
    """So that the watch does not try again what would end alike."""
    folder = folder_of(tmp_path, "", log=log)
    end = judge("run", folder, 10, Job(9, "FAILED", "1:0"), 9)
    assert (end.kind or "unknown", end.state) == (kind, "failed")
    record_end.main([str(folder), "9", "1"])
    assert read_status(folder)["kind"] == kind


def test_a_job_writes_the_kind_of_its_end_also_where_no_run_began(tmp_path, monkeypatch):
    monkeypatch.setenv("SLURM_JOB_ID", "9")
    folder = folder_of(tmp_path, "running")
    ended_by_the_script(folder, "9", "of an older script", "HUP")
    assert read_status(folder)["kind"] == kind_of("HUP")
    monkeypatch.delenv("SLURM_JOB_ID")  # job.sh was started by hand
    (folder / "9.end").unlink()
    (folder / "run.json").write_text(json.dumps({"scheduler": {"job_id": None}}))
    for log, kind in (("", "unknown"), ("RuntimeError: CUDA out of memory\n", "memory")):
        folder_of(tmp_path, "running", log=log)
        assert record_end.main([str(folder), "9", "1"]) == 0
        assert (read_status(folder)["kind"], read_status(folder)["rank"]) == (kind, -1)


ENDS = tomllib.loads((states.ROOT / "tests" / "log_ends.toml").read_text())
NO_SIGNS = ENDS["signs"].pop("no sign")


@pytest.mark.parametrize(
    ("sign", "line"),
    [(sign, line) for sign, lines in ENDS["signs"].items() for line in lines.splitlines()],
)
def test_reader_status_and_slurm_agree_on_a_line_that_says_how_a_run_ended(tmp_path, sign, line):
    """It stands among lines that say nothing."""
    path, (kind, state) = tmp_path / "a.log", sign.split(", ")
    path.write_text(f"{NO_SIGNS}{line}\n{NO_SIGNS}")
    assert states.evidence(path.read_text(), None) == states.End(state, line)
    assert failure_in(path) == (kind, line)
    assert (kind_of(line) == "memory") == (kind == "oom")


@pytest.mark.parametrize("line", NO_SIGNS.splitlines())
def test_words_about_memory_are_no_end(tmp_path, line):
    path = tmp_path / "a.log"
    path.write_text(f"step 1\n{line}\n")
    assert states.evidence(path.read_text(), None) is None and kind_of(line) != "memory"
    assert failure_in(path)[0] != "oom"


def failure_in(path: Path) -> tuple[str, str]:
    """The kind and the line of what a reader of logs takes for the end."""
    with Log(path) as log:
        failure = find_failure(log)
    return (failure.kind, failure.line) if failure else ("", "")


@pytest.mark.parametrize("marked", [True, False], ids=["marked", "script gone"])
@pytest.mark.parametrize("case", ENDS["two_nodes"])
def test_of_many_ends_the_first_is_told(tmp_path, case, marked):
    """srun cancels the step on the other nodes, torchrun ends the other ranks, and a lost peer is
    an error too: none of these is why a run failed."""
    end = ENDS["two_nodes"][case]
    reason, slurm = end.get("status", ""), end.get("slurm")
    log = "".join(ENDS["texts"][name] for name in end["log"])
    folder = folder_of(tmp_path, "failed" if reason else "running", reason, log)
    if marked and slurm == "FAILED":
        record_end.main([str(folder), "9", "143"])
    row = judge("run", folder, 10, Job(9, slurm, "1:0") if slurm else None, 9)
    assert row.state == end["state"] and end["line"] in row.line, row
    if "read" in end:
        kind, line = failure_in(folder / "9.out")
        assert kind == end["read"][0] and end["read"][1] in line


def test_what_an_earlier_job_left_says_nothing_of_a_later_one(tmp_path):
    folder = folder_of(tmp_path, "failed", "RuntimeError: boom (rank 1)")
    (folder / "run.json").write_text(json.dumps({"scheduler": {"job_id": "9"}}))
    (folder / "10.out").write_text("python: No such file or directory\nsrun: error: node1\n")
    row = judge("run", folder, 10, Job(10, "FAILED", "1:0"), 10)
    assert (row.state, row.line) == ("failed", "python: No such file or directory")
    assert judge("run", folder, 10, Job(10, "NODE_FAIL", "0:0"), 10).state == "node failure"


@pytest.mark.parametrize("first", ["9", None])
def test_an_earlier_jobs_result_is_told_with_its_own_job(tmp_path, monkeypatch, first):
    """Also one that parallel.sweep left, without a job."""
    path = study_file(tmp_path / "two.toml", "[[run]]\n")
    study, logs = load_study(path), tmp_path / "logs"
    folder = logs / "two" / "ddp"
    folder.mkdir(parents=True)
    (tmp_path / "run").symlink_to(folder)
    folder_of(tmp_path, "complete", "1 of 2 saves failed, the last: No space left")
    (folder / "9.out").rename(folder / "12.out")
    (folder / "run.json").write_text(json.dumps({"scheduler": {"job_id": first}}))
    (folder / "steps.csv").write_text("step,step_s\n1,2.0\n")
    monkeypatch.setenv("SLURM_JOB_ID", "12")
    ended_by_the_script(folder, "12", "refused", "module load cuda ended with status 1")
    assert read_status(folder)["state"] == "complete"
    for state, job_id, step, words in (
        ("PENDING", 12, 0, "Slurm: PENDING"),
        ("RUNNING", 12, 0, "Slurm: RUNNING"),
        ("FAILED", first and int(first), 1, "RUN_COMPLETE.txt; 1 of 2 saves failed"),
    ):
        (row,) = states.rows(study, logs, {12: Job(12, state, "1:0", name="ddp")})
        assert (row.job_id, row.step) == (job_id, step) and row.line.startswith(words), row
    assert row.state == "complete"
    assert "job 12, after it: failed: module load cuda" in row.line
    assert states.reader.read_json_if_whole(folder / "12.state")["verdict"] == "failed"


def test_a_later_job_does_not_overwrite_why_an_earlier_one_failed(tmp_path, monkeypatch):
    folder = folder_of(tmp_path, "failed", "SIGTERM (rank 0)")
    (folder / "run.json").write_text(json.dumps({"scheduler": {"job_id": "9"}}))
    monkeypatch.setenv("SLURM_JOB_ID", "12")
    ended_by_the_script(folder, "12", "refused", "module load cuda ended with status 1")
    assert read_status(folder)["reason"] == "SIGTERM (rank 0)"
    monkeypatch.setenv("SLURM_JOB_ID", "9")
    ended_by_the_script(folder, "9", "time limit", "stopped 60 s before it")
    assert read_status(folder)["kind"] == "time limit"


def test_a_restarted_job_is_told_by_its_last_attempt(tmp_path):
    folder = folder_of(tmp_path, "running")
    (folder / "9.end").write_text("signal\nSIGTERM: cancelled or requeued\n")
    for number in (1, 2, 10):
        (folder / f"9.restart{number}.out").write_text("step\n")
    (folder / "9.restart10.out").write_text("ValueError: the last attempt\n")
    row = judge("run", folder, 10, Job(9, "FAILED", "1:0"), 9)
    assert (row.state, row.line) == ("failed", "ValueError: the last attempt")
    running = judge("run", folder, 10, Job(9, "RUNNING"), 9)
    assert running.line == "Slurm: RUNNING, restart 10"
    (folder / "12.skipped").write_text("slurm: not run: it is complete\n")  # is no attempt
    assert states.reader.job_ids(folder) == [9]


def test_progress_and_time_left_come_from_the_steps(tmp_path):
    folder = folder_of(tmp_path, "running")
    (folder / "steps.csv").write_text("step,step_s,loss\n1,9.0,1\n2,2.0,1\n3,4.0,1\n4,1")
    row = judge("run", folder, 10, Job(9, "RUNNING"), 9)
    assert (row.step, row.eta_s) == (3, 7 * 5.0)
    assert " 0:00:35 " in status.table([row])[1]


def test_what_slurm_forgets_was_written_down(tmp_path):
    folder = folder_of(tmp_path, "running")
    job = Job(9, "NODE_FAIL", "0:0", elapsed_s=12)
    row = judge("ddp", folder, 10, job, 9)
    states.remember(folder, job, row)
    assert judge("ddp", folder, 10, states.recall(folder, 9), 9) == row
    assert row.state == "node failure" and states.recall(folder, 9) == job
    states.remember(folder, Job(9, "PENDING"), row)  # scontrol requeue
    assert states.recall(folder, 9) is None


@pytest.mark.parametrize("damage", ["[1, 2]", "{", '{"state": [1], "exit": 7}', "\x00", "{}"])
def test_a_damaged_note_of_a_jobs_end_is_none(tmp_path, damage, capsys):
    folder = folder_of(tmp_path, "running")
    (folder / "run.json").write_text(
        json.dumps(fixture_runs.facts("grid", None) | {"scheduler": {"job_id": "9"}})
    )
    for text in (damage, '{"state": "FAILED", "exit": "1:0", "elapsed_s": "long", "verdict": 3}'):
        (folder / "9.state").write_text(text)
        assert states.recall(folder, 9) is None and watch.tries_of(folder) == 1
        assert goodput.main([str(folder)]) in (0, 2) and capsys.readouterr()
        states.remember(folder, Job(9, "FAILED", "1:0"), judge("ddp", folder, 10, None, 9))
        assert states.recall(folder, 9) == Job(9, "FAILED", "1:0")


def test_a_job_that_slurm_does_not_list_is_waited_for_until_its_time_limit(tmp_path):
    """squeue and sacct of another cluster do not know it; nor does one that forgot it."""
    folder = folder_of(tmp_path, log="[W] Warning: FooError: is no end\n")
    for state in (None, "running"):
        if state:
            folder_of(tmp_path, state, log="step 1\n")
            (folder / "9.job").write_text("   RunTime=00:00:00 TimeLimit=00:05:00 TimeMin=N/A\n")
        row = judge("run", folder, 10, None, 9)
        assert row.state == "unknown" and "Slurm here lists no job 9 (another cluster?)" in row.line
    os.utime(folder / "9.job", (0, 0))
    row = judge("run", folder, 10, None, 9)
    assert (row.state, row.line[:27]) == ("failed", "Slurm no longer knows job 9")
    (folder / "9.job").unlink()
    (folder / "9.exit").write_text("1\n")
    assert judge("run", folder, 10, None, 9).state == "failed"


def test_a_step_time_that_cannot_be_is_no_time_left(tmp_path):
    for step_s in ("inf", "nan", "1e300", "-1", "9" * 5000):
        folder = folder_of(tmp_path, "running")
        (folder / "steps.csv").write_text(f"step,step_s\n1,{step_s}\n")
        row = judge("run", folder, 10, Job(9, "RUNNING"), 9)
        assert "       -  Slurm: RUNNING" in status.table([row])[1]


class Bench(NamedTuple):
    """A study, where its runs are, and the Slurm that is asked."""

    path: Path
    logs: Path
    slurm: FakeSlurm

    def __call__(self, command, *flags: str) -> int:
        return command.main(["--logs", str(self.logs), str(self.path), *flags])

    def lists(self, *jobs: tuple[int, str, str]) -> None:
        """Let squeue list jobs of this study: number, state and run."""
        comment = comment_of(load_study(self.path), self.logs)
        for number, state, run in jobs:
            self.slurm.jobs[number] = FakeJob(state, run, comment)

    def folder(self, run: str, **files: str) -> Path:
        folder = self.logs / self.path.stem / run
        folder.mkdir(parents=True, exist_ok=True)
        for name, text in files.items():
            (folder / name.replace("__", ".")).write_text(text)
        return folder


SURE = ("--yes", "--no-checks")


@pytest.fixture
def bench(tmp_path, monkeypatch):
    """A study of some seeds, and a stand-in for Slurm."""

    def made(seeds: int, *jobs: tuple[int, str, str], text: str = "") -> Bench:
        path = study_file(
            tmp_path / "grid.toml",
            f"{text}[[sweep]]\ndefaults = {{ engine = 'megatron', gpus = 2, tp = 2 }}\n"
            f"product = {{ seed = {list(range(1, seeds + 1))} }}\n",
        )
        study = Bench(path, tmp_path / "logs", FakeSlurm(monkeypatch))
        study.lists(*jobs)
        return study

    return made


NAME = "megatron-tp2-seed"


@pytest.fixture
def four(bench):
    """Four runs, of which one runs and one was cancelled before it started."""
    jobs = [(7, "RUNNING", f"{NAME}1"), (8, "CANCELLED", f"{NAME}2")]
    study = bench(4, *jobs, text="[slurm]\nbudget_gpu_hours = 0.1\n")
    study.slurm.jobs[9] = FakeJob("CANCELLED", f"{NAME}3", "grid", folder="/another/clone")
    study.slurm.jobs[10] = FakeJob("CANCELLED", f"{NAME}3", "grid")  # of the usual folder
    return study


def test_submitting_again_never_duplicates_what_waits_or_runs(bench, capsys):
    kinds = ("RUNNING", "FAILED", "TIMEOUT", "PENDING")
    study = bench(8, *[(n, kinds[n % 4], f"{NAME}{n}") for n in range(1, 9)])
    for n in range(1, 9):
        study.folder(f"{NAME}{n}", status__json='{"state": "running"}', **{f"{n}__out": "Error"})
    for names in (("missing",), ("missing", f"{NAME}4")):  # job 4 runs
        assert study(submit, "--only", *names) == 0
        assert "nothing to submit" in capsys.readouterr().out
    with pytest.raises(SystemExit, match="2"):
        submit.main([str(study.path), "--logs", str(study.path)])
    assert f"argument --logs: {study.path} is a file: name a folder" in capsys.readouterr().err
    assert study(submit, *SURE) == 0
    ended = [f"{NAME}{n}" for n in (1, 2, 5, 6)]
    assert len(study.slurm.given("sbatch")) == 4
    assert [p.parent.name for p in sorted(study.logs.rglob("9000*.submitted"))] == ended
    for number in range(90001, 90005):
        study.slurm.jobs[number].state = "COMPLETED"
    assert study(cancel) == 0
    assert sorted(*study.slurm.given("scancel")) == ["3", "4", "7", "8"]  # PENDING and RUNNING


def test_submit_leaves_alone_what_slurm_does_not_list_and_says_so(bench, capsys):
    study = bench(2)
    study.folder(f"{NAME}1", **{"8__submitted": ""})
    assert study(submit, *SURE) == 0
    out = capsys.readouterr().out
    assert f"{NAME}1 is left alone: Slurm here lists no job 8" in out
    assert re.findall(r"submitted (\S+):", out) == [f"{NAME}2"]


def programs(folder: Path, **bodies: str) -> None:
    """Write programs of bash, by name."""
    folder.mkdir(exist_ok=True)
    for name, body in bodies.items():
        (folder / name).write_text(f"#!/bin/bash\n{body}\n")
        (folder / name).chmod(0o755)


def test_a_python_without_packages_submits(bench, tmp_path):
    """As a login node has it: by slurm/study.sh, with Python -S, which finds none."""
    study, tools = bench(2), tmp_path / "bin"
    programs(tools, squeue="", sbatch="echo $$", bare=f'exec {sys.executable} -S "$@"')
    ask = ["bash", "slurm/study.sh", str(study.path), "--logs", str(study.logs), *SURE]
    variables = os.environ | {"PYTHON": str(tools / "bare"), "PYTHONPATH": str(states.ROOT)}
    variables["PATH"] = f"{tools}:{os.environ['PATH']}"
    done = subprocess.run(ask, cwd=states.ROOT, env=variables, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.count("submitted megatron-tp2-seed") == 2


@pytest.mark.parametrize("why", [errno.ENOLCK, errno.EBADF])
def test_submit_and_nodes_work_where_a_file_system_has_no_locks_and_say_so(
    why, bench, capsys, monkeypatch
):
    """EBADF: NFS locks no file that may only be read."""

    def no_locks(*_):
        raise OSError(why, os.strerror(why))

    monkeypatch.setattr(lock.fcntl, "flock", no_locks)
    study = bench(1)
    assert study(submit, *SURE) == 0 and study(nodes) == 0
    said = capsys.readouterr()
    assert "submitted megatron-tp2: job 90001" in said.out
    assert f"{study.logs}/grid/.submit.lock cannot be locked here ({os.strerror(why)})" in said.err


def test_the_lock_of_another_user_is_waited_for_all_the_same(bench, capsys, monkeypatch):
    study, opened = bench(1), Path.open

    def theirs(path, mode="r", *arguments, **settings):
        if path.name == ".submit.lock" and mode != "r":
            raise PermissionError(errno.EACCES, "Permission denied", str(path))
        return opened(path, mode, *arguments, **settings)

    (study.logs / "grid").mkdir(parents=True)
    (study.logs / "grid" / ".submit.lock").touch()
    monkeypatch.setattr(Path, "open", theirs)
    locks = []
    monkeypatch.setattr(lock.fcntl, "flock", lambda file, how: locks.append((file.name, how)))
    assert study(submit, *SURE) == 0
    assert str(study.logs / "grid" / ".submit.lock") in [
        name for name, how in locks if how & fcntl.LOCK_EX
    ]
    assert capsys.readouterr().err == ""


def test_a_command_that_waits_for_another_one_says_so(bench, monkeypatch):
    study = bench(2)
    study.folder("")
    said = []
    with (study.logs / "grid/.submit.lock").open("w") as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        monkeypatch.setattr(lock, "_say_once", lambda line: (said.append(line), other.close()))
        assert study(submit, *SURE) == 0
    assert said == [f"{study.logs}/grid/.submit.lock is held by another command: waiting for it"]


def test_only_failed_leaves_out_what_was_stopped_and_says_so(four, capsys):
    for seed, state, reason in (
        (1, "interrupted", "SIGUSR1, saved step 5"),
        (3, "interrupted", "time limit: SIGUSR1, saved step 5"),
        (4, "failed", "ValueError: x"),
    ):
        RunFolder(four.folder(f"{NAME}{seed}"))._write_status(state, kind_of(reason), reason, 0)
    del four.slurm.jobs[7]
    assert four(submit, *SURE, "--only", "failed") == 0
    out = capsys.readouterr().out
    assert f"cancelled or interrupted, not failed: {NAME}1, {NAME}2, {NAME}3\n" in out
    assert re.findall(r"submitted (\S+):", out) == [f"{NAME}4"]


def test_status_and_cancel_take_several_studies_and_ask_slurm_twice(four, capsys):
    other = study_file(four.path.with_name("other.toml"), "run = [{ engine = 'ddp' }]\n")
    four._replace(path=other).lists((12, "RUNNING", "ddp"))
    clusters = str(states.ROOT / "slurm" / "clusters.toml")  # as slurm/*.toml names it
    others = (clusters, str(other.with_suffix(".slurm")))
    assert four(status, *others) == 1  # a run of the first was cancelled
    out = capsys.readouterr().out
    assert f"{four.path}:\n" in out and f"{other}:\n" in out and " 12 " in out
    assert [call[0] for call in four.slurm.calls] == ["squeue", "sacct"]
    assert four(cancel, *others, "--only", "ddp") == 2
    assert "--only names runs of one study, not of 2" in capsys.readouterr().err
    assert four(cancel, *others) == 0
    assert four.slurm.given("scancel") == [["7", "12"]]


def test_cancel_ends_every_job_of_a_run_and_status_names_them(bench, capsys):
    """Of a run that was submitted twice: by this program, and before that by hand."""
    kinds = ("PENDING", "RUNNING", "FAILED", "PENDING")
    study = bench(2, *[(n, state, f"{NAME}1") for n, state in enumerate(kinds, 5)])
    study.folder(f"{NAME}1", **{"8__submitted": ""})
    assert study(status) == 0
    assert "Slurm: PENDING None; job 5, 6 of this run, too" in capsys.readouterr().out
    assert study(cancel) == 0
    assert study.slurm.given("scancel") == [["5", "6", "8"]]


def test_logs_are_below_the_repository_and_a_reader_makes_no_folder(four, monkeypatch, capsys):
    """Wherever the command is typed."""
    top = four.path.parent
    elsewhere = top / "elsewhere"
    elsewhere.mkdir()
    monkeypatch.chdir(elsewhere)
    for module in (status, cancel, render):
        monkeypatch.setattr(module, "ROOT", top)
    (top / "ds.json").write_text('{"gradient_clipping": 0.5}')
    text = four.path.read_text().replace("gpus = 2", "deepspeed_config = 'ds.json', gpus = 2")
    four.path.write_text(text)
    folder = four.folder(f"{NAME}1", steps__csv="step,step_s\n3,1.0\n", **{"8__submitted": ""})
    for command, words in (
        (status, "cancelled            8           3/20"),
        (cancel, "cancelled 0 jobs"),
    ):
        command.main(["--logs", "logs", str(four.path)])
        assert words in capsys.readouterr().out
    assert not os.listdir(elsewhere) and os.listdir(four.logs / "grid") == [folder.name]


def test_a_complete_run_of_other_settings_is_missing_and_submitted(four, capsys):
    name = f"{NAME}4"
    settings = load_study(four.path).specs[name].settings()

    def row(**changes) -> str:
        about = json.dumps({"spec": settings | changes, "scheduler": {"job_id": 6}})
        done = {"status__json": '{"state": "complete"}', "RUN_COMPLETE__txt": ""}
        four.folder(name, run__json=about, **done, **{"6__submitted": ""})
        four(status)
        lines = capsys.readouterr().out.splitlines()
        return " ".join(next(line for line in lines if line.startswith(name)).split())

    assert row().endswith("- RUN_COMPLETE.txt") and " complete " in row()
    assert " complete " in row(log_interval=77)  # not another run
    text = four.path.read_text().replace("gpus = 2,", "gpus = 2, lr = 0.5, steps = 200,")
    four.path.write_text(text)
    was = "a run of other settings is complete: lr 0.0003, now 0.5, steps 20, now 200;"
    assert " missing " in row() and was in row()
    assert four(submit, *SURE, "--only", "missing") == 0
    assert f"submitted {name}: job" in capsys.readouterr().out
    # And somebody cancels that job before it begins: its end counts, not that of the old settings.
    (job,) = [p.stem for p in four.folder(name).glob("9*.submitted")]
    four.slurm.jobs[int(job)].state = "CANCELLED"
    assert f" cancelled {job} " in row()
    text = text.replace("steps = 200", "steps = 300")
    four.path.write_text(text)  # and of this one nothing ran yet
    assert " missing " in row() and "now 300;" in row()


def test_a_job_that_never_started_is_a_row_of_the_table_too(four, capsys):
    planned = planned_text(load_study(four.path), f"{NAME}2")
    four.folder(f"{NAME}2", **{"8__submitted": planned})  # as who submits it leaves it

    def table() -> list[dict]:
        capsys.readouterr()
        assert tflops.main([str(four.logs / "grid"), "--format", "json"]) == 0
        return json.loads(capsys.readouterr().out)

    assert four(status) == 1
    printed = capsys.readouterr()
    assert printed.out.endswith("\n2 missing, 1 running, 1 cancelled\n") and printed.err == ""
    (row,) = table()
    assert (row["run"], row["verdict"]) == (f"{NAME}2", "cancelled")
    assert row["reasons"] == ["Slurm: CANCELLED 0:0"]
    assert (row["engine"], row["gpus"], row["tp"]) == ("megatron", 2, 2)
    assert four(submit, *SURE, "--only", "missing") == 0
    assert [row["verdict"] for row in table()] == ["cancelled", "pending", "pending"]


def test_cancel_takes_the_named_run_and_asks_for_nothing_where_none_waits(four, capsys):
    assert four(cancel, "--only", "ddp") == 2  # no run of the study
    four.folder(f"{NAME}3", status__json='{"state": "running"}')  # in a sweep without Slurm
    assert four(cancel, "--only", f"{NAME}3") == 0
    assert capsys.readouterr().out == "cancelled 0 jobs\n" and not four.slurm.given("scancel")
    assert four(cancel, "--only", f"{NAME}1") == 0
    assert four.slurm.given("scancel") == [["7"]]


@pytest.mark.parametrize(
    ("own", "asked", "charged"),
    [("", "", "theirs"), ("", "mine", "mine"), ("clusters", "", ""), ("clusters", "mine", "mine")],
)
def test_runs_have_the_account_of_the_job_that_submits_them(own, asked, charged, four, monkeypatch):
    """But a cluster's own account comes before it, and SBATCH_ACCOUNT before both."""
    study = load_study(four.path)
    there = replace(study, cluster=replace(study.cluster, account=own))
    monkeypatch.setattr(submit, "load_studies", lambda _: [there])
    monkeypatch.setenv("SLURM_JOB_ID", "1")
    monkeypatch.setenv("SLURM_JOB_ACCOUNT", "theirs")
    if asked:
        monkeypatch.setenv("SBATCH_ACCOUNT", asked)
    assert four(submit, *SURE) == 0
    sent, variable = four.slurm.given("sbatch")[-1], four.slurm.accounts[-1]
    account = variable or sent[-1].removeprefix("--account=")
    assert account == (charged or f"--chdir={states.ROOT}")
    assert (f"#SBATCH --account={own}\n" in four.slurm.scripts[-1]) is bool(own)


def test_above_the_budget_or_where_every_run_misses_something_nothing_is_submitted(four, capsys):
    assert four(submit, "--no-preflight") == 2
    assert "rank-hours at worst exceed the budget of 0.1" in capsys.readouterr().err
    four.path.write_text(four.path.read_text().replace("gpus = 2,", "gpus = 2, data = '/no/data',"))
    assert four(submit, "--yes") == 2
    first, last = capsys.readouterr().err.splitlines()
    assert "no token files at /no/data" in first and "--no-checks" in last
    assert not four.slurm.given("sbatch")


def test_slurms_refusal_is_told_once_and_an_outage_asks_for_no_test_cluster(
    tmp_path, monkeypatch, capsys
):
    text = (
        "[[sweep]]\ndefaults = { engine = 'megatron', gpus = 2, tp = 2 }\nproduct.seed = [2, 3]\n"
    )
    four = Bench(study_file(tmp_path / "grid.toml", text), tmp_path / "logs", None)
    tools = tmp_path / "bin"
    monkeypatch.setenv("PATH", f"{tools}:{os.environ['PATH']}")
    refusal = "printf 'sbatch: error: A\\nsbatch: error: B\\n' >&2; exit 1"
    programs(tools, squeue="", sacct="exit 1", sbatch=refusal)
    assert four(submit, *SURE) == 2
    told = capsys.readouterr().err
    assert told.endswith(f"{NAME}2: sbatch: error: A error: B\n") and told.count("\n") == 1
    programs(tools, squeue="echo 'slurm_load_jobs error: Timed out' >&2; exit 1")
    assert four(submit, *SURE) == 2
    told = capsys.readouterr().err
    assert told == "slurm.submit: no Slurm answers (squeue: slurm_load_jobs error: Timed out)\n"


def test_without_slurm_the_folders_speak_and_nothing_is_submitted(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("PATH", str(tmp_path))
    path = study_file(tmp_path / "one.toml", "[[run]]\n")
    study = Bench(path, tmp_path / "logs", None)
    study.folder("ddp", **{"4__submitted": ""})
    assert study(status) == 0
    printed = capsys.readouterr()
    assert "no Slurm answers" in printed.err and "unknown" in printed.out
    assert "testbed up starts one here" in printed.err
    assert study(submit) == 2
    assert testbed.main(["up", "--folder", str(tmp_path / "c")]) == 2
    assert "apt-get install munge slurm-wlm" in capsys.readouterr().err


def test_ranks_on_nodes_of_the_test_cluster_share_one_machine():
    """So that a table says oversubscribed of 8 ranks on four such nodes. The cluster's table says
    so; another cluster of Slurm may have its name."""
    assert facts.one_machine(clusters.cluster("local-test").environment)
    assert not facts.one_machine(clusters.cluster("jean-zay-v100-32g").environment)
    assert not facts.one_machine({"SLURM_CLUSTER_NAME": "local-test"})


def test_a_command_that_a_node_does_not_have_is_one_line_and_the_shells_status(tmp_path, capfd):
    (tmp_path / "script").write_text("#!/no/interpreter\n")
    for command, code in ((str(tmp_path / "script"), 126), ("/no/nsys", 127)):
        ask = [sys.executable, "-m", "slurm.forward_signals", command]
        assert subprocess.run(ask, cwd=states.ROOT).returncode == code
        said = capfd.readouterr().err.strip()
        assert command in said and cause(said) == said


def test_a_signal_reaches_processes_below_and_ends_none_that_is_not_ready():
    """srun's signal may come before a rank has its handler: until then it is ignored."""
    rank = "import signal, sys; signal.signal(signal.SIGUSR1, lambda *_: sys.exit(7))"
    rank += "; print('ready', flush=True); signal.pause()"
    ask = [sys.executable, "-m", "slurm.forward_signals"]
    below = ["sh", "-c", '"$0" -c "$1" & wait $!', sys.executable, rank]
    with subprocess.Popen([*ask, *below], cwd=states.ROOT, stdout=subprocess.PIPE) as job:
        job.stdout.readline()
        job.send_signal(signal.SIGUSR1)  # the shell between has no handler
        assert job.wait(timeout=60) == 7
    words = ["grep", "SigIgn", "/proc/self/status"]
    done = subprocess.run([*ask, *words], cwd=states.ROOT, capture_output=True, check=True)
    assert int(done.stdout.split()[1], 16) >> (signal.SIGUSR1 - 1) & 1


def test_a_real_clusters_configuration_is_not_deleted_for_a_test_cluster(tmp_path, monkeypatch):
    monkeypatch.setattr(testbed, "missing_packages", lambda accounting: [])
    monkeypatch.setattr(testbed.os, "geteuid", lambda: 0)
    (tmp_path / "slurm.conf").write_text("ClusterName=lise\n")
    with pytest.raises(UsageError, match="holds something else than a test cluster"):
        testbed.up(1, tmp_path)
    assert (tmp_path / "slurm.conf").read_text() == "ClusterName=lise\n"
