"""What a log says of its model is read, whatever program printed it."""

import json

import pytest

from analysis.logs.load import load
from analysis.logs.model import config_of
from analysis.runs import run_table
from analysis.tflops import main
from models.config import PRESETS, GPTConfig
from models.flops import CONVENTIONS

LINES = "".join(
    f" iteration {i:8d}/      30 | consumed samples: {8 * i:8d} | elapsed time per iteration (ms):"
    f" 500.0 | learning rate: 1.0E-04 | global batch size: 8 | lm loss: 9.0E+00 |\n"
    for i in range(1, 31)
)
LLAMA = {"num_layers": 32, "hidden_size": 4096, "ffn_hidden_size": 14336, "num_attention_heads": 32}
LLAMA |= {"group_query_attention": True, "num_query_groups": 8, "kv_channels": 128, "swiglu": True}
LLAMA |= {"normalization": "RMSNorm", "position_embedding_type": "rope", "add_bias_linear": False}
LLAMA |= {"untie_embeddings_and_output_weights": True, "padded_vocab_size": 128256}
LLAMA |= {"num_experts": None, "multi_latent_attention": False, "mtp_num_layers": None}
LLAMA |= {"seq_length": 8192, "micro_batch_size": 1, "world_size": 8, "bf16": True}
LLAMA |= {"tensor_model_parallel_size": 1, "pipeline_model_parallel_size": 1}
PARAMS = " > number of parameters on (tensor, pipeline) model parallel rank (0, 0): {}\n"


def megatron(**others) -> str:
    """An argument dump as Megatron-LM prints it."""
    return "".join(f"  {k} {'.' * (50 - len(k))} {v}\n" for k, v in (LLAMA | others).items())


def as_yaml() -> str:
    settings = LLAMA | {"share_embeddings_and_output_weights": False}
    del settings["untie_embeddings_and_output_weights"]
    settings["gated_linear_unit"] = settings.pop("swiglu")
    return "".join(f"  {k}: {json.dumps(v)}\n" for k, v in settings.items())


def as_command() -> str:
    sizes = {k: v for k, v in LLAMA.items() if not isinstance(v, bool | None)}
    switches = "--swiglu --untie-embeddings-and-output-weights --disable-bias-linear"
    flags = " ".join(f"--{k.replace('_', '-')} {v}" for k, v in sizes.items())
    return f"+ torchrun pretrain_gpt.py {switches} --group-query-attention \\\n  {flags} --bf16\n"


@pytest.fixture
def record_of(tmp_path):
    def read_text(text, name="job.out"):
        path = tmp_path / name
        path.write_text(text)
        ((record,), _) = load([path])
        return record

    return read_text


@pytest.mark.parametrize("dump", [megatron, as_yaml, as_command])
def test_a_llama_is_read_from_every_kind_of_dump(record_of, dump):
    record = record_of(dump() + LINES)
    config, why = config_of(record)
    expected = PRESETS["llama3-8b"]
    assert not why and config.n_params == expected.n_params
    assert (config.kv_heads, config.gated, config.ffn_hidden) == (8, True, 14336)
    assert not config.tied
    (row,) = run_table.rows([record], None)
    flops = CONVENTIONS["megatron"](config, 8192, False)
    assert row["tflops"] == pytest.approx(flops * 8 * 8192 / (0.5 * record.gpus * 1e12))


@pytest.mark.parametrize(
    ("setting", "said"),
    [
        ({"num_experts": "[1]"}, ""),  # a dense model
        ({"num_nextn_predict_layers": 1}, "1 layers that predict further tokens"),
        ({"index_topk": 512}, "attention to 512 tokens that an index chooses"),
        ({"experimental_attention_variant": "gdn"}, "gdn attention"),
        ({"is_hybrid_model": True}, "layers of several kinds"),
        ({"hybrid_layer_pattern": "M-M*|-/MM"}, "layers of the kinds 1 *, 2 -, 2 M"),
        ({"hybrid_override_pattern": "*-*"}, "layers of the kinds 2 *, 1 -"),
    ],
)
def test_what_no_convention_counts_is_named_and_not_counted_as_dense(record_of, setting, said):
    record = record_of(megatron(**setting) + LINES)
    assert record.uncounted == ([said] if said else [])
    for convention in (None, "6n", "megatron") if said else ():
        (row,) = run_table.rows([record], convention)
        assert row["tflops"] is None and said in row["missing"]["tflops"]
    dropping = LINES.replace("| lm loss", "|reserve_length:   256 | lm loss")
    assert record_of(megatron() + dropping).uncounted == ["layers that drop tokens (random-LTD)"]


