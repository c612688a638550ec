"""The GPT: published sizes, one arithmetic, and weights that depend on nothing but the seed."""

import csv
import importlib.util
import json
import math
import re
from dataclasses import fields, replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from base.errors import UsageError
from models import flops, gpt, hf_model
from models.config import (
    PRESETS,
    Experts,
    GPTConfig,
    LatentAttention,
    SlidingWindow,
    parameter_shapes,
    preset,
)
from models.hf_config import architecture
from parallel.config.engine_abilities import ENGINES
from parallel.config.resolve import resolve
from parallel.engines.reference import build_reference
from parallel.measure.rehearsal import Memory

TINY = PRESETS["tiny"]


# Parameters of the released checkpoints, counted in their files; of those with a tied output layer
# (GPT-2, Qwen3 up to 4B) without it. GPT-3's is what the paper's sizes make; it prints 13.0.
RELEASED = {
    "gpt2-124m": 124_439_808,
    "gpt2-355m": 354_823_168,
    "gpt2-774m": 774_030_080,
    "gpt2-1.5b": 1_557_611_200,
    "gpt3-13b": 12_853_386_240,
    "llama2-7b": 6_738_415_616,
    "llama2-13b": 13_015_864_320,
    "llama2-70b": 68_976_648_192,
    "llama3-8b": 8_030_261_248,
    "llama3-70b": 70_553_706_496,
    "llama3-405b": 405_853_388_800,
    "qwen3-0.6b": 596_049_920,
    "qwen3-1.7b": 1_720_574_976,
    "qwen3-4b": 4_022_468_096,
    "qwen3-8b": 8_190_735_360,
    "qwen3-14b": 14_768_307_200,
    "qwen3-32b": 32_762_123_264,
    "mixtral-8x7b": 46_702_792_704,
    "mixtral-8x22b": 140_620_634_112,
    "qwen3-30b-a3b": 30_532_122_624,
    "qwen3-235b-a22b": 235_093_634_560,
    "deepseek-v2-lite": 15_706_484_224,
    "deepseek-v2": 235_741_434_880,
    "deepseek-v3": 671_026_419_200,
    # Its files hold the tables of the predicting block once more, which are the model's own.
    "deepseek-v3-mtp": 684_489_845_504 - 2 * 129280 * 7168,
    # Numbers of 4 bits count one each, the scales that 32 of them share do not.
    "gpt-oss-20b": 20_914_757_184,
    "gpt-oss-120b": 116_829_156_672,
}
# Active parameters in billions as papers and cards print them, rounded or cut; DeepSeek and OpenAI
# leave the input embedding out (README_WEIGHTS.md of DeepSeek-V3; arXiv 2508.10925, table 1).
ACTIVE = {"mixtral-8x7b": 12.9, "mixtral-8x22b": 39, "qwen3-30b-a3b": 3.3, "qwen3-235b-a22b": 22}
ACTIVE_WITHOUT = {"deepseek-v2-lite": 2.4, "deepseek-v2": 21, "deepseek-v3": 36.6}
ACTIVE_WITHOUT |= {"gpt-oss-20b": 3.61, "gpt-oss-120b": 5.13}
# Narayanan et al. SC'21, table 1 and (175b) table 2, in billions as printed.
PRINTED = {"1.7b": 1.7, "3.6b": 3.6, "7.5b": 7.5, "18b": 18.4, "39b": 39.1, "76b": 76.1}
PRINTED |= {"145b": 145.6, "175b": 174.6, "310b": 310.1, "530b": 529.6, "1t": 1008.0}


def test_presets_have_the_released_and_the_printed_parameter_counts():
    assert {name: PRESETS[name].n_params for name in RELEASED} == RELEASED
    assert {name: round(PRESETS[name].n_params / 1e9, 1) for name in PRINTED} == PRINTED


def test_a_token_meets_the_active_parameters_that_are_printed():
    for name, printed in (ACTIVE | ACTIVE_WITHOUT).items():
        config = PRESETS[name]
        embedding = config.vocab_size * config.hidden if name in ACTIVE_WITHOUT else 0
        last_digit = 10.0 ** -len(str(printed).partition(".")[2])
        assert abs((config.n_active - embedding) / 1e9 - printed) < last_digit, name
    # Counted in the files: all but the 14,848 biases that balance the load.
    assert PRESETS["deepseek-v3"].n_active == 37_552_282_624 + 58 * 256
    assert PRESETS["tiny"].n_active == PRESETS["tiny"].n_params


