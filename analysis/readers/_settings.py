"""What a run was asked to do, from wherever it is said: argument dumps, sidecars, flags, names.

A fact keeps the first origin that knows it, in the order of `records.ORIGINS`; a weaker origin
that says something else leaves a note, never a change.
"""

import math
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from analysis.readers._lines import plain
from analysis.readers._log import Log
from analysis.readers._typed import real, whole
from analysis.records import Record, Refusal
from models.files import parse_json, parse_toml

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


# Record's fields and model sizes -> the names that argument dumps give them, surest first.
_ALIASES: dict[str, tuple[str, ...]] = {
    "gpus": ("world_size", "dist_world_size", "n_gpus_total", "nproc_total"),
    "tp": (
        "tensor_model_parallel_size",
        "model_parallel_size",
        "tensor_parallel_degree",
        "intra_layer_model_parallel_size",
    ),
    "pp": ("pipeline_model_parallel_size", "pipe_parallel_size", "pipeline_parallel_degree"),
    "vpp": ("virtual_pipeline_model_parallel_size",),
    "dp": ("data_parallel_size", "data_parallel_replicate_degree"),
    "micro_batch": (
        "micro_batch_size",
        "train_micro_batch_size_per_gpu",
        "per_device_train_batch_size",
        "local_batch_size",
        "batch_size",
    ),
    "global_batch": ("global_batch_size", "train_batch_size"),
    "seq_len": ("seq_length", "seq_len", "encoder_seq_length", "sequence_length", "max_seq_len"),
    "planned_steps": ("train_iters", "max_steps", "train_steps", "num_iterations"),
    "zero_stage": ("zero_optimization_stage", "zero_stage"),
    "n_layer": ("num_layers", "n_layer", "num_hidden_layers", "n_layers"),
    "hidden": ("hidden_size", "n_embd", "hidden_dim"),
    "n_head": ("num_attention_heads", "n_head", "n_heads"),
    "ffn_hidden": ("ffn_hidden_size", "intermediate_size"),
    "vocab_size": ("padded_vocab_size", "vocab_size"),
    "max_seq_len": ("max_position_embeddings", "block_size"),
}
_WORDS: dict[str, tuple[str, ...]] = {
    "dtype": ("params_dtype", "torch_dtype"),
    "bf16": ("bf16",),
    "fp16": ("fp16",),
    "fp8": ("fp8",),
    "granularity": ("recompute_granularity", "activations_checkpoint_granularity"),
    "checkpoint": (
        "checkpoint_activations",
        "recompute_activations",
        "activations_checkpoint_method",
        "gradient_checkpointing",
    ),
    "distributed_optimizer": ("use_distributed_optimizer",),
}
_NAMES = {alias for table in (_ALIASES, _WORDS) for aliases in table.values() for alias in aliases}


def _any_of(words: set[str]) -> str:
    """A regular expression for one of `words`, by their common beginnings: it fails soonest."""
    tails: dict[str, set[str]] = {}
    for word in sorted(words - {""}):
        tails.setdefault(word[0], set()).add(word[1:])
    ways = ["[-_]" + _any_of(t) if c == "_" else c + _any_of(t) for c, t in tails.items()]
    body = ways[0] if len(ways) == 1 else f"(?:{'|'.join(ways)})" if ways else ""
    return f"(?:{body})?" if body and "" in words else body


# `name ..... 4`, `name: 4`, `"name": 4`, `args[name] = 4`, `--name 4`; a name is found whole.
_SETTING_TEXT = (
    r"\b(?<![./])(?<![a-z]-)("
    + _any_of(_NAMES)
    + r""")['"\]]{0,2}[ \t]{0,3}(?:\.{2,80}|[:=]|[ \t])[ \t]{0,16}['"]?"""
    r"(\d{1,15}(?![\d.]\d|\w)|None|null|[A-Za-z][\w.]{0,30})"
).encode()
_SETTING = re.compile(_SETTING_TEXT)


# Bytes by what they may be: 1 stands before a name, 2 begins one.
_KINDS = bytes(
    2 if chr(i) in {name[0] for name in _NAMES} else re.match(rb"[^\w./]", bytes([i])) is not None
    for i in range(256)
)
_BEGINNINGS = [
    int.from_bytes(start, "little")
    for start in {name.replace("_", dash)[:3].encode() for name in _NAMES for dash in "_-"}
]


