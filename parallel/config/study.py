"""Studies: a TOML file that asks one question, and the runs that answer it. Torch-free.

question = "Does every engine train the same GPT?"
baseline = "ddp"            # the run that speedups and parity are measured against
cluster = "local-test"      # of slurm/clusters.toml; `nodes` counts its nodes
quick = ["ddp"]             # the runs that tell most, which parallel.sweep --quick trains

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
include = [{ engine = "ddp", nodes = 1 }]
slurm = { time = "00:30:00" }

A point of a sweep that cannot run is left out and its reasons are kept; so a study may ask for a
whole grid. A run is named after its split, then after whatever else tells it from the others. The
GPUs of a point's `nodes` depend on the cluster. So such a point is named after its nodes, where
they tell it from others, and not after dp: a run has the same name on every cluster.
Repeats are interleaved over the whole study, so that a machine that warms up or gets busier does so
for every configuration alike; `baseline` may name a configuration, which means its first repeat.
Besides the settings, a point may have `nodes` (in place of gpus), `label` (a word in its name),
`slurm` and `after`, the run of this study that must be complete before it starts, as it loads that
run's checkpoint: `after = "megatron-tp2"`. A configuration's name means all of its repeats.
"""

import itertools
import math
from collections.abc import Callable, Iterator
from dataclasses import MISSING, dataclass, fields, replace
from graphlib import CycleError, TopologicalSorter
from pathlib import Path
from typing import Any, NamedTuple

from base.bounds import Bounds, Text, checked, key, values_of
from base.errors import UsageError
from base.files import is_text, read_toml
from models.config import preset
from parallel.config import clusters
from parallel.config.changes import CIRCUMSTANCES
from parallel.config.clusters import Cluster
from parallel.config.duration import WORK
from parallel.config.resolve import COMMAND_LINE, check_setting, merge, resolve
from parallel.config.run_names import IN_NAME, model_of, run_name, split_name
from parallel.config.run_spec import DEFAULTS, SETTINGS, RunSpec

Layers = list[tuple[str, dict[str, Any]]]  # (source, settings), for resolve()
MOST_RUNS = 10_000  # of a study, points that are left out and repeats included


@dataclass(frozen=True)
class _File:
    """The keys of a study file, as the docstring above describes them."""

    question: str = key(MISSING)
    baseline: str | None = key(None)
    cluster: str | None = key(None)
    quick: tuple[str, ...] = key(())
    slurm: dict = key({})
    defaults: dict = key({})
    run: list = key([])
    sweep: list = key([])


@dataclass(frozen=True)
class _Sweep:
    """The keys of a [[sweep]] table."""

    repeats: int = key(1, allowed=Bounds(1, 10**12))
    defaults: dict = key({})
    product: dict = key({})
    zip: dict = key({})
    include: list | None = key(None)
    slurm: dict = key({})

    @property
    def included(self) -> list[dict[str, Any]]:
        """Returns the further points; without axes and `include`, the defaults are a point."""
        alone = [] if self.product or self.zip else [{}]
        return alone if self.include is None else self.include

    @property
    def size(self) -> int:
        """Returns how many runs the table asks for."""
        points = math.prod(map(len, self.product.values()))
        points *= max(map(len, self.zip.values()), default=1)
        if not (self.product or self.zip):
            points = 0
        return (points + len(self.included)) * self.repeats

    def points(self) -> Iterator[dict[str, Any]]:
        """Yields the settings of each point, in the order that the file gives."""
        if self.product or self.zip:
            zipped = zip(*self.zip.values(), strict=True)
            rows = [dict(zip(self.zip, row, strict=True)) for row in zipped]
            for values in itertools.product(*self.product.values()):
                for row in rows or [{}]:
                    yield dict(zip(self.product, values, strict=True)) | row
        yield from self.included


@dataclass(frozen=True)
class _Beside:
    """The keys that a point may hold and that are no settings of a run."""

    nodes: int | None = key(None, allowed=Bounds(1, 10**6))
    label: str = key("", allowed=Text(r"[A-Za-z0-9][A-Za-z0-9._+-]*", "a word for a name"))
    after: str = key("")
    slurm: dict = key({})


