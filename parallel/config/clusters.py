"""The clusters that runs are planned for: slurm/clusters.toml and a user's own files. Torch-free.

A user's own clusters stand in the files that the environment variable SCALING_CLUSTERS names
(several are separated by colons), else in gpt-scaling-study/clusters.toml in the user's
configuration folder (XDG_CONFIG_HOME, else ~/.config). A table there replaces the shipped one of
the same name. A wrong table is an error only where its cluster is used.

`Cluster` and `Container` describe every key once; docs/slurm.md repeats their help texts.
"""

import os
import re
import sys
from dataclasses import MISSING, dataclass, field, fields
from functools import cache
from pathlib import Path
from typing import Any

from base.errors import UsageError
from base.files import ROOT, check_keys, read_toml
from models.gpus import find_gpu, joined, lacking, usual_gpu
from parallel.config.settings import RunSpec

CLUSTERS = ROOT / "slurm" / "clusters.toml"
RUNTIMES = ("apptainer", "pyxis", "charliecloud")
GPU_REQUESTS = ("gres", "gpus-per-node", "none")
# What may stand in an #SBATCH line: Slurm reads those lines with its own quoting rules, so nothing
# that any reader could take for a quote, a comment or the line's end goes there.
OPTION = re.compile(r"[A-Za-z0-9_.,:@+=%/&|*()\[\]-]*")
NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
HOST = re.compile(r"[A-Za-z0-9.-]*")
LONGEST_LEAD_S = 65535  # of sbatch --signal

# The type of a field, and what TOML must hold for it.
_TOML = {
    str: str,
    int: int,
    int | None: int,
    float: (int, float),
    float | None: (int, float),
    bool: bool,
    tuple[str, ...]: list,
    dict[str, str]: dict,
}


def _key(default: Any, help: str) -> Any:
    if isinstance(default, dict):
        return field(default_factory=dict, metadata={"help": help})
    return field(default=default, metadata={"help": help})


@dataclass(frozen=True)
class Container:
    """The container that a site runs training in. The whole launch enters it once on each node.

    Raises:
        UsageError: a runtime that is not known, or no image.
    """

    runtime: str = _key(MISSING, "apptainer, pyxis or charliecloud")
    image: str = _key(MISSING, "its image, as the runtime takes it; may hold ${NAME}")
    mounts: tuple[str, ...] = _key((), "more folders, FOLDER or FOLDER:WHERE; may hold ${NAME}")
    python: str = _key("python3", "the Python inside it")

    def __post_init__(self) -> None:
        if self.runtime not in RUNTIMES:
            raise UsageError(
                f"container: runtime must be {', '.join(RUNTIMES[:-1])} or {RUNTIMES[-1]},"
                f" not {self.runtime!r}"
            )
        for name, text in (("image", self.image), ("python", self.python)):
            if not text.strip():
                raise UsageError(f"container: {name} cannot be {text!r}")
        for mount in self.mounts:
            if mount.count(":") > 1 or not all(mount.split(":")) or "," in mount:
                raise UsageError(f"container: mount {mount!r} is not FOLDER or FOLDER:WHERE")