def _settings_in(text: bytes) -> Iterator[re.Match[bytes]]:
    """What _SETTING finds: numpy picks the few places where a name may begin."""
    padded = b"\n" + text + b"\0\0"
    data, kind = np.frombuffer(padded, np.uint8), np.frombuffer(padded.translate(_KINDS), np.uint8)
    starts = np.flatnonzero((kind[:-3] == 1) & (kind[1:-2] == 2))
    three = (
        data[starts + 1] | data[starts + 2].astype(int) << 8 | data[starts + 3].astype(int) << 16
    )
    end = 0
    for at in starts[np.isin(three, _BEGINNINGS)].tolist():
        if at >= end and (match := _SETTING.match(text, at)):
            end = match.end()
            yield match


_USING_WORLD = re.compile(rb"using world size: {0,3}(\d{1,7})")
_USING_SIZES = re.compile(
    rb"(?<![\w-])(data|tensor-model|pipeline-model|model)-parallel[- ]size: {0,3}(\d{1,7})"
)
_RANK_PARAMS = re.compile(
    rb"number of parameters on (?:\(tensor, pipeline\) )?model parallel rank"
    rb" {1,3}(\([\d, ]{1,20}\)|\d{1,6}): {0,3}(\d{1,15})"
)
# Megatron counts FLOPs and parameters with the padded size.
_PADDED_VOCAB = re.compile(rb"padded vocab \(size: (\d{1,9})\) with (\d{1,9}) dummy tokens")
_TOTAL_PARAMS = re.compile(rb"TOTAL_PARAMS=(\d{1,15})")
_HEADER = 1 << 19


def read_header(record: Record, header: bytes) -> None:
    """Fill `record` from the argument dumps in `header`, the text before training.

    The last value before training wins; where the same name was given another before, it is noted.
    """
    last: dict[str, bytes] = {}
    seen: dict[str, list[bytes]] = {}
    for match in _settings_in(header):
        if (
            match[1].endswith(b"world_size")
            and b"config.py:" in header[match.start() - 80 : match.start()]
        ):
            continue  # DeepSpeed's own world_size is the data-parallel one
        if b"aio_config" in header[match.start() - 80 : match.start()]:
            continue  # its block_size is of bytes on disk
        name = match[1].decode().replace("-", "_")
        last[name] = match[2]
        values = seen.setdefault(name, [])
        if match[2] not in values and match[2] not in (b"None", b"null"):
            values.append(match[2])
    facts: dict[str, Any] = {}
    for field, aliases in _ALIASES.items():
        for alias in aliases:
            if last.get(alias, b"").isdigit():
                facts[field] = int(last[alias])
                given = [v for v in seen[alias] if v.isdigit()]
                known = record.model.get(field) or getattr(record, field, None)
                if len(given) > 1 and field != "gpus" and known is None:
                    said = ", ".join(v.decode() for v in given)
                    record.notes.append(
                        f"contradiction: {alias} is given as {said};"
                        f" {facts[field]}, the last before training, is used"
                    )
                break
    if padded := _PADDED_VOCAB.findall(header):
        facts["vocab_size"] = sum(map(int, padded[-1]))
    facts.update(_world(header))
    if facts.get("pp") == 0:  # GPT-NeoX's way to say that there is no pipeline
        facts["pp"] = 1
    facts.update(_words(last, facts))
    if params := _params(header, facts):
        facts["params"] = params
    state(record, {k: v for k, v in facts.items() if v is not None}, "log")


def _world(header: bytes) -> dict[str, int]:
    """Megatron's `using world size: 64, data-parallel-size: 1, tensor-model-parallel size: 4`."""
    names = {b"data": "dp", b"tensor-model": "tp", b"pipeline-model": "pp", b"model": "tp"}
    facts = {}
    at = header.rfind(b"using world size:")
    if at >= 0 and (match := _USING_WORLD.match(header, at)):
        facts["gpus"] = int(match[1])
        line = re.split(rb"[\r\n]", header[at : at + 400])[0]
        for kind, value in _USING_SIZES.findall(line):
            facts[names[kind]] = int(value)
    return facts


