"""FLOPs: each convention against a number somebody else printed."""

import math
from dataclasses import replace

import pytest

from analysis.logs.model import config_of
from analysis.published.published_runs import named_rows, record_of
from base.files import ROOT
from models import flops
from models.config import PRESETS, GPTConfig, SlidingWindow, parameter_shapes, preset


def test_sc21_is_the_papers_equation_three():
    config, B, s = PRESETS["175b"], 1536, 2048
    L, h, V = config.n_layer, config.hidden, config.vocab_size
    paper = 96 * B * s * L * h**2 * (1 + s / (6 * h) + V / (16 * L * h))
    assert flops.sc21(config, s, recompute=True) * B * s == pytest.approx(paper, rel=1e-12)


def test_seed_rule_gives_the_jean_zay_tables_own_number():
    # "(52*4*2*1024*4*1*256)/(122*16*4*1000)" is printed there as 55.8667...
    nominal = GPTConfig(n_layer=64, hidden=8192, n_head=32)
    tokens, seconds, gpus = 1024 * 1024, 122, 64
    for recompute, each in ((True, 8), (False, 6)):
        per_parameter = flops.seed(nominal, 1024, recompute) / nominal.n_params
        tflops = per_parameter * 52e9 * tokens / seconds / gpus / 1e12
        assert per_parameter == each and tflops == pytest.approx(55.86675 * each / 8, abs=1e-4)


def test_megatron_counts_the_causal_half_of_attention():
    config, s = PRESETS["gpt2-124m"], 1024
    full = flops.sc21(config, s, recompute=False)
    half_of_attention = 6 * config.n_layer * config.hidden * s
    for recompute in (False, True):
        assert flops.megatron(config, s, recompute) == pytest.approx(full - half_of_attention)


def test_tflops_divide_by_seconds_and_gpus():
    config = PRESETS["gpt2-124m"]
    one = flops.tflops_per_gpu(config, 1024, tokens=1e6, seconds=10, gpus=1)
    assert one == pytest.approx(flops.megatron(config, 1024, False) * 1e6 / 10 / 1e12)
    assert flops.tflops_per_gpu(config, 1024, 1e6, 10, gpus=4) == pytest.approx(one / 4)


# Models whose TFLOP/s or FLOPs other programs printed, and that no preset has.
GEMMA = {"activation": "swiglu", "bias": False}  # its GELU gate has the FLOPs of a SiLU gate
GEMMA_7B = GPTConfig(28, 3072, 16, vocab_size=256128, ffn_hidden=24576, kv_channels=256, **GEMMA)
GEMMA_2B = GPTConfig(18, 2048, 8, vocab_size=256128, ffn_hidden=16384, n_kv_head=1, **GEMMA)
SUPERBENCH = GPTConfig(32, 4096, 32, vocab_size=50304, max_seq_len=2048)
SUPERBENCH_RATE = 2048 * 2048 / 74.4949 / 16
MPT_13B = GPTConfig(40, 5120, 40, vocab_size=50368, max_seq_len=2048)
LLAMA2, LLAMA3 = PRESETS["llama2-7b"], PRESETS["llama3-405b"]
QWEN3_14B = preset(
    "qwen3-4b", n_layer=40, hidden=5120, n_head=40, n_kv_head=8, ffn_hidden=17408, tied=False
)


