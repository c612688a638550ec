"""A checkpoint is whole or absent, what is damaged is found and named, and nothing is unpickled.

One process, an engine that is a few tensors: the disk is what is tested here.
"""

import contextlib
import errno
import functools
import itertools
import json
import math
import os
import pickle
import re
import threading
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file

from models.config import preset
from parallel.checkpoint import __main__ as checkpoint
from parallel.checkpoint import checkpointer, contents, folders, host_copy
from parallel.checkpoint.contents import KINDS, unpadded
from parallel.checkpoint.folders import Damaged
from parallel.checkpoint.rank_files import Reader, write_rank_file
from parallel.config.layout import Layout
from parallel.engines import optim
from tests.tools.tiny_checkpoint import SIZES, Engine, save_some, saver_of


@pytest.mark.parametrize("behind", [False, True])
def test_what_was_saved_comes_back(behind, tmp_path):
    save_some(tmp_path, [1, 2], async_save=behind)
    engine = Engine()
    saver = saver_of(engine, tmp_path)
    assert saver.load(tmp_path) == 2 and engine.adam_step == 2
    assert engine.numbers() == Engine(2.0).numbers()
    assert saver.load(tmp_path / "step-00000001") == 1
    assert engine.numbers() == Engine(1.0).numbers()
    assert not list(tmp_path.glob(".*"))


def test_training_on_does_not_change_what_is_being_saved_behind_it(tmp_path):
    engine = Engine(1.0)
    saver = saver_of(engine, tmp_path, async_save=True)
    saver.save(1)
    engine.set(7.0)
    saver.wait()
    saver_of(again := Engine(), tmp_path).load(tmp_path)
    assert again.numbers() == Engine(1.0).numbers()


class Stream:
    """A stand-in for CUDA's: work that was asked of it is done when another waits for it."""

    def __init__(self, *_):
        self.asked, self.training_went_on = [], threading.Event()

    def wait_stream(self, other):
        while other.asked:
            other.asked.pop(0)()

    def synchronize(self):
        assert self.training_went_on.wait(60)
        self.wait_stream(self)


class OnGpu(torch.Tensor):
    """Copying from it is work of the current stream."""

    @classmethod
    def __torch_function__(cls, function, types, arguments=(), named=None):
        if function is not torch.Tensor.copy_:
            return super().__torch_function__(function, types, arguments, named)
        target, source = arguments
        work = functools.partial(target.copy_, source.as_subclass(torch.Tensor))
        torch.cuda.current_stream().asked.append(work)


@pytest.fixture
def gpu(monkeypatch):
    """CUDA's streams and pinned memory are stand-ins; the bytes that were pinned, and one more
    stream: the current one."""
    current, pinned, hooks = [Stream()], [], []

    @contextlib.contextmanager
    def stream(inner):
        current.append(inner)
        yield
        current.pop()

    register = host_copy.register_optimizer_step_pre_hook
    monkeypatch.setattr(torch.cuda, "Stream", Stream)
    monkeypatch.setattr(torch.cuda, "stream", stream)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda *_: current[-1])
    monkeypatch.setattr(host_copy, "pin_memory", lambda _, n_bytes: pinned.append(n_bytes))
    kept = lambda hook: hooks.append(register(hook))  # noqa: E731
    monkeypatch.setattr(host_copy, "register_optimizer_step_pre_hook", kept)
    yield pinned
    for hook in hooks:
        hook.remove()


def test_a_gpu_copies_behind_training_until_the_optimizer_changes_the_state(gpu, tmp_path):
    engine, optimizer = Engine(), torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))])
    state = engine.state()
    for piece in state.pieces:
        piece.tensors.update({k: t.as_subclass(OnGpu) for k, t in piece.tensors.items()})
    engine.state = lambda: state
    saver = saver_of(engine, tmp_path, device="cuda")
    side = saver._copy._stream
    for step in (1, 2):
        engine.set(step)
        side.training_went_on.clear()
        saver.save(step)
        assert len(side.asked) == 3 * len(state.pieces)  # it waited for none of them
        optimizer.step()
        engine.set(7.0)
        side.training_went_on.set()
    saver.wait()
    engine.set(3)
    saver.save(3)  # the last one: no optimizer waits for it
    saver.wait()
    for step in (1, 2, 3):
        again = Engine()
        saver_of(again, tmp_path).load(tmp_path / folders.name_of(step))
        assert again.numbers() == Engine(step).numbers()
    assert gpu == [saver.predicted_bytes()]  # once for all, of 12 bytes a parameter


