"""Checkpoints on disk: names, manifests, what is good, what to load, what to keep. Torch-free.

<save>/step-00000010/        one checkpoint: there whole, or not at all
    rank-00000.safetensors   the pieces of parameters and AdamW moments that this rank wrote, fp32
    manifest.json            format, step, layout, settings, commit, data position, loss scaler, and
                             every file's size, CRC-32 and pieces; its own CRC-32 is in it
<save>/weights-00000010/     a weights-only export (models/weights.py)
<save>/latest                the newest good checkpoint's name, written last

A checkpoint is written into a hidden sibling (`.step-00000010.partial`), synced and renamed, so a
folder that has its name was whole; what is damaged later is found by size and checksum before
anything is loaded. CRC-32 finds accidents, not forgeries; SHA-256 would be slower than many disks.
Nothing is ever unpickled: the tensors are safetensors, the rest is JSON.
"""

import contextlib
import json
import re
import shutil
import stat
import zlib
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from models.errors import UsageError
from models.files import parse_json
from models.storage import sync, write_synced
from parallel.artifacts import COMPLETE, holds_attempt, read_run, read_status
from parallel.manifest import check, check_header
from parallel.work import WORK

FORMAT = "gpt-checkpoint-1"
MANIFEST, LATEST = "manifest.json", "latest"
_NAME = re.compile(r"step-(\d{8,})")
# Settings that may change between a run's attempts without making it another run. How long it
# trains may, too (parallel/work.py), where its newest checkpoint is not beyond.
CIRCUMSTANCES = frozenset(
    "save save_interval save_grace_s async_save load load_previous resume keep_last keep_every"
    " export_weights log_interval eval_interval eval_steps threads timeout_s hang_s breakdown"
    " profile_mode profile_steps profile_ranks enforce_global_batch_size".split()
)


class Damaged(UsageError):
    """A checkpoint that is not what was written; the message names the file."""


def name_of(step: int) -> str:
    return f"step-{step:08d}"


def step_of(folder: Path) -> int | None:
    """The step that a checkpoint's folder name states, None for other names."""
    match = _NAME.fullmatch(folder.name)
    return int(match[1]) if match else None


def steps_in(save: Path) -> list[int]:
    """Steps of the checkpoints in a folder, ascending."""
    if not save.is_dir():
        return []
    return sorted(step for path in save.iterdir() if (step := step_of(path)) is not None)


# --- the manifest --------------------------------------------------------------------------------


def _own_crc32(manifest: dict[str, Any]) -> int:
    body = {key: value for key, value in manifest.items() if key != "crc32"}
    return zlib.crc32(json.dumps(body, sort_keys=True).encode())


def write_manifest(folder: Path, manifest: dict[str, Any]) -> None:
    """Write and sync folder/manifest.json."""
    manifest = json.loads(json.dumps(manifest))  # as it will be read: lists, string keys
    manifest["crc32"] = _own_crc32(manifest)
    write_synced(folder / MANIFEST, json.dumps(manifest) + "\n")


def read_manifest(folder: Path) -> dict[str, Any]:
    """The manifest of a checkpoint.

    Raises:
        Damaged: it is missing, torn or altered, or of another format, or describes no checkpoint
            that could be loaded.
    """
    path = folder / MANIFEST
    try:
        _see_that_it_is_here(path)
        manifest = parse_json(path.read_text())
    except OSError as error:
        raise Damaged(f"{path}: {error.strerror}") from error
    except Damaged:
        raise
    except ValueError as error:
        raise Damaged(f"{path} is damaged: {error}") from error
    if not isinstance(manifest, dict) or manifest.get("format") != FORMAT:
        raise Damaged(f"{path} describes no checkpoint of ours ({FORMAT})")
    if manifest.get("crc32") != _own_crc32(manifest):
        raise Damaged(f"{path} is damaged: its bytes have changed since they were written")
    try:
        check(manifest, step_of(folder))
    except ValueError as error:
        raise Damaged(f"{path} describes no checkpoint: {error}") from error
    return manifest


