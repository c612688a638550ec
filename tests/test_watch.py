"""slurm.submit --watch, with a stand-in for Slurm that ends jobs as a test says."""

import csv
import json
import shutil
from types import SimpleNamespace
from typing import NamedTuple

import pytest

from base.errors import UsageError
from parallel.config.study import load_study
from parallel.record.ends import kind_of
from parallel.record.schema import CHECKPOINT_COLUMNS, SLOW_COLUMNS
from parallel.record.writer import RunFolder, append_rows
from slurm import cancel, nodes, status, submit, watch
from slurm.squeue import parse
from tests import fixture_runs
from tests.conftest import study_file
from tests.tools import testbed
from tests.tools.fake_slurm import FakeSlurm

RUNS = """[[sweep]]
defaults = { engine = "ddp", gpus = 2, save_interval = 1 }
product = { seed = %s }
"""
HOUR_EACH = '[slurm]\ntime = "01:00:00"\n'


class Ends(NamedTuple):
    """How a job ends: Slurm's state and, of a run that says so itself, the reason."""

    state: str
    reason: str = ""


COMPLETE = Ends("COMPLETED")


class Cluster(FakeSlurm):
    """Each sleep of the watch lets jobs that run end, and jobs that wait start."""

    def __init__(self, folder, monkeypatch):
        super().__init__(monkeypatch)
        self.folder, self.logs, self.first = folder, folder / "logs", 100
        self.ends = {}  # of each run, of one job after another
        self.saves = {}  # of a job: the steps that it loads and saves
        self.reasons = {}  # why each run's jobs wait, of those that never start
        self.refused = ""  # the study whose runs sbatch refuses
        self.away = self.most = self.rounds = self.refusals = 0
        self.limit = 40
        monkeypatch.setattr(watch, "time", SimpleNamespace(sleep=self.sleep))
        monkeypatch.setattr(submit.shutil, "which", lambda name: name)

    def study(self, text=RUNS % [1], name="grid"):
        """Write a study; the names of its runs."""
        return list(load_study(study_file(self.folder / f"{name}.toml", text)).runs)

    def watch(self, *studies, flags=("--watch",)):
        """Submit studies, and watch them."""
        paths = [str(self.folder / f"{name}.toml") for name in studies or ("grid",)]
        return submit.main([*paths, "--no-preflight", "--logs", str(self.logs), *flags])

    def squeue(self, command, text):
        if self.away:
            raise UsageError("slurm_load_jobs error: Unable to contact slurm controller")
        for job in self.jobs.values():
            job.reason = self.reasons.get(job.name, "None")
        return super().squeue(command, text)

    def sbatch(self, command, text):
        if self.refusals:
            self.refusals -= 1
            raise UsageError("sbatch: Socket timed out")
        if self.refused and f"#SBATCH --comment={self.refused}" in text:
            raise UsageError("sbatch: Invalid account")
        return super().sbatch(command, text)

    def sleep(self, _):
        self.rounds += 1
        assert self.rounds < self.limit, "the watch does not end"
        self.away = max(0, self.away - 1)
        for number, job in self.jobs.items():
            if job.state == "PENDING" and job.name not in self.reasons:
                job.state = "RUNNING"
            elif job.state == "RUNNING":
                job.state = self.end(number, job.name, job.comment.split("%20")[0])
        underway = [job for job in self.jobs.values() if job.state in ("PENDING", "RUNNING")]
        self.most = max(self.most, len(underway))

    def end(self, number, name, study):
        ends = self.ends.get(name, [])
        end = ends.pop(0) if ends else COMPLETE
        folder = self.logs / study / name
        (folder / "run.json").write_text(json.dumps({"scheduler": {"job_id": str(number)}}))
        if step := self.saves.get(number):
            rows = [dict.fromkeys(CHECKPOINT_COLUMNS) | {"event": "load", "step": step[0]}]
            rows.append(rows[0] | {"event": "save", "step": step[1]})
            append_rows(folder / "checkpoints.csv", CHECKPOINT_COLUMNS, rows)
        status = "complete" if end == COMPLETE else "failed" if end.reason else "running"
        kind = kind_of(end.reason) if end.reason else "unknown"
        RunFolder(folder)._write_status(status, kind, end.reason, 0)
        if end == COMPLETE:
            (folder / "RUN_COMPLETE.txt").touch()
        return end.state

    def tries(self, study="grid"):
        with (self.logs / study / "tries.csv").open() as file:
            return list(csv.DictReader(file))


