"""What gpu_check tries, and what it calls wrong; GPUs are stand-ins here."""

import json
import re
import subprocess
import sys
import types
from dataclasses import replace

import pytest
import torch
from packaging.specifiers import SpecifierSet
from torch.nn.attention import SDPBackend, sdpa_kernel

from base.errors import UsageError
from base.units import GIB
from models.gpus import find_gpu
from parallel import bench, gpu_check
from parallel.config.resolve import resolve
from parallel.config.study import load_study
from parallel.engines import devices, kernels, load
from parallel.engines.kernels import attention_of
from parallel.gpu_check import FAILED, NO_BAR, OK, rate_rows, rehearsed_peaks, run_row, version_rows
from parallel.measure.node_rates import RankRates
from parallel.record import facts
from parallel.record.launch import Launch
from parallel.record.reader import Run, read_run
from tests.conftest import ROOT

RATES = {"bf16": 700e12, "fp32": 20e12, "memory": 3000e9, "copy": 50e9}
SHARED = {"all-reduce of 512 MiB in the node": 100e9, "all-reduce of 1 MiB": 16e9}


def measured(gpus: int, node: str = "node1", **slow: float) -> list[RankRates]:
    """What the GPUs of a node measure in three rounds, the last of them at half speed; GPU 5 has
    shares of the rates."""
    ranks = []
    for gpu in range(gpus):
        rates = RATES | (SHARED if gpu == 0 and gpus > 1 else {})
        rates = {
            name: rate * (slow.get(name, 1) if gpu == 5 else 1) for name, rate in rates.items()
        }
        rounds = {name: [rate, rate, rate / 2] for name, rate in rates.items()}
        ranks.append(RankRates(gpu, node, f"{node} GPU {gpu}", rounds))
    return ranks


STUDIES = [load_study(path) for path in sorted((ROOT / "slurm").glob("gpu-check*.toml"))]
SPECS = [spec for study in STUDIES for spec in study.specs.values()]


def test_the_watchdog_of_a_check_waits_for_a_first_step_that_compiles():
    for spec in SPECS:
        assert 180 <= spec.hang_after_s < spec.timeout_s  # the watchdog says more than a time-out


def test_a_check_tries_what_a_first_day_needs():
    llamas = {spec.engine for spec in SPECS if spec.model.gated and spec.model.n_kv_head}
    assert llamas == {"ddp", "fsdp2", "deepspeed_zero", "deepspeed_pipe", "megatron"}
    assert {spec.engine for spec in SPECS if spec.compile} == {"ddp", "fsdp2"}
    assert {"bf16", "fp8"} < {spec.precision for spec in SPECS}
    assert any(spec.layout.cp == 2 for spec in SPECS) and any(spec.gpus == 16 for spec in SPECS)
    for study in STUDIES:  # what is loaded was saved, by a run of the same study
        for spec in study.specs.values():
            if spec.load:
                logs, name, run, _, step = spec.load.split("/")
                saved = study.specs[run]
                assert (logs, name) == ("logs", study.name) and saved.layout.sequence_parallel
                assert int(step.removeprefix("step-")) == saved.save_interval < spec.steps
    splits = {(spec.engine, spec.layout.tp) for spec in SPECS if spec.load}
    assert splits == {("megatron", 2), ("megatron", 1), ("fsdp2", 1)}


def test_rates_below_half_of_the_data_sheet_fail():
    rows = {row.check: row for row in rate_rows(measured(4), "NVIDIA H100 80GB HBM3")}
    assert rows["rate of bf16"].verdict == OK
    assert rows["rate of bf16"].value.startswith("700 TFLOP/s, 71% on node1 GPU ")
    assert rows["rate of fp32"].verdict == FAILED  # 66.9 TFLOP/s
    assert rows["rate of memory"].verdict == OK
    assert rows["rate of copy"].value.startswith("50 GB/s on node1 GPU ")
    # The bus of four carries each byte 1.5 times, of 450 GB/s.
    assert rows["all-reduce of 512 MiB in the node"][1:3] == (FAILED, "150 GB/s, 33%")
    assert rows["all-reduce of 1 MiB"][1:3] == (NO_BAR, "24 GB/s")  # between nodes is the network
    assert find_gpu("Tesla V100-SXM2-16GB").mesh  # how many links two cards share is not known
    for row in rate_rows(measured(4), "Tesla V100-SXM2-16GB"):
        assert row.verdict == NO_BAR or "all-reduce" not in row.check
    assert {row.verdict for row in rate_rows(measured(2), None)} == {NO_BAR}
    assert rate_rows(measured(1), None)[-1] == gpu_check.Row("rate of copy", NO_BAR, "50 GB/s")