def _see_that_it_is_here(path: Path) -> None:
    """Raises: Damaged: it is a link, or no file. What is elsewhere is no part of a checkpoint."""
    if not stat.S_ISREG(path.lstat().st_mode):
        raise Damaged(f"{path} is damaged: it is a link, or no file")


def damage(folder: Path, files: Iterable[dict[str, Any]], tick: Callable = lambda: None) -> str:
    """What is wrong with the first bad file of a manifest's `files`, or "" when all are good."""
    for entry in files:
        path = folder / entry["path"]
        try:
            _see_that_it_is_here(path)
            size, crc32 = path.stat().st_size, 0
            if size != entry["bytes"]:
                return f"{path} is damaged: it has {size} bytes, {entry['bytes']} were written"
            with path.open("rb") as file:
                while block := file.read(1 << 23):
                    crc32 = zlib.crc32(block, crc32)
                    tick()
        except OSError as error:
            return f"{path}: {error.strerror}"
        except Damaged as error:
            return str(error)
        if crc32 != entry["crc32"]:
            return f"{path} is damaged: its bytes have changed since they were written"
        try:
            if "pieces" in entry:
                check_header(path, entry["pieces"])
        except ValueError as error:
            return f"{path} is damaged: {error}"
    return ""


def verify(folder: Path) -> dict[str, Any]:
    """The manifest of a checkpoint whose files are all as they were written.

    Raises:
        Damaged: they are not; it names the first bad file.
    """
    manifest = read_manifest(folder)
    if problem := damage(folder, manifest["files"]):
        raise Damaged(problem)
    return manifest


# --- writing -------------------------------------------------------------------------------------


def begin(save: Path, step: int) -> Path:
    """An empty hidden folder to write the checkpoint of `step` into."""
    aside = save / f".{name_of(step)}.partial"
    shutil.rmtree(aside, ignore_errors=True)
    aside.mkdir(parents=True)
    return aside


def publish(aside: Path, save: Path, step: int) -> Path:
    """Give a written, synced folder its name, and then write `latest`."""
    folder = save / name_of(step)
    sync(aside)
    old = folder.with_name(f".{folder.name}.old")
    shutil.rmtree(old, ignore_errors=True)
    if folder.exists():  # saved again after an earlier one was gone on from
        folder.rename(old)
    aside.rename(folder)
    sync(save)
    shutil.rmtree(old, ignore_errors=True)
    write_synced(save / LATEST, folder.name + "\n")
    return folder


def _remove(folder: Path) -> None:
    """Delete a checkpoint; its name goes first, so that half of it is never taken for all."""
    if folder.exists():
        doomed = folder.with_name(f".{folder.name}.old")
        shutil.rmtree(doomed, ignore_errors=True)
        folder.rename(doomed)
        shutil.rmtree(doomed)


def tidy(save: Path) -> None:
    """Give what a killed writer had written whole its name; remove what it left half-written or
    half-deleted."""
    for whole in sorted(save.glob(".step-*.partial")):
        with contextlib.suppress(Damaged, OSError):
            step = read_manifest(whole)["step"]  # the files were on disk before it was written
            if whole.name == f".{name_of(step)}.partial":
                publish(whole, save, step)
    for pattern in (".step-*", ".weights-*", f".{LATEST}.*", f".{MANIFEST}.*"):
        for left in save.glob(pattern):
            shutil.rmtree(left) if left.is_dir() else left.unlink()


def retain(save: Path, step: int, keep_last: int, keep_every: int) -> list[int]:
    """Once `step` is saved: delete all but the newest `keep_last` checkpoints (0: keep all) and
    every step that `keep_every` divides (0: none); the deleted steps.

    A later one than `step` was damaged, for training went on from before it: it is none of the
    newest, and left as it is until training gets there.
    """
    steps = [s for s in steps_in(save) if s <= step]
    if keep_last == 0:
        return []
    doomed = [s for s in steps[:-keep_last] if not (keep_every and s % keep_every == 0)]
    for step in doomed:
        _remove(save / name_of(step))
    return doomed


