"""README and docs: every command is one that the programs take, every link leads somewhere."""

import argparse
import importlib
import re
import shlex
from pathlib import Path

import pytest

from models.errors import Parser
from parallel.config.study import load_study
from tests.conftest import ROOT, TRAIN, run_module

PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
# Lines; other pages 250. The last has a row for every run of the shipped studies.
LONGEST = {"README.md": 150, "logs/2-core-cpu/rehearsed.md": 400}
LAUNCHERS = ("torchrun", "deepspeed", "srun")


def commands(page: Path) -> list[str]:
    blocks = re.findall(r"^```sh\n(.*?)^```$", page.read_text(), re.MULTILINE | re.DOTALL)
    return [line for block in blocks for line in block.splitlines() if line.strip()]


ALL = [(page.name, line) for page in PAGES for line in commands(page)]


def words_of(line: str) -> list[str]:
    return shlex.split(line, comments=True)


def module_and_arguments(words: list[str]) -> tuple[str, list[str]] | None:
    """The module of ours that a command line starts, and what it gets; None for other programs."""
    if words[0] in LAUNCHERS:
        start = words.index(TRAIN)
        return words[start], words[start + 1 :]
    if words[:2] == ["python", "-m"]:
        return words[2], words[3:]
    if words[0] == "python" and words[1].endswith(".py"):
        return words[1].removesuffix(".py").replace("/", "."), words[2:]
    return None


class Parsed(Exception):
    pass


@pytest.mark.parametrize(("page", "line"), ALL, ids=[f"{p}: {c}" for p, c in ALL])
def test_every_command_is_one_that_the_program_takes(page, line, monkeypatch):
    words = words_of(line)
    found = module_and_arguments(words)
    if found is None:
        assert words[0] in ("make", "sbatch", "bash", "pip", "git", "module", "conda", "source"), (
            f"{page}: what is {words[0]}?"
        )
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
    with pytest.raises(Parsed):
        main(arguments)


EVIDENCE = [
    (page, line)
    for page, line in ALL
    if re.search(r"logs/(2-core-cpu|published)/", line) and "--study" not in line
]


@pytest.mark.parametrize(("page", "line"), EVIDENCE, ids=[f"{p}: {c}" for p, c in EVIDENCE])
def test_every_command_on_committed_evidence_runs_as_typed(page, line):
    module, arguments = module_and_arguments(words_of(line))
    done = run_module(module, *arguments)
    found_something = 1 if module == "analysis.audit" else 0
    assert done.returncode == found_something and done.stdout, done.stderr


def study_of(page: Path) -> str:
    return re.search(r"^```toml\n(question.*?)^```$", page.read_text(), re.M | re.S)[1]


def test_the_study_on_the_first_page_is_the_one_that_is_explained():
    text = study_of(ROOT / "README.md")
    assert text == study_of(ROOT / "docs" / "first-study.md")
    assert len([line for line in text.splitlines() if line]) <= 12


def test_the_study_on_the_first_page_can_run(tmp_path):
    path = tmp_path / "first.toml"
    path.write_text(study_of(ROOT / "README.md"))
    study = load_study(path)
    assert len(study.settings) == 4 and not study.left_out


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_every_link_leads_somewhere(page):
    text = page.read_text()
    for target in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", text):
        assert (page.parent / target).exists(), f"{page.name}: {target}"
    for target, anchor in re.findall(r"\]\(([^)#:]*)#([^)]*)\)", text):
        there = (page.parent / target if target else page).read_text()
        headings = re.findall(r"^#+ (.*)$", there, re.MULTILINE)
        anchors = {re.sub(r"[^\w -]", "", h).strip().lower().replace(" ", "-") for h in headings}
        assert anchor in anchors, f"{page.name}: {target}#{anchor}"


@pytest.mark.parametrize(
    "page", [*PAGES, *sorted((ROOT / "logs").rglob("*.md"))], ids=lambda p: str(p.relative_to(ROOT))
)
def test_no_page_is_long(page):
    assert page.read_text().count("\n") <= LONGEST.get(str(page.relative_to(ROOT)), 250)
