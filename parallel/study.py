"""Studies: a TOML file that asks one question, and the runs that answer it. Torch-free.

question = "Does every engine train the same GPT?"
baseline = "ddp"            # the run that speedups and parity are measured against
cluster = "local-test"      # of slurm/clusters.toml; `nodes` counts its nodes

[slurm]                     # what slurm.render needs beyond the run: time, environment, nsys ...
time = "00:10:00"

[defaults]                  # settings of every run: the flags of parallel.train
preset = "tiny"

[[run]]                     # one table per run; it must be able to start
engine = "megatron"
gpus = 2
tp = 2

[[sweep]]                   # many runs: every combination of product's values and zip's rows
repeats = 3                 # each point three times: ...-r1, ...-r2, ...-r3, A B A B A B
defaults = { engine = "megatron", micro_batch = 2 }
product = { tp = [1, 2, 4], pp = [1, 2] }
zip = { nodes = [1, 2, 4], global_batch = [16, 32, 64] }
exclude = [{ tp = 4, pp = 2 }, { nodes = [2, 4], tp = 1 }]
include = [{ engine = "ddp", nodes = 1 }]
slurm = { time = "00:30:00" }

A point of a sweep that cannot run is left out and its reasons are kept; so a study may ask for a
whole grid. A run is named after its split, then after whatever else tells it from the others.
Repeats are interleaved over the whole study, so that a machine that warms up or gets busier does so
for every configuration alike; `baseline` may name a configuration, which means its first repeat.
Besides the settings, a point may have `nodes` (in place of gpus) and `label` (a word in its name).
"""

import itertools
import math
import re
from collections.abc import Iterator
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from models.config import preset
from models.errors import UsageError
from models.files import check_keys, read_toml
from parallel import clusters
from parallel.clusters import Cluster
from parallel.saved import CIRCUMSTANCES
from parallel.spec import RunSpec, check_setting, resolve
from parallel.work import WORK

Layers = list[tuple[str, dict[str, Any]]]  # (source, settings), for resolve()
STUDY_KEYS = ("question", "baseline", "cluster", "slurm", "defaults", "run", "sweep")
SWEEP_KEYS = ("repeats", "defaults", "product", "zip", "exclude", "include", "slurm")
MOST_RUNS = 10_000  # of a study, points that are left out and repeats included
BESIDE = ("nodes", "label", "slurm")  # what a point may hold that is no setting of a run
LABEL = re.compile(r"[A-Za-z0-9][A-Za-z0-9._+-]*")
# What RunSpec.name tells already (gpus follows from the split's sizes), or what never names a run.
IN_NAME = {"engine", "gpus", "tp", "pp", "vpp", "sequence_parallel", "zero_stage", "offload"}
IN_NAME |= {"recompute", "implementation"}
SHORT = {
    "micro_batch": "mbs",
    "global_batch": "gbs",
    "grad_accum": "gas",
    "seq_len": "seq",
    "n_layer": "layers",
    "n_head": "heads",
    "vocab_size": "vocab",
    "preset": "",
    "precision": "",
    "deepspeed_config": "",
    "device": "",
    "kernels": "",
    "data": "",
}


@dataclass(frozen=True)
class Study:
    """A study file: its name (the file's stem), question, baseline and the settings of its runs.

    repeat_of: (configuration, number of the repeat from 1) of every run that is one of several.
    left_out: (what the point was, why it cannot run) for every impossible point of a sweep.
    assumed: what the file does not say and is taken for granted, one line each.
    """

    name: str
    path: Path
    question: str
    baseline: str
    settings: dict[str, Layers]  # run name -> layers for resolve()
    specs: dict[str, RunSpec] = field(default_factory=dict, repr=False)
    slurm: dict[str, dict[str, Any]] = field(default_factory=dict, repr=False)
    cluster: Cluster | None = None
    repeat_of: dict[str, tuple[str, int]] = field(default_factory=dict, repr=False)
    left_out: list[tuple[str, str]] = field(default_factory=list)
    assumed: list[str] = field(default_factory=list)

    def run(
        self, name: str, flags: dict[str, Any] | None = None, gpus: int | None = None
    ) -> RunSpec:
        """The run called `name`, with `flags` overriding the study's settings.

        Raises:
            UsageError: no such run, or it cannot start.
        """
        if name not in self.settings:
            raise UsageError(f"{self.path}: no run {name!r}; it has: {', '.join(self.settings)}")
        if not flags and gpus in (None, self.specs[name].gpus):
            return self.specs[name]
        return resolve(*self.settings[name], ("command line", flags or {}), gpus=gpus)


