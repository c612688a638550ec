"""Ranks that start at once: a server that has imported an engine forks them, on this machine.

Importing torch, deepspeed and megatron-core takes a launcher and each of its ranks 2 to 6 seconds
of a core; a fork takes none. The server of an engine is itself a fork of one that has imported
torch. As under torchrun, the first rank that fails ends the others, and ranks end with their
launcher. Torch-free, but for the servers.
"""

import contextlib
import functools
import gc
import importlib
import json
import os
import random
import runpy
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Iterable
from pathlib import Path

from parallel.record.launch import LAUNCHER

ROOT = Path(__file__).resolve().parent.parent
GRACE_S = 10  # from SIGTERM to SIGKILL, for the ranks that are left
_SERVE = "import sys; from parallel.forked_ranks import serve; serve(*sys.argv[1:])"
_RUN = "import sys; from parallel.forked_ranks import run; sys.exit(run(*sys.argv[1:]))"
# What every engine imports; torch._dynamo, 1 to 4 seconds, only when an optimizer is built.
_ALL_IMPORT = ("parallel.train", "parallel.trainer", "torch._dynamo")
_TORCH_ALONE = "ddp"  # the engine that imports no other library
_started: list[subprocess.Popen] = []  # servers of this process, which end with it


def prefix(engine: str, threads: int, ranks: int) -> list[str] | None:
    """Returns what stands before `-m MODULE ARG...` to run it in forks on `ranks` ranks; None where
    the engine cannot be imported. 0 ranks form no group, as plain `python`. The working directory
    or PYTHONPATH must be the repository."""
    path = server(engine, threads)
    return [sys.executable, "-S", "-c", _RUN, str(path), str(ranks)] if path else None


@functools.cache
def server(engine: str, threads: int) -> Path | None:
    """Returns the socket of a server of this process for an engine, its threads as
    OMP_NUM_THREADS."""
    path = Path(tempfile.mkdtemp(prefix="warm-")) / "socket"
    if engine != _TORCH_ALONE:
        with_torch = server(_TORCH_ALONE, threads)
        return path if with_torch and fork_server(with_torch, [engine], path, os.getpid()) else None
    process = start_server([engine], threads, path, os.getpid())
    while not path.exists():
        if process.poll() is not None:
            return None
        time.sleep(0.02)
    _started.append(process)
    return path


def environment() -> dict[str, str]:
    """Returns this process's environment, in which the repository's modules are found from any
    folder."""
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    return os.environ | {"PYTHONPATH": path}


def start_server(engines: Iterable[str], threads: int, path: Path, owner: int) -> subprocess.Popen:
    """Starts a server, which makes the socket `path` when it is ready and ends with process
    `owner`; then it removes the folder of the socket."""
    on_cpu = {"DS_ACCELERATOR": "cpu", "CUDA_VISIBLE_DEVICES": ""}
    return subprocess.Popen(
        [sys.executable, "-W", "ignore", "-c", _SERVE, str(path), str(owner), *engines],
        env=environment() | {"OMP_NUM_THREADS": str(threads)} | on_cpu,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )


def fork_server(parent: Path, engines: Iterable[str], path: Path, owner: int) -> bool:
    """Has a server fork another one, which imports further engines and else is as `start_server`
    says. Returns whether it could import them."""
    return _ask(str(parent), {"serve": [str(path), str(owner), *engines]}) == 0


