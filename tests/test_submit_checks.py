"""What every run would find missing at its start is found once, before anything is submitted."""

from dataclasses import replace

import pytest

from parallel.config.clusters import Container
from parallel.config.study import load_study
from slurm import submit_checks
from tests.conftest import study_file, write_prepared

TWO = "[[sweep]]\nproduct = { seed = [1, 2] }\n"


@pytest.fixture
def problems(tmp_path, monkeypatch):
    """The problems of a study on a cluster, with data and Python there."""
    monkeypatch.setenv("PYTHON", "/bin/sh")
    data = write_prepared(tmp_path / "data", 5000)

    def found(text: str, where: str = "local-test", **changes) -> list[str]:
        path = study_file(tmp_path / "two.toml", f'[defaults]\ndata = "{data}"\n{text}')
        study = load_study(path, where)
        study = replace(study, cluster=replace(study.cluster, **changes))
        return submit_checks.problems(study, tmp_path / "logs", study.runs)

    return found


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[[run]]\ndata = '/nowhere'\n", "no token files at /nowhere: python -m parallel.data"),
        ("[[run]]\ndata = 'data/other'\n", "--input TEXT --out data/other"),
        ("seq_len = 5000\nmax_seq_len = 5000\n" + TWO, "5000 tokens, too few for one seq"),
        ("vocab_size = 200\n" + TWO, "has 257 token ids, but the model has 200"),
        ("load = 'no/checkpoint'\n" + TWO, "no checkpoint at no/checkpoint"),
    ],
)
def test_each_problem_is_found_once_for_all_runs(problems, text, words):
    (problem,) = problems(text)
    assert words in problem and "\n" not in problem
    assert problems(TWO) == problems("precision = 'fp16'\n" + TWO, "dgx-a100") == []


def test_a_checkpoint_of_an_awaited_run_need_not_be_there_yet(problems, tmp_path):
    after = "[[run]]\n[[run]]\nlabel = 'on'\nafter = 'ddp'\nload = '%s'\n"
    assert problems(after % (tmp_path / "logs/two/ddp/checkpoints")) == []
    other = tmp_path / "logs/two/ddp-on/checkpoints"
    assert problems(after % other) == [f"no checkpoint at {other} (1 of 2 runs)"]


def test_a_checkout_that_cannot_be_written_is_named(problems, monkeypatch):
    """On a disk that is mounted to be read, also for root."""
    access = submit_checks.os.access
    monkeypatch.setattr(
        submit_checks.os, "access", lambda p, mode: p != submit_checks.ROOT and access(p, mode)
    )
    (problem,) = problems(TWO)
    assert problem == f"{submit_checks.ROOT} cannot be written: Slurm opens each job's log there"


def test_a_folder_that_cannot_be_written_is_named(problems, tmp_path):
    folders = [tmp_path / "logs" / "two" / f"ddp-seed{seed}" for seed in (1, 2)]
    for folder in folders:
        folder.mkdir(parents=True)
        (folder / "thesis.tex").touch()
    (problem,) = problems(TWO)
    assert "ddp-seed1" in problem and "thesis.tex" in problem and not problem.endswith("runs)")
    for folder in folders:
        (folder / "thesis.tex").unlink()
    folders[1].rmdir()
    folders[1].touch()
    (problem,) = problems(TWO)
    assert "ddp-seed2 is a file" in problem and problem.endswith("(1 of 2 runs)")


def test_python_and_the_container_are_looked_for(problems, monkeypatch, tmp_path):
    image = Container("apptainer", str(tmp_path / "a.sif"))
    assert problems(TWO, container=image) == [f"no container image at {image.image}"]
    for elsewhere in ("docker://nvcr.io/nvidia/pytorch:25.01-py3", "${SCRATCH}/a.sif", "name"):
        assert problems(TWO, container=replace(image, image=elsewhere)) == []
    monkeypatch.delenv("PYTHON")
    for python in ("snake", str(tmp_path / "python")):
        assert problems(TWO, python=python)[0].startswith(f"no Python at {python}: ")
    assert problems(TWO, python="sh") == problems(TWO, python="snake", setup=("module x",)) == []


@pytest.mark.parametrize(
    ("seconds", "gpus", "changes", "is_told"),
    [
        (12.0, 64, {}, True),
        (9.0, 64, {}, False),
        (12.0, 32, {}, False),
        (12.0, 64, {"environment_tar": "gpt.tar"}, False),
        (12.0, 64, {"container": Container("apptainer", "a.sif")}, False),
    ],
)
def test_an_import_that_is_slow_is_told_to_many_ranks(
    seconds, gpus, changes, is_told, tmp_path, monkeypatch
):
    clock, started = [0.0], []

    def run(command, **_):
        started.append(command)
        clock[0] += seconds

    monkeypatch.setattr(submit_checks.time, "perf_counter", lambda: clock[0])
    monkeypatch.setattr(submit_checks.subprocess, "run", run)
    monkeypatch.setenv("PYTHON", "theirs")
    run_ = f"[[run]]\nengine = 'ddp'\ngpus = {gpus}\nglobal_batch = 64\n"
    study = load_study(study_file(tmp_path / "wide.toml", run_), "dgx-h100")
    study = replace(study, cluster=replace(study.cluster, **changes))
    line = submit_checks.slow_start(study, study.runs)
    assert started == ([] if changes or gpus < 64 else [["theirs", "-c", "import torch"]])
    assert ("took 12 s" in line and "64 ranks" in line) if is_told else line == ""
