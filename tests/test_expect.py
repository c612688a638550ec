"""What a run should get: published rows as runs, the nearest of them, and why a run is slower."""

import functools
import json
import shutil
from dataclasses import replace

import pytest

from analysis import expect, plan, tflops
from analysis.logs.published_csv import read_csv
from analysis.logs.record import Record, steps_table
from analysis.planner import runs
from analysis.planner.calibration import from_data_sheet, load_calibration
from analysis.published.published_runs import read_published
from analysis.runs.throughput import tflops_per_gpu
from base.errors import Answer
from models.config import preset
from models.flops import megatron
from tests.conftest import ROOT

PARITY = ROOT / "logs" / "2-core-cpu" / "parity"
CSV = """id,source,gpu_type,gpus,params_b,layers,hidden,heads,kv_heads,ffn,glu,experts,topk,\
moe_ffn,vocab,seq,tp,pp,micro_batch,global_batch,act_recompute,precision,engine,seconds_per_iteration,\
tflops_per_gpu,tflops_formula,status,notes
t-1,page,H100,64,8.03,32,4096,32,8,14336,1,,,,128256,8192,2,1,1,128,none,mxfp8,NeMo,2,,,ok,
t-2,page,H100,8,,4,512,8,,2048,,,,,51200,2048,1,1,1,8,full,bf16,Megatron-LM,,100,SC'21 eq.3,ok,
t-3,page,H100,8,7,12,768,12,,3072,,,,,50368,2048,1,1,1,8,none,bf16,llm-foundry,1,,,ok,
t-4,page,H100,8,1.0,12,1024,16,,,1,8,2,3584,32000,2048,1,1,1,8,none,bf16,NeMo,1,,,ok,
t-5,page,H100,8,,4,512,8,,2048,,,,,51200,2048,1,1,1,8,full,bf16,NeMo,1,,,OOM,
t-6,page,H100,8,,4,64,8,,256,,,,,51200,2048,1,1,1,8,full,bf16,NeMo,1,,,ok,LINT: gas 2 is no 1
"""


@pytest.fixture(autouse=True, scope="module")
def tables_are_read_once():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(expect, "_published", functools.cache(expect._published))
        yield


@pytest.fixture
def published(tmp_path):
    (tmp_path / "t.csv").write_text(CSV)
    records, left_out = read_published([tmp_path / "t.csv"])
    return {record.source: record for record in records}, dict(left_out)


def rate(record):
    return tflops_per_gpu(record, record.totals["tokens_per_s"], "megatron")


LLAMA = ["--preset", "llama3-8b", "--gpu-type", "H100 SXM", "--gpus", "64", "--seq-len", "8192"]


def test_a_published_row_is_a_run_with_our_count_of_flops(published):
    rows, _ = published
    llama = rows["t-1"]
    assert llama.totals["tokens_per_s"] == 128 * 8192 / 2
    assert (llama.tp, llama.precision, llama.gpu_type) == (2, "fp8", "H100 SXM")
    flops = megatron(preset("llama3-8b"), 8192, False)
    assert rate(llama).value == pytest.approx(flops * 128 * 8192 / 2 / 64e12, rel=1e-12)
    # The formula of SC'21 counts recomputation: 96 B s L h^2 (1 + s / 6h + V / 16 L h).
    a_token = 96 * 4 * 512**2 * (1 + 2048 / (6 * 512) + 51200 / (16 * 4 * 512))
    assert rows["t-2"].totals["tokens_per_s"] == pytest.approx(100e12 * 8 / a_token, rel=1e-12)
    assert rows["t-4"].model["experts"]["moe_router_topk"] == 2


def test_rows_of_no_use_are_left_out_and_another_model_has_no_flops(published):
    rows, left_out = published
    assert left_out.keys() == {"t-5", "t-6"}
    assert rate(rows["t-3"]).value is None  # 0.124B are called 7B
    assert "7,000,000,000 are stated" in rate(rows["t-3"]).reason


def test_published_tflops_of_our_convention_are_counted_again():
    """17 runs of Qwen3 with experts, printed by Megatron-LM."""
    path = ROOT / "logs/published/moe_modelzoo_qwen3.csv"
    printed = {row.text("id"): row.number("tflops") for row in read_csv(path).rows}
    rows = read_published([path]).content
    assert len(rows) == 17
    assert all(rate(r).value == pytest.approx(printed[r.source], rel=0.006) for r in rows)


