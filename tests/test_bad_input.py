"""Bad input ends in one line and never in a traceback: some cases of tests/tools/bad_input.py."""

import pytest

from tests.test_flags import COMMANDS
from tests.tools import bad_commands, bad_input


@pytest.mark.parametrize(
    ("campaign", "n"), [("logs", 40), ("numbers", 250), ("neutral", 30), ("folders", 3)]
)
def test_bad_input_ends_in_no_traceback(campaign, n):
    assert bad_input.findings(bad_input.run(campaign, "a few", n)) == []


def test_every_command_is_given_bad_lines():
    assert sorted(bad_commands.LINES) == [name for name in COMMANDS if name != "analysis"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("campaign", "n"),
    [
        ("logs", 200),
        ("numbers", 4000),
        ("neutral", 150),
        ("folders", 20),
        ("packed", 30),
        ("texts", 30),
        ("tokens", 30),
        ("commands", 60),
        ("output", 8),
        ("not-runs", 600),
    ],
)
def test_much_bad_input_ends_in_no_traceback(campaign, n):
    """In processes of their own, which what a command changes of its process does not outlive."""
    assert bad_input.findings(bad_input.run(campaign, "many", n, jobs=2)) == []
