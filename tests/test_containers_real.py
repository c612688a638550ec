"""A run in a container on a real Slurm: Debian's charliecloud, with this machine's own files."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from base.files import ROOT
from parallel.config.study import load_study
from parallel.record import reader
from slurm import states, submit
from tests.conftest import wait_for
from tests.tools import testbed

pytestmark = pytest.mark.slow

# Its Python is a script that only the image has, so a run that starts is inside.
PYTHON = "/only/in/the/image/python"
CLUSTERS = """[contained]
description = "the local test cluster, in a container"
gpus_per_node = 2
cores_per_node = 2
partition = "test"
gpu_request = "none"
memory = "1900M"
time = "00:05:00"
srun = ["--cpu-bind=none"]
setup = ["export SET_UP=1"]
environment = {{ GLOO_SOCKET_IFNAME = "lo" }}

[contained.container]
runtime = "charliecloud"
image = "{image}"
mounts = {mounts}
python = "{python}"
"""


@pytest.fixture
def image(tmp_path):
    """A folder that ch-run takes for an image: empty places for this machine's own folders."""
    if shutil.which("ch-run") is None:
        pytest.skip("charliecloud is not here (apt-get install charliecloud)")
    root = tmp_path / "image"
    ours = ["/usr", sys.base_prefix, os.path.realpath(sys.prefix), str(ROOT), str(tmp_path)]
    mounts = sorted(set(ours))
    for place in ["/proc", "/sys", "/dev", "/etc", "/tmp", "/only/in/the/image", *mounts]:
        (root / place.lstrip("/")).mkdir(parents=True, exist_ok=True)
    for name in ("bin", "lib", "lib64"):
        (root / name).symlink_to(f"usr/{name}")
    for name in ("passwd", "group", "hosts", "resolv.conf"):
        (root / "etc" / name).touch()
    python = root / PYTHON.lstrip("/")
    python.write_text(f'#!/bin/sh\nNCCL_IN_THE_IMAGE=1 exec {sys.executable} "$@"\n')
    python.chmod(0o755)
    tried = ["ch-run", *(f"--bind={mount}" for mount in mounts), str(root), "--", PYTHON, "-V"]
    done = subprocess.run(
        tried, env=os.environ | {"USER": "root"}, capture_output=True, text=True, timeout=60
    )
    if "clone" in done.stderr or "unshare" in done.stderr or "user namespace" in done.stderr:
        pytest.skip(f"this kernel gives no user namespaces: {done.stderr.strip()}")
    assert done.returncode == 0, done.stderr
    return root, [mount for mount in mounts if mount != str(ROOT)]  # which the job mounts


@pytest.fixture
def slurm(tmp_path_factory, monkeypatch):
    if missing := testbed.missing_packages():
        pytest.skip(f"Slurm is not here (apt-get install {' '.join(missing)})")
    if os.geteuid() != 0:
        pytest.skip("the test cluster needs root")
    folder = tmp_path_factory.mktemp("slurm")
    monkeypatch.setenv("SLURM_CONF", str(testbed.up(2, folder)))
    monkeypatch.setenv("PYTHON", sys.executable)  # outside
    yield
    testbed.down(folder)


@pytest.mark.slow
def test_a_run_trains_in_charliecloud_and_saves_when_its_time_is_over(
    slurm, image, tokens, tmp_path, monkeypatch
):
    """Two nodes; and a line of set-up that fails ends the second run before its training."""
    root, mounts = image
    mounts.append(str(Path(tokens).resolve()))
    (root / mounts[-1].lstrip("/")).mkdir(parents=True, exist_ok=True)
    own = tmp_path / "clusters.toml"
    table = CLUSTERS.format(image=root, mounts=json.dumps(mounts), python=PYTHON)
    broken = table.replace("[contained", "[broken").replace("export SET_UP=1", "source no.sh")
    own.write_text(table + broken)
    monkeypatch.setenv("SCALING_CLUSTERS", str(own))
    path = tmp_path / "inside.toml"
    path.write_text(
        f'question = "?"\ncluster = "contained"\n[defaults]\npreset = "tiny"\nmax_seq_len = 16\n'
        f'device = "cpu"\ndata = "{tokens}"\nlog_interval = 50\neval_steps = 0\n'
        "steps = 1000000\nsave_interval = 1000000\nnodes = 2\n[[run]]\nengine = 'ddp'\n"
    )
    study, logs = load_study(path), tmp_path / "logs"
    folder = logs / "inside" / "ddp"
    assert submit.main([str(path), "--logs", str(logs)]) == 0

    def row(of=study):
        return states.rows(of, logs, states.ask_slurm())[0]

    wait_for(lambda: row().step > 0 or row().state in states.FAILURES, 240, "the run to train")
    job_id = row().job_id
    log = (folder / f"{job_id}.out").read_text()
    assert row().state == "running", log
    told = reader.read_json_if_whole(folder / "launcher_metadata.json")
    assert "NCCL_IN_THE_IMAGE" in json.dumps(told), told
    ask = ["scancel", "--batch", "--signal=USR1", str(job_id)]  # as Slurm before the time limit
    subprocess.run(ask, env=states.environment(), check=True)
    wait_for(lambda: row().state not in ("running", "pending"), 120, "the run to end")
    assert row().state == "interrupted", (row(), (folder / f"{job_id}.out").read_text())
    assert row().kind == "time limit" and "time limit: SIGUSR1, saved step" in row().line
    assert states.read_end(folder, str(job_id))[0] == "time limit"

    broken_study = load_study(path, "broken")
    again = logs / "broken"
    assert submit.main([str(path), "--cluster", "broken", "--logs", str(again)]) == 0

    def failed():
        return states.rows(broken_study, again, states.ask_slurm())[0]

    wait_for(lambda: failed().state not in ("running", "pending"), 120, "the set-up to fail")
    assert failed().state == "failed" and failed().kind == "refused", failed()
    assert failed().line.startswith("setup: source no.sh: status 1: ")
    assert not (again / "inside" / "ddp" / "steps.csv").exists()
