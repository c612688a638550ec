"""Begins an attempt of a run: anew, or from the checkpoints of the attempt before it.
Torch-free."""

import contextlib
import os
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from base.errors import UsageError
from models.config import GPTConfig
from models.hf_config import model_of
from parallel.checkpoint import folders
from parallel.config.changes import changes, matters
from parallel.config.data_files import DEFAULT_FOLDER, describe
from parallel.config.run_spec import RunSpec, settings_of
from parallel.record.ends import COMPLETE
from parallel.record.reader import holds_attempt, read_facts, read_run, read_status
from parallel.record.writer import RunFolder


def why_anew(run_folder: Path, settings: dict[str, Any]) -> str | None:
    """Returns why a run with these settings starts anew in its folder, in words that end
    `moved_line`.

    None: it resumes, since the folder holds an attempt of this very run with a checkpoint, and that
    attempt was stopped, or was complete after fewer steps. "": there was no attempt.
    """
    if not holds_attempt(run_folder):
        return ""
    try:
        earlier = settings_of(read_facts(run_folder))
    except UsageError as error:
        return f"the earlier one cannot be read ({error})"
    changed = changes(earlier, settings)
    reasons = [f"{name} changed from {was} to {now}" for name, was, now in changed]
    steps = settings["steps"]
    # The marker is written last: without it the run was stopped just before.
    state = read_status(run_folder).get("state")
    complete = state == COMPLETE and (run_folder / "RUN_COMPLETE.txt").exists()
    if complete and steps <= earlier.get("steps", 0):
        return " and ".join(["the earlier one is complete", *reasons])
    if any(map(matters, changed)):
        return " and ".join(reasons)
    load, loaded = settings.get("load"), earlier.get("load")
    if load is not None and not (loaded and os.path.abspath(load) == os.path.abspath(loaded)):
        return f"the earlier one began at {loaded or 'step 0'} and this one is to load {load}"
    if not settings.get("resume"):
        return "--no-resume was given"
    if not settings.get("save_interval"):
        return "without save_interval no run goes on from a checkpoint"
    save = run_folder / folders.SAVES
    if not (saved_steps := folders.steps_in(save)):
        return f"the earlier one left no checkpoint in {save}"
    if saved_steps[-1] > steps:
        newest = f"the earlier one's newest checkpoint, of step {saved_steps[-1]},"
        return f"{newest} is beyond the steps asked for, {steps}"
    return None


def moved_line(aside: Path, reason: str, load: Path | str | None) -> str:
    """Returns the line for the log on an attempt that was moved to `aside`: where the run starts
    now, and why."""
    line = f"moved the earlier attempt to {aside}; this run starts from {load or 'step 0'}"
    return f"{line}, because {reason}" if reason else line


def begin(spec: RunSpec, facts: dict[str, Any], folder: RunFolder) -> Path | None:
    """Begins the run folder, and returns the checkpoint, or folder of checkpoints, to load, if any.

    Raises:
        UsageError: the folder is no run's, or another process writes it; or `spec.load` has no
            checkpoint, one of the last step or later, or is in the folder that is to move.
    """
    reason = why_anew(folder.path, spec.settings())
    if reason is None:
        return _resume(spec, facts, folder)
    load = None if spec.load is None else Path(os.path.abspath(spec.load))
    # Refused before `folder.begin` creates a run folder, or moves the one that is there.
    if load is not None:
        check_first(spec, folders.candidates(load)[0])
        if load.is_relative_to(os.path.abspath(folder.path)):
            raise UsageError(f"{load} is in the folder of the run itself: give another --out")
    if aside := folder.begin(facts):
        folder.note(moved_line(aside, reason, load))
    return load


def _resume(spec: RunSpec, facts: dict[str, Any], folder: RunFolder) -> Path:
    """Begins an attempt that goes on from the attempt before it; returns the folder of its
    checkpoints. `facts` gets the attempt before, and its profiler."""
    earlier_facts = read_facts(folder.path)
    _check_own(spec, earlier_facts, folder.path / folders.SAVES)
    reason = "status.json is missing or damaged"
    if read_status(folder.path):
        reason = read_run(folder.path).reason  # a process that is gone, say
    steps = earlier_facts["spec"]["steps"]
    earlier_attempt = {
        "started_utc": earlier_facts.get("started_utc"),
        "reason": reason,
        "steps": steps,
    }
    facts["attempts"] = [*(earlier_facts.get("attempts") or []), earlier_attempt]
    facts["profiler"] = facts["profiler"] or earlier_facts.get("profiler")
    aside = folder.begin(facts, go_on=True)
    if aside is not None:
        folder.note(f"the result after {steps} steps is kept in {aside}")
    if steps != spec.steps:
        line = f"this run goes on to step {spec.steps}; the earlier attempt planned {steps}"
        folder.note(line)
    save = folder.path / folders.SAVES
    for path in sorted(save.iterdir()):
        if folders.step_of(path) is not None and folders.is_empty(path):
            path.rmdir()
            folder.note(f"{path} is empty, and no checkpoint: it is removed")
    return save


