"""Logs of models with experts: sizes, FLOPs, splits and routing are read; routing is compared."""

import dataclasses
import json
import re

import pytest

from analysis import compare
from analysis.logs.load import load
from analysis.logs.model import config_of
from analysis.logs.parsing.expert_settings import placed_in
from analysis.logs.parsing.mlperf_tree import _CONFIG
from analysis.logs.parsing.run_json import stated
from analysis.published.audited import audit_paths
from analysis.runs import fairness, run_table
from analysis.runs.run_row import OF_EXPERTS
from analysis.runs.throughput import per_token
from models.config import PRESETS, Experts, LatentAttention
from models.flops import CONVENTIONS
from tests.test_logs_say_what_model_they_trained import (
    LINES,
    LLAMA,
    PARAMS,
    TITAN,
    megatron,
    record_of,
)

__all__ = ["record_of"]
# DeepSeek-V2-Lite, by Megatron-LM's names.
LITE = {"num_layers": 27, "hidden_size": 2048, "ffn_hidden_size": 10944, "num_attention_heads": 16}
LITE |= {"group_query_attention": False, "padded_vocab_size": 102400, "seq_length": 4096}
LITE |= {"multi_latent_attention": True, "kv_lora_rank": 512, "q_lora_rank": None}
LITE |= {"qk_head_dim": 128, "qk_pos_emb_head_dim": 64, "v_head_dim": 128, "num_experts": 64}
LITE |= {"moe_router_topk": 6, "moe_ffn_hidden_size": 1408, "moe_layer_freq": [0] + [1] * 26}
LITE |= {"moe_shared_expert_intermediate_size": 2816, "moe_expert_capacity_factor": None}
LITE |= {"expert_model_parallel_size": 8, "expert_tensor_parallel_size": 1}
LITE |= {"moe_router_force_load_balancing": True, "moe_token_dispatcher_type": "flex"}
LITE |= {"moe_flex_dispatcher_backend": "deepep", "moe_latent_size": None}
MIXTRAL = {"num_experts": 8, "moe_router_topk": 2, "expert_model_parallel_size": 4}
MIXTRAL |= {"moe_expert_capacity_factor": None, "moe_router_force_load_balancing": False}


def same_model(record, name: str) -> bool:
    """Whether every convention counts what it counts of the preset."""
    preset = dataclasses.replace(PRESETS[name], max_seq_len=record.seq_len)
    flops = {name: per_token(record, name).value for name in CONVENTIONS if name != "sc21"}
    return all(
        count == pytest.approx(CONVENTIONS[name](preset, record.seq_len, True), rel=1e-4)
        for name, count in flops.items()
    )


def as_yaml(**settings) -> str:
    """As Megatron-Bridge prints its configuration."""
    texts = {name: json.dumps(value) for name, value in settings.items()}
    texts["moe_layer_freq"] = "".join(f"\n  - {kind}" for kind in settings["moe_layer_freq"])
    texts["num_moe_experts"] = texts.pop("num_experts")
    return "".join(f"  {name}: {text}\n" for name, text in texts.items())


@pytest.mark.parametrize("dump", [megatron, lambda **of: as_yaml(**LLAMA | of)])
def test_megatrons_settings_state_experts_latent_attention_and_routing(record_of, dump):
    share = PARAMS.format(3_000_000_000)  # a rank's: of the experts it has an eighth
    record = record_of(dump(**LITE) + share + LINES)
    assert same_model(record, "deepseek-v2-lite") and not record.uncounted
    assert config_of(record).value.experts == Experts(64, 6, 1408, 2816, first_dense=1)
    assert config_of(record).value.mla == LatentAttention(512)
    assert (record.ep, record.etp, record.params) == (8, 1, None)
    assert (record.routing, record.dispatcher, record.dropped) == ("forced", "deepep", 0.0)
    (row,) = run_table.rows([record])
    assert row["tflops"] and row["ep"] == 8
    table = run_table.of_records([record, record_of(megatron() + LINES, "dense.out")])
    shown = [column.key for column in table.shown]
    assert {"ep", "routing", "dispatcher", "dropped"} <= {*shown} and "etp" not in shown


def test_a_dense_dump_has_no_word_of_experts(record_of):
    settings = {"expert_model_parallel_size": 1, "moe_router_force_load_balancing": False}
    settings |= {"kv_lora_rank": 32, "moe_router_topk": 2, "num_experts": None}
    record = record_of(megatron(**settings, moe_token_dispatcher_type="alltoall") + LINES)
    unknown = (record.ep, record.etp, record.routing, record.dispatcher, record.dropped)
    assert unknown == (None,) * 5 and same_model(record, "llama3-8b")
    assert not config_of(record).value.parts
    shown = {column.key for column in run_table.of_records([record]).shown}
    assert not shown & {*OF_EXPERTS}


