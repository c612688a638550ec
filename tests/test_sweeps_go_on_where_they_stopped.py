"""A sweep runs a study in order, under one bar, and goes on where it stopped."""

import os
import sys
import threading
from pathlib import Path

import pytest

from base.errors import UsageError
from parallel import forked_ranks, sweep
from parallel.config.engine_abilities import ENGINES
from parallel.config.study import load_study
from parallel.record import ends, facts
from parallel.record.reader import read_run
from parallel.record.writer import RunFolder
from tests import fixture_runs
from tests.conftest import ROOT

CLEAN = {"commit": "c" * 40, "dirty": False}
STUDY = """
baseline = "ddp-seed1"\nquestion = "?"
[defaults]
preset = "tiny"
device = "cpu"
max_seq_len = 16
steps = 5
[[sweep]]
repeats = 2
product = { seed = [1, 2] }
"""
ORDER = ["ddp-seed1-r1", "ddp-seed2-r1", "ddp-seed1-r2", "ddp-seed2-r2"]
names_that_fail: set[str] = set()


def two_steps(path: Path, tokens: Path, runs: str) -> Path:
    """A study of short runs."""
    small = 'preset = "tiny"\ndevice = "cpu"\nmax_seq_len = 16\nsteps = 2\neval_steps = 0\n'
    path.write_text(f'question = "?"\n[defaults]\n{small}data = "{tokens}"\n{runs}')
    return path


@pytest.fixture
def study(tmp_path) -> Path:
    (tmp_path / "ab.toml").write_text(STUDY)
    return tmp_path / "ab.toml"


@pytest.fixture
def started(monkeypatch) -> list[str]:
    """Names of the runs that were started: each is only written; `names_that_fail` do."""
    names: list[str] = []

    def start(study, name, spec, folder, srun, gpus):
        names.append(name)
        about = {"run": name, **spec.as_facts(), "inputs": facts.inputs(spec), "git": CLEAN}
        fail = "Broken: it is (rank 0)" if name in names_that_fail else ""
        fixture_runs.write(folder.parent, about, loss=[2.0] * spec.steps, fail=fail)
        return fail

    names_that_fail.clear()
    monkeypatch.setattr(sweep, "start", start)
    monkeypatch.setattr(sweep, "check_inputs", lambda *_: None)
    monkeypatch.setattr(sweep, "report", lambda *_, **__: None)
    monkeypatch.setattr(facts, "git", lambda folder: CLEAN)
    return names


def test_repeats_are_interleaved_and_what_is_complete_is_not_run_again(
    study, started, tmp_path, capsys
):
    out = ["--logs", str(tmp_path / "out")]
    names_that_fail.add(ORDER[2])
    assert sweep.main([str(study), *out]) == 1
    assert started == ORDER
    lines = capsys.readouterr().out.splitlines()  # not on a terminal: a line a run, and no bar
    outcomes = [line.partition(": ")[2][:8] for line in lines]
    assert outcomes == ["complete", "complete", "FAILED: ", "complete"]
    started.clear()
    names_that_fail.clear()
    assert sweep.main([str(study), *out]) == 0
    assert started == [ORDER[2]]
    assert capsys.readouterr().out.count("already complete") == 3
    assert sweep.main([str(study), *out, "--fresh", "--only", ORDER[0]]) == 0
    assert started == [ORDER[2], ORDER[0]]
    steps = tmp_path / "out" / "ab" / ORDER[3] / "steps.csv"
    steps.write_text("".join(steps.read_text().splitlines(keepends=True)[:4]))
    assert sweep.main([str(study), *out]) == 0  # complete, but not all of it is there
    assert started == [ORDER[2], ORDER[0], ORDER[3]]


