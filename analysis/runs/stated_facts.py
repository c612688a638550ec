"""What runs state of their machine, program and model: a line for each fact, which has its values,
each with the runs that state it."""

from collections import defaultdict
from collections.abc import Callable
from typing import Any

from analysis.common.terminal import who
from analysis.logs.model import config_of
from analysis.logs.naming import name_of
from analysis.logs.record import Record
from analysis.runs.fairness import short_commit


def fact_lines(records: list[Record], given: Any = None) -> list[str]:
    """Returns a line for each fact. `given` has what flags state in place of the logs, by the
    fact's name; with it a line names the flag for what no log states."""
    lines = []
    for label, (flag, value_of) in _FACTS.items():
        unstated = f"- (no log states it: {flag})" if given else "- (no log states it)"
        runs: dict[str, list[str]] = defaultdict(list)
        for record in records:
            value = getattr(given, label, None) or value_of(record)
            runs[str(value or unstated)].append(name_of(record))
        values = (f"{value}: {who(names, len(records))}" for value, names in runs.items())
        lines.append(f"{label}: " + ("; ".join(values) if len(runs) > 1 else next(iter(runs))))
    return lines


def _machine(record: Record) -> str | None:
    """Returns the host that a run of ours states, or the system of an MLPerf result."""
    if record.submission:
        return record.submission.system
    host = record.facts.get("host") or {}
    cores = f"{host['cores']} cores of " if host.get("cores") else ""
    card = f", {host['gpus_visible']} x {host['gpu']}" if host.get("gpu") else ""
    return f"{cores}{host['cpu']}{card}" if host.get("cpu") else None


def _libraries(record: Record) -> str | None:
    versions = (record.facts.get("versions") or {}).items()
    host = record.facts.get("host") or {}
    named = [*versions, *((name, host.get(name)) for name in ("cuda", "nccl", "driver"))]
    return ", ".join(f"{name} {version}" for name, version in named if version) or None


def _model(record: Record) -> str | None:
    """Returns the size of the model, and its blocks where the log states them."""
    config = config_of(record).value
    params = record.params or (config and config.n_params)
    sizes = [f"{record.model[k]} {word}" for k, word in _SHAPE.items() if k in record.model]
    if params:
        size = f"{params / 1e9:.4g}B" if params >= 1e9 else f"{params / 1e6:.4g}M"
        sizes.insert(0, f"{size} parameters")
    return ", ".join(sizes) or None


_SHAPE = {"n_layer": "layers", "hidden": "hidden", "n_head": "heads"}
_FACTS: dict[str, tuple[str, Callable[[Record], Any]]] = {
    "machine": ("--machine", _machine),
    "processor": ("--gpu-type", lambda record: record.gpu_type),
    "program": ("--engine", lambda record: record.engine or record.format),
    "libraries": ("--libraries", _libraries),
    "commit": ("--commit", lambda record: short_commit(record.commit or "")),
    "model": ("--params", _model),
    "precision": ("--precision", lambda record: record.precision),
    "tokens of a sequence": ("--seq-len", lambda record: record.seq_len),
}
