"""The house: who may import whom, read from the source with ast."""

import ast
import functools
import sys
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

from tests.conftest import ROOT

MAY_IMPORT = {
    "base": {"base"},
    "models": {"base", "models"},
    "parallel": {"base", "models", "parallel"},
    "slurm": {"base", "models", "parallel", "slurm"},
    "analysis": {"base", "models", "parallel", "analysis"},
}
# Each heavy library and the only modules that may import it.
HOMES = {
    "deepspeed": {
        "parallel.engines.deepspeed_common",
        "parallel.engines.deepspeed_pipe",
        "parallel.rehearsed_deepspeed",
    },
    "megatron": {
        f"parallel.engines.{name}"
        for name in ("cpu", "layers", "megatron", "megatron_config", "megatron_versions")
        + ("pipeline_layers", "reference_values")
    },
    "transformers": {"models.hf_model"},
    "apex": set(),  # probed by name in parallel/engines/kernels.py
    "transformer_engine": set(),
    **dict.fromkeys(("tensorboard", "wandb", "mlflow"), {"analysis.runs.curve_tools"}),
    "vl_convert": {"analysis.pages.charts"},
}


def module(path: Path) -> str:
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


FILES = [path for room in MAY_IMPORT for path in (ROOT / room).rglob("*.py")]


@functools.cache
def trees() -> dict[str, ast.Module]:
    """The source of every module, parsed."""
    return {module(path): ast.parse(path.read_text()) for path in FILES}


def imported(nodes) -> set[str]:
    """Dotted names that these statements import. `from analysis.published import recomputed`
    imports recomputed, not the package's own file."""
    names = set()
    for node in nodes:
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"relative import of {node.module}"
            of_it = {f"{node.module}.{alias.name}" for alias in node.names}
            names |= of_it if of_it <= trees().keys() else of_it | {node.module}
    return names


def at_start(tree: ast.Module):
    """The statements that run when the module is imported."""
    for node in tree.body:
        if not (isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test)):
            yield from ast.walk(node) if isinstance(node, ast.If | ast.With | ast.Try) else [node]


@functools.cache
def imports() -> dict[str, set[str]]:
    return {name: imported(ast.walk(tree)) for name, tree in trees().items()}


@functools.cache
def imports_at_start() -> dict[str, set[str]]:
    return {name: imported(at_start(tree)) for name, tree in trees().items()}


def root_of(name: str) -> str:
    return name.partition(".")[0]


def test_imports_follow_the_arrows():
    for name, others in imports().items():
        ours = {root_of(other) for other in others} & MAY_IMPORT.keys()
        assert ours <= MAY_IMPORT[root_of(name)], name


@pytest.mark.parametrize("library", HOMES)
def test_each_heavy_library_has_its_homes(library):
    users = {name for name, others in imports().items() if library in map(root_of, others)}
    assert users <= HOMES[library]


def loaded(start: str) -> set[str]:
    """Every package that importing a module of ours loads."""
    seen, queue = set(), [start]
    while queue:
        name = queue.pop()
        if name not in seen:
            seen.add(name)
            queue += imports_at_start().get(name, ())
            queue += [name.rpartition(".")[0]] if "." in name and name in trees() else []
    return {root_of(name) for name in seen}


TORCH_FREE = ("analysis", "slurm", "parallel.config", "parallel.record", "models.hf_config")
TORCH_FREE += ("parallel.sweep", "parallel.gpu_check", "parallel.rehearse", "parallel.engines")
TORCH_FREE += ("parallel.checkpoint.folders", "parallel.checkpoint.__main__")
TORCH_FREE += ("parallel.measure.wire", "parallel.measure.ranges", "parallel.measure.steady_time")


@pytest.mark.parametrize("part", TORCH_FREE)
def test_planning_and_reading_never_load_torch(part):
    """Of parallel.engines its own file alone."""
    rooms = () if part == "parallel.engines" else (f"{part}.",)
    names = [name for name in trees() if name == part or name.startswith(rooms)]
    assert names
    heavy = {"torch", "deepspeed", "megatron", "transformers", "vl_convert", "pandas"}
    assert {name: loaded(name) & heavy for name in names} == dict.fromkeys(names, set())


def test_what_submits_and_what_a_job_does_around_its_run_need_python_alone():
    """A login node, and a node outside its container, may have no package."""
    names = [name for name in trees() if root_of(name) == "slurm"]
    for name in [*names, "parallel.record.environment"]:
        assert loaded(name) <= {*MAY_IMPORT, *sys.stdlib_module_names}, name


ENGINE_LIBRARIES = {
    "ddp": set(),
    "deepspeed_zero": {"deepspeed"},  # and megatron-core's layers, only when tp > 1
    "deepspeed_pipe": {"deepspeed", "megatron"},
    "megatron": {"megatron"},
}


@pytest.mark.parametrize("engine", ENGINE_LIBRARIES)
def test_no_engine_loads_another_engines_library(engine):
    libraries = loaded(f"parallel.engines.{engine}") & {"deepspeed", "megatron", "transformers"}
    assert libraries == ENGINE_LIBRARIES[engine]


def test_every_module_says_what_it_is():
    assert [name for name, tree in trees().items() if not ast.get_docstring(tree)] == []


def test_no_files_import_each_other_in_a_circle():
    # prepare() raises CycleError, which names the files.
    ours = {name: (others & trees().keys()) - {name} for name, others in imports().items()}
    TopologicalSorter(ours).prepare()


# The rooms inside a room, lowest first; rooms of one line do not import each other. Every other
# file there is a command, and stands above them all.
LEVELS = {
    "analysis": [{"common"}, {"logs"}, {"planner"}, {"runs"}, {"published"}, {"pages"}],
    "analysis.logs": [
        {"record", "facts"},
        {"naming", "fact_options"},
        {"model"},
        {"parsing"},
        {"step_time"},
        {"readers"},
        {"copies", "rank_files"},
        {"load"},
    ],
    "parallel": [
        {"config"},
        {"record"},
        {"ranks"},
        {"checkpoint", "measure"},
        {"engines"},
        {"token_files"},
        {"batches"},
        {"trainer"},
    ],
}


def level(room: str, name: str) -> tuple[int, str]:
    """(level, inner room) of a module of a room: `analysis.logs.load` is of room logs, level 1."""
    inner = name.removeprefix(f"{room}.").split(".")[0]
    if name.endswith(".__main__"):
        return len(LEVELS[room]), "a command"
    levels = [i for i, rooms in enumerate(LEVELS[room]) if inner in rooms]
    return (levels[0], inner) if levels else (len(LEVELS[room]), "a command")


@pytest.mark.parametrize("room", LEVELS)
def test_the_rooms_inside_a_room_import_downwards(room):
    up = set()
    for name in (name for name in trees() if name.startswith(f"{room}.")):
        for other in (
            other for other in imports()[name] & trees().keys() if other.startswith(f"{room}.")
        ):
            (mine, here), (theirs, there) = level(room, name), level(room, other)
            if theirs > mine or (theirs == mine and here != there):
                up.add((name, other))
    assert up == set()