_BESIDE = {f.name: f for f in fields(_Beside)}


@dataclass(frozen=True)
class Run:
    """One run of a study.

    spec: None where it cannot run, for the `reason`. named: what its name is made of, the values of
    the settings, dp and nodes: the spec's, or, where it states `nodes` in place of gpus, those that
    do not depend on the cluster; empty where no cluster can run it. layers: the settings that
    `spec` is resolved from. slurm: its [slurm] table. configuration: its name without the repeat.
    repeat: from 1, where it is one of several; else 0.
    """

    spec: RunSpec | None
    reason: str
    named: dict[str, Any]
    nodes: int | None
    layers: Layers
    slurm: Layers
    after: tuple[str, ...]
    label: str
    source: str
    title: str
    repeat: int = 0
    configuration: str = ""

    def split(self) -> str:
        """Returns the part of the name that says how the run is split."""
        return split_name(self.named)

    @property
    def tp_across_nodes(self) -> bool:
        """Returns whether its tensor-parallel ranks may be on several nodes."""
        stated = [table["tp_across_nodes"] for _, table in self.slurm if "tp_across_nodes" in table]
        return bool(stated and stated[-1])


@dataclass(frozen=True)
class Study:
    """A study file: its name (the file's stem), question, baseline and runs, by name.

    quick: names of the runs that tell most.
    left_out: (what the point was, why it cannot run) for every impossible point of a sweep.
    assumed: what the file does not say and is taken for granted, one line each.
    """

    name: str
    path: Path
    question: str
    baseline: str
    runs: dict[str, Run]
    quick: list[str]
    cluster: Cluster | None
    left_out: list[tuple[str, str]]
    assumed: list[str]

    @property
    def specs(self) -> dict[str, RunSpec]:
        return {name: run.spec for name, run in self.runs.items()}

    def run(
        self, name: str, flags: dict[str, Any] | None = None, gpus: int | None = None
    ) -> RunSpec:
        """Returns the run called `name`, with `flags` overriding the study's settings."""
        if name not in self.runs:
            raise UsageError(f"{self.path}: no run {name!r}; it has: {', '.join(self.runs)}")
        run = self.runs[name]
        if not flags and gpus in (None, run.spec.gpus):
            return run.spec
        return resolve(*run.layers, (COMMAND_LINE, flags or {}), gpus=gpus)


class Choice(NamedTuple):
    """The runs that a command is asked for, by name, with their study, if any, and cluster."""

    runs: dict[str, RunSpec]
    study: Study | None
    cluster: Cluster | None


def choose_runs(
    path: Path | None,
    names: list[str] | None,
    flags: dict[str, Any],
    cluster: str | None,
    gpus: int | None = None,
    check: bool = True,
) -> Choice:
    """Returns the runs `names` (None: all) of the study at `path`, with `flags` over its settings;
    without a study the one run that the flags make. check: that their cluster can run them.

    Raises:
        UsageError: names without a study, no such run or cluster, or a run that cannot start.
    """
    study, target = None, clusters.cluster(cluster) if cluster else None
    if path is not None:
        study = load_study(path, cluster)
        target = study.cluster
        runs = {name: study.run(name, flags, gpus) for name in names or study.runs}
    elif names is not None:
        raise UsageError("--run-name names a run of a study: give --study too")
    else:
        spec = resolve((COMMAND_LINE, flags), gpus=gpus)
        runs = {name_without_study(spec, flags): spec}
    for name, spec in runs.items() if check and target else ():
        across = study is not None and study.runs[name].tp_across_nodes
        if problems := target.problems(spec, across):
            raise UsageError(f"{name} on {target.name}: {'; '.join(problems)}")
    return Choice(runs, study, target)