@pytest.mark.parametrize(
    ("convention", "config", "seq_len", "tokens", "printed"),
    [
        # Brown et al. 2020, table D.1; Grattafiori et al. 2024: of the whole training.
        ("6n", PRESETS["175b"], 2048, 300e9, 3.14e23),
        ("6n", LLAMA3, 2048, 15.6e12, 3.8e25),
        # MaxText's pull request 644: of a device's step of 12 sequences. Grouped queries (70b), one
        # head of keys (gemma-2b), heads of 256 in 3,072 (gemma-7b).
        ("megatron-full", LLAMA2, 2048, 12 * 2048, 1053.4e12),
        ("megatron-full", PRESETS["llama2-70b"], 2048, 12 * 2048, 10528.0e12),
        ("megatron-full", GEMMA_7B, 2048, 12 * 2048, 1328.2e12),
        ("megatron-full", GEMMA_2B, 2048, 12 * 2048, 391.8e12),
        # MaxText's pull request 1988: before and after, 4 sequences a device.
        ("megatron-full", LLAMA2, 129024, 4 * 129024, 125194.40e12),
        ("megatron", LLAMA2, 129024, 4 * 129024, 72826.86e12),
        # The README of NVIDIA's dgxc-benchmarking: 9.479 s, on 256 GB200.
        ("megatron-full", LLAMA3, 8192, 128 * 8192 / 9.479 / 256, 1134.50e12),
        # A log of Primus: 14947.2 ms on 8 GPUs; of torchtitan: 6,922 tokens/s of a GPU.
        ("megatron-full", PRESETS["llama3-8b"], 8192, 128 * 8192 / 8 / 14.9472, 507.8e12),
        ("palm", QWEN3_14B, 4096, 6922, 650.69e12),
        # A log of Megatron-DeepSpeed in superbenchmark: 74494.9 ms on 16 GPUs. It takes 3/4 of the
        # paper's equation 3 with recomputation, and so of the output layer's 6 h V.
        ("sc21", SUPERBENCH, 2048, SUPERBENCH_RATE, 150.62e12 + 6144 * 50304 * SUPERBENCH_RATE),
        # llm-foundry's benchmarks' README: tokens/s of an H100. Its P has the position embedding.
        ("palm", MPT_13B, 2048, 307209 / 64, 394.3653e12 - 6 * 2048 * 5120 * 307209 / 64),
    ],
)
def test_others_printed_what_is_counted(convention, config, seq_len, tokens, printed):
    per_token = flops.CONVENTIONS[convention](config, seq_len, False)
    rel = 5e-3 if convention == "6n" else 1.5e-4  # as it is rounded
    assert per_token * tokens == pytest.approx(printed, rel=rel)


WITH_EXPERTS = [name for name, config in PRESETS.items() if config.parts]


@pytest.mark.parametrize("name", WITH_EXPERTS)
def test_the_matrices_that_a_token_meets_are_counted_once_and_routers_by_palm_alone(name):
    config, of = PRESETS[name], PRESETS[name].experts
    shapes = {k: math.prod(v) for k, v in parameter_shapes(config).items() if len(v) == 2}
    table = config.vocab_size * config.hidden
    routers = sum(n for k, n in shapes.items() if "router" in k)
    experts = sum(n for k, n in shapes.items() if ".experts." in k)
    chosen = experts * of.moe_router_topk // of.num_experts
    matrices = sum(shapes.values()) - table - routers - experts + chosen  # a table is looked up
    vectors = config.n_active - table - matrices - routers  # norms, biases, sinks
    again = config.mtp_num_layers * table  # the output layer's further passes
    value = config.mla.v_head_dim if config.mla else config.head_dim
    scores = config.n_blocks * config.n_head * (config.head_dim + value)  # of one token
    counted = flops.megatron(config, 1, recompute=False, causal=False)
    assert counted == 6 * (matrices + again + scores)
    assert flops.palm(config, 1, False) == counted + 6 * (routers + vectors)
    assert flops.six_n(config, 1, False) == 6 * config.n_active


def test_a_window_counts_the_tokens_that_are_seen():
    config, s, w = PRESETS["gpt-oss-20b"], 1024, 128
    whole = replace(config, window=None)
    fewer = sum(min(i, w) for i in range(s)) / sum(range(s))  # of each second layer
    per_layer = 6 * config.n_head * config.head_dim * s
    difference = flops.megatron(whole, s, False) - flops.megatron(config, s, False)
    assert difference == pytest.approx(12 * per_layer * (1 - fewer), rel=1e-3)
    assert flops.megatron(whole, w, False) == flops.megatron(config, w, False)
    always = replace(config, window=SlidingWindow(w))
    assert flops.megatron(whole, s, False) - flops.megatron(always, s, False) == 2 * difference


