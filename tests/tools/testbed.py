"""A real Slurm on this machine, to try a sweep before spending an allocation.

    python -m tests.tools.testbed up [--nodes 4]      then: export SLURM_CONF=... as it says
    python -m tests.tools.testbed down

It starts slurmctld, munged and one slurmd for each node; with --accounting also slurmdbd and its
database, for sacct. All of it lives in one folder (--folder,
default ~/.cache/scaling-study-slurm); nothing else is written. The nodes are node1, node2 ..., each
with 2 cores and the whole memory of this machine. Needs root: only root may start jobs as other
users. Slurm's commands and those of this package find the cluster by SLURM_CONF.
"""

import contextlib
import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil

from base.bounds import check_flags
from base.errors import Parser, UsageError, command_line

HOME = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "scaling-study-slurm"
TOOLS = {"slurmctld": "slurm-wlm", "slurmd": "slurm-wlm", "sbatch": "slurm-wlm"}
TOOLS |= {"munged": "munge", "scontrol": "slurm-wlm"}
# What sacct asks: slurmdbd, and the MariaDB that it keeps its tables in.
ACCOUNTING_TOOLS = {"slurmdbd": "slurmdbd", "mariadbd": "mariadb-server"}
ACCOUNTING_TOOLS |= {"mariadb-install-db": "mariadb-server"}
CGROUP_MEMORY = Path("/sys/fs/cgroup/memory")

CONF = Path(__file__).with_name("testbed.slurm.conf").read_text()
ACCOUNTING_CONF = """DbdHost={host}
DbdAddr=127.0.0.1
DbdPort={port}
SlurmUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
StorageType=accounting_storage/mysql
StorageHost=localhost
StorageUser=root
StorageLoc=accounts
PidFile={folder}/slurmdbd.pid
LogFile={folder}/slurmdbd.log
"""


def missing_packages(accounting: bool = False) -> list[str]:
    """Debian packages without which there is no local cluster, or none with accounting."""
    tools = TOOLS | ACCOUNTING_TOOLS if accounting else TOOLS
    return sorted({package for tool, package in tools.items() if shutil.which(tool) is None})


