"""Micro-batch, peak GB and MFU are columns; a `-` has a note that names the missing fact."""

import json

import numpy as np
import pytest

from analysis.logs.record import Record
from analysis.measured import scaling, tflops, throughput
from tests.fixture_runs import facts, write

KEYS = ("max_cuda_mem_allocated_bytes_global", "max_resident_bytes_global")


def with_peaks(run, *epochs):
    """The run's training_metrics.json with these epochs."""
    path = run / "training_metrics.json"
    path.write_text(json.dumps({"schema_version": "2.0", "epochs": list(epochs)}))


def test_peak_gb_is_that_of_the_fullest_rank_over_all_epochs(tmp_path):
    gpu = write(tmp_path, facts("s", "gpu", engine="ddp", micro_batch=2) | {"run": "gpu"})
    with_peaks(gpu, {KEYS[0]: 3_000_000_000, KEYS[1]: None}, {KEYS[0]: 4_250_000_000})
    cpu = write(tmp_path, facts("s", "gpu", engine="ddp", gpus=2) | {"run": "cpu"})
    with_peaks(cpu, {KEYS[0]: None, KEYS[1]: 500_000_000})
    bad = write(tmp_path, facts("s", "gpu", engine="ddp", gpus=4) | {"run": "bad"})
    with_peaks(bad, {KEYS[0]: "much", KEYS[1]: -1}, "no epoch")
    shown = tflops.report([tmp_path])
    assert {row["run"]: row["peak_gb"] for row in shown.rows} == {
        "gpu": 4.25,
        "cpu": 0.5,
        "bad": None,
    }
    assert shown.missing["peak_gb"] == ["peak GB -: the log has no peak of memory: bad"]
    curve = scaling.report([tmp_path])
    assert [row["peak_gb"] for row in curve.rows] == [4.25, 0.5, None]
    assert [row["micro_batch"] for row in curve.rows] == [2, 1, 1]


def test_mfu_of_a_known_card_is_in_both_tables_and_of_an_unknown_one_says_so(tmp_path):
    for gpus, step_s in ((1, 0.5), (2, 0.3)):
        about = facts("s", "ddp", engine="ddp", gpus=gpus)
        host = {"gpu": "NVIDIA A100-SXM4-80GB", "gpus_visible": gpus, "ranks_per_node": gpus}
        write(tmp_path, about | {"host": about["host"] | host}, step_s=step_s)
    (one, two), curve = tflops.report([tmp_path]).rows, scaling.report([tmp_path])
    assert one["mfu"] == pytest.approx(one["tflops"] / 19.5)  # fp32 of an A100
    assert [row["mfu"] for row in curve.rows] == pytest.approx([one["mfu"], two["mfu"]])
    assert not curve.missing.get("mfu")
    record = Record("a.log", "x", gpus=1, global_batch=8, seq_len=64, params=1e6)
    (why,) = throughput.missing([record], "6n")["mfu"]
    assert why == "MFU -: no peak known for this machine at its precision: a.log"


def test_a_log_that_states_nothing_names_every_missing_fact():
    record = Record("a.log", "x", iteration=np.arange(1.0, 31), step_s=np.full(30, 0.5))
    assert throughput.missing([record]) == {
        "micro_batch": ["micro-batch -: the log does not state it: a.log"],
        "peak_gb": ["peak GB -: the log has no peak of memory: a.log"],
        "mfu": [
            "MFU -: the log does not state GPUs, global batch, sequence length, model sizes: a.log"
        ],
    }
    other = Record("b.log", "x", micro_batch=2, peak_bytes=10**9)
    notes = throughput.missing([record, other])
    assert notes["micro_batch"] == ["micro-batch -: the log does not state it: a.log"]
    assert notes["mfu"][0].endswith(": all")
