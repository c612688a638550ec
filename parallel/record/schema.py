"""What a run folder holds: its files, their columns, and which values are possible. Torch-free.

run.json               the resolved settings, layout, versions, kernels, commit, host
launcher_metadata.json who started it, where, with what environment (secrets removed)
train.log              the console, in Megatron-LM's iteration lines
steps.csv              one row per optimizer step, in full precision
checkpoints.csv        one row per checkpoint saved, loaded or deleted, or why it was not
slow_ranks.csv         one row per window that counts against a rank (measure/rank_judge.py)
checkpoints/           the checkpoints themselves (parallel/checkpoint/folders.py)
training_metrics.json  the summary (schema 2.0), when the run completed
RUN_COMPLETE.txt       only when it truly completed
breakdown/rank<r>.csv  with --breakdown: where the time went, one row per window of steps
status.json            running, complete, interrupted (saved; can go on) or failed; why, as a kind
                       (ends.py lists them) and in words
attempts/<n>/          the files of earlier runs in the same folder; nothing is lost
.lock                  held by rank 0 while it writes here; it names its host and process
<jobid>.submitted      what the job was to run, before there is a run.json
<jobid>.state          how the job ended, once slurm.status has asked Slurm
<jobid>[.restart<n>].* what the job's script left: its log, environment, exit status ...

writer.py writes a folder, reader.py reads it, and lock.py leaves it to one writer.
"""

import math
import re
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from base.bounds import Bounds, Count, Moment, misfit
from base.errors import UsageError
from base.files import shown
from parallel.config.layout import AXES, EXPERT_AXES, RANK_AXES, SELDOM

SCHEMA_VERSION = "1"  # of run.json
METRICS_VERSION = "2.0"  # of training_metrics.json

RUN, STATUS, LOG, LOCK = "run.json", "status.json", "train.log", ".lock"
STEPS, CHECKPOINTS = "steps.csv", "checkpoints.csv"
SLOW_RANKS = "slow_ranks.csv"
TOLD = ".told"  # made by the rank that prints the mistake that ends an attempt
HANGS = "hang"  # where each rank was when no rank made progress
MARKER, METRICS = "RUN_COMPLETE.txt", "training_metrics.json"
# What a run writes at the top of its folder. Only this is moved to attempts/.
_WRITTEN = {RUN, STATUS, METRICS, MARKER, STEPS, CHECKPOINTS, LOG, "launcher_metadata.json"}
_WRITTEN |= {SLOW_RANKS, TOLD, "checkpoints", "breakdown", "profiles", HANGS}
_ASIDE = re.compile(r"\.([\w.]+)\.\d+")  # write_synced's, of a writer that was killed
# What jobs and sweeps write beside a run, from before it begins.
_BESIDE = re.compile(
    r"\d+(\.restart\d+)?\.(submitted|state|skipped|exit|env|job|slurm|others|profiles|nccl|torchrun)"
    r"|\d+(\.restart\d+)?\.(study\.toml|clusters\.toml|commit|diff|end|setup)"
    r"|.*\.(out|err)"
)

LARGEST = 2**53  # whole numbers below it are exact in every reader's arithmetic
COUNT, POSITIVE = Count(0, LARGEST, below=True), Count(1, LARGEST, below=True)
_NUMBER = Bounds(0, math.inf, below=True)


def count(text: str) -> int:
    """Returns the whole number from 0 that a text is. Raises: ValueError: it is none, or too
    large."""
    return _within(COUNT, int(text))


def amount(text: str) -> float:
    """Returns the number from 0 that a text is. Raises: ValueError: it is none, or infinite."""
    return _within(_NUMBER, float(text))


def _within(allowed: Bounds, value: Any) -> Any:
    if misfit(value, allowed):
        raise ValueError(f"{shown(value)} is out of range")
    return value


