"""What the manifest of a checkpoint must say, and the headers of its files. Torch-free.

A checksum that fits says that a manifest is as it was written, not that a checkpoint can be loaded
from it. All that loading, verifying and exporting take from it is checked here, once.
"""

import json
import math
from collections.abc import Mapping
from itertools import combinations, pairwise
from pathlib import Path
from typing import Any

from models.config import GPTConfig, parameter_shapes
from models.errors import UsageError
from models.files import parse_json
from models.storage import STATE_BYTES_PER_PARAM
from parallel.layout import Layout

KINDS = ("param", "exp_avg", "exp_avg_sq")  # the tensors of a piece
_LONGEST_HEADER = 100_000_000  # bytes; safetensors' own limit


def rank_file(rank: int) -> str:
    """The name of the file that a rank writes."""
    return f"rank-{rank:05d}.safetensors"


def check(manifest: Mapping[str, Any], step: int | None) -> None:
    """See that a manifest describes one whole checkpoint, of `step` where that is known.

    Raises:
        ValueError: it does not; in words.
    """
    said = manifest.get
    _need(_whole(said("step")) and step in (None, said("step")), _is("step", said("step"), step))
    counted = _whole(said("adam_step"), 0, said("step"))
    _need(counted, _is("adam_step", said("adam_step"), f"0 to {said('step')}"))
    for name in ("run", "engine", "time_utc"):
        _need(isinstance(said(name), str), _is(name, said(name), "text"))
    commit = manifest.get("commit", False)  # None: it was not known
    _need(commit is None or isinstance(commit, str), _is("commit", commit, "text"))
    _need(isinstance(said("spec"), dict), _is("spec", said("spec"), "settings"))
    for name, known in (("implementation", ("gpt", "hf")), ("precision", ("fp32", "bf16", "fp16"))):
        _need(said(name) in known, _is(name, said(name), " or ".join(known)))
    data = said("data")
    words = _is("data", data, f"the data's position, with next_step {said('step')}")
    _need(isinstance(data, dict) and data.get("next_step") == said("step"), words)
    _check_scaler(said("scaler"), said("precision") == "fp16")
    _made(Layout, "layout", said("layout"))
    model = _made(GPTConfig, "model", said("model"))
    for name, n in (("n_params", 1), ("state_bytes", STATE_BYTES_PER_PARAM)):
        _need(said(name) == n * model.n_params, _is(name, said(name), n * model.n_params))
    files = said("files")
    _need(isinstance(files, list) and files != [], _is("files", files, "a list of files"))
    _need(said("world_size") == len(files), _is("world_size", said("world_size"), len(files)))
    pieces: dict[str, list[dict]] = {}
    for rank, entry in enumerate(files):
        for piece in _pieces(entry, rank_file(rank)):
            pieces.setdefault(piece["name"], []).append(piece)
    shapes = {name: tuple(of_it[0]["shape"]) for name, of_it in pieces.items()}
    if said("implementation") == "gpt":
        # Counted first: a forged number of layers would be written out.
        words = f"files are of {len(shapes)} parameters, not {model.n_parameters}"
        _need(len(shapes) == model.n_parameters, words)
        for name, shape in parameter_shapes(model).items():
            _need(shapes.get(name) == shape, _is(name, shapes.get(name), shape))
    held = sum(map(math.prod, shapes.values()))
    _need(held == model.n_params, f"files are of {held} numbers, not {model.n_params}")
    for name, of_it in pieces.items():
        _check_cover(name, shapes[name], of_it)


def _need(good: bool, words: str) -> None:
    if not good:
        raise ValueError(words)


def _is(name: str, value: Any, wanted: Any) -> str:
    return f"{name} is {value!r:.60}, not {wanted}"


def _whole(value: Any, least: int = 0, most: float = math.inf) -> bool:
    return type(value) is int and least <= value <= most


def _made(kind: type, name: str, values: Any) -> Any:
    try:
        return kind(**values)
    except (TypeError, UsageError) as error:
        raise ValueError(f"{name}: {error}") from error


def _check_scaler(scaler: Any, fp16: bool) -> None:
    """fp16's scale and its counts; nothing without fp16."""
    words = _is("scaler", scaler, "a loss scale and its counts" if fp16 else "empty")
    _need(isinstance(scaler, dict) and bool(scaler) == fp16, words)
    if fp16:
        _need(
            scaler.keys() in ({"scale", "good_steps"}, {"scale", "good_steps", "hysteresis"}), words
        )
        _need(type(scaler["scale"]) in (int, float) and 0 < scaler["scale"] < math.inf, words)
        _need(
            _whole(scaler["good_steps"]) and _whole(scaler.get("hysteresis", 0), -math.inf), words
        )


