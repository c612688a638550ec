"""Which nodes a study suspects, and which of its jobs leave them out."""

import json
import os
import time
from datetime import UTC, datetime, timedelta

import pytest

from parallel.config.clusters import Cluster as Cluster_
from parallel.config.study import load_study
from parallel.measure import node_rates
from parallel.record.schema import utc_now
from parallel.record.writer import append_rows
from slurm import nodes, squeue, states, submit
from slurm.nodes import Change
from tests.conftest import study_file
from tests.tools.fake_slurm import FakeJob, FakeSlurm

ASKS = """[slurm]
leave_out_nodes = true
[[run]]
engine = "ddp"
gpus = 2
[[run]]
engine = "ddp"
gpus = 6
global_batch = 6
"""
SMALL, WIDE = "ddp-dp2", "ddp-dp6"


@pytest.fixture
def cluster(monkeypatch):
    return FakeSlurm(monkeypatch)


@pytest.fixture
def study(tmp_path):
    (tmp_path / "logs/grid").mkdir(parents=True)
    return load_study(study_file(tmp_path / "grid.toml", ASKS))


def suspect(logs, *names: str, days: float = 0.0) -> None:
    when = (datetime.now(UTC) - timedelta(days=days)).isoformat()
    rows = [Change(when, name, "suspected", "the reason") for name in names]
    nodes.write_changes(logs / "grid", rows)


def row(run: str, job: int) -> states.Row:
    return states.Row(run, "pending", job, 0, 1, None, "")


def waiting(cluster, names: dict[int, str]) -> None:
    """Jobs that wait, and the nodes that they leave out."""
    cluster.jobs = {n: FakeJob("PENDING", "", excluded=each) for n, each in names.items()}


def excluded(cluster) -> dict[int, str]:
    return {number: job.excluded for number, job in cluster.jobs.items()}


def left_out(study, logs, run: str) -> list[str]:
    """The nodes of sbatch's option."""
    text = "".join(nodes.option(study, logs, run)).removeprefix("--exclude=")
    return text.split(",") if text else []


def test_a_node_that_a_job_lost_is_suspected_and_forgiven_once(study, cluster, tmp_path, capsys):
    logs = tmp_path / "logs"
    folder = logs / "grid" / WIDE
    folder.mkdir()
    (folder / "7.out").write_text("step 1\nsrun: error: Node failure on node3\n")
    nodes.update(study, logs, [])
    assert left_out(study, logs, SMALL) == []  # nobody said that the job died of it
    (folder / "7.state").write_text(json.dumps({"verdict": "node failure"}))
    nodes.update(study, logs, [])
    assert left_out(study, logs, SMALL) == ["node3"]
    assert "node3: suspected: job 7 of ddp-dp6 lost it" in capsys.readouterr().out
    nodes.update(study, logs, [])
    nodes.forgive(logs / "grid", ["node3"])
    nodes.update(study, logs, [])
    os.utime(folder / "7.out", (now := time.time() + 9, now))  # a copy, or a line behind the end
    nodes.update(study, logs, [])
    kinds = [change.change for change in nodes.read_changes(logs / "grid")]
    assert kinds == ["suspected", "forgiven"]
    assert left_out(study, logs, SMALL) == []
    with pytest.raises(nodes.UsageError, match="node3 is not suspected; these are: none"):
        nodes.forgive(logs / "grid", ["node3"])


def test_the_only_node_of_a_job_that_died_of_its_node_is_the_one(study, cluster, tmp_path):
    folder = tmp_path / "logs/grid" / SMALL
    folder.mkdir()
    for job, held in ((7, "node2"), (8, "node1,node3")):
        (folder / f"{job}.out").write_text("GPU has fallen off the bus\n")
        (folder / f"{job}.job").write_text(
            f"   ReqNodeList=node4 ExcNodeList=\n   NodeList={held}\n"
        )
        (folder / f"{job}.state").write_text(json.dumps({"verdict": "node failure"}))
    nodes.update(study, tmp_path / "logs", [])
    assert [c.node for c in nodes.read_changes(tmp_path / "logs/grid")] == ["node2"]


def test_a_restarted_job_remembers_the_node_that_it_lost(study, cluster, tmp_path):
    folder = tmp_path / "logs/grid" / WIDE
    folder.mkdir()
    (folder / "7.out").write_text("srun: error: Node failure on node1\n")
    (folder / "7.restart1.out").write_text("training\n")
    nodes.update(study, tmp_path / "logs", [])
    assert left_out(study, tmp_path / "logs", SMALL) == ["node1"]
    nodes.forgive(tmp_path / "logs/grid", ["node1"])
    (folder / "7.restart1.out").write_text("srun: error: Node failure on node1\n")  # again
    nodes.update(study, tmp_path / "logs", [])
    assert left_out(study, tmp_path / "logs", SMALL) == ["node1"]


def test_a_node_that_a_preflight_found_slow_is_suspected(study, cluster, tmp_path, capsys):
    logs = tmp_path / "logs"
    row = dict.fromkeys(node_rates.COLUMNS) | {"time_utc": utc_now(), "nodes": 1, "ranks": 1}
    row |= {"job": "7", "run": SMALL}
    rows = [row | {"node": "node1", "short": ""}, row | {"node": "node2", "short": "copy: 1 GB/s"}]
    append_rows(logs / "grid" / node_rates.FILE, node_rates.COLUMNS, rows)
    for _ in range(2):
        nodes.update(study, logs, [])
    said = "node node2: suspected: preflight of job 7, ddp-dp2: copy: 1 GB/s\n"
    assert capsys.readouterr().out == said
    assert left_out(study, logs, SMALL) == ["node2"]


