"""The newest weights of a run, and the tokenizer of the data that it trained on. Torch-free.

Weights-only folders are read as they are. A checkpoint is first exported to one, by the command
`python -m parallel.checkpoint export`: its form belongs to parallel/, which models/ never imports.
"""

import contextlib
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from base.errors import UsageError
from base.files import ROOT, read_json, read_json_if_whole
from base.storage import own_crc32
from models.config import GPTConfig

CONFIG, FORMAT = "config.json", "gpt-weights-1"  # of a weights-only folder
TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "vocab.json",
    "merges.txt",
    "special_tokens_map.json",
    "added_tokens.json",
)


def find_weights(path: Path) -> Path:
    """The newest weights at a path: a weights-only folder or a checkpoint.

    The path may be one of these, or a run, or the folder of its checkpoints. Where both are of one
    step, the weights-only folder is taken.

    Raises:
        UsageError: there are none.
    """
    if not path.is_dir():
        raise UsageError(f"{path}: no such folder")
    if is_weights(path) or is_checkpoint(path):
        return path
    tops = [path]
    if save := (read_json_if_whole(path / "run.json").get("spec") or {}).get("save"):
        tops.append(Path(save))
    paths = [p for top in tops for depth in ("*", "*/*") for p in top.glob(depth)]
    weights = [p for p in paths if is_checkpoint(p) or (p.name[0] != "." and is_weights(p))]
    if not weights:
        raise UsageError(f"{path}: no weights-only folder and no checkpoint here")
    return max(weights, key=lambda p: (step_in_name(p) or -1, is_weights(p)))


def is_checkpoint(path: Path) -> bool:
    return re.fullmatch(r"step-\d{8,}", path.name) is not None


def is_weights(path: Path) -> bool:
    return read_json_if_whole(path / CONFIG).get("format") == FORMAT


def read_description(folder: Path) -> tuple[GPTConfig, dict[str, Any]]:
    """The model and all else of a weights-only folder's config.json; earlier versions wrote it
    without a checksum.

    Raises:
        UsageError: missing, altered, or of no such folder.
    """
    described = read_json(folder / CONFIG)
    if described.get("format") != FORMAT:
        hint = "; import it first: python -m models.hf import" if "model_type" in described else ""
        raise UsageError(f"{folder / CONFIG} describes no weights-only folder of ours{hint}")
    if described.get("crc32", own_crc32(described)) != own_crc32(described):
        raise UsageError(
            f"{folder / CONFIG} is damaged: its bytes have changed since they were written"
        )
    try:
        return GPTConfig(**described["model"]), described
    except (KeyError, TypeError, UsageError) as error:
        raise UsageError(f"{folder / CONFIG} is damaged: {error!r}") from error


def step_in_name(path: Path) -> int | None:
    """The number that a folder's name ends with (weights-00000010)."""
    digits = re.search(r"\d*$", path.name)[0]
    return int(digits) if digits else None


@contextlib.contextmanager
def as_weights(source: Path, dtype: str | None, near: Path | None = None) -> Iterator[Path]:
    """What `find_weights` found as a weights-only folder. A checkpoint's is temporary, in `near`.

    dtype: of the weights of a checkpoint; None means fp32, in which it stores them.

    Raises:
        UsageError: the checkpoint is damaged or of another model class, or the disk is full.
    """
    if not is_checkpoint(source):
        yield source
        return
    try:
        temporary = tempfile.TemporaryDirectory(dir=near, prefix=".exporting-")
    except OSError as error:
        raise UsageError(
            f"cannot write {near or 'a temporary folder'}: {error.strerror}"
        ) from error
    with temporary as folder:
        out = Path(folder).absolute() / "weights"
        command = [sys.executable, "-m", "parallel.checkpoint", "export"]
        command += [str(source.absolute()), str(out), "--dtype", dtype or "fp32"]
        done = subprocess.run(
            command, cwd=ROOT, stdin=subprocess.DEVNULL, capture_output=True, text=True
        )
        if done.returncode:
            lines = done.stderr.strip().splitlines() or [f"exit status {done.returncode}"]
            raise UsageError(lines[-1].removeprefix("parallel.checkpoint: "))
        yield out


def tokenizer_files(path: Path) -> list[Path]:
    """The files of the tokenizer at a path (a folder or a tokenizer.json), [] where there is none.

    A folder's vocabulary alone (vocab.json without merges) is taken too: they go along unread.
    """
    if path.is_file():
        return [path]
    return [path / name for name in TOKENIZER_FILES if (path / name).is_file()]


def tokenizer_of(path: Path) -> str | None:
    """The tokenizer of the data that the run at, or around, `path` trained on: "byte" or a path.

    None where there is no run, its data are gone, or the meta.json beside them names none that is
    still there or, moved with them, beside them.
    """
    path = path.absolute()
    run = next((p for p in (path, *path.parents[:2]) if (p / "run.json").is_file()), None)
    data = (read_json_if_whole(run / "run.json").get("data") or {}).get("path") if run else None
    if not data:
        return None
    name = read_json_if_whole(Path(data) / "meta.json").get("tokenizer")
    if not isinstance(name, str) or name == "byte":
        return name
    beside = [Path(data) / Path(name).name, Path(data)]
    sources = [Path(data)] if name == "bpe" else [Path(name), *beside]
    return next((str(source) for source in sources if tokenizer_files(source)), None)
