"""Others' checkpoints come in and go out through the libraries' own writers and readers."""

import argparse
import json
import pickle
import shutil
import zlib
from importlib import metadata
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp

from base.errors import UsageError
from models.config import GPTConfig, parameter_shapes, preset
from models.hf_config import hugging_face_names
from models.hf_weights import to_hugging_face, write_hugging_face
from parallel.checkpoint import __main__ as checkpoint
from parallel.checkpoint import doors, folders
from parallel.checkpoint.contents import KINDS
from parallel.checkpoint.doors import WholeCheckpoint, ours, pickles, torch_dist
from parallel.checkpoint.rank_files import Reader
from tests.conftest import run_worker
from tests.tools.tiny_checkpoint import SIZES, Engine, saver_of

MODEL = preset("tiny", **SIZES)


def drawn(name: str, kind: str, shape: tuple[int, ...] = ()) -> torch.Tensor:
    draw = torch.Generator().manual_seed(zlib.crc32(f"{kind}/{name}".encode()))
    return torch.rand(shape or parameter_shapes(MODEL)[name], generator=draw)


@pytest.mark.parametrize(("file_bytes", "files"), [(4 << 30, 1), (1200, 9)])
def test_what_is_imported_is_a_checkpoint_in_files_of_a_size(
    file_bytes, files, tmp_path, monkeypatch
):
    monkeypatch.setattr(ours, "FILE_BYTES", file_bytes)
    foreign = WholeCheckpoint(MODEL, 7, 6, KINDS, drawn, {"run": "imported from a test"})
    written = ours.write(tmp_path / "in", foreign)
    (folder,) = folders.candidates(tmp_path / "in")
    manifest = folders.verify(folder)
    assert (manifest["step"], manifest["adam_step"]) == (7, 6)
    assert written == sum(file["bytes"] for file in manifest["files"])
    assert len(manifest["files"]) == files
    reader = Reader(folder, manifest)
    for name in parameter_shapes(MODEL):
        assert all(reader.gathered(name, kind).equal(drawn(name, kind)) for kind in KINDS)
    engine = Engine()
    saver = saver_of(engine, tmp_path / "run")
    assert saver.load(tmp_path / "in") == 7 and engine.adam_step == 6
    (event,) = saver.events()
    assert event.line().endswith("imported from a test, whose settings and data are not known")
    assert checkpoint.main(["export", str(folder), str(tmp_path / "weights")]) == 0


def test_weights_alone_come_in_as_step_0_of_a_new_training(tmp_path, capsys):
    foreign = WholeCheckpoint(MODEL, 7, 7, KINDS, drawn, {"run": "r", "spec": {}})
    torch_dist.write(tmp_path / "theirs", foreign, "stacked")
    table = tmp_path / "theirs" / "iter_0000007" / ".metadata"
    stored = pickle.loads(table.read_bytes())
    for name in [name for name in stored.state_dict_metadata if "exp_avg" in name]:
        del stored.state_dict_metadata[name]
    for index in [index for index in stored.storage_data if "exp_avg" in index.fqn]:
        del stored.storage_data[index]
    table.write_bytes(pickle.dumps(stored))
    write_hugging_face(tmp_path / "model", MODEL, lambda name: drawn(name, "param"))
    words = ["import", str(tmp_path / "theirs"), str(tmp_path / "in")]
    assert checkpoint.main([*words, "--model", str(tmp_path / "model")]) == 0
    assert "weights alone, as of step 0" in capsys.readouterr().out
    engine = Engine(3.0)
    saver = saver_of(engine, tmp_path / "run")
    assert saver.load(tmp_path / "in") == 0 and engine.adam_step == 0
    for name, tensors in engine.tensors.items():
        assert tensors["param"].equal(drawn(name, "param"))
        assert not any(tensors[kind].any() for kind in KINDS[1:])
    (event,) = saver.events()
    assert "without moments (its optimizer's form: fully_reshardable)" in event.line()


def test_what_was_saved_without_checksums_is_read(tmp_path):
    torch.serialization.set_crc32_options(False)
    torch.save(torch.arange(9.0), tmp_path / "tensor.pt")
    torch.serialization.set_crc32_options(True)
    assert pickles.load(tmp_path / "tensor.pt").equal(torch.arange(9.0))


def test_a_model_with_experts_is_not_written_as_torch_dist(tmp_path, capsys):
    model = preset("tiny-moe", vocab_size=64, hidden=16, ffn_hidden=32, n_head=2, n_kv_head=0)
    shapes = parameter_shapes(model)
    foreign = WholeCheckpoint(
        model, 1, 1, KINDS, lambda name, _: torch.zeros(shapes[name]), {"run": "r"}
    )
    ours.write(tmp_path / "in", foreign)
    words = [str(tmp_path / "in"), str(tmp_path / "out"), "--format", "torch_dist"]
    assert checkpoint.main(["export", *words]) == 2
    assert "experts is not written as torch_dist" in capsys.readouterr().err