def test_a_run_on_a_gpu_copies_by_itself_where_a_node_has_the_memory(gpu, tmp_path, monkeypatch):
    assert not saver_of(Engine(), tmp_path).copying
    assert not saver_of(Engine(), tmp_path, device="cuda", async_save=False).copying
    assert not saver_of(Engine(), tmp_path, device="cuda", save_interval=0).copying
    needed = saver_of(Engine(), tmp_path, device="cuda").predicted_bytes()
    for free, mib, copies in ((needed, 1 << 20, True), (needed - 1, 0, False), (needed, 1, False)):
        monkeypatch.setattr(psutil, "virtual_memory", lambda n=free: SimpleNamespace(available=n))
        monkeypatch.setenv("SLURM_MEM_PER_NODE", str(mib))
        saver = saver_of(Engine(), tmp_path, device="cuda")
        assert (saver._copy is not None) == copies
        assert f"while training {'goes on' if copies else 'waits'}" in saver.copying


def test_waiting_for_a_save_behind_is_time_that_training_was_blocked(tmp_path, monkeypatch):
    clock = SimpleNamespace(perf_counter=itertools.count().__next__)
    monkeypatch.setattr(checkpointer, "time", clock)
    (event,) = save_some(tmp_path, [1], async_save=True).events()
    assert event.blocked_s > 1  # from the snapshot's begin to its end, and then in `wait`


def test_a_deletion_that_fails_is_told_and_the_save_stands(tmp_path, monkeypatch):
    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(folders, "retain", full)
    saved, deletion = save_some(tmp_path, [1]).events()
    assert (saved.event, saved.problem, deletion.event) == ("save", "", "delete")
    assert saved.bytes > 0 and "No space left" in deletion.problem


def test_what_a_killed_save_did_not_delete_is_deleted_when_the_run_goes_on(tmp_path):
    """The kill came between the save and the deletion; another run's folder loses nothing."""
    save_some(tmp_path, [1, 2, 3])
    assert saver_of(Engine(), tmp_path / "other", keep_last=1).load(tmp_path) == 3
    assert folders.steps_in(tmp_path) == [1, 2, 3]
    assert saver_of(Engine(), tmp_path, keep_last=2, steps=3).load(tmp_path) == 3
    assert folders.steps_in(tmp_path) == [2, 3]
    assert saver_of(Engine(), tmp_path, keep_last=1).load(tmp_path / "step-00000002") == 2
    assert folders.steps_in(tmp_path) == [2, 3]  # the newest was not read: it may be damaged


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) * 2 // 3] ^= 4
    path.write_bytes(content)


RANK, MANIFEST = "rank-00000.safetensors", "manifest.json"


@pytest.mark.parametrize("hurt", [flip, Path.unlink])
@pytest.mark.parametrize("name", [RANK, MANIFEST])
def test_damage_is_found_and_named_before_training_goes_on(hurt, name, tmp_path):
    save_some(tmp_path, [1, 2])
    hurt(tmp_path / "step-00000002" / name)
    engine = Engine()
    with pytest.raises(Damaged, match=f"step-00000002/{name}.*delete .*/step-00000002 to take"):
        saver_of(engine, tmp_path).load(tmp_path)
    assert engine.adam_step == 0  # what was read was not taken for the state


@pytest.mark.parametrize(
    ("chosen", "changed"),
    [
        ({"steps": 200}, "learning rates of a run of 200 steps not 100"),
        ({"steps": 200, "lr_schedule": "constant"}, "lr_schedule constant not cosine"),
        ({"log_interval": 5}, ""),
    ],
)
def test_a_learning_rate_that_jumps_is_said(chosen, changed, tmp_path):
    save_some(tmp_path, [1])
    saver = saver_of(Engine(), tmp_path, **chosen)
    assert saver.load(tmp_path) == 1
    (event,) = saver.events()
    assert event.changed == changed and event.line().endswith(changed or "at iteration 1")


@pytest.mark.parametrize("behind", [False, True])
def test_a_mistake_of_ours_ends_the_run_and_not_the_last_checkpoint(behind, tmp_path, monkeypatch):
    saver = save_some(tmp_path, [1], async_save=behind)
    monkeypatch.setattr(checkpointer, "write_rank_file", lambda *_: 1 / 0)
    with pytest.raises(RuntimeError, match="rank 0: ZeroDivisionError"):
        saver.save(2)
        while True:
            saver.raise_failure()  # what every step asks
    assert folders.steps_in(tmp_path) == [1]


def test_a_disk_without_room_is_not_even_begun_to_be_filled(tmp_path, monkeypatch):
    saver = saver_of(Engine(), tmp_path)
    usage = SimpleNamespace(free=saver.predicted_bytes() - 1)
    monkeypatch.setattr(checkpointer.shutil, "disk_usage", lambda _: usage)
    saver.save(1)
    assert re.search("could not save.* bytes are needed", saver.events()[0].line())
    assert folders.steps_in(tmp_path) == []


class Bomb:
    def __reduce__(self):
        return (os.mkdir, ("exploded",))


