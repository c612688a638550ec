"""One flag for one thing in every command, and a line of help for every flag."""

import argparse
import importlib
import inspect
from dataclasses import fields
from functools import partial

import pytest

from base.errors import Parser
from parallel.config.settings import RunSpec
from tests.conftest import ROOT

ROOMS = ("models", "parallel", "slurm", "analysis")
COMMANDS = sorted(
    ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__main__")
    for room in ROOMS
    for path in (ROOT / room).rglob("*.py")
    if '__name__ == "__main__"' in path.read_text()
)
WITHOUT_FLAGS = {"analysis", "slurm.forward_signals"}  # these parse no command line


class Found(BaseException):
    """Thrown by a parser when it is asked to parse."""


def parsers_of(command: str, monkeypatch) -> list[argparse.ArgumentParser]:
    """The command's parser and those of its subcommands."""

    def found(self, *_):
        raise Found(self)

    monkeypatch.setattr(argparse.ArgumentParser, "parse_known_args", found)
    monkeypatch.setattr(Parser, "parse_known_args", found)
    module = importlib.import_module(
        f"{command}.__main__" if (ROOT / command.replace(".", "/")).is_dir() else command
    )
    with pytest.raises(Found) as caught:
        inspect.unwrap(module.main)([])
    parsers = [caught.value.args[0]]
    for action in parsers[0]._actions:
        if isinstance(action, argparse._SubParsersAction):
            parsers += action.choices.values()
    return parsers


def actions_of(command: str, monkeypatch) -> list[argparse.Action]:
    return [a for parser in parsers_of(command, monkeypatch) for a in parser._actions]


@pytest.mark.parametrize("command", [c for c in COMMANDS if c not in WITHOUT_FLAGS])
def test_every_flag_has_a_line_of_help(command, monkeypatch):
    for action in actions_of(command, monkeypatch):
        what = action.option_strings or action.metavar or action.dest
        assert action.help or isinstance(action, argparse._SubParsersAction), what


def test_a_flag_that_is_a_setting_is_spelled_alike_everywhere(monkeypatch):
    """A command that takes a setting of a run takes it under the trainer's name."""
    flags = {f.metadata["help"]: "--" + f.name.replace("_", "-") for f in fields(RunSpec)}
    assert len(flags) == len(fields(RunSpec))
    for command in COMMANDS:
        for action in [] if command in WITHOUT_FLAGS else actions_of(command, monkeypatch):
            flag = flags.get((action.help or "").partition(" (default")[0])
            assert flag is None or flag in action.option_strings, (command, flag)


def test_a_flag_takes_one_kind_of_value_in_all_commands(monkeypatch):
    """A switch, a number or a text."""
    kinds: dict[str, set] = {}
    for command in (c for c in COMMANDS if c not in WITHOUT_FLAGS):
        for action in actions_of(command, monkeypatch):
            number = action.type in (int, float) or isinstance(action.type, partial)
            for flag in action.option_strings:
                kinds.setdefault(flag, set()).add((action.nargs == 0, number))
    assert [flag for flag, kind in kinds.items() if len(kind) > 1] == []
