"""Paths in, records out, with the facts that a log left out filled in and marked as such.

What a log does not say may come, in this order, from the run folder's run.json, from a sidecar
(`train.out.toml` beside `train.out`, keys as in `FACTS`), from flags, or, last and marked
`from name`, from a file name such as `61B-megatron-mbs-2-pp16-dp-1-gas-512-200977.out`.
"""

import argparse
import re
import tomllib
from pathlib import Path
from typing import Any

from analysis.readers import read_all
from analysis.records import Record
from models.config import GPTConfig
from models.errors import UsageError

# What a sidecar or a flag may state, and the type it has.
FACTS = {
    **dict.fromkeys(("gpus", "tp", "pp", "vpp", "dp", "micro_batch", "global_batch"), int),
    "grad_accum": int,
    "seq_len": int,
    **dict.fromkeys(("n_layer", "hidden", "n_head", "vocab_size", "max_seq_len"), int),
    "ffn_hidden": int,
    "params": float,
    **dict.fromkeys(("engine", "precision", "recompute", "gpu_type", "commit"), str),
}
SIZES = tuple(GPTConfig.__dataclass_fields__)

# `61B-megatron-mbs-2-pp16-dp-1-gas-512-200977.out`: size, mbs, pp, dp, gas; each may be missing.
_NAME = (
    ("params", re.compile(r"(?:^|[-_])(\d+(?:\.\d+)?)[Bb](?=[-_.])"), lambda t: float(t) * 1e9),
    *(
        (key, re.compile(rf"(?:^|[-_]){short}-?(\d+)(?=[-_.]|$)"), int)
        for key, short in (
            ("micro_batch", "mbs"),
            ("tp", "tp"),
            ("pp", "pp"),
            ("dp", "dp"),
            ("grad_accum", "gas"),
            ("global_batch", "gbs"),
        )
    ),
)


def add_fact_flags(parser: argparse.ArgumentParser) -> None:
    """A flag for each fact that a log may leave out."""
    group = parser.add_argument_group("facts that the logs leave out (what a log says stays)")
    for name, kind in FACTS.items():
        flag = "--" + name.replace("_", "-")
        group.add_argument(flag, type=kind, dest=f"fact_{name}", metavar=kind.__name__.upper())


def from_name(name: str) -> dict[str, Any]:
    """What a file's name says, as the Jean Zay scripts named their logs; {} when nothing."""
    found = {}
    for key, pattern, kind in _NAME:
        if match := pattern.search(name):
            found[key] = kind(match[1])
    return found


def read_sidecar(path: Path) -> dict[str, Any]:
    """The facts in a sidecar TOML, or {} where there is none.

    Raises:
        UsageError: it is not TOML, or states something that is no fact or of another type.
    """
    try:
        stated = tomllib.loads(path.read_text())
    except FileNotFoundError:
        return {}
    except (OSError, tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise UsageError(f"{path}: {error}") from error
    for name, value in stated.items():
        kind = FACTS.get(name)
        if kind is None:
            raise UsageError(f"{path}: unknown {name!r}; known: {', '.join(FACTS)}")
        if kind is float and type(value) is int:
            stated[name] = float(value)
        elif type(value) is not kind:
            raise UsageError(f"{path}: {name} must be a {kind.__name__}, not {value!r}")
    return stated


def fill(record: Record, facts: dict[str, Any], origin: str) -> None:
    """Put what `facts` say where the record is silent; a contradiction is noted, the log stays."""
    for name, value in facts.items():
        if value is None or name == "grad_accum":
            continue
        known = record.model.get(name) if name in SIZES else getattr(record, name)
        if known is None:
            if name in SIZES:
                record.model[name] = value
            else:
                setattr(record, name, value)
            record.origin[name] = origin
        elif known != value and origin != "from name":  # a name's size is a rounded one
            record.notes.append(f"{origin} states {name} {value}, the log {known}: the log stays")
    _multiply_out(record, facts.get("grad_accum"), origin)


def _multiply_out(record: Record, grad_accum: int | None, origin: str) -> None:
    """gpus = tp x pp x dp and global_batch = micro_batch x dp x grad_accum, where one is open.

    Context and expert parallel sizes multiply too, but a log that has them states them.
    """
    sizes = (record.tp, record.pp, record.dp, record.extra.get("cp") or 1)
    if record.gpus is None and all(sizes):
        record.gpus = sizes[0] * sizes[1] * sizes[2] * sizes[3]
        record.origin["gpus"] = origin
    if record.dp is None and record.gpus and record.tp and record.pp:
        dp, rest = divmod(record.gpus, record.tp * record.pp * sizes[3])
        if not rest:
            record.dp = dp
            record.origin["dp"] = origin
    if record.global_batch is None and grad_accum and record.micro_batch and record.dp:
        record.global_batch = record.micro_batch * record.dp * grad_accum
        record.origin["global_batch"] = origin


def load(
    paths: list[Path], arguments: argparse.Namespace | None = None
) -> tuple[list[Record], list[str]]:
    """Every run at or below the paths, and one line for each thing that was refused.

    Raises:
        UsageError: nothing at all could be read, or a sidecar is wrong.
    """
    flags = {
        name: getattr(arguments, f"fact_{name}")
        for name in FACTS
        if getattr(arguments, f"fact_{name}", None) is not None
    }
    records, refusals = read_all(paths)
    for record in records:
        path = Path(record.source)
        fill(record, read_sidecar(path.with_name(path.name + ".toml")), "sidecar")
        fill(record, flags, "flag")
        if record.format != "run folder":  # run.json says it all, and a name never does
            fill(record, from_name(path.name), "from name")
    refused = [str(refusal) for refusal in refusals]
    if not records:
        raise UsageError("; ".join(refused) or "nothing to read")
    return records, refused


def name_of(record: Record) -> str:
    """What a table calls the run: its own name, or the file's."""
    return record.extra.get("run") or Path(record.source).name