@pytest.fixture
def cluster(tmp_path, monkeypatch):
    return Cluster(tmp_path, monkeypatch)


@pytest.mark.parametrize(
    ("end", "tried_again"),
    [
        (Ends("NODE_FAIL"), True),
        (Ends("TIMEOUT"), True),
        (Ends("PREEMPTED"), True),
        (Ends("FAILED", "no progress for 300 s: rank 1 hangs"), True),
        (Ends("FAILED", "NCCL error: unhandled system error"), True),
        (Ends("FAILED", "rank 1 was killed: SIGKILL"), True),
        (Ends("OUT_OF_MEMORY"), False),
        (Ends("CANCELLED"), False),
        (Ends("FAILED", "loss is nan at step 7"), False),
        (Ends("FAILED", "ValueError: no"), False),
        (Ends("FAILED", "[Errno 28] No space left on device"), False),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, Ends) else None,
)
def test_what_a_retry_can_mend_is_submitted_again(cluster, end, tried_again):
    (run,) = cluster.study(RUNS % "[1]")
    cluster.ends[run] = [end]
    assert cluster.watch() == (0 if tried_again else 1)
    assert len(cluster.jobs) == 1 + tried_again
    assert [row["try"] for row in cluster.tries()] == ["1", "2"][: 1 + tried_again]


def test_a_time_limit_without_checkpoints_and_too_many_tries_end_it(cluster, capsys):
    text = "[slurm]\nmax_restarts = 2\n[[sweep]]\nproduct = { seed = [1, 2] }\n"
    first, second = cluster.study(text)
    cluster.ends = {first: [Ends("TIMEOUT")], second: [Ends("NODE_FAIL")] * 9}
    assert cluster.watch() == 1
    out = capsys.readouterr().out
    assert "it has no save_interval" in out and "3 tries came to nothing (max_restarts 2)" in out
    tries = cluster.tries()
    assert [row["try"] for row in tries if row["run"] == second] == ["1", "2", "3"]
    last = tries[-1]
    before = [row["job"] for row in tries if row["run"] == second][1]
    assert (last["job_before"], last["state"], last["kind"]) == (before, "node failure", "killed")
    assert last["why"] == "Slurm: NODE_FAIL 0:0"
    assert "2.000 rank-hours used, 2.000 of them lost" in out  # one rank, four half hours


def test_a_try_that_saved_a_later_step_is_no_try_in_vain(cluster, capsys):
    """Six time limits; then the run stays where it is."""
    (run,) = cluster.study("[slurm]\nmax_restarts = 2\n" + RUNS % [1])
    cluster.ends[run] = [Ends("TIMEOUT")] * 9
    cluster.saves = {100 + n: (5 * n, 5 * n + 5) for n in range(6)} | {106: (30, 30)}
    assert cluster.watch() == 1 and len(cluster.jobs) == 9
    assert "3 tries came to nothing (max_restarts 2)" in capsys.readouterr().out
    assert [row["try"] for row in cluster.tries()] == [str(n) for n in range(1, 10)]