def test_the_slowest_gpu_is_named_and_fails_below_the_others():
    for share, verdict in ((0.95, OK), (0.85, FAILED)):
        row = rate_rows(measured(8, bf16=share), "NVIDIA H100 80GB HBM3")[0]
        assert row.verdict == verdict and "on node1 GPU 5, the slowest of 8" in row.value
        assert ("15% less than the others" in row.value) == (verdict == FAILED)
    assert row.expected == ">= 50% of 989.4, within 10% or 3 spreads of the others"


def test_each_rank_measures_its_own_gpu(monkeypatch):
    """Which is the current one, which `synchronize` waits for."""
    chosen = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 8)
    monkeypatch.setattr(torch.cuda, "set_device", chosen.append)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    for name in ("init_process_group", "new_group", "destroy_process_group", "barrier"):
        monkeypatch.setattr(bench.dist, name, lambda *_, **__: None)

    def gather(values, mine, _):
        values[:] = [mine] * len(values)

    monkeypatch.setattr(bench.dist, "all_gather_object", gather)
    monkeypatch.setattr(bench, "shared_calls", lambda *_: {})
    monkeypatch.setattr(bench, "own_calls", lambda device, _: {"fp32": (device.index, int)})
    monkeypatch.setattr(bench, "seconds", lambda call, device: 1.0)
    mine = bench.measure(Launch(11, 16, 3, 8, "srun"))[-1]
    assert chosen == [torch.device("cuda", 3)]
    assert mine.place.endswith(" GPU 3") and mine.rates == {"fp32": [3.0] * bench.ROUNDS}


def test_what_a_node_cannot_try_is_said(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "NVIDIA A100-SXM4-80GB")
    monkeypatch.setattr(devices, "capability_of", lambda _: (8, 0))
    monkeypatch.setattr(kernels, "problem", lambda _: "Transformer Engine does not work here: x")
    why = {
        (spec.precision, spec.layout.cp, spec.gpus): gpu_check.obstacle(spec, gpus=8, nodes=1)
        for spec in SPECS
    }
    assert why["fp32", 1, 8] == why["bf16", 1, 1] == ""
    assert why["fp32", 1, 16] == "16 GPUs, and here are 8"
    assert "A100-SXM4-80GB has no fp8" in why["fp8", 1, 1]
    assert "does not work here" in why["bf16", 2, 2]
    (wide,) = [spec for spec in SPECS if spec.gpus == 16]
    assert gpu_check.obstacle(wide, gpus=8, nodes=2) == ""
    here = {spec.device: gpu_check.obstacle(spec, gpus=0, nodes=1) for spec in SPECS}
    assert here == {"cpu": "", "cuda": "device cuda needs a GPU"}


def run_of(spec, tmp_path, loss=5.0, peak=None, **state):
    epochs = [{"max_cuda_mem_allocated_bytes_global": peak}]
    metrics = {"epochs": epochs, "summary": {"total_wall_time_sec": 20.0}}
    about = {"run": "x", "attention": "flash"}
    steps = [{"step": 1, "loss": loss}]
    run = Run(tmp_path, "complete", "", about, steps=steps, metrics=metrics)
    return replace(run, **state)


