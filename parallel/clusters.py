"""The clusters that runs are planned for: slurm/clusters.toml, read and checked. Torch-free."""

import re
from dataclasses import MISSING, dataclass, field, fields
from functools import cache
from pathlib import Path

from models.errors import UsageError
from models.files import check_keys, read_toml
from parallel.spec import RunSpec

CLUSTERS = Path(__file__).resolve().parent.parent / "slurm" / "clusters.toml"
# What may stand in an #SBATCH line: Slurm reads those lines with its own quoting rules, so nothing
# that any reader could take for a quote, a comment or the line's end goes there.
OPTION = re.compile(r"[A-Za-z0-9_.,:@+=%/&|*()\[\]-]*")
NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


@dataclass(frozen=True)
class Cluster:
    """A Slurm cluster, as the study's user may use it.

    gpus_per_node counts what a node trains on: GPUs, or ranks on a cluster without any.
    gpu_request is how Slurm is asked for GPUs: with --gres, --gpus-per-node, or not at all.
    scratch may begin with an environment variable, as in "${SCRATCH}/caches".

    Raises:
        UsageError: a value that no #SBATCH line can hold, or a size that is not positive.
    """

    name: str
    description: str
    gpus_per_node: int
    cores_per_node: int
    gpu: str = ""
    gpu_memory_gb: float | None = None
    max_nodes: int | None = None
    partition: str = ""
    account: str = ""
    qos: str = ""
    constraint: str = ""
    gpu_request: str = "gres"
    memory: str = ""
    time: str = "01:00:00"
    options: tuple[str, ...] = ()
    modules: tuple[str, ...] = ()
    environment: dict[str, str] = field(default_factory=dict)
    network: dict[str, str] = field(default_factory=dict)
    scratch: str = ""

    def __post_init__(self) -> None:
        where = f"cluster {self.name!r}"
        for name in ("gpus_per_node", "cores_per_node"):
            if getattr(self, name) < 1:
                raise UsageError(f"{where}: {name} must be positive, not {getattr(self, name)}")
        if self.gpu_request not in ("gres", "gpus-per-node", "none"):
            raise UsageError(
                f"{where}: gpu_request must be gres, gpus-per-node or none,"
                f" not {self.gpu_request!r}"
            )
        written = {n: getattr(self, n) for n in ("partition", "account", "qos", "constraint")}
        written |= {"memory": self.memory, "time": self.time}
        written |= {f"options[{i}]": option for i, option in enumerate(self.options)}
        for name, value in written.items():
            if not OPTION.fullmatch(value):
                raise UsageError(f"{where}: {name} {value!r} cannot stand in an #SBATCH line")
        check_environment(self.environment | self.network, where)

    def nodes(self, gpus: int) -> int:
        """Nodes that hold `gpus` GPUs."""
        return -(-gpus // self.gpus_per_node)

    def problems(self, spec: RunSpec, tp_across_nodes: bool = False) -> list[str]:
        """Every reason why the run cannot be placed here, with the numbers."""
        found = []
        if spec.tp > self.gpus_per_node and not tp_across_nodes:
            found.append(f"tp {spec.tp} exceeds the {self.gpus_per_node} GPUs of a node")
        if spec.gpus > self.gpus_per_node and spec.gpus % self.gpus_per_node:
            found.append(f"{spec.gpus} GPUs do not fill whole nodes of {self.gpus_per_node}")
        if self.max_nodes is not None and self.nodes(spec.gpus) > self.max_nodes:
            found.append(f"{self.nodes(spec.gpus)} nodes exceed the cluster's {self.max_nodes}")
        return found


def check_environment(environment: dict[str, str], where: str) -> None:
    """Raises: UsageError: a name that no shell can export, or a value that is no text."""
    for name, value in environment.items():
        if not NAME.fullmatch(name):
            raise UsageError(f"{where}: {name!r} is no name of an environment variable")
        if not isinstance(value, str) or "\0" in value:
            raise UsageError(f"{where}: the value of {name} must be text, not {value!r}")


@cache
def load_clusters(path: Path = CLUSTERS) -> dict[str, Cluster]:
    """Every cluster of the file, by name.

    Raises:
        UsageError: unreadable, not TOML, or a key or value that is not what it should be.
    """
    table = read_toml(path, "clusters")
    return {name: cluster_of(name, facts, str(path)) for name, facts in table.items()}


def cluster_of(name: str, facts: dict, source: str) -> Cluster:
    """A cluster from its table.

    Raises:
        UsageError: an unknown or missing key, or a value of another type.
    """
    known = {f.name: f for f in fields(Cluster)}
    if not isinstance(facts, dict):
        raise UsageError(f"{source}: {name} is no table")
    check_keys(facts, [key for key in known if key != "name"], f"{source} [{name}]")
    needed = [f for f in known.values() if f.default is MISSING and f.default_factory is MISSING]
    if missing := [f.name for f in needed if f.name not in facts and f.name != "name"]:
        raise UsageError(f"{source} [{name}]: missing {', '.join(missing)}")
    texts = {"description", "gpu", "partition", "account", "qos", "constraint", "gpu_request"}
    texts |= {"memory", "time", "scratch"}
    for key, value in facts.items():
        kind = (
            str
            if key in texts
            else list
            if key in ("options", "modules")
            else dict
            if key in ("environment", "network")
            else (int, float)
            if key == "gpu_memory_gb"
            else int
        )
        if not isinstance(value, kind) or isinstance(value, bool):
            raise UsageError(f"{source} [{name}]: {key} cannot be {value!r}")
    lists = {k: tuple(v) for k, v in facts.items() if isinstance(v, list)}
    if wrong := [v for values in lists.values() for v in values if not isinstance(v, str)]:
        raise UsageError(f"{source} [{name}]: {wrong[0]!r} is no text")
    return Cluster(name=name, **facts | lists)


def cluster(name: str, path: Path = CLUSTERS) -> Cluster:
    """Raises: UsageError: no cluster of that name."""
    clusters = load_clusters(path)
    if name not in clusters:
        raise UsageError(f"no cluster {name!r} in {path}; it has: {', '.join(clusters)}")
    return clusters[name]
