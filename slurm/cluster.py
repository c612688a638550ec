"""A real Slurm on this machine, to try a sweep before spending an allocation.

    python -m slurm.cluster up [--nodes 4]      then: export SLURM_CONF=... as it says
    python -m slurm.cluster up --accounting     with slurmdbd and MariaDB behind it, for sacct
    python -m slurm.cluster down
    python -m slurm.cluster stop-node node3     a node that dies, to see what happens

One slurmctld, one munged and a slurmd for each node, all in one folder (--folder, default
~/.cache/scaling-study-slurm); nothing outside it is written. The nodes are node1, node2 ... with 2
cores and the machine's whole memory each, whatever it has. Needs root: only root may start jobs as
other users. The commands of this package find this cluster by themselves; for sbatch and squeue set
SLURM_CONF.
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

from models.bounds import check_flags
from models.errors import Parser, UsageError, command_line

HOME = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "scaling-study-slurm"
TOOLS = {"slurmctld": "slurm-wlm", "slurmd": "slurm-wlm", "sbatch": "slurm-wlm"}
TOOLS |= {"munged": "munge", "scontrol": "slurm-wlm"}
ACCOUNTING = {"slurmdbd": "slurmdbd", "mariadbd": "mariadb-server"}
CGROUP_MEMORY = Path("/sys/fs/cgroup/memory")

CONF = """\
ClusterName=local-test
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={port}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
# A requeued job waits as long as a credential lives: not the usual two minutes.
AuthInfo=socket={folder}/munge.socket,cred_expire=20
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
# The controller itself remembers jobs for a week: there need be no accounting database.
MinJobAge=604800
AccountingStorageType=accounting_storage/{storage}
MaxJobCount=20000
# Two clusters on one machine share the cgroups' names, which are those of nodes and jobs.
FirstJobId={first_job}
SchedulerParameters=sched_interval=2,bf_interval=5
NodeName=node[1-{nodes}] NodeHostname={host} NodeAddr=127.0.0.1 Port={first}-{last} \
CPUs=2 RealMemory={memory} State=UNKNOWN
PartitionName=test Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""


DBD_CONF = """\
DbdHost={host}
DbdAddr=127.0.0.1
DbdPort={dbd_port}
SlurmUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
PidFile={folder}/slurmdbd.pid
LogFile={folder}/slurmdbd.log
StorageType=accounting_storage/mysql
StorageHost=127.0.0.1
StoragePort={sql_port}
StorageUser=slurm
StoragePass={password}
StorageLoc=slurm
"""


def missing_packages(accounting: bool = False) -> list[str]:
    """Debian packages without which there is no local cluster, or none with accounting."""
    tools = TOOLS | ACCOUNTING if accounting else TOOLS
    return sorted({package for tool, package in tools.items() if shutil.which(tool) is None})


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


