"""Weights go to Hugging Face's classes and back: the same logits; what cannot go is refused."""

import functools
import json
import math
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
import transformers
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from base.errors import UsageError
from models import gpt, hf_model, hf_weights
from models.config import LLAMA3_ROPE, PRESETS, Experts, GPTConfig, parameter_shapes, preset
from models.hf_config import architecture, config_of, hugging_face_config
from models.hf_weights import Tokenizer, open_hugging_face, write_hugging_face
from parallel import token_files
from parallel.checkpoint import __main__ as checkpoint
from parallel.checkpoint import attempts, loading
from parallel.checkpoint.contents import NEVER_SAVED, Copy, Piece, State
from parallel.checkpoint.doors import WholeCheckpoint
from parallel.checkpoint.doors import ours as our_door
from parallel.config.resolve import resolve
from parallel.ranks import Ranks
from parallel.record.reader import read_run
from tests import checkpoint_worker
from tests.conftest import ROOT, run_module

SMALL = GPTConfig(n_layer=2, hidden=32, n_head=4, vocab_size=61, max_seq_len=16, ffn_hidden=96)
LLAMA = preset("tiny-llama", n_layer=2, hidden=32, vocab_size=61, max_seq_len=16, ffn_hidden=48)
MIXTRAL = replace(LLAMA, experts=Experts(4, 2, moe_aux_loss_coeff=0.02))
QWEN3_MOE = replace(LLAMA, qk_norm=True, experts=Experts(4, 3, 32))
# name -> our config, its class in transformers
OURS = {
    "gpt2": (SMALL, "GPT2LMHeadModel"),
    "gpt2 untied": (replace(SMALL, tied=False, norm_eps=1e-6), "GPT2LMHeadModel"),
    "llama": (LLAMA, "LlamaForCausalLM"),
    "llama of one kv head, tied": (replace(LLAMA, n_kv_head=1, tied=True), "LlamaForCausalLM"),
    "llama of all kv heads, biases": (replace(LLAMA, n_kv_head=4, bias=True), "LlamaForCausalLM"),
    "llama 3.1": (replace(LLAMA, rope_theta=5e5, rope_scaling=8.0), "LlamaForCausalLM"),
    "llama of large heads": (replace(LLAMA, kv_channels=12, norm_eps=1e-6), "LlamaForCausalLM"),
    "qwen3": (replace(LLAMA, qk_norm=True, kv_channels=12), "Qwen3ForCausalLM"),
    "qwen3 tied": (replace(LLAMA, qk_norm=True, n_kv_head=1, tied=True), "Qwen3ForCausalLM"),
    "mixtral": (MIXTRAL, "MixtralForCausalLM"),
    "qwen3 moe": (QWEN3_MOE, "Qwen3MoeForCausalLM"),
    "qwen3 moe, scores as they are": (
        replace(QWEN3_MOE, experts=Experts(4, 2, 32, norm_topk_prob=False)),
        "Qwen3MoeForCausalLM",
    ),
}
_GPT2 = {"n_layer": 2, "n_embd": 32, "n_head": 4, "vocab_size": 61}
_SIZES = {"num_hidden_layers": 2, "hidden_size": 32, "num_attention_heads": 4, "vocab_size": 61}
_SIZES |= {"num_key_value_heads": 2, "intermediate_size": 48, "max_position_embeddings": 16}
_LLAMA3 = {"rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0, **LLAMA3_ROPE}
# name -> the class in transformers, its configuration
THEIRS = {
    "gpt2": ("GPT2LMHeadModel", dict(**_GPT2, n_positions=16)),
    "llama": ("LlamaForCausalLM", dict(**_SIZES)),
    "llama 3.1, tied": (
        "LlamaForCausalLM",
        dict(**_SIZES, tie_word_embeddings=True, rope_parameters=_LLAMA3),
    ),
    "qwen3": ("Qwen3ForCausalLM", dict(**_SIZES, head_dim=12)),
    "mistral": ("MistralForCausalLM", dict(**_SIZES, sliding_window=None)),
    "mixtral": ("MixtralForCausalLM", dict(**_SIZES)),
    "qwen3 moe": (
        "Qwen3MoeForCausalLM",
        dict(**_SIZES, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=24),
    ),
}


def exported(config: GPTConfig, folder) -> gpt.GPT:
    """A reference GPT with random weights everywhere (biases too), exported to `folder`."""
    model = gpt.GPT(config).eval()
    gpt.fill(model, lambda _, p, *__: torch.randn_like(p) * 0.3)
    write_hugging_face(folder, config, model.state_dict().__getitem__, "fp32")
    return model


def theirs(folder, kind: str = "gpt2", **changes):
    """A random model of a class of Hugging Face's, saved by Hugging Face in several files."""
    name, settings = THEIRS[kind]
    cls, ends = getattr(transformers, name), {"bos_token_id": 0, "eos_token_id": 0}
    config = cls.config_class(**settings).to_dict() | ends | changes
    model = cls(cls.config_class.from_dict(config)).eval()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    model.save_pretrained(folder, max_shard_size="1GB" if kind == "gpt2" else "20KB")
    return model


def ours(folder) -> gpt.GPT:
    weights = open_hugging_face(folder)
    model = gpt.GPT(weights.config).eval()
    gpt.fill(model, lambda name, *_: weights.tensor(name))
    return model


@torch.no_grad()
def assert_same_logits(reference: gpt.GPT, hugging_face, seq_len: int = 16):
    tokens = torch.randint(reference.config.vocab_size, (2, seq_len))
    expected = reference.logits(tokens)
    found = hugging_face(tokens).logits[..., : reference.config.vocab_size]
    assert (found - expected).abs().max() < 1e-4
    assert expected.std() > 0.3


@pytest.mark.parametrize("kind", OURS)
def test_an_exported_model_loads_in_transformers_with_the_same_logits(kind, tmp_path):
    config, name = OURS[kind]
    model = exported(config, tmp_path / "theirs")
    loaded, report = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "theirs", output_loading_info=True
    )
    assert type(loaded).__name__ == name and not any(report.values())
    assert loaded.num_parameters() == config.n_params
    assert_same_logits(model, loaded.eval())
    loaded.save_pretrained(tmp_path / "saved by them")
    back, before = open_hugging_face(tmp_path / "saved by them"), model.state_dict()
    assert back.config == config
    assert all(back.tensor(n).equal(before[n]) for n in parameter_shapes(config))


