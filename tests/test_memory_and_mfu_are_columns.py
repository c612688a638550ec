"""Micro-batch, peak GiB and MFU are columns; a `-` has a note that names the missing fact."""

import json
import re

import pytest

from analysis import plan, prune
from analysis.logs.load import load
from analysis.logs.record import Record
from analysis.pages import cost_views
from analysis.pages.section import Study
from analysis.planner.calibration import load_calibration
from analysis.runs import checkpoint_costs, run_table, throughput
from base.errors import Parser
from tests.conftest import ROOT
from tests.fixture_runs import curve_of, facts, logged, table_of, write

KEYS = ("max_cuda_mem_allocated_bytes_global", "max_resident_bytes_global")


def test_peak_gib_is_that_of_the_fullest_rank_over_all_epochs(tmp_path):
    peaks = {
        "gpu": [{KEYS[0]: 3 * 2**30, KEYS[1]: None}, {KEYS[0]: 17 * 2**28}],
        "cpu": [{KEYS[0]: None, KEYS[1]: 2**29}],
        "bad": [{KEYS[0]: "much", KEYS[1]: -1}, "no epoch"],
    }
    for gpus, (name, epochs) in zip((1, 2, 4), peaks.items(), strict=True):
        about = facts("s", "gpu", engine="ddp", gpus=gpus, micro_batch=2)
        metrics = write(tmp_path, about | {"run": name}) / "training_metrics.json"
        metrics.write_text(json.dumps({"schema_version": "2.0", "epochs": epochs}))
    shown, curve = table_of(tmp_path), curve_of(tmp_path)
    assert [row["peak_gib"] for row in shown.rows] == [None, 0.5, 4.25]  # bad, cpu, gpu
    assert [row["peak_gib"] for row in curve.rows] == [4.25, 0.5, None]
    assert [row["micro_batch"] for row in curve.rows] == [2, 2, 2]


def test_mfu_of_a_known_card_is_in_both_tables_and_of_an_unknown_one_says_so(tmp_path):
    for gpus, step_s in ((1, 0.5), (2, 0.3)):
        about = facts("s", "ddp", engine="ddp", gpus=gpus)
        host = {"gpu": "NVIDIA A100-SXM4-80GB", "gpus_visible": gpus, "ranks_per_node": gpus}
        write(tmp_path, about | {"host": about["host"] | host}, step_s=step_s)
    (one, two), curve = table_of(tmp_path).rows, curve_of(tmp_path)
    assert one["mfu"] == pytest.approx(one["tflops"] / 19.5)  # fp32 of an A100
    assert [row["mfu"] for row in curve.rows] == pytest.approx([one["mfu"], two["mfu"]])
    assert "MFU" not in " ".join(curve.below)


def test_a_log_that_states_nothing_names_every_missing_fact_and_the_flag_that_gives_it():
    a = logged("a.log", 30, step_s=0.5)
    shown = run_table.of_records([a], None)
    (row,) = shown.rows
    flags = {name: re.findall(r"\((--[a-z-]+)", why) for name, why in row["missing"].items()}
    batch = ["--global-batch", "--seq-len"]
    split = ("gpus", "tp", "pp", "dp")
    assert flags == dict.fromkeys(split, [f"--{name}" for name in split]) | {
        "micro_batch": ["--micro-batch"],
        "peak_gib": [],
        "tokens_per_s": batch,
        "tflops": ["--n-layer", "--hidden", "--vocab-size", "--gpus", *batch],
        "mfu": [],
        "speedup": ["--baseline"],
        "efficiency": ["--baseline"],
    }
    assert "MFU -: TFLOP/s is unknown: a.log" in shown.below
    b = Record("b.log", "x", micro_batch=2, peak_bytes=10**9)
    notes = run_table.of_records([a, b]).below
    assert any(note.endswith("micro_batch (--micro-batch): a.log") for note in notes)
    assert "MFU -: TFLOP/s is unknown: all" in notes


def test_mfu_says_which_cards_a_name_may_mean():
    record = Record("a.log", "x", gpu_type="NVIDIA H100", precision="bf16")
    value, why = throughput.utilisation(record, 400.0, "megatron")
    assert value is None and 'give --gpu-type "H100 PCIe" or "H100 NVL" or "H100 SXM"' in why
    record.gpu_type = None
    why = throughput.utilisation(record, 400.0, "megatron")[1]
    assert why == "the log does not state gpu_type (--gpu-type)"


def test_a_heading_of_bytes_has_one_unit():
    """GiB of memory, measured, planned, rehearsed or pruned; GB of files and of rates. A committed
    calibration of a host counts its memory so, too: 25.28e9 bytes are 23.54 GiB."""
    assert load_calibration("2-core-cpu").gpu_memory_gb == pytest.approx(25.276514304e9 / 2**30)
    in_gib = {"peak_gib", "memory_gib", "allocated_gib", "predicted_gib"}
    parser = Parser()
    plan.add_flags(parser)
    flags = "--preset 18b --cluster selene --gpus 64 --global-batch 192 --top 1".split()
    runs = load([ROOT / "logs" / "2-core-cpu" / "parity" / "ddp"]).content
    table = run_table.of_records(runs)
    (memory,) = cost_views.memory_view(Study(runs, table, "strong"))
    tables = [
        plan.answer(parser.parse_args(flags)),
        prune.report(ROOT / "slurm" / "2-core-gpt2-124m-fp32.toml", "2-core-cpu"),
        table,
        memory.tables["memory"],
        checkpoint_costs.table(runs).table,
    ]
    for column in (column for table in tables for column in table.columns):
        assert ("GiB" in column.heading) == (column.key in in_gib)
        assert ("GB" in column.heading) == column.key.startswith("gb")