@dataclass(frozen=True)
class Cluster:
    """A Slurm cluster, as the study's user may use it.

    Raises:
        UsageError: a value that no #SBATCH line can hold, or one that cannot be what its key says.
    """

    name: str
    source: Path  # the file that describes it
    gpus_per_node: int = _key(MISSING, "GPUs of a node; without GPUs, ranks on a node")
    cores_per_node: int = _key(MISSING, "CPU cores of a node")
    description: str = _key("", "one line for people")
    gpu: str = _key("", "the GPU's name")
    gpu_memory_gb: float | None = _key(None, "memory of one GPU")
    interconnect: str = _key(
        "", "a node's network: 8x NDR, 4x 200 Gb/s, 10 GbE; analysis.plan plans with it"
    )
    domain: int | None = _key(
        None, "GPUs that fast links join, where more than a node's; default: the card's rack"
    )
    max_nodes: int | None = _key(None, "the most nodes that a job may have")
    partition: str = _key("", "#SBATCH --partition")
    account: str = _key("", "#SBATCH --account; SBATCH_ACCOUNT in the environment overrides it")
    qos: str = _key("", "#SBATCH --qos")
    constraint: str = _key("", "#SBATCH --constraint")
    gpu_request: str = _key("gres", "how to ask for GPUs: gres, gpus-per-node or none")
    cpus_per_task: bool = _key(True, "whether to ask for cores with #SBATCH --cpus-per-task")
    memory: str = _key("", "#SBATCH --mem")
    time: str = _key("01:00:00", "#SBATCH --time where the study gives none")
    signal_lead_s: int = _key(
        0, "seconds before the time limit at which runs save and end; 0: a fifth, 10 to 120"
    )
    options: tuple[str, ...] = _key((), "more #SBATCH options")
    srun: tuple[str, ...] = _key((), "more options of srun, --cpu-bind=cores for example")
    torchrun: tuple[str, ...] = _key(
        (), "more options of torchrun, --numa-binding=node for example"
    )
    setup: tuple[str, ...] = _key(
        (), "shell lines before Python: module, conda, source; one that fails ends the job"
    )
    after: tuple[str, ...] = _key(
        (), "shell lines after the run, to copy results for example; $folder is the run's folder"
    )
    environment: dict[str, str] = _key({}, "environment variables")
    network: dict[str, str] = _key({}, "environment variables of NCCL and gloo")
    master_addr_suffix: str = _key("", "added to the first node's name to reach its fast network")
    scratch: str = _key("", "folder for compiled extensions; may hold ${NAME}")
    python: str = _key(
        ".venv/bin/python", "Python of the jobs; PYTHON in the environment overrides it"
    )
    container: Container | None = _key(
        None, "table: runtime, image, mounts, python; training runs in it"
    )

    def __post_init__(self) -> None:
        where = f"cluster {self.name!r}"
        for name in ("gpus_per_node", "cores_per_node", "max_nodes", "domain", "gpu_memory_gb"):
            if (value := getattr(self, name)) is not None and value < 1:
                raise UsageError(f"{where}: {name} must be positive, not {value}")
        card = usual_gpu(self.gpu)
        if card and (self.gpu_memory_gb or 0) > 2 * card.memory_gb:
            raise UsageError(
                f"{where}: gpu_memory_gb {self.gpu_memory_gb:g} is no memory of one GPU: a"
                f" {card.name} has {card.memory_gb:g} GB"
            )
        if self.gpu_request not in GPU_REQUESTS:
            raise UsageError(
                f"{where}: gpu_request must be gres, gpus-per-node or none,"
                f" not {self.gpu_request!r}"
            )
        if not 0 <= self.signal_lead_s <= LONGEST_LEAD_S:
            raise UsageError(
                f"{where}: signal_lead_s must be 0 to {LONGEST_LEAD_S}, not {self.signal_lead_s}"
            )
        if not HOST.fullmatch(self.master_addr_suffix):
            raise UsageError(
                f"{where}: master_addr_suffix {self.master_addr_suffix!r} is no part of a host name"
            )
        for launcher in ("srun", "torchrun"):
            for option in getattr(self, launcher):
                if not option.startswith("-"):
                    raise UsageError(f"{where}: {launcher} {option!r} is no option")
        for key in ("setup", "after"):
            for line in getattr(self, key):
                if not line.strip() or "\n" in line:
                    raise UsageError(f"{where}: {key} {line!r} is not one line of shell")
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

    @property
    def hours(self) -> str:
        """The unit of what a run costs."""
        return "rank-hours" if self.gpu_request == "none" else "GPU-hours"

    def problems(self, spec: RunSpec, tp_across_nodes: bool = False) -> list[str]:
        """Every reason why the run cannot be placed here, with the numbers."""
        found = []
        if spec.tp > (most := self.domain or joined(self.gpu, self.gpus_per_node)):
            what = "GPUs of a node" if most == self.gpus_per_node else "GPUs that fast links join"
            found += [f"tp {spec.tp} exceeds the {most} {what}"] * (not tp_across_nodes)
        if self.gpu_request == "none":
            if needing := spec.needing_a_gpu:
                found.append(f"{needing} needs a GPU, and {self.name} gives none")
        elif lacks := lacking(spec.formats, self.gpu):
            card = find_gpu(self.gpu)
            found.append(f"the {card.name} of {self.name} has no {' and no '.join(lacks)}")
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


