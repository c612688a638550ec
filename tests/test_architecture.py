"""The house: who may import whom, read from the source with ast."""

import ast
from pathlib import Path

import pytest

from tests.conftest import ROOT

ROOMS = ("models", "parallel", "slurm", "analysis")
MAY_IMPORT = {
    "models": {"models"},
    "parallel": {"models", "parallel"},
    "slurm": {"models", "parallel", "slurm"},
    "analysis": {"models", "parallel", "analysis"},
}
# Each heavy library and the only files that may import it.
HOMES = {
    "deepspeed": {"parallel/deepspeed_common.py", "parallel/engines/deepspeed_pipe.py"},
    "megatron": {
        "parallel/cpu.py",
        "parallel/data.py",  # IndexedDataset, inside the function that reads one
        "parallel/layers.py",
        "parallel/engines/megatron.py",
    },
    "transformers": {"models/hf_model.py"},
    "apex": set(),  # probed by name in parallel/kernels.py
    "transformer_engine": set(),
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
    + [
        ROOT / "parallel" / f"{name}.py"
        for name in (
            "layout",
            "spec",
            "study",
            "artifacts",
            "launch",
            "ranges",
            "volumes",
            "sweep",
            "facts",
            "watch",
            "saved",
            "checkpoint",
            "clusters",
            "work",
            "steady",
            "metrics",
            "meters",
        )
    ]
    + [ROOT / "parallel/engines/__init__.py", ROOT / "models/hf.py"],
    ids=lambda p: str(p.relative_to(ROOT)),
)
def test_planning_and_reading_never_load_torch(path):
    assert not reachable(path) & {"torch", "deepspeed", "megatron", "transformers"}


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
