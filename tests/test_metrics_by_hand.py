"""training_metrics.json of six steps, added up by hand; ends in no number. No torch, no ranks."""

import math

import pytest

from models.flops import tflops_per_gpu
from parallel.measure.training_metrics import Measured, complete_marker, ended_in_nan
from parallel.measure.training_metrics import training_metrics as metrics_of
from parallel.record import facts
from tests.fixture_runs import TINY
from tests.fixture_runs import facts as run_facts


def about(**spec):
    found = run_facts("s", None, micro_batch=2, gpus=2) | {
        "started_utc": "2026-01-02T03:04:05Z",
        "command_line": "",
        "versions": dict.fromkeys(("python", "torch", "transformers", "deepspeed")),
        "inputs": {"deepspeed_config": None},
        "scheduler": facts.scheduler({}),
        "data": {"path": "d", "train_tokens": 1, "val_tokens": 1},
    }
    found["host"] |= {"hostname": "h", "platform": "p", "cuda": None, "gpus_visible": 0}
    found["spec"] |= {"epochs": None, "steps": 6} | spec
    return found


SECONDS = [5.0, 1.0, 3.0, 2.0, 2.0, 2.0]
STEPS = [
    {"step": i + 1, "step_s": s, "tokens": 10 * (i + 1), "loss": float(i * i), "skipped": 0}
    for i, s in enumerate(SECONDS)
]
BYTES = [{"allocated": n, "reserved": n + 1, "resident": n + 2} for n in (1, 4)]
MEASURED = Measured(4.0, 3.0, 2.0, 30.0, 12.0, *BYTES, validations=[(3, 2.5), (6, 3.5)])


def test_a_runs_times_add_up_to_the_wall():
    found = metrics_of(about(), STEPS, MEASURED)
    summary = found["summary"]
    assert summary["mean_tokens_per_sec_global"] == 210 / 15
    assert summary["best_val_loss"] == 2.5
    parts = [summary[f"{part}_time_sec"] for part in ("startup", "training", "evaluation")]
    assert [*parts, summary["checkpoint_time_sec"], summary["other_time_sec"]] == [4, 15, 3, 2, 6]
    assert summary["total_wall_time_sec"] == 30
    assert found["run_id"] == "20260102T030405Z-ddp-dp2"
    selected = {"fp16_enabled": False, "wall_clock_breakdown": False, "zero_stage": 0}
    assert found["deepspeed_config"]["selected"] == selected
    assert (found["training_config"]["epochs"], found["training_config"]["zero_stage"]) == (1, 0)
    assert found["training_config"]["deepspeed_enabled"] is False
    assert found["completion"]["printed_marker"] is True
    assert found["shutdown"]["destroy_process_group_called"] is True
    assert "tokens_per_sec=14.0 total_wall_time_sec=30.0" in complete_marker("d", found)


def test_what_deepspeed_was_told_and_nccl_is_written(monkeypatch):
    told = about() | {"engine": {"config": {"wall_clock_breakdown": True}}}
    for value, quiet in (("0", True), ("1", False)):
        monkeypatch.setenv("TORCH_NCCL_ENABLE_MONITORING", value)
        found = metrics_of(told, STEPS, MEASURED)
        assert found["shutdown"]["quiet_nccl_monitor"] is quiet
    assert found["deepspeed_config"]["selected"]["wall_clock_breakdown"] is True