# Columns: name -> what makes a value of a cell's text.
STEP_COLUMNS = {"step": count, **dict.fromkeys(("step_s", "loss", "grad_norm", "lr"), float)}
STEP_COLUMNS |= {"loss_scale": float, "skipped": count, "tokens": count}
EXPERT_COLUMNS = {"expert_load": float}  # of a model with experts: its steps that have a line
CLOCK_COLUMNS = {"ended_unix_s": amount}  # when the step was over; absent in older files
CHECKPOINT_COLUMNS = {"event": str, "step": count, "blocked_s": amount, "total_s": amount}
CHECKPOINT_COLUMNS |= {"bytes": amount, "ranks": count, "problem": str}
SLOW_COLUMNS = {"time_utc": str, "first_step": count, "last_step": count}
SLOW_COLUMNS |= {"kind": str, "rank": int, "node": str, "longer": amount, "noise": amount}
# A breakdown's columns; measure/step_parts.py says what each is. The CATEGORIES exclude each other
# and add up to elapsed_s.
MESSAGE_AXES = ("tp", "dp", "pp", "embedding", "mixed", "control")
CATEGORIES = ("data", "move", "forward", "backward", "optimizer", *MESSAGE_AXES, "bubble", "other")
_TRAFFIC = {"calls": count, "bytes": count, "wire_bytes": float}

BREAKDOWN_COLUMNS = {
    **dict.fromkeys(("rank", "first_step", "last_step"), count),
    **dict.fromkeys(("elapsed_s", "transfer_s", *(f"{name}_s" for name in CATEGORIES)), float),
    **{f"{axis}_{what}": kind for axis in MESSAGE_AXES for what, kind in _TRAFFIC.items()},
}
EXPERT_MESSAGE_AXES = ("ep", "etp", "expert_dp")  # of experts; they are categories, too
EXPERT_BREAKDOWN_COLUMNS = {
    f"{axis}_{what}": kind
    for axis in EXPERT_MESSAGE_AXES
    for what, kind in {"s": float, **_TRAFFIC}.items()
}


def utc_now() -> str:
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def is_written_by_run(name: str) -> bool:
    """Returns whether a name at the top of a run folder is one that a run writes."""
    return name in _WRITTEN or bool((aside := _ASIDE.fullmatch(name)) and aside[1] in _WRITTEN)


def may_stand_beside(name: str) -> bool:
    """Returns whether a folder that holds this name may still become a run folder: a job or a sweep
    writes it, or a writer that was killed left it."""
    beside = name in ("attempts", LOCK) or _BESIDE.fullmatch(name) or _ASIDE.fullmatch(name)
    return bool(beside)


# What readers rely on: key -> its type. null means that the writer did not know; a key may be
# absent.
_NAMES = "run study question configuration baseline go_on kernels attention routing"
_SIZES = ("n_layer", "hidden", "n_head", "vocab_size", "max_seq_len", "ffn_hidden", "n_params")
_SPLIT = ("micro_batch", "n_micro", "world_size", "global_batch", "fsdp_shard")
_SPLIT = (*AXES, *EXPERT_AXES, *_SPLIT)
_ATTEMPT = {"started_utc": Moment(), "reason": str, "steps": COUNT, "kept_to": COUNT}
RUN_FACTS = {
    **dict.fromkeys(_NAMES.split(), str),
    "started_utc": Moment(),
    "repeat": COUNT,
    "attempts": [_ATTEMPT],
    "spec": dict.fromkeys(("engine", "preset", "precision"), str)
    | dict.fromkeys(("gpus", "seq_len", "threads"), POSITIVE)
    | {"steps": COUNT},
    "layout": dict.fromkeys(_SPLIT, POSITIVE)
    | {"zero_stage": COUNT, "recompute": str, "offload": str, "sequence_parallel": bool},
    "model": dict.fromkeys(_SIZES, POSITIVE)
    | dict.fromkeys(("n_kv_head", "kv_channels"), COUNT)
    | dict.fromkeys(("position", "norm", "activation"), str)
    | dict.fromkeys(("qk_norm", "tied", "bias"), bool),
    "data": {"sha256": str, "attended_seq_len": _NUMBER},
    "host": dict.fromkeys(("hostname", "cpu", "gpu", "cuda", "nccl", "driver"), str)
    | {"cores": POSITIVE, "ranks_per_node": POSITIVE, "gpus_visible": COUNT},
    # Of rank 0's machine; cpu_s: of all ranks over wall_s, machine_cpu_s: of whatever ran there.
    "load": dict.fromkeys(("start", "end", "wall_s", "cpu_s", "machine_cpu_s"), _NUMBER),
    "variables": {},
    "git": {"commit": str, "code": str, "dirty": bool},
    "profiler": {"tool": str},
    "scheduler": {"job_id": str},
    "work": {},
}
STATUS_KEYS = {"pid": POSITIVE}
STATUS_KEYS |= dict.fromkeys(("state", "kind", "reason", "host"), str)
STATUS_KEYS["time_utc"] = Moment()
JOB_END_KEYS = {"state": str, "exit": str, "reason": str, "elapsed_s": COUNT}
JOB_END_KEYS |= {"verdict": str, "kind": str}
_METRICS = {"epochs": list, "hardware": {"world_size": POSITIVE}}


