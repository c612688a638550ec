"""training_metrics.json, schema 2.0: the published GPT-2 study's fields, and ours beside them.

parallel/record/training_metrics.schema.json describes it. Every published field keeps its name,
type and meaning: `step_time_*` and `dataload_time_mean_sec` count micro-steps. Torch-free.
"""

import math
import os
import statistics
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from base.bounds import Bounds, Count, misfit
from models.config import GPTConfig, name_of
from models.flops import DEFAULT_CONVENTION, tflops_per_gpu
from models.gpus import mfu
from parallel.config.run_spec import gemm_precision
from parallel.measure.efficiencies import GOOD
from parallel.measure.steady_time import Steady, steady
from parallel.record.schema import METRICS_VERSION, utc_now

NOTES = {
    "steps": "Deprecated; use micro_steps and optimizer_steps for clarity.",
    "step_time": "step_time_* are of micro-steps: an optimizer step's time over its"
    " grad_accum_steps; optimizer_step_time_* are of optimizer steps.",
}
_VERSIONS = ("python", "torch", "transformers", "deepspeed")
_PEAKS = {
    "allocated": "cuda_mem_allocated",
    "reserved": "cuda_mem_reserved",
    "resident": "resident",
}

_SECONDS = Bounds(0, math.inf, below=True)
_WAITED = {"dataload_time_mean_sec": _SECONDS, "epoch_wall_time_sec": _SECONDS}
_WAITED["micro_steps"] = Count(1, 2**53)


@dataclass
class Measured:
    """The measurements of the training loop, in seconds of rank 0 unless said otherwise.

    startup_s: from the program's start to the first step. evaluation_s, checkpoint_s: what the
    training waited for them. wall_s: all of it. data_s: waiting for training batches; None where an
    earlier attempt did not say. peak, peak_all: most bytes of rank 0 and of any rank, by kind
    (allocated and reserved on CUDA, resident on CPU). energy_j: of the GPUs that rank 0 sees, from
    the first step on; energy_source: whose counter, or why there is none. validations:
    (optimizer steps done, loss).
    """

    startup_s: float = 0.0
    evaluation_s: float = 0.0
    checkpoint_s: float = 0.0
    wall_s: float = 0.0
    data_s: float | None = 0.0
    peak: dict[str, int] = field(default_factory=dict)
    peak_all: dict[str, int] = field(default_factory=dict)
    energy_j: float | None = None
    energy_source: str = "none"
    validations: list[tuple[int, float]] = field(default_factory=list)