@dataclass(frozen=True)
class _Point:
    """A run before it has a name."""

    spec: RunSpec
    layers: Layers
    slurm: dict[str, Any]
    label: str
    repeat: int  # from 1, where the point is repeated; 0 where it is not
    source: str


def load_study(path: Path | str, cluster: str | None = None, strict: bool = False) -> Study:
    """Read and check a study file.

    `cluster` overrides the study's own. With `strict`, an impossible point of a sweep is an error.

    Raises:
        UsageError: unreadable, not TOML, a key that is not known, a name that no folder beside the
            file can have, more than MOST_RUNS runs, two runs of one name, a baseline that is no
            run, or a run that cannot start.
    """
    path = Path(path)
    table = read_toml(path, "study")
    if path.stem.startswith(".") or not path.suffix:
        raise UsageError(
            f"study {path}: its scripts and logs go to a folder called {path.stem!r}: call the file"
            " NAME.toml, with a NAME that does not begin with a dot"
        )
    check_keys(table, STUDY_KEYS, f"study {path}")
    for kind in ("run", "sweep"):
        if not isinstance(table.get(kind, []), list):
            raise UsageError(f"study {path}: write [[{kind}]], not [{kind}]")
    if not table.get("run") and not table.get("sweep"):
        raise UsageError(f"study {path} has no [[run]] table and no [[sweep]]")
    if not isinstance(table.get("question"), str):
        raise UsageError(f"study {path} asks no question (question = ...)")
    for kind in ("slurm", "defaults"):
        if not isinstance(table.get(kind, {}), dict):
            raise UsageError(f"study {path}: {kind} is no table")
    for kind in ("baseline", "cluster"):
        if not isinstance(table.get(kind, ""), str):
            raise UsageError(f"study {path}: {kind} must be a name, not {table[kind]!r}")
    chosen = cluster or table.get("cluster")
    where = clusters.cluster(chosen) if chosen else None
    _check_size(path, table)
    points: list[_Point] = []
    left_out: list[tuple[str, str]] = []
    _read_runs(path, table, where, points)
    _read_sweeps(path, table, where, points, left_out)
    if left_out and (strict or not points):
        reasons = "; ".join(f"{what}: {why}" for what, why in left_out)
        raise UsageError(f"study {path}: {len(left_out)} points cannot run: {reasons}")
    if not points:
        raise UsageError(f"study {path}: no run is left: every point is excluded")
    # A B A B: sorting is stable, so each round keeps the file's order.
    named, repeat_of = _name_all(sorted(points, key=lambda point: max(point.repeat, 1)))
    baseline = table.get("baseline", next(iter(named)))
    assumed = []
    configurations = {repeat_of.get(name, (name, 0))[0] for name in named}
    if "baseline" not in table and len(configurations) > 1:
        assumed.append(f"no baseline is named: it is {baseline}, the first run")
    if baseline not in named and repeat_of.get(f"{baseline}-r1") == (baseline, 1):
        baseline = f"{baseline}-r1"
    if baseline not in named:
        raise UsageError(
            f"study {path}: baseline {baseline!r} is no run; it has: {', '.join(named)}"
        )
    return Study(
        path.stem,
        path,
        table["question"],
        baseline,
        settings={name: point.layers for name, point in named.items()},
        specs={name: point.spec for name, point in named.items()},
        slurm={name: point.slurm for name, point in named.items()},
        cluster=where,
        repeat_of=repeat_of,
        left_out=left_out,
        assumed=assumed,
    )


def _check_size(path: Path, table: dict[str, Any]) -> None:
    """Refuse a study that asks for too many runs, before any of them is made.

    Raises:
        UsageError: with how many; or a part of a sweep that is not what its name says.
    """
    total = len(table.get("run", []))
    for number, sweep in enumerate(table.get("sweep", []), start=1):
        source = f"{path} [[sweep]] {number}"
        _check_sweep(sweep, source)
        axes = sweep.get("product", {}) | sweep.get("zip", {})
        points = math.prod(len(values) for values in sweep.get("product", {}).values())
        points *= max((len(values) for values in sweep.get("zip", {}).values()), default=1)
        include = len(sweep.get("include", [] if axes else [{}]))
        total += ((points if axes else 0) + include) * sweep.get("repeats", 1)
    if total > MOST_RUNS:
        raise UsageError(f"study {path} asks for {total} runs: at most {MOST_RUNS} are made")