def name_without_study(spec: RunSpec, flags: dict[str, Any]) -> str:
    """Returns the name of a run of no study: its split, then what else its flags say of it. The
    training length and the settings that may change on resume (CIRCUMSTANCES in changes.py) are
    left out."""
    unnamed = IN_NAME | CIRCUMSTANCES | set(WORK)
    values = spec.values | {"vocab_size": flags.get("vocab_size")}  # the data's is not in the name
    named = [name for name in values if name in flags.keys() - unnamed and spec.asks_for(name)]
    return run_name(spec.name, named, values)


def load_study(path: Path | str, cluster: str | None = None) -> Study:
    """Returns the study of a file, checked.

    `cluster` overrides the study's own.

    Raises:
        UsageError: unreadable, not TOML, a key that is not known, a name that no folder beside the
            file can have, more than MOST_RUNS runs, two runs of one name, a baseline that is no
            run, or a run that cannot start.
    """
    path = Path(path)
    table = read_toml(path, "study")
    if path.stem.startswith(".") or not path.suffix or not is_text(path.stem):
        raise UsageError(
            f"study {path}: its scripts and logs go to a folder called {path.stem!r}: call the file"
            " NAME.toml, with a NAME in UTF-8 that does not begin with a dot"
        )
    _refuse_misplaced(table, _File, f"study {path}")
    file = _File(**values_of(_File, table, f"study {path}"))
    if not file.run and not file.sweep:
        raise UsageError(f"study {path} has no [[run]] table and no [[sweep]]")
    chosen = cluster or file.cluster
    target = clusters.cluster(chosen) if chosen else None
    points = _read_points(path, file, target)
    # A B A B: sorting is stable, so each round keeps the file's order.
    by_round = sorted(points, key=lambda point: max(point.repeat, 1))
    nameless = [point for point in points if not point.named]
    named = _in_order(_name_all([point for point in by_round if point.named]), path)
    left_out = [
        (point.title, point.reason)
        for point in [*nameless, *named.values()]
        if point.reason and point.repeat <= 1
    ]
    runs = {name: run for name, run in named.items() if run.spec}
    if not runs:
        first = ": ".join(left_out[0]) if left_out else "it asks for none"
        on_cluster = f" on {target.name}" if target else ""
        raise UsageError(
            f"study {path}: none of its {len(left_out)} points can run{on_cluster}: {first}"
        )
    baseline, assumed = file.baseline or next(iter(runs)), []
    if chosen and (note := clusters.replaced(chosen)):
        assumed.append(note)
    if file.baseline is None and len({run.configuration for run in runs.values()}) > 1:
        assumed.append(f"no baseline is named: it is {baseline}, the first run")
    if baseline not in named:  # a configuration, then, which means its first repeat
        repeats = (name for name, run in named.items() if run.configuration == baseline)
        if (first := next(repeats, None)) is None:
            has = ", ".join(runs)
            raise UsageError(f"study {path}: baseline {baseline!r} is no run; it has: {has}")
        baseline = first
    if unknown := [name for name in file.quick if name not in named]:
        has = f"{', '.join(unknown)} is no run; it has: {', '.join(runs)}"
        raise UsageError(f"study {path}: quick: {has}")
    if reason := named[baseline].reason:
        raise UsageError(f"study {path}: its baseline {baseline} cannot run: {reason}")
    return Study(
        name=path.stem,
        path=path,
        question=file.question,
        baseline=baseline,
        runs=runs,
        quick=[name for name in file.quick if name in runs],
        cluster=target,
        left_out=left_out,
        assumed=assumed,
    )


