"""Folders of checkpoints: names, manifests, damage, what to load and what to keep. Torch-free.

<save> is checkpoints/ in a run folder.

<save>/step-00000010/        one checkpoint: there complete, or not at all
    rank-00000.safetensors   the pieces of parameters and AdamW moments that this rank wrote, fp32
    manifest.json            format, step, layout, settings, commit, data position, loss scaler, and
                             every file's size, CRC-32 and pieces; its own CRC-32 is in it

A checkpoint is written into a hidden folder beside it (`.step-00000010.partial`), synced and
renamed, so a folder of that name was complete. Later damage is found by size and checksum before
training goes on. Nothing is ever unpickled: the tensors are safetensors, the rest is JSON.
"""

import json
import re
import shutil
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NamedTuple

from base.errors import UsageError
from base.files import read_json
from base.storage import file_crc32, own_crc32, write_synced
from models.config import GPTConfig

FORMAT = "gpt-checkpoint-1"
MANIFEST = "manifest.json"
IMPORTED = "imported"  # the engine of a checkpoint from elsewhere, whose settings are not known
SAVES = "checkpoints"  # where a run folder has its checkpoints
_NAME = re.compile(r"step-(\d{8,})")
LATEST = ("latest_checkpointed_iteration.txt", "latest", "latest_universal")
# What others' checkpoints have -> the module of doors/ that reads them.
_FORMS = {".metadata": "torch_dist", "*mp_rank_00_model_states.pt": "deepspeed"}
# What a writer of ours leaves where it is killed; other names are somebody else's.
_LEFT = re.compile(r"\.step-\d{8,}\.(partial|old)")


class Damaged(UsageError):
    """A checkpoint that is not what was written; the message names the file."""


def name_of(step: int) -> str:
    """Returns the name of the folder with the checkpoint of a step."""
    return f"step-{step:08d}"


def step_of(folder: Path) -> int | None:
    """Returns the step that a checkpoint's folder name states, None for other names."""
    match = _NAME.fullmatch(folder.name)
    return int(match[1]) if match else None


def steps_in(save: Path) -> list[int]:
    """Returns the steps of the checkpoints in a folder, ascending. An empty folder counts as no
    checkpoint."""
    if not save.is_dir():
        return []
    paths = (path for path in save.iterdir() if step_of(path) is not None and not is_empty(path))
    return sorted(map(step_of, paths))


def is_empty(folder: Path) -> bool:
    """Returns whether a path is a folder without content."""
    return folder.is_dir() and not any(folder.iterdir())


# --- the manifest --------------------------------------------------------------------------------


def write_manifest(folder: Path, manifest: dict[str, Any]) -> None:
    """Writes a manifest with its own CRC-32 into a folder, and syncs it."""
    manifest = manifest | {"crc32": own_crc32(manifest)}
    write_synced(folder / MANIFEST, json.dumps(manifest) + "\n")


def read_manifest(folder: Path) -> dict[str, Any]:
    """Returns the manifest of a checkpoint. Its checksum shows that our writer wrote it, so what it
    says is trusted, but for its version, its model and its step.

    Raises:
        Damaged: it is missing, altered or of another version.
    """
    path = folder / MANIFEST
    try:
        manifest = read_json(path)
    except UsageError as error:
        raise Damaged(str(error)) from error
    if manifest.get("format") != FORMAT:
        raise Damaged(f"{path} describes no checkpoint of ours ({FORMAT})")
    if manifest.get("crc32") != own_crc32(manifest):
        raise Damaged(f"{path} is damaged: its bytes have changed since they were written")
    if (step := step_of(folder)) not in (None, manifest["step"]):
        raise Damaged(f"{path} is of step {manifest['step']}, its folder of step {step}")
    try:
        GPTConfig(**manifest["model"])
    except (TypeError, UsageError) as error:
        raise Damaged(f"{path} is of a model that this version does not know: {error}") from error
    return manifest


def damage(folder: Path, files: Iterable[dict[str, Any]], tick: Callable = lambda: None) -> str:
    """Returns what is wrong with the first bad file of a manifest's `files`, or "" when all have
    the size and the checksum that were written."""
    for entry in files:
        path = folder / entry["path"]
        try:
            if (size := path.stat().st_size) != entry["bytes"]:
                return f"{path} is damaged: it has {size} bytes, {entry['bytes']} were written"
            if file_crc32(path, tick) != entry["crc32"]:
                return f"{path} is damaged: its bytes have changed since they were written"
        except OSError as error:
            return f"{path}: {error.strerror}"
    return ""


def verify(folder: Path) -> dict[str, Any]:
    """Returns the manifest of a checkpoint whose files are all as they were written.

    Raises:
        Damaged: they are not; it names the first bad file.
    """
    manifest = read_manifest(folder)
    if problem := damage(folder, manifest["files"]):
        raise Damaged(problem)
    return manifest


# --- writing -------------------------------------------------------------------------------------


def aside_of(save: Path, step: int) -> Path:
    """Returns the hidden folder in which the checkpoint of `step` is written at first."""
    return save / f".{name_of(step)}.partial"


def tidy(save: Path) -> None:
    """Removes the hidden folders that a killed writer left."""
    for path in save.glob(".*"):
        if _LEFT.fullmatch(path.name) and path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)


def retain(save: Path, keep_last: int, keep_every: int) -> list[int]:
    """Keeps the newest `keep_last` checkpoints (0: all) and every step that `keep_every` divides
    (0: none), deletes the others, and returns their steps."""
    if keep_last == 0:
        return []
    older = steps_in(save)[:-keep_last]
    deleted = [step for step in older if not (keep_every and step % keep_every == 0)]
    for old in deleted:
        _remove(save / name_of(old))
    return deleted


def _remove(folder: Path) -> None:
    """Deletes a checkpoint. It loses its name first, so that an incomplete one never has it."""
    if folder.exists():
        aside = folder.with_name(f".{folder.name}.old")
        shutil.rmtree(aside, ignore_errors=True)
        folder.rename(aside)
        shutil.rmtree(aside)


# --- choosing what to load -----------------------------------------------------------------------


def candidates(path: Path) -> list[Path]:
    """Returns the checkpoints at a path, the newest first: a checkpoint or a folder of weights
    itself, or those of a run or in a folder. `--load path` means the first.

    Raises:
        UsageError: nothing there, or another program's.
    """
    path = Path(path)
    if (path / "run.json").is_file():
        path = path / SAVES
    if (path / "config.json").exists() or (step_of(path) is not None and path.exists()):
        return [path]
    if not (steps := steps_in(path)):
        if newest := others_checkpoint(path):
            command = f"python -m parallel.checkpoint import {path} OUT --model MODEL"
            checkpoint = f"{newest.folder} is another program's checkpoint ({newest.form})"
            raise UsageError(f"{checkpoint}; this reads and checks it: {command}")
        raise UsageError(f"no checkpoint at {path}")
    return [path / name_of(step) for step in reversed(steps)]


class OthersCheckpoint(NamedTuple):
    """A checkpoint of another program, and its form: the module of doors/ that reads it."""

    folder: Path
    form: str


def others_checkpoint(path: Path) -> OthersCheckpoint | None:
    """Returns the newest checkpoint of another program at a path; None where there is none."""
    if pointer := next((path / name for name in LATEST if (path / name).is_file()), None):
        name = pointer.read_text(errors="replace").strip()
        path /= f"iter_{name:0>7}" if pointer.name == LATEST[0] else Path(name).name
    forms = (form for pattern, form in _FORMS.items() if any(path.glob(pattern)))
    return next((OthersCheckpoint(path, form) for form in forms), None)
