"""Our own run folder: facts from run.json, steps from steps.csv, the end from status.json."""

import re
from pathlib import Path
from typing import Any

import numpy as np

from analysis.records import Failure, Record
from models.errors import UsageError
from parallel.artifacts import (
    COMPLETE,
    FAILED,
    PENDING,
    RUNNING,
    RunFolder,
    read_run,
    read_status,
)

FORMAT = "run folder"

# What a failed run's own reason says -> the kind of failure.
_VERDICTS = {"OOM": "oom", "timeout": "timeout", "node failure": "node", "cancelled": "cancelled"}
_DIVERGED = re.compile(r"(validation )?loss is (nan|-?inf) |gradient norm is nan ")
_KINDS = (
    ("oom", ("out of memory", "outofmemory")),
    ("nccl", ("nccl", "gloo", "timed out", "connection")),
    ("timeout", ("time limit",)),
    ("cancelled", ("keyboardinterrupt", "sigterm", "sigint", "cancelled")),
)
# What a script or Slurm says who saw that a run ended, and not of what.
_UNPROVEN = re.compile(
    r"exit status \d+(: srun: error: .*)?|srun: error: .*|max_restarts: .*|Slurm: .*"
    r"|Slurm no longer .*|no status and no log"
)
# What was raised or sent; any other reason of a run that took no step is why it could not start.
_RAISED = re.compile(r"\b\w*(?:Error|Exception|Interrupt)\b|\bSignal \d+|\bSIG[A-Z]+\b")

# GPTConfig's own; run.json's padded_vocab follows from tp and is no size of the model.
_SIZES = ("n_layer", "hidden", "n_head", "vocab_size", "max_seq_len", "ffn_hidden")


def read(path: Path) -> Record:
    """Read one run folder.

    Raises:
        UsageError: no run.json, or a file that is damaged.
    """
    run = read_run(Path(path))
    facts, status = run.facts, read_status(run.path)
    record = Record(source=str(path), format=FORMAT)

    def column(name: str) -> np.ndarray:
        return np.array([np.nan if s[name] is None else float(s[name]) for s in run.steps])

    record.iteration = column("step")
    record.step_s = column("step_s")
    record.loss = column("loss")
    record.grad_norm = column("grad_norm")
    record.skipped = column("skipped")
    record.tokens_per_s = column("tokens") / np.where(record.step_s > 0, record.step_s, np.nan)
    for name, value in stated(facts).items():
        if value is not None:
            setattr(record, name, value)
            record.origin[name] = "run.json"
    if record.seq_len:
        record.samples_per_s = record.tokens_per_s / record.seq_len
    record.extra = {
        "run": facts.get("run", run.path.name),
        "configuration": facts.get("configuration") or facts.get("run"),
        "repeat": facts.get("repeat"),
        "study": facts.get("study"),
        "baseline": facts.get("baseline"),
        "state": run.state,
        "profiler": facts.get("profiler"),
        "facts": facts,
        "metrics": run.metrics,
        "missing_steps": run.missing,
        "go_on": facts.get("go_on"),
        "ended_utc": status.get("time_utc") if run.state != RUNNING else None,
    }
    # An empty cell is unknown; a NaN was the loss.
    printed = [step["loss"] is not None for step in run.steps]
    record.count_nans(np.isnan(record.loss) & np.array(printed, bool))
    record.completed = run.state == COMPLETE
    unseen = not (run.verdict or status.get("state") == FAILED)
    unproven = run.verdict not in _VERDICTS and _UNPROVEN.fullmatch(run.reason)
    if run.state == FAILED and (unseen or unproven):
        record.notes.append(run.reason)  # nobody saw how it ended: how far it came is the verdict
    elif run.state == FAILED:
        reason = run.reason.lower()
        plain = "traceback" if run.steps or _RAISED.search(run.reason) else "launcher"
        plain = "diverged" if _DIVERGED.match(run.reason) else plain
        kind = next((k for k, words in _KINDS if any(w in reason for w in words)), plain)
        if run.verdict:  # where Slurm says "failed", nobody cancelled: its peer died before a rank
            kind = _VERDICTS.get(run.verdict, plain if kind == "cancelled" else kind)
        record.failure = Failure(kind, 0, run.reason)
    elif run.state == PENDING:
        record.notes.append(run.reason)
    elif run.state != COMPLETE:
        record.notes.append(f"status.json says {run.state} {run.reason}".strip())
    record.notes += [run.later] * bool(run.later)
    try:
        saves, failed = RunFolder(run.path).saves()
    except UsageError as error:  # the run's steps are whole
        record.notes.append(str(error))
        failed = []
    if failed:
        record.notes.append(f"{len(failed)} of {saves} saves failed, the last: {failed[-1]}")
    return record


def stated(facts: dict[str, Any]) -> dict[str, Any]:
    """Record's fields as run.json states them; None where it does not."""
    spec, layout, host = (facts.get(part) or {} for part in ("spec", "layout", "host"))
    model = facts.get("model") or {}
    git = facts.get("git") or {}
    commit, changed = git.get("commit"), "+dirty" if git.get("dirty") else ""
    return {
        "engine": spec.get("engine"),
        "planned_steps": spec.get("steps"),
        "gpus": layout.get("world_size"),
        "tp": layout.get("tp"),
        "pp": layout.get("pp"),
        "vpp": layout.get("vpp"),
        "dp": layout.get("dp"),
        "micro_batch": layout.get("micro_batch"),
        "global_batch": layout.get("global_batch"),
        "seq_len": spec.get("seq_len"),
        "zero_stage": layout.get("zero_stage"),
        "recompute": layout.get("recompute"),
        "precision": spec.get("precision"),
        "params": model.get("n_params"),
        "model": {k: model[k] for k in _SIZES if k in model} or None,
        "gpu_type": host.get("gpu") or host.get("cpu"),
        "commit": commit and commit + changed,
        "code": git.get("code") and git["code"] + changed,
        "oversubscribed": bool(oversubscribed(facts)),
    }


def oversubscribed(facts: dict[str, Any]) -> str:
    """Why the ranks had to share what they ran on, or "" when they did not (or nothing says)."""
    spec, layout, host = (facts.get(part) or {} for part in ("spec", "layout", "host"))
    ranks = host.get("ranks_per_node") or layout.get("world_size")
    if not ranks:
        return ""
    if host.get("gpu"):
        visible = host.get("gpus_visible")
        return f"{ranks} ranks on {visible} GPUs" if visible and ranks > visible else ""
    cores, threads = host.get("cores"), spec.get("threads") or 1
    if not cores or ranks * threads <= cores:
        return ""
    return f"{ranks} ranks x {threads} threads on {cores} cores"
