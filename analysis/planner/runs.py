"""Runs that were read from logs, as `Columns`: their settings, and what the time model predicts."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from analysis.logs.load import load, name_of
from analysis.logs.model import asked, config_of
from analysis.logs.record import Record
from analysis.logs.verdict import timed
from analysis.planner.calibration import Calibration
from base.errors import Answer, UsageError
from parallel.config import memory
from parallel.config.axes import AXES, MODEL_AXES, UNEVEN
from parallel.config.layout import OFFLOAD, RECOMPUTE, Layout
from parallel.config.layout_arrays import Columns, columns

Place = Callable[[Any, Any, Any], dict[str, Any]]


def row_of(record: Record, place: Place) -> Columns:
    """A run's settings as one row; `place`: the columns that the machine sets, by engine, tp and
    GPUs (`Calibration.columns`).

    Raises:
        ValueError: a fact that the model needs is not in the log.
    """
    config, why = config_of(record)
    if config is None:
        raise ValueError(why)
    absent = [k for k in ("gpus", "global_batch", "seq_len", "precision") if not getattr(record, k)]
    if "n_head" not in record.model:
        absent.insert(0, "n_head")
    if absent:
        raise ValueError(asked(absent))
    split = {axis: getattr(record, axis) or 1 for axis in AXES}
    ranks = math.prod(split[axis] for axis in MODEL_AXES)
    dp = split["dp"] = record.dp or max(1, record.gpus // ranks)
    micro, precision = record.micro_batch or 1, record.precision
    engine = (record.engine or "").lower()
    if config.parts and engine in ("megatron-lm", "nemo"):  # what they run is megatron-core's
        engine = "megatron"
    width = 4 if precision in ("fp32", "tf32") else 2
    layout = record.facts.get("layout") or {}
    settings = split | {
        "vocab": (record.facts.get("model") or {}).get("padded_vocab") or config.vocab_size,
        "seq": record.seq_len,
        "micro_batch": micro,
        "n_micro": max(1, round(record.global_batch / micro / dp)),
        "zero_stage": record.zero_stage or 0,
        "recompute": RECOMPUTE.index(record.recompute or "none"),
        "sequence_parallel": bool(layout.get("sequence_parallel")),
        "offload": OFFLOAD.index(layout.get("offload") or "none"),
        "width": width,
        "grad_width": 4 if precision in ("bf16", "fp8") else width,
        "fp8": precision == "fp8",
        "tf32": precision == "tf32",
        "deepspeed": "deepspeed" in engine,
        "fsdp2": engine == "fsdp2",
        "shards": layout.get("fsdp_shard") or dp * split["cp"],
        "reductions": layout.get("reductions") or 1,
    }
    if uneven := {name: layout[name] for name in UNEVEN if name in layout}:
        ends = Layout(pp=split["pp"], vpp=split["vpp"], **uneven).ends(config.n_layer)
        settings |= {"first_layers": ends.first, "last_layers": ends.last}
    if config.experts:
        settings |= {"ep": record.ep or 1, "etp": record.etp or split["tp"]}  # as Megatron-LM
        settings["deep_ep"] = record.dispatcher in ("deepep", "hybridep")
        settings["hybrid_ep"] = record.dispatcher == "hybridep"
    x = columns(config, **settings | place(engine, split["tp"], record.gpus))
    memory.check_counted(config, x, f"{precision} of {record.engine} on {record.gpu_type}")
    return x


def crowding(record: Record) -> float:
    """Ranks' threads per core where there are more of them than cores, else 1."""
    host, spec = record.facts.get("host") or {}, record.facts.get("spec") or {}
    ranks = host.get("ranks_per_node") or record.gpus or 1
    if host.get("gpu") or not host.get("cores"):
        return 1.0
    return max(1.0, ranks * (spec.get("threads") or 1) / host["cores"])


def predicted_seconds(record: Record, calibration: Calibration) -> Answer[float]:
    """Seconds per step on a cluster; without them, which of the facts is absent."""
    try:
        x = row_of(record, calibration.columns)
    except ValueError as error:
        return Answer(None, str(error))
    if calibration.is_host and x.width[0] != 4:
        return Answer(None, f"{calibration.name} is measured in fp32 alone, not {record.precision}")
    seconds = calibration.fit.seconds(x, calibration.machine_for(x))[0]
    return Answer(float(seconds) * (crowding(record) if calibration.is_host else 1.0))


@dataclass
class Runs:
    """Runs with a steady time. measured: seconds per step; crowd: threads that share a core;
    left_out: what has no time or lacks a fact, with the reason."""

    ids: list[str]
    x: Columns
    measured: np.ndarray
    crowd: np.ndarray
    left_out: list[str]


def read_runs(paths: list[Path], place: Place) -> Runs:
    """Run folders and logs; place: as `row_of` takes it.

    Raises:
        UsageError: no run has a time and all its settings.
    """
    runs, (records, left_out) = [], load(paths)
    for record in records:
        time, name = timed(record), name_of(record)
        try:
            if time is None or not time.step_s > 0:
                raise ValueError("no steady step time")
            runs.append((name, row_of(record, place), time.step_s, crowding(record)))
        except ValueError as error:
            left_out.append(f"{name}: {error}")
    if not runs:
        raise UsageError("; ".join(["no run with a time and all its settings", *left_out]))
    ids, x, seconds, crowd = zip(*runs, strict=True)
    return Runs(list(ids), Columns.stack(x), np.array(seconds), np.array(crowd), left_out)