def run(path: str, ranks: str, *arguments: str) -> int:
    """Has the server fork the ranks, and returns the launcher's exit status."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C ends the ranks, and with them this
    place = {"cwd": os.getcwd(), "env": dict(os.environ)}
    return _ask(path, {"ranks": int(ranks), "argv": arguments, **place})


def _ask(path: str, request: dict) -> int:
    """Sends a server a request and this process's streams, and returns the status that it answers,
    or 1 where it ends without an answer."""
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(path)
        socket.send_fds(connection, [b"!"], [0, 1, 2])
        connection.sendall(json.dumps(request).encode() + b"\n")
        with connection.makefile() as answers:
            answer = answers.readline()
    return int(answer) if answer else 1


def serve(path: str, owner: str, *engines: str, asked_by: socket.socket | None = None) -> None:
    """Imports engines once, tells `asked_by` so, then forks for every connection what it asks for,
    until the owner ends."""
    for module in (*_ALL_IMPORT, *(f"parallel.engines.{engine}" for engine in engines)):
        importlib.import_module(module)
    threads = os.listdir("/proc/self/task")
    if len(threads) > 1:
        raise RuntimeError(f"a fork would lose {len(threads) - 1} threads")
    gc.collect()
    gc.freeze()  # a rank that collected garbage would look at all that is imported, and copy it
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # what it forks ends by itself
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the owner, and for the ranks
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(path)
        listener.listen(64)
        listener.settimeout(1.0)
        if asked_by is not None:
            _answer(asked_by, 0)
        while os.path.exists(f"/proc/{owner}"):
            with contextlib.suppress(TimeoutError):
                client, _ = listener.accept()
                client.setblocking(True)
                if os.fork() == 0:
                    listener.close()
                    become(client)
                client.close()
    shutil.rmtree(Path(path).parent)


def become(client: socket.socket) -> None:
    """Makes this fork what its client asks for, a server or a launcher; does not return."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    _, descriptors, _, _ = socket.recv_fds(client, 1, 3)
    asked = json.loads(client.makefile().readline())
    if "serve" in asked:
        for descriptor in descriptors:
            os.close(descriptor)
        serve(*asked["serve"], asked_by=client)
    else:
        launch(client, asked, descriptors)
    os._exit(0)


def _answer(client: socket.socket, status: int) -> None:
    """Tells a client the status that it waits for, if it still waits."""
    with contextlib.suppress(OSError):
        client.sendall(f"{status}\n".encode())
    client.close()


def launch(client: socket.socket, asked: dict, descriptors: list[int]) -> None:
    """Forks the ranks that a client asked for and answers with the exit status."""
    port = free_port()
    pids = {}
    for rank in range(max(asked["ranks"], 1)):
        if (pid := os.fork()) == 0:
            client.close()
            be_rank(rank, port, asked, descriptors)
        pids[pid] = rank
    status = 0
    while pids:
        pid, ended = os.waitpid(-1, os.WNOHANG)
        if pid:
            del pids[pid]
            status = status or os.waitstatus_to_exitcode(ended)
        elif select.select([client], [], [], 0.02)[0]:  # nobody waits for the ranks any more
            status = status or 1
        if status:
            end(set(pids))
            break
    _answer(client, 1 if status < 0 else status)


def free_port() -> int:
    """Returns a port that nobody listens on. Ports from 32768 on are left out: Linux gives them to
    outgoing connections, the other ranks' among them, before rank 0 listens."""
    while True:
        with socket.socket() as tried, contextlib.suppress(OSError):
            tried.bind(("127.0.0.1", port := random.SystemRandom().randrange(20_000, 32_768)))
            return port


def end(pids: set[int]) -> None:
    """Sends SIGTERM, and SIGKILL to those that stay."""
    import psutil  # here: `run` has no site-packages

    ranks = [psutil.Process(pid) for pid in pids]
    for rank in ranks:
        rank.terminate()
    for rank in psutil.wait_procs(ranks, GRACE_S)[1]:
        rank.kill()


def be_rank(rank: int, port: int, asked: dict, descriptors: list[int]) -> None:
    """Runs the module as this rank, as `python -m` does; does not return."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for number, descriptor in enumerate(descriptors):
        os.dup2(descriptor, number)
    # The old streams remember what kind of files they had.
    sys.stdin, sys.stdout = open(0, closefd=False), open(1, "w", closefd=False)
    sys.stderr = open(2, "w", buffering=1, closefd=False)
    os.chdir(asked["cwd"])
    os.environ.clear()
    os.environ.update(asked["env"])
    if asked["ranks"]:
        places = {"RANK": rank, "LOCAL_RANK": rank, "MASTER_PORT": port, "MASTER_ADDR": "127.0.0.1"}
        places |= dict.fromkeys(("WORLD_SIZE", "LOCAL_WORLD_SIZE"), asked["ranks"])
        os.environ.update({name: str(value) for name, value in places.items()})
        os.environ[LAUNCHER] = "fork"
    _, module, *arguments = asked["argv"]  # the first is -m
    sys.argv = [module, *arguments]
    sys.orig_argv = [sys.executable, *asked["argv"]]  # what run.json says of the command
    sys.path[0] = asked["cwd"]
    status = 0
    try:
        runpy.run_module(module, run_name="__main__", alter_sys=True)
    except SystemExit as ended:
        status = 1
        if ended.code is None or isinstance(ended.code, int):
            status = ended.code or 0
    except BaseException:
        traceback.print_exc()
        status = 1
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)