# Made from the format strings of Megatron-LM's main at d98e8a64 (2026-08-22, core 0.20.0).
@pytest.mark.parametrize("pattern", ["*-" * 16, "*-*-|" * 7 + "*-*-", "*-" * 16 + "/*-"])
@pytest.mark.parametrize("form", ["  {} .......... {}\n", '  {}: "{}"\n', "+ torchrun --{} '{}'\n"])
def test_a_gpt_of_a_hybrid_pattern_has_half_as_many_blocks_as_layers(record_of, form, pattern):
    name = "hybrid-layer-pattern" if "--" in form else "hybrid_layer_pattern"
    record = record_of(megatron() + form.format(name, pattern) + LINES)
    assert record.model["n_layer"] == 16 and not record.uncounted


def test_the_newest_megatron_states_every_ranks_parameters_and_fp4(record_of):
    share = PARAMS.replace("(tensor, ", "(tensor, gtp_weight_remat, ").replace("(0,", "(0, {},")
    shares = [share.format(rank, 4_015_130_624) for rank in (1, 0)]
    record = record_of(megatron(fp4="e2m1", fp8=None) + "".join(shares) + LINES)
    assert (record.params, record.precision) == (8_030_261_248, "fp4")
    record = record_of(megatron(fp4=None) + shares[0] + LINES)
    assert (record.params, record.precision) == (None, "bf16")


TITAN = """\
[titan] Building device mesh with parallelism: pp=1, dp_replicate=1, dp_shard=8, cp=1, tp=1
[titan] Building {built}
[titan] CUDA capacity: NVIDIA H100 80GB HBM3 with 79.10GiB memory
[titan] Model {name} size: {params} total parameters
[titan] Trainer is initialized with local batch size 1, global batch size 8, sequence length 8192,\
 total steps 9 (warmup 2)
""" + "".join(
    f"[titan] step: {i:2d}  loss:  7.9  grad_norm: 1.0  memory: 10.0GiB(12%)  tps: 6,000  tflops:"
    " 300.00  mfu: 30.0%\n"
    for i in range(1, 31)
)


def test_torchtitan_states_sizes_or_names_a_flavour(record_of):
    sizes = (
        "llama3 8B with TransformerModelArgs(dim=4096, n_layers=4, n_heads=32, n_kv_heads=8,"
        " vocab_size=128256, multiple_of=1024, ffn_dim_multiplier=1.3, norm_eps=1e-05)"
    )
    text = TITAN.format(built=sizes, name="llama3 8B", params="1,923,125,248")
    config, _ = config_of(record_of(text))
    assert (config.n_layer, config.ffn_hidden, config.n_params) == (4, 14336, 1_923_125_248)
    record = record_of(TITAN.format(built="qwen3 14B", name="qwen3 14B", params="14,768,307,200"))
    config, _ = config_of(record)
    assert config.n_params == 14_768_307_200 and record.gpu_type == "NVIDIA H100 80GB HBM3"
    assert record.origin["ffn_hidden"] == "from name"
    (row,) = run_table.rows([record], None)
    assert any(reason.startswith("from name: n_layer 40") for reason in row["reasons"])
    other = record_of(TITAN.format(built="qwen3 14B", name="qwen3 14B", params="7,000,000,000"))
    assert config_of(other)[0] is None


# Made from the format strings of torchtitan 0.2.2 (rope: 9810191b), and of b5bcd76c (2026-08-21).
TITAN_JSON = 'qwen3 14Bwith {\n  "dim": 5120,\n  "n_layers": 4,\n  "enable_weight_tying": true,\n'
TITAN_JSON += '  "moe_enabled": false,\n  "moe_args": {\n    "num_experts": 8\n  },\n'
TITAN_JSON += '  "rope": {\n    "dim": 128\n  }\n}'
TITAN_TOKENS = "16384 tokens per DP rank, 131072 tokens per train step, maximum context length 8192"
TITAN_CONFIG = 'llama3 8B\n[titan] Running with configs: {\n"data_parallel_replicate_degree": 1,\n'
TITAN_CONFIG += '  "mixed_precision_param": "bfloat16"\n}\n[titan] Total parameter count: dense'
TITAN_CONFIG += " 8,030,261,248, sparse 0, vision 0, active 8,030,261,248"