@pytest.mark.parametrize("kind", THEIRS)
def test_an_imported_model_has_the_same_logits_and_comes_back_bit_for_bit(kind, tmp_path):
    model = theirs(tmp_path / "theirs", kind)
    files = list((tmp_path / "theirs").glob("*.safetensors"))
    assert (len(files) > 1) == (kind != "gpt2")
    assert_same_logits(ours(tmp_path / "theirs"), model)
    read = open_hugging_face(tmp_path / "theirs")
    write_hugging_face(tmp_path / "again", read.config, read.tensor, "fp32")
    assert_same_files(tmp_path / "theirs", tmp_path / "again")


@pytest.mark.parametrize("kind", ["mixtral", "qwen3 moe"])
def test_experts_are_balanced_as_much_as_transformers_does(kind):
    """Its loss is a mean over layers and counts each of a token's k choices; ours is a sum over
    layers of shares."""
    from transformers.models.mixtral import modeling_mixtral

    ours, _ = OURS[kind]
    ours = replace(ours, n_layer=6, experts=replace(ours.experts, moe_aux_loss_coeff=1e-3))
    theirs = hugging_face_config(ours)
    k, E = ours.experts.moe_router_topk, ours.experts.num_experts
    assert theirs["router_aux_loss_coef"] == pytest.approx(1e-3 * 6 / k)
    described = theirs | {"model_type": architecture(ours).model_type}
    assert config_of(described, Path("config.json"))[0] == ours
    logits_TE = torch.randn(100, E)
    whole = theirs["router_aux_loss_coef"] * modeling_mixtral.load_balancing_loss_func(
        (logits_TE,) * 6, E, k
    )
    scores_TE = logits_TE.softmax(-1)
    tokens_E = scores_TE.topk(k).indices.flatten().bincount(minlength=E)
    one = gpt.MixtureOfExperts.balance_loss(ours.experts, scores_TE, tokens_E)
    assert float(whole) == pytest.approx(6 * float(one), rel=1e-5)