def same(ours: Path, theirs: Path) -> None:
    """Two folders of one checkpoint each hold the same weights, moments and step, bit for bit."""
    (a,), (b,) = (folders.candidates(path) for path in (ours, theirs))
    a, b = (Reader(path, folders.verify(path)) for path in (a, b))
    assert a.shapes == b.shapes and a.manifest["model"] == b.manifest["model"]
    assert a.manifest["adam_step"] == b.manifest["adam_step"]
    for name in a.shapes:
        assert all(a.gathered(name, kind).equal(b.gathered(name, kind)) for kind in KINDS), name


LLAMA = "preset=tiny-llama,n_kv_head=2,qk_norm=true"
RUNS = [
    (1, "megatron:zero_stage=1"),
    (1, f"megatron:{LLAMA},precision=bf16"),
    pytest.param(2, f"megatron:tp=2,zero_stage=1,{LLAMA}", marks=pytest.mark.slow),
    pytest.param(4, "megatron:tp=2,pp=2", marks=pytest.mark.slow),
]


@pytest.mark.parametrize(("n", "run"), RUNS)
def test_megatron_core_s_checkpoint_comes_in_and_goes_out_bit_for_bit(n, run, tmp_path, tokens):
    run_worker("doors_worker", "megatron", n, "save", tmp_path, tokens, run)
    (saved,) = folders.candidates(tmp_path / "ours")
    model = tmp_path / "model"
    config = GPTConfig(**folders.read_manifest(saved)["model"])
    write_hugging_face(model, config, Reader(saved, folders.read_manifest(saved)).gathered)
    imported = tmp_path / "imported"
    words = [str(tmp_path / "iter_0000002"), str(imported), "--model", str(model)]
    assert checkpoint.main(["import", *words]) == 0
    same(tmp_path / "ours", imported)
    hybrid = "-hybrid" if metadata.version("megatron-core").startswith("0.19") else ""
    exported = [str(saved), str(tmp_path / "in"), "--format", f"torch_dist{hybrid}"]
    assert checkpoint.main(["export", *exported]) == 0
    run_worker("doors_worker", "megatron", n, "load", tmp_path, tokens, run)
    same(tmp_path / "back", imported)
    # Nothing is lost beside the state: both go on as the run that did not stop. Exact: the same
    # ranks of one machine do the same operations in the same order, by the same (fused) AdamW.
    uninterrupted = json.loads((tmp_path / "save.json").read_text())
    assert json.loads((tmp_path / "load.json").read_text()) == uninterrupted
    if n != 2:
        return
    run_worker("doors_worker", "megatron", n, "resume", tmp_path, tokens, run)
    assert json.loads((tmp_path / "resume.json").read_text()) == uninterrupted
    run_worker("doors_worker", "megatron", 1, "resume", tmp_path, tokens, f"ddp:{LLAMA}")
    resumed = json.loads((tmp_path / "resume.json").read_text())
    assert resumed == [pytest.approx(row, rel=1e-4) for row in uninterrupted]


def tensors_of(config: GPTConfig, form: str) -> dict[str, dict[str, torch.Tensor]]:
    """Kind -> name -> values, as a program with these names would save them."""
    named: dict = {kind: {} for kind in KINDS}
    for name, shape in parameter_shapes(config).items():
        for kind in KINDS:
            names, parts = [name], [drawn(name, kind, shape)]
            if form != "ours":
                names = hugging_face_names(config, name)
                parts = to_hugging_face(config, name, parts[0])
            named[kind] |= dict(zip(names, parts, strict=True))
    return named


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize("form", ["ours", "Hugging Face's", "flat"])
@pytest.mark.parametrize("preset_name", ["tiny", "tiny-llama"])
def test_a_dcp_checkpoint_comes_in_by_our_names_and_hugging_face_s(form, preset_name, tmp_path):
    config = preset(preset_name, **SIZES)
    named = tensors_of(config, form)
    moments = {
        name: {kind: named[kind][name] for kind in KINDS[1:]} | {"step": torch.tensor(6.0)}
        for name in named["param"]
    }
    state = {"model": named["param"], "optim": {"state": moments}, "step": 7}
    if form == "flat":  # as torchtitan has it
        state = named["param"] | {"optimizer": {"state": moments}, "train_state": {"step": 7}}
    dcp.save(state, storage_writer=dcp.FileSystemWriter(tmp_path / "dcp"), no_dist=True)
    foreign = doors.read(tmp_path / "dcp", config)
    assert (foreign.step, foreign.adam_step, foreign.kinds) == (6, 6, KINDS)
    for name, shape in parameter_shapes(config).items():
        for kind in KINDS:
            assert foreign.tensor(name, kind).equal(drawn(name, kind, shape)), (name, kind)
    with pytest.raises(UsageError, match="does not hold this model: .* missing"):
        doors.read(tmp_path / "dcp", preset(preset_name, **SIZES | {"n_layer": 2}))