def listens(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


def free_port(first: int, count: int) -> int:
    """The first of `count` ports in a row that nobody listens on."""
    while taken := [port for port in range(first, first + count) if listens(port)]:
        first = taken[-1] + 1
    return first


def wait_for(condition: Callable[[], Any], seconds: float, what: str, every: float = 0.1) -> Any:
    """Call `condition` until its value is true and return the value.

    Raises:
        UsageError: it is not true after so many seconds.
    """
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if value := condition():
            return value
        time.sleep(every)
    raise UsageError(f"waited {seconds} s for {what}")


def up(nodes: int, folder: Path = HOME, accounting: bool = False) -> Path:
    """Start the cluster and wait until its nodes are idle; the path of its slurm.conf.

    Raises:
        UsageError: something is not installed, is up already, or does not start.
    """
    _check_can_start(folder, accounting)
    shutil.rmtree(folder, ignore_errors=True)
    for part in ("state", "spool"):
        (folder / part).mkdir(parents=True)
    key = folder / "munge.key"
    key.write_bytes(secrets.token_bytes(128))
    key.chmod(0o400)
    port = free_port(17817, nodes + 3)
    host = socket.gethostname().split(".")[0]
    dbd_port = port + nodes + 1 if accounting else None
    conf = _write_configuration(nodes, folder, host, port, dbd_port)
    munged = ["munged", "--force", f"--socket={folder}/munge.socket", f"--key-file={key}"]
    munged += [f"--log-file={folder}/munged.log", f"--pid-file={folder}/munged.pid"]
    try:
        start([*munged, f"--seed-file={folder}/munge.seed"], conf)
        if dbd_port:
            _start_accounting(folder, host, dbd_port)
        start(["slurmctld", "-c"], conf)
        for number in range(1, nodes + 1):
            start(["slurmd", "-N", f"node{number}"], conf)
        idle, ready = ["sinfo", "--noheader", "--Node", "--format=%T"], ["idle"] * nodes
        what = f"the nodes to become idle; see {folder}/*.log"
        wait_for(lambda: asked(idle, conf).split() == ready, 20, what)
    except UsageError:
        down(folder)
        raise
    return conf


def _start_accounting(folder: Path, host: str, port: int) -> None:
    """Start MariaDB, on a socket alone, and slurmdbd; wait until it listens.

    Raises:
        UsageError: one of them does not start.
    """
    conf, database, place = folder / "slurmdbd.conf", folder / "mysql.socket", folder / "database"
    conf.write_text(ACCOUNTING_CONF.format(host=host, folder=folder, port=port))
    conf.chmod(0o600)
    alone = ["--no-defaults", f"--datadir={place}", "--user=root"]
    without_password = ["--skip-test-db", "--auth-root-authentication-method=normal"]
    start(["mariadb-install-db", *alone, *without_password], folder / "slurm.conf")
    files = [f"--socket={database}", f"--pid-file={folder}/mariadbd.pid"]
    files += [f"--log-error={folder}/mariadbd.log", "--skip-networking"]
    start(["setsid", "--fork", "mariadbd", *alone, *files], folder / "slurm.conf")
    wait_for(database.is_socket, 20, f"MariaDB; see {folder}/mariadbd.log")
    start(["slurmdbd"], folder / "slurm.conf", MYSQL_UNIX_PORT=str(database))
    wait_for(lambda: listens(port), 20, f"slurmdbd; see {folder}/slurmdbd.log")


def _check_can_start(folder: Path, accounting: bool) -> None:
    """Raises: UsageError: something is not installed, is up already, or stands in the way."""
    if missing := missing_packages(accounting):
        raise UsageError(
            f"Slurm is not here: apt-get update && apt-get install {' '.join(missing)}"
        )
    if os.geteuid() != 0:
        raise UsageError("the test cluster needs root: slurmd starts jobs as their users")
    if alive(folder):
        raise UsageError(f"a cluster is up in {folder}: python -m tests.tools.testbed down")
    conf = folder / "slurm.conf"
    ours = conf.is_file() and "ClusterName=local-test" in conf.read_text(errors="replace")
    if folder.exists() and any(folder.iterdir()) and not ours:  # /etc/slurm, say
        raise UsageError(f"{folder} holds something else than a test cluster: give another")
    if len(str(folder)) > 66:  # a socket's path holds 107 characters
        raise UsageError(f"{folder}: slurmd makes sockets below it, whose paths would be too long")


def _write_configuration(
    nodes: int, folder: Path, host: str, port: int, dbd_port: int | None
) -> Path:
    """Write the configuration; the path of slurm.conf. dbd_port: slurmdbd's, if any."""
    storage = "AccountingStorageType=accounting_storage/none\n"
    if dbd_port:
        storage = storage.replace("none", "slurmdbd") + (
            f"AccountingStorageHost=127.0.0.1\nAccountingStoragePort={dbd_port}\n"
            f"AccountingStoragePass={folder}/munge.socket\n"
            "AccountingStoreFlags=job_comment\n"
        )
    cgroups = CGROUP_MEMORY.is_dir() and os.access(CGROUP_MEMORY, os.W_OK)
    conf = folder / "slurm.conf"
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
            storage=storage,
            over="" if cgroups else "JobAcctGatherParams=OverMemoryKill\n",
        )
    )
    cards = [f"Name=gpu Type=a100 File=/dev/{device}\n" for device in ("null", "zero")]
    (folder / "gres.conf").write_text("".join(["AutoDetect=off\n", *cards]))
    limits = "CgroupMountpoint=/sys/fs/cgroup\nConstrainRAMSpace=yes\n" if cgroups else ""
    (folder / "cgroup.conf").write_text(f"CgroupPlugin=cgroup/v1\n{limits}")
    return conf


def asked(command: list[str], conf: Path) -> str:
    """What a command of Slurm prints about this cluster."""
    environment = os.environ | {"SLURM_CONF": str(conf)}
    return subprocess.run(command, env=environment, capture_output=True, text=True).stdout


def start(command: list[str], conf: Path, **variables: str) -> None:
    """Start a daemon, which goes to the background by itself."""
    environment = os.environ | {"SLURM_CONF": str(conf)} | variables
    with (conf.parent / "start.log").open("ab") as log:
        quiet = {"stdin": subprocess.DEVNULL, "stdout": log, "stderr": log}
        status = subprocess.run(command, env=environment, **quiet).returncode
    if status:
        raise UsageError(f"{command[0]} did not start; see {conf.parent}/*.log")