def test_the_row_of_the_same_settings_is_nearest():
    row = next(
        r for r in read_published([ROOT / "logs/published/dgx_h100.csv"]).content if r.gpus == 64
    )
    pairs = expect.differing(replace(row, gpus=128, precision="fp8"), row)
    assert pairs == {"gpus": (128, 64), "precision": ("fp8", "bf16")}
    assert expect.distance(pairs) == 0.5 * 1 + 2.0
    near = expect.nearest(row, 4)
    assert near[0].source == row.source
    tables = [(of.source.rpartition("-")[0], of.params, of.gpu_type, of.gpus) for of in near]
    assert len(set(tables)) == 4


def test_a_model_with_experts_is_beside_models_with_experts(rows_of):
    words = ["--preset", "mixtral-8x7b", "--gpus", "64", "--ep", "8", "--gpu-type", "H100 SXM"]
    rows = rows_of(expect.main, *words, "--global-batch", "256")
    assert (
        rows[0]["run"] == "predicted" and rows[0]["low_s"] < rows[0]["step_s"] < rows[0]["high_s"]
    )
    assert all("experts" not in (row.get("differs") or "") for row in rows)
    assert len([row for row in rows if row["run"] != "predicted"]) == 5


def test_a_run_of_another_model_than_the_preset_says_so(capsys, printed):
    assert expect.main([str(PARITY / "ddp"), "--preset", "llama3-8b"]) == 0
    line = "another model than llama3-8b: 842,624 parameters, not 8,030,261,248"
    assert line in capsys.readouterr().out
    assert "another model" not in printed(expect.main, PARITY / "ddp", "--preset", "tiny")


@pytest.mark.parametrize(
    "words, line",
    [
        ([], "--gpu-type"),
        (LLAMA, "--global-batch"),
        ([*LLAMA, "--global-batch", "64", "--params", "70e9"], "70,000,000,000 are stated"),
        (["--preset", "nope"], "unknown preset"),
        ([str(PARITY)], "20 runs"),
    ],
)
def test_mistakes_are_one_line(words, line, refused):
    said = refused(expect.main, *words)
    assert line in said and said.count("\n") == 1


def test_a_run_of_another_processor_than_the_calibrated_one_says_so(capsys):
    run = str(PARITY / "megatron-tp2")
    assert expect.main([run, "--cluster", "2-core-cpu"]) == 0
    words = "runs here are of AMD EPYC: their predicted times are of the other processor"
    assert words in capsys.readouterr().out


def test_why_a_run_is_slower_is_ranked_by_what_the_planner_expects():
    """A run with full recomputation, at half the predicted speed, on a layout that others ran."""
    rows = read_published([ROOT / "logs/published/dgx_h100.csv"]).content
    row = next(row for row in rows if row.source == "dgx_h100-003")
    where = expect.cluster_of(row, None)
    slow = replace(row, format="Megatron-LM", totals={}, recompute="full")
    guess = expect.prediction(slow, where).value
    slow.steps = steps_table(step_s=[2 * guess["predicted_s"]] * 20, iteration=range(1, 21))
    first, why = expect.report(slow, where, None, 3)
    assert first.rows[0]["step_s"] > first.rows[1]["high_s"]
    gains = {of["cause"]: of["gain"] for of in why.rows}
    faster = expect.prediction(replace(slow, recompute="none"), where).value
    assert gains["recompute"] == pytest.approx(faster["tflops"] / guess["tflops"] - 1)
    assert gains["recompute"] > 0.2
    known = [gain for gain in gains.values() if gain is not None]
    assert known == sorted(known, reverse=True) and list(gains)[0] == "recompute"
    large = expect.causes(replace(slow, micro_batch=16), [row], where).rows
    assert any("would not fit" in of["there"] for of in large if of["cause"] == "recompute")
    slow.steps["step_s"] /= 2
    assert len(expect.report(slow, where, None, 3)) == 1


def test_facts_that_a_log_leaves_out_are_asked_for():
    row = read_published([ROOT / "logs/published/torchtitan_h100.csv"]).content[0]
    where = expect.cluster_of(row, None)
    answer = expect.prediction(replace(row, recompute=None, zero_stage=None), where)
    assert answer.value is None
    assert "--recompute" in answer.reason and "--zero-stage" in answer.reason
    nowhere = expect.cluster_of(replace(row, gpu_type=None), None)
    why = expect.prediction(replace(row, recompute=None), nowhere).reason
    assert "--gpu-type" in why and "--recompute" in why
    unknown = replace(row, model={}, params=None, format="nanoGPT")
    assert len(expect.report(unknown, where, None, 3)[0].rows) == 1
    assert expect.prediction(replace(row, tp=3), where).value is None  # 8 GPUs are no multiple


