"""A real Slurm on this machine, to try a sweep before spending an allocation.

    python -m slurm.cluster up [--nodes 4]      then: export SLURM_CONF=... as it says
    python -m slurm.cluster down
    python -m slurm.cluster stop-node node3     a node that dies, to see what happens

One slurmctld, one munged and a slurmd for each node, all in one folder (--folder, default
~/.cache/scaling-study-slurm); nothing outside it is written. The nodes are node1, node2 ... with 2
cores each, whatever the machine has. Needs root: only root may start jobs as other users. The
commands of this package find this cluster by themselves; for sbatch and squeue set SLURM_CONF.
"""

import argparse
import contextlib
import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

from models.errors import UsageError

HOME = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "scaling-study-slurm"
TOOLS = {"slurmctld": "slurm-wlm", "slurmd": "slurm-wlm", "sbatch": "slurm-wlm"}
TOOLS |= {"munged": "munge", "scontrol": "slurm-wlm"}
CGROUP_MEMORY = Path("/sys/fs/cgroup/memory")

CONF = """\
ClusterName=local-test
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={port}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
CredType=cred/munge
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool/%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
ProctrackType=proctrack/{track}
TaskPlugin=task/{task}
JobAcctGatherType=jobacct_gather/linux
JobAcctGatherFrequency=task=1
{over}SelectType=select/cons_tres
SelectTypeParameters=CR_Core_Memory
SlurmdParameters=config_overrides
# A node that is silent for this long is down, and its jobs have failed with it.
SlurmdTimeout=10
KillWait=5
MpiDefault=none
SwitchType=switch/none
ReturnToService=2
# No accounting database: the controller itself remembers jobs, for a week.
MinJobAge=604800
MaxJobCount=20000
SchedulerParameters=sched_interval=2,bf_interval=5
NodeName=node[1-{nodes}] NodeHostname={host} NodeAddr=127.0.0.1 Port={first}-{last} \
CPUs=2 RealMemory=4000 State=UNKNOWN
PartitionName=test Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""


def missing_packages() -> list[str]:
    """Debian packages without which there is no local cluster."""
    return sorted({package for tool, package in TOOLS.items() if shutil.which(tool) is None})


def free_port(first: int, count: int) -> int:
    """The first of `count` ports in a row that nobody listens on."""
    while True:
        taken = []
        for port in range(first, first + count):
            with socket.socket() as probe:
                if probe.connect_ex(("127.0.0.1", port)) == 0:
                    taken.append(port)
        if not taken:
            return first
        first = taken[-1] + 1


def up(nodes: int, folder: Path = HOME) -> Path:
    """Start the cluster and wait until its nodes are idle; the path of its slurm.conf.

    Raises:
        UsageError: something is not installed, is up already, or does not start.
    """
    if missing := missing_packages():
        raise UsageError(
            f"Slurm is not here: apt-get update && apt-get install {' '.join(missing)}"
        )
    if os.geteuid() != 0:
        raise UsageError("the test cluster needs root: slurmd starts jobs as their users")
    if alive(folder):
        raise UsageError(f"a cluster is up in {folder}: python -m slurm.cluster down")
    if nodes < 1:
        raise UsageError(f"--nodes must be positive, not {nodes}")
    shutil.rmtree(folder, ignore_errors=True)
    for part in ("state", "spool"):
        (folder / part).mkdir(parents=True)
    key = folder / "munge.key"
    key.write_bytes(secrets.token_bytes(128))
    key.chmod(0o400)
    port = free_port(17817, nodes + 1)
    cgroups = CGROUP_MEMORY.is_dir() and os.access(CGROUP_MEMORY, os.W_OK)
    conf = folder / "slurm.conf"
    conf.write_text(
        CONF.format(
            host=socket.gethostname().split(".")[0],
            folder=folder,
            nodes=nodes,
            port=port,
            first=port + 1,
            last=port + nodes,
            track="cgroup" if cgroups else "linuxproc",
            task="cgroup" if cgroups else "none",
            over="" if cgroups else "JobAcctGatherParams=OverMemoryKill\n",
        )
    )
    (folder / "cgroup.conf").write_text(
        "CgroupPlugin=cgroup/v1\nCgroupMountpoint=/sys/fs/cgroup\nConstrainRAMSpace=yes\n"
        if cgroups
        else "CgroupPlugin=cgroup/v1\n"
    )
    munged = ["munged", "--force", f"--socket={folder}/munge.socket", f"--key-file={key}"]
    munged += [f"--log-file={folder}/munged.log", f"--pid-file={folder}/munged.pid"]
    start([*munged, f"--seed-file={folder}/munge.seed"], conf)
    start(["slurmctld", "-c"], conf)
    for number in range(1, nodes + 1):
        start(["slurmd", "-N", f"node{number}"], conf)
    for _ in range(100):
        asked = ["sinfo", "--noheader", "--Node", "--format=%T"]
        done = subprocess.run(
            asked, env=os.environ | {"SLURM_CONF": str(conf)}, capture_output=True, text=True
        )
        if done.stdout.split() == ["idle"] * nodes:
            return conf
        time.sleep(0.2)
    down(folder)
    raise UsageError(f"the nodes did not become idle; see {folder}/*.log")


def start(command: list[str], conf: Path) -> None:
    """Start a daemon, which goes to the background by itself."""
    with (conf.parent / "start.log").open("ab") as said:
        done = subprocess.run(
            command,
            env=os.environ | {"SLURM_CONF": str(conf)},
            stdin=subprocess.DEVNULL,
            stdout=said,
            stderr=said,
        )
    if done.returncode:
        down(conf.parent)
        raise UsageError(f"{command[0]} did not start; see {conf.parent}/*.log")


def pid_of(path: Path) -> int | None:
    """The process in a pid file, if it lives and is the daemon that the file names."""
    try:
        pid = int(path.read_text())
        name = Path(f"/proc/{pid}/comm").read_text().strip()
    except (OSError, ValueError):
        return None
    return pid if path.stem.split("-")[0].startswith(name) else None


def alive(folder: Path = HOME) -> bool:
    """Whether the folder's controller runs."""
    return pid_of(folder / "slurmctld.pid") is not None