def is_alive(process: psutil.Process) -> bool:
    """Whether it runs; a dead process that its parent has not waited for does not."""
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def daemon(path: Path) -> psutil.Process | None:
    """The process in a pid file, if it lives and is the daemon that the file names."""
    with contextlib.suppress(OSError, ValueError, psutil.Error):
        process = psutil.Process(int(path.read_text()))
        if is_alive(process) and path.stem.split("-")[0] == process.name():
            return process
    return None


def alive(folder: Path = HOME) -> bool:
    """Whether the folder's controller runs."""
    return daemon(folder / "slurmctld.pid") is not None


def stop_node(name: str, folder: Path) -> None:
    """Take a node away, as when it loses power: its slurmd is killed, and the processes that it
    started are stopped, so that no connection to them is closed."""
    daemon(folder / f"slurmd-{name}.pid").kill()
    send(signal.SIGSTOP, tasks_of(name, folder))


def start_node(name: str, folder: Path) -> None:
    """Start a stopped node again; the processes that were stopped with it are killed."""
    send(signal.SIGKILL, tasks_of(name, folder))
    start(["slurmd", "-N", name], folder / "slurm.conf")


def tasks_of(node: str, folder: Path) -> list[psutil.Process]:
    """The processes of a node's jobs: the step daemons first, then the tasks."""
    ours = of_cluster(folder)
    tasks = [task for task in ours if task.info["environ"].get("SLURMD_NODENAME") == node]
    parents = {task.info["ppid"] for task in tasks}
    steps = psutil.process_iter(["name"])
    return [p for p in steps if p.pid in parents and p.info["name"] == "slurmstepd"] + tasks


def of_cluster(folder: Path) -> list[psutil.Process]:
    """Every process whose environment names this cluster's slurm.conf, but for this one."""
    conf = str(folder / "slurm.conf")
    return [
        process
        for process in psutil.process_iter(["name", "ppid", "environ"])
        if (process.info["environ"] or {}).get("SLURM_CONF") == conf and process.pid != os.getpid()
    ]


def send(number: int, processes: list[psutil.Process]) -> None:
    """Send a signal to those that are still there."""
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.send_signal(number)


def down(folder: Path = HOME) -> None:
    """Cancel every job and stop the daemons of this folder, and nothing else."""
    conf = folder / "slurm.conf"
    if alive(folder):
        asked(["scancel", "--partition=test"], conf)
        running = ["squeue", "--noheader", "--states=running,completing"]
        with contextlib.suppress(UsageError):  # what is left is killed
            wait_for(lambda: not asked(running, conf), 10, "the jobs to end")
    left = [p for p in of_cluster(folder) if p.info["name"] == "slurmstepd"]
    left += [p for p in of_cluster(folder) if "SLURM_JOB_ID" in p.info["environ"]]
    send(signal.SIGKILL, left)
    database = folder / "mariadbd.pid"  # slurmdbd writes into it until its end
    paths = [path for path in folder.glob("*.pid") if path != database]
    end([process for path in paths if (process := daemon(path))])
    end([process for path in [database] if (process := daemon(path))])


def end(processes: list[psutil.Process]) -> None:
    """Ask processes to end, and after ten seconds make them."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        send(number, processes)
        with contextlib.suppress(UsageError):
            wait_for(lambda: not any(map(is_alive, processes)), 10, "their end")
            return


@command_line("tests.tools.testbed")
def main(argv: list[str] | None = None) -> int:
    parser = Parser(prog="python -m tests.tools.testbed", description=__doc__)
    parser.add_argument("do", choices=("up", "down"), help="what to do")
    parser.add_argument("--nodes", type=int, default=4, metavar="N", help="nodes (default: 4)")
    parser.add_argument("--accounting", action="store_true", help="sacct works, too")
    what = f"where everything of it is (default: {HOME})"
    parser.add_argument("--folder", type=Path, default=HOME, metavar="DIR", help=what)
    arguments = parser.parse_args(argv)
    check_flags(arguments, nodes=(1, 64))
    folder = arguments.folder.absolute()
    if arguments.do == "up":
        conf = up(arguments.nodes, folder, arguments.accounting)
        print(f"{arguments.nodes} nodes are up. Slurm's commands and slurm.submit find them after:")
        print(f"  export SLURM_CONF={conf}")
    else:
        was = alive(folder)
        down(folder)
        print("down" if was else f"no cluster was up in {folder}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
