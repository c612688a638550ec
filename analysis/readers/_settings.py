"""What a run was asked to do, from wherever it is said: argument dumps, sidecars, flags, names.

A fact keeps the first origin that knows it, in the order of `records.ORIGINS`; a weaker origin
that says something else leaves a note, never a change.
"""

import json
import re
import tomllib
from pathlib import Path
from typing import Any

from analysis.records import Record, Refusal

INTEGERS = (
    "gpus",
    "tp",
    "pp",
    "vpp",
    "dp",
    "micro_batch",
    "global_batch",
    "seq_len",
    "zero_stage",
    "planned_steps",
)
SETTINGS = INTEGERS + ("params", "precision", "recompute", "gpu_type", "commit", "engine")
MODEL_SIZES = ("n_layer", "hidden", "n_head", "ffn_hidden", "vocab_size", "max_seq_len")


def state(record: Record, facts: dict[str, Any], origin: str) -> None:
    """Fill what `record` does not know yet; note what contradicts a stronger origin."""
    for name, value in facts.items():
        if value is None:
            continue
        if name in MODEL_SIZES:
            if name not in record.model:
                record.model[name] = value
                record.origin.setdefault(name, origin)
            continue
        known = getattr(record, name)
        if known is None:
            setattr(record, name, value)
            record.origin[name] = origin
        elif known != value and origin != "from name":
            stronger = record.origin.get(name, "log")
            record.notes.append(f"{name}: {stronger} says {known}, {origin} says {value}")


def complete_from_elsewhere(record: Record, path: Path, flags: dict[str, Any]) -> None:
    """Fill from run.json beside the log, a sidecar TOML, flags and, last, the file's name.

    The sidecar of `name.out` is `name.out.toml` or `name.toml`; its keys are Record's fields and
    GPTConfig's sizes.

    Raises:
        Refusal: a sidecar or run.json that is damaged, or a key that is not known.
    """
    for name in SETTINGS:
        if getattr(record, name) is not None:
            record.origin.setdefault(name, "log")
    if path.is_file():
        beside = path.parent / "run.json"
        if beside.is_file():
            from analysis.readers.run_folder import stated

            facts = {k: v for k, v in stated(_parsed(beside, json.loads)).items() if k in SETTINGS}
            state(record, facts, "run.json")
        for sidecar in (path.with_name(path.name + ".toml"), path.with_suffix(".toml")):
            if sidecar.is_file():
                state(record, _known(_parsed(sidecar, tomllib.loads), str(sidecar)), "sidecar")
                break
    state(record, _known(flags, "flags"), "flag")
    state(record, from_name(path.name), "from name")


def _parsed(path: Path, parse: Any) -> dict[str, Any]:
    try:
        return parse(path.read_text())
    except (OSError, ValueError) as error:
        raise Refusal(str(path), f"cannot be read: {error}") from error


def _known(facts: dict[str, Any], source: str) -> dict[str, Any]:
    if unknown := set(facts) - set(SETTINGS) - set(MODEL_SIZES):
        raise Refusal(source, f"unknown key {', '.join(sorted(unknown))}")
    return facts


def _in_name(words: str) -> re.Pattern[str]:
    return re.compile(rf"(?:^|[^a-z0-9])(?:{words})[-_=]?(\d{{1,9}})(?![a-z0-9.])", re.IGNORECASE)


_NAME_PATTERNS = {
    "micro_batch": _in_name("mbs|lbs|micro-?bs"),
    "global_batch": _in_name("gbs"),
    "tp": _in_name("tp"),
    "pp": _in_name("pp"),
    "vpp": _in_name("vpp"),
    "dp": _in_name("dp"),
    "seq_len": _in_name("seq(?:-?len)?"),
    "zero_stage": _in_name("zero|z"),
}
_GAS = _in_name("gas")
_GPUS = re.compile(r"(?:^|[^a-z0-9])(\d{1,6})[-_]?gpus?(?![a-z0-9])|"
                   r"(?:^|[^a-z0-9])gpus?[-_=]?(\d{1,6})(?![a-z0-9])", re.IGNORECASE)  # fmt: skip
_BILLIONS = re.compile(r"(?:^|[^a-z0-9])(\d{1,4}(?:\.\d{1,3})?)([MBT])(?![a-z0-9])")


def from_name(name: str) -> dict[str, Any]:
    """What a name such as 61B-megatron-mbs-2-pp16-dp-1-gas-512-200977.out says."""
    facts: dict[str, Any] = {}
    for field, pattern in _NAME_PATTERNS.items():
        if match := pattern.search(name):
            facts[field] = int(match[1])
    if match := _GPUS.search(name):
        facts["gpus"] = int(match[1] or match[2])
    gas = _GAS.search(name)
    if gas and "global_batch" not in facts and {"micro_batch", "dp"} <= set(facts):
        facts["global_batch"] = facts["micro_batch"] * facts["dp"] * int(gas[1])
    if match := _BILLIONS.search(name):
        facts["params"] = float(match[1]) * {"M": 1e6, "B": 1e9, "T": 1e12}[match[2]]
    return facts
