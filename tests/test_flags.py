"""One flag for one thing in every command, and a line of help for every flag."""

import argparse
import importlib
import inspect
from dataclasses import fields

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

# What each flag is for, beside the trainer's settings, which are named in RunSpec. A new flag gets
# a line here; its thing must not be on another line.
MEANING = {
    "--after": "the job to wait for",
    "--any-commit": "compare runs of different commits",
    "--backward": "a backward's time over a forward's",
    "--baseline": "the run to compare with",
    "--budget": "GPU hours above which to ask",
    "--bytes-per-param": "a checkpoint's bytes per parameter",
    "--calibrate-rows": "runs to fit at most",
    "--check": "change nothing: say whether all is well",
    "--cluster": "the name of a cluster",
    "--columns": "columns of a table to show",
    "--commit": "the commit of the training code",
    "--convention": "the formula for FLOPs",
    "--cp": "context-parallel size",
    "--dp": "data-parallel size",
    "--dry-run": "write nothing, print what it costs",
    "--dtype": "number format of the weights",
    "--fit": "run folders to fit",
    "--flash": "flash attention",
    "--force": "replace a file that is there",
    "--format": "the form of the output",
    "--fresh": "run what is complete again",
    "--gpu-type": "the name of a card",
    "--gpus-per-node": "GPUs of a node",
    "--hide": "secrets to hide in text",
    "--here": "run folders of this machine",
    "--if-missing": "do nothing if it is there",
    "--input": "text to make tokens of",
    "--leave": "GPUs that may stay idle",
    "--list": "print names alone",
    "--logs": "the folder that holds the studies' folders",
    "--mapping": "what a column of a table means",
    "--fact": "what is true of every row of a table",
    "--margin": "share of memory left free",
    "--max-restarts": "times to restart a failed run",
    "--max-running": "jobs at a time",
    "--no-preflight": "submit although something is missing",
    "--micro-batches": "micro-batches through a pipeline that is drawn",
    "--n-micro": "micro-batches of an optimizer step on a rank",
    "--network": "a node's network, in words",
    "--only": "which runs of the study",
    "--out": "the file or folder to write",
    "--rank": "the ranks to rehearse",
    "--page": "the offline page to write",
    "--question": "what a study asks",
    "--params": "parameters of the model",
    "--peak-tflops": "the peak of a card that is not known",
    "--predict": "show this cluster's prediction beside",
    "--processes": "ranks of a measurement",
    "--runs": "runs to fit",
    "--run-name": "one run of the study",
    "--scaling": "strong or weak",
    "--schedule": "the pipeline schedule",
    "--seconds": "seconds of a measurement",
    "--srun": "start ranks by srun",
    "--strict": "refuse what cannot run",
    "--study": "a study file",
    "--text-key": "the key of a document's text",
    "--tokenizer": "a tokenizer",
    "--top": "how many to show or keep, best first",
    "--why": "the layout to explain",
    "--window": "iterations to use",
    "--yes": "do not ask",
    "--to": "the tool that gets curves",
    "--follow": "go on while it trains",
    "--max-gpus": "leave out what needs more GPUs",
    "--json": "a file of the same rows",
    "--cpu": "without a GPU",
}
SETTINGS = {"--" + setting.name.replace("_", "-"): setting for setting in fields(RunSpec)}
ALIASES = {
    "--max-train-steps": "--steps",  # as other trainers call it
    "--make-vocab-size-divisible-by": "--vocab-multiple",  # as Megatron-LM calls it
    "--local_rank": "--local-rank",  # how the deepspeed launcher calls a program
    "--local-rank": "--local_rank",
}


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
def test_every_flag_has_help_and_a_meaning_of_its_own(command, monkeypatch):
    for action in actions_of(command, monkeypatch):
        what = action.option_strings or action.metavar or action.dest
        if isinstance(action, argparse._SubParsersAction):
            continue
        assert action.help, what
        names = [n for n in action.option_strings if n.startswith("--") and n != "--help"]
        no = [name for name in names if name.startswith("--no-")]
        (name, *others) = [n for n in names if n not in no] or [None]
        if name:
            known = name in MEANING or name in SETTINGS or name in ALIASES
            assert known, (
                f"say in MEANING what {name} is for, unless another flag is for it already"
            )
            assert all(ALIASES.get(other) == name for other in others), names


def test_no_meaning_has_two_flags(monkeypatch):
    meanings = [*MEANING.values(), *(s.metadata["help"] for s in SETTINGS.values())]
    assert len(set(meanings)) == len(meanings)
    used = {
        name
        for command in COMMANDS
        if command not in WITHOUT_FLAGS
        for action in actions_of(command, monkeypatch)
        for name in action.option_strings
    }
    assert set(MEANING) - used == set(), "flags that no command has"


@pytest.mark.parametrize(
    ("command", "flags"),
    [
        ("plan", ["--tied", "--no-tied"]),
        ("tflops", ["log", "--tied", "--no-tied"]),
    ],
)
def test_two_spellings_of_one_flag_are_refused(command, flags, capsys):
    main = importlib.import_module(f"analysis.{command}").main
    with pytest.raises(SystemExit) as ended:
        main(flags)
    assert ended.value.code == 2
    one, other = [flag.partition("=")[0] for flag in flags if flag.startswith("--")]
    wanted = f"analysis.{command}: {one} and {other} set the same thing: give one of them"
    assert capsys.readouterr().err == f"{wanted} (--help lists the flags)\n"


def test_the_last_of_one_flag_counts():
    parser = Parser()
    parser.add_argument("--gpus", type=int)
    assert parser.parse_args(["--gpus", "4", "--gpus", "8"]).gpus == 8
