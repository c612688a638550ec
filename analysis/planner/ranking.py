"""Which layouts fit in memory, how fast each is, and why the others do not fit."""

import argparse
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from analysis.common.table import Column, Table, by_key
from analysis.planner.calibration import Calibration
from analysis.planner.columns import Columns
from analysis.planner.memory.peak import allocated, fullest, peaks
from analysis.planner.memory.pipeline import stage_layers
from analysis.planner.space import engine_of, space
from analysis.planner.timemodel.links import context_parallel, expert_parallel, tensor_parallel
from analysis.planner.timemodel.step import terms as step_terms
from base.bounds import Bounds
from base.units import GIB
from models.config import GPTConfig
from models.flops import tflops_per_gpu
from models.gpus import NETWORK
from models.headroom import MARGIN, usable
from parallel.config.layout import AXES, EXPERT_AXES, RECOMPUTE, shown_axes

MARGINS = Bounds(0, 1, below=True)  # share of memory left free
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
SECONDS = (
    Column("predicted_s", "predicted s/iter", "#.4g"),
    Column("low_s", "low", "#.4g"),
    Column("high_s", "high", "#.4g"),
)


def add_network_flag(parser: argparse.ArgumentParser) -> None:
    """Adds --network, which replaces the cluster's network between nodes."""
    network = f"a node's network, in place of the cluster's: {NETWORK}"
    parser.add_argument("--network", metavar="WORDS", help=network)


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Adds the flags that every command about predicted layouts has."""
    add_network_flag(parser)
    margin = f"share of memory left free (default: {MARGIN})"
    parser.add_argument("--margin", type=float, default=MARGIN, metavar="SHARE", help=margin)
    flash = "flash attention (default: as the cluster was calibrated)"
    parser.add_argument("--flash", action=argparse.BooleanOptionalAction, help=flash)


class Ranking(NamedTuple):
    """Layouts on a cluster, each predicted once; arrays are (n,).

    crowd: ranks per core, more than 1 only on a host CPU, whose cores count as its GPUs. terms:
    seconds by term of a step, and their sum; used: peak bytes of the fullest rank; limit: usable
    bytes. order: the rows that fit, the fastest first. best: those of `order` that nothing
    beats in time and in memory that differs in the recompute policy (a stage of one layer computes
    again all it holds) or in whether cp or dp cuts the same tokens of a rank.
    """

    x: Columns
    cluster: Calibration
    crowd: np.ndarray
    terms: dict[str, np.ndarray]
    seconds: np.ndarray
    used: np.ndarray
    limit: float
    order: np.ndarray
    best: np.ndarray


def rank(
    x: Columns, cluster: Calibration, margin: float, threads_per_core: float | None = None
) -> Ranking:
    """Predicts the time and memory of every layout, and puts those that fit in order of time.

    `margin` is the share of memory to leave free. `threads_per_core` is that of runs on a host CPU;
    without it each rank has one thread."""
    machine, crowd = cluster.machine_for(x), np.ones(len(x))
    if cluster.is_host:
        crowd = np.maximum(crowd, threads_per_core or x.gpus / cluster.gpus_per_node)
    terms = step_terms(x, machine, cluster.fit.constants)
    terms = {name: np.broadcast_to(s, (len(x),)) * crowd for name, s in terms.items()}
    seconds = sum(terms.values())
    used, limit = peaks(x, cluster.memory), usable(cluster.gpu_memory_gb, margin)
    if cluster.is_host:  # whose memory its ranks share
        limit /= int(x.gpus.max())
    fits = np.flatnonzero(used <= limit)
    order = fits[np.argsort(seconds[fits], kind="stable")]
    names = ("tp", "pp", "vpp", "replicas", "tokens", "zero_stage", "sequence_parallel", "fsdp2")
    names += tuple(EXPERT_AXES)
    splits = zip(*(getattr(x, name)[order].tolist() for name in names), strict=True)
    least: dict[tuple, float] = {}  # bytes of a split's fastest and smallest layout so far
    best = []
    for i, split in zip(order.tolist(), splits, strict=True):
        if used[i] < least.get(split, np.inf):
            least[split] = used[i]
            best.append(i)
    return Ranking(x, cluster, crowd, terms, seconds, used, limit, order, np.array(best, int))


@dataclass(frozen=True)
class Question:
    """What is planned. `preset` names the model whose blocks it has, if any; `sizes` are what flags
    state of the model; `settings` are those of `space`."""

    config: GPTConfig
    preset: str | None
    sizes: dict[str, Any]
    cluster: Calibration
    gpus: int
    global_batch: int
    settings: dict[str, Any]
    margin: float

    @property
    def gemms(self) -> str:
        """Returns the number format that the plan's GEMMs run in."""
        return self.cluster.gemm_precision(self.settings["precision"])

    def ranked(self) -> Ranking:
        """Returns the ranking of every possible layout; refuses a question that has none."""
        x = space(self.config, self.cluster, self.gpus, self.global_batch, **self.settings)
        return rank(x, self.cluster, self.margin)


