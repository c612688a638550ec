"""Which layouts fit a model on a cluster, how fast each would be, and why the others do not fit.

    python -m analysis.plan --model 175b --cluster selene --gpus 512 --global-batch 1536
    python -m analysis.plan --model 1t --cluster selene --gpus 10000 --leave 16 --global-batch 9984
    python -m analysis.plan ... --why tp=8,pp=8,mbs=1 [--png FILE]
    python -m analysis.plan ... --study slurm/planned.toml --top 5
    python -m analysis.plan ... --scale FILE.png     # efficiency against GPUs, 8 to 16,384

Every split of the GPUs by tp, pp, vpp and dp, every micro-batch, recompute policy, ZeRO stage and
sequence parallelism is tried. What is printed is predicted, not measured; the interval holds 80 %.
A cluster is a name (of analysis/calibrations or slurm/clusters.toml) or a calibration file.
"""

import argparse
import contextlib
import io
import math
import re
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

if not __package__:  # run as a script: find the rooms, not analysis/ itself
    sys.path[0] = str(Path(__file__).resolve().parent.parent)

import numpy as np

from analysis import timemodel
from analysis.calibration import Calibration, fits_of, from_data_sheet, load_calibration
from analysis.fitting import INTERVAL
from analysis.rows import host_columns
from analysis.tables import FORMAT_HELP, FORMATS, Column, Table, emphasise, writing
from models import memory
from models.bounds import Bounds, check_flags
from models.config import PRESETS, GPTConfig, name_of, preset
from models.errors import Parser, UsageError, command_line
from models.flops import tflops_per_gpu
from models.hardware import planning_gpu
from parallel.columns import Columns, columns, possible
from parallel.layout import RECOMPUTE
from parallel.spec import BOUNDS

MARGIN, MARGINS = 0.06, Bounds(0, 1, below=True)  # of memory, left free
WIDTHS = {"fp32": 4, "fp16": 2, "bf16": 2}
KEYS = ("tp", "pp", "vpp", "dp", "micro_batch", "n_micro", "zero_stage", "recompute")
HEADINGS = {  # of the table; --why takes them, too
    "micro_batch": "mbs",
    "n_micro": "micro-batches",
    "zero_stage": "ZeRO",
    "sequence_parallel": "sp",
}
STEPS = 20  # of a planned run
SCALE = tuple(2**i for i in range(3, 15))