@pytest.mark.parametrize("name", ["tiny-moe", "tiny-mla-moe", "gpt-oss-20b", "deepseek-v3-mtp"])
def test_each_parameter_of_a_model_with_experts_has_a_name(name):
    config, shapes = PRESETS[name], parameter_shapes(PRESETS[name])
    assert sum(map(math.prod, shapes.values())) == config.n_params
    of_experts = {key.split(".experts.")[0] for key in shapes if ".experts." in key}
    assert len(of_experts) == config.expert_layers
    restored = GPTConfig(**json.loads(json.dumps(config.as_dict())))
    assert restored == config and replace(config, max_seq_len=64).parts == config.parts


def test_the_names_are_megatron_cores():
    core = Path(importlib.util.find_spec("megatron.core").origin).parent  # not imported: it warns
    text = (core / "transformer" / "transformer_config.py").read_text()
    theirs = {*re.findall(r"^    (\w+):", text, re.MULTILINE), "num_experts"}  # num_moe_experts
    ours = {f.name for of in (Experts, LatentAttention, SlidingWindow) for f in fields(of)}
    assert ours - theirs == {"first_dense", "norm_topk_prob"}
    assert {"mtp_num_layers", "softmax_type"} <= theirs


def test_layers_with_experts_are_those_of_the_released_models():
    layers = list(PRESETS["deepseek-v3-mtp"].blocks.values())
    assert layers == [False] * 3 + [True] * 59
    every_second = Experts(8, 2, first_dense=1, moe_layer_freq=2)  # Llama 4 Maverick's 1, 3, 5
    maverick = replace(PRESETS["tiny-moe"], n_layer=6, experts=every_second)
    assert list(maverick.blocks.values()) == [False, True] * 3
    for config in (maverick, replace(maverick, n_layer=5), PRESETS["deepseek-v3-mtp"]):
        assert sum(config.blocks.values()) == config.expert_layers


def test_a_dense_model_is_written_as_before_there_were_experts():
    sizes = "n_layer hidden n_head n_kv_head kv_channels ffn_hidden vocab_size max_seq_len position"
    sizes += " rope_theta rope_scaling norm norm_eps qk_norm activation tied bias"
    dense = [config for config in PRESETS.values() if not config.parts]
    assert {tuple(config.as_dict()) for config in dense} == {tuple(sizes.split())}
    assert len(PRESETS) - len(dense) == 12


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("name", ["tiny-moe", "tiny-mla-moe", "gpt-oss-20b", "deepseek-v3-mtp"])
def test_no_engine_and_no_class_of_hugging_faces_takes_what_it_does_not_compute(engine, name):
    parts = {*PRESETS[name].parts} - {*ENGINES[engine].parts}
    if parts:
        with pytest.raises(UsageError, match=f"engine {engine} trains no model with ") as no:
            resolve(("test", {"engine": engine, "preset": name}))
        able = [e for e, a in ENGINES.items() if not {*PRESETS[name].parts} - {*a.parts}]
        others = f"engines that do: {', '.join(able)}" if able else "no engine here does"
        assert others in str(no.value)
    if name != "tiny-moe":
        with pytest.raises(UsageError, match="a model with .* is not written as Hugging Face's"):
            architecture(PRESETS[name])


def test_msize_presets_are_the_published_shapes(shared):
    text = (shared / "published" / "seed003_jeanzay_v100.csv").read_text()
    rows = [row for row in csv.DictReader(text.splitlines()) if row["hidden"]]
    sizes = ("layers", "hidden", "heads")
    shapes = {f"msize-{row['params_b']}b": tuple(int(row[k]) for k in sizes) for row in rows}
    del shapes["msize-50b"]  # the 16 GB table's label for the shape that is 52B elsewhere
    msize = {name: config for name, config in PRESETS.items() if name.startswith("msize-")}
    # 181B is in the checkpoint-save table alone, by size: a shape that holds as many parameters.
    assert msize.pop("msize-181b").n_params == pytest.approx(181e9, rel=0.01)
    assert {name: (c.n_layer, c.hidden, c.n_head) for name, c in msize.items()} == shapes