@pytest.mark.parametrize(
    ("layers", "n_layer", "placed"),
    [
        ("[0, 1, 1]", 3, (1, 1)),
        ("([0]*3+[1]*58)", 61, (3, 1)),
        ("([0]*1+[1]*1)*24", 48, (1, 2)),
        ("[1]*24", 24, (0, 1)),
        ("[1, 0, 0, 1]", None, (0, 3)),
        ("[1, 1, 0]", 3, None),  # no two numbers say it
        ("[0, 1, 1]", 4, None),  # of another model
        ("([1]*2", 2, (0, 1)),
        ("[0, 0]", 2, None),
    ],
)
def test_layers_with_experts_are_two_numbers(layers, n_layer, placed):
    sizes = (
        None
        if placed is None
        else dict(zip(("first_dense", "moe_layer_freq"), placed, strict=True))
    )
    assert placed_in(layers, n_layer) == sizes


def test_what_is_not_stated_of_experts_is_not_counted(record_of):
    cases = {
        "the model has 64 experts": {"num_experts": 64},
        "missing kv_lora_rank": {"multi_latent_attention": True},
        "experts in the layers [1, 1, 0]": LITE | {"moe_layer_freq": [1, 1, 0]},
        "experts in a latent of 1024": LITE | {"moe_latent_size": 1024},
        "a feed-forward beside its experts": LITE | {"mlp_type": "residual"},
    }
    for why, settings in cases.items():
        record = record_of(megatron(**settings) + LINES)
        for convention in ("megatron", "6n"):
            (row,) = run_table.rows([record], convention)
            assert row["tflops"] is None and why in row["missing"]["tflops"]


def test_megatron_deepspeed_has_experts_in_every_so_many_layers_and_drops_tokens(record_of):
    settings = {"num_experts": "[128]", "topk": 1, "expert_interval": 2, "mlp_type": "standard"}
    settings |= {"moe_expert_parallel_size": 8, "moe_token_dropping": True}
    record = record_of(megatron(**settings, moe_train_capacity_factor=1.25) + LINES)
    config = config_of(record).value
    assert config.expert_layers == 16 and config.has_experts(1) and not config.has_experts(0)
    assert record.ep == 8 and config.experts.moe_expert_capacity_factor == 1.25
    (row,) = run_table.rows([record])
    assert row["tflops"] and row["dropped"] is None
    assert row["missing"]["dropped"].startswith("an expert takes 1.25 times its even share")
    assert row["missing"]["routing"]


def test_hugging_faces_configuration_of_mixtral(record_of, tmp_path):
    config = {"hidden_size": 4096, "intermediate_size": 14336, "num_attention_heads": 32}
    config |= {"num_hidden_layers": 32, "num_key_value_heads": 8, "hidden_act": "silu"}
    config |= {"tie_word_embeddings": False, "vocab_size": 32000, "rms_norm_eps": 1e-05}
    config |= {"max_position_embeddings": 4096, "rope_theta": 10000.0, "num_local_experts": 8}
    (tmp_path / "config.json").write_text(json.dumps(config | {"num_experts_per_tok": 2}))
    lines = "{'loss': 2.0, 'epoch': 0.1}\n"
    lines += "{'train_runtime': 100.0, 'train_samples_per_second': 8.0}\n"
    record = record_of(f"  Total optimization steps = 10\n{lines}", "trainer.log")
    record.seq_len = 4096
    assert config_of(record).value.n_active == pytest.approx(PRESETS["mixtral-8x7b"].n_active, 1e-3)


# Made from the format strings of torchtitan 0.2.2.
TITANS_LITE = (
    "deepseek_v3 16B with DeepSeekV3ModelArgs(_enforced='x', max_seq_len=8192, vocab_size=102400,"
    " dim=2048, inter_dim=10944, moe_inter_dim=1408, n_layers=27, n_dense_layers=1, n_heads=16,"
    " moe_args=MoEArgs(num_experts=64, num_shared_experts=2, score_func='softmax', top_k=6,"
    " _debug_force_load_balance=True), q_lora_rank=0, kv_lora_rank=512, qk_nope_head_dim=128,"
    " qk_rope_head_dim=64, v_head_dim=128)\n"
    "[titan] Total parameter count: dense 1,000, sparse 15,000,000,000, active 2,660,000,000"
)


@pytest.mark.parametrize("built", [TITANS_LITE, "deepseek_v3 16B\n" + TITANS_LITE.split("\n")[1]])
def test_torchtitan_states_experts_or_names_a_flavour(record_of, built):
    text = TITAN.format(built=built, name="deepseek_v3 16B", params="15,706,484,224")
    record = record_of(text.replace("cp=1, tp=1", "cp=1, tp=1, ep=8, etp=1"))
    assert same_model(record, "deepseek-v2-lite") and not record.uncounted
    assert (record.dp, record.gpus, record.ep) == (8, 8, 8)
    assert record.routing == ("forced" if "True" in built else None)
    other = record_of(
        text.replace("moe_inter_dim=1408, ", "").replace("deepseek_v3 16B", "llama4 x")
    )
    assert other.uncounted


