"""A weights-only folder is whole or not there, says so when it was altered, and costs 2 bytes."""

import json
import math
import os
import re
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file

from base.errors import UsageError
from base.storage import BYTES, state_bytes
from models import gpt
from models.config import PRESETS, GPTConfig, parameter_shapes, preset
from models.weights import read_weights, write_weights
from models.weights_config import read_description
from parallel import train
from parallel.checkpoint import attempts, loading
from parallel.checkpoint.contents import Piece, State
from parallel.config.settings import resolve
from parallel.ranks import Ranks

CONFIG = GPTConfig(n_layer=2, hidden=32, n_head=4, vocab_size=61, max_seq_len=16)


def starting(name: str) -> torch.Tensor:
    return gpt.init_parameter(CONFIG, name, seed=1)


@pytest.fixture
def folder(tmp_path) -> Path:
    write_weights(tmp_path / "weights", CONFIG, starting, "fp32", {"step": 7})
    return tmp_path / "weights"


def test_the_tensors_are_the_reference_models_and_the_library_reads_them(folder):
    model, tensors = gpt.GPT(CONFIG), load_file(folder / "model.safetensors")
    model.load_state_dict(tensors)  # names and shapes, strictly
    weights = read_weights(folder)
    assert (weights.config, weights.dtype) == (CONFIG, "fp32")
    assert all(torch.equal(value, starting(name)) for name, value in tensors.items())
    assert all(torch.equal(p, starting(name)) for name, p in model.named_parameters())


def test_a_load_that_leaves_a_parameter_as_it_was_is_our_error(folder):
    """Nothing was drawn: no parameter has a value of its own."""
    sizes = {k: v for k, v in CONFIG.as_dict().items() if not k.startswith("rope")}
    spec = resolve(("test", sizes), gpus=1)
    pieces = [
        Piece(name, shape, (0,) * len(shape), shape, 0, {"param": torch.zeros(math.prod(shape))})
        for name, shape in parameter_shapes(CONFIG).items()
    ]
    ranks, restored = Ranks(0, 1, lambda: None), []
    for filled in (pieces, pieces[:-1]):
        engine = SimpleNamespace(
            state=lambda of=filled: State(of), restore=lambda *scalars: restored.append(scalars)
        )
        if filled is pieces:
            loading.load(engine, spec, ranks, folder)
            continue
        with pytest.raises(UsageError, match=str(CONFIG.n_params)):
            loading.load(engine, spec, ranks, folder)
    assert restored == [(0, {})]
    assert torch.equal(pieces[0].tensors["param"], starting(pieces[0].name).flatten())


@pytest.mark.parametrize("dtype", ["bf16", "fp16", "fp32"])
def test_bytes_are_what_was_predicted(tmp_path, dtype):
    config = PRESETS["tiny"]
    model = gpt.GPT(config)
    written = write_weights(tmp_path / "w", config, model.state_dict().__getitem__, dtype)
    on_disk = sum(p.stat().st_size for p in (tmp_path / "w").iterdir())
    predicted = config.n_params * BYTES[dtype]
    assert written == on_disk
    assert predicted < written < predicted + 12_000  # two headers


def test_the_published_split_is_2_and_12_bytes_per_parameter(shared):
    """181B on 256 GPUs: 0.34TB (1.4GB per file and GPU) and 2.00TB (8.0GB), 2.4TB in all."""
    published = next((shared / "seeds").glob("003_*.txt")).read_text()
    weights, state = (
        float(re.search(rf"([\d.]+)TB in {name}", published)[1])
        for name in ("PP layer states", "optimizer states")
    )
    total = float(re.search(r"a total ([\d.]+)TB per checkpoint", published)[1])
    tebi = 2**40  # as du prints
    assert 2 * 181e9 / tebi == pytest.approx(weights, rel=0.05)
    assert state_bytes(181e9) / tebi == pytest.approx(state, rel=0.05)
    assert (2 * 181e9 + state_bytes(181e9)) / tebi == pytest.approx(total, rel=0.05)


def flip(path: Path, at: int) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)


def edited(**changes):
    """An edit of a config.json without a checksum, as an earlier version wrote it: other values,
    or other values in the object that one is."""

    def edit(folder: Path) -> None:
        described = json.loads((folder / "config.json").read_text())
        del described["crc32"]
        for key, value in changes.items():
            described[key] = described[key] | value if isinstance(value, dict) else value
        (folder / "config.json").write_text(json.dumps(described))

    return edit


