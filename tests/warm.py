"""Ranks that start warm: a server that has imported an engine forks them. Stands in for torchrun
where a test is about the training and not about its launcher.

    python tests/warm.py serve SOCKET ENGINE                one per engine and test session
    python tests/warm.py run SOCKET RANKS -m MODULE ARG...  as torchrun on one machine; 0 RANKS: as
                                                            `python -m MODULE ARG...`

Importing torch, deepspeed and megatron-core takes each rank 2 to 6 seconds of a core. A fork takes
none. As under torchrun, the first rank that fails ends the others, and ranks end with their
launcher.
"""

import contextlib
import importlib
import json
import os
import runpy
import select
import signal
import socket
import sys
import time
import traceback
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
GRACE_S = 10  # from SIGTERM to SIGKILL, for the ranks that are left


def run(path: str, ranks: int, arguments: list[str]) -> int:
    """Have the server fork the ranks; the launcher's exit status."""
    asked = {"ranks": ranks, "argv": arguments, "cwd": os.getcwd(), "env": dict(os.environ)}
    with socket.socket(socket.AF_UNIX) as server:
        server.connect(path)
        socket.send_fds(server, [b"!"], [0, 1, 2])
        server.sendall(json.dumps(asked).encode() + b"\n")
        answer = server.makefile().readline()
    return int(answer) if answer else 1


def serve(path: str, engine: str) -> None:
    """Import an engine once, then fork a launcher for every connection, until the parent ends."""
    parent = os.getppid()
    sys.path[0] = str(ROOT)
    importlib.import_module(f"parallel.engines.{engine}")
    threads = os.listdir("/proc/self/task")
    if len(threads) > 1:
        raise RuntimeError(f"a fork would lose {len(threads) - 1} threads")
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # launchers end by themselves
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(path)
        server.listen(64)
        server.settimeout(1.0)
        while os.getppid() == parent:
            with contextlib.suppress(TimeoutError):
                client, _ = server.accept()
                client.setblocking(True)
                if os.fork() == 0:
                    server.close()
                    launch(client)
                client.close()


def launch(client: socket.socket) -> None:
    """Fork the ranks that a client asked for and answer with the exit status."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    _, descriptors, _, _ = socket.recv_fds(client, 1, 3)
    asked = json.loads(client.makefile().readline())
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
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
    with contextlib.suppress(OSError):
        client.sendall(f"{1 if status < 0 else status}\n".encode())
    os._exit(0)


def end(pids: set[int]) -> None:
    """SIGTERM, and SIGKILL to those that stay."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        for pid in pids:
            os.kill(pid, number)
        until = time.monotonic() + GRACE_S
        while pids and time.monotonic() < until:
            pid, _ = os.waitpid(-1, os.WNOHANG)
            pids.discard(pid)
            time.sleep(0.01)


def be_rank(rank: int, port: int, asked: dict, descriptors: list[int]) -> None:
    """Run the module as this rank, as `python -m` does; does not return."""
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
        os.environ["TORCHELASTIC_RUN_ID"] = "warm"
    _, module, *arguments = asked["argv"]  # the first is -m
    sys.argv = [module, *arguments]
    sys.path[0] = asked["cwd"]
    status = 0
    try:
        runpy.run_module(module, run_name="__main__", alter_sys=True)
    except SystemExit as ended:
        status = ended.code if isinstance(ended.code, int) else 0 if ended.code is None else 1
    except BaseException:
        traceback.print_exc()
        status = 1
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


if __name__ == "__main__":
    if sys.argv[1] == "serve":
        serve(sys.argv[2], sys.argv[3])
    else:
        sys.exit(run(sys.argv[2], int(sys.argv[3]), sys.argv[4:]))
