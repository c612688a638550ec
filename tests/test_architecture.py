"""The house: who may import whom, read from the source with ast."""

import ast
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

from tests.conftest import ROOT

ROOMS = ("base", "models", "parallel", "slurm", "analysis")
MAY_IMPORT = {
    "base": {"base"},
    "models": {"base", "models"},
    "parallel": {"base", "models", "parallel"},
    "slurm": {"base", "models", "parallel", "slurm"},
    "analysis": {"base", "models", "parallel", "analysis"},
}
# Each heavy library and the only files that may import it.
HOMES = {
    "deepspeed": {
        "parallel/engines/deepspeed_common.py",
        "parallel/engines/deepspeed_pipe.py",
        "parallel/rehearsed_deepspeed.py",
    },
    "megatron": {
        "parallel/engines/cpu.py",
        "parallel/engines/layers.py",
        "parallel/engines/megatron.py",
    },
    "transformers": {"models/hf_model.py"},
    "apex": set(),  # probed by name in parallel/engines/kernels.py
    "transformer_engine": set(),
    **{
        library: {"analysis/measured/curve_tools.py"}
        for library in ("tensorboard", "wandb", "mlflow")
    },
    "vl_convert": {"analysis/pages/page_html.py"},
    "altair": {"analysis/pages/altair_charts.py"},
}


def sources() -> list[Path]:
    return sorted(p for room in ROOMS for p in (ROOT / room).rglob("*.py"))


def imports(path: Path, everywhere: bool = True) -> set[str]:
    """Dotted names that a file imports; with everywhere=False only those at its top level."""
    tree = ast.parse(path.read_text())
    nodes = ast.walk(tree) if everywhere else _top_level(tree)
    found = set()
    for node in nodes:
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            found |= {f"{node.module}.{alias.name}" for alias in node.names} | {node.module}
    return found


def _top_level(tree: ast.Module):
    for node in tree.body:
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test):
            continue
        yield from ast.walk(node) if isinstance(node, ast.If | ast.With | ast.Try) else [node]


def module(path: Path) -> str:
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


@pytest.mark.parametrize("path", sources(), ids=lambda p: str(p.relative_to(ROOT)))
def test_imports_follow_the_arrows(path):
    room = path.relative_to(ROOT).parts[0]
    ours = {name.split(".")[0] for name in imports(path)} & set(ROOMS)
    assert ours <= MAY_IMPORT[room]


@pytest.mark.parametrize("library", HOMES)
def test_each_heavy_library_has_its_homes(library):
    users = {
        str(path.relative_to(ROOT))
        for path in sources()
        if any(name.split(".")[0] == library for name in imports(path))
    }
    assert users <= HOMES[library]


def reachable(start: Path) -> set[str]:
    """Every module that importing `start` loads, ours followed and others named, top level only."""
    by_name = {module(path): path for path in sources()}
    seen, queue = set(), [module(start)]
    while queue:
        name = queue.pop()
        if name in seen:
            continue
        seen.add(name)
        if name not in by_name:
            continue
        queue += [n for n in imports(by_name[name], everywhere=False)]
        queue += [name.rpartition(".")[0]] if "." in name else []
    return {name.split(".")[0] for name in seen}


@pytest.mark.parametrize(
    "path",
    [p for p in sources() if p.relative_to(ROOT).parts[0] in ("analysis", "slurm")]
    + [p for room in ("config", "record") for p in sorted((ROOT / "parallel" / room).rglob("*.py"))]
    + [
        ROOT / "parallel" / f"{name}.py"
        for name in (
            "sweep",
            "gpu_check",
            "checkpoint/folders",
            "checkpoint/__main__",
            "measure/ranges",
            "measure/steady_time",
            "rehearse",
            "engines/__init__",
        )
    ]
    + [ROOT / "models/hf.py"],
    ids=lambda p: str(p.relative_to(ROOT)),
)
def test_planning_and_reading_never_load_torch(path):
    assert path.exists()
    assert not reachable(path) & {"torch", "deepspeed", "megatron", "transformers", "vl_convert"}


ENGINE_LIBRARIES = {
    "ddp": set(),
    "deepspeed_zero": {"deepspeed"},  # and megatron-core's layers, only when tp > 1
    "deepspeed_pipe": {"deepspeed", "megatron"},
    "megatron": {"megatron"},
}


@pytest.mark.parametrize("engine", ENGINE_LIBRARIES)
def test_no_engine_loads_another_engines_library(engine):
    loaded = reachable(ROOT / "parallel/engines" / f"{engine}.py")
    assert loaded & {"deepspeed", "megatron", "transformers"} == ENGINE_LIBRARIES[engine]


def test_every_module_says_what_it_is():
    missing = [str(p) for p in sources() if not ast.get_docstring(ast.parse(p.read_text()))]
    assert not missing


def files_imported(path: Path) -> set[str]:
    """Our modules that a file imports anywhere in it, imports inside functions too.

    `from analysis.published import recomputed` imports recomputed, not the package's own file.
    """
    ours, found = {module(p) for p in sources()}, set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            names = {f"{node.module}.{alias.name}" for alias in node.names}
            found |= (names & ours) if names <= ours else (names | {node.module})
    return (found & ours) - {module(path)}


def test_no_files_import_each_other_in_a_circle():
    # prepare() raises CycleError, which names the files.
    TopologicalSorter({module(p): files_imported(p) for p in sources()}).prepare()


# The rooms inside a room, lowest first; rooms of one line do not import each other. Every other
# file there is a command, and stands above them all.
LEVELS = {
    "analysis": [{"common"}, {"logs"}, {"planner"}, {"measured"}, {"published"}, {"pages"}],
    "analysis.logs": [{"record"}, {"parsing"}, {"readers"}, {"load"}],
    "parallel": [
        {"config"},
        {"record"},
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
    levels = [i for i, rooms in enumerate(LEVELS[room]) if inner in rooms]
    return (levels[0], inner) if levels else (len(LEVELS[room]), "a command")


@pytest.mark.parametrize("room", LEVELS)
def test_the_rooms_inside_a_room_import_downwards(room):
    up = set()
    for path in sorted((ROOT / room.replace(".", "/")).rglob("*.py")):
        for name, other in ((module(path), other) for other in files_imported(path)):
            if name != room and other.startswith(f"{room}."):
                (mine, here), (theirs, there) = level(room, name), level(room, other)
                if theirs > mine or (theirs == mine and here != there):
                    up.add((name, other))
    assert up == set()