def test_an_epochs_entry_is_of_its_own_steps():
    """Four micro-steps of a step: 16 sequences of 2 on 2 ranks."""
    (epoch,) = metrics_of(about(), STEPS, MEASURED)["epochs"]
    assert (epoch["micro_steps"], epoch["optimizer_steps"], epoch["steps"]) == (24, 6, 24)
    assert (epoch["epoch_idx"], epoch["epoch_wall_time_sec"]) == (1, 15.0)
    assert epoch["tokens_processed_global"] == 210 and epoch["tokens_per_sec_global"] == 14
    optimizer = [epoch[f"optimizer_step_time_{k}_sec"] for k in ("mean", "p50", "p95")]
    assert optimizer == pytest.approx([2.5, 2.0, 4.5])  # three quarters of the way from 3 to 5
    micro = [epoch[f"step_time_{k}_sec"] for k in ("mean", "p50", "p95")]
    assert micro == pytest.approx([s / 4 for s in optimizer])
    assert epoch["dataload_time_mean_sec"] == 12 / 24
    assert (epoch["train_loss_avg_global"], epoch["val_loss_avg_global"]) == (55 / 6, 3.5)
    assert epoch["max_cuda_mem_allocated_bytes_rank0"] == 1
    assert epoch["max_resident_bytes_global"] == 6
    four = metrics_of(about(epochs=4), STEPS, MEASURED)["epochs"]
    assert [e["optimizer_steps"] for e in four] == [2, 2, 2]  # of two steps, rounded up
    assert [e["epoch_idx"] for e in four] == [1, 2, 3]
    assert [e["val_loss_avg_global"] for e in four] == [None, 2.5, 3.5]
    assert [e["tokens_processed_global"] for e in four] == [30, 70, 110]
    untold = Measured(0.0, 0.0, 0.0, 30.0, None, {}, {})
    (epoch,) = metrics_of(about(), STEPS, untold)["epochs"]
    assert epoch["dataload_time_mean_sec"] is epoch["max_resident_bytes_global"] is None
    hundred = [STEPS[0] | {"step_s": float(i)} for i in range(100)]
    (epoch,) = metrics_of(about(), hundred, MEASURED)["epochs"]
    assert epoch["optimizer_step_time_p95_sec"] == pytest.approx(94.05)
    (epoch,) = metrics_of(about(), hundred[:20], MEASURED)["epochs"]
    assert epoch["optimizer_step_time_p95_sec"] == pytest.approx(18.05)  # 19 is the largest


def test_the_steady_speed_is_of_the_median_step():
    rows = [STEPS[0] | {"step": i + 1, "step_s": 0.5} for i in range(20)]
    summary = metrics_of(about(), rows, MEASURED)["summary"]
    tokens = 16 * 64
    assert summary["steady_step_time_sec"] == 0.5
    assert summary["steady_tokens_per_sec_global"] == tokens / 0.5
    assert summary["steady_step_time_ci95_sec"] == [0.5, 0.5]
    assert summary["tflops_per_gpu"] == tflops_per_gpu(TINY, 64, tokens, 0.5, 2)
    assert summary["mfu"] is None
    on_a100 = about(precision="bf16")
    on_a100["host"]["gpu"] = "NVIDIA A100-SXM4-80GB"
    summary = metrics_of(on_a100, rows, MEASURED)["summary"]
    assert summary["mfu"] == pytest.approx(summary["tflops_per_gpu"] / 312.0)
    few = metrics_of(about(), rows[:3], MEASURED)["summary"]
    assert few["steady_step_time_ci95_sec"] is None
    skipped = [row | {"skipped": 1, "step_s": 9.0} for row in rows[:10]] + rows[10:]
    assert metrics_of(about(), skipped, MEASURED)["summary"]["steady_optimizer_steps"] == 10


@pytest.mark.parametrize(
    ("losses", "last", "validations", "reason"),
    [
        ([1, 1, 1], {}, [], ""),
        ([1, 1, math.nan], {}, [], "loss is nan since step 3"),
        ([1, math.inf, math.nan], {}, [], "loss is inf since step 2"),
        ([math.nan] * 3, {}, [], "loss is nan since step 1"),
        ([math.nan, math.nan, 1], {}, [], ""),  # it came back
        ([1, 1, math.nan], {"skipped": 1}, [], ""),  # fp16 skips one and lowers its scale
        ([1, math.nan, math.nan], {"skipped": 1}, [], "loss is nan since step 2"),
        ([1, 1, 1], {"grad_norm": math.nan}, [], "gradient norm is nan"),
        ([1, 1, 1], {"grad_norm": math.nan, "skipped": 1}, [], ""),
        ([1, 1, 1], {"grad_norm": None}, [], ""),
        ([1, 1, 1], {"grad_norm": math.inf}, [], ""),  # clipped to nothing
        ([1, 1, 1], {}, [(3, math.nan)], "validation loss is nan"),
        ([1, 1, 1], {}, [(2, math.nan)], ""),
    ],
)
def test_a_training_that_is_no_number_in_the_end_has_failed(losses, last, validations, reason):
    about = {"skipped": 0, "grad_norm": 1.0}
    rows = [{"step": i + 1, "loss": loss} | about for i, loss in enumerate(losses)]
    rows[-1] |= last
    why = ended_in_nan(rows, validations)
    assert why.startswith(reason) and bool(why) == bool(reason)
