"""A rank reads of a checkpoint the bytes that it holds, whatever layout wrote it, and the ranks
sum up all files between them."""

import builtins
import io
import json
import math
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple

import pytest
import torch

from base.errors import UsageError
from models import hf_weights
from models.config import parameter_shapes, preset
from models.hf_weights import write_hugging_face
from parallel.checkpoint import contents, folders, loading
from parallel.checkpoint.contents import KINDS
from parallel.checkpoint.rank_files import Reader, write_rank_file
from parallel.config.layout import Layout
from parallel.ranks import Ranks, attempt
from tests.tools import tiny_checkpoint
from tests.tools.tiny_checkpoint import save_some, saver_of

SIZES = {"n_layer": 2, "hidden": 64}
SHAPES = parameter_shapes(preset("tiny-llama", **SIZES))
torch.set_num_threads(1)
LAYOUTS = {
    "tp2": (Layout(tp=2), 1),
    "tp4": (Layout(tp=4), 1),
    "pp2": (Layout(pp=2), 1),
    "ddp3": (Layout(dp=3), 1),
    "tp2-dp2-zero1": (Layout(tp=2, dp=2), 2),
    "zero1-5": (Layout(dp=5), 5),
    "fsdp2-3": (Layout(dp=3), 3),
}


def value(name: str, kind: str) -> torch.Tensor:
    first = list(SHAPES).index(name) * 10**6 + KINDS.index(kind) * 10**5
    return torch.arange(first, first + math.prod(SHAPES[name])).float().view(SHAPES[name])