def up(nodes: int, folder: Path = HOME, accounting: bool = False) -> Path:
    """Start the cluster and wait until its nodes are idle; the path of its slurm.conf.

    With `accounting`, slurmdbd and a MariaDB of its own keep what sacct asks for.

    Raises:
        UsageError: something is not installed, is up already, or does not start.
    """
    if missing := missing_packages(accounting):
        raise UsageError(
            f"Slurm is not here: apt-get update && apt-get install {' '.join(missing)}"
        )
    if os.geteuid() != 0:
        raise UsageError("the test cluster needs root: slurmd starts jobs as their users")
    if alive(folder):
        raise UsageError(f"a cluster is up in {folder}: python -m slurm.cluster down")
    if nodes < 1:
        raise UsageError(f"--nodes must be positive, not {nodes}")
    conf = folder / "slurm.conf"
    ours = conf.is_file() and "ClusterName=local-test" in conf.read_text(errors="replace")
    if folder.exists() and any(folder.iterdir()) and not ours:  # /etc/slurm, say
        raise UsageError(f"{folder} holds something else than a test cluster: give another")
    shutil.rmtree(folder, ignore_errors=True)
    for part in ("state", "spool"):
        (folder / part).mkdir(parents=True)
    key = folder / "munge.key"
    key.write_bytes(secrets.token_bytes(128))
    key.chmod(0o400)
    port = free_port(17817, nodes + 3)
    host = socket.gethostname().split(".")[0]
    cgroups = CGROUP_MEMORY.is_dir() and os.access(CGROUP_MEMORY, os.W_OK)
    conf.write_text(
        CONF.format(
            host=host,
            folder=folder,
            nodes=nodes,
            port=port,
            memory=os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2**20,
            first=port + 1,
            last=port + nodes,
            track="cgroup" if cgroups else "linuxproc",
            task="cgroup" if cgroups else "none",
            first_job=1000 * (100 + secrets.randbelow(900)) + 1,
            storage="slurmdbd\nAccountingStorageHost=127.0.0.1\nAccountingStoreFlags=job_comment"
            f"\nAccountingStoragePass={folder}/munge.socket"
            f"\nAccountingStoragePort={port + nodes + 1}"
            if accounting
            else "none",
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
    daemons = [["slurmctld", "-c"]]
    daemons += [["slurmd", "-N", f"node{number}"] for number in range(1, nodes + 1)]
    try:
        start([*munged, f"--seed-file={folder}/munge.seed"], conf)
        if accounting:
            start_accounting(folder, conf, host, port + nodes + 1)
        for daemon in daemons:
            start(daemon, conf)
    except UsageError:
        down(folder)
        raise
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
        raise UsageError(f"{command[0]} did not start; see {conf.parent}/*.log")


def start_accounting(folder: Path, conf: Path, host: str, port: int) -> None:
    """slurmdbd on `port` and, on the next one, a MariaDB of its own."""
    password = secrets.token_hex(16)
    said = {"host": host, "folder": folder, "dbd_port": port, "sql_port": port + 1}
    dbd_conf = folder / "slurmdbd.conf"
    dbd_conf.touch(0o600)
    dbd_conf.write_text(DBD_CONF.format(**said, password=password))
    sql = folder / "init.sql"
    sql.touch(0o600)
    sql.write_text(
        f"CREATE USER slurm@'127.0.0.1' IDENTIFIED BY '{password}';\n"
        "GRANT ALL ON slurm.* TO slurm@'127.0.0.1';\n"
    )
    data = ["--no-defaults", f"--datadir={folder}/mariadb", "--user=root"]
    start(["mariadb-install-db", *data, "--skip-test-db"], conf)
    mariadbd = ["mariadbd", *data, f"--port={port + 1}", "--bind-address=127.0.0.1"]
    mariadbd += [f"--socket={folder}/mariadb.socket", f"--pid-file={folder}/mariadbd.pid"]
    mariadbd += [f"--init-file={sql}", f"--log-error={folder}/mariadbd.log"]
    start(["setsid", "--fork", *mariadbd], conf)  # it alone does not go to the background by itself
    await_port(port + 1, "mariadbd", folder)
    start(["slurmdbd"], conf)
    await_port(port, "slurmdbd", folder)


def await_port(port: int, daemon: str, folder: Path) -> None:
    """Wait until a daemon listens; raises UsageError after a minute."""
    for _ in range(300):
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)) == 0:
                return
        time.sleep(0.2)
    raise UsageError(f"{daemon} does not listen; see {folder}/*.log")


def pid_of(path: Path) -> int | None:
    """The process in a pid file, if it lives and is the daemon that the file names."""
    try:
        pid = int(path.read_text())
    except (OSError, ValueError):
        return None
    name = name_of(pid)
    lives = name and parent_of(pid) is not None
    return pid if lives and path.stem.split("-")[0].startswith(name) else None


def alive(folder: Path = HOME) -> bool:
    """Whether the folder's controller runs."""
    return pid_of(folder / "slurmctld.pid") is not None