def _read_points(path: Path, file: _File, target: Cluster | None) -> list[Run]:
    """Returns the points of all tables, those of [[run]] first. A [[run]] that cannot run is an
    error."""
    sweeps = {f"{path} [[run]] {n}": _Sweep(include=[run]) for n, run in enumerate(file.run, 1)}
    for number, table in enumerate(file.sweep, start=1):
        source = f"{path} [[sweep]] {number}"
        sweeps[source] = _sweep(table, source)
    if (total := sum(sweep.size for sweep in sweeps.values())) > MOST_RUNS:
        raise UsageError(f"study {path} asks for {total} runs: at most {MOST_RUNS} are made")
    points: list[Run] = []
    for number, (source, sweep) in enumerate(sweeps.items()):
        defaults = [(f"{path} [defaults]", file.defaults)]
        defaults += [(source, {"slurm": sweep.slurm})] if sweep.slurm else []
        defaults += [(f"{source} defaults", sweep.defaults)]
        for settings in sweep.points():
            layers = [*defaults, (source, settings)]
            check_settings(layers)
            words = ", ".join(f"{name} {value}" for name, value in settings.items())
            title = f"{source.removeprefix(f'{path} ')}: {words or 'the only point'}"
            point = _point(layers, [(f"{path} [slurm]", file.slurm)], target, source, title)
            if point.reason and number < len(file.run):
                place = "" if str(path) in point.reason else f"{source}: "
                raise UsageError(f"{place}{point.reason}")
            repeats = range(1, sweep.repeats + 1) if sweep.repeats > 1 else (0,)
            points += [replace(point, repeat=repeat) for repeat in repeats]
    return points


def _sweep(table: dict[str, Any], source: str) -> _Sweep:
    """Returns the sweep of a [[sweep]] table."""
    _refuse_misplaced(table, _Sweep, source)
    sweep = _Sweep(**values_of(_Sweep, table, source))
    for kind in ("product", "zip"):
        for name, values in getattr(sweep, kind).items():
            if not isinstance(values, list) or not values:
                raise UsageError(f"{source}: {kind} {name} must be a list of values")
    if twice := set(sweep.product) & set(sweep.zip):
        raise UsageError(f"{source}: {', '.join(sorted(twice))} in both product and zip")
    lengths = {name: len(values) for name, values in sweep.zip.items()}
    if len(set(lengths.values())) > 1:
        raise UsageError(f"{source}: zip's lists differ in length: {lengths}")
    return sweep


def _refuse_misplaced(table: dict[str, Any], kind: type, source: str) -> None:
    """Refuses a key that `kind` does not have and another table does, and names that table."""
    for name in table.keys() - {f.name for f in fields(kind)}:
        if name in _Sweep.__dataclass_fields__:
            raise UsageError(f"{source}: {name} belongs to a [[sweep]]")
        if kind is not _Beside and (name in DEFAULTS or name in _BESIDE):
            places = "[defaults], a [[run]] or a [[sweep]]'s defaults"
            raise UsageError(f"{source}: {name} belongs to {places}")


def check_settings(layers: Layers) -> None:
    """Refuses what is wrong wherever it stands, an unknown setting or a wrong type: so a typo is
    never taken for a point that cannot run."""
    for source, settings in layers:
        _refuse_misplaced(settings, _Beside, source)
        for name, value in settings.items():
            if name in _BESIDE:
                checked(_BESIDE[name], value, f"{source}: {name}")
            else:
                check_setting(name, value, source)
            if name == "preset":
                preset(value)


