"""README and docs: every command is one that the programs take, every link leads somewhere."""

import argparse
import importlib
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from base.errors import Parser
from parallel.config.study import load_study
from tests.conftest import CLEAN_ROOT, ROOT, THREADS

PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
# Lines; other pages 250. The last has a row for every run of the shipped studies.
LONGEST = {"README.md": 150, "logs/2-core-cpu/rehearsed.md": 420}
OURS = re.compile(r"(analysis|models|parallel|slurm)(\.\w+)*")
PROGRAMS = ("torchrun", "deepspeed", "srun", "make", "sbatch", "bash", "pip", "python")


def commands(page: Path) -> list[str]:
    """The lines of ```sh blocks, and indented lines that begin with one of the programs."""
    kinds = (
        rf"^```sh\n(?P<sh>.*?)^```$|^```.*?^```$|^ {{4}}(?P<line>(?:{'|'.join(PROGRAMS)}) [^\n]*)$"
    )
    blocks = re.finditer(kinds, page.read_text(), re.MULTILINE | re.DOTALL)
    lines = [line for block in blocks for line in (block["sh"] or block["line"] or "").splitlines()]
    return [line for line in lines if line.strip() and "..." not in words_of(line)]


def words_of(line: str) -> list[str]:
    return shlex.split(line, comments=True)


ALL = [(page.name, line) for page in PAGES for line in commands(page)]


def module_and_arguments(words: list[str]) -> tuple[str, list[str]] | None:
    """The module of ours that a command line starts, and what it gets; None for other programs."""
    ours = next((i for i, word in enumerate(words) if OURS.fullmatch(word)), None)
    if ours is not None and words[ours - 1] in ("-m", "--module"):
        return words[ours], words[ours + 1 :]
    if words[0] == "python" and words[1].endswith(".py"):
        return words[1].removesuffix(".py").replace("/", "."), words[2:]
    return None


PYTHON = [
    (page.name, block)
    for page in PAGES
    for block in re.findall(r"^```python\n(import .*?)^```$", page.read_text(), re.M | re.S)
]


@pytest.mark.parametrize(("page", "block"), PYTHON, ids=[page for page, _ in PYTHON])
def test_python_on_a_page_runs(page, block, monkeypatch):
    monkeypatch.chdir(ROOT)
    names = {}
    exec(block, names)
    assert len(names["table"]) > 10


class Parsed(Exception):
    pass


@pytest.mark.parametrize(("page", "line"), ALL, ids=[f"{p}: {c}" for p, c in ALL])
def test_every_command_is_one_that_the_program_takes(page, line, monkeypatch):
    words = words_of(line)
    found = module_and_arguments(words)
    if found is None:
        assert words[0] in PROGRAMS, f"{page}: what is {words[0]}?"
        if words[0] == "make" and len(words) > 1:
            assert re.search(rf"^{words[1]}:", (ROOT / "Makefile").read_text(), re.MULTILINE)
        return
    module, arguments = found
    package = (ROOT / module.replace(".", "/")).is_dir()
    main = importlib.import_module(f"{module}.__main__" if package else module).main
    parse = argparse.ArgumentParser.parse_args

    def parsed(self, args=None, namespace=None):
        parse(self, args, namespace)  # a flag or a value it does not take ends here with 2
        raise Parsed

    monkeypatch.setattr(Parser, "parse_args", parsed)
    with pytest.raises((Parsed, SystemExit)) as ended:
        main(arguments)
    assert ended.type is Parsed or (ended.value.code == 0 and "--help" in arguments)


# Why a command is not run here; its flags are checked above.
NOT_RUN = {
    r"make|pip|python -m (pip|venv)": "builds an environment, or runs these tests",
    r"torchrun|deepspeed|srun|python -m parallel\.(sweep|gpu_check|data)": "trains for minutes",
    r"python -m parallel\.train(?!.* --check)": "trains for minutes",
    r"python -m (parallel\.rehearse|.* --rehearse)": "trains for minutes",
    r"sbatch|bash|python -m (tests\.tools|slurm\.(?!render).*)": "needs Slurm",
    r".* (logs/(first|mine|runs|parity|gpu-check)|training_results_v4\.1)": "reads the reader's",
    r".* (RUN|FOLDER|HF_DIR|PATH)": "reads the reader's",
}
# What ends in another exit status than 0, as its page says.
ENDS = {"analysis.audit": 1, "--preset gpt2-1.5b --check": 2}


LONG = ("planner-accuracy.md", "plan.md")  # their commands predict every published run, and plan
RUN = [pytest.param(p, marks=[pytest.mark.slow] if p.name in LONG else []) for p in PAGES]


@pytest.mark.parametrize("page", RUN, ids=lambda p: p.name)
def test_the_commands_of_a_page_run_as_typed_in_a_clone(page, tmp_path):
    not_run = re.compile(rf"({'|'.join(NOT_RUN)})\b")
    lines = [line for line in commands(page) if not not_run.match(line)]
    if not lines:
        pytest.skip("no command of this page is run: NOT_RUN says why")
    clone = shutil.copytree(CLEAN_ROOT, tmp_path / "clone")
    (clone / "slurm" / "first.toml").write_text(study_of(ROOT / "README.md"))
    for line in lines:
        command = [sys.executable, *words_of(line.partition(" > ")[0])[1:]]
        done = subprocess.run(
            command, cwd=clone, env=os.environ | THREADS, capture_output=True, text=True
        )
        expected = next((status for words, status in ENDS.items() if words in line), 0)
        assert done.returncode == expected, f"{line}\n{done.stdout}{done.stderr}"


def study_of(page: Path) -> str:
    return re.search(r"^```toml\n(question.*?)^```$", page.read_text(), re.M | re.S)[1]


def test_the_study_on_the_first_page_is_the_one_that_is_explained_and_can_run(tmp_path):
    text = study_of(ROOT / "README.md")
    assert text == study_of(ROOT / "docs" / "first-study.md")
    assert len([line for line in text.splitlines() if line]) <= 12
    (tmp_path / "first.toml").write_text(text)
    study = load_study(tmp_path / "first.toml")
    assert len(study.runs) == 4 and not study.left_out


WRITTEN = [*PAGES, *sorted((ROOT / "logs").rglob("*.md"))]


@pytest.mark.parametrize("page", WRITTEN, ids=lambda p: str(p.relative_to(ROOT)))
def test_no_page_is_long_and_every_link_leads_somewhere(page):
    text = page.read_text()
    assert text.count("\n") <= LONGEST.get(str(page.relative_to(ROOT)), 250)
    for target in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", text):
        assert (page.parent / target).exists(), f"{page.name}: {target}"
    for target, anchor in re.findall(r"\]\(([^)#:]*)#([^)]*)\)", text):
        there = (page.parent / target if target else page).read_text()
        headings = re.findall(r"^#+ (.*)$", there, re.MULTILINE)
        anchors = {re.sub(r"[^\w -]", "", h).strip().lower().replace(" ", "-") for h in headings}
        assert anchor in anchors, f"{page.name}: {target}#{anchor}"
