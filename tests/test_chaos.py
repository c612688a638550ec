"""A watched study while nodes, ranks and a real Slurm fail."""

import os

import pytest

from tests.tools import chaos, testbed

pytestmark = pytest.mark.slow


def test_a_watched_study_ends_whatever_fails(tokens, monkeypatch, capsys):
    """Every run is complete or beyond a retry, no checkpoint is lost, the losses are those of an
    undisturbed run, and the hours those of sacct."""
    if missing := testbed.missing_packages(accounting=True):
        pytest.skip(f"Slurm is not here (apt-get install {' '.join(missing)})")
    if os.geteuid() != 0:
        pytest.skip("the test cluster needs root")
    for name in ("SLURM_CONF", "PYTHON"):
        monkeypatch.setenv(name, "")  # the campaign sets them
    status = chaos.main(["--data", str(tokens), "--runs", "8"])
    assert status == 0, capsys.readouterr().out
