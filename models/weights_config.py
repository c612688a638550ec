"""config.json of a weights-only folder (weights.py): its model, and all else. Torch-free."""

from pathlib import Path
from typing import Any, NamedTuple

from base.errors import UsageError
from base.files import read_json, read_json_if_whole
from base.storage import own_crc32
from models.config import GPTConfig
from models.hf_config import config_of

CONFIG, FORMAT = "config.json", "gpt-weights-1"


def holds_weights(path: Path) -> bool:
    """Whether training can start from a folder: ours, or a Hugging Face directory."""
    described = read_json_if_whole(path / CONFIG)
    return described.get("format") == FORMAT or "model_type" in described


def model_of(path: Path) -> GPTConfig:
    """The model of a folder that `holds_weights`, or of its config.json.

    Raises:
        UsageError: missing, altered, or a model that our GPT cannot be.
    """
    path = path / CONFIG if path.is_dir() else path
    described = read_json(path)
    if described.get("format") != FORMAT and "model_type" in described:
        return config_of(described, path)[0]
    return read_description(path.parent).model


class Described(NamedTuple):
    """The model of a weights-only folder, and all of its config.json."""

    model: GPTConfig
    content: dict[str, Any]


def read_description(folder: Path) -> Described:
    """What config.json says; earlier versions wrote it without a checksum.

    Raises:
        UsageError: missing, altered, or of no such folder.
    """
    described, path = read_json(folder / CONFIG), folder / CONFIG
    if described.get("format") != FORMAT:
        hint = "; parallel.train --load takes it as it is" if "model_type" in described else ""
        raise UsageError(f"{path} describes no weights-only folder of ours{hint}")
    if described.get("crc32", own_crc32(described)) != own_crc32(described):
        raise UsageError(f"{path} is damaged: its bytes have changed since they were written")
    try:
        return Described(GPTConfig(**described["model"]), described)
    except (KeyError, TypeError, UsageError) as error:
        raise UsageError(f"{path} is damaged: {error!r}") from error
