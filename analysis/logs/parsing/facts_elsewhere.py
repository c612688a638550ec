"""Facts that a log leaves out: from run.json or a model's configuration beside it, a sidecar TOML,
flags, the file's name.
"""

import json
import math
import os
import re
import tomllib
from pathlib import Path
from typing import Any

from analysis.logs.facts import FACTS, SETTINGS
from analysis.logs.model import settle_trained
from analysis.logs.parsing.json_values import mapping
from analysis.logs.parsing.run_json import stated
from analysis.logs.parsing.setting_names import ENCODERS, read_settings, state
from analysis.logs.record import Record, Refusal
from base.bounds import misfit
from parallel.config.layout import AXES, EXPERT_AXES, MODEL_AXES, SELDOM

# The format of a log -> the files beside it that say what model it trained.
_CONFIGURATIONS = {
    "HF Trainer": ("config.json",),
    "nanotron": ("model_config.json", "config.yaml"),
    "NeMo": ("hparams.yaml",),
}
_DATA_PARALLEL = ("HF Trainer", "DeepSpeed", "nanoGPT", "nanochat")
_ENTRY = re.compile(r"""^\s{0,40}(\w{2,60}): {0,3}["']?([\w.-]{1,60})""", re.MULTILINE)


def complete_from_elsewhere(record: Record, path: Path, flags: dict[str, Any]) -> None:
    """Fills what the log left out. First come run.json and the configuration beside it, a sidecar
    TOML, flags and the file's name, then what follows from the facts together.

    The configuration is the one that the log's own tool saves (`_CONFIGURATIONS`). The sidecar of
    `name.out` is `name.out.toml` or `name.toml`; its keys are Record's fields and GPTConfig's.

    Raises:
        Refusal: a sidecar or run.json that is damaged, or a key that is not known.
    """
    if record.submission:
        from analysis.logs.parsing import mlperf_tree  # slow to load, seldom needed
    for name in SETTINGS:
        if getattr(record, name) is not None:
            record.origin.setdefault(name, "log")
    if os.path.isfile(path):
        run_json = path.parent / "run.json"
        if os.path.isfile(run_json):
            facts = stated(_parsed(run_json, json.loads))
            valid = (k for k, fact in SETTINGS.items() if not misfit(facts.get(k), fact.allowed))
            state(record, {name: facts[name] for name in valid}, "run.json")
        for name in _CONFIGURATIONS.get(record.format, ()):
            if os.path.isfile(path.parent / name):
                parse = json.loads if name.endswith(".json") else _entries
                settings = _parsed(path.parent / name, parse)
                encoders = [words for key, words in ENCODERS.items() if settings.get(key)]
                record.uncounted += [words for words in encoders if words not in record.uncounted]
                settings |= mapping(settings.get("text_config"))
                texts = {key: [str(value)] for key, value in settings.items()}
                state(record, read_settings(record, texts), "config")
        if record.submission:
            mlperf_tree.read_place(record, path)
        for sidecar in (path.with_name(path.name + ".toml"), path.with_suffix(".toml")):
            if os.path.isfile(sidecar):  # a name may be too long for a suffix
                state(record, _known(_parsed(sidecar, tomllib.loads), str(sidecar)), "sidecar")
                break
    state(record, _known(flags, "flags"), "flag")
    if record.submission:
        mlperf_tree.read_names(record)
    state(record, from_name(path.name), "from name")
    settle_trained(record)
    _multiply_out(record)


def _multiply_out(record: Record) -> None:
    """Fills gpus or dp by gpus = tp x pp x dp x cp, where one of the two is open; dp may follow
    from the batch.

    Trainers that are data-parallel unless they say otherwise leave tp and pp out.
    """
    rank_batch = (record.micro_batch or 0) * (record.n_micro or 0)
    if record.dp is None and record.gpus is None and rank_batch and record.global_batch:
        if record.global_batch % rank_batch == 0:
            record.dp = record.global_batch // rank_batch
            record.origin["dp"] = record.origin.get("global_batch", "log")
    whole = MODEL_AXES if record.format in _DATA_PARALLEL else SELDOM
    ranks = math.prod(getattr(record, axis) or (1 if axis in whole else 0) for axis in MODEL_AXES)
    if record.gpus is None and ranks and record.dp:
        record.gpus = ranks * record.dp
        record.origin["gpus"] = record.origin.get("dp", "log")
    elif record.dp is None and record.gpus and ranks and record.gpus % ranks == 0:
        dp = record.gpus // ranks
        if rank_batch and record.global_batch and record.global_batch != dp * rank_batch:
            batch = f"{rank_batch} sequences a rank, but the global batch is {record.global_batch}"
            record.doubt("dp", f"{record.gpus} GPUs would be dp {dp} of {batch}: dp is unknown")
        else:
            record.dp = dp
            record.origin["dp"] = record.origin.get("gpus", "log")


def _entries(text: str) -> dict[str, str]:
    """Returns the values of a YAML file that has one `name: value` a line; the last of a name
    counts."""
    return dict(_ENTRY.findall(text))


def _parsed(path: Path, parse: Any) -> dict[str, Any]:
    """Returns the table of names and values that a file holds. parse: makes it of the file's
    text."""
    try:
        content = parse(path.read_text())
    except (OSError, ValueError) as error:
        raise Refusal(str(path), f"cannot be read: {error}") from error
    if not isinstance(content, dict):
        raise Refusal(str(path), "cannot be read: it holds no table of names and values")
    return content


def _known(facts: dict[str, Any], source: str) -> dict[str, Any]:
    """Returns the facts as they are, or refuses a name that is no fact's and a value that no such
    fact can have. source: where they were given, for the message."""
    if unknown := set(facts) - set(FACTS):
        names = ", ".join(FACTS)
        raise Refusal(source, f"unknown key {', '.join(sorted(unknown))}; there are: {names}")
    if problem := misfit(facts, {name: fact.allowed for name, fact in FACTS.items()}):
        raise Refusal(source, problem)
    return facts


_IN_NAME = {
    name: re.compile(
        rf"(?:^|[^a-z0-9])(?:{words})[-_=]?(\d{{1,9}})(?![a-z0-9]|\.\d)", re.IGNORECASE
    )
    for name, words in {
        "micro_batch": "mbs|lbs|micro-?bs",
        "global_batch": "gbs|global[-_]?batch[-_]?size",
        "n_micro": "gas",
        **{axis: axis for axis in (*AXES, *EXPERT_AXES)},
        "seq_len": "seq(?:-?len)?",
        "zero_stage": "zero|z",
    }.items()
}
_GPUS = re.compile(
    r"(?:^|[^a-z0-9])(?:(\d{1,6})[-_]?gpus?|gpus?[-_=]?(\d{1,6}))(?![a-z0-9])", re.IGNORECASE
)
_BILLIONS = re.compile(r"(?:^|[^a-z0-9])(\d{1,4}(?:\.\d{1,3})?)([MBT])(?![a-z0-9])")


def from_name(name: str) -> dict[str, Any]:
    """Returns the facts in a file's name such as
    61B-megatron-mbs-2-pp16-dp-1-gas-512-200977.out."""
    matches = {field: pattern.search(name) for field, pattern in _IN_NAME.items()}
    facts: dict[str, Any] = {field: int(match[1]) for field, match in matches.items() if match}
    if match := _GPUS.search(name):
        facts["gpus"] = int(match[1] or match[2])
    if match := _BILLIONS.search(name):
        facts["params"] = float(match[1]) * {"M": 1e6, "B": 1e9, "T": 1e12}[match[2]]
    return facts
