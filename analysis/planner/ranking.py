"""Which layouts fit in memory, how fast each is, and why the others do not fit."""

import argparse
from typing import Any

import numpy as np

from analysis.common.table import Column, Table
from analysis.planner import timemodel
from analysis.planner.calibration import Calibration
from analysis.planner.space import engine_of, space
from base.bounds import Bounds
from base.errors import UsageError
from models.config import GPTConfig
from models.flops import tflops_per_gpu
from parallel.config import memory
from parallel.config.axes import AXES, shown_axes
from parallel.config.layout import RECOMPUTE
from parallel.config.layout_arrays import Columns

MARGIN, MARGINS = memory.MARGIN, Bounds(0, 1, below=True)  # share of memory left free
NEAR = 0.03  # of the first's time: layouts that the model cannot tell apart
TRIED = 3  # layouts to measure before one is chosen
TIGHT = 0.05  # share of the usable memory; a layout that leaves less of it free is marked
KEYS = (*AXES, "micro_batch", "n_micro", "zero_stage", "recompute")
HEADINGS = {  # of the tables; --why takes them, too
    "micro_batch": "mbs",
    "n_micro": "micro-batches",
    "zero_stage": "ZeRO",
    "sequence_parallel": "sp",
}
SCALE = tuple(2**i for i in range(3, 15))  # GPUs
SECONDS = (
    Column("predicted_s", "predicted s/iter", "#.4g"),
    Column("low_s", "low", "#.4g"),
    Column("high_s", "high", "#.4g"),
)


def add_margin_flag(parser: argparse.ArgumentParser) -> None:
    """Add --margin."""
    said = f"share of memory left free (default: {MARGIN})"
    parser.add_argument("--margin", type=float, default=MARGIN, metavar="SHARE", help=said)


def add_flash_flag(parser: argparse.ArgumentParser) -> None:
    """Add --flash and --no-flash."""
    said = "flash attention (default: as the cluster was calibrated)"
    parser.add_argument("--flash", action=argparse.BooleanOptionalAction, help=said)


def crowd(x: Columns, cluster: Calibration) -> np.ndarray:
    """Ranks per core, (n,): more than 1 only on a host CPU, whose cores count as its GPUs."""
    if not cluster.is_host:
        return np.ones(len(x))
    return np.maximum(1.0, x.gpus / cluster.gpus_per_node)


def usable_bytes(x: Columns, cluster: Calibration, margin: float) -> float:
    """Bytes that a step may use on the fullest rank; all ranks share a host's memory."""
    ranks = int(x.gpus.max()) if cluster.is_host else 1
    return memory.usable(cluster.gpu_memory_gb, margin) / ranks


def rank(x: Columns, cluster: Calibration, margin: float) -> tuple[np.ndarray, ...]:
    """(seconds, peak bytes, which rows fit, the fastest first)."""
    machine = cluster.machine_for(x)
    seconds = cluster.fit.seconds(x, machine) * crowd(x, cluster)
    used = memory.peak(x, cluster.memory)
    fits = np.flatnonzero(used <= usable_bytes(x, cluster, margin))
    return seconds, used, fits[np.argsort(seconds[fits], kind="stable")]


def sifted(x: Columns, used: np.ndarray, order: np.ndarray) -> tuple[np.ndarray, dict[int, int]]:
    """(the rows of `order` without those that another recompute policy beats in time and in memory,
    each of these -> the row that beats it): a stage of one layer computes again all that it holds.
    """
    names = (*AXES, "micro_batch", "zero_stage", "sequence_parallel", "fsdp2")
    split = zip(*(getattr(x, name)[order].tolist() for name in names), strict=True)
    least: dict[tuple, int] = {}
    kept, beaten = [], {}
    for i, key in zip(order.tolist(), split, strict=True):
        if key in least and used[i] >= used[least[key]]:
            beaten[i] = least[key]
        else:
            least[key] = i
            kept.append(i)
    return np.array(kept, int), beaten


def seconds_by_term(x: Columns, cluster: Calibration) -> tuple[dict[str, np.ndarray], ...]:
    """(seconds of each term of a step, (n,); those of tp and of cp messages in `compute`)."""
    machine, c = cluster.machine_for(x), cluster.fit.constants
    crowded = crowd(x, cluster)
    terms = {
        name: np.broadcast_to(value, (len(x),)) * crowded
        for name, value in timemodel.terms(x, machine, c).items()
    }
    layers = x.n_micro * x.layers / x.pp * crowded
    messages = {
        "tensor parallel": layers * timemodel.tensor_parallel(x, machine, c),
        "context parallel": layers * timemodel.context_parallel(x, machine, c),
    }
    return terms, messages


