"""Sizes of a model that a log calls by its name: the weakest evidence, and said so."""

import re

from analysis.logs.parsing.setting_names import MODEL, state
from analysis.logs.record import Record
from models.config import PRESETS

# `meta-llama/Llama-3.1-8B-Instruct` -> llama-3-8b; Llama 3.1's and 3.3's blocks are Llama 3's.
_AROUND = re.compile(r".*/|meta[-_ ]|[-_ ](?:hf|base|chat|instruct|pretrain\w*)\b")
_MINOR = re.compile(r"(llama[-_ ]?3)\.[13]")
# As Hugging Face and others call them.
_GPT2 = {"gpt2": "gpt2-124m", "gpt2-medium": "gpt2-355m", "gpt2-large": "gpt2-774m"}
_GPT2 |= {"gpt2-xl": "gpt2-1.5b", "gpt3-175b": "175b"}
_STATED = re.compile(r"(?<![\d.])(\d{1,4}(?:\.\d{1,3})?)([mbt])(?![a-z0-9])", re.IGNORECASE)
_UNIT = {"m": 1e6, "b": 1e9, "t": 1e12}


def _letters(name: str) -> str:
    return re.sub(r"[-_ ]", "", name)


_DENSE = [name for name, config in PRESETS.items() if not config.parts]
_PRESETS = {_letters(name): name for name in _DENSE} | {_letters(k): v for k, v in _GPT2.items()}


def read_name(record: Record, name: str) -> None:
    """Fill what the log does not say of its model from the preset that it names; of another model
    the number of parameters that stands in its name.

    Nothing is filled where the log states another size and no number of parameters that would show
    whether the rest is the preset's.
    """
    preset = _PRESETS.get(_letters(_MINOR.sub(r"\1", _AROUND.sub("", name.lower()))))
    if preset is None:
        if record.params is None and (size := _STATED.search(name)):
            state(record, {"params": float(size[1]) * _UNIT[size[2].lower()]}, "from name")
            record.notes.append(f"from name: params, for the log names {name}")
        return
    sizes = {
        key: value for key in MODEL if (value := getattr(PRESETS[preset], key)) or value is False
    }
    others = [key for key, value in sizes.items() if record.model.get(key, value) != value]
    if others and record.params is None:
        return
    if absent := [key for key in sizes if key not in record.model]:
        record.notes.append(f"from name: {', '.join(absent)} of {preset}, for the log names {name}")
        state(record, {key: sizes[key] for key in absent}, "from name")
