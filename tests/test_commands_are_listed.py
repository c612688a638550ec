"""The table of runs is a script, too."""

import subprocess
import sys

from tests.conftest import ROOT


def test_the_table_of_runs_is_a_script_that_starts_in_any_folder(tmp_path):
    script = [sys.executable, str(ROOT / "analysis" / "tflops.py"), "--help"]
    done = subprocess.run(script, cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert "python -m analysis.tflops" in done.stdout or "analysis/tflops.py" in done.stdout