def stop_node(name: str, folder: Path = HOME) -> None:
    """Take a node away, as when it loses power: its slurmd is killed, and what that started is
    frozen, so that its peers hear no farewell.

    Raises:
        UsageError: no such node is up.
    """
    pid = pid_of(folder / f"slurmd-{name}.pid")
    if pid is None:
        raise UsageError(f"no slurmd of {name} runs in {folder}")
    os.kill(pid, signal.SIGKILL)
    for lost in tasks_of(name, folder):
        with contextlib.suppress(ProcessLookupError):
            os.kill(lost, signal.SIGSTOP)


def start_node(name: str, folder: Path = HOME) -> None:
    """Bring back a node that was stopped; what it had frozen is gone."""
    if not alive(folder):
        raise UsageError(f"no cluster is up in {folder}")
    if pid_of(folder / f"slurmd-{name}.pid") is not None:
        raise UsageError(f"{name} is up")
    for lost in tasks_of(name, folder):
        with contextlib.suppress(ProcessLookupError):
            os.kill(lost, signal.SIGKILL)
    start(["slurmd", "-N", name], folder / "slurm.conf")


def tasks_of(node: str, folder: Path) -> list[int]:
    """What runs on a node: the step daemons first, then the tasks."""
    said = f"SLURMD_NODENAME={node}".encode()
    tasks = [pid for pid, about in of_cluster(folder / "slurm.conf").items() if said in about]
    parents = {parent_of(task) for task in tasks}
    return [p for p in parents if p is not None and name_of(p) == "slurmstepd"] + tasks


def of_cluster(conf: Path) -> dict[int, list[bytes]]:
    """Every process whose environment names this slurm.conf, and that environment."""
    found = {}
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            variables = (process / "environ").read_bytes().split(b"\0")
            if b"SLURM_CONF=" + os.fsencode(conf) in variables and int(process.name) != os.getpid():
                found[int(process.name)] = variables
    return found


def name_of(pid: int) -> str:
    """The process's name; empty where it is gone."""
    try:
        return Path(f"/proc/{pid}/comm").read_text().strip()
    except OSError:
        return ""


def parent_of(pid: int) -> int | None:
    """The process's parent; None where it is gone, or dead and not yet waited for."""
    try:
        state, parent = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[:2]
    except OSError:
        return None
    return None if state == "Z" else int(parent)


def strays(conf: Path) -> list[int]:
    """What jobs left running: step daemons and processes of jobs."""
    return [
        pid
        for pid, variables in of_cluster(conf).items()
        if name_of(pid) == "slurmstepd" or any(v.startswith(b"SLURM_JOB_ID=") for v in variables)
    ]


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
    conf = folder / "slurm.conf"
    for pid in strays(conf):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    end([pid for path in folder.glob("*.pid") if path.stem != "mariadbd" and (pid := pid_of(path))])
    # Last, for slurmdbd writes to it; and without its pid file, which it writes late.
    end([pid for pid in of_cluster(conf) if name_of(pid) == "mariadbd"])


def end(pids: list[int]) -> None:
    """Ask processes to end, and after ten seconds make them."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)
        for _ in range(100):
            pids = [pid for pid in pids if parent_of(pid) is not None]
            if not pids:
                return
            time.sleep(0.1)


@command_line("slurm.cluster")
def main(argv: list[str] | None = None) -> int:
    parser = Parser(
        prog="python -m slurm.cluster",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("do", choices=("up", "down", "stop-node", "start-node"))
    parser.add_argument("node", nargs="?", help="for stop-node and start-node")
    parser.add_argument("--nodes", type=int, default=4)
    parser.add_argument("--accounting", action="store_true", help="with slurmdbd and MariaDB")
    parser.add_argument("--folder", type=Path, default=HOME, metavar="DIR")
    arguments = parser.parse_args(argv)
    check_flags(arguments, nodes=(1, 64))
    folder = arguments.folder.absolute()
    if arguments.do == "up":
        conf = up(arguments.nodes, folder, arguments.accounting)
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
    return 0


if __name__ == "__main__":
    sys.exit(main())