def divisors(n: int) -> list[int]:
    """Whole numbers that divide n, ascending."""
    small = [d for d in range(1, math.isqrt(n) + 1) if n % d == 0]
    return small + [n // d for d in reversed(small) if d * d != n]


def engine_of(zero_stage: int) -> str:
    """The engine that a plan means: ZeRO 2 and 3 are DeepSpeed's, all else is Megatron's."""
    return "megatron" if zero_stage < 2 else "deepspeed_zero"


def no_layout(
    config: GPTConfig, gpus: int, global_batch: int, tps: list[int], min_micro: int, leave: int
) -> str:
    """In one line, why no split of the GPUs and the batch exists, and what would."""
    most_dp, tp = global_batch // min_micro, max(tps)
    least = f" with {min_micro} micro-batches or more" if min_micro > 1 else ""
    if not most_dp:
        return f"a global batch of {global_batch} has no {min_micro} micro-batches"
    if gpus - leave > tp * config.n_layer * most_dp:
        return (
            f"{gpus} GPUs are too many for a global batch of {global_batch}{least}: at most tp"
            f" {tp} x pp {config.n_layer} (the layers) x dp {most_dp} ="
            f" {tp * config.n_layer * most_dp}"
        )
    splits = [tp * pp for tp in tps for pp in divisors(config.n_layer)]
    dps = sorted({gpus // split for split in splits if gpus % split == 0})
    batches = [dp * max(global_batch // dp + more, min_micro) for dp in dps for more in (0, 1)]
    near = sorted(set(batches), key=lambda batch: abs(batch - global_batch))[:2]
    shown = ", ".join(map(str, dps if len(dps) < 8 else [*dps[:3], "...", *dps[-2:]]))
    return (
        f"no layout of {gpus} GPUs: the dp that tp and pp leave ({shown}) do not divide a global"
        f" batch of {global_batch}{least}; {' or '.join(map(str, sorted(near)))} would do, or"
        " --leave N for up to N idle GPUs"
    )


def crowd(x: Columns, cluster: Calibration) -> np.ndarray:
    """Ranks per core, (n,): more than 1 only on a host CPU, whose cores count as its GPUs."""
    if cluster.machine_override is None:
        return np.ones(len(x))
    return np.maximum(1.0, x.gpus / cluster.gpus_per_node)


def space(
    config: GPTConfig,
    cluster: Calibration,
    gpus: int,
    global_batch: int,
    seq_len: int,
    precision: str = "bf16",
    flash: bool | None = None,
    max_tp: int | None = None,
    min_micro: int = 1,
    leave: int = 0,
) -> Columns:
    """Every layout of the model on that many GPUs, one row each; impossible ones are left out.

    `leave` GPUs at most stay idle: 10,000 have few divisors, 9,984 have many.

    ZeRO 2 and 3 are DeepSpeed's, which has neither pipeline nor sequence parallelism with them, nor
    selective recomputation.

    Raises:
        UsageError: no split of the GPUs and the batch exists; with the numbers.
    """
    if gpus < 1 or global_batch < 1:
        raise UsageError(f"gpus {gpus} and global batch {global_batch} must be positive")
    if seq_len > config.max_seq_len:
        raise UsageError(f"seq_len {seq_len} exceeds the model's {config.max_seq_len} positions")
    if cluster.max_gpus and gpus > cluster.max_gpus:
        raise UsageError(f"{gpus} GPUs exceed the {cluster.max_gpus} of {cluster.name}")
    most_tp = min(max_tp or cluster.gpus_per_node, cluster.gpus_per_node)
    wholes = (config.n_head, config.ffn_hidden, cluster.gpus_per_node)  # no group over two nodes
    tps = [t for t in divisors(math.gcd(*wholes)) if t <= most_tp]
    dps = divisors(global_batch)[::-1]
    splits = []
    for tp in tps:
        for pp in divisors(config.n_layer):
            most, least = gpus // (tp * pp), -(-(gpus - leave) // (tp * pp))
            dp = next((dp for dp in dps if dp <= most), 0)
            if dp < max(least, 1):
                continue
            for micro in divisors(global_batch // dp):
                n_micro = global_batch // dp // micro
                if n_micro < min_micro:
                    continue
                for vpp in divisors(config.n_layer // pp):
                    if vpp == 1 or (pp > 1 and n_micro % pp == 0):
                        splits.append((tp, pp, vpp, dp, micro, n_micro))
    if not splits:
        raise UsageError(no_layout(config, gpus, global_batch, tps, min_micro, leave))
    table = np.array(splits)
    policies = [
        (recompute, zero, sp)
        for recompute in range(3)
        for zero in range(4)
        for sp in ((0, 1) if zero < 2 else (0,))
        if not (zero > 1 and RECOMPUTE[recompute] == "selective")
    ]
    n, k = len(table), len(policies)
    rows, policy = np.repeat(table, k, axis=0), np.tile(np.array(policies), (n, 1))
    width = WIDTHS[precision]
    kind = {
        "flash": cluster.flash,
        "gpus_per_node": cluster.gpus_per_node,
        "deepspeed": policy[:, 1] > 1,
    }
    if cluster.machine_override is not None:
        engines = [engine_of(stage) for stage in policy[:, 1]]
        kind |= host_columns(engines, rows[:, 0], rows[:, 0] * rows[:, 1] * rows[:, 3])
    if flash is not None:
        kind["flash"] = flash
    x = columns(
        config,
        seq=seq_len,
        tp=rows[:, 0],
        pp=rows[:, 1],
        vpp=rows[:, 2],
        dp=rows[:, 3],
        micro_batch=rows[:, 4],
        n_micro=rows[:, 5],
        recompute=policy[:, 0],
        zero_stage=policy[:, 1],
        sequence_parallel=policy[:, 2] > 0,
        width=width,
        grad_width=4 if precision == "bf16" else width,
        **kind,
    )
    keep = possible(x, config.max_seq_len)
    keep &= ~((x.zero_stage > 1) & (x.pp > 1))  # DeepSpeed: no ZeRO 2 or 3 with its pipeline
    keep &= ~((x.zero_stage > 0) & (x.dp == 1))  # nothing to shard over: the same as stage 0
    return x.take(keep)


def usable_bytes(x: Columns, cluster: Calibration, margin: float) -> float:
    """Bytes that a step may take on the fullest rank; a host's memory is shared by all ranks."""
    ranks = 1 if cluster.machine_override is None else int(x.gpus.max())
    return cluster.gpu_memory_gb * memory.GB * (1.0 - margin) / ranks


def refusals(x: Columns, used: np.ndarray, cluster: Calibration, margin: float) -> list[str]:
    """In words, why layouts do not fit: by tp, at which pp none does, the least that any of them
    needs and its main part."""
    limit = usable_bytes(x, cluster, margin)
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
        part, size = max(_parts(x.take(np.array([least])), cluster).items(), key=lambda p: p[1])
        said.append(
            f"tp {tp} x pp {', '.join(map(str, full))}: all {len(here)} layouts need more than"
            f" {limit / memory.GB:.0f} GB, the least {used[least] / memory.GB:.1f} GB (pp"
            f" {x.pp[least]}, {_name(x, least)}), of it {size:.1f} GB {part}"
        )
    return said


def _parts(x: Columns, cluster: Calibration) -> dict[str, float]:
    """Gigabytes by part on the fullest rank of a single layout."""
    every = [memory.parts(x, stage, cluster.memory) for stage in ("first", "middle", "last")]
    if x.pp[0] < 3:
        every.pop(1)
    fullest = max(every, key=lambda parts: float(sum(parts.values())[0]))
    return {name: float(np.asarray(v).ravel()[0]) / memory.GB for name, v in fullest.items()}


def _name(x: Columns, i: int) -> str:
    words = f"micro-batch {x.micro_batch[i]}, recompute {RECOMPUTE[x.recompute[i]]}"
    return f"{words}, ZeRO {x.zero_stage[i]}" + ", sp" * bool(x.sequence_parallel[i])


def rank(x: Columns, cluster: Calibration, margin: float) -> tuple[np.ndarray, ...]:
    """(seconds, peak bytes, rows that fit from the fastest on)."""
    machine = cluster.machine(int(x.width[0]))
    seconds = cluster.fit.seconds(x, machine) * crowd(x, cluster)
    used = memory.peak(x, cluster.memory)
    fits = np.flatnonzero(used <= usable_bytes(x, cluster, margin))
    return seconds, used, fits[np.argsort(seconds[fits], kind="stable")]


def undominated(x: Columns, used: np.ndarray, order: np.ndarray) -> np.ndarray:
    """The rows of `order` without those that another recompute policy beats in both time and
    memory: under flash, selective recomputes what was never stored."""
    names = ("tp", "pp", "vpp", "dp", "micro_batch", "zero_stage", "sequence_parallel")
    split = zip(*(getattr(x, name)[order].tolist() for name in names), strict=True)
    least: dict[tuple, float] = {}
    kept = []
    for i, key in zip(order.tolist(), split, strict=True):
        if used[i] < least.get(key, math.inf):
            least[key] = used[i]
            kept.append(i)
    return np.array(kept, int)


def rows_of(
    x: Columns, order: np.ndarray, cluster: Calibration, config: GPTConfig
) -> list[dict[str, Any]]:
    """What is printed of the chosen layouts."""
    part = x.take(order)
    machine = cluster.machine(int(x.width[0])).spread(len(order))
    crowded = crowd(part, cluster)
    terms = {
        k: np.broadcast_to(v, (len(order),)) * crowded
        for k, v in timemodel.terms(part, machine, cluster.fit.constants).items()
    }
    seconds = sum(terms.values())
    spread = cluster.fit.spread(part, machine)
    used = memory.peak(part, cluster.memory) / memory.GB
    collectives = timemodel.tensor_parallel(part, machine, cluster.fit.constants)
    tp_s = part.n_micro * collectives * part.layers / part.pp * crowded
    found = []
    for i in range(len(order)):
        layout = part.layout(i)
        tokens = layout.global_batch * int(part.seq[i])
        t = float(seconds[i])
        found.append(
            {
                "rank": i + 1,
                "engine": engine_of(layout.zero_stage),
                **{k: getattr(layout, k) for k in KEYS},
                "sequence_parallel": "yes" if layout.sequence_parallel else "",
                "predicted_s": t,
                "low_s": t * float(np.exp(-INTERVAL * spread[i])),
                "high_s": t * float(np.exp(INTERVAL * spread[i])),
                "tflops": tflops_per_gpu(
                    config, int(part.seq[i]), tokens, t, layout.world_size, "megatron"
                ),
                "memory_gb": float(used[i]),
                "bubble": float(terms["bubble"][i] / t),
                "communication": float(
                    (tp_s[i] + terms["p2p"][i] + terms["data_parallel"][i] + terms["embedding"][i])
                    / t
                ),
            }
        )
    return found


def table(found: list[dict[str, Any]], notes: list[str]) -> Table:
    """The ranked table."""
    columns_ = [Column("rank", "#", "d"), Column("engine", "engine")]
    columns_ += [Column(k, HEADINGS.get(k, k), "" if k == "recompute" else "d") for k in KEYS]
    columns_ += [
        Column("sequence_parallel", HEADINGS["sequence_parallel"]),
        Column("predicted_s", "predicted s/iter", "#.4g"),
        Column("low_s", "low", "#.4g"),
        Column("high_s", "high", "#.4g"),
        Column("tflops", "TFLOP/s/GPU", "#.4g"),
        Column("memory_gb", "GB", ".1f"),
        Column("bubble", "bubble", ".1%"),
        Column("communication", "communication", ".1%"),
    ]
    return Table(columns_, found, notes=notes)


WORDS = {
    "recompute": {name: i for i, name in enumerate(RECOMPUTE)},
    "sequence_parallel": {"yes": 1, "no": 0, "1": 1, "0": 0},
}


def parse_layout(text: str) -> dict[str, int]:
    """Numbers of a text such as tp=8,pp=8,mbs=1; names as in the table or in a study.

    Raises:
        UsageError: an unknown name or a value that is none.
    """
    known = {*KEYS, "sequence_parallel"}
    by_heading = {heading.lower(): key for key, heading in HEADINGS.items()}
    wanted = {}
    for piece in filter(None, re.split(r"[,\s]+", text)):
        name, _, value = piece.partition("=")
        key = by_heading.get(name.lower(), name)
        if key not in known:
            raise UsageError(f"--why: unknown {key!r}; known: {', '.join(sorted(known))}")
        words = WORDS.get(key, {})
        if value in words:
            wanted[key] = words[value]
        elif value.isdecimal() and value.isascii() and key != "recompute":
            wanted[key] = int(value)
        else:
            allowed = ", ".join(words) or "a whole number"
            raise UsageError(f"--why: {key} cannot be {value!r}, only {allowed}")
    return wanted


def _word(key: str, value: int) -> str:
    return next((word for word, v in WORDS.get(key, {}).items() if v == value), str(int(value)))


def why(
    x: Columns, seconds: np.ndarray, used: np.ndarray, wanted: dict[str, int], limit: float
) -> int:
    """The fastest row that has the wanted settings and fits; if none fits, the fastest.

    Raises:
        UsageError: no layout has them.
    """
    match = np.ones(len(x), bool)
    for key, value in wanted.items():
        match &= getattr(x, key) == value
    rows = np.flatnonzero(match)
    if not len(rows):
        said = ", ".join(f"{k} {_word(k, v)}" for k, v in wanted.items())
        values = {k: sorted(set(getattr(x, k).tolist())) for k in wanted}
        there = "; ".join(
            f"{k} {', '.join(_word(k, v) for v in found)}" for k, found in values.items()
        )
        raise UsageError(f"--why: no possible layout has {said}; there are: {there}")
    if (used[rows] <= limit).any():
        rows = rows[used[rows] <= limit]
    return int(rows[np.argmin(seconds[rows])])


def explained(x: Columns, i: int, cluster: Calibration) -> tuple[dict, dict]:
    """(seconds by term, gigabytes by part) of one layout; compute is told apart."""
    one = x.take(np.array([i]))
    machine = cluster.machine(int(x.width[0]))
    c = cluster.fit.constants
    crowded = crowd(one, cluster)
    terms = {
        k: float(np.ravel(v * crowded)[0]) for k, v in timemodel.terms(one, machine, c).items()
    }
    collectives = timemodel.tensor_parallel(one, machine, c) * one.layers / one.pp * one.n_micro
    collectives = collectives * crowded
    tp_s = min(float(np.ravel(collectives)[0]), terms["compute"])
    split = {"kernels": terms.pop("compute") - tp_s, "tensor parallel": tp_s} | terms
    return split, _parts(one, cluster)


def bars(values: dict[str, float], unit: str, width: int = 40) -> str:
    """One bar a line, longest first."""
    total = sum(values.values())
    longest = max(*values.values(), 1e-12)
    lines = [
        f"  {name.replace('_', ' '):<16} {value:>9.4g} {unit} {value / total:>5.1%}"
        f" {'#' * round(width * value / longest)}"
        for name, value in sorted(values.items(), key=lambda item: -item[1])
        if value > 0
    ]
    return "\n".join([*lines, f"  {'sum':<16} {total:>9.4g} {unit}"]) + "\n"


def bars_png(time: dict[str, float], gigabytes: dict[str, float], title: str, path: Path) -> None:
    """The same two bar charts as a picture."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, 2, figsize=(11, 4))
    for axis, values, unit in zip(axes, (time, gigabytes), ("s", "GB"), strict=True):
        ordered = sorted(values.items(), key=lambda item: item[1])
        axis.barh([k for k, _ in ordered], [v for _, v in ordered], color="tab:blue")
        axis.set_xlabel(f"predicted {unit}, sum {sum(values.values()):.4g} {unit}")
    figure.suptitle(title)
    figure.tight_layout()
    with writing(path):
        figure.savefig(path, dpi=120)
    pyplot.close(figure)


def scale(
    config: GPTConfig, cluster: Calibration, per_gpu: float, settings: dict[str, Any], margin: float
) -> list[dict[str, Any]]:
    """The best layout at each power of two of GPUs from 8 to 16,384, the batch growing with them
    (weak scaling): efficiency is TFLOP/s per GPU over the best of all sizes."""
    found = []
    for gpus in SCALE:
        batch = max(1, round(per_gpu * gpus))
        try:
            x = space(config, cluster, gpus, batch, **settings)
        except UsageError:
            continue
        _, _, order = rank(x, cluster, margin)
        if len(order):
            best = rows_of(x, order[:1], cluster, config)[0]
            found.append({"gpus": gpus, "global_batch": batch} | best)
    top = max((row["tflops"] for row in found), default=1.0)
    return [row | {"efficiency": row["tflops"] / top} for row in found]


def time_limit(high_s: float) -> str:
    """A Slurm limit for a planned run, H:MM:SS: twice its steps at the interval's high end, and ten
    minutes to start and to end."""
    minutes = 10 + math.ceil(2 * STEPS * high_s / 60)
    return f"{minutes // 60}:{minutes % 60:02}:00"


def study_toml(
    found: list[dict[str, Any]],
    model: dict[str, Any],
    gpus: int,
    global_batch: int,
    seq_len: int,
    precision: str,
    cluster: str | None,
) -> str:
    """The layouts as a study file: what `parallel.study` reads and `slurm.render` renders."""
    lines = [
        "# Written by: python -m analysis.plan --study. Times in it are predicted, not measured.",
        'question = "Are these layouts as fast as predicted?"',
    ]
    if cluster:
        lines.append(f'cluster = "{cluster}"')
    settings = model | {
        "gpus": gpus,
        "global_batch": global_batch,
        "seq_len": seq_len,
        "precision": precision,
        "steps": STEPS,
        "eval_steps": 0,
    }
    lines += ["", "[defaults]"]
    lines += [f'{k} = "{v}"' if isinstance(v, str) else f"{k} = {v}" for k, v in settings.items()]
    for row in found:
        lines += [
            "",
            f"[[run]] # predicted {row['predicted_s']:.4g} s, {row['memory_gb']:.1f} GB",
            f'engine = "{row["engine"]}"',
        ]
        lines += [f"{k} = {row[k]}" for k in ("tp", "pp", "vpp", "micro_batch", "zero_stage")]
        lines.append(f'recompute = "{row["recompute"]}"')
        if row["sequence_parallel"]:
            lines.append("sequence_parallel = true")
        lines.append(f'label = "plan{row["rank"]}"')
        lines.append(f'slurm = {{ time = "{time_limit(row["high_s"])}" }}')
    return "\n".join(lines) + "\n"


def _config(arguments: argparse.Namespace) -> tuple[GPTConfig, dict[str, Any]]:
    """(model, its settings in a study)."""
    sizes = {
        "n_layer": arguments.n_layer,
        "hidden": arguments.hidden,
        "n_head": arguments.n_head,
        "vocab_size": arguments.vocab_size,
        "max_seq_len": arguments.seq_len,
    }
    given = {k: v for k, v in sizes.items() if v is not None}
    config = preset(arguments.model, **sizes)
    if (name := name_of(config, arguments.model)) is None:
        return config, asdict(config)  # a size of its own, under nobody's name
    rest = {k: v for k, v in given.items() if v != getattr(PRESETS[name], k)}
    return config, {"preset": name} | rest


def rendered(argv: list[str]) -> str:
    """What the command prints, for reports.

    Raises:
        UsageError: it refuses.
    """
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        status = main(argv)
    if status:
        raise UsageError(err.getvalue().strip())
    return out.getvalue()


@command_line("analysis.plan")
def main(argv: list[str] | None = None) -> int:
    """Plan, print."""
    parser = Parser(
        prog="python -m analysis.plan",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--model", default="175b", metavar="PRESET", help="models/config.py")
    for size in ("n-layer", "hidden", "n-head", "vocab-size", "seq-len"):
        parser.add_argument(f"--{size}", type=int, metavar="N", help="overrides the preset's")
    parser.add_argument("--cluster", metavar="NAME|FILE", help="a wrong NAME lists all")
    parser.add_argument("--gpu", metavar="NAME", help="a card, where there is no cluster")
    parser.add_argument("--gpus-per-node", type=int, metavar="N", help="of --gpu (8)")
    parser.add_argument("--gpus", type=int, required=True, metavar="N")
    parser.add_argument("--global-batch", type=int, required=True, metavar="N", help="sequences")
    parser.add_argument(
        "--precision", choices=tuple(WIDTHS), help="bf16; fp16 on a card without; fp32 on a CPU"
    )
    parser.add_argument("--flash", action=argparse.BooleanOptionalAction, help="flash attention")
    parser.add_argument("--max-tp", type=int, metavar="N", help="a node's GPUs")
    parser.add_argument("--min-micro-batches", type=int, default=1, metavar="N", help="a step")
    parser.add_argument("--leave", type=int, default=0, metavar="N", help="GPUs that may stay idle")
    parser.add_argument("--margin", type=float, default=MARGIN, help="of memory left free (0.06)")
    parser.add_argument("--top", type=int, default=10, metavar="N", help="layouts shown (10)")
    parser.add_argument("--why", metavar="LAYOUT", help="explain one: tp=8,pp=8,mbs=1")
    parser.add_argument("--png", type=Path, metavar="FILE", help="of --why")
    parser.add_argument("--study", type=Path, metavar="FILE", help="write the top as a study")
    parser.add_argument(
        "--scale", type=Path, metavar="FILE", help="efficiency over GPUs; a PNG, or -"
    )
    parser.add_argument("--format", choices=FORMATS, default="text", help=FORMAT_HELP)
    arguments = parser.parse_args(argv)
    return _plan(arguments)


def _check_flags(arguments: argparse.Namespace) -> None:
    """Raises: UsageError: a number out of its bounds, or a flag that would be ignored."""
    settings = ("n_layer", "hidden", "n_head", "vocab_size", "seq_len", "gpus", "global_batch")
    check_flags(
        arguments,
        **{name: BOUNDS[name] for name in settings},
        gpus_per_node=(1, 10**9),
        max_tp=BOUNDS["tp"],
        min_micro_batches=BOUNDS["grad_accum"],
        leave=(0, 10**9),
        margin=MARGINS,
        top=(1, 10_000),
    )
    if arguments.png and arguments.why is None:
        raise UsageError("--png draws one layout: say which with --why (or take --scale FILE.png)")
    if arguments.why is not None and arguments.format != "text":
        raise UsageError(f"--why prints text only, no {arguments.format}")
    if arguments.why is not None and (arguments.scale or arguments.study):
        raise UsageError("--why explains one layout: no --scale and no --study with it")
    if arguments.cluster and arguments.gpus_per_node:
        raise UsageError("--gpus-per-node goes with --gpu: a cluster knows its own")


def _precision(wanted: str | None, cluster: Calibration) -> str:
    """What to plan in: bf16 where the card has it, else fp16; fp32 on a host CPU.

    Raises:
        UsageError: bf16 on a card without it, or what a host was not measured in.
    """
    if cluster.machine_override is not None:
        if wanted not in (None, "fp32"):
            raise UsageError(f"{cluster.name} was measured in fp32 alone: --precision fp32")
        return "fp32"
    card = planning_gpu(cluster.gpu)
    if "bf16" in card.peaks:
        return wanted or "bf16"
    if wanted == "bf16":
        raise UsageError(f"the {card.name} of {cluster.name} has no bf16: --precision fp16 or fp32")
    return wanted or "fp16"


def _plan(arguments: argparse.Namespace) -> int:
    if bool(arguments.cluster) == bool(arguments.gpu):
        raise UsageError("say where: --cluster NAME or --gpu NAME, one of them")
    _check_flags(arguments)
    config, model = _config(arguments)
    if arguments.gpu:
        cluster = from_data_sheet(arguments.gpu, arguments.gpus_per_node or 8)
    else:
        cluster = load_calibration(arguments.cluster)
    seq_len = arguments.seq_len or config.max_seq_len
    precision = _precision(arguments.precision, cluster)
    settings = {
        "seq_len": seq_len,
        "precision": precision,
        "flash": arguments.flash,
        "max_tp": arguments.max_tp,
        "min_micro": arguments.min_micro_batches,
        "leave": arguments.leave,
    }
    x = space(config, cluster, arguments.gpus, arguments.global_batch, **settings)
    seconds, used, order = rank(x, cluster, arguments.margin)
    limit = usable_bytes(x, cluster, arguments.margin)
    if arguments.why is not None:
        return _explain(arguments, x, seconds, used, cluster, config)
    if not len(order):
        least = int(np.argmin(used))
        raise UsageError(
            f"{config.n_params / 1e9:.1f}B parameters do not fit on {arguments.gpus} GPUs of"
            f" {limit / memory.GB:.1f} GB: the least of {len(x)} layouts needs"
            f" {used[least] / memory.GB:.1f} GB (tp {x.tp[least]}, pp {x.pp[least]},"
            f" {_name(x, least)})"
        )
    best = undominated(x, used, order)
    found = rows_of(x, best[: arguments.top], cluster, config)
    flying = "flash" if x.flash[0] else "unfused"
    notes = [
        f"predicted, not measured, for {cluster.name} ({cluster.source}) in {precision} with"
        f" {flying} attention; low to high hold 80 %",
        *_warnings(arguments, cluster),
        *_assumed(arguments, config),
        f"{len(order)} of {len(x)} possible layouts fit in {limit / memory.GB:.1f} GB",
        *refusals(x, used, cluster, arguments.margin),
    ]
    if arguments.study:
        known = arguments.cluster if arguments.cluster in _slurm_clusters() else None
        text = study_toml(
            found,
            model,
            arguments.gpus,
            arguments.global_batch,
            seq_len,
            precision,
            known,
        )
        before = " in place of what was there" * arguments.study.exists()
        with writing(arguments.study):
            arguments.study.write_text(text)
        print(
            f"analysis.plan: wrote {len(found)} runs to {arguments.study}{before}", file=sys.stderr
        )
        if known is None:
            where = arguments.cluster or arguments.gpu
            print(
                f"analysis.plan: {where} is no Slurm cluster: render with --cluster NAME, one of"
                f" {', '.join(sorted(_slurm_clusters()))}",
                file=sys.stderr,
            )
    if arguments.scale:
        share = arguments.global_batch / arguments.gpus
        curve = scale(config, cluster, share, settings, arguments.margin)
        if str(arguments.scale) != "-":
            from analysis.plots import planned

            title = f"{config.n_params / 1e9:.0f}B on {cluster.name}"
            with writing(arguments.scale):
                planned(curve, title).savefig(arguments.scale, dpi=144)
        columns_ = [Column("gpus", "GPUs", "d"), Column("global_batch", "global batch", "d")]
        columns_ += [Column(k, HEADINGS.get(k, k), "d") for k in ("tp", "pp", "dp", "micro_batch")]
        columns_ += [
            Column("predicted_s", "predicted s/iter", "#.4g"),
            Column("tflops", "predicted TFLOP/s/GPU", "#.4g"),
            Column("efficiency", "predicted efficiency", ".1%"),
        ]
        notes = [
            "predicted efficiency: TFLOP/s/GPU over the best size's; the batch grows with the GPUs"
            f" ({share:g} sequences each), which is weak scaling"
        ]
        print(Table(columns_, curve, notes=notes).render(arguments.format), end="")
        return 0
    text = table(found, notes).render(arguments.format)
    print(emphasise(text) if arguments.format == "text" else text, end="")
    return 0


def _assumed(arguments: argparse.Namespace, config: GPTConfig) -> list[str]:
    """Which sizes are the preset's, where the blocks that were given are not."""
    if name_of(config, arguments.model) is not None:
        return []
    given = {k for k in asdict(config) if getattr(arguments, k, None) is not None}
    given |= {"max_seq_len"} if arguments.seq_len else set()
    given |= {"ffn_hidden"} if arguments.hidden else set()  # 4 x hidden
    rest = [f"{k} {v}" for k, v in asdict(config).items() if k not in given]
    size = f"{config.n_params / 1e9:.1f}B parameters"
    return (
        [f"{size}; not given, so taken from {arguments.model}: {', '.join(rest)}"] if rest else []
    )


def _warnings(arguments: argparse.Namespace, cluster: Calibration) -> list[str]:
    """What the fit behind a plan has not seen, in words."""
    said = []
    if arguments.flash is not None and arguments.flash != cluster.flash and cluster.fit.n:
        other = "flash" if arguments.flash else "unfused"
        said.append(f"no run of this fit had {other} attention: its time is the model's alone")
    if not cluster.fit.n and (fits := fits_of(cluster.gpu)):
        said.append(f"a fit of this card exists: {', '.join(fits)}")
    return said


def _slurm_clusters() -> set[str]:
    from parallel.clusters import load_clusters

    return set(load_clusters())


def _explain(arguments, x, seconds, used, cluster, config) -> int:
    limit = usable_bytes(x, cluster, arguments.margin)
    i = why(x, seconds, used, parse_layout(arguments.why), limit)
    time, gigabytes = explained(x, i, cluster)
    verdict = (
        "fits in" if used[i] <= limit else "does NOT fit (nor does any with these settings) in"
    )
    layout = x.layout(i)
    title = (
        f"{engine_of(layout.zero_stage)}: tp {layout.tp} pp {layout.pp} vpp {layout.vpp} dp"
        f" {layout.dp}, {_name(x, i)},"
        f" {layout.n_micro} micro-batches"
    )
    print(f"{title}\npredicted {seconds[i]:.4g} s per iteration:")
    print(bars(time, "s"), end="")
    print(
        f"predicted {used[i] / memory.GB:.1f} GB on the fullest rank, {verdict}"
        f" {limit / memory.GB:.1f} GB:"
    )
    print(bars(gigabytes, "GB"), end="")
    if arguments.png:
        bars_png(time, gigabytes, f"{title} (predicted)", arguments.png)
    return 0


if __name__ == "__main__":
    sys.exit(main())