def test_a_pickle_in_the_folder_is_not_executed(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    save_some(tmp_path, [1])
    folder, bomb = tmp_path / "step-00000001", pickle.dumps(Bomb())
    (folder / "model.pt").write_bytes(bomb)
    assert saver_of(Engine(), tmp_path).load(folder) == 1
    for name in (RANK, MANIFEST):
        (folder / name).write_bytes(bomb)
        with pytest.raises(Damaged, match=name):
            saver_of(Engine(), tmp_path).load(folder)
    assert not Path("exploded").exists()
    pickle.loads(bomb)
    assert Path("exploded").exists()  # so it would have


def test_sizes_are_predicted_and_checked(tmp_path):
    saver = save_some(tmp_path, [1])
    predicted = saver.predicted_bytes()
    assert predicted == 12 * preset("tiny", **SIZES).n_params
    size = (tmp_path / "step-00000001" / RANK).stat().st_size
    assert predicted < size < predicted + 15_000  # and a header
    engine = Engine()
    del engine.tensors["norm.bias"]
    saver = saver_of(engine, tmp_path)
    saver.save(2)
    assert "predicted were" in saver.events()[0].problem
    assert folders.steps_in(tmp_path) == [1]


def test_weights_are_exported_and_start_a_new_training(tmp_path, capsys):
    save_some(tmp_path / "ck", [2])
    saved, out = Engine(2.0).tensors, str(tmp_path / "fp32")
    assert checkpoint.main(["export", str(tmp_path / "ck"), str(tmp_path / "bf16")]) == 0
    for folder, name in ((tmp_path / "bf16", "bfloat16"), (tmp_path / "fp32", "float32")):
        if name == "float32":
            words = ["export", str(tmp_path / "ck"), out, "--dtype", "fp32"]
            assert checkpoint.main(words) == 0
        stored = load_file(folder / "model.safetensors")
        assert {tensor.dtype for tensor in stored.values()} == {getattr(torch, name)}
        engine = Engine()
        assert saver_of(engine, tmp_path).load(folder) == 0
        for each, kinds in engine.tensors.items():
            wanted = saved[each]["param"].to(getattr(torch, name)).float()
            assert torch.equal(kinds["param"], wanted)
    capsys.readouterr()
    assert checkpoint.main(["verify", out]) == 0
    assert capsys.readouterr().out.startswith(f"{out}: names and shapes are good")
    for wrong, why in (
        (["export", out, str(tmp_path / "again")], "holds Hugging Face's weights already"),
        ([*words[:2], "x", "--format", "universal", "--dtype", "fp32"], "--dtype is of the format"),
    ):
        assert checkpoint.main(wrong) == 2
        assert why in capsys.readouterr().err


def test_an_export_never_replaces_what_is_there(tmp_path, capsys):
    """Least of all the run that it is of."""
    save_some(tmp_path / "ck", [1])
    (tmp_path / "file").write_text("mine")
    for out in (tmp_path / "ck", tmp_path / "file", Path(".")):
        assert checkpoint.main(["export", str(tmp_path / "ck"), str(out)]) == 2
        assert f"{out} exists already: name a new folder\n" in capsys.readouterr().err
    assert folders.verify(tmp_path / "ck" / "step-00000001")
    assert (tmp_path / "file").read_text() == "mine"


def test_another_models_checkpoint_is_refused_in_words(tmp_path):
    save_some(tmp_path, [1])
    with pytest.raises(checkpoint.UsageError, match="hidden 8 not 16"):
        saver_of(Engine(), tmp_path, hidden=16).load(tmp_path)


class GroupAdam(torch.optim.Optimizer):
    """Counts as the FusedAdam of apex and of Transformer Engine do: in the groups, from the first
    step on, and only in groups that have parameters."""

    def __init__(self, groups):
        super().__init__(groups, {})

    @torch.no_grad()
    def step(self):
        group = self.param_groups[1]
        (p,) = group["params"]
        group["step"] = group.get("step", 0) + 1
        first, second = (self.state[p].setdefault(k, torch.zeros_like(p)) for k in KINDS[1:])
        first.lerp_(p.grad, 0.1)
        second.lerp_(p.grad**2, 0.05)
        p -= first / (1 - 0.9 ** group["step"]) / (second / (1 - 0.95 ** group["step"])).sqrt()


@pytest.mark.parametrize("kind", [GroupAdam, torch.optim.AdamW])
@pytest.mark.parametrize("first", [0, 3])
def test_adam_goes_on_with_its_step_wherever_it_counts(kind, first):
    def trained(steps: int, before: list | None = None) -> list:
        p = torch.nn.Parameter(torch.arange(1.0, 7.0))
        adam = kind([{"params": []}, {"params": [p]}])
        held = optim.adam_tensors(adam, p).values()
        if before:
            for tensor, saved in zip(held, before[1:], strict=True):
                tensor.data.copy_(torch.tensor(saved))
            optim.set_adam_step(adam, before[0])
        for _ in range(steps):
            p.grad = p.detach() ** 2
            adam.step()
        return [optim.adam_step(adam), *(tensor.tolist() for tensor in held)]

    straight = trained(first + 3)
    # Exact: one process, the same operations; a list of fp32 numbers loses no bit of them.
    assert straight[0] == first + 3 and trained(3, trained(first)) == straight


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_any_cut_reads_back_as_any_other(data, tmp_path_factory):
    """Pieces written by one layout (boxes along one dimension, runs of elements in each, rows that
    pad the vocabulary) give every part of another exactly."""
    shape = data.draw(st.tuples(st.integers(1, 7), st.integers(1, 6)))
    padded = torch.zeros(shape[0] + 10, shape[1])
    padded[: shape[0]] = torch.randn(shape)

    def layout() -> list[contents.Piece]:
        dim, parts = data.draw(st.sampled_from((0, 1))), data.draw(st.integers(1, shape[0]))
        if dim == 1:  # megatron pads the vocabulary's rows only; columns are divided exactly
            parts = math.gcd(parts, shape[1])
        n, pieces = -(-shape[dim] // parts), []
        for begin in range(0, parts * n, n):
            offset, part = ((begin, 0), (n, shape[1])) if dim == 0 else ((0, begin), (shape[0], n))
            flat = padded.narrow(dim, begin, n)[: part[0]].reshape(-1)
            cuts = sorted(data.draw(st.lists(st.integers(0, len(flat)), max_size=2)))
            for a, b in itertools.pairwise([0, *cuts, len(flat)]):
                tensors = {k: flat[a:b] * (1 + i) for i, k in enumerate(KINDS)}
                pieces += unpadded("w", shape, offset, part, a, tensors)
        return pieces

    folder, files = tmp_path_factory.mktemp("cut"), []
    for number, piece in enumerate(layout()):
        files.append(write_rank_file(folder, number, [piece]))
    reader = Reader(folder, json.loads(json.dumps({"files": files})))
    for piece in layout():
        wanted = dict(piece.tensors)
        piece.tensors.update({k: torch.full_like(t, math.nan) for k, t in wanted.items()})
        reader.fill([piece])
        assert all(torch.equal(piece.tensors[kind], wanted[kind]) for kind in KINDS)


@pytest.mark.parametrize("padding", [0, 3])
def test_a_live_parameter_of_two_parts_is_two_pieces_wherever_a_slice_of_it_begins(padding):
    """The second tp rank's fc1: rows 2 and 3 of the gate, then rows 2 and 3 of up; 3 columns."""
    whole = {name: torch.arange(12.0).view(4, 3) + start for name, start in (("g", 0), ("u", 50))}
    live = torch.cat([whole["g"][2:], torch.full((padding, 3), math.nan), whole["u"][2:]]).view(-1)
    parts = {"g": (2 + padding, 3), "u": (2, 3)}
    references = [
        {"name": name, "shape": (4, 3), "offset": (2, 0), "part": part}
        for name, part in parts.items()
    ]
    parameter, layout = SimpleNamespace(references=references), Layout(tp=2, dp=2)
    for start in range(len(live)):
        for stop in range(start + 1, len(live) + 1):
            flat = {kind: live[start:stop] for kind in KINDS}
            found = contents.pieces_of([(parameter, flat, start)], layout, rank=1, shards=2)
            for piece in found:
                part = whole[piece.name][2:].reshape(-1)[piece.start : piece.start + len(piece)]
                assert (piece.offset, piece.part) == ((2, 0), (2, 3))
                assert all(torch.equal(tensor, part) for tensor in piece.tensors.values())
            assert sum(map(len, found)) == int(live[start:stop].isfinite().sum())


def test_copies_share_what_they_save_and_a_tied_output_layer_saves_nothing():
    whole, shape = {"param": torch.arange(8.0)}, (4, 2)
    reference = {"name": "embedding.word.weight", "shape": shape, "offset": (0, 0), "part": shape}
    trained = [(SimpleNamespace(references=[reference]), whole, 0)]

    def saved(layout: Layout, rank: int, shards: int = 1) -> list[tuple[int, int]]:
        pieces = contents.slices_to_save(contents.pieces_of(trained, layout, rank, shards))
        return [(piece.start, len(piece)) for piece in pieces]

    assert [saved(Layout(dp=3), rank) for rank in range(3)] == [[(0, 2)], [(2, 3)], [(5, 3)]]
    assert saved(Layout(dp=2), 1, shards=2) == saved(Layout(), 0) == [(0, 8)]
    assert [saved(Layout(pp=2), rank) for rank in (0, 1)] == [[(0, 8)], []]
    assert unpadded("w", shape, (0, 0), shape, 8, whole) == []  # what begins behind the part