def _words(last: dict[str, bytes], facts: dict[str, Any]) -> dict[str, Any]:
    """Precision, recomputation and the distributed optimizer."""

    def said(field: str) -> str | None:
        return next((last[a].decode().lower() for a in _WORDS[field] if a in last), None)

    found: dict[str, Any] = {}
    no = (None, "none", "null", "false")
    if said("fp8") not in no:
        found["precision"] = "fp8"
    elif said("bf16") == "true" or said("dtype") in ("torch.bfloat16", "bfloat16"):
        found["precision"] = "bf16"
    elif said("fp16") == "true" or said("dtype") in ("torch.float16", "float16", "torch.half"):
        found["precision"] = "fp16"
    elif said("dtype") in ("torch.float32", "torch.float", "float32"):
        found["precision"] = "fp32"
    if said("granularity") not in no:
        found["recompute"] = said("granularity")
    elif said("checkpoint") not in no:
        found["recompute"] = "full"
    elif said("granularity") or said("checkpoint"):
        found["recompute"] = "none"
    if said("distributed_optimizer") == "true":
        found["zero_stage"] = max(facts.get("zero_stage", 0), 1)
    return found


def _params(header: bytes, facts: dict[str, Any]) -> int | None:
    """The sum over the model-parallel ranks that each print their share, when all of them did."""
    shares = {match[1]: int(match[2]) for match in _RANK_PARAMS.finditer(header)}
    ranks = facts.get("tp", 1) * facts.get("pp", 1)
    if shares and len(shares) >= ranks:
        return sum(shares.values())
    total = _TOTAL_PARAMS.search(header)
    return int(total[1]) if total else None


def header_of(log: Log, first: int | None) -> bytes:
    """The text before the first record, without colours; of a long one, its first and its last
    _HEADER bytes."""
    end = log.size if first is None else first
    if end <= 2 * _HEADER:
        return plain(log.slice(0, end))
    return plain(log.slice(0, _HEADER) + b"\n" + log.slice(end - _HEADER, end))


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
    if os.path.isfile(path):
        beside = path.parent / "run.json"
        if os.path.isfile(beside):
            from analysis.readers.run_folder import stated

            parts = {k: v for k, v in _parsed(beside, parse_json).items() if isinstance(v, dict)}
            facts = {k: v for k, v in stated(parts).items() if k in SETTINGS and _fits(k, v)}
            state(record, facts, "run.json")
        for sidecar in (path.with_name(path.name + ".toml"), path.with_suffix(".toml")):
            if os.path.isfile(sidecar):  # a name may be too long for a suffix
                state(record, _known(_parsed(sidecar, parse_toml), str(sidecar)), "sidecar")
                break
    state(record, _known(flags, "flags"), "flag")
    state(record, from_name(path.name), "from name")


def _parsed(path: Path, parse: Any) -> dict[str, Any]:
    try:
        content = parse(path.read_text())
    except (OSError, ValueError) as error:
        raise Refusal(str(path), f"cannot be read: {error}") from error
    if not isinstance(content, dict):
        raise Refusal(str(path), "cannot be read: it holds no table of names and values")
    return content


def _known(facts: dict[str, Any], source: str) -> dict[str, Any]:
    if unknown := set(facts) - set(SETTINGS) - set(MODEL_SIZES):
        raise Refusal(source, f"unknown key {', '.join(sorted(unknown))}")
    for name, value in facts.items():
        if not _fits(name, value):
            raise Refusal(source, f"{name} = {value!r} is not what {name} can be")
    return facts


def _fits(name: str, value: Any) -> bool:
    """Whether a setting or size can be this."""
    if name == "params":
        return 0 < real(value) < math.inf
    if name in INTEGERS or name in MODEL_SIZES:
        return (whole(value) or 0) >= (0 if name == "zero_stage" else 1)
    return isinstance(value, str)


def _in_name(words: str) -> re.Pattern[str]:
    return re.compile(
        rf"(?:^|[^a-z0-9])(?:{words})[-_=]?(\d{{1,9}})(?![a-z0-9]|\.\d)", re.IGNORECASE
    )


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