def test_newer_torchtitans_state_sizes_as_json_and_batches_in_tokens(record_of):
    text = TITAN.format(built=TITAN_JSON, name="qwen3 14B", params="2,099,165,184")
    model = config_of(record_of(text))[0]
    assert (model.n_layer, model.hidden, model.tied) == (4, 5120, True)
    text = TITAN.format(built=TITAN_CONFIG, name="llama3 8B", params="8,030,261,248")
    text = text.replace(
        "local batch size 1, global batch size 8, sequence length 8192", TITAN_TOKENS
    )
    record = record_of(text)
    assert (record.micro_batch, record.global_batch, record.seq_len) == (2, 16, 8192)
    assert (record.dp, record.precision) == (8, "bf16") and not record.uncounted
    assert record.step_stats()["mean"] == pytest.approx(131072 / 48000)
    assert "tied" not in record_of(text.replace("llama3 8B", "llama3 1B")).model
    for linear, precision in (("MXFP8", "fp8"), ("NVFP4", "fp4")):
        converted = f"[titan] Converted Linear layers to {linear}Linear\n"
        assert record_of(converted + text).precision == precision
    record = record_of(text.replace("vision 0", "vision 400,000,000"))
    assert record.uncounted == ["400,000,000 parameters in an encoder of images"]


def test_the_configuration_beside_a_trainers_log_is_read(record_of, tmp_path):
    config = {"hidden_size": 4096, "intermediate_size": 11008, "num_attention_heads": 32}
    config |= {"num_hidden_layers": 32, "num_key_value_heads": 32, "hidden_act": "silu"}
    config |= {"tie_word_embeddings": False, "vocab_size": 32000, "rms_norm_eps": 1e-05}
    config |= {"max_position_embeddings": 4096, "rope_theta": 10000.0}
    (tmp_path / "config.json").write_text(json.dumps(config, indent=2))
    lines = "".join(f"{{'loss': 2.0, 'epoch': 0.{i}}}\n" for i in range(10))
    lines += "{'train_runtime': 100.0, 'train_samples_per_second': 8.0}\n"
    record = record_of(f"  Total optimization steps = 10\n{lines}", "trainer.log")
    assert record.steps["loss"].tolist() == [2.0] * 10 and record.step_stats()["mean"] == 10.0
    read_config, _ = config_of(record)
    assert read_config.gated and read_config.n_params == pytest.approx(6_738_415_616, rel=1e-3)
    assert record.origin["n_layer"] == "config"


def test_nanotrons_configuration_beside_its_log_is_read(record_of, tmp_path):
    (tmp_path / "config.yaml").write_text(
        "model:\n  model_config:\n    hidden_size: 16\n    intermediate_size: 64\n"
        "    num_attention_heads: 4\n    num_hidden_layers: 2\n    num_key_value_heads: 4\n"
        "    hidden_act: silu\n    tie_word_embeddings: true\n    vocab_size: 256\n"
    )
    line = (
        "iteration: {i} / 15 | consumed_tokens: 512 | elapsed_time_per_iteration_ms: 9.0 |"
        " tokens_per_sec: 56.9K | tokens_per_sec_per_gpu: 56.9K | global_batch_size: 2 |"
        " lm_loss: 5.3 | model_tflops_per_gpu: 0.01 |\n"
    )
    record = record_of("".join(line.format(i=i) for i in range(1, 16)), "log.txt")
    sizes = {"n_layer": 2, "hidden": 16, "n_head": 4, "n_kv_head": 4, "ffn_hidden": 64}
    assert record.model == sizes | {"vocab_size": 256, "activation": "swiglu", "tied": True}