# --- choosing what to load -----------------------------------------------------------------------


def candidates(path: Path) -> list[Path]:
    """The checkpoints that `--load path` may mean, the preferred one first.

    A checkpoint stands for itself and, after it, for the earlier ones beside it; a folder of
    checkpoints, or a run's folder, for its newest. A folder that `latest` names is tried even where
    it is gone, so that the loss is noticed. A weights-only folder stands for itself.

    Raises:
        UsageError: nothing there.
    """
    path = Path(path)
    if (path / "run.json").is_file():
        path = save_folder(path, read_run(path).facts.get("spec") or {})
    own = step_of(path)
    if own is None and (path / "config.json").exists():
        return [path]
    save = path.parent if own is not None else path
    steps = {s for s in steps_in(save) if own is None or s <= own}
    if own is not None:
        steps.add(own)
    elif (save / LATEST).is_file():
        said = step_of(Path((save / LATEST).read_text(errors="replace").strip()))
        steps |= {said} if said is not None else set()
    if not steps or not save.is_dir() or (own is not None and not path.exists()):
        raise UsageError(f"no checkpoint at {path}")
    return [save / name_of(s) for s in sorted(steps, reverse=True)]


def any_at(path: Path) -> bool:
    """Whether `--load path` finds anything there."""
    with contextlib.suppress(UsageError):
        return bool(candidates(path))
    return False


def save_folder(run_folder: Path, settings: dict[str, Any]) -> Path:
    """Where a run with these settings keeps its checkpoints."""
    return Path(settings["save"]) if settings.get("save") else run_folder / "checkpoints"


def why_not_resumed(run_folder: Path, settings: dict[str, Any]) -> str | None:
    """None where the folder holds an attempt of this very run, with a checkpoint to go on from:
    one that was stopped, or was complete after fewer steps. Else why this run starts anew, in words
    that end `moved_line`; "" where there is nothing to go on from.
    """
    if not holds_attempt(run_folder):
        return ""
    try:
        facts = parse_json((run_folder / "run.json").read_text())
        before = dict(facts["spec"])
    except OSError as error:
        return f"the earlier one's run.json cannot be read ({error.strerror})"
    except (ValueError, TypeError, KeyError) as error:
        return f"the earlier one's run.json is damaged ({type(error).__name__}: {error})"
    differ = [k for k in settings.keys() | before.keys() if settings.get(k) != before.get(k)]
    told = [f"{k} changed from {before.get(k)} to {settings.get(k)}" for k in sorted(differ)]
    steps, longer = settings["steps"], settings["steps"] > before.get("steps", 0)
    # A marker that is missing was to be written last.
    complete = read_status(run_folder).get("state") == COMPLETE
    if complete and (run_folder / "RUN_COMPLETE.txt").exists() and not longer:
        return " and ".join(["the earlier one is complete", *told])
    if set(differ) - CIRCUMSTANCES - set(WORK):
        return " and ".join(told)
    load, began = settings.get("load"), before.get("load")
    if load is not None and not (began and Path(load).absolute() == Path(began).absolute()):
        return f"the earlier one began at {began or 'step 0'} and this one is to load {load}"
    if not settings.get("resume"):
        return "--no-resume was given"
    if not settings.get("save_interval"):
        return "without save_interval no run goes on from a checkpoint"
    save = save_folder(run_folder, settings)
    if not (there := steps_in(save)):
        return f"the earlier one left no checkpoint in {save}"
    if there[-1] > steps:
        newest = f"the earlier one's newest checkpoint, of step {there[-1]},"
        return f"{newest} is beyond the steps asked for, {steps}"
    return None


def moved_line(aside: Path, why_anew: str, load: Path | str | None) -> str:
    """What is said where an attempt was moved to `aside`: from where the run starts now, and why
    (`why_not_resumed`)."""
    line = f"moved the earlier attempt to {aside}; this run starts from {load or 'step 0'}"
    return f"{line}, because {why_anew}" if why_anew else line
