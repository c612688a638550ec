"""A run that was read from a log, as `Columns`: its settings, and what the time model predicts."""

import math
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import numpy as np

from analysis.logs.model import asked, config_of
from analysis.logs.record import Record
from analysis.planner import ranking
from analysis.planner.calibration import Calibration, from_data_sheet, load_calibration
from analysis.planner.columns import MUON, Columns, columns
from analysis.planner.engines import adds_in_16_bits, is_fsdp2, scatters
from analysis.planner.memory.peak import check_counted
from base.errors import Answer, UsageError
from models.gpus import card_memory, usual_gpu
from parallel.config.layout import AXES, MODEL_AXES, OFFLOAD, RECOMPUTE, UNEVEN, Layout

ASSUMED = "sequence parallelism is not stated: predicted without (--sequence-parallel)"
Place = Callable[[Any, Any, Any], dict[str, Any]]


def absent(record: Record) -> list[str]:
    """Returns the facts beside the model's sizes that a prediction needs and a run leaves out."""
    ranks = math.prod(getattr(record, axis) or 1 for axis in MODEL_AXES)
    names = ["gpus", "global_batch", "seq_len", "precision", "micro_batch", "recompute"]
    names += [] if record.dp == 1 else ["zero_stage"]
    names += ["tp", "pp"] if ranks * (record.dp or 0) != record.gpus else []
    heads = [] if "n_head" in record.model else ["n_head"]
    return heads + [name for name in names if getattr(record, name) is None]


def row_of(record: Record, place: Place) -> Columns:
    """Returns a run's settings as one row. `place` returns the columns that the machine sets, by
    engine, tp and GPUs (`Calibration.columns`).

    Raises:
        ValueError: a fact that the model needs is not in the log.
    """
    config, reason = config_of(record)
    if config is None or absent(record):
        facts = asked(absent(record)) if absent(record) else ""
        raise ValueError("; ".join(filter(None, [reason, facts])))
    split = {axis: getattr(record, axis) or 1 for axis in AXES}
    ranks = math.prod(split[axis] for axis in MODEL_AXES)
    dp = split["dp"] = record.dp or max(1, record.gpus // ranks)
    micro, precision = record.micro_batch, record.precision
    engine = (record.engine or "").lower()
    if config.parts and engine in ("megatron-lm", "nemo"):  # what they run is megatron-core's
        engine = "megatron"
    width = 4 if precision in ("fp32", "tf32") else 2
    fp32_sums = precision in ("bf16", "fp8", "fp4") and not adds_in_16_bits(engine)
    layout = record.facts.get("layout") or {}
    settings = split | {
        "vocab": (record.facts.get("model") or {}).get("padded_vocab") or config.vocab_size,
        "seq": record.seq_len,
        "micro_batch": micro,
        "n_micro": max(1, round(record.global_batch / micro / dp)),
        "zero_stage": record.zero_stage or 0,
        "recompute": RECOMPUTE.index(record.recompute),
        "sequence_parallel": bool(record.sequence_parallel),
        "offload": OFFLOAD.index(layout.get("offload") or "none"),
        "muon": MUON.index(layout.get("muon", "")),
        "width": width,
        "grad_width": 4 if fp32_sums else width,
        "fp8": precision in ("fp8", "fp4"),
        "tf32": precision == "tf32",
        "our_megatron": record.engine == "megatron",
        "deepspeed": "deepspeed" in engine,
        "fsdp2": is_fsdp2(engine, record.zero_stage),
        "scattered": scatters(engine),
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
    return columns(config, **settings | place(engine, split["tp"], record.gpus))


def counted_row_of(record: Record, place: Place) -> Columns:
    """Returns `row_of`; ValueError where no formula counts the bytes of the model's parts, too."""
    steps = row_of(record, place)
    name = f"{record.precision} of {record.engine} on {record.gpu_type}"
    check_counted(config_of(record).value, steps, name)
    return steps


def threads_per_core(record: Record) -> float | None:
    """Returns the ranks' threads for each core of the run's host; None on GPUs and where no log
    says so."""
    host, spec = record.facts.get("host") or {}, record.facts.get("spec") or {}
    ranks = host.get("ranks_per_node") or record.gpus or 1
    if host.get("gpu") or not host.get("cores"):
        return None
    return ranks * (spec.get("threads") or 1) / host["cores"]


def assumed(record: Record) -> bool:
    """Returns whether ASSUMED is true of a run."""
    matters = (record.tp or 1) > 1 and not absent(record)
    return matters and record.sequence_parallel is None


def priced(record: Record, cluster: Calibration) -> Answer[dict[str, Any]]:
    """Returns a run's row in a plan of the cluster, with `fits`; without one, which of the facts
    are absent, or why it cannot be split so."""
    try:
        steps = counted_row_of(record, cluster.columns)
        cluster.precision(record.precision)
        (step,) = steps.rows
        split = (step.gpus, step.global_batch) == (record.gpus, record.global_batch)
        if not split or step.pp > step.layers + 2:
            raise ValueError("its GPUs, layers or batch cannot be split so")
        ranked = ranking.rank(steps, cluster, ranking.MARGIN, threads_per_core(record))
        config = config_of(record).value
        (row,) = ranking.rows_of(ranked, np.array([0]), config, record.precision)
    except ValueError as error:
        return Answer(None, str(error))
    return Answer(row | {"fits": len(ranked.order) > 0, "step_s": row["predicted_s"]})


def cluster_of(record: Record, name: str | None) -> Answer[Calibration]:
    """Returns the cluster of this name, else the data sheet of the run's card, or why there is
    none."""
    if name:
        return Answer(load_calibration(name))
    if not record.gpu_type:
        return Answer(None, asked(["gpu_type"]) + "; or give --cluster")
    if (card := usual_gpu(record.gpu_type)) is None:
        return Answer(None, f"{record.gpu_type} is no known card: say where with --cluster")
    memory_gb = card.memory_gb
    with suppress(UsageError):  # sold with several sizes, and the log names none: the largest
        memory_gb = card_memory(record.gpu_type)
    return Answer(from_data_sheet(card.name, memory_gb=memory_gb))