def message_seconds(r: Ranking, chosen: np.ndarray | list[int]) -> dict[str, np.ndarray]:
    """Returns the seconds per step, (n,), of messages between tp, cp and ep ranks in the chosen
    rows. The term `compute` includes them."""
    x, machine, c = r.x.take(chosen), r.cluster.machine_for(r.x), r.cluster.fit.constants
    layers = x.n_micro * x.layers / x.pp * r.crowd[chosen]
    return {
        "tensor parallel": layers * tensor_parallel(x, machine, c),
        "context parallel": layers * context_parallel(x, machine, c),
        "expert parallel": layers * expert_parallel(x, machine, c),
    }


def gigabytes(x: Columns, cluster: Calibration) -> dict[str, float]:
    """Returns the GiB of each part of memory on the fullest rank of one layout; `x` has one row."""
    return {name: b / GIB for name, b in fullest(x.steps[0], cluster.memory).items()}


def policy(x: Columns, i: int) -> str:
    """Returns a row's micro-batch, recomputation, ZeRO stage and sequence parallelism in words."""
    words = f"micro-batch {x.micro_batch[i]}, recompute {RECOMPUTE[x.recompute[i]]}"
    return f"{words}, ZeRO {x.zero_stage[i]}" + (", sp" if x.sequence_parallel[i] else "")


def refusals(r: Ranking) -> list[str]:
    """Returns the reason why layouts do not fit, a sentence for each tp: at which pp none fits, the
    least that any of them needs, and the largest part of it."""
    lines = []
    for tp in sorted(set(r.x.tp.tolist())):
        fitting = r.x.pp[r.order][r.x.tp[r.order] == tp]
        refused = np.flatnonzero((r.x.tp == tp) & ~np.isin(r.x.pp, fitting))
        if not len(refused):
            continue
        least = refused[np.argmin(r.used[refused])]
        parts = gigabytes(r.x.take([least]), r.cluster)
        part = max(parts, key=parts.get)
        pps = ", ".join(map(str, np.unique(r.x.pp[refused])))
        lines.append(
            f"tp {tp} x pp {pps}: all {len(refused)} layouts"
            f" need more than {r.limit / GIB:.0f} GiB, the least"
            f" {r.used[least] / GIB:.1f} GiB (pp {r.x.pp[least]}, {policy(r.x, least)}), of it"
            f" {parts[part]:.1f} GiB {part}"
        )
    return lines


def nothing_fits(r: Ranking, config: GPTConfig, gpus: int) -> str:
    """Returns the line that says, where no layout fits, which one needs the least memory."""
    x, least = r.x, int(np.argmin(r.used))
    return (
        f"{config.n_params / 1e9:.1f}B parameters do not fit on {gpus} GPUs of"
        f" {r.limit / GIB:.1f} GiB: the least of {len(x)} layouts needs"
        f" {r.used[least] / GIB:.1f} GiB (tp {x.tp[least]}, pp {x.pp[least]},"
        f" {policy(x, least)})"
    )


def rows_of(r: Ranking, chosen: np.ndarray, config: GPTConfig, gemms: str) -> list[dict[str, Any]]:
    """Returns the printed values of the chosen layouts; `gemms` is the number format of GEMMs."""
    x, used = r.x.take(chosen), r.used[chosen]
    seconds, terms = r.seconds[chosen], {name: s[chosen] for name, s in r.terms.items()}
    low, high = r.cluster.fit.interval(seconds, x, r.cluster.machine_for(x))
    sent = sum(message_seconds(r, chosen).values())
    sent = sent + terms["p2p"] + terms["data_parallel"] + terms["embedding"]
    counted = x.each(allocated) / GIB
    cut = x.each(stage_layers).astype(int).tolist()
    rows = []
    for i in range(len(x)):
        layout, seq_len, step_s = x.layout(i), int(x.seq[i]), float(seconds[i])
        tokens, gpus = layout.global_batch * seq_len, layout.world_size
        tflops = tflops_per_gpu(config, seq_len, tokens, step_s, gpus)
        row = {
            "rank": i + 1,
            "gpus": gpus,
            "engine": engine_of(layout.zero_stage, x.fsdp2[i]),
            **{key: getattr(layout, key) for key in KEYS},
            **{axis: int(getattr(x, axis)[i]) for axis in EXPERT_AXES if config.experts},
            "stages": "-".join(map(str, cut[i])) if layout.uneven else None,
            "uneven": layout.uneven,
            "sequence_parallel": "yes" if layout.sequence_parallel else "",
            "predicted_s": step_s,
            "low_s": float(low[i]),
            "high_s": float(high[i]),
            "tflops": tflops,
            "mfu": r.cluster.mfu(tflops, gemms).value,
            "tokens_per_s": tokens / step_s,
            "allocated_gib": float(counted[i]) if np.isfinite(counted[i]) else None,
            "memory_gib": float(used[i] / GIB),
            "tight": "tight" if used[i] > (1 - TIGHT) * r.limit else "",
            "bubble": float(terms["bubble"][i] / step_s),
            "communication": float(sent[i] / step_s),
        }
        rows.append(row)
    return rows


