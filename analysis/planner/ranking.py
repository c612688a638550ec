"""Which layouts fit in memory, how fast each is, and why the others do not fit."""

import argparse
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np

from analysis.common.table import Column, Table, axis_columns, by_key
from analysis.planner.calibration import Calibration
from analysis.planner.certainty import UNKNOWN, widths
from analysis.planner.columns import Columns
from analysis.planner.memory.peak import allocated, fullest, peaks
from analysis.planner.memory.pipeline import stage_layers
from analysis.planner.space import engine_of, space
from analysis.planner.timemodel.links import context_parallel, expert_parallel, tensor_parallel
from analysis.planner.timemodel.step import terms as step_terms
from base.bounds import Bounds
from base.units import GIB, in_powers
from models.config import GPTConfig
from models.flops import tflops_per_gpu
from models.gpus import NETWORK
from models.headroom import MARGIN, usable
from parallel.config.layout import AXES, EXPERT_AXES, OFFLOAD, RECOMPUTE

MARGINS = Bounds(0, 1, below=True)  # share of memory left free
NEAR = 0.03  # of the first's time: layouts that the model cannot tell apart
TRIED = 3  # layouts to measure before one is chosen
STEPS = 20  # of a planned run
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

    steps: Columns
    cluster: Calibration
    crowd: np.ndarray
    terms: dict[str, np.ndarray]
    seconds: np.ndarray
    used: np.ndarray
    limit: float
    order: np.ndarray
    best: np.ndarray


def rank(
    steps: Columns, cluster: Calibration, margin: float, threads_per_core: float | None = None
) -> Ranking:
    """Predicts the time and memory of every layout, and puts those that fit in order of time.

    `margin` is the share of memory to leave free. `threads_per_core` is that of runs on a host CPU;
    without it each rank has one thread."""
    machine, crowd = cluster.machine_for(steps), np.ones(len(steps))
    if cluster.is_host:
        crowd = np.maximum(crowd, threads_per_core or steps.gpus / cluster.gpus_per_node)
    terms = step_terms(steps, machine, cluster.fit.constants)
    terms = {name: np.broadcast_to(s, (len(steps),)) * crowd for name, s in terms.items()}
    seconds = sum(terms.values())
    used, limit = peaks(steps, cluster.memory), usable(cluster.gpu_memory_gb, margin)
    if cluster.is_host:  # whose memory its ranks share
        limit /= int(steps.gpus.max())
    fits = np.flatnonzero(used <= limit)
    order = fits[np.argsort(seconds[fits], kind="stable")]
    names = ("tp", "pp", "vpp", "replicas", "tokens", "zero_stage", "sequence_parallel", "fsdp2")
    names += ("shards", "offload", *EXPERT_AXES)
    splits = zip(*(getattr(steps, name)[order].tolist() for name in names), strict=True)
    least: dict[tuple, float] = {}  # bytes of a split's fastest and smallest layout so far
    best = []
    for i, split in zip(order.tolist(), splits, strict=True):
        if used[i] < least.get(split, np.inf):
            least[split] = used[i]
            best.append(i)
    return Ranking(
        steps,
        cluster,
        crowd=crowd,
        terms=terms,
        seconds=seconds,
        used=used,
        limit=limit,
        order=order,
        best=np.array(best, int),
    )


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
        steps = space(self.config, self.cluster, self.gpus, self.global_batch, **self.settings)
        return rank(steps, self.cluster, self.margin)


def message_seconds(ranked: Ranking, chosen: np.ndarray | list[int]) -> dict[str, np.ndarray]:
    """Returns the seconds per step, (n,), of messages between tp, cp and ep ranks in the chosen
    rows. The term `compute` includes them."""
    steps = ranked.steps.take(chosen)
    machine = ranked.cluster.machine_for(ranked.steps)
    constants = ranked.cluster.fit.constants
    layers = steps.n_micro * steps.layers / steps.pp * ranked.crowd[chosen]
    return {
        "tensor parallel": layers * tensor_parallel(steps, machine, constants),
        "context parallel": layers * context_parallel(steps, machine, constants),
        "expert parallel": layers * expert_parallel(steps, machine, constants),
    }


def gigabytes(steps: Columns, cluster: Calibration) -> dict[str, float]:
    """Returns the GiB of each part of memory on the fullest rank of the only row of `steps`."""
    return {name: b / GIB for name, b in fullest(steps.rows[0], cluster.memory).items()}


def policy(steps: Columns, i: int) -> str:
    """Returns a row's micro-batch, recomputation, ZeRO stage, offload and sequence parallelism."""
    words = f"micro-batch {steps.micro_batch[i]}, recompute {RECOMPUTE[steps.recompute[i]]}"
    words += f", ZeRO {steps.zero_stage[i]}"
    if steps.fsdp2[i] and steps.shards[i] < steps.replicas[i]:
        words += f" over {steps.shards[i]} ranks"
    if steps.offload[i]:
        words += f", offload {OFFLOAD[steps.offload[i]]}"
    return words + (", sp" if steps.sequence_parallel[i] else "")


