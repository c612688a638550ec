"""Commands: one boundary, one flag for one thing, one line for a mistake, also for bad input."""

import argparse
import ast
import importlib
import inspect
import os
import signal
import subprocess
import sys
import time
from functools import partial

import pytest

from analysis.runs import views
from analysis.runs.run_options import percent
from base.errors import UsageError, command_line, printable
from parallel.config.run_spec import SETTINGS
from tests.conftest import ROOT
from tests.tools import bad_commands, bad_input
from tests.tools.bad_commands import actions_of

PROGRAMS = sorted(
    path
    for room in ("analysis", "parallel", "slurm", "models", "benchmarks")
    for path in (ROOT / room).rglob("*.py")
    if '__name__ == "__main__"' in path.read_text()
)
TOY = """
import sys, time
from base.errors import UsageError, command_line

@command_line("toy")
def main(argv=None):
    what = sys.argv[1]
    if what == "lines":
        for number in range(50_000):
            print("a line of a table", number)
    elif what == "word":
        print("word")
    elif what == "mistake":
        raise UsageError("4 is not 5")
    elif what == "wait":
        print("here", flush=True)
        time.sleep(30)
    elif what == "file":
        open(sys.argv[2])
    return 0

if __name__ == "__main__":
    sys.exit(main())
"""


@pytest.fixture(scope="module")
def toy(tmp_path_factory):
    path = tmp_path_factory.mktemp("toy") / "toy.py"
    path.write_text(TOY)
    return path


def shell(toy, command: str, unbuffered: str = "") -> tuple[int, str]:
    """The status and stderr of `command`, where TOY stands for the toy."""
    env = os.environ | {"PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": unbuffered}
    command = command.replace("TOY", f"{sys.executable} {toy}")
    done = subprocess.run(["bash", "-c", command], env=env, capture_output=True, text=True)
    return done.returncode, done.stderr


@pytest.mark.parametrize("path", PROGRAMS, ids=lambda p: str(p.relative_to(ROOT)))
def test_every_command_has_the_one_boundary(path):
    """Those of VIEWS have it from the function that makes their `main`."""
    text, nodes = path.read_text(), ast.parse(path.read_text()).body
    if f'\nmain = command("{path.stem}", __doc__)\n' in text:
        nodes = ast.parse(inspect.getsource(views.command)).body[0].body
    (main,) = [node for node in nodes if hasattr(node, "args") and node.name == "main"]
    (decorator,) = [ast.unparse(d).partition("(")[0] for d in main.decorator_list]
    assert decorator.removeprefix("errors.") == "command_line"


@pytest.mark.parametrize("unbuffered", ["", "1"], ids=["buffered", "unbuffered"])
@pytest.mark.parametrize(
    ("command", "status", "said"),
    [
        ("TOY lines | head -1 > /dev/null; exit ${PIPESTATUS[0]}", 141, ""),
        ("TOY word | true; exit 0", 0, ""),
        ("TOY lines 2>&1 | head -1 > /dev/null; exit ${PIPESTATUS[0]}", 141, ""),
        ("TOY lines >/dev/full", 1, "toy: cannot write the output: No space left on device\n"),
        ("TOY word >/dev/full", 1, "toy: cannot write the output: No space left on device\n"),
        ("TOY mistake", 2, "toy: 4 is not 5\n"),
        ("TOY file /nowhere", 2, "toy: /nowhere: No such file or directory\n"),
    ],
)
def test_a_command_ends_in_one_line_or_none(toy, command, status, said, unbuffered):
    assert shell(toy, command, unbuffered) == (status, said)


def test_an_interrupted_command_says_so_in_one_line(toy):
    process = subprocess.Popen(
        [sys.executable, str(toy), "wait"],
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        # A shell starts what it puts in the background with SIGINT ignored; children inherit that.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    assert process.stdout.readline() == "here\n"
    time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    _, said = process.communicate(timeout=10)
    assert (process.returncode, said) == (130, "toy: interrupted\n")


def test_a_mistake_is_one_line_that_no_terminal_obeys(refused):
    @command_line("toy")
    def main(argv=None):
        raise UsageError("no run \x1b[2Jcalled\n\x9b31m\udcff x\u202ey")

    assert refused(main) == "toy: no run \\x1b[2Jcalled \\x9b31m\\udcff x\\u202ey\n"
    assert printable("GPT-3 175B, 1.3 µs – ok") == "GPT-3 175B, 1.3 µs – ok"


@pytest.mark.parametrize(
    ("module", "words"),
    [
        ("analysis.tflops", ["x", "--top\x1b[2J"]),
        ("slurm.status", []),
    ],
)
def test_a_wrong_flag_is_one_line_that_no_terminal_obeys(module, words, capsys):
    with pytest.raises(SystemExit, match="2"):
        importlib.import_module(module).main(words)
    line = capsys.readouterr().err
    assert line.startswith(f"{module}: ") and line.count("\n") == 1 and "\x1b" not in line


def test_a_reader_that_goes_away_ends_a_command_after_its_files_are_written(tmp_path):
    read, write = os.pipe()
    os.close(read)
    flags = "--preset 1.7b --gpu-type A100-80GB --gpus 8 --global-batch 8 --study".split()
    command = [sys.executable, "-m", "analysis.plan", *flags, str(tmp_path / "x.toml")]
    done = subprocess.run(command, cwd=ROOT, stdout=write, stderr=subprocess.PIPE, check=False)
    os.close(write)
    assert done.returncode == 141 and (tmp_path / "x.toml").exists()


def test_the_table_of_runs_is_a_script_that_starts_in_any_folder(tmp_path):
    script = [sys.executable, str(ROOT / "analysis" / "tflops.py"), "--help"]
    done = subprocess.run(script, cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert "python -m analysis.tflops" in done.stdout or "analysis/tflops.py" in done.stdout


COMMANDS = sorted(
    ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__main__")
    for path in PROGRAMS
    if not path.is_relative_to(ROOT / "benchmarks")
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
        number = action.type in (int, float, percent) or isinstance(action.type, partial)
        for flag in action.option_strings:
            kinds.setdefault(flag, set()).add((action.nargs == 0, number))
    assert [flag for flag, kind in kinds.items() if len(kind) > 1] == []


def test_words_of_a_flag_are_joined_by_dashes(actions):
    joined = {flag for _, action in actions for flag in action.option_strings if "_" in flag}
    assert joined == {"--local_rank"}  # as DeepSpeed's launcher spells it


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
