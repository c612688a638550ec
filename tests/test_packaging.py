"""Exact versions stand in constraints.txt alone, and inside the ranges of setup.py."""

import re
import runpy
import subprocess

import pytest
from packaging.requirements import Requirement

from tests.conftest import ROOT

UNTRIED = {"transformer-engine"}  # needs a GPU


@pytest.fixture
def said(monkeypatch) -> dict:
    """What setup.py tells setuptools."""
    told: dict = {}
    monkeypatch.setattr("setuptools.setup", lambda **words: told.update(words))
    monkeypatch.chdir(ROOT)
    runpy.run_path("setup.py")
    return told


@pytest.mark.parametrize("python", ["3.11", "3.12", "3.13"])
def test_every_package_has_one_exact_version_inside_its_range(said, python):
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    pins = [Requirement(line) for line in lines if line and not line.startswith("#")]
    pins = [p for p in pins if not p.marker or p.marker.evaluate({"python_version": python})]
    exact = {pin.name: str(pin.specifier).removeprefix("==") for pin in pins}
    assert len(exact) == len(pins)
    extras = sum(said["extras_require"].values(), [])
    wanted = {r.name: r for r in map(Requirement, said["install_requires"] + extras)}
    assert set(wanted) - set(exact) == UNTRIED and set(exact) <= set(wanted)
    for name, version in exact.items():
        assert version in wanted[name].specifier, name
        assert not any(part.operator == "==" for part in wanted[name].specifier), name


def test_what_studies_and_runs_leave_keeps_a_clone_clean():
    studies = {path.stem for path in (ROOT / "slurm").rglob("*.toml")} | {"first", "runs"}
    left = [f"logs/{name}/{file}" for name in studies for file in ("ddp/run.json", "study.html")]
    ask = ["git", "check-ignore", "--no-index", *left]
    done = subprocess.run(ask, cwd=ROOT, capture_output=True, text=True)
    assert set(left) - set(done.stdout.split()) == set(), done.stderr
    committed = ["logs/2-core-cpu/parity/ddp/run.json", "logs/published/new.csv"]
    done = subprocess.run([*ask[:3], *committed], cwd=ROOT, capture_output=True, text=True)
    assert done.stdout == ""


def test_every_folder_of_code_is_installed(said):
    folders = {
        str(path.parent.relative_to(ROOT)).replace("/", ".")
        for room in ("base", "models", "parallel", "slurm", "analysis")
        for path in (ROOT / room).rglob("*.py")
    }
    assert folders <= set(said["packages"])


def test_each_test_file_that_starts_an_engine_or_imports_a_library_runs_with_other_versions():
    lists = re.search(r"^LIBRARIES = ((.*\\\n)*.*)", (ROOT / "Makefile").read_text(), re.M)[1]
    names = {f"test_{name}" for name in lists.replace("\\\n", " ").split()}
    texts = {path.stem: path.read_text() for path in (ROOT / "tests").glob("test_*.py")}
    kinds = r"run_worker\(|from (transformers|megatron|deepspeed|safetensors|tensorboard)"
    assert {name for name, text in texts.items() if re.search(kinds, text)} <= names
    assert names <= texts.keys()