def pieces_of(layout: str, rank: int) -> list[contents.Piece]:
    """The pieces that a rank holds: Megatron-LM's split, then the part of a ZeRO or FSDP2 rank."""
    split, shards = LAYOUTS[layout]
    coords, trained, behind = split.coords(rank), [], 0
    for name, shape in SHAPES.items():
        block = int(name.split(".")[1]) if "blocks" in name else int("embedding" not in name)
        if block * split.pp // 2 != coords["pp"]:
            continue
        axis = 1 if name.endswith(("attn.out.weight", "mlp.down.weight")) else 0
        tp = 1 if "norm" in name else split.tp
        n = -(-shape[axis] // tp)  # the last part has rows that pad the vocabulary
        offset, part = [0] * len(shape), list(shape)
        offset[axis], part[axis] = coords["tp"] % tp * n, n
        here = {k: value(name, k).narrow(axis, 0, shape[axis]) for k in KINDS}
        pad = [0, 0] * (len(shape) - 1 - axis) + [0, n * tp - shape[axis]]
        flat = {
            k: torch.nn.functional.pad(t, pad).narrow(axis, offset[axis], n).reshape(-1)
            for k, t in here.items()
        }
        reference = {"name": name, "shape": shape, "offset": tuple(offset), "part": tuple(part)}
        trained.append((reference, flat, tp > 1, behind))
        behind += math.prod(part)
    rows = []
    for reference, flat, is_split, place in trained:
        size, shard = len(flat["param"]), coords["dp"] % shards
        if layout.startswith("fsdp2"):  # of each parameter; ZeRO: of all of them in a row
            place, total = 0, size
        else:
            total = behind
        first = min(max(total * shard // shards - place, 0), size)
        last = min(max(total * (shard + 1) // shards - place, 0), size)
        parameter = SimpleNamespace(references=[reference], tensor_model_parallel=is_split)
        rows.append((parameter, {k: t[first:last] for k, t in flat.items()}, first))
    return contents.pieces_of(rows, split, rank, shards)


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """The folder and manifest of a checkpoint that a layout saved."""

    def of(layout: str) -> tuple[Path, dict]:
        folder, files = tmp_path_factory.mktemp(layout), []
        for rank in range(LAYOUTS[layout][0].world_size):
            pieces = contents.slices_to_save(pieces_of(layout, rank))
            files.append(write_rank_file(folder, rank, pieces))
        return folder, json.loads(json.dumps({"files": files}))

    return of


@pytest.fixture
def read(monkeypatch):
    """Counts the bytes that are read of files: {"bytes": ...}."""
    counted = {"bytes": 0}

    class File(io.FileIO):
        def readinto(self, target):
            n = super().readinto(target)
            counted["bytes"] += n
            return n

        def read(self, size=-1):
            content = super().read(size)
            counted["bytes"] += len(content)
            return content

    def opened(path, mode="r", buffering=-1):
        return (
            File(path) if (mode, buffering) == ("rb", 0) else builtins.open(path, mode, buffering)
        )

    monkeypatch.setattr(Path, "open", opened)
    return counted


class Load(NamedTuple):
    """What a rank holds, in bytes; whether what it read is right."""

    held: int
    equal: bool


def load(folder: Path, manifest: dict, layout: str, rank: int) -> Load:
    reader, pieces = Reader(folder, manifest), pieces_of(layout, rank)
    wanted = [dict(piece.tensors) for piece in pieces]
    for piece in pieces:
        piece.tensors.update({k: torch.full_like(t, math.nan) for k, t in piece.tensors.items()})
    reader.fill(pieces)
    equal = all(
        torch.equal(piece.tensors[k], t)
        for piece, tensors in zip(pieces, wanted, strict=True)
        for k, t in tensors.items()
    )
    return Load(12 * sum(map(len, pieces)), equal)


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("tp2", "tp4"),
        ("tp4", "tp2"),
        ("tp2", "pp2"),
        ("pp2", "tp4"),
        ("tp2-dp2-zero1", "zero1-5"),
        ("zero1-5", "tp4"),
        ("fsdp2-3", "tp2-dp2-zero1"),
        ("tp4", "fsdp2-3"),
        ("fsdp2-3", "ddp3"),
    ],
)
def test_a_rank_reads_what_it_holds(before, after, saved, read):
    folder, manifest = saved(before)
    for rank in range(LAYOUTS[after][0].world_size):
        read["bytes"] = 0
        loaded = load(folder, manifest, after, rank)
        assert loaded.equal
        assert loaded.held <= read["bytes"] <= 1.1 * loaded.held, (rank, read["bytes"])


@pytest.mark.parametrize("layout", ["tp4", "zero1-5"])
def test_of_weights_alone_a_rank_reads_its_rows(layout, tmp_path, monkeypatch):
    config, sizes = preset("tiny-llama", **SIZES), []
    tensor = hf_weights.HuggingFaceFolder.tensor
    write_hugging_face(tmp_path / "w", config, lambda name: value(name, "param"), "fp32")

    def read(*arguments) -> torch.Tensor:
        numbers = tensor(*arguments)
        sizes.append(numbers.numel())
        return numbers

    monkeypatch.setattr(hf_weights.HuggingFaceFolder, "tensor", read)
    filled: list[int] = []  # by one rank after the other
    monkeypatch.setattr(loading, "_check_all_filled", lambda *of: filled.extend(of[-1]))
    for rank in range(LAYOUTS[layout][0].world_size):
        sizes.clear()
        pieces = pieces_of(layout, rank)
        wanted = [piece.tensors["param"].clone() for piece in pieces]
        for piece in pieces:
            piece.tensors["param"] = torch.full_like(piece.tensors["param"], math.nan)
        state = contents.State(pieces)
        engine = SimpleNamespace(state=lambda state=state: state, restore=lambda *_: None)
        spec = SimpleNamespace(model=config, implementation="gpt")
        loading._load_weights(engine, spec, Ranks(0, 1, lambda: None), tmp_path / "w")
        assert sum(sizes) <= 1.1 * sum(map(len, pieces))
        for piece, numbers in zip(pieces, wanted, strict=True):
            assert torch.equal(piece.tensors["param"], numbers)
    assert sum(filled) == config.n_params


def test_ranks_that_hold_less_than_the_model_are_told_so(tmp_path):
    config = preset("tiny-llama", **SIZES)
    write_hugging_face(tmp_path / "w", config, lambda name: value(name, "param"), "fp32")
    state = contents.State(pieces_of("tp4", 0))  # and nobody has the other three quarters
    engine = SimpleNamespace(state=lambda: state, restore=lambda *_: None)
    spec = SimpleNamespace(model=config, implementation="gpt")
    held = sum(map(len, contents.slices_to_save(state.pieces)))
    with pytest.raises(UsageError, match=f"fill {held} of .* {config.n_params} parameters"):
        loading._load_weights(engine, spec, Ranks(0, 1, lambda: None), tmp_path / "w")


class Threads(Ranks):
    """Ranks that are threads of one process: each exchange is by a list that they share."""

    def __init__(self, rank: int, barrier: threading.Barrier, shared: list):
        self.rank, self.world, self._ticks = rank, len(shared), 0
        self._barrier, self._shared = barrier, shared

    def gather(self, value):
        self._shared[self.rank] = value
        self._barrier.wait(60)
        values = list(self._shared)
        self._barrier.wait(60)
        return values

    def on_all(self, work, *arguments):
        return self.gather(work(*arguments))

    def on_first(self, work, *arguments):
        return self.gather(work(*arguments) if self.rank == 0 else None)[0]

    def on_progress(self):
        pass


def test_rank_0_alone_reads_the_manifest_and_all_hear_of_damage(tmp_path, monkeypatch):
    readers, manifest_of = [], folders.read_manifest
    save_some(tmp_path, [1])
    barrier, shared, world = threading.Barrier(3), [None] * 3, 3
    spec = saver_of(tiny_checkpoint.Engine(), tmp_path).spec

    def run(rank: int) -> tuple[list, str]:
        engine, ranks = tiny_checkpoint.Engine(), Threads(rank, barrier, shared)
        pieces = [replace(p, copy=contents.Copy(rank, world)) for p in engine.state().pieces]
        engine.state = lambda: contents.State(pieces)
        _, problem = attempt(loading.load, engine, spec, ranks, tmp_path)
        return engine.numbers(), problem

    def read_manifest(folder: Path) -> dict:
        readers.append(threading.current_thread())
        return manifest_of(folder)

    monkeypatch.setattr(folders, "read_manifest", read_manifest)
    with ThreadPoolExecutor(world) as pool:
        wanted = tiny_checkpoint.Engine(1.0).numbers()
        assert list(pool.map(run, range(world))) == [(wanted, "")] * world
        assert len(readers) == 1
        path = tmp_path / folders.name_of(1) / "rank-00000.safetensors"
        path.write_bytes(path.read_bytes()[:-1] + b"?")
        problems = [problem for _, problem in pool.map(run, range(world))]
    assert all(f"{path} is damaged" in problem for problem in problems)