SLOW = ",".join(SLOW_COLUMNS) + "\n"
SLOW += "".join(f"2026-01-01T00:00:00Z,{n},{n + 4},compute,1,n1,0.5,0.01\n" for n in (1, 6, 11))
DAMAGED = {
    "slow_ranks.csv": SLOW + "1,2\n1,2\n",
    "slow_ranks.csv and steps.csv": SLOW,  # steps.csv is read where a rank was slow
    "slow_ranks.csv and status.json": SLOW,
    "slow_ranks.csv and run.json": SLOW,
    "status.json": "[1, 2]",
    "90.state": '{"state": "FAILED", "exit": "1:0", "elapsed_s": "x"}',
    "../nodes.csv": "time_utc,node,change,why\nyesterday,n1,suspected,why\n",
    "../preflights.csv": "time_utc\n\x00\n",
    "checkpoints.csv": "event,step\nsave,x\n",
}


@pytest.mark.parametrize("name", DAMAGED)
def test_a_damaged_file_of_one_run_stops_nobody(cluster, tmp_path, name, capsys):
    """It is named, and the healthy study beside it is submitted."""
    (run,) = cluster.study(name="old")
    cluster.study()
    folder = cluster.logs / "old" / run
    folder.mkdir(parents=True)
    (folder / "90.submitted").touch()
    (folder / "90.exit").write_text("1\n")
    about = fixture_runs.facts("old", None) | {"scheduler": {"job_id": "90"}}
    (folder / "run.json").write_text(json.dumps(about))
    RunFolder(folder)._write_status("failed", "raised", "ValueError: no", 0)
    first, _, other = name.partition(" and ")
    (folder / first).write_text(DAMAGED[name])
    if other:
        (folder / other).write_bytes(b"\xff\x00\n[1, 2]\n")
    damaged = other or first.removeprefix("../")
    paths = [str(tmp_path / f"{study}.toml") for study in ("old", "grid")]
    assert nodes.main([*paths, "--logs", str(cluster.logs)]) == 2 * (damaged == "nodes.csv")
    is_read = "csv" in name and damaged != "checkpoints.csv"
    said = capsys.readouterr()
    assert (said.err.count(damaged), said.out.count("no node is suspected")) == (
        is_read,
        1 if damaged == "nodes.csv" else 2,
    )
    assert cluster.watch("old", "grid") in (0, 1)
    out = capsys.readouterr().out
    assert "grid/ddp-dp2: complete" in out and "tried again" not in out
    named = [line[9:] for line in out.splitlines() if damaged in line]
    assert bool(named) is is_read and len(named) == len({*named})


def test_a_study_whose_runs_sbatch_refuses_stops_no_other(cluster, capsys):
    for name in ("first", "second"):
        cluster.study(RUNS % [1, 2], name)
    cluster.refused = "first"
    assert cluster.watch("first", "second") == 2
    captured = capsys.readouterr()
    assert "Invalid account" in captured.err and captured.out.count("tried again") == 1
    assert [job.state for job in cluster.jobs.values()] == ["COMPLETED"] * 2
    # Nor does a run whose folder cannot be made.
    cluster.refused, (run,) = "", cluster.study(name="third")
    (cluster.logs / "third").mkdir()
    (cluster.logs / "third" / run).touch()
    cluster.study(name="second")
    assert cluster.watch("third", "second") == 2
    captured = capsys.readouterr()
    assert f"slurm.submit: {run}: [Errno 17] File exists" in captured.err
    assert "second/ddp-dp2: complete" in captured.out


def test_a_job_that_never_starts_ends_the_watch_and_its_reason_is_said(cluster, capsys):
    blocked, held, free = cluster.study(RUNS % [1, 2, 3])
    cluster.reasons = {blocked: "DependencyNeverSatisfied", held: "JobHeldUser"}
    sleep = watch.time.sleep

    def released(seconds):
        sleep(seconds)
        if cluster.rounds == 8:
            cluster.reasons.pop(held)

    watch.time.sleep = released
    assert cluster.watch(flags=["--watch", "--at-most", "2"]) == 1
    out = capsys.readouterr().out
    why = "Slurm: PENDING DependencyNeverSatisfied; it never starts so: mend it, or scancel 100"
    assert out.count(f"{blocked}: pending (job 100): {why}") == 1
    assert f"{held}: pending (job 101): Slurm: PENDING JobHeldUser\n" in out
    assert [job.state for job in cluster.jobs.values()] == ["PENDING", "COMPLETED", "COMPLETED"]
    assert "2 complete, 1 pending" in out and cluster.rounds > 8


