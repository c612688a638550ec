"""Fills an engine from a checkpoint, of any layout and engine, or from weights alone."""

import math
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from base.errors import Answer, UsageError
from models.config import GPTConfig
from models.hf_weights import open_hugging_face
from parallel.checkpoint import folders
from parallel.checkpoint.attempts import check_model
from parallel.checkpoint.contents import Piece, slices_to_save
from parallel.checkpoint.folders import IMPORTED, Damaged
from parallel.checkpoint.rank_files import Reader
from parallel.config.changes import changes
from parallel.config.run_spec import TRAINING, RunSpec, settings_of
from parallel.ranks import Ranks, attempt

# The settings that change what is computed; another number of steps changes learning rates alone.
_COMPUTES = {"tf32", "fp8_recipe", "global_batch", "data", "end_of_text", *TRAINING} - {"steps"}


class Loaded(NamedTuple):
    """What was loaded, and the step to resume from.

    bytes: of all its files. changed: what this run computes otherwise than the one that saved it,
    in words.
    """

    step: int
    path: Path
    bytes: int
    changed: str = ""


def load(engine: Any, spec: RunSpec, ranks: Ranks, path: Path | None) -> Loaded | None:
    """Fills the engine from rank 0's `path`, and returns what was loaded; None where that is None.

    Raises:
        UsageError: no checkpoint there; it is damaged, another model's, or beyond the run's steps.
    """
    chosen = attempt(folders.candidates, path) if path else Answer(None)
    candidates, problem = ranks.gather(chosen)[0]
    if problem:
        raise UsageError(problem)
    if candidates is None:
        return None
    load_one = _load_checkpoint if folders.step_of(candidates[0]) is not None else _load_weights
    return load_one(engine, spec, ranks, candidates[0])


def _load_checkpoint(engine: Any, spec: RunSpec, ranks: Ranks, folder: Path) -> Loaded:
    """Fills the engine from a checkpoint, all of whose bytes the ranks check first, and restores
    its counts."""
    # Rank 0 alone reads the manifest, which grows with ranks times parameters.
    reader, problem = ranks.on_first(attempt, lambda: Reader(folder, folders.read_manifest(folder)))
    _refuse(folder, problem)
    manifest = reader.manifest
    check_model(spec, folder, GPTConfig(**manifest["model"]), manifest["implementation"])
    if manifest["step"] > spec.steps:
        raise UsageError(f"{folder} is beyond the run's {spec.steps} steps")
    # Each rank sums up some of the files, and hears of any rank's problem.
    files = reader.files[ranks.rank :: ranks.world]
    for problem in ranks.on_all(folders.damage, folder, files, ranks.tick):
        _refuse(folder, problem)
    _refuse(folder, _fill(engine, spec, ranks, folder, partial(reader.fill, tick=ranks.tick)))
    engine.restore(manifest["adam_step"], manifest["scaler"])
    size = sum(file["bytes"] for file in reader.files)
    changed = _changed(spec, settings_of(manifest))
    if manifest["engine"] == IMPORTED:
        changed = f"{manifest['run']}, whose settings and data are not known"
    return Loaded(manifest["step"], folder, size, changed)


def _refuse(folder: Path, problem: str) -> None:
    """Raises Damaged where there is a problem, and says what to delete."""
    if problem:
        raise Damaged(f"{problem}; delete {folder} to take the one before")


def _fill(
    engine: Any, spec: RunSpec, ranks: Ranks, folder: Path, fill: Callable[[list[Piece]], None]
) -> str:
    """Has each rank `fill` its pieces; returns the problem of the first that could not, or ""."""

    def fill_own() -> int:
        """Fills this rank's pieces; returns how many elements of them it would save."""
        pieces = engine.state().pieces
        fill(pieces)
        return sum(map(len, slices_to_save(pieces)))

    filled = ranks.on_all(attempt, fill_own)
    if problem := next((problem for _, problem in filled if problem), ""):
        return problem
    _check_all_filled(spec, folder, [elements for elements, _ in filled])
    return ""


def _check_all_filled(spec: RunSpec, folder: Path, elements: list[int]) -> None:
    """Refuses a load that leaves parameters as they were: nothing else gives them a value, for they
    were not drawn. elements: how many of the model's parameters each rank has filled and would
    save."""
    if sum(elements) != spec.model.n_params:
        raise UsageError(
            f"{folder} would fill {sum(elements)} of the model's {spec.model.n_params} parameters"
            " on these ranks: load it in the layout that saved it"
        )


def _changed(spec: RunSpec, before: dict[str, Any]) -> str:
    """Returns, in words, what changes what is computed from here on: settings, and learning rates
    of a run of another number of steps."""
    changed = [
        f"{name} {now} not {was}"
        for name, was, now in changes(before, spec.settings())
        if name in _COMPUTES
    ]
    if spec.lr_schedule != "constant" and before.get("steps", spec.steps) != spec.steps:
        changed.append(f"learning rates of a run of {spec.steps} steps not {before['steps']}")
    if spec.precision == "fp8" and spec.fp8_recipe == "delayed":
        changed.append("its fp8 scales begin anew, for a checkpoint holds none")
    return ", ".join(changed)


def _load_weights(engine: Any, spec: RunSpec, ranks: Ranks, folder: Path) -> Loaded:
    """Starts a new training from weights alone: no moments, step 0. Rank 0 checks the files, and
    each rank reads only the boxes that it holds."""
    weights, problem = ranks.on_first(attempt, open_hugging_face, folder)
    if problem:
        raise UsageError(problem)
    check_model(spec, folder, weights.config, "gpt")

    def fill(pieces: list[Piece]) -> None:
        """Fills this rank's weights from the rows of the files that hold them."""
        for piece in pieces:
            first, *box = (slice(o, o + n) for o, n in zip(piece.offset, piece.part, strict=True))
            width = math.prod(piece.part[1:])
            first_row, end_row = piece.start // width, -(-(piece.start + len(piece)) // width)
            rows = slice(first.start + first_row, first.start + end_row)
            values = weights.tensor(piece.name, (rows, *box)).reshape(-1)
            piece.tensors["param"].copy_(values[piece.start - first_row * width :][: len(piece)])
            ranks.tick()

    if problem := _fill(engine, spec, ranks, folder, fill):
        raise UsageError(problem)
    engine.restore(0, {})
    return Loaded(0, folder, weights.bytes)
