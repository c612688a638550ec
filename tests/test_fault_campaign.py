"""The fault campaign of tests/tools/fault_campaign.py, a few kills of it."""

import json
import subprocess
import sys

import pytest

from tests.conftest import ROOT

pytestmark = pytest.mark.slow


@pytest.mark.slow
def test_runs_killed_at_random_lose_nothing(tokens, tmp_path):
    script = str(ROOT / "tests" / "tools" / "fault_campaign.py")
    command = [sys.executable, script, "--kills", "4", "--steps", "60", "--only", "ddp"]
    command += ["--seed", "ci", "--out", str(tmp_path), "--data", str(tokens)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "the curve of 60 steps is bit for bit the undisturbed one" in done.stdout
    result = json.loads((tmp_path / "result.json").read_text())
    assert (result["kills"], result["lost"]) == (4, 0)