def test_a_job_that_squeue_does_not_list_is_not_submitted_again(cluster, capsys):
    """As sbatch may send it to another cluster."""
    (run,) = cluster.study()
    cluster.hidden = {100}
    assert cluster.watch() == 0 and len(cluster.jobs) == 1
    out = capsys.readouterr().out
    assert out.count("unknown (job 100): Slurm here lists no job 100 (another cluster?)") == 1
    assert f"grid/{run}: complete (job 100)" in out


def test_at_most_so_many_jobs_and_one_squeue_and_sacct_a_round(cluster, capsys):
    cluster.study(RUNS % list(range(7)))
    assert cluster.watch(flags=["--watch", "--at-most", "3"]) == 0
    assert cluster.most == 3 and len(cluster.jobs) == 7
    asked = [call[0] for call in cluster.calls if call[0] != "sbatch"]
    assert asked == ["squeue", "sacct"] * (cluster.rounds + 1)
    assert "7.000 rank-hours used, 0.000 of them lost" in capsys.readouterr().out


def test_it_never_asks_for_more_than_the_budget(cluster, capsys):
    """Two ranks for an hour at worst, half an hour in truth."""
    first, *_ = cluster.study(HOUR_EACH + RUNS % [1, 2, 3, 4, 5])
    cluster.ends[first] = [Ends("NODE_FAIL")]
    assert cluster.watch(flags=["--watch", "--budget-gpu-hours", "4.5"]) == 1
    # 2 x 2 at first; when both have used 1 each, 1 more; 3 used then, and 2 more are too much.
    assert len(cluster.jobs) == 3
    out = capsys.readouterr().out
    assert "it may cost 2.00 rank-hours, and 3.00 of 4.5 are used or asked for" in out
    assert "submitted: not submitted" not in out and " was not submitted: it may cost 2.00" in out
    assert "3.000 rank-hours used, 1.000 of them lost" in out
    assert (
        cluster.watch(flags=["--watch", "--budget-gpu-hours", "5"]) == 1 and len(cluster.jobs) == 4
    )


def test_it_may_be_killed_and_started_again(cluster, monkeypatch):
    runs = list(cluster.study("[slurm]\nmax_restarts = 1\n" + RUNS % [1, 2]))
    cluster.ends = {runs[0]: [Ends("NODE_FAIL")] * 9}
    sleep, kills, code = watch.time.sleep, 0, None

    class Killed(BaseException):
        pass

    def killed(seconds):
        sleep(seconds)
        raise Killed

    monkeypatch.setattr(watch.time, "sleep", killed)
    while code is None:
        try:
            code = cluster.watch()
        except Killed:
            kills += 1
    assert kills >= 4 and code == 1
    names = [job.name for job in cluster.jobs.values()]
    assert sorted(names) == [runs[0], runs[0], runs[1]]


def test_it_waits_for_a_slurmctld_that_starts_again(cluster, capsys):
    cluster.study(RUNS % [1, 2])
    cluster.away = 6
    assert cluster.watch() == 0
    assert capsys.readouterr().out.count("no Slurm answers") == 1
    assert len(cluster.jobs) == 2


def test_it_ends_when_slurm_goes_on_refusing_and_nothing_runs(cluster, capsys):
    cluster.study()
    cluster.refusals = 9
    assert cluster.watch() == 0 and len(cluster.jobs) == 1
    assert capsys.readouterr().out.count("Socket timed out; tried again every 30 s") == 1
    cluster.refusals, cluster.jobs = 10, {}
    shutil.rmtree(cluster.logs)
    assert cluster.watch() == 2
    assert capsys.readouterr().err == "slurm.submit: ddp-dp2: sbatch: Socket timed out\n"