def test_parameter_count_is_what_the_model_holds():
    others = {"bias": False, "tied": False, "qk_norm": True, "kv_channels": 16}
    llama = PRESETS["tiny-llama"]
    for config in (
        TINY,
        replace(TINY, ffn_hidden=96, n_layer=1),
        llama,
        *(replace(of, **{k: v}) for of in (TINY, llama) for k, v in others.items()),
    ):
        model = gpt.GPT(config)
        assert sum(p.numel() for p in model.parameters()) == config.n_params
        shapes = {name: tuple(p.shape) for name, p in model.named_parameters()}
        assert shapes == parameter_shapes(config)


def test_sizes_that_do_not_fit_are_refused_with_the_numbers():
    with pytest.raises(UsageError, match="hidden 100 is not a multiple of n_head 3"):
        GPTConfig(n_layer=1, hidden=100, n_head=3)
    with pytest.raises(UsageError, match="n_layer must be at least 1 .*, not 0"):
        GPTConfig(n_layer=0, hidden=8, n_head=1)
    close = {"llama3-8B": "llama3-8b", "gpt2-1.5": "gpt2-1.5b", "175B": "175b"}
    for name, nearest in (close | {"mixtral": "mixtral-8x7b"}).items():
        with pytest.raises(UsageError, match=f"'{name}'; did you mean {nearest}\\? known: "):
            preset(name)
    with pytest.raises(UsageError, match="moe_router_topk 9 exceeds num_experts 8"):
        Experts(8, 9)
    with pytest.raises(UsageError, match="group_topk 3 of moe_router_num_groups 2 cannot .* 8"):
        Experts(8, 2, moe_router_num_groups=2, moe_router_group_topk=3)
    with pytest.raises(UsageError, match="first_dense 3 leaves no experts in n_layer 2"):
        preset("deepseek-v3", n_layer=2)
    with pytest.raises(UsageError, match="experts: unknown capacity"):
        GPTConfig(2, 8, 1, experts={"num_experts": 8, "moe_router_topk": 2, "capacity": 1})
    with pytest.raises(UsageError, match="unknown preset 'huge'; known: tiny"):
        preset("huge")


def test_a_new_hidden_size_brings_its_own_ffn():
    assert preset("gpt2-124m", hidden=1536).ffn_hidden == 4 * 1536
    assert preset("gpt2-124m", hidden=1536, ffn_hidden=100).ffn_hidden == 100
    assert preset("qwen3-4b", hidden=1024).head_dim == 32
    gelu = preset("qwen3-4b", activation="gelu")
    assert (gelu.ffn_hidden, gelu.head_dim, gelu.kv_heads) == (4 * 2560, 128, 8)
    assert preset("qwen3-4b", n_head=16).kv_heads == 16
    for name, has in PRESETS.items():  # stating what it has changes nothing
        stated = {"hidden": has.hidden, "activation": has.activation, "n_head": has.n_head}
        assert preset(name, **stated) == has


def test_padding_makes_the_vocabulary_a_multiple_of_128_times_tp_as_megatron_does():
    assert [PRESETS["gpt2-124m"].padded_vocab(tp) for tp in (1, 2, 8)] == [50304, 50432, 51200]
    assert [TINY.padded_vocab(tp, 1) for tp in (1, 2, 3, 4)] == [257, 258, 258, 260]


@pytest.mark.parametrize("backend", [None, "aot_eager"])
@pytest.mark.parametrize("name", ["tiny", "tiny-llama"])
def test_padded_rows_change_no_loss_and_get_no_gradient(name, backend):
    tokens, labels = torch.randint(TINY.vocab_size, (2, 2, 32))
    found, config = [], replace(PRESETS[name], n_layer=1)
    for rows in (0, 384):
        model = gpt.GPT(config, vocab_rows=rows)
        gpt.initialise(model, seed=0)
        if backend:
            model.compile(backend=backend)
        loss = model(tokens, labels)
        loss.backward()
        found.append((loss.detach(), {n: p.grad for n, p in model.named_parameters()}))
    (plain, grads), (padded, of_padded) = found
    assert torch.allclose(plain, padded, rtol=1e-6)
    for parameter, gradient in grads.items():
        ours = of_padded[parameter]
        assert not ours[len(gradient) :].any()
        assert torch.allclose(ours[: len(gradient)], gradient, atol=1e-7), parameter


