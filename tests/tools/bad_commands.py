"""Bad command lines, and outputs that cannot be written, for every command of the repository.

Commands run in a small folder, the desk, with a file of every kind: a study of three runs, a log, a
study's TOML, a table, a page, a picture, a link to itself. Each case changes a command line that
works; the flags are those that argparse declares.
"""

import argparse
import builtins
import contextlib
import functools
import os
import random
import shutil
import subprocess
import sys
from collections.abc import Iterator
from multiprocessing.process import BaseProcess
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

from parallel.record.schema import SLOW_COLUMNS, SLOW_RANKS
from tests.tools import tiny_checkpoint
from tests.tools.watched import HANG, ROOT, TRACEBACK, WRONG, Problem, command, copy_study

# For each command, a line that works on the desk. Benchmarks are left out: they start the commands.
LINES = {
    "analysis.audit": "table.csv",
    "analysis.breakdown": "logs/study",
    "analysis.calibrate": "--runs logs/study --cluster dgx-a100 --out x.toml",
    "analysis.checkpoints": "logs/study",
    "analysis.compare": "logs/study",
    "analysis.expect": "logs/study/ddp --cluster 2-core-cpu",
    "analysis.failures": "logs/study",
    "analysis.goodput": "logs/study",
    "analysis.page": "logs/study --out page.html",
    "analysis.parity": "logs/study",
    "analysis.plan": "--preset gpt2-124m --cluster jean-zay-v100 --gpus 4 --global-batch 16",
    "analysis.plots": "logs/study --out plots",
    "analysis.profile": "logs/study",
    "analysis.proposal": "logs/study --tokens 1e9 --plot proposal.svg",
    "analysis.prune": "study.toml --cluster 2-core-cpu",
    "analysis.report": "page.md",
    "analysis.scaling": "logs/study",
    "analysis.stragglers": "logs/study",
    "analysis.curves": "logs/study --to tensorboard --out curves",
    "analysis.tflops": "job.out",
    "parallel.checkpoint": "verify logs/study/ddp",
    "parallel.data": "--input page.md --out data --tokenizer byte",
    "parallel.record.environment": "environment.txt",
    "parallel.bench": "checked",
    "parallel.gpu_check": "--cpu",
    "parallel.rehearse": "--preset tiny",
    "parallel.sweep": "study.toml --logs swept",
    "parallel.train": "--check --preset tiny --out run",
    "slurm.cancel": "study.toml --logs logs",
    "slurm.record_end": "logs/study/ddp broken job.out",
    "slurm.forward_signals": "true",
    "slurm.nodes": "study.toml --logs logs",
    "slurm.render": "study.toml",
    "slurm.status": "study.toml",
    "slurm.submit": "study.toml --logs logs",
}
# They start runs and jobs: only --help is called.
STARTS = "parallel.gpu_check parallel.rehearse parallel.sweep slurm.submit".split()
OUTPUT_S = 60
NUMBERS = "-1 0 nan inf 1e400 1e300 1e9 1e-300 1.5 0x10 1,5 0_1 100000".split() + ["9" * 30, "٣"]
WORDS = ["", " ", "x", "--", "-", "x" * 5000, "a\nb", "\x1b[2J", "\udcff", "=1", "1:0", "a/../b"]
FILES = "logs/study logs/study/ddp job.out study.toml table.csv page.md picture.png empty missing"
FILES = [*FILES.split(), "folder", "null", "loop", "."]


# vl-convert's engine asks for more address space than a worker of bad_input.py may have.
NO_CHARTS = SimpleNamespace(
    javascript_bundle=lambda script: "",
    vegalite_to_svg=lambda spec: "<svg></svg>",
    vegalite_to_png=lambda spec, scale: b"\x89PNG",
)


def lay_desk(desk: Path) -> None:
    runs = [
        ROOT / "logs/2-core-cpu/2-core_breakdown" / n for n in ("ddp", "ddp-dp2", "megatron-pp2")
    ]
    copy_study(tuple(runs), desk / "logs" / "study")
    (desk / "logs/study/ddp-dp2" / SLOW_RANKS).write_text(",".join(SLOW_COLUMNS) + "\n")
    shutil.copy(runs[0] / "train.log", desk / "job.out")
    shutil.copy(ROOT / "slurm/2-core_breakdown.toml", desk / "study.toml")
    shutil.copy(ROOT / "logs/published/seed003_jeanzay_v100.csv", desk / "table.csv")
    shutil.copy(ROOT / "logs/plots/page.png", desk / "picture.png")
    (desk / "page.md").write_text(
        "# Page\n\n| GPUs | Size | GBS | Speed | TFLOPs |\n"
        "| --- | --- | --- | --- | --- |\n| 16 | 7.5B | 4 | 0.661s | 23.2 |\n"
    )
    (desk / "empty").touch()
    (desk / "folder").mkdir()
    (desk / "null").symlink_to("/dev/null")
    (desk / "loop").symlink_to("loop")
    tiny_checkpoint.save_some(desk / "logs/study/ddp/checkpoints", [10])
    command("parallel.checkpoint", ["export", str(desk / "logs/study/ddp"), str(desk / "weights")])