def gigabytes_by_part(x: Columns, cluster: Calibration) -> dict[str, np.ndarray]:
    """Gigabytes by part on the fullest rank of each layout, (n,)."""
    every = [memory.parts(x, stage, cluster.memory) for stage in ("first", "middle", "last")]
    total = np.stack([np.broadcast_to(sum(parts.values()), len(x)) for parts in every])
    total[1, x.pp < 3] = 0.0  # there is no stage between
    fullest = np.argmax(total, axis=0)
    return {
        name: np.choose(fullest, [np.broadcast_to(parts[name], len(x)) for parts in every])
        / memory.GB
        for name in every[0]
    }


def policy(x: Columns, i: int) -> str:
    """Micro-batch, recomputation, ZeRO stage and sequence parallelism of a row, in words."""
    words = f"micro-batch {x.micro_batch[i]}, recompute {RECOMPUTE[x.recompute[i]]}"
    return f"{words}, ZeRO {x.zero_stage[i]}" + (", sp" if x.sequence_parallel[i] else "")


def refusals(x: Columns, used: np.ndarray, limit: float, cluster: Calibration) -> list[str]:
    """Why layouts do not fit in `limit` bytes, a sentence for each tp: at which pp none fits, the
    least that any of them needs, and the largest part of it."""
    said = []
    for tp in sorted(set(x.tp.tolist())):
        full = [
            pp
            for pp in sorted(set(x.pp[x.tp == tp].tolist()))
            if (used[(x.tp == tp) & (x.pp == pp)] > limit).all()
        ]
        here = np.flatnonzero((x.tp == tp) & np.isin(x.pp, full))
        if not len(here):
            continue
        least = here[np.argmin(used[here])]
        parts = gigabytes_by_part(x.take(np.array([least])), cluster)
        part, size = max(((k, v.item()) for k, v in parts.items()), key=lambda item: item[1])
        said.append(
            f"tp {tp} x pp {', '.join(map(str, full))}: all {len(here)} layouts need more than"
            f" {limit / memory.GB:.0f} GB, the least {used[least] / memory.GB:.1f} GB (pp"
            f" {x.pp[least]}, {policy(x, least)}), of it {size:.1f} GB {part}"
        )
    return said


def nothing_fits(x: Columns, used: np.ndarray, limit: float, config: GPTConfig, gpus: int) -> str:
    """One line: the least memory that any layout needs, where none fits in `limit` bytes."""
    least = int(np.argmin(used))
    return (
        f"{config.n_params / 1e9:.1f}B parameters do not fit on {gpus} GPUs of"
        f" {limit / memory.GB:.1f} GB: the least of {len(x)} layouts needs"
        f" {used[least] / memory.GB:.1f} GB (tp {x.tp[least]}, pp {x.pp[least]},"
        f" {policy(x, least)})"
    )


def rows_of(
    x: Columns,
    chosen: np.ndarray,
    cluster: Calibration,
    config: GPTConfig,
    precision: str,
    margin: float,
) -> list[dict[str, Any]]:
    """What is printed of the chosen layouts."""
    limit = usable_bytes(x, cluster, margin)
    x = x.take(chosen)
    terms, messages = seconds_by_term(x, cluster)
    seconds = sum(terms.values())
    low, high = cluster.fit.interval(seconds, x, cluster.machine_for(x))
    used = memory.peak(x, cluster.memory)
    sent = sum(messages.values()) + terms["p2p"] + terms["data_parallel"] + terms["embedding"]
    found = []
    for i in range(len(x)):
        layout, seq_len, t = x.layout(i), int(x.seq[i]), float(seconds[i])
        tokens, gpus = layout.global_batch * seq_len, layout.world_size
        tflops = tflops_per_gpu(config, seq_len, tokens, t, gpus)
        found.append(
            {
                "rank": i + 1,
                "engine": engine_of(layout.zero_stage, x.fsdp2[i]),
                **{key: getattr(layout, key) for key in KEYS},
                "sequence_parallel": "yes" if layout.sequence_parallel else "",
                "predicted_s": t,
                "low_s": float(low[i]),
                "high_s": float(high[i]),
                "tflops": tflops,
                "mfu": cluster.mfu(tflops, precision)[0],
                "tokens_per_s": tokens / t,
                "gpu_days": gpus * t / 86400 / tokens * 1e12,
                "memory_gb": float(used[i] / memory.GB),
                "tight": "tight" if used[i] > (1 - TIGHT) * limit else "",
                "bubble": float(terms["bubble"][i] / t),
                "communication": float(sent[i] / t),
            }
        )
    return found