# Lines of three programs whose engines have constants of their own, and what tells them apart.
PROGRAMS = {
    "nanotron": "iteration: {i} / 30 | consumed_tokens: 512 | elapsed_time_per_iteration_ms: 1K |"
    " tokens_per_sec: 56.9K | tokens_per_sec_per_gpu: 3.56K | global_batch_size: 64 |"
    " lm_loss: 5.3 | model_tflops_per_gpu: 0.01 |\n",
    "NeMo": "Training epoch 0, iteration {i}/30 | lr: 1e-4 | global_step: {i} |"
    " reduced_train_loss: 9.1 | train_step_timing in s: 1.0\n",
    "Megatron-LM": " iteration {i:8d}/      30 | consumed samples: {i:8d} | elapsed time per"
    " iteration (ms): 1000.0 | learning rate: 1.0E-04 | global batch size: 64 | lm loss: 9.0 |\n",
}
FACTS = (
    "--gpus 16 --tp 4 --pp 1 --dp 4 --micro-batch 1 --global-batch 64 --seq-len 8192 --n-layer 32"
)
FACTS += " --hidden 4096 --n-head 32 --n-kv-head 8 --ffn-hidden 14336 --activation swiglu --no-tied"
FACTS += " --vocab-size 128256 --precision bf16 --recompute none --zero-stage 1"


@pytest.mark.parametrize("program", PROGRAMS)
def test_a_log_has_one_price_whoever_asks(program, tmp_path, capsys, rows_of):
    log = tmp_path / "job.out"
    log.write_text("".join(PROGRAMS[program].format(i=i) for i in range(1, 31)))
    flags = [str(log), *FACTS.split(), "--sequence-parallel"]
    (row,) = rows_of(tflops.main, *flags, "--predict", "dgx-h100")
    rows = rows_of(expect.main, *flags, "--cluster", "dgx-h100")
    (guess,) = (of for of in rows if of["run"] == "predicted")
    assert row["engine"] == program and row["predicted_s"] == guess["predicted_s"]
    assert tflops.main([*flags[:-1], "--predict", "dgx-h100"]) == 0
    said = "sequence parallelism is not stated: predicted without (--sequence-parallel): job"
    assert said in capsys.readouterr().out


def test_engines_of_one_family_cost_the_same_and_others_do_not():
    """Of a dense Llama on 16 H100: nanotron's host takes longer than NeMo's and Megatron-LM's.
    Megatron-Bridge is NeMo with gradients of 16 bits: its messages of dp are half as long."""
    facts = {"gpus": 16, "tp": 4, "pp": 1, "dp": 4, "micro_batch": 1, "global_batch": 64}
    facts |= {"seq_len": 8192, "precision": "bf16", "recompute": "none", "zero_stage": 1}
    run = Record("a", "b", model=preset("llama3-8b").as_dict(), sequence_parallel=True, **facts)
    cluster = load_calibration("dgx-h100")
    nanotron, nemo, bridge, megatron_lm = (
        runs.priced(replace(run, engine=name), cluster).value
        for name in ("nanotron", "NeMo", "Megatron-Bridge", "Megatron-LM")
    )
    assert bridge["predicted_s"] < nemo["predicted_s"]
    assert nemo["predicted_s"] < megatron_lm["predicted_s"] < nanotron["predicted_s"]


def test_sequence_parallelism_of_a_log_is_in_its_gigabytes():
    """175B on tp 8 x pp 8 with selective recomputation would not fit 80 GB without."""
    facts = {"gpus": 64, "tp": 8, "pp": 8, "dp": 1, "micro_batch": 1, "global_batch": 64}
    facts |= {"seq_len": 2048, "precision": "bf16", "recompute": "selective", "zero_stage": 0}
    run = Record("a", "b", engine="Megatron-LM", model=preset("175b").as_dict(), **facts)
    prices = [
        runs.priced(replace(run, sequence_parallel=shared), from_data_sheet("A100 80GB")).value
        for shared in (False, True)
    ]
    assert [price["memory_gib"] for price in prices] == pytest.approx([82.2, 61.5], abs=0.05)
    assert [price["fits"] for price in prices] == [False, True]


def test_sequence_parallelism_of_a_published_row_is_read(tmp_path):
    head, row = CSV.splitlines()[:2]
    text = f"{head},sequence_parallel\n" + "".join(
        f"{row},{yes}\n" for yes in ("1", "yes", "0", "")
    )
    (tmp_path / "t.csv").write_text(text)
    rows = read_published([tmp_path / "t.csv"]).content
    assert [row.sequence_parallel for row in rows] == [True, True, False, None]
    assert expect.differing(rows[0], rows[2]) == {"sequence_parallel": (True, False)}


