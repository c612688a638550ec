"""What the tests share: where things are, and how a command is run."""

import contextlib
import functools
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from parallel import sweep
from parallel.study import Study

TRAIN = "parallel.train"
ROOT = Path(__file__).resolve().parent.parent
ENGINES = ("ddp", "deepspeed_zero", "deepspeed_pipe", "megatron")
THREADS = {"OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu"}
SHARED = Path(os.environ.get("SCALING_SHARED", ROOT.parent / "shared"))


@pytest.fixture
def shared() -> Path:
    """Published material beside the checkout; tests that need it skip where it is absent."""
    if not SHARED.is_dir():
        pytest.skip(f"published material is not here ({SHARED}; set SCALING_SHARED)")
    return SHARED


SERVERS: list[tuple[subprocess.Popen, Path]] = []


@functools.cache
def warm_server(engine: str) -> Path:
    """The socket of a server that has imported an engine (tests/warm.py)."""
    path = Path(tempfile.mkdtemp(prefix="warm-")) / "socket"
    command = [sys.executable, "-W", "ignore", "tests/warm.py", "serve", str(path), engine]
    server = subprocess.Popen(
        command,
        cwd=ROOT,
        env=os.environ | THREADS,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
    )
    SERVERS.append((server, path))
    wait_for(path.exists, 300, f"the server of {engine}")
    return path


def pytest_sessionfinish() -> None:
    for server, path in SERVERS:
        server.kill()
        server.wait()
        shutil.rmtree(path.parent)


def warm(engine: str, ranks: int) -> list[str]:
    """What stands before `-m MODULE ARG...` to start it on `ranks` ranks, 0 for none, in forks."""
    return [sys.executable, "-S", "tests/warm.py", "run", str(warm_server(engine)), str(ranks)]


def run_module(*arguments: str, ranks: int = 0, timeout: float = 300, **environment: str):
    """`python -m ...` from the repository root, on `ranks` ranks; the trainer starts warm."""
    engine = "ddp"
    if "--engine" in arguments:
        engine = arguments[arguments.index("--engine") + 1]
    if arguments[0] == TRAIN and engine in ENGINES:
        command = warm(engine, ranks)
    else:
        command = [sys.executable]
        if ranks:
            command += ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    return subprocess.run(
        [*command, "-m", *arguments],
        cwd=ROOT,
        env=os.environ | THREADS | environment,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=timeout,
    )


@contextlib.contextmanager
def warm_sweeps() -> Iterator[None]:
    """Inside, `parallel.sweep` starts its runs warm, not by torchrun."""
    cold = sweep.command_of

    def command_of(study: Study, name: str, folder: Path, srun: bool) -> list[str]:
        command, spec = cold(study, name, folder, srun), study.run(name)
        return warm(spec.engine, spec.gpus) + command[command.index(TRAIN) - 1 :]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sweep, "command_of", command_of)
        yield


def start_training(
    folder: Path, tokens: Path, ranks: int, *flags: str, stderr: int = subprocess.DEVNULL
) -> subprocess.Popen:
    """torchrun of parallel.train, in a session of its own; the test ends it."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += [f"--nproc-per-node={ranks}", "-m", TRAIN, *flags]
    return subprocess.Popen(
        [*command, "--data", str(tokens), "--out", str(folder)],
        cwd=ROOT,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=stderr,
        text=True,
        start_new_session=True,
    )


def rank_process(launcher: subprocess.Popen, rank: int) -> psutil.Process:
    """The process of a rank that the launcher started."""
    for child in psutil.Process(launcher.pid).children(recursive=True):
        if child.environ().get("RANK") == str(rank) and TRAIN in " ".join(child.cmdline()):
            return child
    raise AssertionError(f"no process of rank {rank}")


def steps_so_far(folder: Path) -> int:
    path = folder / "steps.csv"
    return path.read_text().count("\n") - 1 if path.exists() else 0


def wait_for(condition: Callable, seconds: float, what: str, every: float = 0.1):
    """What the condition gives as soon as it is true; the test fails when it never is."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if value := condition():
            return value
        time.sleep(every)
    pytest.fail(f"waited {seconds} s for {what}")


@pytest.fixture(scope="session")
def tokens(tmp_path_factory) -> Path:
    """A prepared folder of the standard library's text."""
    from parallel import data

    out = tmp_path_factory.mktemp("tokens") / "stdlib"
    data.prepare(out, [])
    return out
