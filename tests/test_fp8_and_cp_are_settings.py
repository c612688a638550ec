"""FP8 and context parallelism: which runs and clusters can have them, and where tables show cp."""

import json
import re
from dataclasses import replace

import pytest
import torch

from analysis.logs.load import load
from analysis.planner.columns import columns_of
from analysis.runs.repeats import configuration
from base.errors import UsageError
from models.config import PRESETS, preset
from parallel import train
from parallel.config.resolve import resolve
from parallel.config.study import load_study
from parallel.engines.kernels import attention_of
from tests.fixture_runs import facts, table_of, write

LLAMA = {"engine": "megatron", "preset": "llama3-8b", "gpus": 16, "precision": "bf16"}


def check(capsys, flags: str) -> tuple[int, str]:
    """(exit status, what it prints, or where it refuses why) of `parallel.train --check` for a
    llama3-8b on 16 GPUs."""
    own = [word for name, value in LLAMA.items() for word in (f"--{name}", str(value))]
    status = train.main([*own, *flags.split(), "--check"])
    printed = capsys.readouterr()
    return status, printed.err if status else printed.out


def test_a_gpu_cluster_takes_both(capsys):
    status, printed = check(capsys, "--tp 2 --cp 2 --pp 2 --precision fp8 --cluster dgx-h100")
    run = json.loads(printed)
    assert status == 0 and run["run"].startswith("megatron-tp2-cp2-pp2-dp2-")
    assert (run["cp"], run["precision"], run["fp8_recipe"]) == (2, "fp8", "delayed")


@pytest.mark.parametrize(
    ("flags", "where"),
    [("", "a machine that has one"), ("--cluster dgx-h100", "cluster dgx-h100")],
)
def test_a_check_says_which_machine_it_is_for_where_this_one_may_not_do(capsys, flags, where):
    words = [f"--{name}={value}" for name, value in (LLAMA | {"precision": "fp8"}).items()]
    assert train.main([*words, *flags.split(), "--check"]) == 0
    line = f"parallel.train: precision fp8 needs a GPU: this run is checked for {where}\n"
    assert line in capsys.readouterr().err
    assert train.main(["--data", "none", "--check"]) == 0  # what any machine can do
    assert "needs a GPU" not in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ("--cp 2 --cluster local-test", "cp 2 needs a GPU, and local-test gives none"),
        ("--precision fp8 --cluster dgx-a100", "the A100 of dgx-a100 has no fp8"),
        ("--cp 2 --device cpu", "cp 2 needs a GPU, and device is cpu"),
        ("--cp 2 --precision fp32", "cp 2 needs precision bf16, fp16 or fp8, not fp32"),
        ("--cp 2 --kernels torch", "cp 2 needs kernels te, not torch"),
        ("--cp 2 --precision fp8 --kernels torch", "cp 2 and precision fp8 needs kernels te, not"),
        ("--engine ddp --cp 2", "no cp (asked: 2; engines with cp: megatron)"),
        ("--cp 16 --seq-len 8176", "cuts seq_len 8176 unevenly into 32 chunks"),
        ("--cp 2 --breakdown", "breakdown has no column for messages between cp 2 ranks"),
        ("--precision fp8 --ffn-hidden 14344 --tp 2", "of 16, and ffn_hidden / tp is 7172"),
        ("--precision fp8 --seq-len 24", "a rank's tokens of a micro-batch is 24"),
        ("--precision fp32 --tf32 --cluster jean-zay-v100-32g", "jean-zay-v100-32g has no tf32"),
        ("--cluster jean-zay-v100-32g", "jean-zay-v100-32g has no bf16"),
        ("--precision fp16 --cluster local-test", "precision fp16 needs a GPU, and local-test"),
        ("--device cuda --cluster local-test", "device cuda needs a GPU, and local-test gives"),
    ],
)
def test_elsewhere_one_line_says_why_not(capsys, flags, words):
    status, printed = check(capsys, flags)
    assert status == 2 and words in printed and printed.count("\n") == 1


DEEPSEEK = {"preset": "deepseek-v2", "engine": "megatron", "gpus": 8, "tp": 2, "precision": "fp8"}
DEEPSEEK |= {"sequence_parallel": True}


@pytest.mark.parametrize(
    ("mla", "experts", "wrong"),
    [
        ({}, {}, ""),
        ({"kv_lora_rank": 520}, {}, "kv_lora_rank is 520"),
        ({"q_lora_rank": 1528}, {}, "q_lora_rank is 1528"),
        ({"qk_pos_emb_head_dim": 60}, {}, "kv_lora_rank + qk_pos_emb_head_dim is 572"),
        ({}, {"moe_ffn_hidden_size": 1528}, "an expert's width / etp is 764"),
        (
            {},
            {"moe_shared_expert_intermediate_size": 3080},
            "the shared experts' width / tp is 1540",
        ),
    ],
)
def test_fp8_knows_the_sides_of_experts_and_of_latent_attention(mla, experts, wrong, monkeypatch):
    model = preset("deepseek-v2")
    parts = {"mla": replace(model.mla, **mla), "experts": replace(model.experts, **experts)}
    monkeypatch.setitem(PRESETS, f"with {wrong}", replace(model, **parts))
    asked = ("test", DEEPSEEK | {"etp": 2, "preset": f"with {wrong}"})
    if not wrong:
        assert resolve(asked).precision == "fp8"
        return
    with pytest.raises(UsageError, match=re.escape(f"multiples of 16, and {wrong}")):
        resolve(asked)