def test_the_batch_is_among_what_differs(published):
    """Four times the batch at pp 8 has a quarter of the bubble: a gap that no card explains."""
    row = replace(published[0]["t-1"], pp=8, dp=4, recompute="none", zero_stage=1)
    run = replace(row, source="mine", global_batch=32, format="Megatron-LM")
    assert expect.differing(run, row) == {"global_batch": (32, 128)}
    assert expect.distance({"global_batch": (32, 128)}) == 0.5
    (cause,) = expect.causes(run, [row], expect.cluster_of(run, None)).rows
    assert cause["cause"] == "global_batch" and cause["gain"] > 0.2


def test_mfu_is_over_the_peak_of_the_format_that_is_priced(rows_of):
    """fp32 on an A100 has 19.5 TFLOP/s, of which two thirds are reached; TF32 has 156."""
    flags = "--preset 1.7b --gpu-type A100 --gpus 8 --tp 1 --global-batch 64 --micro-batch 4"
    for precision, peak in (("fp32", 19.5), ("tf32", 156.0)):
        (row, *_) = rows_of(expect.main, *flags.split(), "--precision", precision, "--top", 1)
        assert row["mfu"] == pytest.approx(row["tflops"] / peak) and row["mfu"] > 0.4


UNEVEN = "--preset llama3-405b --cluster dgx-h100 --gpus 2048 --global-batch 512"
EVEN = "--preset 18b --cluster selene --gpus 64 --global-batch 192"


@pytest.mark.parametrize(("flags", "uneven"), [(UNEVEN, True), (EVEN, False)])
def test_a_layout_that_plan_makes_is_priced_as_there(flags, uneven, rows_of):
    """405B has 126 layers: 7-8-7 on 16 stages, as Meta trained it."""
    row = next(row for row in rows_of(plan.main, *flags.split()) if bool(row["uneven"]) is uneven)
    names = ("tp", "pp", "vpp", "dp", "micro_batch", "zero_stage", "recompute")
    layout = [f"--{name.replace('_', '-')}={row[name]}" for name in names]
    layout += ["--sequence-parallel"] if row["sequence_parallel"] else []
    (guess, *_) = rows_of(expect.main, *flags.split(), *layout, "--top", 1)
    keys = ("low_s", "predicted_s", "high_s", "tflops", "memory_gib", "stages")
    assert [guess[key] for key in keys] == [row[key] for key in keys]


def test_a_card_has_the_memory_that_its_name_states():
    for name, gib in (("NVIDIA A100-SXM4-40GB", 40), ("A100-SXM4-80GB", 80), ("A100", 80)):
        run = Record("a", "b", gpu_type=name)
        assert expect.cluster_of(run, None).value.gpu_memory_gb == gib


def test_a_network_can_be_given_where_the_note_asks_for_it(refused, printed, rows_of):
    run = [*LLAMA, "--global-batch", "64", "--top", "1", "--micro-batch", "1"]
    assert "state yours with --network" in printed(expect.main, *run)
    slow, fast = (
        rows_of(expect.main, *run, "--network", words)[0] for words in ("10 GbE", "8x NDR")
    )
    assert slow["predicted_s"] > 2 * fast["predicted_s"]
    assert "8 GPUs of H100 SXM is one node" in refused(
        expect.main, *run[:4], "--gpus", "8", *run[6:], "--network", "10 GbE"
    )


def test_what_a_run_of_ours_waited_for_comes_first(tmp_path):
    run = shutil.copytree(PARITY / "ddp", tmp_path / "ddp")
    metrics = json.loads((run / "training_metrics.json").read_text())
    for epoch in metrics["epochs"]:
        epoch["dataload_time_mean_sec"] = epoch["epoch_wall_time_sec"] / epoch["micro_steps"] / 4
    (run / "training_metrics.json").write_text(json.dumps(metrics))
    (record,) = expect.load([run]).content
    assert expect.waits(record) == {"data": pytest.approx(0.25)}
    (row,) = expect.causes(record, [], Answer(None, "nowhere")).rows
    assert row["cause"] == "waits: data" and row["gain"] == pytest.approx(1 / 3)
    (broken,) = expect.load([ROOT / "logs/2-core-cpu/2-core_breakdown/deepspeed-pipe-pp2"]).content
    parts = expect.waits(broken)
    assert parts["bubble"] > 0 and "compute" not in parts