def test_a_run_fails_by_its_loss_its_memory_or_its_end(tmp_path):
    (spec,) = [s for s in SPECS if s.engine == "megatron" and s.precision == "fp8"]
    baseline = run_of(spec, tmp_path)
    for settings, verdict, words in (
        ({"peak": 11 * GIB}, OK, "peak 11.00 GiB, 1.10 x the rehearsed"),
        ({"peak": 13 * GIB}, FAILED, "1.30 x the rehearsed"),
        ({"loss": 5.04}, OK, "loss within 4.0e-02"),
        ({"loss": 5.06}, FAILED, "loss 6.0e-02 from the baseline's"),
        ({"loss": float("nan")}, FAILED, "loss nan"),
        ({"state": "failed", "reason": "out of memory"}, FAILED, "failed: out of memory"),
    ):
        run, parity = run_of(spec, tmp_path, **settings), {"max_loss_diff": None}
        row = run_row(spec, run, baseline, parity, 10 * GIB)
        assert row.verdict == verdict and words in row.value
    assert run_row(spec, baseline, None, {"max_loss_diff": None}, None).verdict == FAILED
    tiny = next(iter(STUDIES[-1].specs.values()))  # workspaces are most of its peak
    fp32 = {"max_loss_diff": 1e-7, "verdict": "equal"}
    assert run_row(tiny, run_of(tiny, tmp_path, peak=GIB), baseline, fp32, GIB // 2).verdict == OK
    differs = fp32 | {"verdict": "DIFFERS: x"}
    assert run_row(tiny, baseline, baseline, differs, None).verdict == FAILED


def test_a_peak_that_is_not_rehearsed_fails_nothing(tmp_path):
    spec = resolve(("test", {"engine": "megatron", "gpus": 2, "cp": 2, "precision": "bf16"}))
    about = {"max_loss_diff": 0.0, "verdict": "equal"}
    run = run_of(spec, tmp_path, peak=2 * GIB)
    row = run_row(spec, run, run, about, None)
    assert row.verdict == OK and "peak 2.00 GiB, not rehearsed" in row.value


def test_a_run_is_rehearsed_where_the_check_trains_it(tmp_path):
    path = tmp_path / "few.toml"
    path.write_text(
        'question = "q"\n[defaults]\npreset = "tiny-llama"\nengine = "megatron"\n[[run]]\n'
        '[[run]]\ngpus = 2\ncp = 2\nprecision = "bf16"\n'
    )
    study = load_study(path)
    peaks = rehearsed_peaks(study, list(study.specs))
    assert list(peaks) == ["megatron"] and peaks["megatron"] > 10**6


@pytest.mark.slow
def test_a_study_is_trained_saved_resumed_and_reshaped_in_one_table(
    tokens, tmp_path, monkeypatch, capfd
):
    """As far as a machine without a GPU can."""
    text = (ROOT / "tests" / "studies" / "small_gpu_check.toml").read_text()
    (tmp_path / "small.toml").write_text(text.replace("seq_len", f'data = "{tokens}"\nseq_len'))
    monkeypatch.chdir(tmp_path)
    assert gpu_check.main(["--cpu", "small.toml"]) == 0
    table = capfd.readouterr().out
    losses = {}
    for run, words in {
        "ddp": "ok",
        "ddp-bf16": "ok",
        "ddp-gpu": "not tried",
        "megatron-tp2-sp": "ok",
        "megatron-tp2-sp-resumed": "ok",
        "fsdp2-dp2-zero3-reshaped": "ok",
    }.items():
        line = re.search(rf"^{words} +small/{run} .*", table, re.M)[0]
        losses[run] = line.partition("loss within ")[2].partition(";")[0]
    assert float(losses["ddp-bf16"]) > float(losses["megatron-tp2-sp"])
    assert re.search(r"^- +rate of memory .* GB/s$", table, re.M)
    resumed = read_run(tmp_path / "logs" / "small" / "fsdp2-dp2-zero3-reshaped")
    assert [step["step"] for step in resumed.steps] == [3, 4]


def test_a_library_out_of_range_or_absent_fails(monkeypatch):
    assert FAILED not in {row.verdict for row in version_rows()}
    changed = facts.versions() | {"deepspeed": "0.10.0", "megatron-core": None}
    monkeypatch.setattr(facts, "versions", lambda: changed)
    failed = {row.check for row in version_rows() if row.verdict == FAILED}
    assert failed == {"deepspeed", "megatron-core"}


def test_a_line_says_whether_the_libraries_were_tried(monkeypatch, tmp_path):
    installed = facts.versions()
    assert facts.tried(installed | {"megatron-core": None}) == facts.TRIED
    untried = facts.tried(installed | {"torch": "2.9.1"})
    assert untried.startswith("libraries: may work, not tried: torch 2.9.1 (tried: ")

    monkeypatch.setattr(facts, "ROOT", tmp_path)  # a wheel has no setup.py
    monkeypatch.setattr(facts.metadata, "requires", lambda _: ['torch>=2; extra == "x"', "numpy<1"])
    assert facts.tried(installed).startswith("libraries: may work, not tried: numpy ")


def test_libraries_that_were_not_tried_are_named_beside_a_defect_and_hide_none(monkeypatch):
    spec = resolve(("test", {"preset": "tiny"}))
    ddp = types.SimpleNamespace(build=lambda *_: [].absent)
    monkeypatch.setitem(sys.modules, "parallel.engines.ddp", ddp)
    with pytest.raises(AttributeError, match="absent") as defect:
        load(spec, None, "torch")  # with libraries that were tried, a defect of ours
    assert not hasattr(defect.value, "__notes__")
    monkeypatch.setattr(facts, "ranges", lambda: {"torch": SpecifierSet("<2")})
    with pytest.raises(AttributeError, match="'absent'") as defect:
        load(spec, None, "torch")
    (note,) = defect.value.__notes__
    assert note.startswith("libraries: may work, not tried: torch ") and "(tried: <2)" in note
    monkeypatch.undo()
    monkeypatch.setitem(sys.modules, "parallel.engines.ddp", None)
    with pytest.raises(UsageError, match="ddp cannot work here: import of parallel.engines.ddp"):
        load(spec, None, "torch")


def test_the_command_ends_with_1_where_a_row_failed(monkeypatch, capsys):
    started = []

    def started_bench(words: list[str], **_: object) -> subprocess.CompletedProcess:
        started.append(" ".join(words))
        if broken:
            raise subprocess.CalledProcessError(1, words, "", "RuntimeError: no driver")
        return subprocess.CompletedProcess(words, 0, f"NCCL version\n{ranks}", "")

    ranks = json.dumps([rank._asdict() for rank in measured(2)])
    monkeypatch.setattr(gpu_check.subprocess, "run", started_bench)
    monkeypatch.setattr(facts, "git", lambda _: {"commit": "c" * 40})
    for broken, rates in ((False, "all-reduce of 512 MiB"), (True, "RuntimeError: no driver")):
        assert gpu_check.main(["--cpu"]) == broken
        assert rates in capsys.readouterr().out
    assert "torch.distributed.run --standalone --nproc-per-node=2 -m parallel" in started[0]
    gpu_check.bench_rows(None, nodes=2, gpus=8)  # each task is a rank: no torchrun
    assert started[-1].startswith("srun --nodes=2 --ntasks-per-node=8 ")
    assert started[-1].endswith("python -m parallel.bench")


def test_a_run_names_the_kernel_that_torch_picks_for_its_attention():
    cpu, sdpa = torch.device("cpu"), "torch scaled_dot_product_attention"
    llama = {"preset": "llama3-8b", "hidden": 64, "n_head": 4, "n_kv_head": 2, "seq_len": 32}
    for settings in ({}, llama, {"reset_at_documents": True, "end_of_text": 3}):
        spec = resolve(("test", {"preset": "tiny"} | settings))
        assert attention_of(spec, "torch", cpu) == f"{sdpa} (flash)"
        with sdpa_kernel(SDPBackend.MATH):
            assert attention_of(spec, "torch", cpu) == f"{sdpa} (math)"
    assert attention_of(spec, "te", cpu) == f"{sdpa} (flash)"  # documents are torch's there, too
    assert attention_of(resolve(("test", llama)), "te", cpu) == "Transformer Engine"
