"""The clusters that runs are planned for: slurm/clusters.toml and a user's own files. Torch-free.

A user's own clusters stand in the file that the environment variable SCALING_CLUSTERS names, else
in ~/.config/gpt-scaling-study/clusters.toml. A table there replaces the shipped one of the same
name. A wrong table is an error only where its cluster is used.

`Cluster` and `Container` describe every key; docs/slurm.md names them.
"""

import os
import sys
from dataclasses import MISSING, dataclass
from functools import cache
from pathlib import Path
from typing import Any

from base.bounds import Bounds, Text, key, values_of
from base.errors import UsageError
from base.files import ROOT, read_toml
from models.gpus import find_gpu, joined, lacking, usual_gpu
from parallel.config.run_spec import RunSpec

CLUSTERS = ROOT / "slurm" / "clusters.toml"
# Slurm reads #SBATCH lines with its own quoting rules, so nothing that any reader could take for a
# quote, a comment or the line's end goes there.
_CHARACTERS = r"[A-Za-z0-9_.,:@+=%/&|*()\[\]-]*"
OPTION = Text(_CHARACTERS, "what an #SBATCH line can hold")
_SBATCH = Text(f"-{_CHARACTERS}", "an option of sbatch that an #SBATCH line can hold")
VARIABLE = Text(r"[A-Za-z_][A-Za-z0-9_]*", "the name of an environment variable")
_FLAG = Text(r"(?s)-.*", "an option")
_SHELL = Text(r"[^\n]*[^\n\s][^\n]*", "one line of shell")
_SOME = Text(r"(?s).*\S.*", "a text that is not blank")
_MOUNT = Text(r"[^:,]+(:[^:,]+)?", "FOLDER or FOLDER:WHERE")
_HOST = Text(r"[A-Za-z0-9.-]*", "a part of a host name")
_COUNT = Bounds(1, 10**6)
_LINKS = Text(r"(PCIe [1-7]\.0 x(1|2|4|8|16))?", "PCI Express, as PCIe 4.0 x16")


@dataclass(frozen=True)
class Container:
    """The container that training runs in. The whole launch enters it once on each node."""

    runtime: str = key("", "what starts it", ("apptainer", "singularity", "pyxis", "charliecloud"))
    image: str = key("", "its image, as the runtime takes it; may hold ${NAME}", _SOME)
    mounts: tuple[str, ...] = key((), "FOLDER or FOLDER:WHERE; may hold ${NAME}", _MOUNT)
    command: tuple[str, ...] = key(
        (), "in place of these: the words before the launch; may hold ${NAME}", _SOME
    )
    python: str = key("python3", "the Python inside it", _SOME)


@dataclass(frozen=True, kw_only=True)
class JobSettings:
    """What a site's table, a study's [slurm] table and the `slurm` table of its runs may each say
    of a job. `merge_tables` in resolve.py says which statement wins."""

    account: str = key("", "who pays; SBATCH_ACCOUNT overrides it", OPTION, sbatch="account")
    partition: str = key("", "where jobs run", OPTION, sbatch="partition")
    qos: str = key("", "quality of service", OPTION, sbatch="qos")
    constraint: str = key("", "features of the nodes", OPTION, sbatch="constraint")
    reservation: str = key("", "nodes kept for you", OPTION, sbatch="reservation")
    licenses: str = key("", "NAME:COUNT", OPTION, sbatch="licenses")
    mail_user: str = key("", "who gets Slurm's mail", OPTION, sbatch="mail-user")
    mail_type: str = key("", "when: END,FAIL", OPTION, sbatch="mail-type")
    gpu_type: str = key(
        "", "the site's name of the card, where nodes differ", Text(r"[\w.-]*", "a card's name")
    )
    memory: str = key("", "#SBATCH --mem", OPTION)
    time: str = key("01:00:00", "the limit, as Slurm writes it", OPTION)
    signal_lead_s: int = key(
        0, "seconds before the limit at which runs save; 0: a fifth, 10 to 120", Bounds(0, 65535)
    )
    options: tuple[str, ...] = key((), "more #SBATCH options", _SBATCH)
    srun: tuple[str, ...] = key((), "more options of srun", _FLAG)
    torchrun: tuple[str, ...] = key((), "more options of torchrun", _FLAG)
    setup: tuple[str, ...] = key((), "shell lines before Python: module, conda, source", _SHELL)
    teardown: tuple[str, ...] = key((), "shell lines after the run; $folder is its folder", _SHELL)
    environment: dict[str, str] = key({}, "environment variables", VARIABLE)
    python: str = key(".venv/bin/python", "Python of the jobs; PYTHON overrides it")
    environment_tar: str = key(
        "", "tar of the ranks' Python environment, for each node's /tmp; may hold ${NAME}"
    )
    container: Container | None = key(None, "table: training runs in it")

    def check_together(self, where: str) -> None:
        """Refuses settings that contradict each other. `where` begins the refusal."""
        if self.container and self.environment_tar:
            raise UsageError(f"{where}: environment_tar and container: give one of them")
        if inside := self.container:
            by_runtime = [name for name in ("runtime", "image") if getattr(inside, name)]
            if len(by_runtime) != (0 if inside.command else 2) or inside.command and inside.mounts:
                raise UsageError(
                    f"{where}: container: give runtime and image, or command, which has its mounts"
                )


