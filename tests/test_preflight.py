"""What every run would find missing at its start is found once, before anything is submitted."""

import os
from dataclasses import replace

import pytest

from parallel.config.clusters import Container
from parallel.config.study import load_study
from slurm import preflight
from tests.conftest import write_prepared

HEAD = 'question = "which?"\ncluster = "local-test"\n[defaults]\npreset = "tiny"\n'
TWO = "[[sweep]]\nproduct = { seed = [1, 2] }\n"


@pytest.fixture
def problems(tmp_path, monkeypatch):
    """The problems of a study on a cluster, with data and Python there."""
    monkeypatch.setenv("PYTHON", "/bin/sh")
    data = write_prepared(tmp_path / "data", 5000)

    def found(text: str, where: str = "local-test", **changes) -> list[tuple[str, str]]:
        path = tmp_path / "two.toml"
        path.write_text(HEAD + f'data = "{data}"\n' + text)
        study = load_study(path, where)
        return preflight.problems(study, replace(study.cluster, **changes), tmp_path / "logs")

    return found


def test_a_study_that_can_start_has_no_problem(problems):
    assert problems(TWO) == []


@pytest.mark.parametrize(
    ("text", "kind", "words"),
    [
        (
            "data = '/nowhere'\n" + TWO,
            "data",
            "no token files at /nowhere: python -m parallel.data",
        ),
        (
            "data = 'data/stdlib-not-here'\n" + TWO,
            "data",
            "--input TEXT --out data/stdlib-not-here",
        ),
        ("seq_len = 5000\nmax_seq_len = 5000\n" + TWO, "data", "5000 tokens, too few for one seq"),
        ("vocab_size = 200\n" + TWO, "data", "has 257 token ids, but the model has 200"),
        ("load = 'no/checkpoint'\n" + TWO, "load", "no checkpoint at no/checkpoint"),
    ],
)
def test_each_problem_is_found_once_for_all_runs(problems, tmp_path, text, kind, words):
    if "data" in text.split()[0]:  # in place of the fixture's
        text = text.replace("data = ", "[[run]]\nlabel = 'x'\ndata = ", 1).split("[[sweep]]")[0]
    ((found, said),) = problems(text)
    assert found == kind and words in said and "\n" not in said


def test_a_gpu_cluster_gives_what_a_gpu_run_needs(problems):
    assert problems("precision = 'fp16'\n" + TWO, "dgx-a100") == []


def test_a_folder_that_cannot_be_written_is_named(problems, tmp_path):
    (tmp_path / "logs" / "two" / "ddp-seed1").mkdir(parents=True)
    (tmp_path / "logs" / "two" / "ddp-seed1" / "thesis.tex").touch()
    (tmp_path / "logs" / "two" / "ddp-seed2").touch()
    ((kind, said),) = problems(TWO)
    assert kind == "folder" and "thesis.tex" in said and "(2 of" not in said
    (tmp_path / "logs" / "two" / "ddp-seed1" / "thesis.tex").unlink()
    ((kind, said),) = problems(TWO)
    assert "ddp-seed2 is a file" in said and said.endswith("(1 of 2 runs)")
    if os.geteuid() == 0:
        return  # root may write everywhere
    (tmp_path / "logs" / "two").chmod(0o500)
    assert "cannot be written" in problems(TWO)[0][1]


def test_python_and_the_container_are_looked_for(problems, monkeypatch, tmp_path):
    image = Container("apptainer", str(tmp_path / "a.sif"))
    assert problems(TWO, container=image) == [("container", f"no container image at {image.image}")]
    for elsewhere in ("docker://nvcr.io/nvidia/pytorch:25.01-py3", "${SCRATCH}/a.sif", "name"):
        assert problems(TWO, container=replace(image, image=elsewhere)) == []
    monkeypatch.delenv("PYTHON")
    assert problems(TWO, python=str(tmp_path / "python"))[0][0] == "python"
    assert "no Python at snake" in problems(TWO, python="snake")[0][1]
    assert problems(TWO, python="sh") == []
    assert problems(TWO, python="snake", setup=("module load snake",)) == []