def width_note(rows: list[dict[str, Any]], cluster: Calibration) -> list[str]:
    """A line about the intervals of `rows_of`: how wide the first is, and why; none where no row is
    predicted."""
    predicted = next((row for row in rows if row["predicted_s"] is not None), None)
    if predicted is None:
        return []
    low, middle, high = (predicted[key] for key in ("low_s", "predicted_s", "high_s"))
    if cluster.fit.n:
        why = f"{cluster.fit.n} runs were fitted, and layouts unlike them are less sure"
    else:
        why = (
            "no run was fitted, the priors of its card allow as much; analysis.calibrate narrows it"
        )
    return [
        f"low to high hold 80 %, of the first {low / middle - 1:+.0%} to {high / middle - 1:+.0%}:"
        f" {why}"
    ]


def to_measure(tp: np.ndarray, pp: np.ndarray) -> list[int]:
    """Places of the layouts to measure before one is chosen: of layouts from the fastest on, the
    first of each of the first TRIED splits (tp, pp). What the model does not know slows layouts of
    one split together, so the three fastest often are one try."""
    first: dict[tuple[int, int], int] = {}
    for place, split in enumerate(zip(tp.tolist(), pp.tolist(), strict=True)):
        first.setdefault(split, place)
        if len(first) == TRIED:
            break
    return list(first.values())


def alike_note(seconds: np.ndarray, tp: np.ndarray, pp: np.ndarray) -> list[str]:
    """A line about layouts whose predicted seconds, the fastest first, are near the first's, and
    which to measure."""
    near = int(np.sum(seconds <= seconds[0] * (1 + NEAR)))
    if near < 2:
        return []
    splits = [f"tp {tp[i]} pp {pp[i]}" for i in to_measure(tp, pp)]
    said = f"{near} layouts are within {NEAR:.0%} of the first: measure some (--study) to choose"
    if len(splits) > 1:
        said += f", at least the fastest of {', '.join(splits[:-1])} and {splits[-1]}"
    return [said]


def _columns(*keys: str) -> list[Column]:
    words = ("recompute", "sequence_parallel")
    return [Column(key, HEADINGS.get(key, key), "" if key in words else "d") for key in keys]


def table(found: list[dict[str, Any]], notes: list[str], no_mfu: str) -> Table:
    """The ranked table: rows of `rows_of`; `no_mfu`: why they have no MFU, "" where they have."""
    keys = [*shown_axes(found), *(key for key in KEYS if key not in AXES)]
    shown = [
        Column("rank", "#", "d"),
        Column("engine", "engine"),
        *_columns(*keys, "sequence_parallel"),
        *SECONDS,
        Column("tflops", "TFLOP/s/GPU", "#.4g"),
        Column("mfu", "MFU", ".1%"),
        Column("tokens_per_s", "tokens/s", ".0f"),
        Column("gpu_days", "GPU-days per 1e12 tokens", ".1f"),
        Column("memory_gb", "GB", ".1f"),
        Column("tight", "memory"),
        Column("bubble", "bubble", ".1%"),
        Column("communication", "communication", ".1%"),
    ]
    return Table(shown, found, notes=notes, missing={"mfu": [no_mfu] if no_mfu else []})


def scale(
    config: GPTConfig, cluster: Calibration, per_gpu: float, settings: dict[str, Any], margin: float
) -> list[dict[str, Any]]:
    """The best layout at each power of two of GPUs from 8 to 16,384. The batch grows with them
    (weak scaling): `per_gpu` sequences each. `settings` are those of `space`.

    efficiency is TFLOP/s per GPU over the best of all sizes.
    """
    found = []
    for gpus in SCALE:
        batch = max(1, round(per_gpu * gpus))
        try:
            x = space(config, cluster, gpus, batch, **settings)
        except UsageError:
            continue
        _, _, order = rank(x, cluster, margin)
        if len(order):
            best = rows_of(x, order[:1], cluster, config, settings["precision"], margin)[0]
            found.append({"gpus": gpus, "global_batch": batch} | best)
    top = max((row["tflops"] for row in found), default=1.0)
    return [row | {"efficiency": row["tflops"] / top} for row in found]


def scale_table(curve: list[dict[str, Any]], per_gpu: float, network: list[str]) -> Table:
    """Efficiency against GPUs: rows of `scale`; `network`: lines about it."""
    shown = [
        Column("gpus", "GPUs", "d"),
        Column("global_batch", "global batch", "d"),
        *_columns(*shown_axes(curve), "micro_batch"),
        SECONDS[0],
        Column("tflops", "predicted TFLOP/s/GPU", "#.4g"),
        Column("efficiency", "predicted efficiency", ".1%"),
    ]
    note = (
        "predicted efficiency: TFLOP/s/GPU over the best size's; the batch grows with the GPUs"
        f" ({per_gpu:g} sequences each), which is weak scaling"
    )
    missing = sorted(set(SCALE) - {row["gpus"] for row in curve})
    left_out = f"no layout fits or is possible on {', '.join(map(str, missing))} GPUs"
    return Table(shown, curve, notes=[note, *[left_out] * bool(missing), *network])