@pytest.mark.parametrize(
    ("name", "coefficient"),
    [("mixtral-8x7b", 0.02), ("mixtral-8x22b", 1e-3), ("qwen3-30b-a3b", 1e-3)]
    + [("qwen3-235b-a22b", 1e-3)],
)
def test_a_preset_is_the_released_model_with_its_balance(name, coefficient):
    described = hugging_face_config(PRESETS[name])
    assert described["router_aux_loss_coef"] == coefficient
    described["model_type"] = architecture(PRESETS[name]).model_type
    assert config_of(described, Path("config.json"))[0] == PRESETS[name]


def assert_same_files(before, after):
    """Two directories of Hugging Face's have the same tensors, bit for bit."""
    before, after = (
        {
            name: value
            for file in folder.glob("*.safetensors")
            for name, value in load_file(file).items()
        }
        for folder in (before, after)
    )
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)


@pytest.mark.parametrize(
    ("kind", "ranks", "flags"),
    [("mixtral", 0, ["--engine", "ddp"]), ("qwen3 moe", 2, ["--engine", "megatron", "--ep", "2"])],
)
def test_experts_of_no_presets_sizes_are_trained_from_a_directory_and_come_back(
    kind, ranks, flags, tokens, tmp_path, capsys
):
    """At a learning rate that changes no bit, they come back as they were."""
    model = theirs(tmp_path / "theirs", kind, vocab_size=257)
    flags += ["--load", str(tmp_path / "theirs"), "--data", str(tokens), "--device", "cpu"]
    flags += ["--steps", "1", "--lr", "1e-30", "--min-lr", "0", "--save-interval", "1"]
    run = tmp_path / "run"
    done = run_module("parallel.train", *flags, "--out", str(run), ranks=ranks)
    assert done.returncode == 0, done.stderr
    facts = read_run(run).facts
    assert facts["spec"]["experts"] == facts["model"]["experts"]
    assert checkpoint.main(["export", str(run), str(tmp_path / "w"), "--dtype", "fp32"]) == 0
    assert checkpoint.main(["verify", str(run), str(tmp_path / "theirs")]) == 0
    assert "step-00000001: good\n" in (said := capsys.readouterr().out)
    assert "have no checksums" in said
    assert_same_files(tmp_path / "theirs", tmp_path / "w")
    assert_same_logits(ours(tmp_path / "w"), model)
    assert_same_logits(
        ours(tmp_path / "w"), transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "w")
    )


class CountsBytes:
    """Stands for safe_open; counts the bytes that are asked of each file."""

    read = 0

    def __init__(self, *file, **how):
        self.opened = safe_open(*file, **how)

    def __enter__(self):
        return SimpleNamespace(get_slice=self.get_slice)

    def __exit__(self, *error):
        pass

    def get_slice(self, name):
        return SlicesOf(self.opened.get_slice(name))


class SlicesOf(NamedTuple):
    stored: Any

    def __getitem__(self, box):
        value = self.stored[box]
        CountsBytes.read += value.nbytes
        return value


