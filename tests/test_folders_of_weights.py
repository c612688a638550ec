"""A run starts from a folder of weights: it takes its sizes, and all of its parameters."""

import json
import math
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from base.errors import UsageError
from base.storage import BYTES
from models import gpt
from models.config import PRESETS, GPTConfig, parameter_shapes, preset
from models.hf_weights import write_hugging_face
from parallel import train
from parallel.checkpoint import attempts, loading
from parallel.checkpoint.contents import Piece, State
from parallel.config.resolve import resolve
from parallel.ranks import Ranks

CONFIG = GPTConfig(n_layer=2, hidden=32, n_head=4, vocab_size=61, max_seq_len=16)


def starting(name: str) -> torch.Tensor:
    return gpt.init_parameter(CONFIG, name, seed=1)


@pytest.fixture
def folder(tmp_path) -> Path:
    write_hugging_face(tmp_path / "weights", CONFIG, starting, "fp32")
    return tmp_path / "weights"


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
    for piece in pieces:
        assert torch.equal(piece.tensors["param"], starting(piece.name).flatten())


@pytest.mark.parametrize("dtype", ["bf16", "fp16", "fp32"])
def test_bytes_are_what_was_predicted(tmp_path, dtype):
    config = PRESETS["tiny"]
    model = gpt.GPT(config)
    written = write_hugging_face(tmp_path / "w", config, model.state_dict().__getitem__, dtype)
    predicted = config.n_params * BYTES[dtype]
    assert written == (tmp_path / "w" / "model.safetensors").stat().st_size
    assert predicted < written < predicted + 12_000  # and a header


@pytest.mark.parametrize("kind", ["gpt2", "llama3.1"])
def test_a_run_that_loads_weights_alone_takes_their_sizes(kind, tmp_path):
    config = CONFIG
    if kind == "llama3.1":
        config = preset("tiny-llama", n_layer=1, hidden=32, n_kv_head=2, rope_scaling=8.0)
    folder = tmp_path / "weights"
    write_hugging_face(folder, config, lambda name: gpt.init_parameter(config, name, seed=1))
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
