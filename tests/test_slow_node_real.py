"""On a real Slurm of four nodes: a slow node is named, and the next jobs run on the others."""

import os
import re
import sys
from pathlib import Path

import pytest

from slurm import nodes, squeue, states, submit
from tests.conftest import ROOT, wait_for
from tests.tools import testbed

pytestmark = pytest.mark.slow

CLUSTER = """[single]
gpus_per_node = 1
cores_per_node = 1
partition = "test"
gpu_request = "none"
memory = "1000M"
time = "00:05:00"
options = ["--exclusive"]
environment = { GLOO_SOCKET_IFNAME = "lo", SCALING_ONE_MACHINE = "1", SLOW_NODE = "node1" }
"""


@pytest.fixture
def slurm(tmp_path, tmp_path_factory, monkeypatch):
    if missing := testbed.missing_packages():
        pytest.skip(f"Slurm is not here (apt-get install {' '.join(missing)})")
    if os.geteuid() != 0:
        pytest.skip("the test cluster needs root")
    folder = tmp_path_factory.mktemp("slurm")  # a short path: slurmd makes sockets below it
    python = tmp_path / "python"
    python.write_text(
        f'#!/bin/bash\nexec {sys.executable} "${{@/parallel.bench/tests.slow_node}}"\n'
    )
    python.chmod(0o755)
    (tmp_path / "clusters.toml").write_text(CLUSTER)
    monkeypatch.setenv("PYTHON", str(python))
    monkeypatch.setenv("SCALING_CLUSTERS", str(tmp_path / "clusters.toml"))
    monkeypatch.setenv("SLURM_CONF", str(testbed.up(4, folder)))
    yield
    testbed.down(folder)


def excluded(run: str, folder: Path) -> str:
    (job,) = (path.stem for path in (folder / run).glob("*.submitted"))
    return squeue.run(["squeue", "--noheader", f"--jobs={job}", "--format=%x"]).strip()


def test_a_slow_node_is_named_and_the_next_jobs_run_on_the_others(slurm, tokens, tmp_path, capsys):
    path, logs = tmp_path / "grid.toml", tmp_path / "logs"
    text = (ROOT / "tests" / "studies" / "slow_node.toml").read_text()
    path.write_text(text.replace("DATA", str(tokens)))
    flags = [str(path), "--logs", str(logs)]
    study = nodes.load_studies(nodes.study_parser("x", "").parse_args(flags))[0]
    first, second, third = study.runs
    folder = logs / "grid"
    assert submit.main([*flags, "--only", first]) == 0
    assert submit.main([*flags, "--only", second]) == 0  # it waits: three nodes are taken
    wait_for((folder / "preflights.csv").exists, 240, "the first preflight")
    wait_for(lambda: (folder / "preflights.csv").read_text().count("\n") == 4, 10, "its rows")
    capsys.readouterr()
    assert nodes.main(flags) == 0
    printed = capsys.readouterr().out
    assert re.search(r"node node1: suspected: preflight of .* matrix product: ", printed)
    assert "node1: left out: job" in printed and excluded(second, folder) == "node1"
    assert submit.main([*flags, "--only", third]) == 0
    assert excluded(third, folder) == "node1"

    def rows() -> dict[str, states.Row]:
        return {row.run: row for row in states.rows(study, logs, squeue.all_jobs())}

    wait_for(lambda: rows()[second].state == "complete", 240, "the second run")
    (job,) = (folder / second).glob("*.job")
    assert re.search(r"^ +NodeList=node\[2-4\]$", job.read_text(), re.MULTILINE)
    (log,) = (folder / first).glob("*.out")
    assert log.read_text().count("preflight: node node1 is slow: matrix product: ") == 1
    if rows()[third].state == "pending":
        assert nodes.main([*flags, "--forgive", "node1"]) == 0
        assert excluded(third, folder) == "" or rows()[third].state != "pending"
    suspected = {c.node for c in nodes.read_changes(folder) if c.change == "suspected"}
    assert suspected == {"node1"}
