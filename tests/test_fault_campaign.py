"""The fault campaign of tests/tools/fault_campaign.py, a few kills of it."""

import subprocess
import sys

import pytest

from tests.conftest import ROOT


@pytest.mark.slow
def test_runs_killed_at_random_lose_nothing(tokens, tmp_path):
    command = [sys.executable, str(ROOT / "tests" / "tools" / "fault_campaign.py")]
    command += ["--kills", "4", "--steps", "60", "--only", "ddp", "--seed", "ci"]
    command += ["--out", str(tmp_path), "--data", str(tokens)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("ddp end nothing lost\n") >= 1  # its curve is that of the other run
    assert len(done.stdout.split("engine")[0].splitlines()) >= 5
