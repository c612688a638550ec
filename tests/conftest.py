"""What the tests share: where things are, how a command is run, and which file is tested first.

The tests work in a copy of the repository's files without those that git ignores: what `make study`
or a user's run left in data/ and logs/ changes no test, and no test changes the repository.

Two processes run the tests (pytest-xdist), each one file at a time. They share the servers that
fork ranks (parallel/forked_ranks.py).
"""

import atexit
import contextlib
import fcntl
import functools
import gc
import hashlib
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy
import psutil
import pytest

from parallel import forked_ranks
from tests.tools.testbed import wait_for


def clean_copy(repository: Path) -> Path:
    """A new folder of copies of the repository's files without those that git ignores."""
    folder = Path(tempfile.mkdtemp(prefix="clean-"))
    names = "git ls-files -z --cached --others --exclude-standard"
    copy = f"tar -c --null -T - --ignore-failed-read 2>/dev/null | tar -xC {folder}"
    subprocess.run(f"{names} | {copy}", shell=True, cwd=repository, check=True)
    return folder


TRAIN = "parallel.train"
ROOT = Path(__file__).resolve().parent.parent
CLEAN = "SCALING_TEST_ROOT"  # the processes of one test run share the folder
if CLEAN not in os.environ:
    os.environ[CLEAN] = str(clean_copy(ROOT))
    atexit.register(shutil.rmtree, os.environ[CLEAN])
CLEAN_ROOT = Path(os.environ[CLEAN])
# What loads together: PyTorch alone, and the libraries that patch it.
SERVED = ("ddp", "fsdp2"), ("deepspeed_zero", "deepspeed_pipe", "megatron")
ENGINES = (*SERVED[0], *SERVED[1])
# The engine whose libraries a command needs that names none.
WARM = {TRAIN: "ddp", "parallel.bench": "ddp", "parallel.rehearse": "megatron"}
THREADS = {"OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu"}
os.environ["SCALING_CLUSTERS"] = ""  # the shipped clusters alone, whatever the user has
SHARED = Path(os.environ.get("SCALING_SHARED", ROOT.parent / "shared"))


@pytest.fixture
def shared() -> Path:
    """The folder of published material; a test that needs it is skipped where it is absent."""
    if not SHARED.is_dir():
        pytest.skip(f"published material is not here ({SHARED}; set SCALING_SHARED)")
    return SHARED


@pytest.fixture(autouse=True, scope="session")
def clean_folder() -> None:
    os.chdir(CLEAN_ROOT)


@pytest.fixture(autouse=True)
def seeded() -> None:
    """A test draws the same numbers, whichever tests its process ran before."""
    random.seed(0)
    numpy.random.seed(0)
    if torch := sys.modules.get("torch"):
        torch.manual_seed(0)
        torch.set_num_threads(1)  # a second thread would wait busily for its share of small work


@pytest.fixture
def printed(capsys) -> Callable[..., str]:
    """What a command prints; its words may be paths."""

    def ask(main: Callable, *words: object, status: int = 0) -> str:
        capsys.readouterr()
        assert main(list(map(str, words))) == status
        return capsys.readouterr().out

    return ask


@pytest.fixture
def rows_of(printed) -> Callable[..., list[dict]]:
    """The rows of the table that a command prints."""
    return lambda main, *words, status=0: json.loads(
        printed(main, *words, "--format", "json", status=status)
    )


@pytest.fixture
def refused(capsys) -> Callable[..., str]:
    """What a command says on stderr as it ends, with 2 unless `status` says otherwise."""

    def ask(main: Callable, *words: object, status: int = 2) -> str:
        capsys.readouterr()
        assert main(list(map(str, words))) == status
        return capsys.readouterr().err

    return ask


def write_prepared(folder: Path, train: int, val: int = 500, **other) -> Path:
    """A prepared folder of so many ids, all 0; `other` values in its meta.json."""
    folder.mkdir(exist_ok=True)
    counts, digests = {"train": train, "val": val}, {}
    for split, tokens in counts.items():
        (folder / f"{split}.bin").write_bytes(bytes(2 * tokens))
        digests[split] = hashlib.sha256(bytes(2 * tokens)).hexdigest()
    meta = {"tokenizer": "byte", "vocab_size": 257, "dtype": "<u2", "end_of_text": 256}
    meta |= {"documents": 3, "tokens": counts, "sha256": digests}
    (folder / "meta.json").write_text(json.dumps(meta | other))
    return folder


SERVERS = "SCALING_TEST_SERVERS"  # the folder of their sockets
# The longest files start first, so that both processes end at about the same time.
FIRST = ("test_parity", "test_slurm_real", "test_interruptions", "test_checkpoints_resume")


def pytest_configure() -> None:
    # Programs inherit an ignored signal (`nohup make test`), but not a handler.
    if signal.getsignal(signal.SIGHUP) == signal.SIG_IGN:
        signal.signal(signal.SIGHUP, lambda *_: None)
    if SERVERS not in os.environ:  # the first process ends last
        os.environ[SERVERS] = tempfile.mkdtemp(prefix="warm-")
        os.environ[f"{SERVERS}_OWNER"] = str(os.getpid())
    forked_ranks.server = warm_server