def refusals(ranked: Ranking) -> list[str]:
    """Returns why layouts do not fit, a sentence for each tp. It says at which pp none fits, the
    least that any of them needs, and the largest part of it."""
    steps, lines = ranked.steps, []
    for tp in sorted(set(steps.tp.tolist())):
        fitting_pps = steps.pp[ranked.order][steps.tp[ranked.order] == tp]
        refused = np.flatnonzero((steps.tp == tp) & ~np.isin(steps.pp, fitting_pps))
        if not len(refused):
            continue
        least = refused[np.argmin(ranked.used[refused])]
        parts = gigabytes(steps.take([least]), ranked.cluster)
        largest = max(parts, key=parts.get)
        pps = ", ".join(map(str, np.unique(steps.pp[refused])))
        lines.append(
            f"tp {tp} x pp {pps}: all {len(refused)} layouts"
            f" need more than {ranked.limit / GIB:.0f} GiB, the least"
            f" {ranked.used[least] / GIB:.1f} GiB (pp {steps.pp[least]},"
            f" {policy(steps, least)}), of it"
            f" {parts[largest]:.1f} GiB {largest}"
        )
    return lines


def nothing_fits(ranked: Ranking, config: GPTConfig, gpus: int) -> str:
    """Returns the line that says, where no layout fits, which one needs the least memory."""
    steps, least = ranked.steps, int(np.argmin(ranked.used))
    return (
        f"{config.n_params / 1e9:.1f}B parameters do not fit on {gpus} GPUs of"
        f" {ranked.limit / GIB:.1f} GiB: the least of {len(steps)} layouts needs"
        f" {ranked.used[least] / GIB:.1f} GiB (tp {steps.tp[least]}, pp {steps.pp[least]},"
        f" {policy(steps, least)})"
    )


def rows_of(
    ranked: Ranking, chosen: np.ndarray, config: GPTConfig, gemms: str
) -> list[dict[str, Any]]:
    """Returns the printed values of the chosen layouts; `gemms` is the number format of GEMMs."""
    steps, used = ranked.steps.take(chosen), ranked.used[chosen]
    seconds, terms = ranked.seconds[chosen], {name: s[chosen] for name, s in ranked.terms.items()}
    machine, fit = ranked.cluster.machine_for(steps), ranked.cluster.fit
    low, high = fit.interval(seconds, steps, machine)
    unknown = fit.unknown(steps, machine)
    sent = sum(message_seconds(ranked, chosen).values())
    sent = sent + terms["p2p"] + terms["data_parallel"] + terms["embedding"]
    counted = steps.each(allocated) / GIB
    cut = steps.each(stage_layers).astype(int).tolist()
    rows = []
    for i in range(len(steps)):
        layout, seq_len, step_s = steps.layout(i), int(steps.seq[i]), float(seconds[i])
        tokens, gpus = layout.global_batch * seq_len, layout.world_size
        tflops = tflops_per_gpu(config, seq_len, tokens, step_s, gpus)
        row = {
            "rank": i + 1,
            "gpus": gpus,
            "engine": engine_of(layout.zero_stage, steps.fsdp2[i]),
            **{key: getattr(layout, key) for key in KEYS},
            **{axis: int(getattr(steps, axis)[i]) for axis in EXPERT_AXES if config.experts},
            "fsdp_shard": layout.fsdp_shard,
            "offload": layout.offload if layout.offload != "none" else None,
            "stages": "-".join(map(str, cut[i])) if layout.uneven else None,
            "uneven": layout.uneven,
            "sequence_parallel": "yes" if layout.sequence_parallel else "",
            "predicted_s": step_s,
            "low_s": float(low[i]),
            "high_s": float(high[i]),
            "unknown": [name for name in unknown if unknown[name][i]],
            "tflops": tflops,
            "mfu": ranked.cluster.mfu(tflops, gemms).value,
            "tokens_per_s": tokens / step_s,
            "allocated_gib": float(counted[i]) if np.isfinite(counted[i]) else None,
            "memory_gib": float(used[i] / GIB),
            "tight": "tight" if used[i] > (1 - TIGHT) * ranked.limit else "",
            "bubble": float(terms["bubble"][i] / step_s),
            "communication": float(sent[i] / step_s),
        }
        rows.append(row)
    return rows


def with_hours(planned: Table, tokens: float) -> Table:
    """Returns a table of rows from `rows_of` with the hours and days that the tokens take."""
    for row in planned.rows:
        hours = tokens / row["tokens_per_s"] / 3600
        ends = [hours / 24 * row[key] / row["predicted_s"] for key in ("low_s", "high_s")]
        row |= {"hours": hours, "days": hours / 24, "days_interval": ends}
    columns = [
        *by_key(("hours", "days"), ",.4g"),
        Column("days_interval", "low to high days", ",.4g"),
    ]
    note = f"hours and days: {in_powers(tokens)} tokens in training steps alone, without saves"
    return replace(planned, columns=[*planned.columns, *columns], notes=[*planned.notes, note])