def stop_node(name: str, folder: Path = HOME) -> None:
    """Kill one slurmd, as when a node dies; what it started keeps running, unseen by Slurm.

    Raises:
        UsageError: no such node is up.
    """
    pid = pid_of(folder / f"slurmd-{name}.pid")
    if pid is None:
        raise UsageError(f"no slurmd of {name} runs in {folder}")
    os.kill(pid, signal.SIGKILL)


def start_node(name: str, folder: Path = HOME) -> None:
    """Bring back a node that was stopped."""
    start(["slurmd", "-N", name], folder / "slurm.conf")


def strays(conf: Path) -> list[int]:
    """What the slurmd of a stopped node left running: step daemons and processes of jobs."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            variables = (process / "environ").read_bytes().split(b"\0")
            name = (process / "comm").read_text().strip()
        except OSError:
            continue
        in_job = any(variable.startswith(b"SLURM_JOB_ID=") for variable in variables)
        if f"SLURM_CONF={conf}".encode() in variables and (in_job or name == "slurmstepd"):
            found.append(int(process.name))
    return [pid for pid in found if pid != os.getpid()]


def down(folder: Path = HOME) -> None:
    """Cancel every job and stop the daemons of this folder, and nothing else."""
    if alive(folder):
        environment = os.environ | {"SLURM_CONF": str(folder / "slurm.conf")}
        subprocess.run(["scancel", "--partition=test"], env=environment, capture_output=True)
        asked = ["squeue", "--noheader", "--states=running,completing"]
        for _ in range(50):
            if not subprocess.run(asked, env=environment, capture_output=True).stdout:
                break
            time.sleep(0.2)
    pids = [pid_of(path) for path in sorted(folder.glob("*.pid"), reverse=True)]
    pids = [pid for pid in pids if pid is not None]
    for pid in [*pids, *strays(folder / "slurm.conf")]:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGTERM if pid in pids else signal.SIGKILL)
    for _ in range(50):
        if not any(Path(f"/proc/{pid}").exists() for pid in pids):
            break
        time.sleep(0.2)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m slurm.cluster",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("do", choices=("up", "down", "stop-node", "start-node"))
    parser.add_argument("node", nargs="?", help="for stop-node and start-node")
    parser.add_argument("--nodes", type=int, default=4)
    parser.add_argument("--folder", type=Path, default=HOME, metavar="DIR")
    arguments = parser.parse_args(argv)
    folder = arguments.folder.absolute()
    try:
        if arguments.do == "up":
            conf = up(arguments.nodes, folder)
            print(f"{arguments.nodes} nodes are up. For sbatch, squeue and the like:")
            print(f"  export SLURM_CONF={conf}")
        elif arguments.do == "down":
            was = alive(folder)
            down(folder)
            print("down" if was else f"no cluster was up in {folder}")
        elif arguments.node is None:
            raise UsageError(f"{arguments.do} which node?")
        else:
            (stop_node if arguments.do == "stop-node" else start_node)(arguments.node, folder)
    except UsageError as error:
        print(f"slurm.cluster: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