def _pieces(entry: Any, name: str) -> list[dict[str, Any]]:
    """The pieces that a rank's file holds, each well formed."""
    _need(isinstance(entry, dict), _is("a file", entry, "described"))
    _need(
        entry.get("path") == name,
        f"it names a file elsewhere: {entry.get('path')!r:.60}, not {name}",
    )
    for key, most in (("bytes", math.inf), ("crc32", 2**32 - 1)):
        _need(_whole(entry.get(key), 0, most), f"{name}: {_is(key, entry.get(key), 'a number')}")
    pieces = entry.get("pieces")
    _need(isinstance(pieces, list), f"{name}: {_is('pieces', pieces, 'a list')}")
    for piece in pieces:
        words = f"{name}: {_is('a piece', piece, 'a run of a part of a parameter')}"
        _need(isinstance(piece, dict) and isinstance(piece.get("name"), str), words)
        shape, offset, part = (piece.get(key) for key in ("shape", "offset", "part"))
        for numbers in (shape, offset, part):
            _need(isinstance(numbers, list) and all(map(_whole, numbers)), words)
        _need(0 < len(shape) == len(offset) == len(part), words)
        inside = all(p and o + p <= n for o, p, n in zip(offset, part, shape, strict=True))
        _need(inside and _whole(piece.get("start")), words)
        _need(_whole(piece.get("stop"), piece["start"] + 1, math.prod(part)), words)
    names = [piece["name"] for piece in pieces]
    _need(len(names) == len(set(names)), f"{name} holds two pieces of one parameter")
    return pieces


def _check_cover(name: str, shape: tuple[int, ...], pieces: list[dict[str, Any]]) -> None:
    """See that the pieces of a parameter hold each number of it once."""
    runs: dict[tuple[tuple, tuple], list[tuple[int, int]]] = {}
    for piece in pieces:
        _need(tuple(piece["shape"]) == shape, f"{name} has two shapes")
        box = (tuple(piece["offset"]), tuple(piece["part"]))
        runs.setdefault(box, []).append((piece["start"], piece["stop"]))
    for (_, part), held in runs.items():
        bounds = [(0, 0), *sorted(held), (math.prod(part), 0)]
        whole = all(stop == start for (_, stop), (start, _) in pairwise(bounds))
        _need(whole, f"the pieces of {name} do not hold each number of it once")
    # Parts that do not meet, and together are as many numbers as the whole, are the whole.
    apart = all(
        any(a + n <= b or b + m <= a for a, n, b, m in zip(*one, *other, strict=True))
        for one, other in combinations(runs, 2)
    )
    held = sum(math.prod(part) for _, part in runs)
    _need(apart and held == math.prod(shape), f"the parts of {name} do not hold all of it once")


def check_header(path: Path, pieces: list[dict[str, Any]]) -> None:
    """See that a safetensors file holds these pieces, in fp32, and random states beside them.

    Raises:
        OSError: it cannot be read.
        ValueError: it holds something else; in words.
    """
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        room = path.stat().st_size - 8
        _need(length <= min(_LONGEST_HEADER, room), "it is no safetensors file")
        try:
            header = parse_json(file.read(length).decode())
        except ValueError as error:
            raise ValueError("it is no safetensors file") from error
    _need(isinstance(header, dict), "it is no safetensors file")
    wanted = {f"{kind}/{p['name']}": p["stop"] - p["start"] for p in pieces for kind in KINDS}
    at = 0
    for name, told in header.items():
        n = wanted.pop(name, None)
        if n is None:
            _need(name.startswith("random/") and isinstance(told, dict), f"it holds {name!r:.60}")
            ((n,), size, code) = ((told.get("shape") or [None])[:1], 1, "U8")
        else:
            size, code = 4, "F32"
        _need(_whole(n), f"{name} has no shape")
        stated = {"dtype": code, "shape": [n], "data_offsets": [at, at + n * size]}
        _need(told == stated, f"{name} is {json.dumps(told):.80}, not {json.dumps(stated)}")
        at += n * size
    _need(not wanted, f"it holds no {next(iter(wanted), '')}")
    _need(at == room - length, f"it holds {room - length} bytes of numbers, not {at}")