def _read_runs(path: Path, table: dict, where: Cluster | None, points: list[_Point]) -> None:
    defaults = (f"{path} [defaults]", table.get("defaults", {}))
    for number, run in enumerate(table.get("run", []), start=1):
        source = f"{path} [[run]] {number}"
        try:
            points.append(_point([defaults, (source, run)], table.get("slurm", {}), where, source))
        except UsageError as error:
            message = str(error)
            raise UsageError(message if str(path) in message else f"{source}: {message}") from error


def _read_sweeps(
    path: Path,
    table: dict,
    where: Cluster | None,
    points: list[_Point],
    left_out: list[tuple[str, str]],
) -> None:
    defaults = (f"{path} [defaults]", table.get("defaults", {}))
    for number, sweep in enumerate(table.get("sweep", []), start=1):
        source = f"{path} [[sweep]] {number}"
        slurm = table.get("slurm", {}) | sweep.get("slurm", {})
        repeats = sweep.get("repeats", 1)
        branch = (f"{source} defaults", sweep.get("defaults", {}))
        for given in _points(sweep, source):
            layers = [defaults, branch, (source, given)]
            for origin, settings in layers:
                check_settings(settings, origin)
            try:
                point = _point(layers, slurm, where, source)
            except UsageError as error:
                what = ", ".join(f"{k} {v}" for k, v in given.items()) or "the only point"
                left_out.append((f"{source.removeprefix(f'{path} ')}: {what}", str(error)))
                continue
            for repeat in range(1, repeats + 1):
                points.append(replace(point, repeat=repeat if repeats > 1 else 0))


def _check_sweep(sweep: Any, source: str) -> None:
    """Raises: UsageError: a part of a sweep that is not what its name says."""
    if not isinstance(sweep, dict):
        raise UsageError(f"{source} is no table")
    check_keys(sweep, SWEEP_KEYS, source)
    repeats = sweep.get("repeats", 1)
    if not isinstance(repeats, int) or isinstance(repeats, bool) or repeats < 1:
        raise UsageError(f"{source}: repeats must be a whole number above 0, not {repeats!r}")
    for kind in ("defaults", "slurm", "product", "zip"):
        if not isinstance(sweep.get(kind, {}), dict):
            raise UsageError(f"{source}: {kind} is no table")
    product, zipped = sweep.get("product", {}), sweep.get("zip", {})
    for kind in ("product", "zip"):
        for name, values in sweep.get(kind, {}).items():
            if not isinstance(values, list) or not values:
                raise UsageError(f"{source}: {kind} {name} must be a list of values")
    if both := set(product) & set(zipped):
        raise UsageError(f"{source}: {', '.join(sorted(both))} in both product and zip")
    if len(lengths := {name: len(values) for name, values in zipped.items()}) and (
        len(set(lengths.values())) > 1
    ):
        raise UsageError(f"{source}: zip's lists differ in length: {lengths}")
    for kind in ("exclude", "include"):
        given = sweep.get(kind, [])
        if not isinstance(given, list) or not all(isinstance(one, dict) for one in given):
            raise UsageError(f"{source}: {kind} must be a list of tables")
    axes = set(product) | set(zipped)
    for exclude in sweep.get("exclude", []):
        if unknown := set(exclude) - axes:
            raise UsageError(f"{source}: exclude names {', '.join(sorted(unknown))}, no axis here")


def _points(sweep: dict[str, Any], source: str) -> Iterator[dict[str, Any]]:
    """The settings of each point of a sweep, in the order the file gives.

    Raises:
        UsageError: an exclude that matches none of them.
    """
    product, zipped = sweep.get("product", {}), sweep.get("zip", {})
    axes, unmatched = bool(product or zipped), list(sweep.get("exclude", []))
    rows = [dict(zip(zipped, row, strict=True)) for row in zip(*zipped.values(), strict=True)]
    for values in itertools.product(*product.values()) if axes else ():
        for row in rows or [{}]:
            point = dict(zip(product, values, strict=True)) | row
            matching = [e for e in sweep.get("exclude", []) if _matches(point, e)]
            unmatched = [exclude for exclude in unmatched if exclude not in matching]
            if not matching:
                yield point
    if unmatched:
        shown = "; ".join(", ".join(f"{k} {v}" for k, v in one.items()) for one in unmatched)
        raise UsageError(f"{source}: exclude matches no point: {shown}")
    yield from sweep.get("include", [] if axes else [{}])


def _matches(point: dict[str, Any], pattern: dict[str, Any]) -> bool:
    return all(
        point[name] in (wanted if isinstance(wanted, list) else [wanted])
        for name, wanted in pattern.items()
    )