def training_metrics(
    facts: dict[str, Any], steps: list[dict[str, Any]], measured: Measured
) -> dict[str, Any]:
    """Returns training_metrics.json; `facts` is run.json, `steps` the rows of steps.csv."""
    spec, layout, data, host = (facts[part] for part in ("spec", "layout", "data", "host"))
    model, epochs = _config(facts), spec["epochs"] or 1
    per_epoch = -(-len(steps) // epochs)
    used = (facts.get("engine") or {}).get("config") or {}
    parts = {
        "startup_time_sec": measured.startup_s,
        "training_time_sec": _seconds(steps),
        "evaluation_time_sec": measured.evaluation_s,
        "checkpoint_time_sec": measured.checkpoint_s,
    }
    return {
        "schema_version": METRICS_VERSION,
        "run_id": f"{facts['started_utc'].replace('-', '').replace(':', '')}-{facts['run']}",
        "timestamp_utc": facts["started_utc"],
        "git_commit": facts["git"]["commit"],
        "command_line": facts["command_line"],
        "env": {
            **{f"{name}_version": facts["versions"][name] for name in _VERSIONS},
            "cuda_version": host["cuda"],
        },
        "host": {"hostname": host["hostname"], "os": host["platform"]},
        "hardware": {
            "gpu_name": host["gpu"],
            "gpu_count_visible": host["gpus_visible"],
            "world_size": layout["world_size"],
            "cuda_version": host["cuda"],
            "cluster": os.environ.get("SLURM_CLUSTER_NAME"),
        },
        "training_config": {
            "model_name": name_of(model, spec["preset"]) or f"{model.n_params} parameters",
            "model_size": f"n_layer={model.n_layer}, n_head={model.n_head}, n_embd={model.hidden}",
            "seq_len": spec["seq_len"],
            "epochs": epochs,
            "micro_batch_size_per_gpu": layout["micro_batch"],
            "grad_accum_steps": layout["n_micro"],
            "global_batch_size": layout["global_batch"],
            "lr": spec["lr"],
            "optimizer": "AdamW",
            "precision": spec["precision"],
            "deepspeed_enabled": spec["engine"].startswith("deepspeed"),
            "zero_stage": layout["zero_stage"],
            "dataset_name": data["path"],
            "dataset_subset_sizes": {"train": data["train_tokens"], "val": data["val_tokens"]},
        },
        "deepspeed_config": {  # the given JSON, and what DeepSpeed used; null without DeepSpeed
            "path": spec["deepspeed_config"],
            "sha256": facts["inputs"]["deepspeed_config"],
            "selected": {
                "fp16_enabled": spec["precision"] == "fp16",
                "wall_clock_breakdown": bool(used.get("wall_clock_breakdown", False)),
                "zero_stage": layout["zero_stage"],
            },
        },
        "schema_notes": NOTES,
        "epochs": [
            _epoch(number, steps[start : start + per_epoch], facts, measured)
            for number, start in enumerate(range(0, len(steps), per_epoch), start=1)
        ],
        "summary": {
            "total_wall_time_sec": measured.wall_s,
            "best_val_loss": min((loss for _, loss in measured.validations), default=None),
            "mean_tokens_per_sec_global": _tokens(steps) / _seconds(steps),
            **parts,
            "other_time_sec": measured.wall_s - sum(parts.values()),
            "energy_joules": measured.energy_j,
            "energy_source": measured.energy_source,
            **_speed(facts, steps),
        },
        "shutdown": {
            "destroy_process_group_called": True,
            "quiet_nccl_monitor": os.environ.get("TORCH_NCCL_ENABLE_MONITORING") == "0",
        },
        "completion": {
            "run_complete_file": "RUN_COMPLETE.txt",
            "printed_marker": True,
            "timestamp_utc": utc_now(),
        },
        "scheduler": facts["scheduler"],
        "profiler": facts.get("profiler"),  # not null: slowed by it, not a timing
    }


def ended_in_nan(steps: list[dict[str, Any]], validations: list[tuple[int, float]]) -> str:
    """Returns why a training that did all its steps has failed all the same, or "". At its end the
    loss, or the gradient of its last update, is no number.

    One skipped step at the end is none of it: fp16 skips such a step and lowers its scale.
    """
    bad = 0
    while bad < len(steps) and not math.isfinite(steps[-1 - bad]["loss"]):
        bad += 1
    last = steps[-1]
    if bad > 1 or (bad == 1 and not last["skipped"]):
        return f"loss is {steps[-bad]['loss']} since step {steps[-bad]['step']}"
    if not last["skipped"] and last["grad_norm"] is not None and math.isnan(last["grad_norm"]):
        return f"gradient norm is nan at step {last['step']}, the last"
    if validations and validations[-1][0] == last["step"]:
        if not math.isfinite(loss := validations[-1][1]):
            return f"validation loss is {loss} after step {last['step']}, the last"
    return ""


def _tokens(steps: list[dict[str, Any]]) -> int:
    return sum(step["tokens"] for step in steps)


def _seconds(steps: list[dict[str, Any]]) -> float:
    return sum(step["step_s"] for step in steps)


def _epoch(
    number: int, steps: list[dict[str, Any]], facts: dict[str, Any], measured: Measured
) -> dict[str, Any]:
    """Returns the entry of epoch `number`, of which `steps` are the rows of steps.csv."""
    n_micro, data_s = facts["layout"]["n_micro"], measured.data_s
    times = sorted(step["step_s"] for step in steps)
    step_s = {"mean": statistics.fmean(times), "p50": statistics.median(times)}
    step_s["p95"] = float(np.quantile(times, 0.95))  # of 20 steps and fewer, too, not the largest
    first, last = steps[0]["step"], steps[-1]["step"]
    val_losses = [loss for done, loss in measured.validations if first <= done <= last]
    peaks = {"rank0": measured.peak, "global": measured.peak_all}
    return {
        "epoch_idx": number,
        "epoch_wall_time_sec": _seconds(steps),
        "steps": len(steps) * n_micro,
        "micro_steps": len(steps) * n_micro,
        "optimizer_steps": len(steps),
        "tokens_processed_global": _tokens(steps),
        "tokens_per_sec_global": _tokens(steps) / _seconds(steps),
        "train_loss_avg_global": statistics.fmean(step["loss"] for step in steps),
        "val_loss_avg_global": val_losses[-1] if val_losses else None,
        **{
            f"max_{name}_bytes_{ranks}": peak.get(kind)
            for kind, name in _PEAKS.items()
            for ranks, peak in peaks.items()
        },
        **{f"step_time_{key}_sec": value / n_micro for key, value in step_s.items()},
        **{f"optimizer_step_time_{key}_sec": value for key, value in step_s.items()},
        "dataload_time_mean_sec": data_s and data_s / (facts["spec"]["steps"] * n_micro),
    }


def _config(facts: dict[str, Any]) -> GPTConfig:
    sizes = {k: v for k, v in facts["model"].items() if k in GPTConfig.__dataclass_fields__}
    return GPTConfig(**sizes)


def steady_time_of(steps: list[dict[str, Any]]) -> Steady:
    """Returns the steady time of steps, the rows of steps.csv."""
    time = steady(
        np.array([step["step_s"] for step in steps]),
        np.array([float(step["skipped"]) for step in steps]),
    )
    assert time is not None, "every step is timed"
    return time


def _speed(facts: dict[str, Any], steps: list[dict[str, Any]]) -> dict[str, Any]:
    """Returns the summary's fields that follow from the steady step time; MFU where the GPU's
    peak is known."""
    spec, gpus, time = facts["spec"], facts["layout"]["world_size"], steady_time_of(steps)
    tokens = facts["layout"]["global_batch"] * spec["seq_len"]
    attended = facts["data"].get("attended_seq_len") or spec["seq_len"]
    tflops = tflops_per_gpu(_config(facts), attended, tokens, time.step_s, gpus)
    precision = gemm_precision(spec["precision"], spec.get("tf32"))
    utilization, reason = mfu(tflops, facts["host"]["gpu"], precision, DEFAULT_CONVENTION)
    return {
        "steady_step_time_sec": time.step_s,
        "steady_step_time_ci95_sec": list(time.ci95) if time.ci95 else None,
        "steady_optimizer_steps": time.n,
        "steady_tokens_per_sec_global": tokens / time.step_s,
        "tflops_per_gpu": tflops,
        "tflops_convention": DEFAULT_CONVENTION,
        "mfu": utilization,
        "mfu_note": reason,
    }


def data_share(metrics: dict[str, Any]) -> float | None:
    """Returns the share of the steps' time that rank 0 waited for batches; None where an attempt
    did not say."""
    epochs, names = metrics.get("epochs") or [], _WAITED.keys()
    if (
        not epochs
        or misfit(epochs, [_WAITED])
        or any(e.get(k) is None for e in epochs for k in names)
    ):
        return None
    data_s = sum(epoch["dataload_time_mean_sec"] * epoch["micro_steps"] for epoch in epochs)
    return data_s / max(sum(epoch["epoch_wall_time_sec"] for epoch in epochs), 1e-9)


def without_breakdown(metrics: dict[str, Any]) -> str:
    """Returns what a run without a breakdown says of where its time went."""
    share, remedy = data_share(metrics), "train with --breakdown to see where"
    if share is None:
        return f"{remedy} the time goes"
    bound = "input-bound: " if share > 1 - GOOD else ""
    return f"{bound}waiting for data takes {share:.1%} of the time; {remedy} the rest goes"


def verdict_line(metrics: dict[str, Any], where_time_went: str) -> str:
    """Returns the last line of the log: how fast the run was and what bounds it, as far as that was
    measured. where_time_went: by its breakdown, "" without one."""
    summary, profiler = metrics["summary"], metrics["profiler"]
    if profiler:
        return f" verdict: none, {profiler['tool']} slowed the run: see python -m analysis.profile"
    facts = [f"{summary['steady_step_time_sec']:.4g} s/iter"]
    if interval := summary["steady_step_time_ci95_sec"]:
        facts[0] += " ({:.4g} to {:.4g} hold 95 %)".format(*interval)
    facts.append(f"{summary['steady_tokens_per_sec_global']:.5g} tokens/s")
    if summary["mfu"]:
        peak = summary["tflops_per_gpu"] / summary["mfu"]
        facts.append(f"MFU {summary['mfu']:.1%} of {peak:.4g} TFLOP/s")
    return f" verdict: {', '.join(facts)}; {where_time_went or without_breakdown(metrics)}"


def complete_marker(folder: Path, metrics: dict[str, Any]) -> str:
    """Returns the line of RUN_COMPLETE.txt, in the form of the published GPT-2 study's."""
    return (
        f"[Rank 0] RUN_COMPLETE run_dir={folder}"
        f" world_size={metrics['hardware']['world_size']}"
        f" tokens_per_sec={metrics['summary']['mean_tokens_per_sec_global']}"
        f" total_wall_time_sec={metrics['summary']['total_wall_time_sec']}"
        f" timestamp_utc={metrics['completion']['timestamp_utc']}"
    )
