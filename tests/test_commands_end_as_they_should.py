"""A command's end: one line for a mistake, quiet where nobody reads, one line on a full disk."""

import ast
import importlib
import inspect
import os
import signal
import subprocess
import sys
import time

import pytest

from analysis.runs import views
from base.errors import UsageError, command_line, printable
from tests.conftest import ROOT

COMMANDS = sorted(
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


@pytest.mark.parametrize("path", COMMANDS, ids=lambda p: str(p.relative_to(ROOT)))
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
