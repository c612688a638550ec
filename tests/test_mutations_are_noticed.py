"""The campaign of tests/tools/mutations.py: its changes by hand, and a small one of it."""

import re
import subprocess
import sys

import pytest

from tests.conftest import ROOT
from tests.tools import mutations


def changed(source: str, monkeypatch, tmp_path) -> set[str]:
    (tmp_path / "a.py").write_text(source)
    monkeypatch.setattr(mutations, "ROOT", tmp_path)
    return {m.after for m in mutations.mutations("a.py")}


def test_a_change_is_one_operator_comparison_number_condition_or_branch(monkeypatch, tmp_path):
    def of(source):
        return changed(source, monkeypatch, tmp_path)

    assert of("x = a + b") == {"x = (a - b)"}
    assert of("x = a < 3") == {"x = (a <= 3)", "x = (a >= 3)", "x = a < (4)", "x = a < (6)"}
    assert of("x = a and b") == {"x = (a or b)", "x = (a)", "x = (b)"}
    assert of("x = not a") == {"x = (a)"}
    assert of("x = b if a else c") == {"x = (b)", "x = (c)"}
    assert of("x = max(a, b)") == {"x = (min(a, b))"}
    assert of("f(a)") == {"pass"}
    assert of("x = [y for y in z if y]") == {"x = [y for y in z if (True)]"}
    assert of("if a:\n    b = c") == {"if (True):", "if (False):"}


def test_words_types_and_how_a_file_is_started_are_left_alone(monkeypatch, tmp_path):
    source = '''
        """1 + 1."""
        x: a | b = "one" + c
        def main():
            return 1 + 1
        if not __package__:
            y = 1
        def f(p: int | None) -> int | None:
            raise ValueError(f"{p + 1}")
    '''
    lines = "\n".join(line[8:] for line in source.splitlines())
    assert changed(lines, monkeypatch, tmp_path) == set()


def test_the_table_counts_what_was_noticed():
    mutation = mutations.Mutation("a.py", 7, "x = a | b", "x = (a & b)", "")
    table = mutations.report([(mutation, "survived"), (mutation, "killed")])
    assert "| a.py | 2 | 1 | 0 | 1 | 50% |" in table


@pytest.mark.slow
def test_tests_notice_nine_of_ten_mutations(tmp_path):
    script = str(ROOT / "tests" / "tools" / "mutations.py")
    command = [sys.executable, script, "--n", "20", "--seed", "5", "--out", str(tmp_path / "a.md")]
    command += ["--only", "models/flops.py", "parallel/config/layout.py"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr
    total = re.search(
        r"\| all \| 40 \| (\d+) \| (\d+) \| (\d+) \|", (tmp_path / "a.md").read_text()
    )
    assert total and sum(map(int, total.groups())) == 40
