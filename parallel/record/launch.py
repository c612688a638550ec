"""This process's rank, under torchrun, the deepspeed launcher, srun, a sweep or none of them.
Torch-free."""

import contextlib
import json
import os
import re
import signal
import subprocess
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache

from base.errors import UsageError

LAUNCHER = "SCALING_LAUNCHER"  # set by a launcher of ours, to its name
PORTS, STEPS_OF_A_JOB = range(20000, 32768), 128  # of masters under srun
TIME_LIMIT_SIGNAL = "SIGUSR1"  # Slurm sends it before a job's time limit
_launcher = 0  # its process id, once this process is to end with it


@dataclass(frozen=True)
class Launch:
    """A process's place in its run: `rank` of `world_size`, `local_rank` of the `local_world_size`
    on this node, and the launcher that started them."""

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    launcher: str


def detect(environment: Mapping[str, str] = os.environ) -> Launch:
    """Returns this process's launch, from the launcher's environment variables.

    torchrun and the deepspeed launcher set RANK, WORLD_SIZE and LOCAL_RANK. A task that srun
    started has SLURM_STEP_NUM_TASKS. A plain process inside an sbatch script has neither: it counts
    as one process, however many tasks the job has.

    Raises:
        UsageError: RANK without WORLD_SIZE, or numbers that are none.
    """
    env = environment
    if ("RANK" in env) != ("WORLD_SIZE" in env):
        missing = "RANK" if "WORLD_SIZE" in env else "WORLD_SIZE"
        raise UsageError(f"{missing} is not set, but the other of RANK, WORLD_SIZE is")
    try:
        if "RANK" in env:
            name = "torchrun" if "TORCHELASTIC_RUN_ID" in env else env.get(LAUNCHER, "environment")
            rank, world = int(env["RANK"]), int(env["WORLD_SIZE"])
            # The deepspeed launcher calls it LOCAL_SIZE.
            on_node = int(env.get("LOCAL_WORLD_SIZE", env.get("LOCAL_SIZE", world)))
            return Launch(rank, world, int(env.get("LOCAL_RANK", 0)), on_node, name)
        if int(env.get("SLURM_STEP_NUM_TASKS", 1)) > 1:
            world = int(env["SLURM_STEP_NUM_TASKS"])
            # Like "8(x2)" or "8,4": the first node's number of tasks.
            on_node = re.match(r"\d+", env.get("SLURM_STEP_TASKS_PER_NODE", str(world)))
            return Launch(
                int(env["SLURM_PROCID"]), world, int(env["SLURM_LOCALID"]), int(on_node[0]), "srun"
            )
    except (ValueError, KeyError) as error:
        raise UsageError(f"cannot read the launcher's environment: {error}") from error
    return Launch(0, 1, 0, 1, "none")


@cache
def hostnames(nodes: str) -> tuple[str, ...]:
    """Returns the nodes of a list as Slurm writes it, node[1-3] for example."""
    if "[" not in nodes:
        return tuple(filter(None, nodes.split(",")))
    command = ["scontrol", "show", "hostnames", nodes]
    try:
        done = subprocess.run(command, check=True, capture_output=True, text=True)
    except (OSError, subprocess.CalledProcessError) as error:
        raise UsageError(f"the nodes {nodes} are not known: {error}") from error
    return tuple(done.stdout.split())


def rendezvous_environment(launch: Launch, environment: Mapping[str, str] = os.environ) -> dict:
    """Returns RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT, as torch.distributed wants
    them.

    Under srun the master is the step's first host and the port follows from the job and step id,
    so that neither two jobs on one node meet nor two steps of a job. It is below the ports that
    Linux gives to connections (from 32768 on).
    """
    variables = {
        "RANK": str(launch.rank),
        "WORLD_SIZE": str(launch.world_size),
        "LOCAL_RANK": str(launch.local_rank),
        "MASTER_ADDR": environment.get("MASTER_ADDR", "127.0.0.1"),
        "MASTER_PORT": environment.get("MASTER_PORT", "0"),
    }
    by_srun = launch.launcher == "srun"
    if by_srun and "MASTER_ADDR" not in environment:
        variables["MASTER_ADDR"] = hostnames(environment["SLURM_STEP_NODELIST"])[0]
    if by_srun and "MASTER_PORT" not in environment:
        job, step = int(environment["SLURM_JOB_ID"]), int(environment["SLURM_STEP_ID"])
        variables["MASTER_PORT"] = str(PORTS.start + (job * STEPS_OF_A_JOB + step) % len(PORTS))
    return variables


def end_with_launcher(launch: Launch) -> None:
    """Sends this process SIGTERM when the launcher that started it is gone, after SIGKILL say.

    Otherwise the ranks would write into the folder of the next attempt. This holds for torchrun,
    the deepspeed launcher, srun and forked_ranks.py, which wait for their ranks; a shell may end
    before its background process. Linux can send the signal itself (PR_SET_PDEATHSIG), but does so
    when the *thread* of the launcher ends that started the rank.
    """
    global _launcher
    from_deepspeed = "CROSS_RANK" in os.environ

    def watch() -> None:
        while os.getppid() == _launcher:
            time.sleep(0.5)
        os.kill(os.getpid(), signal.SIGTERM)

    if from_deepspeed or launch.launcher in ("torchrun", "srun", "fork"):
        _launcher = os.getppid()
        threading.Thread(target=watch, daemon=True, name="launcher").start()


def signal_words(signal_name: str) -> str:
    """Returns a signal's name and why it came: the time limit is near, or the launcher is gone."""
    if signal_name == TIME_LIMIT_SIGNAL:
        return f"time limit: {signal_name}"
    gone = _launcher and os.getppid() != _launcher
    return f"{signal_name}: the launcher (process {_launcher}) is gone" if gone else signal_name


def tell_torchrun(line: str, after_s: float = 0.0) -> None:
    """Writes why this rank ended where torchrun finds it, and repeats it in its own report.

    torchrun reports the rank that fails first, and ends the others. Where all ranks fail for the
    same reason, all but one wait `after_s` seconds.
    """
    path = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if not path or "TORCHELASTIC_RUN_ID" not in os.environ:
        return
    time.sleep(after_s)
    with contextlib.suppress(OSError), open(path, "x") as file:  # else the line is on stderr alone
        json.dump({"message": line, "timestamp": int(time.time())}, file)
