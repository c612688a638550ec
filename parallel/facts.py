"""What run.json and training_metrics.json say about a run: software, machine, commit, summary.

Torch-free: versions come from package metadata, not from imports.
"""

import hashlib
import os
import platform
import re
import statistics
import subprocess
import sys
from dataclasses import asdict
from importlib import metadata
from pathlib import Path
from typing import Any

from parallel.artifacts import utc_now
from parallel.launch import Launch
from parallel.spec import RunSpec

PACKAGES = ("torch", "deepspeed", "megatron-core", "transformers", "numpy", "transformer-engine")
SECRET = re.compile(r"(?i)(--?\S*(?:token|password|secret|key)\S*)([= ])(\S+)")


def versions() -> dict[str, str | None]:
    """Installed versions; None where a package is absent."""
    found: dict[str, str | None] = {"python": platform.python_version()}
    for package in PACKAGES:
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            found[package] = None
    return found


def git(folder: Path) -> dict[str, Any]:
    """The commit the code is at and whether files were changed since; None outside git."""

    def ask(*words: str) -> str | None:
        try:
            done = subprocess.run(["git", *words], cwd=folder, capture_output=True, text=True)
        except FileNotFoundError:
            return None
        return done.stdout.strip() if done.returncode == 0 else None

    changed = ask("status", "--porcelain", "--untracked-files=no")
    return {"commit": ask("rev-parse", "HEAD"), "dirty": None if changed is None else bool(changed)}


def cores() -> int:
    """Processor cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()


def cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return next(
            line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")
        )
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()


def scheduler(environment: dict[str, str] | os._Environ = os.environ) -> dict[str, str | None]:
    """Slurm's facts about the job, or {"type": "none"}."""
    if "SLURM_JOB_ID" not in environment:
        return {"type": "none"}
    names = {
        "job_id": "SLURM_JOB_ID",
        "nodelist": "SLURM_JOB_NODELIST",
        "nnodes": "SLURM_JOB_NUM_NODES",
        "procid": "SLURM_PROCID",
        "localid": "SLURM_LOCALID",
        "partition": "SLURM_JOB_PARTITION",
    }
    return {"type": "slurm"} | {ours: environment.get(theirs) for ours, theirs in names.items()}


def command_line() -> str:
    """The command as typed, with the values of secret-looking flags removed."""
    return SECRET.sub(r"\1\2***", " ".join([Path(sys.executable).name, *sys.orig_argv[1:]]))


def inputs(spec: RunSpec) -> dict[str, str | None]:
    """SHA-256 of the small files a run depends on and git may not know; None without one."""
    found: dict[str, str | None] = {}
    for name, path in (
        ("deepspeed_config", spec.deepspeed_config),
        ("data", Path(spec.data) / "meta.json"),
    ):
        there = path is not None and Path(path).is_file()
        found[name] = hashlib.sha256(Path(path).read_bytes()).hexdigest() if there else None
    return found


def run_facts(
    spec: RunSpec, study: str | None, run: str, baseline: str | None, launch: Launch
) -> dict[str, Any]:
    """run.json as far as it is known before torch is loaded."""
    layout = spec.layout
    return {
        "schema_version": "1",
        "study": study,
        "run": run,
        "baseline": baseline,
        "command_line": command_line(),
        "spec": spec.settings(),
        "layout": asdict(layout)
        | {
            "world_size": layout.world_size,
            "global_batch": layout.global_batch,
            "bubble": layout.bubble,
        },
        "model": asdict(spec.model)
        | {
            "n_params": spec.model.n_params,
            "padded_vocab": spec.model.padded_vocab(layout.tp),
        },
        "versions": versions(),
        "host": {
            "hostname": platform.node(),
            "platform": platform.platform(),
            "cpu": cpu_name(),
            "cores": cores(),
            "ranks_per_node": launch.local_world_size,
        },
        "inputs": inputs(spec),
        "scheduler": scheduler(),
        "git": git(Path(__file__).parent),
        "launcher": launch.launcher,
        "started_utc": utc_now(),
    }


