"""--out: no command replaces an input, or a file that it did not write, and none leaves half."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from analysis import calibrate, page, plan, plots
from base.errors import OutputError, UsageError
from base.files import ROOT
from base.storage import output
from slurm import render
from tests.fixture_runs import facts, write

STUDY = 'question = "?"\ncluster = "local-test"\n[[run]]\n'
TABLE = ROOT / "logs" / "published" / "ultrascale_h100.csv"


@pytest.fixture
def runs(tmp_path):
    write(tmp_path / "runs", facts("s", "ddp", engine="ddp"))
    return tmp_path / "runs"


def refuses(capsys, main, *words):
    """Whether a command ends with 2 and one line about its output."""
    assert main([str(word) for word in words]) == 2
    said = capsys.readouterr().err
    assert "cannot write" in said and said.count("\n") == 1
    return said


def test_an_input_and_a_file_of_others_stay_as_they_are(tmp_path, runs, capsys, refused):
    table = tmp_path / "t.csv"
    table.write_text(TABLE.read_text())
    steps = next(runs.rglob("steps.csv"))
    notes = tmp_path / "notes.txt"
    notes.write_text("mine")
    before = {path: path.read_bytes() for path in (table, steps, notes)}
    assert "it is an input" in refuses(capsys, page.main, table, "--out", table, "--force")
    assert "--force" in refuses(capsys, page.main, runs, "--out", steps)
    for out in (table, notes):
        refuses(capsys, calibrate.main, "--runs", table, "--cluster", "x", "--out", out)
    planned = "--preset gpt2-124m --gpus 8 --cluster jean-zay-v100 --global-batch 64 --study"
    assert "--force" in refused(plan.main, *planned.split(), notes)
    assert {path: path.read_bytes() for path in before} == before


def test_no_flag_replaces_the_evidence_that_is_read(runs, refused):
    for evidence in runs.rglob("steps.csv"):
        before = evidence.read_bytes()
        for given in (runs, evidence.parent):
            assert "it is in a folder that is read" in refused(
                page.main, given, "--out", evidence, "--force"
            )
        assert evidence.read_bytes() == before
    for _ in range(2):  # its own page in that folder is replaced
        assert page.main([str(runs), "--out", str(runs / "x.html")]) == 0


def test_a_picture_of_others_stays_in_a_folder_of_pictures(runs, tmp_path, capsys):
    folder = tmp_path / "plots"
    folder.mkdir()
    (folder / "tflops.png").write_text("mine")
    refuses(capsys, plots.main, runs, "--out", folder)
    assert (folder / "tflops.png").read_text() == "mine"
    assert plots.main([str(runs), "--out", str(folder), "--force"]) == 0
    assert plots.main([str(runs), "--out", str(folder)]) == 0  # they are ours now


def test_a_study_and_a_script_by_hand_are_not_replaced(tmp_path, capsys):
    study, script = tmp_path / "mine.toml", tmp_path / "mine.slurm"
    study.write_text(STUDY)
    script.write_text("#!/bin/bash\nmine\n")
    refuses(capsys, render.main, study)
    refuses(capsys, render.main, study, "--dry-run")
    assert script.read_text() == "#!/bin/bash\nmine\n"
    assert render.main([str(study), "--force"]) == render.main([str(study)]) == 0
    own = tmp_path / "s.slurm"
    own.write_text(STUDY)
    assert render.main([str(own), "--force"]) == 2 and own.read_text() == STUDY  # means s.toml


def test_a_full_disk_leaves_the_old_file(runs):
    """A limit on the size of files stands for the disk."""
    assert page.main([str(runs)]) == page.main([str(runs)]) == 0  # it replaces what it wrote
    old = (runs / "study.html").read_bytes()
    command = f"ulimit -f 4; exec {sys.executable} -m analysis.page {runs}"
    env = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(["bash", "-c", command], env=env, capture_output=True, text=True)
    said = f"analysis.page: cannot write {runs}/study.html: File too large\n"
    assert (done.returncode, done.stderr) == (1, said)
    assert (runs / "study.html").read_bytes() == old
    assert [p.name for p in runs.iterdir() if p.is_file()] == ["study.html"]


def test_a_links_target_a_device_and_a_mode_are_kept(tmp_path):
    target, link = tmp_path / "target", tmp_path / "link"
    target.write_text("mark old")
    target.chmod(0o640)
    link.symlink_to(target)
    with output(link, "mark") as file:
        file.write_text("mark new")
    assert link.is_symlink() and target.read_text() == "mark new"
    assert target.stat().st_mode & 0o777 == 0o640
    with output(Path("/dev/null"), "mark") as file:
        file.write_text("gone")


def test_an_error_while_writing_leaves_the_old_file(tmp_path):
    path = tmp_path / "file"
    path.write_text("mark old")
    for error, kind in ((OSError(28, "No space left"), OutputError), (ValueError, UsageError)):
        with pytest.raises(kind, match="cannot write"), output(path, "mark") as file:
            file.write_text("half")
            raise error
        assert path.read_text() == "mark old" and list(tmp_path.iterdir()) == [path]
