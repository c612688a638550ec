"""Which nodes a study suspects, and which of its jobs leave them out."""

import json
import os
import time
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from parallel.config.clusters import Cluster as Cluster_
from parallel.config.study import load_study
from parallel.measure import node_rates
from parallel.record.schema import utc_now
from parallel.record.writer import append_rows
from slurm import nodes, sbatch, squeue, states
from slurm.nodes import Change
from tests.conftest import study_file
from tests.tools.fake_slurm import FakeJob, FakeSlurm

RUNS = """[slurm]
leave_out_nodes = {}
[[run]]
engine = "ddp"
gpus = 2
[[run]]
engine = "ddp"
gpus = 6
global_batch = 6
"""
SMALL, WIDE = "ddp-dp2", "ddp-dp6"
LOST = "step 1\nsrun: error: Node failure on {}\n"


class Suspects:
    """A study, the Slurm that it asks, and what it knows of nodes."""

    def __init__(self, folder: Path, slurm: FakeSlurm):
        self.slurm, self.logs, self.grid = slurm, folder / "logs", folder / "logs/grid"
        self.study = load_study(study_file(folder / "grid.toml", RUNS.format("true")))
        self.grid.mkdir(parents=True)

    def job(self, number: int, run: str, log: str, verdict: str = "node failure") -> Path:
        """A job of a run that has ended; its log."""
        path = self.grid / run / f"{number}.out"
        path.parent.mkdir(exist_ok=True)
        path.write_text(log)
        if verdict:
            path.with_suffix(".state").write_text(json.dumps({"verdict": verdict}))
        return path

    def suspect(self, *names: str, days: float = 0.0) -> None:
        when = (datetime.now(UTC) - timedelta(days=days)).isoformat()
        nodes.write_changes(self.grid, [Change(when, n, "suspected", "the reason") for n in names])

    def update(self, *waiting: tuple[str, int]) -> list[str]:
        """Look at all evidence; waiting: the run and the number of each job that waits."""
        rows = [states.Row(run, "pending", job, 0, 1, None, "") for run, job in waiting]
        return nodes.update(self.study, self.logs, rows)

    def forgive(self, node: str) -> None:
        nodes.forgive(self.grid, [node])

    def changes(self) -> list[tuple[str, str]]:
        return [(change.change, change.node) for change in nodes.read_changes(self.grid)]

    def option(self, run: str = SMALL) -> list[str]:
        """What sbatch is given."""
        return nodes.option(self.study, self.logs, run)

    def left_out(self, run: str = SMALL) -> list[str]:
        text = "".join(self.option(run)).removeprefix("--exclude=")
        return text.split(",") if text else []


@pytest.fixture
def suspects(tmp_path, monkeypatch):
    return Suspects(tmp_path, FakeSlurm(monkeypatch))


def waiting(slurm: FakeSlurm, names: dict[int, str]) -> None:
    """Jobs that wait, and the nodes that they leave out."""
    slurm.jobs = {n: FakeJob("PENDING", "", excluded=each) for n, each in names.items()}


def excluded(slurm: FakeSlurm) -> dict[int, str]:
    return {number: job.excluded for number, job in slurm.jobs.items()}


def test_a_node_that_a_job_lost_is_suspected_and_forgiven_once(suspects, capsys):
    suspects.job(7, WIDE, LOST.format("node3"), verdict="")
    suspects.update()
    assert suspects.left_out() == []  # nobody said that the job died of it
    log = suspects.job(7, WIDE, LOST.format("node3"))
    suspects.update()
    assert suspects.left_out() == ["node3"]
    assert "node3: suspected: job 7 of ddp-dp6 lost it" in capsys.readouterr().out
    suspects.update()
    suspects.forgive("node3")
    suspects.update()
    os.utime(log, (now := time.time() + 9, now))  # a copy, or a line behind the end
    suspects.update()
    assert suspects.changes() == [("suspected", "node3"), ("forgiven", "node3")]
    assert suspects.left_out() == []
    with pytest.raises(nodes.UsageError, match="node3 is not suspected; these are: none"):
        suspects.forgive("node3")


def test_the_only_node_of_a_job_that_died_of_its_node_is_the_one(suspects):
    for job, held in ((7, "node2"), (8, "node1,node3")):
        log = suspects.job(job, SMALL, "GPU has fallen off the bus\n")
        about = f"   ReqNodeList=node4 ExcNodeList=\n   NodeList={held}\n"
        log.with_suffix(".job").write_text(about)
    suspects.update()
    assert suspects.changes() == [("suspected", "node2")]


def test_a_restarted_job_remembers_the_node_that_it_lost(suspects):
    log = suspects.job(7, WIDE, LOST.format("node1"), verdict="")
    again = log.with_name("7.restart1.out")
    again.write_text("training\n")
    suspects.update()
    assert suspects.left_out() == ["node1"]
    suspects.forgive("node1")
    again.write_text(LOST.format("node1"))
    suspects.update()
    assert suspects.left_out() == ["node1"]


