"""DeepSpeed's checkpoints come in and go out: its own writer and loader, on CPU, bit for bit."""

import json
import os
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from base.errors import UsageError
from models.config import GPTConfig, parameter_shapes
from models.hf_config import hugging_face_names
from models.hf_weights import to_hugging_face, write_hugging_face
from parallel.checkpoint import __main__ as checkpoint
from parallel.checkpoint import doors, folders
from parallel.checkpoint.contents import KINDS
from parallel.checkpoint.doors import ours
from parallel.checkpoint.rank_files import Reader
from tests.checkpoint_worker import SIZES, save_of
from tests.conftest import run_worker

CONFIG = GPTConfig(**SIZES)
HF = "deepspeed_zero:zero_stage=2,implementation=hf"
RUNS = (
    "deepspeed_zero:zero_stage=2",
    "deepspeed_zero:zero_stage=1",
    "deepspeed_zero:zero_stage=3",
    "deepspeed_zero:zero_stage=1,precision=bf16",
    HF,
)
RESUMED = ("deepspeed_zero:zero_stage=2", "ddp", "fsdp2:zero_stage=3")
RELOADED = ("deepspeed_zero:zero_stage=1", "deepspeed_zero:zero_stage=3")


def work(ranks: int, *words: object) -> dict:
    printed = run_worker("deepspeed_doors_worker", "deepspeed_zero", ranks, *words)
    (line,) = [x for x in printed.splitlines() if x.startswith('{"deepspeed')]
    return json.loads(line)


@pytest.fixture(scope="module")
def saved(tokens, tmp_path_factory):
    """Where two ranks of DeepSpeed saved, and the losses of the runs."""
    out = tmp_path_factory.mktemp("deepspeed")
    return out, work(2, out, tokens, "save", *RUNS)


def reader_of(save: Path) -> Reader:
    folder = save / folders.name_of(2)
    return Reader(folder, folders.verify(folder))


def theirs(out: Path, name: str, form: str) -> Path:
    return save_of(out, name).with_name(f"{save_of(out, name).name}-{form}")


def assert_same(foreign, reader: Reader) -> None:
    for name in parameter_shapes(CONFIG):
        for kind in KINDS:
            assert foreign.tensor(name, kind).equal(reader.gathered(name, kind)), (name, kind)


@pytest.mark.parametrize("form", ["deepspeed", "universal"])
@pytest.mark.parametrize("name", RUNS)
def test_every_weight_and_moment_of_deepspeeds_own_files_is_read_bit_for_bit(name, form, saved):
    out, _ = saved
    foreign = doors.read(theirs(out, name, form), CONFIG)
    assert (foreign.step, foreign.adam_step, foreign.kinds) == (2, 2, KINDS)
    reader = reader_of(save_of(out, name))
    if name != HF:
        assert_same(foreign, reader)
        return
    for parameter in parameter_shapes(CONFIG):
        for kind in KINDS:
            parts = to_hugging_face(CONFIG, parameter, foreign.tensor(parameter, kind))
            for of, part in zip(hugging_face_names(CONFIG, parameter), parts, strict=True):
                assert part.equal(reader.gathered(f"gpt2.{of}", kind)), (of, kind)


def test_a_run_from_deepspeeds_files_equals_the_uninterrupted_one(saved, tokens):
    out, straight = saved
    source = theirs(out, RUNS[0], "deepspeed")
    shapes = parameter_shapes(CONFIG)
    write_hugging_face(out / "sizes", CONFIG, lambda name: torch.zeros(shapes[name]))
    words = ["import", str(source), str(out / "imported"), "--model", str(out / "sizes")]
    assert checkpoint.main(words) == 0
    curves = work(2, out, tokens, "load", *RESUMED)
    # Exact: the same ranks of one machine do the same operations in the same order.
    assert curves[RUNS[0]][0] == straight[RUNS[0]][2:]
    for name in RESUMED:
        imported, own = curves[name]
        assert len(own) == 2 and imported == own
        assert abs(own[1][0] - straight[RUNS[0]][3][0]) < 2e-4


