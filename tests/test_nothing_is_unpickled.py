"""No source of ours can unpickle a file: read with ast, so that no path has to be run."""

import ast
import textwrap

import pytest

from tests.conftest import ROOT
from tests.test_architecture import sources

UNPICKLERS = {"pickle", "_pickle", "cPickle", "dill", "cloudpickle", "joblib", "shelve", "marshal"}
NEVER = {"read_pickle", "unsafe_load", "full_load", "unpickle"}
TORCH_STORES = "torch.distributed.checkpoint"  # its readers unpickle .metadata


def unpickles(source: str) -> list[str]:
    """What in a module's source can unpickle something: a line number and a reason each."""
    found = []
    for node in ast.walk(ast.parse(source)):
        names = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        for name in names:
            if name.split(".")[0] in UNPICKLERS or name in ("torch.load", "numpy.load"):
                found.append(f"{node.lineno}: imports {name}")
            if name.startswith(TORCH_STORES):
                found.append(f"{node.lineno}: {name} unpickles its metadata")
        if not isinstance(node, ast.Call):
            continue
        said = {k.arg: getattr(k.value, "value", None) for k in node.keywords}
        called = ast.unparse(node.func)
        if called in ("torch.load", "torch.serialization.load"):
            if said.get("weights_only") is not True:
                found.append(f"{node.lineno}: {called} without weights_only=True")
        elif said.get("allow_pickle") not in (None, False) or said.get("weights_only") is False:
            found.append(f"{node.lineno}: {called} is told to unpickle")
        elif called.rpartition(".")[2] in NEVER:
            found.append(f"{node.lineno}: {called}")
        elif called in ("__import__", "importlib.import_module") and node.args:
            if getattr(node.args[0], "value", None) in UNPICKLERS:
                found.append(f"{node.lineno}: {called}")
    return found


@pytest.mark.parametrize("path", sources(), ids=lambda p: str(p.relative_to(ROOT)))
def test_no_source_can_unpickle(path):
    assert unpickles(path.read_text()) == []


@pytest.mark.parametrize(
    "source",
    [
        "import pickle",
        "def f():\n    import dill as d",
        "import torch\ntorch.load(path)",
        "torch.load(path, weights_only=False)",
        "import numpy as np\nnp.load(path, allow_pickle=True)",
        "pandas.read_pickle(path)",
        "importlib.import_module('pickle')",
        "import torch.distributed.checkpoint as dcp",
        "from torch.distributed.checkpoint import save, FileSystemReader",
        "import torch.distributed.checkpoint.state_dict_loader",
    ],
)
def test_the_check_finds_what_unpickles(source):
    assert unpickles(textwrap.dedent(source))


@pytest.mark.parametrize(
    "source",
    [
        "torch.load(p, weights_only=True)",
        "json.load(f)",
        "np.load(p)",
        "safe_open(p, framework='pt')",
    ],
)
def test_the_check_lets_pass_what_does_not(source):
    assert unpickles(source) == []