@pytest.mark.parametrize(
    ("harm", "why"),
    [
        (lambda f: flip(f / "model.safetensors", -1), "its bytes have changed"),
        (lambda f: flip(f / "model.safetensors", 3000), "its bytes have changed"),
        (lambda f: os.truncate(f / "model.safetensors", 5000), "is damaged: 5000 bytes, written"),
        (lambda f: (f / "model.safetensors").unlink(), "model.safetensors: No such file"),
        (lambda f: (f / "config.json").unlink(), "config.json: No such file"),
        (lambda f: os.truncate(f / "config.json", 50), "config.json is damaged"),
        (lambda f: (f / "config.json").write_text("{}"), "no weights-only folder of ours"),
        *((edited(dtype=d), "is damaged|holds") for d in ("fp16", "fp8", ["bf16"])),
        *((edited(model=m), "is damaged|holds") for m in (None, {"n_layer": 10**9})),
        *((edited(safetensors=s), "is damaged") for s in (None, {"bytes": -1})),
    ],
)
def test_an_altered_folder_is_refused_and_the_file_named(folder, harm, why):
    harm(folder)
    with pytest.raises(UsageError, match=why) as refused:
        read_weights(folder)
    words = str(refused.value)
    assert str(folder) in words and "\n" not in words and len(words) < 500


def test_no_flipped_bit_of_config_json_changes_the_model(folder):
    path, (_, whole) = folder / "config.json", read_description(folder)
    content = path.read_bytes()
    refused = 0
    for at in range(8 * len(content)):
        harmed = bytearray(content)
        harmed[at // 8] ^= 1 << at % 8
        path.write_bytes(harmed)
        try:
            _, found = read_description(folder)
            assert all(found[key] == whole[key] for key in ("model", "dtype"))
        except UsageError:
            refused += 1
    assert refused > 7 * len(content)  # the others are of white space and of the checksum's name


def test_a_model_of_other_sizes_is_refused_with_the_numbers(folder):
    edited(model={"vocab_size": 62})(folder)
    with pytest.raises(UsageError, match=r"embedding.word.weight is \[61, 32\], not \[62, 32\]"):
        read_weights(folder)
    with pytest.raises(ValueError, match="norm.bias is "):
        shapes = parameter_shapes(CONFIG)
        wrong = {n: torch.zeros(s if n != "norm.bias" else 3) for n, s in shapes.items()}
        write_weights(folder, CONFIG, wrong.__getitem__)


@pytest.mark.parametrize("kind", ["gpt2", "llama3.1"])
def test_a_run_that_loads_weights_alone_takes_their_sizes(kind, tmp_path):
    config = CONFIG
    if kind == "llama3.1":
        config = preset("tiny-llama", n_layer=1, hidden=32, n_kv_head=2, rope_scaling=8.0)
    folder = tmp_path / "weights"
    write_weights(folder, config, lambda name: gpt.init_parameter(config, name, seed=1))
    load = {"load": str(folder), "data": "none"}
    spec, other = resolve(("flags", load)), resolve(("flags", load | {"n_layer": 7}))
    assert spec.model == config and spec.seq_len == config.max_seq_len
    assert resolve(("flags", load | {"preset": "small"})).model == preset("small")
    assert other.model == replace(config, n_layer=7)
    attempts.check_first(spec, folder)
    with pytest.raises(UsageError, match=f"another model: n_layer {config.n_layer} not 7"):
        attempts.check_first(other, folder)


def test_check_refuses_to_load_another_model(folder, tmp_path, capsys):
    flags = ["--check", "--data", str(tmp_path / "none"), "--load"]
    assert train.main([*flags, str(folder)]) == 0
    assert json.loads(capsys.readouterr().out)["model"]["hidden"] == CONFIG.hidden
    assert train.main([*flags, str(folder), "--preset", "small"]) == 2
    assert f"{folder} holds another model: " in capsys.readouterr().err
    assert train.main([*flags, str(tmp_path)]) == 2
    assert f"no checkpoint at {tmp_path}" in capsys.readouterr().err
    assert train.main([*flags, "elsewhere"]) == 0
    assert "no checkpoint at elsewhere here: it is not checked" in capsys.readouterr().err


def test_a_full_disk_leaves_the_old_folder_and_nothing_else(folder, monkeypatch):
    def full(_):
        raise OSError(28, "No space left on device")

    before = (folder / "model.safetensors").read_bytes()
    (folder.parent / ".weights.partial" / "left").mkdir(parents=True)  # of a writer that was killed
    with monkeypatch.context() as patch, pytest.raises(UsageError, match="weights: No space left"):
        patch.setattr(os, "fsync", full)
        write_weights(folder, CONFIG, lambda name: starting(name) + 1)
    assert [p.name for p in folder.parent.iterdir()] == ["weights"]
    assert (folder / "model.safetensors").read_bytes() == before
    write_weights(folder, CONFIG, lambda name: starting(name) + 1)
    assert (folder / "model.safetensors").read_bytes() != before