def test_quick_trains_the_runs_that_each_study_names_and_makes_one_report(
    study, started, tmp_path, monkeypatch, refused
):
    reported = []
    monkeypatch.setattr(sweep, "report", reported.append)
    other = study.with_name("other.toml")
    out = tmp_path / "out"
    words = [study, other, "--logs", out]
    other.write_text(f'quick = ["ddp-seed2-r1"]{STUDY}')
    assert "ab.toml has no quick runs: quick = [" in refused(sweep.main, *words, "--quick")
    study.write_text(f'quick = ["ddp-seed2-r2", "ddp-seed1-r1"]{STUDY}')
    assert sweep.main([*map(str, words), "--quick"]) == 0
    assert started == ["ddp-seed2-r2", "ddp-seed1-r1", "ddp-seed2-r1"]
    assert reported == [[out / "ab", out / "other"]]
    assert "runs of one study, not of 2" in refused(sweep.main, *words, "--only", "ddp-seed1-r1")
    assert "one name would share a folder" in refused(sweep.main, study, *words)


def test_make_study_shows_every_engine_split_and_zero_stage_of_a_cpu():
    studies = [load_study(ROOT / "slurm" / name) for name in ("parity.toml", "parity-moe.toml")]
    specs = [study.run(name) for study in studies for name in study.quick]
    assert {spec.engine for spec in specs} == set(ENGINES)
    layouts = [spec.layout for spec in specs]
    for split in ("tp", "pp", "vpp", "dp", "ep"):
        assert any(getattr(layout, split) > 1 for layout in layouts), split
    assert any(layout.sequence_parallel for layout in layouts)
    assert {layout.zero_stage for layout in layouts} == {0, 1, 2, 3}


def test_a_run_is_trained_after_the_run_that_it_waits_for_and_not_without_it(
    started, tmp_path, capsys
):
    path, out = tmp_path / "ab.toml", ["--logs", str(tmp_path / "out")]
    path.write_text(
        "question = '?'\n[defaults]\nsteps = 2\n"
        "[[run]]\nlabel = 'b'\nafter = 'ddp-z'\n[[run]]\nlabel = 'z'\n"
    )
    assert sweep.main([str(path), *out, "--only", "ddp-b"]) == 1 and started == []
    told = "ddp-b: FAILED: not trained: it waits for ddp-z, which is not complete"
    assert told in capsys.readouterr().out
    names_that_fail.add("ddp-z")
    assert sweep.main([str(path), *out]) == 1 and started == ["ddp-z"]
    names_that_fail.clear()
    assert sweep.main([str(path), *out, "--only", "ddp-b", "ddp-z"]) == 0
    assert started == ["ddp-z", "ddp-z", "ddp-b"]


def test_a_sweep_of_which_no_run_could_train_starts_none_and_says_why_once(
    tmp_path, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)
    runs = "[[run]]\n[[run]]\nseed = 2\n"
    study = two_steps(tmp_path / "two.toml", "data/stdlib", runs)
    study.write_text(f'baseline = "ddp-seed2"\n{study.read_text()}')
    assert sweep.main([str(study), "--logs", "logs"]) == 2
    said = capsys.readouterr()
    why = "no token files at data/stdlib: python -m parallel.data makes them"
    assert said.err == f"parallel.sweep: ddp-seed1234: {why}; likewise 1 more: ddp-seed2\n"
    assert said.out == "" and not (tmp_path / "logs").exists()


def test_runs_side_by_side_have_gpus_of_their_own(tmp_path, monkeypatch):
    """Two at a time of two GPUs; the run of all four waits for both."""
    runs = "".join(f"[[run]]\ngpus = {n}\nseed = {s}\n" for s, n in enumerate((2, 2, 4, 2, 2)))
    (tmp_path / "beside.toml").write_text(f'question = "?"\n[defaults]\nglobal_batch = 4\n{runs}')
    study = load_study(tmp_path / "beside.toml")
    both, busy, seen = threading.Barrier(2, timeout=60), [], []

    def start(study, name, spec, folder, srun, gpus):
        assert len(gpus) == spec.gpus and not set(gpus) & set(busy)
        busy.extend(gpus)
        if spec.gpus == 2:
            both.wait()  # neither would end alone
        for gpu in gpus:
            busy.remove(gpu)
        seen.append((spec.gpus, sorted(gpus)))
        if spec.seed == 4:
            raise UsageError("broken")
        return ""

    monkeypatch.setattr(sweep, "start", start)
    monkeypatch.setattr(sweep, "check_inputs", lambda *_: None)
    gpus = ["4", "5", "6", "GPU-7"]
    names = list(study.runs)
    assert sweep.sweep(study, names, tmp_path, False, side_by_side=gpus) == [names[4]]
    assert seen[2] == (4, gpus) and len(seen) == 5