def width_note(rows: list[dict[str, Any]], cluster: Calibration) -> list[str]:
    """Returns a note on the intervals of rows from `rows_of`: how wide the first is, and why; []
    where no row is predicted."""
    first = next((row for row in rows if row["predicted_s"] is not None), None)
    if first is None:
        return []
    low, high = (first[key] / first["predicted_s"] - 1 for key in ("low_s", "high_s"))
    reason = (
        "no run was fitted, the priors of its card allow as much; analysis.calibrate narrows it"
    )
    if cluster.fit.n:
        reason = f"{cluster.fit.n} runs were fitted, and layouts unlike them are less sure"
    lines = [f"low to high hold 80 %, of the first {low:+.0%} to {high:+.0%}: {reason}"]
    if (gpus := max(row["gpus"] for row in rows)) > cluster.fit.gpus:
        most, kind = cluster.fit.gpus, "fitted" if cluster.fit.n else "published"
        lines.append(
            f"{gpus} GPUs are more than the {most} of the largest {kind} run: times are"
            f" extrapolated by {np.log2(gpus / most):.1f} doublings, and their intervals are wider"
        )
    return lines


def to_measure(r: Ranking, count: int) -> np.ndarray:
    """Returns `count` rows of `best`: the fastest of up to TRIED splits by tp, cp and pp, and the
    fastest others. What the model does not know slows layouts of one split together."""
    x, splits = r.x, {}
    for i in r.best.tolist():
        splits.setdefault((x.tp[i], x.cp[i], x.pp[i]), i)
    tried = list(splits.values())[:TRIED]
    others = [i for i in r.best.tolist() if i not in tried]
    return np.array(sorted([*tried, *others][:count], key=r.seconds.__getitem__), int)


def alike_note(r: Ranking) -> list[str]:
    """Returns a note on the layouts whose predicted seconds are near the first's, and which of them
    to measure; [] where there is none."""
    near = int(np.sum(r.seconds[r.best] <= r.seconds[r.best[:1]] * (1 + NEAR)))
    if near < 2:
        return []
    line = f"{near} layouts are within {NEAR:.0%} of the first: measure some (--study) to choose"
    x = r.x
    axes = ("tp", "cp", "pp") if (x.cp > 1).any() else ("tp", "pp")
    tried = [" ".join(f"{a} {getattr(x, a)[i]}" for a in axes) for i in to_measure(r, TRIED)]
    *others, last = dict.fromkeys(tried)
    if others:
        line += f", at least the fastest of {', '.join(others)} and {last}"
    return [line]


def table(rows: list[dict[str, Any]], notes: list[str], no_mfu: str) -> Table:
    """Returns the ranked table of rows from `rows_of`. `no_mfu` says why they have no MFU; "" where
    they have one."""
    numbers = [*shown_axes(rows), *(k for k in KEYS if k not in (*AXES, "recompute"))]
    stages = Column("stages", "layers of first-middle-last stage")
    columns = [
        Column("rank", "#", "d"),
        Column("engine", "engine"),
        *(Column(key, HEADINGS.get(key, key), "d") for key in numbers),
        *([stages] if any(row.get("stages") for row in rows) else []),
        Column("recompute", "recompute"),
        Column("sequence_parallel", "sp"),
        *SECONDS,
        Column("tflops", "TFLOP/s/GPU", "#.4g"),
        Column("mfu", "MFU", ".1%"),
        Column("tokens_per_s", "tokens/s", ".0f"),
        Column("allocated_gib", "allocated GiB", ".1f"),
        Column("memory_gib", "GiB", ".1f"),
        Column("tight", "memory"),
        *by_key(("bubble", "communication"), ".1%"),
    ]
    return Table(columns, rows, notes=[*notes, no_mfu] if no_mfu else notes)