def files() -> tuple[Path, ...]:
    """The clusters files, the shipped one first; a later one replaces tables of an earlier one."""
    given = os.environ.get("SCALING_CLUSTERS")
    if given is not None:
        return CLUSTERS, *(Path(path).expanduser() for path in given.split(os.pathsep) if path)
    folder = Path(os.environ.get("XDG_CONFIG_HOME") or Path.home() / ".config")
    own = folder / "gpt-scaling-study" / "clusters.toml"
    return (CLUSTERS, own) if own.exists() else (CLUSTERS,)


@cache
def _tables(paths: tuple[Path, ...]) -> dict[str, list[tuple[Path, Any]]]:
    """(file, table) of each name, the one that counts last."""
    found: dict[str, list[tuple[Path, Any]]] = {}
    for path in paths:
        for name, facts in read_toml(path, "clusters").items():
            found.setdefault(name, []).append((path, facts))
    return found


def load_clusters() -> dict[str, Cluster]:
    """Every cluster, by name. One with a wrong table is left out, and a line on stderr says so.

    Raises:
        UsageError: a file is unreadable or not TOML.
    """
    found = {}
    for name in _tables(files()):
        try:
            found[name] = cluster(name)
        except UsageError as error:
            print(f"cluster {name} is left out: {error}", file=sys.stderr)
    return found


def cluster(name: str) -> Cluster:
    """The cluster of that name.

    Raises:
        UsageError: there is none, or its table is wrong.
    """
    paths = files()
    tables = _tables(paths)
    if name not in tables:
        where = " or ".join(map(str, paths))
        raise UsageError(f"no cluster {name!r} in {where}; there are: {', '.join(tables)}")
    path, facts = tables[name][-1]
    return cluster_of(name, facts, path)


def is_named(name: str) -> bool:
    """Whether a file has a table of that name, right or wrong."""
    return name in _tables(files())


def replaced(name: str) -> str:
    """One line where a user's file replaces another file's cluster, else ""."""
    *earlier, (path, _) = _tables(files())[name]
    return f"cluster {name} of {path} replaces the one of {earlier[-1][0]}" if earlier else ""


def cluster_of(name: str, facts: Any, source: Path | str) -> Cluster:
    """A cluster from its table.

    Raises:
        UsageError: an unknown or missing key, or a value that its key cannot have.
    """
    where = f"{source} [{name}]"
    values = values_of(Cluster, facts, where)
    if "container" in values:
        inside = values_of(Container, values["container"], f"{where} container")
        try:
            values["container"] = Container(**inside)
        except UsageError as error:
            raise UsageError(f"{where} {error}") from error
    return Cluster(name=name, source=Path(source), **values)


def values_of(kind: type, facts: Any, where: str) -> dict[str, Any]:
    """A table's values in the types of a dataclass's fields, `name` and `source` excepted.

    Raises:
        UsageError: no table, an unknown or missing key, or a value of another type.
    """
    if not isinstance(facts, dict):
        raise UsageError(f"{where} is no table")
    known = {f.name: f for f in fields(kind) if f.name not in ("name", "source")}
    check_keys(facts, list(known), where)
    needed = [n for n, f in known.items() if f.default is f.default_factory is MISSING]
    if missing := [name for name in needed if name not in facts]:
        raise UsageError(f"{where}: missing {', '.join(missing)}")
    values = {}
    for key, value in facts.items():
        wanted = _TOML.get(known[key].type, dict)
        if not isinstance(value, wanted) or isinstance(value, bool) != (wanted is bool):
            hint = ": write a list of texts, in [ ]" if wanted is list else ""
            raise UsageError(f"{where}: {key} cannot be {value!r}{hint}")
        if isinstance(value, list) and (wrong := [v for v in value if not isinstance(v, str)]):
            raise UsageError(f"{where}: {wrong[0]!r} is no text")
        values[key] = tuple(value) if isinstance(value, list) else value
    return values