@pytest.mark.slow
def test_ranks_on_cpu_are_forked_and_torchrun_starts_the_others(tokens, tmp_path):
    runs = '[[run]]\ngpus = 2\n[[run]]\ngpus = 2\ndevice = "auto"\nlabel = "auto"\n'
    study = two_steps(tmp_path / "two.toml", tokens, runs)
    assert sweep.main([str(study), "--logs", str(tmp_path)]) == 0
    runs = [read_run(tmp_path / "two" / name) for name in ("ddp-dp2", "ddp-dp2-auto")]
    assert [run.facts["launcher"] for run in runs] == ["fork", "torchrun"]
    # Exact: both have one thread a rank, as their study states, and add in the same order.
    assert runs[0].steps[1]["loss"] == runs[1].steps[1]["loss"]


def test_an_engine_that_cannot_be_imported_has_no_server(tmp_path):
    """So torchrun starts the run, which says in its console.out what is missing."""
    path = tmp_path / "folder" / "socket"
    parent = forked_ranks.server("ddp", 1)
    assert not forked_ranks.fork_server(parent, ["no_engine"], path, os.getpid())
    assert not path.exists()


def test_srun_starts_the_ranks_of_an_allocation(tokens, tmp_path, monkeypatch, capfd):
    """A stand-in for srun starts its one task; test_slurm_real has what real tasks are told."""
    srun = tmp_path / "bin" / "srun"
    srun.parent.mkdir()
    srun.write_text(
        f'#!/bin/sh\necho "$1 $2 $3 $4 $SLURM_EXPORT_ENV" >> {tmp_path}/asked\nshift 4\nexec "$@"\n'
    )
    srun.chmod(0o755)
    monkeypatch.setenv("SLURM_EXPORT_ENV", "NONE")  # of sbatch --export=NONE
    monkeypatch.setenv("PATH", f"{srun.parent}{os.pathsep}{os.environ['PATH']}")
    study = two_steps(tmp_path / "one.toml", tokens, "[[run]]\n")
    assert sweep.main([str(study), "--srun", "--logs", str(tmp_path / "out")]) == 0
    assert (tmp_path / "asked").read_text() == "--nodes 1 --ntasks 1 ALL\n"
    assert read_run(tmp_path / "out" / "one" / "ddp").state == ends.COMPLETE
    assert "Speedup: strong scaling against ddp" in capfd.readouterr().out
    assert (tmp_path / "out" / "one" / "study.html").read_text().startswith("<!DOCTYPE html>")


def test_a_folder_in_use_fails_its_run_alone_and_what_was_printed_before_is_kept(
    study, tmp_path, capsys, monkeypatch
):
    out = tmp_path / "out" / "ab"
    (out / ORDER[0]).mkdir(parents=True)
    (out / ORDER[0] / "thesis.tex").write_text("mine")
    monkeypatch.setattr(sweep, "check_inputs", lambda *_: None)
    monkeypatch.setattr(sweep, "report", lambda *_, **__: None)
    command = [sys.executable, "-c", "print('parallel.train: no data')\nraise SystemExit(2)"]
    monkeypatch.setattr(sweep, "command_of", lambda *_: command)
    used = RunFolder(out / ORDER[1])
    used.begin({"run": ORDER[1]})
    for _ in range(2):
        assert sweep.main([str(study), "--logs", str(tmp_path / "out"), "--only", *ORDER[:3]]) == 1
        lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("[")]
        words = ("holds thesis.tex", f"written by process {os.getpid()}", "FAILED: no data (see ")
        for line, why in zip(lines, words, strict=True):
            assert why in line
    used.close()
    assert os.listdir(out / ORDER[0]) == ["thesis.tex"]
    assert read_run(out / ORDER[1]).state == "running"
    before = out / ORDER[2] / "attempts" / "1" / "console.out"
    assert before.read_text() == "parallel.train: no data\n"