def checked(content: dict[str, Any], allowed: dict[str, Any], path: Path) -> dict[str, Any]:
    """Returns `content`, and refuses it where a value is not allowed."""
    if problem := misfit(content, allowed):
        raise UsageError(f"{path} is damaged: {problem}")
    return content


def checked_facts(facts: dict[str, Any], path: Path) -> dict[str, Any]:
    """Returns run.json's content, or <jobid>.submitted's."""
    checked(facts, RUN_FACTS, path)
    if not facts.get("run"):
        raise UsageError(f"{path} is damaged: it names no run")
    _check_version(facts, SCHEMA_VERSION, path)
    _check_split(facts.get("spec") or {}, facts.get("layout") or {}, path)
    return facts


def _check_version(content: dict[str, Any], expected: str, path: Path) -> None:
    """Refuses content that states another schema_version than the expected one."""
    version = content.get("schema_version", expected)
    if version != expected:
        raise UsageError(f"{path}: schema_version {shown(version)} is not known ({expected!r} is)")


def _check_split(spec: dict[str, Any], layout: dict[str, Any], path: Path) -> None:
    """Refuses numbers of a split that disagree: one of them is not what the run had. Files of
    before the split was stated once have it in spec, too."""
    damaged = f"{path} is damaged: "
    stated = spec | {"world_size": spec.get("gpus")}
    for name in sorted(stated.keys() & layout.keys()):
        asked, had = stated[name], layout[name]
        if None not in (asked, had) and asked != had:
            raise UsageError(f"{damaged}{name} {shown(asked)} in spec, {shown(had)} in layout")
    ranks = [axis for axis in RANK_AXES if axis in layout or axis not in SELDOM]
    for name, factors in (
        ("world_size", ranks),
        ("global_batch", ("dp", "micro_batch", "n_micro")),
    ):
        numbers = [layout.get(factor) for factor in factors]
        if None not in (layout.get(name), *numbers) and layout[name] != math.prod(numbers):
            parts = " x ".join(f"{factor} {layout[factor]}" for factor in factors)
            raise UsageError(f"{damaged}{name} {layout[name]} in layout is not {parts}")


def checked_metrics(metrics: dict[str, Any], facts: dict[str, Any], path: Path) -> dict[str, Any]:
    """Returns training_metrics.json's content, of the run that `facts` describes."""
    checked(metrics, _METRICS, path)
    _check_version(metrics, METRICS_VERSION, path)
    ranks = (metrics.get("hardware") or {}).get("world_size")
    started = (facts.get("layout") or {}).get("world_size")
    if None not in (ranks, started) and ranks != started:
        raise UsageError(f"{path}: {ranks} ranks, but run.json started {started}")
    return metrics