@dataclass(frozen=True)
class Cluster(JobSettings):
    """A Slurm cluster, and how the study's user may use it."""

    name: str
    source: Path  # the file that describes it
    gpus_per_node: int = key(MISSING, "GPUs of a node; without GPUs, ranks on a node", _COUNT)
    cores_per_node: int = key(MISSING, "CPU cores of a node", _COUNT)
    description: str = key("", "one line for people")
    gpu: str = key("", "the GPU's name")
    gpu_memory_gb: float | None = key(None, "memory of one GPU", _COUNT)
    interconnect: str = key("", "a node's network, for analysis.plan: 8x NDR, 10 GbE")
    links: str = key("", "PCI Express of a node's cards without NVLink: PCIe 4.0 x16", _LINKS)
    domain: int | None = key(None, "GPUs that fast links join; default: the card's rack", _COUNT)
    max_nodes: int | None = key(None, "the most nodes that a job may have", _COUNT)
    slurm_cluster: str = key("", "Slurm's name of it, where it is not the login node's own", OPTION)
    gpu_request: str = key("gres", "how to ask for GPUs", ("gres", "gpus-per-node", "gpus", "none"))
    cpus_per_task: bool = key(True, "whether to ask for cores with #SBATCH --cpus-per-task")
    master_addr_suffix: str = key("", "added to the first node's name: its fast network", _HOST)
    scratch: str = key("", "folder for compiled extensions; may hold ${NAME}")

    def nodes(self, gpus: int) -> int:
        """Returns how many nodes hold `gpus` GPUs."""
        return -(-gpus // self.gpus_per_node)

    @property
    def hours(self) -> str:
        """Returns the unit of what a run costs."""
        return "rank-hours" if self.gpu_request == "none" else "GPU-hours"

    def problems(self, spec: RunSpec, tp_across_nodes: bool) -> list[str]:
        """Returns every reason why the run cannot be placed here, with the numbers."""
        problems = []
        most = self.domain or joined(self.gpu, self.gpus_per_node)
        if spec.layout.tp > most and not tp_across_nodes:
            linked = "GPUs of a node" if most == self.gpus_per_node else "GPUs that fast links join"
            problems.append(f"tp {spec.layout.tp} exceeds the {most} {linked}")
        if self.gpu_request == "none":
            if needing := spec.needing_a_gpu:
                problems.append(f"{needing} needs a GPU, and {self.name} gives none")
        elif lacks := lacking(spec.formats, self.gpu):
            card = find_gpu(self.gpu)
            problems.append(f"the {card.name} of {self.name} has no {' and no '.join(lacks)}")
        if spec.gpus > self.gpus_per_node and spec.gpus % self.gpus_per_node:
            problems.append(f"{spec.gpus} GPUs do not fill whole nodes of {self.gpus_per_node}")
        if self.max_nodes is not None and self.nodes(spec.gpus) > self.max_nodes:
            problems.append(f"{self.nodes(spec.gpus)} nodes exceed the cluster's {self.max_nodes}")
        return problems


def files() -> tuple[Path, ...]:
    """Returns the files of clusters: the shipped one, then a user's, which replaces its tables."""
    usual = Path.home() / ".config" / "gpt-scaling-study" / "clusters.toml"
    users_file = os.environ.get("SCALING_CLUSTERS", str(usual) if usual.exists() else "")
    return (CLUSTERS, Path(users_file).expanduser()) if users_file else (CLUSTERS,)


@cache
def _tables(paths: tuple[Path, ...]) -> dict[str, list[tuple[Path, Any]]]:
    """Returns the (file, table) pairs of each cluster's name, the one that counts last."""
    tables: dict[str, list[tuple[Path, Any]]] = {}
    for path in paths:
        for name, facts in read_toml(path, "clusters").items():
            tables.setdefault(name, []).append((path, facts))
    return tables


def load_clusters() -> dict[str, Cluster]:
    """Returns every cluster, by name. One with a wrong table is left out, and a line on stderr says
    so.

    Raises:
        UsageError: a file is unreadable or not TOML.
    """
    clusters = {}
    for name in _tables(files()):
        try:
            clusters[name] = cluster(name)
        except UsageError as error:
            print(f"cluster {name} is left out: {error}", file=sys.stderr)
    return clusters


def cluster(name: str) -> Cluster:
    """Returns the cluster of that name."""
    paths = files()
    tables = _tables(paths)
    if name not in tables:
        searched = " or ".join(map(str, paths))
        raise UsageError(f"no cluster {name!r} in {searched}; there are: {', '.join(tables)}")
    path, facts = tables[name][-1]
    return cluster_of(name, facts, path)


def is_named(name: str) -> bool:
    """Returns whether a file has a table of that name, right or wrong."""
    return name in _tables(files())


def replaced(name: str) -> str:
    """Returns one line where a user's file replaces another file's cluster, else ""."""
    *earlier, (path, _) = _tables(files())[name]
    return f"cluster {name} of {path} replaces the one of {earlier[-1][0]}" if earlier else ""


def cluster_of(name: str, facts: Any, source: Path | str) -> Cluster:
    """Returns a cluster from its table."""
    where = f"{source} [{name}]"
    if isinstance(facts, dict) and "after" in facts:
        raise UsageError(f"{where}: after: shell lines after a run are called teardown now")
    cluster = Cluster(name, Path(source), **values_of(Cluster, facts, where))
    cluster.check_together(where)
    card, memory_gb = usual_gpu(cluster.gpu), cluster.gpu_memory_gb
    if card and memory_gb and memory_gb > 2 * card.memory_gb:
        raise UsageError(
            f"{where}: gpu_memory_gb {memory_gb:g} is no memory of one GPU: a"
            f" {card.name} has {card.memory_gb:g} GB"
        )
    return cluster
