"""The campaign of tests/tools/mutations.py: its changes by hand, and a small one of it."""

import re
import subprocess
import sys

import pytest

from tests.conftest import ROOT
from tests.tools import mutations

WORDS = """
'words, types, and how a file is started'
x: a | b = "one" + c
def main():
    return 1 + 1
if not __package__:
    y = 1
def f(p: int | None) -> int | None:
    raise ValueError(f"{p + 1}")
"""


@pytest.mark.parametrize(
    ("source", "changes"),
    [
        ("x = a + b", {"x = (a - b)"}),
        ("x = a < 3", {"x = (a <= 3)", "x = (a >= 3)", "x = a < (4)", "x = a < (6)"}),
        ("x = a is b", {"x = (a is not b)"}),
        ("x = a and b", {"x = (a or b)", "x = (a)", "x = (b)"}),
        ("x = not a", {"x = (a)"}),
        ("x = b if a else c", {"x = (b)", "x = (c)"}),
        ("x = max(a, b)", {"x = (min(a, b))"}),
        ("f(a)", {"pass"}),
        ("x = [y for y in z if y]", {"x = [y for y in z if (True)]"}),
        ("if a:\n    b = c", {"if (True):", "if (False):"}),
        (WORDS, set()),
    ],
)
def test_a_change_is_one_operator_comparison_number_condition_or_branch(
    source, changes, monkeypatch, tmp_path
):
    (tmp_path / "a.py").write_text(source)
    monkeypatch.setattr(mutations, "ROOT", tmp_path)
    assert {m.after for m in mutations.mutations("a.py")} == changes


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