@pytest.mark.parametrize("name", ["tiny", "tiny-llama"])
def test_model_is_causal(name):
    model = gpt.GPT(PRESETS[name])
    gpt.initialise(model, seed=0)
    tokens = torch.randint(TINY.vocab_size, (1, 16))
    changed = tokens.clone()
    changed[0, 10] = (tokens[0, 10] + 1) % TINY.vocab_size
    before, after = model.logits(tokens), model.logits(changed)
    # Exact: the same operations on the same shapes, a row of which sees no other row.
    assert torch.equal(before[:, :10], after[:, :10])
    assert not torch.allclose(before[:, 10:], after[:, 10:])


def test_keys_repeated_for_their_queries_change_no_attention(monkeypatch):
    q_BNSD = torch.randn(2, 4, 5, 8)
    k_BKSD, v_BKSD = torch.randn(2, 2, 2, 5, 8)
    masks = (None, torch.ones(2, 1, 5, 5).tril().bool())
    shared = [gpt.fused_attention(q_BNSD, k_BKSD, v_BKSD, mask) for mask in masks]
    monkeypatch.setattr(gpt, "_takes_fewer_keys", lambda *_: False)  # as in fp32 on a GPU
    for mask, expected in zip(masks, shared, strict=True):
        repeated = gpt.fused_attention(q_BNSD, k_BKSD, v_BKSD, mask)
        torch.testing.assert_close(repeated, expected)
    torch.testing.assert_close(*shared)


def test_recompute_changes_no_gradient():
    tokens, labels = torch.randint(TINY.vocab_size, (2, 2, 32))
    grads = []
    for recompute in ("none", *gpt.RECOMPUTED):
        model = gpt.GPT(TINY, recompute)
        gpt.initialise(model, seed=0)
        model(tokens, labels).backward()
        grads.append([p.grad for p in model.parameters()])
    # Exact: what is computed again is computed by the same operations in one process.
    assert all(all(map(exact.equal, others)) for exact, *others in zip(*grads, strict=True))


@pytest.mark.filterwarnings("ignore:.gradient_checkpointing_enable:FutureWarning")
@pytest.mark.parametrize("implementation", [gpt.GPT, hf_model.HuggingFaceGPT])
def test_recomputation_repeats_no_product_or_all_of_every_block(implementation):
    """Four passes through the layers, as `sc21` counts full recomputation."""
    counted, attention = {}, torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    more = {attention: lambda q_BNSD, *_, **__: 4 * math.prod(q_BNSD) * q_BNSD[2]}
    for recompute in ("none", *gpt.RECOMPUTED):
        with FlopCounterMode(display=False, custom_mapping=more) as counter:
            model = implementation(TINY, recompute)
            model(*torch.randint(TINY.vocab_size, (2, 2, 32))).backward()
        counted[recompute] = counter.get_total_flops()
    assert counted["none"] == counted["selective"]
    one_pass = flops.sc21(TINY, 32, recompute=True) - flops.sc21(TINY, 32, recompute=False)
    for whole in ("full", "reentrant"):
        assert counted[whole] - counted["none"] == 2 * 32 * one_pass