def test_what_is_wrong_at_the_start_ends_the_watch(cluster, monkeypatch, capsys):
    cluster.study('[slurm]\nafter = "nothere"\n' + RUNS % [1])
    assert cluster.watch() == 2 and "nothere.toml: No such file" in capsys.readouterr().err
    cluster.study('[slurm]\nafter = "grid"\n' + RUNS % [1])
    assert cluster.watch() == 2 and "names the study itself" in capsys.readouterr().err
    monkeypatch.setattr(submit.shutil, "which", lambda name: None)
    assert cluster.watch() == 2 and "squeue is not found" in capsys.readouterr().err


def test_a_study_waits_until_another_is_complete_and_its_condition_holds(cluster, tmp_path, capsys):
    only_if = f"{tmp_path}/passed"
    asks = f'[slurm]\nafter = "first"\nonly_if = "test -e {only_if}"\n'
    cluster.study(name="first")
    cluster.study(asks + RUNS % [1], "then")
    assert (
        submit.main([f"{tmp_path}/then.toml", "--no-preflight", "--logs", str(cluster.logs)]) == 2
    )
    assert "waits for first: 0 of 1 runs are complete; --watch waits" in capsys.readouterr().err
    assert cluster.watch("then", "first") == 1
    assert len(cluster.jobs) == 1
    assert "was not submitted: only_if ended with status 1: test -e" in capsys.readouterr().out
    (tmp_path / "passed").touch()
    assert cluster.watch("then") == 0 and len(cluster.jobs) == 2


CHAIN = """[defaults]
gpus = 2
save_interval = 1
[[run]]
label = "b"
after = "ddp-dp2-a"
[[run]]
label = "a"
"""


def test_a_run_is_submitted_when_the_run_that_it_waits_for_is_complete(cluster, capsys):
    assert cluster.study(CHAIN) == ["ddp-dp2-a", "ddp-dp2-b"]
    cluster.ends["ddp-dp2-a"] = [Ends("NODE_FAIL")]
    assert cluster.watch() == 0
    assert [job.name[-1] for job in cluster.jobs.values()] == ["a", "a", "b"]
    assert "grid/ddp-dp2-b: waits for ddp-dp2-a (missing)" in capsys.readouterr().out
    cluster.study(CHAIN, "hopeless")
    cluster.ends["ddp-dp2-a"] = [Ends("FAILED", "ValueError: no")]
    assert cluster.watch("hopeless") == 1
    assert "ddp-dp2-b was not submitted: waits for ddp-dp2-a (failed)" in capsys.readouterr().out


def test_a_job_waits_for_the_job_of_a_run_and_is_submitted_again_with_it(cluster, capsys):
    cluster.study(CHAIN)
    command = [f"{cluster.folder}/grid.toml", "--no-checks", "--yes", "--logs", str(cluster.logs)]
    assert submit.main([*command, "--only", "ddp-dp2-b"]) == 2
    line = "ddp-dp2-b waits for ddp-dp2-a, which is missing: submit both"
    assert line in capsys.readouterr().err and not cluster.jobs
    assert submit.main(command) == 0
    assert "submitted ddp-dp2-b: job 101, after 100" in capsys.readouterr().out
    first, second = cluster.given("sbatch")
    waits = ["--dependency=afterok:100", "--kill-on-invalid-dep=yes"]
    assert second[-2:] == waits and not {*waits} & {*first}
    # The first fails, and Slurm cancels the second; accounting never lists it.
    cluster.jobs[100].state, cluster.jobs[101].state = "FAILED", "CANCELLED"
    cluster.reasons["ddp-dp2-b"] = "DependencyNeverSatisfied"
    asked = [f"{cluster.folder}/grid.toml", "--logs", str(cluster.logs)]
    for listed in (True, False, False):
        assert status.main(asked) == 1
        out = capsys.readouterr().out
        assert "never started: a run that job 101 waited for was not complete" in out
        assert "1 failed, 1 missing" in out
        if not listed:
            assert json.loads((cluster.logs / "grid/ddp-dp2-b/101.state").read_text())["reason"]
            (cluster.logs / "grid/ddp-dp2-b/101.state").unlink()
        cluster.hidden.add(101)
    assert submit.main([*command, "--only", "failed"]) == 0
    assert submit.main(command) == 0
    assert cluster.given("sbatch")[-1][-2] == "--dependency=afterok:102"


