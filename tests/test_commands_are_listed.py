"""`python -m analysis` names every command; the table of runs is a script, too."""

import subprocess
import sys

from analysis.__main__ import commands, main
from tests.conftest import ROOT


def test_the_list_has_every_command_with_its_line(capsys):
    assert main([]) == 0
    lines = capsys.readouterr().out.splitlines()
    files = {path.stem for path in (ROOT / "analysis").glob("[a-z]*.py")}
    assert set(commands()) == files and len(lines) == len(files)
    assert all("def main(" in (ROOT / "analysis" / f"{name}.py").read_text() for name in files)
    for line in lines:
        command, _, said = line.removeprefix("python -m analysis.").partition(" ")
        assert command in files and said.strip().endswith((".", "?"))


def test_the_table_of_runs_is_a_script_that_starts_in_any_folder(tmp_path):
    script = [sys.executable, str(ROOT / "analysis" / "tflops.py"), "--help"]
    done = subprocess.run(script, cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert "python -m analysis.tflops" in done.stdout or "analysis/tflops.py" in done.stdout