def pytest_unconfigure() -> None:
    if os.environ.get(f"{SERVERS}_OWNER") == str(os.getpid()):
        shutil.rmtree(os.environ[SERVERS], ignore_errors=True)


def pytest_collection() -> None:
    gc.disable()  # what is imported and collected stays until the end


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    gc.freeze()
    gc.enable()
    order = {name: place for place, name in enumerate(FIRST)}
    items.sort(key=lambda item: order.get(item.path.stem, len(FIRST)))


@functools.cache
def warm_server(engine: str, threads: int = 1) -> Path:
    """Like parallel.forked_ranks.server, but all processes of this test run share a server, and so
    do the engines of SERVED."""
    engines = next((alike for alike in SERVED if engine in alike), (engine,))
    parent = warm_server(SERVED[0][0], threads) if engines != SERVED[0] else None
    folder = Path(os.environ[SERVERS]) / f"{engines[0]}-{threads}"
    folder.mkdir(exist_ok=True)
    path = folder / "socket"
    with open(folder / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not path.exists():
            owner = int(os.environ[f"{SERVERS}_OWNER"])
            if parent:
                assert forked_ranks.fork_server(parent, engines, path, owner)
            else:
                server = forked_ranks.start_server(engines, threads, path, owner)
                wait_for(path.exists, 300, f"the server of {engine}")
                server.returncode = 0  # it ends with the first process; Popen must not wait for it
    return path


def run_module(*arguments: str, ranks: int = 0, timeout: float = 300, **environment: str):
    """`python -m ...` from the repository root, on `ranks` ranks; what WARM names starts warm."""
    engine = WARM.get(arguments[0])
    if "--engine" in arguments:
        engine = arguments[arguments.index("--engine") + 1]
    if arguments[0] in WARM and engine in ENGINES:
        command = forked_ranks.prefix(engine, 1, ranks)
    else:
        command = [sys.executable]
        if ranks:
            command += ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    return subprocess.run(
        [*command, "-m", *arguments],
        cwd=CLEAN_ROOT,
        env=os.environ | THREADS | environment,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=timeout,
    )


def run_worker(module: str, engine: str, ranks: int, *words: object) -> str:
    """tests/MODULE.py on ranks that have loaded an engine's libraries; what they print."""
    done = subprocess.run(
        [*forked_ranks.prefix(engine, 1, ranks), "-m", f"tests.{module}", *map(str, words)],
        cwd=ROOT,
        env=os.environ | THREADS | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


@contextlib.contextmanager
def training(
    folder: Path, tokens: Path, ranks: int, *flags: str, forked: bool = False
) -> Iterator[subprocess.Popen]:
    """parallel.train, forked or under torchrun, in a new session; it is killed after the block."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    # Once torchrun has asked how a rank ended, nobody else can: its peers get time to do so first.
    command += ["--monitor-interval=1", f"--nproc-per-node={ranks}"]
    if forked:
        command = forked_ranks.prefix("ddp", 1, ranks)
    launcher = subprocess.Popen(
        [*command, "-m", TRAIN, *flags, "--data", str(tokens), "--out", str(folder)],
        cwd=CLEAN_ROOT,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    try:
        yield launcher
    finally:
        if launcher.poll() is None:
            os.killpg(launcher.pid, signal.SIGKILL)
            launcher.wait()


def rank_process(launcher: subprocess.Popen, rank: int) -> psutil.Process:
    """The process of a rank that the launcher started."""
    for child in psutil.Process(launcher.pid).children(recursive=True):
        if child.environ().get("RANK") == str(rank) and TRAIN in " ".join(child.cmdline()):
            return child
    raise AssertionError(f"no process of rank {rank}")


def steps_so_far(folder: Path) -> int:
    path = folder / "steps.csv"
    return path.read_text().count("\n") - 1 if path.exists() else 0


def study_file(path: Path, text: str) -> Path:
    """Write a study on the local test cluster."""
    path.write_text(f'question = "?"\ncluster = "local-test"\n{text}')
    return path


@pytest.fixture(scope="session")
def tokens(tmp_path_factory) -> Path:
    """A prepared folder of made text, the same with every Python: words, the first ones often."""
    from parallel import data

    made = tmp_path_factory.mktemp("tokens")
    draw = numpy.random.Generator(numpy.random.Philox(0))
    syllables = [first + second for first in "bdfgklmnprstv" for second in "aeiou"]
    words = ["".join(draw.choice(syllables, 1 + n % 4)) for n in range(2000)]
    (made / "text").mkdir()
    for document in range(200):
        line = [words[n % 2000] for n in draw.zipf(1.3, 2000)]
        (made / "text" / f"{document:03}.txt").write_text(" ".join(line))
    data.prepare(made / "stdlib", [made / "text"])
    return made / "stdlib"