# --- command lines -------------------------------------------------------------------------------


class Parsed(BaseException):
    """Raised in a command in place of parsing."""


@functools.cache
def actions_of(module: str) -> list[argparse.Action]:
    """What a command's parser and those of its subcommands take."""
    stop = {"autospec": True, "side_effect": Parsed}
    with mock.patch.object(argparse.ArgumentParser, "parse_args", **stop) as parse:
        with contextlib.suppress(Parsed):
            command(module, [])
    parsers = [parse.call_args.args[0]] if parse.called else []  # slurm.forward_signals has none
    actions = []
    for parser in parsers:
        actions += parser._actions
        for action in parser._actions:
            if isinstance(action, argparse._SubParsersAction):
                parsers += action.choices.values()
    return actions


def bad_flag(chance: random.Random, module: str, words: list[str]) -> list[str]:
    """A flag of the command with a value that is probably wrong, or with a letter too many."""
    nonsense = argparse.Action(["--nonsense"], "nonsense")
    flags = [action for action in actions_of(module) if action.option_strings]
    flag = chance.choice([f for f in flags if "--help" not in f.option_strings] or [nonsense])
    name = chance.choice(flag.option_strings)
    if chance.random() < 0.2:
        return [*words, name + name[-1]]
    if flag.nargs == 0:
        return [*words, name]
    values = chance.choice([NUMBERS, NUMBERS, WORDS, FILES, list(flag.choices or NUMBERS)])
    value = str(chance.choice(values))
    return [*words, f"{name}={value}"] if chance.random() < 0.5 else [*words, name, value]


def bad_word(chance: random.Random, module: str, words: list[str]) -> list[str]:
    """Another word in the place of one, or between two."""
    at = chance.randrange(len(words) + 1)
    return [*words[:at], chance.choice(FILES + WORDS), *words[at + chance.randrange(2) :]]


@contextlib.contextmanager
def nothing_starts() -> Iterator[None]:
    """While this is open, no process is started, signalled or replaced; no question is asked."""
    missing = FileNotFoundError(2, "No such file or directory", "a program")
    instead = [(subprocess, "Popen", missing), (os, "execvp", missing), (os, "execv", missing)]
    instead += [(BaseProcess, "start", missing), (os, "kill", ProcessLookupError)]
    with contextlib.ExitStack() as stack:
        for where, name, failure in [*instead, (builtins, "input", EOFError)]:
            stack.enter_context(mock.patch.object(where, name, side_effect=failure))
        for module in ("submit", "watch"):  # where --logs begins
            stack.enter_context(mock.patch(f"slurm.{module}.ROOT", Path.cwd()))
        stack.enter_context(mock.patch("analysis.pages.charts.vega", return_value=NO_CHARTS))
        yield


def one_command(chance: random.Random, folder: Path, loud: bool) -> list[Problem]:
    """A command's working line with one to three mistakes in it, in this process."""
    module = chance.choice(sorted(LINES))
    words = LINES[module].split()
    for _ in range(chance.choice([1, 1, 2, 3])):
        mistake = chance.choice([bad_flag, bad_word])
        words = mistake(chance, module, words)
    if loud:
        print(f"python -m {module}", *map(repr, words))
    lay_desk(folder)
    with contextlib.chdir(folder), nothing_starts():
        return command(module, words, loud)[1]


# --- outputs -------------------------------------------------------------------------------------

OUTPUTS = {
    "| head -1": "{} | head -1 >first",
    ">/dev/full": "{} >/dev/full",
}


@functools.cache
def outputs() -> list[tuple[str, str, str]]:
    """(command, its arguments, how its output fails)."""
    lines = [
        (m, w) for m in LINES for w in (LINES[m], "--help") if w == "--help" or m not in STARTS
    ]
    return [(module, words, output) for module, words in lines for output in OUTPUTS]


def one_output(chance: random.Random, folder: Path, loud: bool, number: int) -> list[Problem]:
    """Run a command whose output cannot be written: it must end with one line or silently."""
    module, words, output = outputs()[number]
    lay_desk(folder)
    line = f"{sys.executable} -m {module} {words}"
    environment = os.environ | {"PYTHONPATH": str(ROOT), "XDG_CACHE_HOME": str(folder)}
    how = {"cwd": folder, "env": environment, "stdin": subprocess.DEVNULL, "timeout": OUTPUT_S}
    how |= {"capture_output": True, "text": True, "errors": "replace"}
    try:
        done = subprocess.run(["bash", "-c", OUTPUTS[output].format(line)], **how)
    except subprocess.TimeoutExpired:
        return [(HANG, f"{module} {words}: over {OUTPUT_S} s")]
    if loud:
        print(done.stderr)
    if "Traceback" in done.stderr or "Exception ignored" in done.stderr:
        return [(TRACEBACK, f"{module} {words}: {done.stderr.splitlines()[-1]}")]
    # argparse prints no error where its --help cannot be printed.
    silent = output == ">/dev/full" and done.returncode == 0 and words != "--help"
    if silent and subprocess.run(["bash", "-c", line], **how).stdout:
        return [(WRONG, f"{module} {words}: a full disk is no failure")]
    return []