def test_a_node_that_a_preflight_found_slow_is_suspected(suspects, capsys):
    row = dict.fromkeys(node_rates.COLUMNS) | {"time_utc": utc_now(), "nodes": 1, "ranks": 1}
    row |= {"job": "7", "run": SMALL}
    rows = [row | {"node": "node1", "short": ""}, row | {"node": "node2", "short": "copy: 1 GB/s"}]
    append_rows(suspects.grid / node_rates.FILE, node_rates.COLUMNS, rows)
    for _ in range(2):
        suspects.update()
    said = "node node2: suspected: preflight of job 7, ddp-dp2: copy: 1 GB/s\n"
    assert capsys.readouterr().out == said
    assert suspects.left_out() == ["node2"]


def test_never_so_many_that_a_run_cannot_start(suspects, capsys):
    suspects.suspect("node1", "node2", "node3", "node4")
    assert suspects.left_out(WIDE) == ["node1"]
    assert suspects.left_out(SMALL) == ["node1", "node2", "node3"]
    suspects.slurm.nodes["node4"] = "down*"
    assert suspects.left_out(WIDE) == ["node4"]  # it takes no job anyway
    suspects.slurm.nodes |= {"node3": "drain", "node2": "drng"}
    assert suspects.left_out(WIDE) == []
    capsys.readouterr()
    assert suspects.option(SMALL) == ["--exclude=node2,node3,node4"]
    assert capsys.readouterr().out.startswith("node node1: not left out: ")


def test_a_name_that_slurm_does_not_know_is_not_given_to_it(suspects, capsys):
    suspects.suspect("login1.site", "node2")
    assert suspects.option() == ["--exclude=node2"]
    assert "node login1.site: not left out: unknown to Slurm" in capsys.readouterr().out


def test_waiting_jobs_get_the_exclusion_and_lose_it(suspects, capsys):
    slurm = suspects.slurm
    waiting(slurm, {7: "", 8: "node4", 9: ""})
    slurm.started = {7}
    # Job 10 has started before squeue was asked.
    rows = [(SMALL, 7), (WIDE, 8), (SMALL, 9), (SMALL, 10)]
    suspects.suspect("node2")
    suspects.update(*rows)
    del slurm.jobs[7]
    assert excluded(slurm) == {8: "node2,node4", 9: "node2"}  # node4: not by this command
    calls = len(slurm.calls)
    suspects.update(*rows)
    assert [c for c in slurm.calls[calls:] if c[0] == "scontrol"] == []
    suspects.forgive("node2")
    suspects.update(*rows)
    assert excluded(slurm) == {8: "node4", 9: ""}
    written = [change for change, _ in suspects.changes()]
    assert written == ["suspected", *["left out"] * 2, "forgiven", *["put back"] * 2]
    assert capsys.readouterr().out.count("\n") == len(written)


def test_the_first_suspicion_reaches_a_waiting_job_and_nobody_is_asked_without_need(suspects):
    waiting(suspects.slurm, {9: ""})
    suspects.update((SMALL, 9))
    assert suspects.slurm.calls == []  # nothing is suspected
    suspects.job(7, WIDE, LOST.format("node3"))
    suspects.update()
    assert suspects.slurm.calls == []  # no job waits
    (suspects.grid / "nodes.csv").unlink()
    suspects.update((SMALL, 9))
    assert excluded(suspects.slurm) == {9: "node3"}


def test_evidence_expires(suspects):
    suspects.suspect("node1", days=6.9)
    suspects.suspect("node2", days=7.1)
    suspects.update()
    assert suspects.left_out() == ["node1"]
    assert suspects.changes()[2:] == [("expired", "node2")]
    os.utime(suspects.job(7, SMALL, LOST.format("node3")), (0, 0))
    suspects.update()
    assert "node3" not in {node for _, node in suspects.changes()}


def test_only_nodes_that_the_jobs_can_have_count_as_usable(monkeypatch):
    lines = ["n1|gpu*|idle|h100,ib", "n2|gpu*|idle|a100", "n3|gpu*|drain|h100", "n4|cpu|idle|h100"]
    monkeypatch.setattr(squeue, "run", lambda command, cluster: "\n".join(lines))
    cluster = Cluster_("mine", None, 4, 8, constraint="h100&ib|v100")
    assert nodes.nodes_of(cluster, "") == {"n1": True, "n2": False, "n3": False}


def test_submit_leaves_nodes_out_where_the_study_asks(suspects, tmp_path):
    suspects.suspect("node3")
    for asks in ("true", "false"):
        study = load_study(study_file(tmp_path / "grid.toml", RUNS.format(asks)))
        sbatch.submit(study, SMALL, suspects.logs)
    sent = [given[2:] for given in suspects.slurm.given("sbatch")]
    assert sent == [["--exclude=node3"], []]


def test_while_a_ledger_is_damaged_no_node_is_left_out_and_nothing_is_added_to_it(suspects):
    suspects.suspect("node1")
    ledger = suspects.grid / "nodes.csv"
    before = f"{ledger.read_text()}yesterday,node2,suspected,why\n"
    ledger.write_text(before)
    (line,) = suspects.update((SMALL, 9))
    assert "nodes.csv:3: " in line and "'yesterday'" in line and "no node is left out" in line
    assert suspects.option() == [] and ledger.read_text() == before
    with pytest.raises(nodes.UsageError, match="nodes.csv:3: .*'yesterday'"):
        suspects.forgive("node1")
