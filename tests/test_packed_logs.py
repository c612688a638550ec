"""Logs that are gzipped, in a tar or zip, or in a pipe are read like plain ones, up to a size."""

import gzip
import os
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

from analysis import tflops
from analysis.logs.load import load, read_all
from analysis.logs.parsing import packed
from analysis.logs.readers import read
from analysis.logs.record import Refusal
from analysis.logs.verdict import timed
from tests.conftest import ROOT
from tests.test_readers import RUN, megatron

SLOW = "".join(megatron(i, ms=3000.0) for i in range(1, 41))
INSIDE = {"a/job.out": RUN, "b/job.out": SLOW, "b/notes.xyz": "no log", ".git/old.log": RUN}


def plain(folder: Path) -> Path:
    for name, text in INSIDE.items():
        (folder / "in" / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / "in" / name).write_text(text)
    return folder / "in"


def tar(folder: Path, name: str, mode: str) -> Path:
    with tarfile.open(folder / name, mode) as archive:
        archive.add(plain(folder), arcname=".")
    return folder / name


def zipped(folder: Path, name: str) -> Path:
    with zipfile.ZipFile(folder / name, "w", zipfile.ZIP_DEFLATED) as archive:
        for member, text in INSIDE.items():
            archive.writestr(member, text)
    return folder / name


ARCHIVES = {
    "tar": lambda folder: tar(folder, "logs.tar", "w"),
    "tgz": lambda folder: tar(folder, "logs.tgz", "w:gz"),
    "zip": lambda folder: zipped(folder, "logs.zip"),
    "tar by another name": lambda folder: tar(folder, "job.out", "w"),
}


@pytest.mark.parametrize("kind", ARCHIVES)
def test_each_log_in_an_archive_is_a_run_of_its_own(tmp_path, kind):
    archive = ARCHIVES[kind](tmp_path)
    records, refused = load([archive])
    assert [r.shown for r in records] == ["a/job.out", "b/job.out"] and not refused
    assert [r.source for r in records] == [f"{archive}/{r.shown}" for r in records]
    assert [round(timed(r).step_s, 2) for r in records] == [1.02, 3.0]
    row = tflops.run_table.of_records(records).rows[0]
    assert row["reasons"][0] == "line 40: ended at iteration 40 of 100"


def test_processes_read_an_archive_each_from_its_own_place(tmp_path, monkeypatch):
    with tarfile.open(tmp_path / "many.tar", "w") as archive:
        for i in range(40):
            (tmp_path / "x").write_text(megatron(1, ms=1000.0 + i) * 20 + megatron(2, 1000.0 + i))
            archive.add(tmp_path / "x", arcname=f"{i:02}.out")
    records, refused = read_all([tmp_path / "many.tar"], jobs=2, progress=False)
    assert not refused
    assert [round(1000 * r.step_s[0]) for r in records] == list(range(1000, 1040))


def test_a_gzipped_log_is_read_as_what_it_holds(tmp_path):
    (tmp_path / "job.out").write_text(RUN)
    (tmp_path / "job.out.gz").write_bytes(gzip.compress(RUN.encode()))
    one, two = (read(tmp_path / name) for name in ("job.out", "job.out.gz"))
    assert one.step_s.tolist() == two.step_s.tolist() and one.last_line == two.last_line == 40


def test_what_cannot_be_unpacked_says_so(tmp_path, monkeypatch):
    content = gzip.compress(RUN.encode())
    with zipfile.ZipFile(tmp_path / "none.zip", "w") as archive:
        archive.writestr("a.bin", "x")
    files = {
        "cut.out.gz": (content[:-40], "cannot be unpacked: "),
        "cut.zip": (zipped(tmp_path, "z.zip").read_bytes()[:-40], "cannot be unpacked: "),
        "none.zip": ((tmp_path / "none.zip").read_bytes(), "an archive of 1 files, none named"),
        "in.out.gz": (gzip.compress(gzip.compress(content)), "no format that is known"),
        "zero.gz": (gzip.compress(b""), "empty file"),
    }
    for name, (data, why) in files.items():
        (tmp_path / name).write_bytes(data)
        _, refused = read_all([tmp_path / name])
        assert [r.reason.startswith(why) for r in refused] == [True], (name, refused)
    monkeypatch.setattr(packed, "MOST", 1 << 20)
    (tmp_path / "bomb.gz").write_bytes(gzip.compress(bytes(3 << 20)))
    with pytest.raises(Refusal, match="more than 1 MiB: unpack it to a plain file"):
        read(tmp_path / "bomb.gz")


@pytest.mark.parametrize("how", ("cat", "gzip -c", "<(cat)"))
def test_a_pipe_is_read(tmp_path, how):
    log = tmp_path / "job.out"
    log.write_text(RUN)
    command = f"{sys.executable} -m analysis.tflops --columns step_s,verdict"
    line = f"{command} <(cat {log})" if how == "<(cat)" else f"{how} {log} | {command} -"
    done = subprocess.run(["bash", "-c", line], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "1.0" in done.stdout and "stopped early" in done.stdout


def test_a_pipe_that_nobody_writes_is_not_waited_for(tmp_path):
    os.mkfifo(tmp_path / "job.out")
    with pytest.raises(Refusal, match=r"job\.out: not a regular file"):
        read(tmp_path / "job.out")


def test_the_last_line_says_that_files_were_not_read(tmp_path, capsys):
    (tmp_path / "good.out").write_text(RUN)
    (tmp_path / "bad.log").write_text("nothing")
    assert tflops.main([str(tmp_path)]) == 0
    lines = capsys.readouterr().err.splitlines()
    assert "bad.log: no format that is known" in lines[0]
    assert lines[-1] == "analysis.tflops: 1 not read, 1 read; the reasons stand first"
    assert tflops.main([str(tmp_path / "bad.log")]) == 2
    assert tflops.main([str(tmp_path / "good.out")]) == 0
    assert "not read" not in capsys.readouterr().err