def test_never_so_many_that_a_run_cannot_start(study, cluster, tmp_path, capsys):
    logs = tmp_path / "logs"
    suspect(logs, "node1", "node2", "node3", "node4")
    assert left_out(study, logs, WIDE) == ["node1"]
    assert left_out(study, logs, SMALL) == ["node1", "node2", "node3"]
    cluster.nodes["node4"] = "down*"
    assert left_out(study, logs, WIDE) == ["node4"]  # it takes no job anyway
    cluster.nodes |= {"node3": "drain", "node2": "drng"}
    assert left_out(study, logs, WIDE) == []
    capsys.readouterr()
    assert nodes.option(study, logs, SMALL) == ["--exclude=node2,node3,node4"]
    assert capsys.readouterr().out.startswith("node node1: not left out: ")


def test_a_name_that_slurm_does_not_know_is_not_given_to_it(study, cluster, tmp_path, capsys):
    suspect(tmp_path / "logs", "login1.site", "node2")
    assert nodes.option(study, tmp_path / "logs", SMALL) == ["--exclude=node2"]
    assert "node login1.site: not left out: unknown to Slurm" in capsys.readouterr().out


def test_waiting_jobs_get_the_exclusion_and_lose_it(study, cluster, tmp_path, capsys):
    logs = tmp_path / "logs"
    waiting(cluster, {7: "", 8: "node4", 9: ""})
    cluster.started = {7}
    # Job 10 has started before squeue was asked.
    rows = [row(SMALL, 7), row(WIDE, 8), row(SMALL, 9), row(SMALL, 10)]
    suspect(logs, "node2")
    nodes.update(study, logs, rows)
    del cluster.jobs[7]
    assert excluded(cluster) == {8: "node2,node4", 9: "node2"}  # node4: not by this command
    calls = len(cluster.calls)
    nodes.update(study, logs, rows)
    assert [c for c in cluster.calls[calls:] if c[0] == "scontrol"] == []
    nodes.forgive(logs / "grid", ["node2"])
    nodes.update(study, logs, rows)
    assert excluded(cluster) == {8: "node4", 9: ""}
    written = [c.change for c in nodes.read_changes(logs / "grid")]
    assert written == ["suspected", *["left out"] * 2, "forgiven", *["put back"] * 2]
    assert capsys.readouterr().out.count("\n") == len(written)


def test_the_first_suspicion_reaches_a_waiting_job_and_nobody_is_asked_without_need(
    study, cluster, tmp_path
):
    folder = tmp_path / "logs/grid" / WIDE
    folder.mkdir()
    waiting(cluster, {9: ""})
    nodes.update(study, tmp_path / "logs", [row(SMALL, 9)])
    assert cluster.calls == []  # nothing is suspected
    (folder / "7.out").write_text("srun: error: Node failure on node3\n")
    (folder / "7.state").write_text(json.dumps({"verdict": "node failure"}))
    nodes.update(study, tmp_path / "logs", [])
    assert cluster.calls == []  # no job waits
    (tmp_path / "logs/grid/nodes.csv").unlink()
    nodes.update(study, tmp_path / "logs", [row(SMALL, 9)])
    assert excluded(cluster) == {9: "node3"}


def test_evidence_expires(study, cluster, tmp_path):
    logs = tmp_path / "logs"
    suspect(logs, "node1", days=6.9)
    suspect(logs, "node2", days=7.1)
    nodes.update(study, logs, [])
    assert left_out(study, logs, SMALL) == ["node1"]
    assert [c.node for c in nodes.read_changes(logs / "grid") if c.change == "expired"] == ["node2"]
    folder = logs / "grid" / SMALL
    folder.mkdir()
    (folder / "7.out").write_text("srun: error: Node failure on node3\n")
    (folder / "7.state").write_text(json.dumps({"verdict": "node failure"}))
    os.utime(folder / "7.out", (0, 0))
    nodes.update(study, logs, [])
    assert "node3" not in {change.node for change in nodes.read_changes(logs / "grid")}


def test_only_nodes_that_the_jobs_can_have_count_as_usable(monkeypatch):
    lines = ["n1|gpu*|idle|h100,ib", "n2|gpu*|idle|a100", "n3|gpu*|drain|h100", "n4|cpu|idle|h100"]
    monkeypatch.setattr(squeue, "run", lambda command: "\n".join(lines))
    cluster = Cluster_("mine", None, 4, 8, constraint="h100&ib|v100")
    assert nodes.nodes_of(cluster) == {"n1": True, "n2": False, "n3": False}


def test_submit_leaves_nodes_out_where_the_study_asks(study, cluster, tmp_path):
    logs = tmp_path / "logs"
    suspect(logs, "node3")
    submit.submit(study, SMALL, logs)
    asks_not = load_study(study_file(tmp_path / "grid.toml", ASKS.replace("true", "false")))
    submit.submit(asks_not, SMALL, logs)
    sent = [given[2:] for given in cluster.given("sbatch")]
    assert sent == [["--exclude=node3"], []]


def test_while_a_ledger_is_damaged_no_node_is_left_out_and_nothing_is_added_to_it(
    study, cluster, tmp_path
):
    logs = tmp_path / "logs"
    suspect(logs, "node1")
    with (logs / "grid/nodes.csv").open("a") as file:
        file.write("yesterday,node2,suspected,why\n")
    before = (logs / "grid/nodes.csv").read_text()
    (line,) = nodes.update(study, logs, [row(SMALL, 9)])
    assert "nodes.csv:3: " in line and "'yesterday'" in line and "no node is left out" in line
    assert nodes.option(study, logs, SMALL) == []
    assert (logs / "grid/nodes.csv").read_text() == before
    with pytest.raises(nodes.UsageError, match="nodes.csv:3: .*'yesterday'"):
        nodes.forgive(logs / "grid", ["node1"])