def width_note(rows: list[dict[str, Any]], cluster: Calibration) -> list[str]:
    """Returns a note on the intervals of rows from `rows_of`: how wide the first is, and why; []
    where no row is predicted."""
    first = next((row for row in rows if row["predicted_s"] is not None), None)
    if first is None:
        return []
    low, high = (first[key] / first["predicted_s"] - 1 for key in ("low_s", "high_s"))
    if cluster.fit.n:
        reasons, scale = [f"{cluster.fit.n} runs were fitted"], widths().with_runs
    else:
        reasons, scale = ["no run was fitted (analysis.calibrate)"], widths().without_runs
    # Without a run the model is always new.
    reasons += [UNKNOWN[name] for name in first["unknown"] if cluster.fit.n or name != "model"]
    lines = [
        f"low to high hold 80 %, of the first {low:+.0%} to {high:+.0%}: {'; '.join(reasons)}"
        f" (width: by the errors of {scale.publishers} publishers, each left out)"
    ]
    if (gpus := max(row["gpus"] for row in rows)) > cluster.fit.gpus:
        most, kind = cluster.fit.gpus, "fitted" if cluster.fit.n else "published"
        lines.append(
            f"{gpus} GPUs are more than the {most} of the largest {kind} run: times are"
            f" extrapolated by {np.log2(gpus / most):.1f} doublings, and their intervals are wider"
        )
    return lines


def to_measure(ranked: Ranking, count: int) -> np.ndarray:
    """Returns `count` rows of `best`: the fastest of up to TRIED splits by tp, cp and pp, and the
    fastest others. What the model does not know slows layouts of one split together."""
    steps = ranked.steps
    splits: dict[tuple, int] = {}  # tp, cp and pp -> the row of the fastest layout
    for i in ranked.best.tolist():
        splits.setdefault((steps.tp[i], steps.cp[i], steps.pp[i]), i)
    tried = list(splits.values())[:TRIED]
    untried = [i for i in ranked.best.tolist() if i not in tried]
    return np.array(sorted([*tried, *untried][:count], key=ranked.seconds.__getitem__), int)


def alike_note(ranked: Ranking) -> list[str]:
    """Returns a note on the layouts whose predicted seconds are near the first's, and which of them
    to measure; [] where there is none."""
    near = int(np.sum(ranked.seconds[ranked.best] <= ranked.seconds[ranked.best[:1]] * (1 + NEAR)))
    if near < 2:
        return []
    line = f"{near} layouts are within {NEAR:.0%} of the first: measure some (--study) to choose"
    steps, chosen = ranked.steps, to_measure(ranked, TRIED)
    axes = ("tp", "cp", "pp") if (steps.cp > 1).any() else ("tp", "pp")
    tried = [" ".join(f"{a} {getattr(steps, a)[i]}" for a in axes) for i in chosen]
    *first_ones, last = dict.fromkeys(tried)
    if first_ones:
        line += f", at least the fastest of {', '.join(first_ones)} and {last}"
    taken = steps.take(chosen)
    high = ranked.cluster.fit.interval(
        ranked.seconds[chosen], taken, ranked.cluster.machine_for(taken)
    )[1]
    hours = float(np.sum(STEPS * ranked.seconds[chosen] * taken.gpus)) / 3600
    most = sum(limit_minutes(s) * g for s, g in zip(high, taken.gpus.tolist(), strict=True)) / 60
    cost = f"{STEPS} steps of each of these {len(chosen)} take {hours:,.1f} GPU-hours"
    return [line, f"{cost}, and with their starts at most {most:,.0f} (the study's time limits)"]


def limit_minutes(high_s: float) -> int:
    """Returns the minutes that a planned run may take: twice its steps at the interval's high end,
    and ten for its start and its end."""
    return 10 + int(np.ceil(2 * STEPS * high_s / 60))


def table(rows: list[dict[str, Any]], notes: list[str], no_mfu: str) -> Table:
    """Returns the ranked table of rows from `rows_of`. `no_mfu` says why they have no MFU; "" where
    they have one."""
    numbers = [key for key in KEYS if key not in (*AXES, "recompute")]
    columns = [
        Column("rank", "#", "d"),
        Column("engine", "engine"),
        *axis_columns(rows),
        *(Column(key, HEADINGS.get(key, key), "d") for key in numbers),
        Column("fsdp_shard", "shards", "d", seldom=True),
        Column("offload", "offload", seldom=True),
        Column("stages", "layers of first-middle-last stage", seldom=True),
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