def _point(layers: Layers, slurm: Layers, target: Cluster | None, source: str, title: str) -> Run:
    """Returns the run of these layers; where it cannot run, `reason` holds every reason."""
    label, after, nodes = "", "", None
    plain: Layers = []  # without the keys of a study that are no settings of a run
    for origin, settings in layers:
        label = settings.get("label", label)
        after = settings.get("after", after)
        slurm = [*slurm, (f"{origin} slurm", settings.get("slurm", {}))]
        run_settings = {name: value for name, value in settings.items() if name not in _BESIDE}
        if "gpus" in settings:
            nodes = None
        if "nodes" in settings:
            if target is None:
                raise UsageError(f"{origin}: nodes needs a cluster (cluster = ... or --cluster)")
            if "gpus" in settings:
                raise UsageError(f"{origin}: nodes and gpus say the same: give one")
            nodes = settings["nodes"]
            run_settings["gpus"] = nodes * target.gpus_per_node
        plain.append((origin, run_settings))
    run = Run(
        spec=None,
        reason="",
        named={},
        nodes=nodes,
        layers=plain,
        slurm=[(place, table) for place, table in slurm if table],
        after=(after,) if after else (),
        label=label,
        source=source,
        title=title,
    )
    try:
        if nodes is not None:
            named = DEFAULTS | merge(*plain) | {"dp": 1, "nodes": nodes}
            named["seq_len"] = named["seq_len"] or model_of(named).max_seq_len
            run = replace(run, named=named)
        spec = resolve(*plain)
    except UsageError as error:
        # A file that is not there is a mistake in any case: were the point left out, the names of
        # the others would depend on the folder that the command runs in.
        if isinstance(error.__cause__, OSError):
            raise UsageError(f"{source}: {error} (looked for in {Path.cwd()})") from error
        return replace(run, reason=str(error))
    reason = "; ".join(target.problems(spec, run.tp_across_nodes)) if target else ""
    named = run.named or spec.values | {"dp": spec.layout.dp, "nodes": None}
    return replace(run, spec=None if reason else spec, reason=reason, named=named)


def _name_all(points: list[Run]) -> dict[str, Run]:
    """Returns the points by name. A name has the split, what else tells runs apart, label, repeat.

    Points that this cluster cannot run are named too: the names of the others do not depend on it.
    """
    layers = [settings for point in points for _, settings in point.layers]
    stated = {name for settings in layers for name in settings}
    by_nodes = _differing(["nodes"], points, lambda run: (run.split(), run.label))
    candidates = [name for name in SETTINGS if name in stated - IN_NAME]
    differing = by_nodes + _differing(
        candidates, points, lambda run: (run.split(), run.nodes if by_nodes else None, run.label)
    )
    named: dict[str, Run] = {}
    for point in points:
        configuration = run_name(point.split(), differing, point.named, point.label)
        name = f"{configuration}-r{point.repeat}" if point.repeat else configuration
        if name in named:
            raise UsageError(f"{point.source}: a second run called {name}")
        named[name] = replace(point, configuration=configuration)
    return named


def _in_order(named: dict[str, Run], path: Path) -> dict[str, Run]:
    """Returns the runs, each behind those that it waits for, with their names in `after`. A run
    that waits for one that cannot run cannot run either."""
    configurations: dict[str, list[str]] = {}  # the repeats of each, and each run by its own name
    for name, run in named.items():
        for key_ in {name, run.configuration}:
            configurations.setdefault(key_, []).append(name)
    for name, run in named.items():
        if unknown := [word for word in run.after if word not in configurations]:
            words = f"{name} waits for {unknown[0]!r}, which is no run of this study"
            raise UsageError(f"{run.source}: after: {words}; it has: {', '.join(named)}")
        awaited = (name for word in run.after for name in configurations[word])
        named[name] = replace(run, after=tuple(awaited))
    sorter = TopologicalSorter({name: () for name in named})
    for name, run in named.items():
        sorter.add(name, *run.after)
    try:
        order = list(sorter.static_order())
    except CycleError as error:
        circle = " waits for ".join(reversed(error.args[1]))
        raise UsageError(f"study {path}: after: {circle}: none of them can start") from error
    runs: dict[str, Run] = {}
    for name in order:
        run = named[name]
        if not run.reason and (lost := [word for word in run.after if runs[word].reason]):
            run = replace(run, spec=None, reason=f"waits for {lost[0]}, which cannot run")
        runs[name] = run
    return runs


def _differing(settings: list[str], points: list[Run], group: Callable[[Run], Any]) -> list[str]:
    """Returns the settings that have two values within a group of points."""
    groups: dict[Any, list[Run]] = {}
    for point in points:
        groups.setdefault(group(point), []).append(point)

    def differs(name: str) -> bool:
        """Returns whether some group has two values of the setting."""
        values = ({repr(point.named[name]) for point in members} for members in groups.values())
        return any(len(group_values) > 1 for group_values in values)

    return list(filter(differs, settings))
