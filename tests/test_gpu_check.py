"""What gpu_check calls wrong: libraries out of range, GPUs below their sheet."""

import json
import subprocess
import sys
import types

import pytest
import torch
from packaging.specifiers import SpecifierSet
from torch.nn.attention import SDPBackend, sdpa_kernel

from base.errors import UsageError
from models.gpus import find_gpu
from parallel import gpu_check
from parallel.config.settings import resolve
from parallel.config.study import load_study
from parallel.engines import load
from parallel.engines.kernels import attention_of
from parallel.gpu_check import FAILED, PASSED, TOLD, rate_rows, version_rows
from parallel.record import facts
from tests.conftest import ROOT

RATES = {
    "products": {"bf16": 700e12, "fp32": 20e12},
    "memory_rate": 3000e9,
    "links": {"1": 30e9, "64": 350e9, "512": 100e9},
}


def test_the_watchdog_of_a_check_waits_for_a_first_step_that_compiles():
    study = load_study(ROOT / "slurm" / "gpu-check.toml")
    for spec in map(study.run, study.runs):
        assert 180 <= spec.hang_after_s < spec.timeout_s  # the watchdog says more than a time-out


def test_rates_below_half_of_the_data_sheet_fail():
    rows = {row.check: row for row in rate_rows(RATES, "NVIDIA H100 80GB HBM3")}
    assert rows["matrix product bf16"][1:3] == (PASSED, "700 TFLOP/s, 71%")
    assert rows["matrix product fp32"].verdict == FAILED  # 66.9 TFLOP/s
    assert rows["memory rate"].verdict == PASSED
    assert rows["all-reduce of 1 MiB"].verdict == TOLD
    assert rows["all-reduce of 512 MiB"].verdict == FAILED
    assert find_gpu("Tesla V100-SXM2-16GB").mesh  # how many links two cards share is not known
    mesh = rate_rows(RATES, "Tesla V100-SXM2-16GB")
    assert {row.verdict for row in mesh if "all-reduce" in row.check} == {TOLD}
    assert {row.verdict for row in rate_rows(RATES, None)} == {TOLD}


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


def test_a_library_that_lacks_what_an_engine_needs_is_named(monkeypatch):
    spec = resolve(("test", {"preset": "tiny"}))
    ddp = types.SimpleNamespace(build=lambda *_: [].absent)
    monkeypatch.setitem(sys.modules, "parallel.engines.ddp", ddp)
    with pytest.raises(AttributeError, match="absent"):
        load(spec, None, "torch")  # with libraries that were tried, a defect of ours
    monkeypatch.setattr(facts, "ranges", lambda: {"torch": SpecifierSet("<2")})
    with pytest.raises(UsageError, match=r"ddp cannot work here: .* 'absent'; .* \(tried: <2\)"):
        load(spec, None, "torch")
    monkeypatch.undo()
    monkeypatch.setitem(sys.modules, "parallel.engines.ddp", None)
    with pytest.raises(UsageError, match="ddp cannot work here: import of parallel.engines.ddp"):
        load(spec, None, "torch")


def test_the_command_ends_with_1_where_a_row_failed(monkeypatch, capsys):
    def bench(words: list[str], **_: object) -> subprocess.CompletedProcess:
        if broken:
            raise subprocess.CalledProcessError(1, words, "", "RuntimeError: no driver")
        return subprocess.CompletedProcess(words, 0, "NCCL version\n" + json.dumps(RATES), "")

    monkeypatch.setattr(gpu_check.subprocess, "run", bench)
    for broken, rates in ((False, "all-reduce of 512 MiB"), (True, "RuntimeError: no driver")):
        assert gpu_check.main(["--cpu"]) == broken
        assert rates in capsys.readouterr().out


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