_GPT_OSS = PRESETS["gpt-oss-120b"]
_BEFORE = replace(_GPT_OSS, activation="gelu", window=None)  # NVIDIA's count until release 26.06


@pytest.mark.parametrize(
    ("config", "seq_len", "gflop"),
    [
        (_BEFORE, 4096, 223e3 / 8213),  # Megatron-Bridge, performance summary 25.11
        (_BEFORE, 8192, 565e3 / 18347),
        (_GPT_OSS, 4096, 1077350 / 33017.081),  # Megatron-Bridge, pull request 5717: since 26.06
        (PRESETS["gpt-oss-20b"], 4096, 93848.227282944 / 4096),  # AutoModel, pull request 3091
        (PRESETS["gpt-oss-20b"], 2048, 547665.909645312 / 24576),  # MaxText, pull request 2265
        (_GPT_OSS, 2048, 780268.185059328 / 24576),
        (PRESETS["qwen3-235b-a22b"], 4096, 406e3 / 2742.4),  # Primus, pipeline schedules
    ],
)
def test_what_others_print_of_models_with_experts(config, seq_len, gflop):
    assert flops.megatron(config, seq_len, False) / 1e9 == pytest.approx(gflop, rel=2e-3)


# Of a table of logs/published, what its publisher counts otherwise than the model has it.
COUNTED = {
    ("automodel_h100", "GPT-OSS-20B"): {"kv_channels": 45, "position": "learned"},  # 2880 / 64
    ("automodel_h100", "GPT-OSS-120B"): {"kv_channels": 45, "position": "learned"},
    ("dgxc_moe", "DeepSeek-V3"): {"mtp_num_layers": 1},  # the block that predicts one more token
}
# TFLOP/s of which NVIDIA's MFU is a share: its rows of DeepSeek-V3 print both.
PEAKS = {("H100", "bf16"): 989, ("H100", "fp8"): 1979, ("GB200", "bf16"): 2450}
PEAKS |= {("GB200", "fp8"): 4900}
TABLES = {"automodel_h100": 6, "bridge_moe_ablations": 11, "dgxc_moe": 40, "moe_modelzoo_qwen3": 5}


@pytest.mark.parametrize(("table", "rows"), TABLES.items())
def test_published_rates_of_flops_and_of_tokens_are_of_the_convention(table, rows):
    """Moonlight's six rows differ by 1.1 % from each other."""
    compared = 0
    for name, row in named_rows(ROOT / "logs" / "published" / f"{table}.csv"):
        peak = PEAKS.get((row.text("gpu_type"), row.text("precision")), 0.0)
        rate = row.number("tflops") or (row.number("mfu") or 0.0) * peak
        known = row.number("topk") and row.text("layers") and rate and not row.text("lint")
        if not known or row.text("blocks") or "seconds (TFLOP/s" in row.text("inferred"):
            continue  # no GPT, or seconds that come from TFLOP/s
        tokens, model = row.number("tokens_per_s"), row.text("model")
        if not tokens:
            tokens = row.number("global_batch") * row.number("seq_len") / row.number("step_s")
        compared += 1
        record = record_of(row, name)
        record.model["tied"], record.params = False, None  # counts of parameters are rounded
        as_model = config_of(record).value
        printed = rate * 1e12 * row.number("gpus") / tokens
        counted = replace(as_model, **COUNTED.get((table, model), {}))
        ours = flops.megatron(counted, counted.max_seq_len, False)
        bar = 0.014 if model.startswith("Moonlight") else 0.01
        assert ours == pytest.approx(printed, rel=bar), model
        if counted != as_model:
            ours = flops.megatron(as_model, as_model.max_seq_len, False)
            assert ours != pytest.approx(printed, rel=0.01), model
    assert compared == rows


def test_only_an_embedding_that_does_a_matrix_product_counts_in_palm():
    tied = preset("tiny-llama", tied=True)
    untied = PRESETS["tiny-llama"]
    assert flops.palm(tied, 64, False) == flops.palm(untied, 64, False)
    learned = replace(untied, position="learned")
    assert flops.palm(learned, 64, False) == flops.palm(untied, 64, False)