def tp_pieces(config: GPTConfig, rank: int) -> list[Piece]:
    """What a rank of tp 2 holds, as the engines cut it."""
    pieces = []
    for name, shape in parameter_shapes(config).items():
        cut = ("embedding.word", "output", "attn.qkv", "mlp.up", "mlp.gate")
        axis = 0 if any(f".{word}." in f".{name}" for word in cut) else None
        if name.endswith(("attn.out.weight", "mlp.down.weight")):
            axis = 1
        part, offset = list(shape), [0] * len(shape)
        if axis is not None:
            middle = -(-shape[axis] // 2)
            part[axis] = middle if rank == 0 else shape[axis] - middle
            offset[axis] = rank * middle
        copy = Copy(0, 1) if axis is not None or rank == 0 else NEVER_SAVED
        tensors = {"param": torch.full((math.prod(part),), math.nan)}
        pieces.append(Piece(name, shape, tuple(offset), tuple(part), 0, tensors, copy))
    return pieces


@pytest.mark.parametrize("kind", THEIRS)
def test_a_run_starts_from_a_sharded_directory_and_each_rank_reads_what_it_holds(
    kind, tmp_path, monkeypatch
):
    theirs(tmp_path / "theirs", kind)
    imported = open_hugging_face(tmp_path / "theirs")
    spec = resolve(("flags", {"load": str(tmp_path / "theirs"), "data": "none"}))
    assert spec.model == imported.config and spec.seq_len == 16
    attempts.check_first(spec, tmp_path / "theirs")
    monkeypatch.setattr(hf_weights, "safe_open", CountsBytes)
    for rank in (0, 1):
        pieces, restored = tp_pieces(imported.config, rank), []
        engine = SimpleNamespace(
            state=lambda of=pieces: State(of), restore=lambda *to, of=restored: of.append(to)
        )
        monkeypatch.setattr(loading, "_check_all_filled", lambda *_: None)  # of one rank of two
        monkeypatch.setattr(CountsBytes, "read", 0)
        loaded = loading.load(engine, spec, Ranks(0, 1), tmp_path / "theirs")
        assert (loaded.step, restored) == (0, [(0, {})])
        held = sum(piece.tensors["param"].nbytes for piece in pieces)
        assert CountsBytes.read == held
        for piece in pieces:
            box = tuple(slice(o, o + n) for o, n in zip(piece.offset, piece.part, strict=True))
            wanted = imported.tensor(piece.name, box).flatten()
            assert torch.equal(piece.tensors["param"], wanted), piece.name
    files = (tmp_path / "theirs").glob("*.safetensors")
    assert loaded.bytes == sum(file.stat().st_size for file in files)


@pytest.mark.parametrize("kind", [kind for kind in OURS if not OURS[kind][0].experts])
def test_hugging_faces_class_starts_from_the_reference_weights(kind):
    config, name = OURS[kind]
    ours, theirs = gpt.GPT(config), hf_model.HuggingFaceGPT(config)
    gpt.initialise(ours, seed=3)
    hf_model.initialise(theirs, seed=3)
    tokens = torch.randint(config.vocab_size, (2, 16))
    assert type(theirs.theirs).__name__ == name
    assert torch.allclose(ours.logits(tokens), theirs.theirs(tokens).logits, atol=2e-6)


def test_the_rotary_frequencies_of_llama_3_1_are_transformers():
    config = preset("llama3-8b", rope_scaling=8.0, max_seq_len=131072)
    (wanted, scale) = transformers.modeling_rope_utils.ROPE_INIT_FUNCTIONS["llama3"](
        transformers.LlamaConfig(**hugging_face_config(config))
    )
    assert scale == 1.0
    found = gpt.rope_frequencies(config)
    torch.testing.assert_close(found, wanted, rtol=1e-6, atol=0)
    plain = gpt.rope_frequencies(PRESETS["llama3-8b"])
    stretched = (plain / found).round(decimals=3)
    assert stretched[0] == 1 and stretched[-1] == 8 and 1 < stretched[32] < 8  # all three cases


def test_rotary_frequencies_are_not_rounded_where_zero_3_builds_the_class(monkeypatch):
    arange = torch.arange  # as deepspeed.zero.Init patches it in bf16

    def rounded(*args, **kwargs):
        values = arange(*args, **kwargs)
        return values.bfloat16() if values.is_floating_point() else values

    monkeypatch.setattr(torch, "arange", rounded)
    model = hf_model.HuggingFaceGPT(LLAMA)
    monkeypatch.undo()
    found = model.theirs.model.rotary_emb.inv_freq
    # Exact: both do the same fp32 operations, in one process.
    assert torch.equal(found, gpt.rope_frequencies(LLAMA)) and found.dtype == torch.float32


def test_a_device_block_holds_where_megatron_core_runs_on_a_cpu():
    """transformers loads a model in one; without it, rotary frequencies are not filled."""
    script = "import torch; from parallel.engines import cpu; cpu.patch()\n"
    script += "with torch.device('meta'): assert torch.arange(3).is_meta and torch.ones(3).is_meta"
    subprocess.run([sys.executable, "-c", script], check=True, cwd=ROOT)


# config.json of meta-llama/Llama-3.1-8B and Qwen/Qwen3-0.6B, but for what neither side reads
RELEASED = {
    "llama3-8b": json.loads("""
{"model_type": "llama", "attention_bias": false, "hidden_act": "silu", "hidden_size": 4096,
"intermediate_size": 14336, "max_position_embeddings": 131072, "mlp_bias": false,
"num_attention_heads": 32, "num_hidden_layers": 32, "num_key_value_heads": 8, "rms_norm_eps": 1e-05,
"rope_scaling": {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
"original_max_position_embeddings": 8192, "rope_type": "llama3"}, "rope_theta": 500000.0,
"tie_word_embeddings": false, "vocab_size": 128256}
"""),
    "qwen3-0.6b": json.loads("""
{"model_type": "qwen3", "attention_bias": false, "head_dim": 128, "hidden_act": "silu",
"hidden_size": 1024, "intermediate_size": 3072, "max_position_embeddings": 40960,
"max_window_layers": 28, "num_attention_heads": 16, "num_hidden_layers": 28,
"num_key_value_heads": 8, "rms_norm_eps": 1e-06, "rope_scaling": null, "rope_theta": 1000000,
"sliding_window": null, "tie_word_embeddings": true, "use_sliding_window": false,
"vocab_size": 151936}
"""),
}


def test_a_released_config_json_is_the_preset_in_both_forms(tmp_path):
    for of, wanted in (
        (transformers.LlamaConfig, preset("llama3-8b", rope_scaling=8.0, max_seq_len=131072)),
        (transformers.Qwen3Config, preset("qwen3-0.6b", max_seq_len=40960)),
    ):
        (described,) = (r for r in RELEASED.values() if r["model_type"] == of.model_type)
        # and as transformers 5 writes it
        now = json.loads(of(**described).to_json_string())
        assert "rope_parameters" in now and "rope_theta" not in now
        assert config_of(described, tmp_path)[0] == config_of(now, tmp_path)[0] == wanted


def test_a_tokenizer_goes_along(tmp_path):
    from tokenizers import ByteLevelBPETokenizer

    bpe = ByteLevelBPETokenizer()
    bpe.train_from_iterator(["the cat sat on the mat"] * 3, 270, special_tokens=["<|endoftext|>"])
    (tmp_path / "data").mkdir()
    bpe.save(str(tmp_path / "data" / "tokenizer.json"))
    config = replace(SMALL, vocab_size=bpe.get_vocab_size())
    weights = gpt.GPT(config).state_dict()
    facts = {"run": "imported from a test"}
    foreign = WholeCheckpoint(config, 7, 7, ("param",), lambda name, _: weights[name], facts)
    our_door.write(tmp_path / "ck", foreign)
    words = ["export", str(tmp_path / "ck"), str(tmp_path / "gpt2"), "--dtype", "fp32"]
    assert checkpoint.main([*words, "--tokenizer", str(tmp_path / "data")]) == 0
    model = transformers.GPT2LMHeadModel.from_pretrained(tmp_path / "gpt2")
    assert model.dtype == torch.float32
    assert model.config.eos_token_id == bpe.token_to_id("<|endoftext|>")
    assert transformers.AutoTokenizer.from_pretrained(tmp_path / "gpt2")("the cat")["input_ids"]
    original = (tmp_path / "data" / "tokenizer.json").read_bytes()
    assert (tmp_path / "gpt2" / "tokenizer.json").read_bytes() == original


def test_a_padded_vocabulary_is_cut(tmp_path):
    model = theirs(tmp_path / "gpt2", vocab_size=64)
    config = json.loads((tmp_path / "gpt2" / "config.json").read_text())
    (tmp_path / "gpt2" / "config.json").write_text(json.dumps(config | {"vocab_size": 61}))
    assert open_hugging_face(tmp_path / "gpt2").config.vocab_size == 61
    assert_same_logits(ours(tmp_path / "gpt2"), model)


@pytest.mark.parametrize(
    ("kind", "changes", "why"),
    [
        ("gpt2", {"activation_function": "relu"}, "activation_function is 'relu', but our GPT has"),
        ("gpt2", {"n_head": 3}, "hidden 32 is not a multiple of n_head 3"),
        ("gpt2", {"n_inner": 96}, r"h.0.mlp.c_fc.weight is \[32, 128\], not \[32, 96\]"),
        ("gpt2", {"n_layer": 3}, "transformer.h.2.ln_1.weight is missing"),
        ("gpt2", {"vocab_size": 70}, "the embedding has 61 rows for a vocabulary of 70"),
        (
            "gpt2",
            {"n_layer": 10**9},
            "n_layer must be at least 1 and at most 10000, not 1000000000",
        ),
        ("gpt2", {"n_embd": 10**12}, "hidden must be at least 1 and at most 1048576, not 10000000"),
        ("gpt2", {"n_inner": 10**12}, "ffn_hidden must be at least 0 and at most 4194304, not 100"),
        ("gpt2", {"n_positions": 10**12}, "max_seq_len must be at least 1 and at most 16777216"),
        ("gpt2", {"vocab_size": 10**12}, "vocab_size must be at least 1 and at most 16777216, not"),
        ("gpt2", {"model_type": None}, "states no model_type; of a run, python -m parallel.check"),
        ("gpt2", {"model_type": "gpt_neox"}, "model_type 'gpt_neox' is not one that our GPT can"),
        ("llama", {"sliding_window": 8}, "sliding_window is 8, but our GPT has no such"),
        ("llama", {"mlp_bias": True}, "attention_bias is False, but our GPT has no such"),
        ("llama", {"hidden_size": None}, "hidden must be at least 1"),
        ("llama", {"tie_word_embeddings": True}, "lm_head.weight differs from embed_tokens.wei"),
        ("llama", {"rope_scaling": {"type": "linear", "factor": 2}}, "rope_type is 'linear'"),
        ("llama", {"rope_scaling": _LLAMA3 | {"low_freq_factor": 2}}, "low_freq_factor of the rot"),
        ("llama", {"rope_scaling": {"rope_type": "llama3", "factor": 8}}, "is None, but our GPT"),
        ("llama", {"rope_scaling": 8}, "rotary positions must be an object, not 8"),
        ("llama", {"partial_rotary_factor": 0.5}, "partial_rotary_factor of the rotary positions"),
        ("qwen3", {"attention_bias": True}, "attention_bias is True, but our GPT has no such"),
        ("qwen3", {"layer_types": ["full_attention", "sliding_attention"]}, "layer_types is"),
    ],
)
def test_a_model_that_our_gpt_cannot_be_is_refused_in_one_line(tmp_path, kind, changes, why):
    theirs(tmp_path / "theirs", kind)
    path = tmp_path / "theirs" / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    with pytest.raises(UsageError, match=why) as refused:
        open_hugging_face(tmp_path / "theirs")
    assert "\n" not in str(refused.value)


def test_what_config_json_leaves_out_is_what_transformers_takes(tmp_path):
    llama = _SIZES | {"num_key_value_heads": 4, "sliding_window": None, "rms_norm_eps": 1e-6}
    absent = {"num_key_value_heads", "head_dim", "attention_bias", "mlp_bias", "rope_parameters"}
    gpt2 = {"num_hidden_layers": 3, "hidden_size": 64, "num_attention_heads": 16}
    for of, sizes, missing in (
        (transformers.LlamaConfig, llama, absent | {"tie_word_embeddings"}),
        (transformers.MistralConfig, llama, {"head_dim", "tie_word_embeddings", "rope_parameters"}),
        (
            transformers.GPT2Config,
            gpt2,
            transformers.GPT2Config().to_dict().keys() - {"model_type"},
        ),
    ):
        whole = of(**sizes).to_dict()
        part = {k: v for k, v in whole.items() if k not in missing}
        assert config_of(part | sizes, tmp_path) == config_of(whole, tmp_path)
    mistral = transformers.MistralConfig().to_dict()
    for whole, name, why in (
        (RELEASED["llama3-8b"], "hidden_size", "hidden_size is missing"),
        (RELEASED["llama3-8b"], "rms_norm_eps", "rms_norm_eps is missing"),
        (mistral, "sliding_window", "sliding_window is 4096"),
    ):
        with pytest.raises(UsageError, match=why):
            config_of({k: v for k, v in whole.items() if k != name}, tmp_path)


def test_a_model_that_no_class_has_is_refused_with_what_the_classes_have(tmp_path):
    why = "GPT2LMHeadModel has position learned, not rope; LlamaForCausalLM"
    with pytest.raises(UsageError, match=why):
        exported(replace(SMALL, position="rope"), tmp_path / "theirs")
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(UsageError, match=why):
        resolve(("test", {"implementation": "hf", "device": "cpu", "position": "rope"}))


def test_a_llama_whose_hidden_size_its_heads_do_not_divide_has_no_class():
    config = replace(LLAMA, hidden=34, kv_channels=8)
    with pytest.raises(UsageError, match="hidden a multiple of n_head 4, not 34"):
        hugging_face_config(config)
    transformers.Qwen3Config(**hugging_face_config(replace(config, qk_norm=True)))


def test_old_names_and_a_repeated_output_layer_are_read(tmp_path):
    model = theirs(tmp_path / "gpt2")
    path = tmp_path / "gpt2" / "model.safetensors"
    # as the released GPT-2 names them: no prefix, and the causal masks in the file
    tensors = {n.removeprefix("transformer."): t for n, t in load_file(path).items()}
    tensors["h.0.attn.bias"] = torch.ones(1, 1, 16, 16)
    tensors["lm_head.weight"] = tensors["wte.weight"].clone()
    save_file(tensors, path)
    assert_same_logits(ours(tmp_path / "gpt2"), model)
    tensors["lm_head.weight"][0, 0] += 1  # it is not tied
    save_file(tensors, path)
    with pytest.raises(UsageError, match="lm_head.weight differs from wte.weight"):
        open_hugging_face(tmp_path / "gpt2")


@pytest.fixture
def one_rank():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.parametrize("implementation", ["gpt", "hf"])
def test_a_llama_that_was_loaded_or_is_hugging_faces_goes_on_bit_for_bit(
    implementation, tokens, tmp_path, one_rank
):
    theirs(tmp_path / "llama", "llama", vocab_size=257)
    weights, saved = tmp_path / "llama", tmp_path / "checkpoints"
    settings = open_hugging_face(weights).config.as_dict()
    settings |= {"implementation": implementation, "steps": 4, "save_interval": 2, "lr": 1e-2}
    settings |= {"device": "cpu", "data": str(tokens), "global_batch": 4}
    spec = resolve(("test", settings))
    corpus = token_files.load(tokens, spec.seq_len, 257)
    # Weights alone are our GPT's: Hugging Face's class starts from drawn ones.
    load = weights if implementation == "gpt" else None
    straight = checkpoint_worker.train(spec, saved, corpus, load)
    again = checkpoint_worker.train(spec, saved, corpus, saved / "step-00000002")
    # Exact: one process does the same operations in the same order.
    assert (straight.first, again.first) == (0, 2) and again.curve == straight.curve[2:]
    assert straight.curve[0][0] > straight.curve[-1][0]
    assert all(torch.equal(a, b) for a, b in zip(again.bits, straight.bits, strict=True))


class Malicious:
    def __reduce__(self):
        return os.mkdir, (os.environ["PICKLE_RAN"],)


@pytest.mark.parametrize("write", [theirs, functools.partial(exported, SMALL)])
def test_a_pickle_is_refused_and_never_runs(write, tmp_path, monkeypatch):
    monkeypatch.setenv("PICKLE_RAN", str(tmp_path / "ran"))
    folder = tmp_path / "folder"
    write(folder)
    (folder / "model.safetensors").unlink()
    torch.save(Malicious(), folder / "pytorch_model.bin")
    with pytest.raises(UsageError, match=r"holds pickles \(pytorch_model.bin\).* save_pretrained"):
        open_hugging_face(folder)
    assert not (tmp_path / "ran").exists()
    torch.load(folder / "pytorch_model.bin", weights_only=False)  # it is a pickle that would run
    assert (tmp_path / "ran").exists()


def test_a_tokenizer_with_an_id_without_a_row_is_refused(tmp_path):
    with pytest.raises(UsageError, match="the tokenizer has 62 ids, but the model has 61"):
        write_hugging_face(tmp_path / "out", SMALL, None, tokenizer=Tokenizer([], 62, None))