def test_a_sidecar_and_flags_take_every_fact_of_the_model(record_of, tmp_path, rows_of, refused):
    sizes = {"n_layer": 32, "hidden": 4096, "n_head": 32, "n_kv_head": 8, "ffn_hidden": 14336}
    sizes |= {"activation": "swiglu", "vocab_size": 128256, "seq_len": 8192, "gpus": 8}
    others = {"gpu_type": "H100 SXM", "precision": "bf16", "position": "rope", "norm": "rmsnorm"}
    stated = sizes | others | {"tied": False, "bias": False}
    lines = "".join(f"{name} = {json.dumps(value)}\n" for name, value in stated.items())
    (tmp_path / "job.toml").write_text(lines)
    record = record_of(LINES)
    config, _ = config_of(record)
    assert config == GPTConfig(**record.model, max_seq_len=8192)
    assert config.n_params == PRESETS["llama3-8b"].n_params
    (row,) = run_table.rows([record], None)
    assert row["mfu"] is not None
    (tmp_path / "job.toml").write_text('activation = "swish"\n')
    assert "activation cannot be 'swish'" in refused(main, tmp_path / "job.out")
    (tmp_path / "job.toml").unlink()
    flags = [f"--{name.replace('_', '-')}={value}" for name, value in sizes.items()]
    (again,) = rows_of(main, tmp_path / "job.out", *flags, "--no-tied")
    assert again["tflops"] == pytest.approx(row["tflops"]) and again["model"]["tied"] is False


def test_the_convention_falls_back_and_says_so(record_of):
    sizes = {name: None for name in ("num_layers", "hidden_size", "padded_vocab_size")}
    record = record_of(megatron(**sizes) + PARAMS.format(1_000_000_000) + LINES)
    (row,) = run_table.rows([record], None)
    assert row["convention"] == "6n"
    assert row["tflops"] == pytest.approx(6e9 * 8 * 8192 / (0.5 * 8 * 1e12))
    assert "6 per stated parameter, for the log does not state n_layer" in row["notes"]
    assert run_table.rows([record])[0]["tflops"] is None  # megatron was asked for
    printing = LINES.replace("| lm loss", "| throughput per GPU (TFLOP/s/GPU): 123.0 | lm loss")
    record = record_of(megatron(num_experts=64) + printing)
    (row,) = run_table.rows([record], None)
    assert (row["convention"], row["tflops"], row["mfu"]) == ("printed", 123.0, None)


def test_a_prediction_takes_the_model_of_the_log_or_says_what_it_lacks(record_of):
    settings = ({}, {"group_query_attention": False}, {"num_experts": 8, "moe_router_topk": 2})
    layout = {"global_batch_size": 8, "recompute_granularity": None}
    layout |= {"use_distributed_optimizer": True}
    logs = (megatron(**layout, **others) + LINES for others in settings)
    records = [record_of(text, f"{i}.out") for i, text in enumerate(logs)]
    dense, ungrouped, experts = run_table.of_records(records, predict="dgx-h100").rows
    assert dense["model"]["n_kv_head"] == 8 and "n_kv_head" not in ungrouped["model"]
    assert 0 < dense["predicted_s"] < ungrouped["predicted_s"]
    assert experts["predicted_s"] > ungrouped["predicted_s"]  # a token takes two of the experts
    dropping = megatron(**layout, **settings[2], moe_expert_capacity_factor=1.0) + LINES
    (row,) = run_table.of_records([record_of(dropping, "3.out")], predict="dgx-h100").rows
    assert row["predicted_s"] is None
    assert "no formula has the bytes of" in row["missing"]["predicted_s"]


def test_the_peak_of_memory_is_read_where_a_log_prints_it(record_of):
    memory = (
        "[Rank {r}] (after 1 iterations) memory (MB) | allocated: 100.0 | max allocated: {mb} |"
        " reserved: 400.0 | max reserved: 400.0\n"
    )
    first, *rest = LINES.splitlines(keepends=True)
    text = first + memory.format(r=0, mb=200.0) + memory.format(r=1, mb=300.5) + "".join(rest)
    assert record_of(megatron() + text).peak_bytes == int(300.5 * 2**20)
    titan = TITAN.format(built="llama3 8B", name="llama3 8B", params="8,030,261,248")
    assert record_of(titan).peak_bytes == 10 * 2**30
