"""The schema of a checkpoint's manifest, and the tensors of its files. Torch-free.

A checksum that fits shows that a manifest is as it was written, not that a checkpoint can be loaded
from it. All that loading, verifying and exporting take from it is checked here, once.
"""

import math
from collections.abc import Mapping
from itertools import combinations, pairwise
from pathlib import Path
from typing import Any

from base.bounds import Bounds, Count, Whole, Words, misfit
from base.errors import UsageError
from base.storage import stored_tensors
from models.config import GPTConfig, parameter_shapes
from parallel.config.engine_abilities import ENGINES
from parallel.config.layout import Layout
from parallel.config.settings import PRECISIONS

KINDS = ("param", "exp_avg", "exp_avg_sq")  # the tensors of a piece
IMPORTED = "imported"  # the engine of a checkpoint from elsewhere, whose settings are not known
_COUNT, _BOX = Count(0, math.inf), [Count(0, math.inf)]
_PIECE = {"name": str, "shape": _BOX, "offset": _BOX, "part": _BOX, "start": _COUNT, "stop": _COUNT}
_FILE = {"path": str, "bytes": _COUNT, "crc32": Count(0, 2**32 - 1), "pieces": [Whole(_PIECE)]}
_MANIFEST = Whole(
    {
        **dict.fromkeys(("step", "adam_step", "world_size"), _COUNT),
        **dict.fromkeys(("run", "time_utc"), str),
        **dict.fromkeys(("spec", "layout", "model"), dict),
        "engine": Words((*ENGINES, IMPORTED)),
        "implementation": Words(("gpt", "hf")),
        "precision": Words(PRECISIONS),
        "data": Whole({"next_step": _COUNT}),
        "scaler": {},
        "files": [Whole(_FILE)],
    }
)
_SCALER = Whole({"scale": Bounds(0, math.inf, above=True, below=True), "good_steps": _COUNT})


def rank_file(rank: int) -> str:
    """The name of the file that a rank writes."""
    return f"rank-{rank:05d}.safetensors"


def check(manifest: Mapping[str, Any], step: int | None) -> None:
    """See that a manifest describes one complete checkpoint, of `step` where that is known.

    Raises:
        ValueError: it does not; in words.
    """
    problem = misfit(manifest, _MANIFEST)
    if manifest.get("precision") == "fp16":
        problem = problem or misfit(manifest["scaler"], _SCALER, "scaler")
    elif not problem and manifest["scaler"]:
        problem = "scaler is not empty, without fp16"
    if problem:
        raise ValueError(problem)
    try:
        model, _ = GPTConfig(**manifest["model"]), Layout(**manifest["layout"])
    except (TypeError, UsageError) as error:
        raise ValueError(f"model or layout: {error}") from error
    stated, files = manifest["step"], manifest["files"]
    _expect("step", stated, stated if step is None else step)
    _expect("next_step of data", manifest["data"]["next_step"], stated)
    _expect("adam_step", manifest["adam_step"], min(manifest["adam_step"], stated))
    _expect("the number of files", len(files), max(1, manifest["world_size"]))
    pieces: dict[str, list[dict]] = {}
    for rank, entry in enumerate(files):
        _expect("it names a file elsewhere: path", entry["path"], rank_file(rank))
        if len({piece["name"] for piece in entry["pieces"]}) < len(entry["pieces"]):
            raise ValueError(f"{entry['path']} holds two pieces of one parameter")
        for piece in entry["pieces"]:
            _check_piece(piece)
            pieces.setdefault(piece["name"], []).append(piece)
    shapes = {name: tuple(its[0]["shape"]) for name, its in pieces.items()}
    if manifest["implementation"] == "gpt":
        # Counted first: a forged number of layers would make as many names.
        _expect("the number of parameters", len(shapes), model.n_parameters)
        for name, shape in parameter_shapes(model).items():
            _expect(name, shapes.get(name), shape)
    _expect("the size of all parameters", sum(map(math.prod, shapes.values())), model.n_params)
    for name, its in pieces.items():
        _check_cover(name, shapes[name], its)


def _expect(name: str, value: Any, wanted: object) -> None:
    if value != wanted:
        raise ValueError(f"{name} is {value!r:.60}, not {wanted!r:.60}")


def _check_piece(piece: dict[str, Any]) -> None:
    """See that a piece is a run of numbers in a part that lies in its parameter."""
    shape, offset, part = piece["shape"], piece["offset"], piece["part"]
    inside = 0 < len(shape) == len(offset) == len(part) and all(
        p and o + p <= n for o, p, n in zip(offset, part, shape, strict=True)
    )
    if not inside or not piece["start"] < piece["stop"] <= math.prod(part):
        raise ValueError(f"a piece is {piece!r:.100}, no run of a part of a parameter")


def _check_cover(name: str, shape: tuple[int, ...], pieces: list[dict[str, Any]]) -> None:
    """See that the pieces of a parameter hold each number of it once."""
    runs: dict[tuple[tuple, tuple], list[tuple[int, int]]] = {}
    for piece in pieces:
        _expect(f"a shape of {name}", tuple(piece["shape"]), shape)
        box = (tuple(piece["offset"]), tuple(piece["part"]))
        runs.setdefault(box, []).append((piece["start"], piece["stop"]))
    for (_, part), its in runs.items():
        bounds = [(0, 0), *sorted(its), (math.prod(part), 0)]
        adjacent = all(stop == start for (_, stop), (start, _) in pairwise(bounds))
        if not adjacent:
            raise ValueError(f"the pieces of {name} do not hold each number of it once")
    # Parts that do not overlap, and have as many numbers as the parameter, are all of it.
    apart = all(
        any(a + n <= b or b + m <= a for a, n, b, m in zip(*box, *other, strict=True))
        for box, other in combinations(runs, 2)
    )
    n = sum(math.prod(part) for _, part in runs)
    if not apart or n != math.prod(shape):
        raise ValueError(f"the parts of {name} do not hold all of it once")


def check_tensors(path: Path, pieces: list[dict[str, Any]]) -> None:
    """See that a rank's file holds these pieces, in fp32. Earlier versions wrote random/ states
    beside them.

    Raises:
        UsageError: it cannot be read, or is no safetensors file.
        ValueError: it holds something else; in words.
    """
    wanted = {f"{kind}/{p['name']}": (p["stop"] - p["start"],) for p in pieces for kind in KINDS}
    for name, stored in stored_tensors(path).items():
        if name in wanted:
            _expect(name, stored, ("F32", wanted.pop(name)))
        elif not name.startswith("random/"):
            raise ValueError(f"it holds {name!r:.60}")
    if wanted:
        raise ValueError(f"it holds no {next(iter(wanted))}")