def test_a_part_of_a_parameter_is_drawn_without_the_rest_and_is_that_part(monkeypatch):
    """Any box of odd sizes, and any run of its elements; rows behind the last are zeros."""
    config = GPTConfig(n_layer=1, hidden=35, n_head=5, vocab_size=61, max_seq_len=9)
    drawn, raw = [], np.random.PCG64DXSM

    class Counting(raw):
        def random_raw(self, size):
            drawn.append(2 * size)
            return super().random_raw(size)

    monkeypatch.setattr(np.random, "PCG64DXSM", Counting)
    for name in ("embedding.word.weight", "blocks.0.mlp.down.weight", "norm.weight"):
        full = gpt.init_parameter(config, name, seed=5)
        last = full.shape[-1]
        for offset, part in [((0, 0), (7, last)), ((3, 11), (20, 9)), ((30, last - 5), (9, 5))]:
            offset, part = offset[-full.dim() :], part[-full.dim() :]
            drawn.clear()
            box = tuple(slice(o, o + n) for o, n in zip(offset, part, strict=True))
            flat, rest = full[box].reshape(-1), math.prod(part) - full[box].numel()
            flat = torch.cat([flat, torch.zeros(rest)])
            place = config, name, 5, offset, part
            assert torch.equal(gpt.starting_values(*place, 2, 3), flat[2:5])
            assert torch.equal(gpt.starting_values(*place, 0, len(flat)), flat)
            assert sum(drawn) <= len(flat) + 3 + 2 * (part[0] + 2)
        with gpt.not_drawn():
            drawn.clear()
            assert gpt.init_parameter(config, name, seed=5).isnan().all()
            assert drawn == []
    with gpt.not_drawn():  # what pads the vocabulary is never loaded
        values = gpt.starting_values(config, "embedding.word.weight", 5, (60, 0), (2, 35), 0, 70)
    assert values[:35].isnan().all()
    assert (values[35:] == 0).all()


def test_parameters_are_normal_and_know_nothing_of_each_other():
    """Mean, deviation, tails and correlations of 4 million numbers, within 4.5 standard errors."""
    sizes = {"n_layer": 2, "hidden": 1024, "n_head": 8, "vocab_size": 64, "max_seq_len": 16}
    one, other = (
        gpt.init_parameter(GPTConfig(**sizes), f"blocks.{i}.mlp.up.weight", 1).double() / 0.02
        for i in (0, 1)
    )
    n = one.numel()
    assert abs(float(one.mean())) * math.sqrt(n) < 4.5
    assert abs(float(one.square().mean()) - 1) * math.sqrt(n / 2) < 4.5
    beyond = (one.abs() > 3).double().mean()
    expected = math.erfc(3 / math.sqrt(2))
    assert abs(float(beyond) - expected) < 4.5 * math.sqrt(expected / n)
    assert 4.7 < float(one.abs().max()) < 5.43  # the last of 2^24 steps is 5.42
    for a, b in ((one, other), (one[1:], one[:-1]), (one[:, 1:], one[:, :-1])):
        assert abs(float((a * b).mean())) * math.sqrt(a.numel()) < 4.5


def test_ddp_and_zero_build_on_the_device_and_not_in_host_memory():
    """ "meta" stands for the device: it takes no memory of the host."""
    spec = resolve(("test", {"preset": "small", "recompute": "selective"}), gpus=1)
    with Memory(vocabulary=0) as memory:
        memory.restart()
        model = build_reference(spec, torch.device("meta"), torch.bfloat16)
    assert {(p.device.type, p.dtype) for p in model.parameters()} == {("meta", torch.bfloat16)}
    assert model.recompute == "selective"
    largest = max(math.prod(shape) for shape in parameter_shapes(spec.model).values())
    assert sum(memory.peak.values()) <= 2 * 4 * largest < 4 * spec.model.n_params / 4


def test_starting_weights_depend_on_seed_and_name_alone(monkeypatch):
    """Not on what torch makes new tensors of: DeepSpeed's zero.Init gives them 16 bits on a GPU,
    where no CPU's generator draws numbers."""
    name, empty = "blocks.2.attn.qkv.weight", torch.empty
    first = gpt.init_parameter(TINY, name, seed=1)
    torch.manual_seed(99)
    with monkeypatch.context() as patch:
        patch.setattr(torch, "empty", lambda *shape, **words: empty(*shape, device="meta"))
        assert torch.equal(first, gpt.init_parameter(TINY, name, seed=1))
    assert not torch.equal(first, gpt.init_parameter(TINY, name, seed=2))
    assert not torch.equal(first, gpt.init_parameter(TINY, "blocks.1.attn.qkv.weight", seed=1))
    assert abs(float(first.std()) - 0.02) < 0.001
    residual = gpt.init_parameter(TINY, "blocks.2.attn.out.weight", seed=1)
    assert abs(float(residual.std()) - 0.02 / math.sqrt(2 * TINY.n_layer)) < 0.001
