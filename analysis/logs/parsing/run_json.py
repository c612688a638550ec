"""What run.json and training_metrics.json state, as Record's fields."""

from typing import Any

from analysis.logs.facts import MODEL, SETTINGS
from analysis.logs.parsing.json_values import integer, mapping, rows
from models.config import PARTS
from parallel.config.layout import EXPERT_AXES, SELDOM
from parallel.config.run_spec import gemm_precision


def stated(facts: dict[str, Any]) -> dict[str, Any]:
    """Returns Record's fields as run.json states them; None where it does not."""
    tables = {name: mapping(facts.get(name)) for name in ("spec", "layout", "host", "model", "git")}
    git, host, model = tables["git"], tables["host"], tables["model"]
    commit = git.get("commit")
    dirty_mark = "+dirty" if git.get("dirty") else ""
    dispatcher = tables["spec"].get("moe_token_dispatcher_type")  # no other engine sends tokens
    fields = {
        name: tables[fact.run_json].get(name) for name, fact in SETTINGS.items() if fact.run_json
    }
    seldom = [axis for axis in SELDOM if axis not in EXPERT_AXES or model.get("experts")]
    return fields | {
        "precision": gemm_precision(tables["spec"].get("precision"), tables["spec"].get("tf32")),
        "planned_steps": tables["spec"].get("steps"),
        "attended_seq_len": mapping(facts.get("data")).get("attended_seq_len", 0.0)
        if tables["spec"].get("reset_at_documents")
        else None,
        "gpus": tables["layout"].get("world_size"),
        # Older files do not state cp, and a file does not state that experts are not split.
        **{axis: tables["layout"].get(axis, 1) if tables["layout"] else None for axis in seldom},
        "params": model.get("n_params"),
        # run.json's padded_vocab follows from tp and is no size of the model.
        "model": {name: model[name] for name in (*MODEL, *PARTS) if name in model} or None,
        "routing": facts.get("routing"),
        "dispatcher": dispatcher if tables["spec"].get("engine") == "megatron" else None,
        "gpu_type": host.get("gpu") or host.get("cpu"),
        "commit": commit and commit + dirty_mark,
        "code": git.get("code") and git["code"] + dirty_mark,
        "oversubscribed": bool(sharing(facts)),
    }


def sharing(facts: dict[str, Any]) -> str:
    """Returns in words why the ranks had to share cores or GPUs; empty when they did not, or when
    run.json does not say."""
    spec, layout, host = (mapping(facts.get(name)) for name in ("spec", "layout", "host"))
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


def peak_bytes(content: dict[str, Any]) -> int | None:
    """Returns the most bytes that a rank held, by training_metrics.json: allocated on CUDA,
    resident on CPU."""
    keys = ["max_cuda_mem_allocated_bytes_global", "max_resident_bytes_global"]
    if mapping(content.get("hardware")).get("world_size") == 1:
        keys.append("max_cuda_mem_allocated_bytes_rank0")
    peaks = [integer(epoch.get(key)) for epoch in rows(content.get("epochs")) for key in keys]
    return max((value for value in peaks if value and value > 0), default=None)
