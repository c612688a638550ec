"""No source of ours can unpickle a file: read with ast, so that no path has to be run."""

import ast

import pytest

from tests.test_architecture import FILES

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
        flags = {k.arg: getattr(k.value, "value", None) for k in node.keywords}
        called = ast.unparse(node.func)
        if called in ("torch.load", "torch.serialization.load"):
            if flags.get("weights_only") is not True:
                found.append(f"{node.lineno}: {called} without weights_only=True")
        elif flags.get("allow_pickle") not in (None, False) or flags.get("weights_only") is False:
            found.append(f"{node.lineno}: {called} is told to unpickle")
        elif called.rpartition(".")[2] in NEVER:
            found.append(f"{node.lineno}: {called}")
        elif called in ("__import__", "importlib.import_module") and node.args:
            if getattr(node.args[0], "value", None) in UNPICKLERS:
                found.append(f"{node.lineno}: {called}")
    return found


def test_no_source_can_unpickle():
    findings = {str(path): unpickles(path.read_text()) for path in FILES}
    assert len(findings) > 150 and {path: found for path, found in findings.items() if found} == {}


@pytest.mark.parametrize(
    ("source", "lines"),
    [
        ("import pickle", 1),
        ("def f():\n    import dill as d", 1),
        ("import torch\ntorch.load(path)", 1),
        ("torch.load(path, weights_only=False)", 1),
        ("import numpy as np\nnp.load(path, allow_pickle=True)", 1),
        ("pandas.read_pickle(path)", 1),
        ("importlib.import_module('pickle')", 1),
        ("import torch.distributed.checkpoint as dcp", 1),
        ("from torch.distributed.checkpoint import save, FileSystemReader", 2),
        ("import torch.distributed.checkpoint.state_dict_loader", 1),
        ("torch.load(p, weights_only=True)", 0),
        ("json.load(f)\nnp.load(p)\nsafe_open(p, framework='pt')", 0),
    ],
)
def test_the_check_finds_what_unpickles(source, lines):
    assert len(unpickles(source)) == lines