def _check_own(spec: RunSpec, before: dict[str, Any], save: Path) -> None:
    """Refuses to go on where the newest checkpoint is of another run than the run.json whose
    content is `before`."""
    newest = folders.candidates(save)[0]
    try:
        manifest = folders.read_manifest(newest)
    except folders.Damaged:
        return  # loading says so
    stated = settings_of(manifest) | {"run": manifest["run"]}
    settings = spec.settings() | {"run": before["run"]}
    if changed := list(filter(matters, changes(stated, settings))):
        words = ", ".join(map(str, changed))
        raise UsageError(f"{newest} is another run's ({words}): take its checkpoints out of {save}")


def input_problems(
    spec: RunSpec, below: Path = Path(), awaited: Sequence[Path] = ()
) -> Iterator[str]:
    """Yields why a run that starts in the folder `below` cannot train on its data, judged by their
    sizes and headers, or cannot load its checkpoint. A checkpoint in one of the folders `awaited`
    of other runs need not be there yet."""
    path = below / spec.data
    if spec.load is not None and not (load := below / spec.load).exists():
        path_of_load = Path(os.path.abspath(load))
        if not any(path_of_load.is_relative_to(os.path.abspath(run)) for run in awaited):
            yield f"no checkpoint at {spec.load}"
    if not path.exists() and not Path(f"{path}.idx").exists():
        flags = "" if spec.data == DEFAULT_FOLDER else f" --input TEXT --out {spec.data}"
        yield f"no token files at {spec.data}: python -m parallel.data{flags} makes them"
        return
    try:
        described = describe(path)
    except UsageError as error:
        yield str(error)
        return
    tokens, ids = described.train.stop - described.train.first, described.vocab_size
    if tokens <= spec.seq_len:
        yield f"{spec.data} has {tokens} tokens, too few for one sequence of {spec.seq_len} + 1"
    elif ids is not None and ids > spec.model.vocab_size:
        yield f"{spec.data} has {ids} token ids, but the model has {spec.model.vocab_size}"


def check_first(spec: RunSpec, first: Path) -> None:
    """Refuses what a run cannot begin with, from its headers alone. first: what is to be loaded; it
    may be of another model, or of the run's last step or a later one."""
    if folders.step_of(first) is None:
        check_model(spec, first, model_of(first), "gpt")
        return
    if folders.step_of(first) >= spec.steps:
        raise UsageError(nothing_to_train(spec, first.name))
    with contextlib.suppress(folders.Damaged):  # then loading says so
        manifest = folders.read_manifest(first)
        check_model(spec, first, GPTConfig(**manifest["model"]), manifest["implementation"])


def check_model(spec: RunSpec, folder: Path, model: GPTConfig, implementation: str) -> None:
    """Refuses a folder that holds another model than the run's, or another form of it."""
    if changed := changes(asdict(model), asdict(spec.model)):
        raise UsageError(f"{folder} holds another model: {', '.join(map(str, changed))}")
    if implementation != spec.implementation:
        raise UsageError(
            f"{folder} holds implementation {implementation}'s own layout,"
            f" not {spec.implementation}'s"
        )


def nothing_to_train(spec: RunSpec, checkpoint: str) -> str:
    """Returns the message on a checkpoint of the run's last step or a later one."""
    return f"{checkpoint} is the state after all of the run's {spec.steps} steps: give more --steps"


def other_schedules(attempts: list[dict[str, Any]], steps: int, first: int) -> str:
    """Returns, in words, which steps from `first` on had the learning rates of a run of another
    number of steps than `steps`; "" where none had.

    attempts: the earlier ones, oldest first: the `steps` of each and, where the next one loaded a
    checkpoint, its step, `kept_to`.
    """
    parts = []
    for number, attempt in enumerate(attempts):
        last = min(later["kept_to"] for later in attempts[number:] if "kept_to" in later)
        planned = attempt.get("steps", steps)
        if last >= first and planned != steps:
            parts.append(
                f"steps {first} to {last} were trained with the learning rates of a run of"
                f" {planned} steps"
            )
        first = max(first, last + 1)
    return f"goes on to step {steps}; {', '.join(parts)}" if parts else ""
