"""The schema of a checkpoint's manifest, and the tensors of its files. Torch-free.

A checksum that fits shows that a manifest is as it was written, not that a checkpoint can be loaded
from it. All that loading, verifying and exporting take from it is checked here, once.
"""

import math
from collections.abc import Mapping
from itertools import combinations, pairwise
from pathlib import Path
from typing import Any

from base.errors import UsageError
from base.storage import STATE_BYTES_PER_PARAM, stored_tensors
from models.config import GPTConfig, parameter_shapes
from parallel.config.engine_abilities import ENGINES
from parallel.config.layout import Layout
from parallel.config.settings import PRECISIONS

KINDS = ("param", "exp_avg", "exp_avg_sq")  # the tensors of a piece


def rank_file(rank: int) -> str:
    """The name of the file that a rank writes."""
    return f"rank-{rank:05d}.safetensors"


def check(manifest: Mapping[str, Any], step: int | None) -> None:
    """See that a manifest describes one complete checkpoint, of `step` where that is known.

    Raises:
        ValueError: it does not; in words.
    """
    _check_facts(manifest, step)
    _make(Layout, "layout", manifest.get("layout"))
    model = _make(GPTConfig, "model", manifest.get("model"))
    for name, each in (("n_params", 1), ("state_bytes", STATE_BYTES_PER_PARAM)):
        _expect(name, manifest.get(name), each * model.n_params)
    files = manifest.get("files")
    _require(isinstance(files, list) and files != [], "files", files, "a list of files")
    _expect("world_size", manifest.get("world_size"), len(files))
    pieces: dict[str, list[dict]] = {}
    for rank, entry in enumerate(files):
        for piece in _pieces(entry, rank_file(rank)):
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


def _check_facts(manifest: Mapping[str, Any], step: int | None) -> None:
    """See that all but the model, the layout and the files is what it must be."""
    get = manifest.get
    stated, data, fp16 = get("step"), get("data"), get("precision") == "fp16"
    _require(_is_count(stated) and step in (None, stated), "step", stated, step)
    position = isinstance(data, dict) and data.get("next_step") == stated
    known = {
        "engine": tuple(ENGINES),
        "implementation": ("gpt", "hf"),
        "precision": PRECISIONS,
    }
    for name, good, wanted in (
        ("adam_step", _is_count(get("adam_step"), 0, stated), f"0 to {stated}"),
        ("run", isinstance(get("run"), str), "text"),
        ("time_utc", isinstance(get("time_utc"), str), "text"),
        ("commit", isinstance(get("commit", False), str | None), "text or null"),
        ("spec", isinstance(get("spec"), dict), "settings"),
        *((name, get(name) in words, " or ".join(words)) for name, words in known.items()),
        ("data", position, f"the data's position, with next_step {stated}"),
        ("scaler", _is_scaler(get("scaler"), fp16), "fp16's scale and counts; empty without fp16"),
    ):
        _require(good, name, get(name), wanted)


def _require(good: bool, name: str, value: Any, wanted: object) -> None:
    if not good:
        raise ValueError(f"{name} is {value!r:.60}, not {wanted}")


def _expect(name: str, value: Any, wanted: object) -> None:
    _require(value == wanted, name, value, wanted)


def _is_count(value: Any, least: int = 0, most: float = math.inf) -> bool:
    return type(value) is int and least <= value <= most


def _make(kind: type, name: str, values: Any) -> Any:
    try:
        return kind(**values)
    except (TypeError, UsageError) as error:
        raise ValueError(f"{name}: {error}") from error


def _is_scaler(scaler: Any, fp16: bool) -> bool:
    if not fp16:
        return scaler == {}
    counts = {"good_steps", "hysteresis"}
    return (
        isinstance(scaler, dict)
        and {"scale", "good_steps"} <= scaler.keys() <= {"scale", *counts}
        and type(scaler["scale"]) in (int, float)
        and 0 < scaler["scale"] < math.inf
        and _is_count(scaler["good_steps"])
        and _is_count(scaler.get("hysteresis", 0), -math.inf)
    )


def _pieces(entry: Any, name: str) -> list[dict[str, Any]]:
    """The pieces that a rank's file holds, each well formed."""
    _require(isinstance(entry, dict), name, entry, "described")
    path, pieces = entry.get("path"), entry.get("pieces")
    _require(path == name, "it names a file elsewhere: path", path, name)
    for key, most in (("bytes", math.inf), ("crc32", 2**32 - 1)):
        _require(_is_count(entry.get(key), 0, most), f"{key} of {name}", entry.get(key), "a number")
    _require(isinstance(pieces, list), f"pieces of {name}", pieces, "a list")
    for piece in pieces:
        _require(_is_piece(piece), f"a piece in {name}", piece, "a run of a part of a parameter")
    if len({piece["name"] for piece in pieces}) < len(pieces):
        raise ValueError(f"{name} holds two pieces of one parameter")
    return pieces


def _is_piece(piece: Any) -> bool:
    if not isinstance(piece, dict) or not isinstance(piece.get("name"), str):
        return False
    boxes = [piece.get(key) for key in ("shape", "offset", "part")]
    if not all(isinstance(box, list) and all(map(_is_count, box)) for box in boxes):
        return False
    shape, offset, part = boxes
    return (
        0 < len(shape) == len(offset) == len(part)
        and all(p and o + p <= n for o, p, n in zip(offset, part, shape, strict=True))
        and _is_count(piece.get("start"))
        and _is_count(piece.get("stop"), piece["start"] + 1, math.prod(part))
    )


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
        any(a + n <= b or b + m <= a for a, n, b, m in zip(*one, *other, strict=True))
        for one, other in combinations(runs, 2)
    )
    n = sum(math.prod(part) for _, part in runs)
    if not apart or n != math.prod(shape):
        raise ValueError(f"the parts of {name} do not hold all of it once")


def check_tensors(path: Path, pieces: list[dict[str, Any]]) -> None:
    """See that a rank's file holds these pieces, in fp32, and random states beside them.

    Raises:
        UsageError: it cannot be read, or is no safetensors file.
        ValueError: it holds something else; in words.
    """
    wanted = {f"{kind}/{p['name']}": (p["stop"] - p["start"],) for p in pieces for kind in KINDS}
    for name, stored in stored_tensors(path).items():
        if name in wanted:
            _expect(name, stored, ("F32", wanted.pop(name)))
        elif not name.startswith("random/") or stored[0] != "U8" or len(stored[1]) != 1:
            raise ValueError(f"it holds {name!r:.60}")
    if wanted:
        raise ValueError(f"it holds no {next(iter(wanted))}")
