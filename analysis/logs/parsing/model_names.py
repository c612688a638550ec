"""Sizes of a model that a log calls by its name: the weakest evidence, and said so."""

import re
from dataclasses import asdict, is_dataclass
from typing import Any

from analysis.logs.facts import MODEL
from analysis.logs.parsing.setting_names import state
from analysis.logs.record import Record
from models.config import PRESETS

# `meta-llama/Llama-3.1-8B-Instruct` -> llama-3-8b; Llama 3.1's and 3.3's blocks are Llama 3's.
_AROUND = re.compile(r".*/|meta[-_ ]|[-_ ](?:hf|base|chat|instruct|v0\.1|pretrain\w*)\b")
_MINOR = re.compile(r"(llama[-_ ]?3)\.[13]")
# As Hugging Face and others call them.
_OTHERS = {"gpt2": "gpt2-124m", "gpt2-medium": "gpt2-355m", "gpt2-large": "gpt2-774m"}
_OTHERS |= {"gpt2-xl": "gpt2-1.5b", "gpt3-175b": "175b"}
# torchtitan's flavours
_OTHERS |= {"deepseek_v3 16b": "deepseek-v2-lite", "deepseek_v3 671b": "deepseek-v3"}
ACTIVE = re.compile(r"(?<![a-z0-9])(?:\d+x\d|a\d+(?:\.\d+)?b(?![a-z]))", re.IGNORECASE)  # 8x7B, A3B
_STATED = re.compile(r"(?<![\d.])(\d{1,4}(?:\.\d{1,3})?)([mbt])(?![a-z0-9])", re.IGNORECASE)
_UNIT = {"m": 1e6, "b": 1e9, "t": 1e12}


def _letters(name: str) -> str:
    """Returns a name without what publishers put between its words."""
    return re.sub(r"[-_ ]", "", name)


_PRESETS = {_letters(name): name for name in PRESETS} | {_letters(k): v for k, v in _OTHERS.items()}


def read_name(record: Record, name: str) -> None:
    """Fills what the log does not say of its model from the preset that it names. Of another model
    it fills the number of parameters that stands in the name, if one does.

    Nothing is filled where the log states another size and no number of parameters that would show
    whether the rest is the preset's.
    """
    preset = _PRESETS.get(_letters(_MINOR.sub(r"\1", _AROUND.sub("", name.lower()))))
    if preset is None:
        if ACTIVE.search(name):  # its parameters are not those that a token meets
            record.uncounted.append(f"experts of which sizes {name} does not tell")
        elif record.params is None and (size := _STATED.search(name)):
            state(record, {"params": float(size[1]) * _UNIT[size[2].lower()]}, "from name")
            record.note(f"from name: params, for the log names {name}")
        return
    config = PRESETS[preset]
    sizes = {key: value for key in MODEL if (value := getattr(config, key)) or value is False}
    sizes |= {part: _plain(getattr(config, part)) for part in config.parts}
    misfits = [key for key, value in sizes.items() if not _agrees(record.model.get(key), value)]
    if misfits and record.params is None and record.trained is None:
        return
    if absent := [key for key in sizes if key not in record.model]:
        record.note(f"from name: {', '.join(absent)} of {preset}, for the log names {name}")
        state(record, {key: sizes[key] for key in absent}, "from name")


def _plain(part: Any) -> Any:
    """Returns a part of a model as a dict; a number as it is."""
    return asdict(part) if is_dataclass(part) else part


def _agrees(stated: Any, preset: Any) -> bool:
    """Returns whether what a log states, if it does, can be the preset's."""
    if isinstance(stated, dict) and isinstance(preset, dict):
        return all(preset.get(name) == value for name, value in stated.items())
    return stated is None or stated == preset