def training_metrics(
    facts: dict[str, Any],
    steps: list[dict[str, Any]],
    val_loss: float | None,
    best_val_loss: float | None,
    train_s: float,
    wall_s: float,
    data_s: float | None,
    peak_bytes: int,
) -> dict[str, Any]:
    """training_metrics.json, schema 2.0.

    Args:
        steps: rows of steps.csv.
        val_loss, best_val_loss: the last validation's loss and the lowest; None without one.
        train_s: seconds of training alone, without start-up and validation.
        wall_s: seconds from the program's start.
        data_s: seconds rank 0 waited for training data; None where earlier attempts did not say.
        peak_bytes: most memory of rank 0: allocated on CUDA, resident on CPU.
    """
    spec, layout, host = facts["spec"], facts["layout"], facts["host"]
    tokens = sum(s["tokens"] for s in steps)
    times = sorted(s["step_s"] for s in steps)
    losses = [s["loss"] for s in steps]
    on_gpu = host["gpu"] is not None
    epoch = {
        "epoch_idx": 1,
        "epoch_wall_time_sec": train_s,
        "steps": len(steps) * layout["n_micro"],
        "micro_steps": len(steps) * layout["n_micro"],
        "optimizer_steps": len(steps),
        "tokens_processed_global": tokens,
        "tokens_per_sec_global": tokens / train_s,
        "train_loss_avg_global": statistics.fmean(losses),
        "val_loss_avg_global": val_loss,
        "max_cuda_mem_allocated_bytes_rank0": peak_bytes if on_gpu else None,
        "max_resident_bytes_rank0": None if on_gpu else peak_bytes,
        "step_time_mean_sec": statistics.fmean(times),
        "step_time_p50_sec": statistics.median(times),
        "step_time_p95_sec": times[min(len(times) - 1, int(0.95 * len(times)))],
        "dataload_time_mean_sec": (
            None if data_s is None else data_s / (len(steps) * layout["n_micro"])
        ),
    }
    model = facts["model"]
    return {
        "schema_version": "2.0",
        "run_id": f"{facts['started_utc'].replace('-', '').replace(':', '')}-{facts['run']}",
        "timestamp_utc": facts["started_utc"],
        "git_commit": facts["git"]["commit"],
        "command_line": facts["command_line"],
        "env": {
            "python_version": facts["versions"]["python"],
            "torch_version": facts["versions"]["torch"],
            "transformers_version": facts["versions"]["transformers"],
            "deepspeed_version": facts["versions"]["deepspeed"],
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
            "model_name": spec["preset"],
            "model_size": f"n_layer={model['n_layer']}, n_head={model['n_head']},"
            f" n_embd={model['hidden']}",
            "seq_len": spec["seq_len"],
            "epochs": 1,
            "micro_batch_size_per_gpu": layout["micro_batch"],
            "grad_accum_steps": layout["n_micro"],
            "global_batch_size": layout["global_batch"],
            "lr": spec["lr"],
            "optimizer": "AdamW",
            "precision": spec["precision"],
            "deepspeed_enabled": spec["engine"].startswith("deepspeed"),
            "zero_stage": layout["zero_stage"],
            "dataset_name": facts["data"]["path"],
            "dataset_subset_sizes": {
                "train": facts["data"]["train_tokens"],
                "val": facts["data"]["val_tokens"],
            },
        },
        "schema_notes": {
            "steps": "Deprecated; use micro_steps and optimizer_steps for clarity.",
            "dataset_subset_sizes": "tokens",
        },
        "epochs": [epoch],
        "summary": {
            "total_wall_time_sec": wall_s,
            "best_val_loss": best_val_loss,
            "mean_tokens_per_sec_global": tokens / train_s,
        },
        "completion": {
            "run_complete_file": "RUN_COMPLETE.txt",
            "printed_marker": True,
            "timestamp_utc": utc_now(),
        },
        "scheduler": facts["scheduler"],
    }


def complete_marker(folder: Path, metrics: dict[str, Any]) -> str:
    """The line of RUN_COMPLETE.txt, in the form of the published GPT-2 study's."""
    return (
        f"[Rank 0] RUN_COMPLETE run_dir={folder}"
        f" world_size={metrics['hardware']['world_size']}"
        f" tokens_per_sec={metrics['summary']['mean_tokens_per_sec_global']}"
        f" total_wall_time_sec={metrics['summary']['total_wall_time_sec']}"
        f" timestamp_utc={metrics['completion']['timestamp_utc']}"
    )
