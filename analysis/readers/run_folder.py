"""Our own run folder: facts from run.json, steps from steps.csv, the end from status.json."""

from pathlib import Path
from typing import Any

import numpy as np

from analysis.records import Failure, Record
from parallel.artifacts import COMPLETE, FAILED, Run, read_run

FORMAT = "run folder"

# The reason a run failed, as the engine said it -> the verdict's name.
_KINDS = (
    ("oom", ("out of memory", "outofmemory")),
    ("nccl", ("nccl", "gloo", "timed out", "connection")),
    ("timeout", ("time limit", "sigusr1")),
    ("cancelled", ("keyboardinterrupt", "sigterm", "sigint", "cancelled")),
)


def oversubscribed(facts: dict[str, Any]) -> str:
    """Why the ranks had to share what they ran on, or "" when they did not (or nothing says)."""
    host, layout, spec = facts.get("host", {}), facts.get("layout", {}), facts.get("spec", {})
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


def from_run(run: Run) -> Record:
    """One of our own run folders as a Record; `extra` keeps run.json as "facts"."""
    facts = run.facts
    spec, layout, model = (facts.get(k) or {} for k in ("spec", "layout", "model"))
    host, git = facts.get("host") or {}, facts.get("git") or {}

    def column(name: str) -> np.ndarray:
        return np.array([np.nan if s[name] is None else s[name] for s in run.steps], dtype=float)

    step_s, tokens = column("step_s"), column("tokens")
    commit = git.get("commit")
    record = Record(
        source=str(run.path),
        format=FORMAT,
        engine=spec.get("engine"),
        iteration=column("step"),
        step_s=step_s,
        loss=column("loss"),
        grad_norm=column("grad_norm"),
        tokens_per_s=tokens / np.where(step_s > 0, step_s, np.nan),
        skipped=column("skipped"),
        planned_steps=spec.get("steps"),
        completed=run.state == COMPLETE,
        gpus=layout.get("world_size"),
        **{k: layout.get(k) for k in ("tp", "pp", "vpp", "dp", "micro_batch", "global_batch")},
        seq_len=spec.get("seq_len"),
        model={
            k: model[k]
            for k in ("n_layer", "hidden", "n_head", "vocab_size", "max_seq_len", "ffn_hidden")
            if k in model
        },
        params=model.get("n_params"),
        precision=spec.get("precision"),
        recompute=layout.get("recompute"),
        zero_stage=layout.get("zero_stage"),
        gpu_type=host.get("gpu"),
        commit=commit and commit + ("+dirty" if git.get("dirty") else ""),
        oversubscribed=bool(oversubscribed(facts)),
        extra={
            "run": facts.get("run", run.path.name),
            "study": facts.get("study"),
            "baseline": facts.get("baseline"),
            "state": run.state,
            "reason": run.reason,
            "facts": facts,
        },
    )
    stated = (
        "engine",
        "gpus",
        "tp",
        "pp",
        "vpp",
        "dp",
        "micro_batch",
        "global_batch",
        "seq_len",
        "model",
        "params",
        "precision",
        "recompute",
        "zero_stage",
        "gpu_type",
        "commit",
    )
    record.origin = {name: "run.json" for name in stated if getattr(record, name) is not None}
    if record.seq_len:
        record.samples_per_s = record.tokens_per_s / record.seq_len
    if run.state == FAILED:
        reason = run.reason.lower()
        kind = next((k for k, words in _KINDS if any(w in reason for w in words)), "traceback")
        record.failure = Failure(kind, 0, run.reason)
    return record


def read(path: Path) -> Record:
    """Read one run folder.

    Raises:
        UsageError: no run.json, or a file that is damaged.
    """
    return from_run(read_run(Path(path)))