def test_fp8_computes_the_attention_of_documents_that_cannot_be_packed_in_bf16():
    """Those of latent attention are never packed."""
    spec = resolve(("test", DEEPSEEK | {"reset_at_documents": True, "end_of_text": 3}))
    small = replace(spec, seq_len=32)
    assert "scaled_dot_product_attention" in attention_of(small, "te", torch.device("cpu"))


def test_a_study_sweeps_cp_and_leaves_out_what_its_cluster_cannot_run(tmp_path):
    path = tmp_path / "long.toml"
    path.write_text(
        'question = "q"\ncluster = "dgx-a100"\n[defaults]\nengine = "megatron"\ngpus = 8\n'
        'preset = "llama3-8b"\n[[sweep]]\nproduct = { cp = [1, 2], precision = ["bf16", "fp8"] }\n'
    )
    study = load_study(path)
    assert list(study.runs) == ["megatron-dp8-bf16", "megatron-cp2-dp4-bf16"]
    assert [why for _, why in study.left_out] == ["the A100 of dgx-a100 has no fp8"] * 2
    assert len(load_study(path, "dgx-h100").runs) == 4


def test_the_time_model_sees_the_ranks_that_share_a_sequence():
    given = LLAMA | {"tp": 2, "cp": 4, "pp": 2, "micro_batch": 2, "precision": "fp8"}
    x = columns_of(resolve(("test", given)))
    assert (x.dp[0], x.cp[0], x.micro_batch[0], x.gpus[0], x.grad_width[0]) == (1, 4, 2, 16, 4)


def run_with(tmp_path, cp: int, **about: dict) -> None:
    """A run folder on `cp` ranks of one dp rank."""
    made = facts("s", None, engine="megatron", gpus=1) | {"run": f"cp{cp}"}
    made["layout"] |= {"cp": cp, "world_size": cp}
    write(tmp_path, made | about)


def test_cp_is_a_column_where_a_run_has_more_than_one(tmp_path):
    for cp in (1, 2):
        run_with(tmp_path, cp)
        table = table_of(tmp_path)
        assert ("cp" in [column.key for column in table.shown]) is (cp > 1)
        assert table.rows[-1]["run"] == f"cp{cp}" and table.rows[-1]["cp"] == cp


def test_an_older_run_json_without_cp_had_one_and_is_a_repeat_of_a_new_one(tmp_path):
    run_with(tmp_path / "new", 1)
    old = facts("s", None, engine="megatron", gpus=1) | {"run": "cp1"}
    del old["layout"]["cp"]
    write(tmp_path / "old", old)
    one, other = load([tmp_path])[0]
    assert one.cp == other.cp == 1 and configuration(one) == configuration(other)


def test_a_run_json_whose_cp_does_not_make_its_ranks_is_damaged(tmp_path):
    run_with(tmp_path, 2)
    path = tmp_path / "cp2" / "run.json"
    path.write_text(re.sub('"(world_size|gpus)": 2', r'"\1": 4', path.read_text()))
    with pytest.raises(UsageError, match="world_size 4 .* is not tp 1 x cp 2 x dp 1 x pp 1"):
        load([tmp_path])


STEP = " iteration 1/ 10 | elapsed time per iteration (ms): 5.0 | lm loss: 1.0E+00 |\n"


def test_dp_of_a_megatron_log_is_what_tp_cp_and_pp_leave(tmp_path):
    path = tmp_path / "a.log"
    axes = {"context": 2, "tensor_model": 2, "pipeline_model": 2}
    dump = "".join(f"  {axis}_parallel_size ......... {size}\n" for axis, size in axes.items())
    path.write_text(f"{dump}  world_size ......... 32\n{STEP}")
    (record,), _ = load([path])
    assert (record.gpus, record.tp, record.cp, record.pp, record.dp) == (32, 2, 2, 2, 4)


@pytest.mark.filterwarnings("ignore:full scope is deprecated")
def test_delayed_scales_are_the_largest_of_the_last_1024_steps():
    from parallel.engines.megatron_config import transformer_config

    config = transformer_config(resolve(("test", LLAMA | {"precision": "fp8"})), True)
    asked = (config.fp8_recipe, config.fp8_amax_history_len, config.fp8_amax_compute_algo)
    assert asked == ("delayed", 1024, "max")


def test_going_on_in_fp8_says_that_delayed_scales_begin_anew():
    from parallel.checkpoint.loading import _changed

    for recipe, said in (("delayed", "its fp8 scales begin anew"), ("tensorwise", "")):
        spec = resolve(("test", LLAMA | {"precision": "fp8", "fp8_recipe": recipe}))
        assert _changed(spec, spec.settings()).partition(",")[0] == said
