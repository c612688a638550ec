"""No source of ours can unpickle code: read with ast, so that no path has to be run. The one reader
of pickles makes nothing but what it knows."""

import argparse
import ast
import os
import pickle
import re

import pytest
import torch

from base.errors import UsageError
from parallel.checkpoint.doors import pickles
from tests.conftest import ROOT
from tests.test_architecture import MAY_IMPORT

UNPICKLERS = {"pickle", "_pickle", "cPickle", "dill", "cloudpickle", "joblib", "shelve", "marshal"}
NEVER = {"read_pickle", "unsafe_load", "full_load", "unpickle"}
READER = ROOT / "parallel" / "checkpoint" / "doors" / "pickles.py"
TORCH_STORES = "torch.distributed.checkpoint"  # its readers unpickle .metadata
# The classes of what is in it.
TABLES = tuple(f"{TORCH_STORES}.{name}" for name in ("metadata.", "filesystem._StorageInfo"))


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
            if name.startswith(TORCH_STORES) and not name.startswith(TABLES):
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
    files = [path for room in MAY_IMPORT for path in (ROOT / room).rglob("*.py")]
    findings = {str(path): unpickles(path.read_text()) for path in files if path != READER}
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


def test_the_one_reader_of_pickles_says_what_it_finds():
    assert [re.sub(r"^\d+: ", "", line) for line in unpickles(READER.read_text())] == [
        "imports pickle"
    ]


class Attack:
    """Runs a command when it is unpickled."""

    def __reduce__(self):
        return os.system, (f"touch {self.mark}",)


@pytest.mark.parametrize("store", ["plain", "torch"])
@pytest.mark.parametrize("hidden", ["alone", "in a table", "behind getattr"])
def test_a_pickle_that_runs_code_is_refused_by_name_and_does_not_run(store, hidden, tmp_path):
    attack = Attack()
    attack.mark = tmp_path / "ran"
    content = {"alone": attack, "in a table": {"args": [attack]}}.get(hidden)
    file, read = tmp_path / "file", pickles.read_table if store == "plain" else pickles.load
    if hidden == "behind getattr":
        content = {"step": 1, "attack": Caught(attack)}
    file.write_bytes(pickle.dumps(content)) if store == "plain" else torch.save(content, file)
    with pytest.raises(UsageError, match=r"is refused: it holds posix\.system"):
        read(file)
    assert not attack.mark.exists()


class Caught:
    """Names what it holds through a class that is known and harmless."""

    def __init__(self, attack):
        self.attack = attack

    def __reduce__(self):
        return getattr, (self.attack, "mark")


def test_what_is_known_and_inert_is_read(tmp_path):
    table = {"size": torch.Size((2, 3)), "dtype": torch.bfloat16}
    (tmp_path / "plain").write_bytes(pickle.dumps(table))
    assert pickles.read_table(tmp_path / "plain") == table
    torch.save({"args": argparse.Namespace(hidden_size=8), "x": torch.arange(3)}, tmp_path / "t")
    read = pickles.load(tmp_path / "t")
    assert read["args"].hidden_size == 8 and read["x"].tolist() == [0, 1, 2]
