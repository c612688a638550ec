"""`python -m analysis` names every command, and every command runs as a module and as a script."""

import subprocess
import sys

import pytest

from analysis.__main__ import NOT_COMMANDS, commands, main
from tests.conftest import ROOT


def test_the_list_has_every_command_with_its_line(capsys):
    assert main([]) == 0
    lines = capsys.readouterr().out.splitlines()
    files = {path.stem for path in (ROOT / "analysis").glob("*.py")} - set(NOT_COMMANDS)
    assert set(commands()) == files and len(lines) == len(files)
    assert all("def main(" in (ROOT / "analysis" / f"{name}.py").read_text() for name in files)
    for line in lines:
        command, _, said = line.removeprefix("python -m analysis.").partition(" ")
        assert command in files and said.strip().endswith((".", "?"))


@pytest.mark.parametrize("name", sorted(commands()))
def test_a_command_runs_as_a_script_from_any_folder(name, tmp_path):
    script = [sys.executable, str(ROOT / "analysis" / f"{name}.py"), "--help"]
    done = subprocess.run(script, cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert f"python -m analysis.{name}" in done.stdout