ARGUMENTS = {
    **{"num_layers": 1, "hidden_size": 8, "num_attention_heads": 2, "norm_epsilon": 1e-5},
    **{"position_embedding_type": "learned_absolute", "bias_gelu_fusion": True},
}


def test_megatron_lm_s_arguments_are_those_of_the_model(tmp_path):
    foreign = WholeCheckpoint(MODEL, 7, 7, KINDS, drawn, {"run": "r", "spec": {}})
    torch_dist.write(tmp_path / "out", foreign, "stacked")
    common = tmp_path / "out" / "iter_0000007" / "common.pt"
    others = {"num_experts": 8, "bias_gelu_fusion": False, "rotary_percent": 0.5}
    others |= {"num_attention_heads": 4, "swiglu": True, "position_embedding_type": "rope"}
    for other in ({}, *({name: value} for name, value in others.items())):
        stored = pickles.load(common, 0, common.stat().st_size) | {
            "args": argparse.Namespace(**ARGUMENTS | other)
        }
        torch.save(stored, common)
        if not other:
            assert doors.read(tmp_path / "out", MODEL).config == MODEL
            continue
        (name,) = other
        with pytest.raises(UsageError, match=f"{name} is .*, the model has"):
            doors.read(tmp_path / "out", MODEL)


@pytest.mark.parametrize(
    "common",
    [
        [1, 2],
        {"args": 5},
        {"iteration": "seven"},
        {"optimizer": {"step": "six"}},
        {"optimizer": {"step": [6]}},
    ],
    ids=str,
)
def test_what_megatron_core_does_not_save_beside_tensors_is_one_line(common, tmp_path, capsys):
    foreign = WholeCheckpoint(MODEL, 7, 7, ("param",), drawn, {"run": "r", "spec": {}})
    write_hugging_face(tmp_path / "model", MODEL, lambda name: drawn(name, "param"))
    torch_dist.write(tmp_path / "out", foreign, "stacked")
    torch.save(common, tmp_path / "out" / "iter_0000007" / "common.pt")
    words = ["import", str(tmp_path / "out"), str(tmp_path / "in"), "--model"]
    assert checkpoint.main([*words, str(tmp_path / "model")]) == 2
    said = capsys.readouterr().err
    assert "is not as megatron-core saves it" in said and said.count("\n") == 1
    assert not (tmp_path / "in").exists()


def test_what_is_damaged_or_may_run_code_is_one_line(tmp_path, capsys):
    foreign = WholeCheckpoint(MODEL, 7, 7, KINDS, drawn, {"run": "r", "spec": {}})
    torch_dist.write(tmp_path / "out", foreign, "stacked")
    folder = tmp_path / "out" / "iter_0000007"
    assert checkpoint.main(["verify", str(tmp_path / "out")]) == 2
    assert "is another program's checkpoint (torch_dist)" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        checkpoint.main(["import", str(folder), str(tmp_path / "in")])
    assert (
        "required: --model (python -m parallel.checkpoint import --help" in capsys.readouterr().err
    )
    words = ["import", str(folder), str(tmp_path / "in"), "--model", "tiny"]
    assert checkpoint.main(words) == 2
    assert "does not hold this model" in capsys.readouterr().err
    shutil.copytree(folder, tmp_path / "partial")
    table = pickle.loads((folder / ".metadata").read_bytes())
    gone = next(
        each for each in table.storage_data if each.fqn.startswith("optimizer.state.exp_avg.")
    )
    del table.storage_data[gone], table.state_dict_metadata[gone.fqn]
    (tmp_path / "partial" / ".metadata").write_bytes(pickle.dumps(table))
    with pytest.raises(UsageError, match="is incomplete: it has no moments of 1 of"):
        torch_dist.read(tmp_path / "partial", MODEL)
    stored = max(folder.glob("*.distcp"), key=lambda file: file.stat().st_size)
    content = bytearray(stored.read_bytes())
    middle = len(content) // 2
    content[middle : middle + 8] = bytes(255 - byte for byte in content[middle : middle + 8])
    stored.write_bytes(content)
    with pytest.raises(UsageError, match="is damaged: .* has another checksum"):
        ours.write(tmp_path / "damaged", torch_dist.read(folder, MODEL))
    (folder / ".metadata").write_bytes(b"cos\nsystem\n(S'true'\ntR.")
    assert checkpoint.main(words) == 2
    assert "is refused: it holds os.system" in capsys.readouterr().err