def check_settings(settings: Any, source: str) -> None:
    """Refuse what is wrong wherever it stands: an unknown setting, a wrong type, an unknown name.

    Raises:
        UsageError: so that a typo is never taken for a point that cannot run.
    """
    if not isinstance(settings, dict):
        raise UsageError(f"{source} is no table")
    for name, value in settings.items():
        if name == "nodes" and (isinstance(value, bool) or not isinstance(value, int)):
            raise UsageError(f"{source}: nodes must be an int, not {value!r}")
        if name == "label" and not (isinstance(value, str) and LABEL.fullmatch(value)):
            raise UsageError(f"{source}: label {value!r} is no word for a name")
        if name not in BESIDE:
            check_setting(name, value, source)
        if name == "preset":
            preset(value)


def _point(layers: Layers, slurm: dict[str, Any], where: Cluster | None, source: str) -> _Point:
    """A run that can start, out of its layers.

    Raises:
        UsageError: every reason why it cannot.
    """
    label, plain = "", []
    for origin, settings in layers:
        check_settings(settings, origin)
        label = settings.get("label", label)
        if not isinstance(settings.get("slurm", {}), dict):
            raise UsageError(f"{origin}: slurm is no table")
        slurm = slurm | settings.get("slurm", {})
        kept = {name: value for name, value in settings.items() if name not in BESIDE}
        if "nodes" in settings:
            if where is None:
                raise UsageError(f"{origin}: nodes needs a cluster (cluster = ... or --cluster)")
            if "gpus" in settings:
                raise UsageError(f"{origin}: nodes and gpus say the same: give one")
            kept["gpus"] = settings["nodes"] * where.gpus_per_node
        plain.append((origin, kept))
    spec = resolve(*plain)
    if where is not None:
        if problems := where.problems(spec, bool(slurm.get("tp_across_nodes", False))):
            raise UsageError("; ".join(problems))
    return _Point(spec, plain, slurm, label, 0, source)


def _name_all(points: list[_Point]) -> tuple[dict[str, _Point], dict[str, tuple[str, int]]]:
    """Each point by its name: the split, the label, what else tells runs apart, the repeat; and
    (configuration, repeat) of those that are repeats.

    Raises:
        UsageError: two points that nothing tells apart.
    """
    groups: dict[tuple[str, str], list[_Point]] = {}
    for point in points:
        groups.setdefault((point.spec.name, point.label), []).append(point)
    stated = {name for point in points for _, settings in point.layers for name in settings}
    candidates = [f.name for f in fields(RunSpec) if f.name in stated - IN_NAME]
    telling = [
        name
        for name in candidates
        if any(len({getattr(p.spec, name) for p in group}) > 1 for group in groups.values())
    ]
    if "global_batch" in telling and "grad_accum" in telling:
        telling.remove("grad_accum")  # it follows
    named: dict[str, _Point] = {}
    repeat_of: dict[str, tuple[str, int]] = {}
    for point in points:
        parts = [point.spec.name, *(_tag(name, point.spec) for name in telling), point.label]
        name = configuration = "-".join(part for part in parts if part)
        if point.repeat:
            name = f"{configuration}-r{point.repeat}"
            repeat_of[name] = (configuration, point.repeat)
        if name in named:
            raise UsageError(f"{point.source}: a second run called {name}")
        named[name] = point
    return named, repeat_of


def name_alone(spec: RunSpec, given: dict[str, Any]) -> str:
    """The name of a run of no study: its split, then what else its flags say of it, less how long
    it trains and its circumstances, for with others of those it may go on (parallel/saved.py)."""
    silent = IN_NAME | CIRCUMSTANCES | set(WORK)
    defaults = RunSpec()
    telling = [
        f.name
        for f in fields(RunSpec)
        if f.name in given.keys() - silent and given[f.name] != getattr(defaults, f.name)
    ]
    if "global_batch" in telling and "grad_accum" in telling:
        telling.remove("grad_accum")  # it follows
    return "-".join(part for part in (spec.name, *(_tag(name, spec) for name in telling)) if part)


def _tag(name: str, spec: RunSpec) -> str:
    """The part of a run's name that says one setting, in letters that are safe in any file name."""
    value = getattr(spec, name)
    if name == "preset" and spec.model != preset(value):  # sizes of its own: not that model
        value = f"{spec.model.n_params / 1e9:.3g}b"
    if value is None:
        return ""
    if isinstance(value, bool):
        return name if value else f"no-{name}"
    path = name in ("deepspeed_config", "data")
    text = Path(value).stem if path else format(value, "g" * isinstance(value, float))
    return re.sub(r"[^A-Za-z0-9.+-]+", "_", SHORT.get(name, name) + text).strip("_-.")
