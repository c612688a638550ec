"""One flag for one thing in every command, and a line of help for every flag."""

import argparse
from functools import partial

import pytest

from parallel.config.run_spec import SETTINGS
from tests.conftest import ROOT
from tests.tools.bad_commands import actions_of

ROOMS = ("models", "parallel", "slurm", "analysis")
COMMANDS = sorted(
    ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__main__")
    for room in ROOMS
    for path in (ROOT / room).rglob("*.py")
    if '__name__ == "__main__"' in path.read_text()
)
WITHOUT_FLAGS = {"slurm.forward_signals"}  # it parses no command line


@pytest.fixture(scope="module")
def actions() -> list[tuple[str, argparse.Action]]:
    assert {command for command in COMMANDS if not actions_of(command)} == WITHOUT_FLAGS
    return [(command, action) for command in COMMANDS for action in actions_of(command)]


def test_every_flag_has_a_line_of_help(actions):
    for command, action in actions:
        what = (command, action.option_strings or action.metavar or action.dest)
        assert action.help or isinstance(action, argparse._SubParsersAction), what


def test_a_flag_that_is_a_setting_is_spelled_alike_everywhere(actions):
    """A command that takes a setting of a run takes it under the trainer's name."""
    flags = {f.metadata["help"]: "--" + name.replace("_", "-") for name, f in SETTINGS.items()}
    assert len(flags) == len(SETTINGS)
    for command, action in actions:
        flag = flags.get((action.help or "").partition(" (default")[0])
        assert flag is None or flag in action.option_strings, (command, flag)


def test_a_flag_takes_one_kind_of_value_in_all_commands(actions):
    """A switch, a number or a text."""
    kinds: dict[str, set] = {}
    for _, action in actions:
        number = action.type in (int, float) or isinstance(action.type, partial)
        for flag in action.option_strings:
            kinds.setdefault(flag, set()).add((action.nargs == 0, number))
    assert [flag for flag, kind in kinds.items() if len(kind) > 1] == []


def test_words_of_a_flag_are_joined_by_dashes(actions):
    joined = {flag for _, action in actions for flag in action.option_strings if "_" in flag}
    assert joined == {"--local_rank"}  # as DeepSpeed's launcher spells it