def test_an_own_dependency_beside_after_is_refused(cluster, capsys):
    cluster.study("[slurm]\noptions = ['--dependency=singleton']\n" + CHAIN)
    assert cluster.watch() == 2
    line = (
        "ddp-dp2-b on local-test: sbatch's option --dependency=singleton contradicts --dependency"
    )
    assert line in capsys.readouterr().err


SECOND = """[%s]
gpus_per_node = 2
cores_per_node = 2
gpu_request = "none"
slurm_cluster = "%s"
"""


def test_every_question_goes_to_the_cluster_that_the_study_runs_on(cluster, monkeypatch, tmp_path):
    """And jobs of two clusters that have one number are told apart."""
    (tmp_path / "clusters.toml").write_text(SECOND % ("far", "far"))
    monkeypatch.setenv("SCALING_CLUSTERS", str(tmp_path / "clusters.toml"))
    path = study_file(tmp_path / "far.toml", RUNS % [1])
    path.write_text(path.read_text().replace("local-test", "far"))
    cluster.study("[slurm]\nleave_out_nodes = true\n" + RUNS % [2])
    command = ["--no-checks", "--yes", "--logs", str(cluster.logs)]
    paths = [str(path), f"{tmp_path}/grid.toml"]
    assert submit.main([*paths, *command]) == 0
    assert cancel.main([*paths, "--logs", str(cluster.logs)]) == 0
    far = [call for call in cluster.calls if call[-1] == "--clusters=far"]
    assert {call[0] for call in far} == {"squeue", "sacct", "sbatch", "scancel"}
    assert [call[1:] for call in cluster.calls if call[0] == "scancel"] == [
        ["100", "--clusters=far"],
        ["101"],
    ]
    assert "#SBATCH --clusters=far\n" in cluster.scripts[0]
    assert "--clusters" not in cluster.scripts[1]


def test_a_condition_that_does_not_end_is_ended_with_all_that_it_started(
    cluster, tmp_path, monkeypatch, capsys
):
    """While it runs, nobody else submits."""
    monkeypatch.setattr(watch, "ONLY_IF_S", 0.5)
    started = tmp_path / "started"
    cluster.study(
        f'[slurm]\nonly_if = "sleep 300 & echo $! | tee {started}; cat; wait"\n' + RUNS % [1],
    )
    assert cluster.watch() == 1 and not cluster.jobs
    number = int(started.read_text())
    assert "only_if did not end within 0.5 s: sleep 300" in capsys.readouterr().out
    testbed.wait_for(lambda: not testbed.psutil.pid_exists(number), 10, "its end")


def test_a_job_that_slurm_restarted_has_held_its_nodes_all_the_time():
    line = "7|NODE_FAIL|0:0|None|a|grid|/r|{}\n"
    assert parse(line.format("00:01:40") + line.format("00:00:20"))[7].elapsed_s == 120
    queue = "8|RUNNING|0|None|a|grid|/r|1-02:00:03|\n9|RUNNING|0|None|a|grid|/r|0:00|\n"
    queued = parse(queue)
    assert (queued[8].elapsed_s, queued[9].elapsed_s) == (93603, 0)
    assert parse("8|RUNNING|0|None|a|grid|/r|\n")[8].elapsed_s is None