def test_a_name_tells_of_experts(record_of):
    for name, preset in (("qwen3 30B-A3B", "qwen3-30b-a3b"), ("qwen3 80B-A3B", None)):
        record = record_of(TITAN.format(built=name, name=name, params="30,532,122,624"))
        if preset:
            assert same_model(record, preset)
        else:
            assert record.uncounted and per_token(record, "6n").value is None
    split = _CONFIG.match("config_GB200_16x4x32xtp2pp4cp1ep8etp1_mbs1.sh").groupdict()
    assert (split["tp"], split["ep"], split["etp"], split["mbs"]) == ("2", "8", "1", "1")
    split = _CONFIG.match("config_DGXH100_64x8x128x4x8_mbs2.sh").groupdict()
    assert (split["pp"], split["ep"], split["mbs"]) == ("8", None, "2")


def test_our_own_run_states_its_model_split_and_routing():
    model = PRESETS["tiny-moe"].as_dict()
    facts = {"model": model | {"n_params": 1}, "layout": {"ep": 2, "etp": 1, "tp": 1}}
    spec = {"engine": "megatron", "moe_token_dispatcher_type": "alltoall"}
    fields = stated(facts | {"routing": "natural", "spec": spec})
    assert fields["dispatcher"] == "alltoall"
    assert stated(facts | {"spec": spec | {"engine": "ddp"}})["dispatcher"] is None
    assert fields["model"]["experts"]["num_experts"] == model["experts"]["num_experts"]
    assert (fields["ep"], fields["etp"], fields["routing"]) == (2, 1, "natural")
    dense = stated(facts | {"model": PRESETS["tiny"].as_dict(), "layout": {"tp": 1}})
    assert (dense["ep"], dense["etp"]) == (None, None)


def test_a_forced_balance_is_not_called_faster_than_a_router(record_of, tmp_path, printed):
    forced = {"moe_router_force_load_balancing": True}
    ep = {"expert_model_parallel_size": 8}
    texts = {"natural": {}, "other ep": ep, "forced": forced, "forced ep": forced | ep}
    records = {
        name: record_of(megatron(**MIXTRAL | settings) + LINES, f"{name}.out")
        for name, settings in texts.items()
    }
    assert not fairness.differences(records["other ep"], records["natural"])
    assert not fairness.differences(records["forced ep"], records["forced"])
    (why,) = fairness.differences(records["forced"], records["natural"])
    assert "routing" in why and "forced here, natural in the baseline" in why
    paths = [str(tmp_path / f"{name}.out") for name in ("natural", "forced")]
    assert why in printed(compare.main, *paths, status=1)
    unstated = record_of(
        megatron(**{k: v for k, v in MIXTRAL.items() if "force" not in k}) + LINES, "unstated.out"
    )
    assert fairness.differences(records["forced"], unstated)
    assert "routing" in fairness.unstated([records["natural"], unstated])
    rows = run_table.rows(list(records.values()), terms=fairness.Terms("natural.out"))
    assert [row["speedup"] is None for row in rows] == [False, False, True, True]
    drops = record_of(megatron(**MIXTRAL | {"moe_expert_capacity_factor": 1.0}) + LINES, "drop.out")
    assert drops.dropped is None and records["natural"].dropped == 0.0


def test_the_audit_names_tables_that_do_not_state_what_experts_results_depend_on(tmp_path):
    def silent(audit):
        """Of routing, dropped and ep the rows that do not state it."""
        return re.findall(
            r"(\d of \d) rows with experts do not state .* \((\w+)\)$",
            "\n".join(audit.unread),
            re.MULTILINE,
        )

    table = tmp_path / "runs.csv"
    table.write_text("model,gpus,experts,tp,dp,ep,routing\nQ,8,64,1,8,,\nQ,16,64,1,16,8,natural\n")
    routing, dropped, ep = ("1 of 2", "routing"), ("2 of 2", "dropped"), ("1 of 2", "ep")
    assert silent(audit_paths([table])) == [routing, dropped, ep]
    assert silent(audit_paths([table], facts={"routing": "forced"})) == [dropped, ep]
    assert silent(audit_paths([table], facts={"routing": "natural, dropless"})) == [
        ("1 of 2", "dropped"),  # the second row says "natural" alone
        ep,
    ]
    assert silent(audit_paths([table], facts={"dropped": "0"})) == [routing, ep]
    table.write_text("model,gpus,tp,dp\nMixtral 8x7B,8,1,8\nLlama 3 8B,8,1,8\n")
    assert [rows for rows, _ in silent(audit_paths([table]))] == ["1 of 1"] * 3


def test_primus_prints_what_is_counted(shared):
    path = shared / "logs/AMD-AGI+Primus/dsv2_lite_fp8_mi355x_20260511T024914Z_smoke__train.log"
    if not path.is_file():
        pytest.skip(f"no {path}")
    ((record,), _) = load([path])
    (row,) = run_table.rows([record], None)
    assert row["convention"] == "megatron"
    assert row["tflops"] == pytest.approx(row["printed_tflops"], rel=1e-3)
    assert (row["routing"], row["dropped"], row["dispatcher"]) == ("forced", 0.0, "deepep")