def test_deepspeeds_own_loader_reads_what_is_exported_at_another_dp_and_stage(saved, tokens):
    out, straight = saved
    path = save_of(out, RUNS[0]) / folders.name_of(2)
    command = ["export", str(path), str(out / "universal"), "--format", "universal"]
    assert checkpoint.main(command) == 0
    config = {"checkpoint": {"load_universal": True}}
    (out / "load_universal.json").write_text(json.dumps(config))
    curves = work(1, out, tokens, "universal", *RELOADED)
    for name in RELOADED:
        loaded = reader_of(save_of(out, name).with_name(f"{save_of(out, name).name}-loaded"))
        assert_same(doors.read(out / "universal", CONFIG), loaded)
        assert_same(ours.read(path), loaded)
        assert loaded.manifest["adam_step"] == 2 and loaded.manifest["layout"]["dp"] == 1
        # At stage 3 DeepSpeed's loader gives all of AdamW's groups one tensor that counts steps,
        # so that each group adds to it: its second step has another bias correction.
        same = 1 if name.endswith("3") else 2
        for step in range(same):
            assert abs(curves[name][step][0] - straight[RUNS[0]][2 + step][0]) < 1e-5


class Runs:
    """Its pickle would make a folder when it is read."""

    def __init__(self, path: Path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (str(self.path),)


@pytest.mark.parametrize(
    ("harm", "why"),
    [
        ("code", "is refused: it holds posix.mkdir"),
        ("a rank is gone", "has the states of 1 ranks, saved were 2"),
        ("no ZeRO", "has no ZeRO states: stages 1 to 3 and universal are read"),
        ("another form", "is not as DeepSpeed's ZeRO saves it: KeyError 'optimizer_state_dict'"),
        ("another model", "blocks.4.norm1.weight is missing; .* and 21 more"),
        ("another name", "blocks.0.norm1.weight is missing; adapter.weight is unknown"),
    ],
)
def test_files_that_are_not_such_a_checkpoint_are_refused_in_one_line(harm, why, saved, tmp_path):
    out, _ = saved
    folder, model = tmp_path / "global_step2", CONFIG
    shutil.copytree(theirs(out, RUNS[0], "deepspeed") / "global_step2", folder)
    first, second = sorted(folder.glob("zero*_optim_states.pt"))
    if harm == "code":
        torch.save({"optimizer_state_dict": Runs(tmp_path / "it ran")}, first)
    elif harm == "another form":
        torch.save({}, first)
    elif harm == "another model":
        model = replace(CONFIG, n_layer=6)
    elif harm == "another name":
        for file in (folder / "mp_rank_00_model_states.pt", first, second):
            renamed(file, "blocks.0.norm1.weight", "adapter.weight")
    else:
        second.unlink()
        if harm == "no ZeRO":
            first.unlink()
    with pytest.raises(UsageError, match=why) as refused:
        doors.read(tmp_path / "global_step2", model)
    assert "\n" not in str(refused.value) and not (tmp_path / "it ran").exists()


def test_a_universal_checkpoint_without_some_of_its_moments_is_refused(saved, tmp_path):
    out, _ = saved
    shutil.copytree(theirs(out, RUNS[0], "universal"), tmp_path / "their")
    next((tmp_path / "their").glob("**/exp_avg.pt")).unlink()
    with pytest.raises(UsageError, match="is incomplete: of .* tensors it has"):
        doors.read(tmp_path / "their", CONFIG)


def renamed(file: Path, before: str, after: str) -> None:
    """Give a parameter another name in DeepSpeed's tables."""
    content = torch.load(file, weights_only=False)
    tables = content.get("param_shapes")
    for table in tables or content["optimizer_state_dict"]["param_slice_mappings"]:
        for name in list(table):
            table[after if name == before else name] = table.pop(name)
    torch.save(content, file)
