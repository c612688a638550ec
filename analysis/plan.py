"""Which layouts fit a model on a cluster, how fast each would be, and why the others do not fit.

    python -m analysis.plan --preset 175b --cluster selene --gpus 512 --global-batch 1536
    python -m analysis.plan --preset 1t --cluster selene --gpus 10000 --leave 16 --global-batch 9984
    python -m analysis.plan ... --why tp=8,pp=8,mbs=1
    python -m analysis.plan ... --show megatron [--why tp=8,pp=8]
    python -m analysis.plan ... --study slurm/planned.toml --top 5 [--force]
    python -m analysis.plan ... --scale strong --tokens 2e12

Every split of the GPUs by tp, pp, vpp and dp, every micro-batch, recompute policy, ZeRO stage and
sequence parallelism is tried, and every cp of --cp. All numbers are predicted, not measured; low to
high is the 80 % interval.
A cluster is a name (of analysis/planner/calibrations or slurm/clusters.toml) or a calibration file.
--study writes the fastest layout of three splits, then the fastest others; it refuses to replace a
file, unless --force is given. --show prints the first layout, or that of --why, as Megatron-LM's or
torchtitan's flags, DeepSpeed's JSON or a study of ours. `--top 10000 --format csv` prints every
layout that fits.
"""

import argparse
import sys
from dataclasses import fields, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from analysis.common import convergence
from analysis.common.table import Table, add_table_flags, show
from analysis.planner import explain, networks, pasted, ranking, scale
from analysis.planner.calibration import from_data_sheet, load_calibration
from analysis.planner.columns import MUON
from analysis.planner.networks import NEAR
from analysis.planner.ranking import Question, Ranking
from analysis.planner.space import PLANNED, WIDTHS
from base.bounds import check_flags
from base.errors import Parser, UsageError, command_line, warn
from base.files import add_force_flag
from base.storage import output
from base.units import GIB
from models.config import OVERRIDES, name_of, preset
from models.gpus import PCIE, find_gpu, planning_gpu
from parallel.config import resolve
from parallel.config.clusters import load_clusters
from parallel.config.layout import OFFLOAD

# What a model is made of, as flags; the sequence length that is planned is its number of positions.
MODEL = tuple(name for name in OVERRIDES if name not in ("max_seq_len", "experts"))
SIZES = ("n_layer", "hidden", "n_head", "ffn_hidden", "n_kv_head", "vocab_size", "max_seq_len")
OPTIMIZERS = {"adam": "", "muon": "duplicated"} | {f"muon_{mode}": mode for mode in MUON[2:]}
# Notes below a table.
NOTE_MUON = (
    "Muon: of Megatron-LM alone, for every engine here trains with AdamW; a host that launches many"
    " small matrices takes longer"
)
NOTE_FSDP2 = "fsdp2: no run of it is behind these times"
NOTE_BALANCED = (
    "experts take equally many tokens, as a forced balance gives; all-to-all by Megatron-LM's own"
    " dispatcher; a router that chooses freely may take 10 to 25 % longer"
)
NOTE_RING = "cp ranks send keys and values on in a ring while attention works on the part before"
NOTE_OFFLOAD = (
    "offload: Adam on the host at the 2 GB/s a rank of a V100 node; copies of weights over PCI"
    " Express are not counted; the nodes' hosts must hold about 16 bytes a parameter together"
)
NOTE_FP8_MEMORY = (
    "the layers' GEMMs run in fp8: weights are held in bf16 and twice in fp8 (plain, transposed),"
    " the GEMMs' inputs in fp8, gradients in fp32; a recipe with gradients in bf16 and weights in"
    " fp8 alone (NeMo's) needs 4 bytes a parameter less; no published peak has checked these bytes"
)


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Adds the flags of a plan: the model, the cluster, the GPUs and what to show."""
    add = parser.add_argument
    count = partial(add, type=int, metavar="N")
    sizes = "model sizes by name; the flags below override them (default: 175b)"
    add("--preset", default="175b", metavar="NAME", help=sizes)
    resolve.add_flags(parser, MODEL)
    count("--seq-len", help="tokens per sequence (default: the preset's positions)")
    where = "a calibration or a cluster of clusters.toml (a wrong NAME lists all)"
    add("--cluster", metavar="NAME|FILE", help=where)
    add("--gpu-type", metavar="NAME", help="a card, where there is no cluster")
    count("--gpus-per-node", help="with --gpu-type (default: 8)")
    about = "with --gpu-type (default: its data sheet's)"
    add("--gpu-memory", type=float, metavar="GIB", help=about)
    links = f"PCI Express that joins a node's cards, which have no NVLink: {PCIE}"
    add("--links", metavar="WORDS", help=links)
    count("--gpus", required=True, help="GPUs, all nodes")
    count("--global-batch", required=True, help="sequences")
    precision = "default: bf16; fp16 on a card without; fp32 on a CPU"
    add("--precision", choices=tuple(WIDTHS), help=precision)
    engines = f"engines to plan for (default: {', '.join(PLANNED)})"
    add("--engine", nargs="+", choices=PLANNED, default=PLANNED, help=engines)
    cps = "context-parallel sizes to try (default: 1)"
    add("--cp", type=int, nargs="+", default=[1], metavar="N", help=cps)
    kinds = (
        "adam, or Megatron-LM's Muon by its --muon-tp-mode: muon (duplicated), muon_distributed ..."
    )
    add("--optimizer", choices=OPTIMIZERS, default="adam", help=kinds)
    offloads = f"what may lie in host memory, to try: {', '.join(OFFLOAD)} (default: none)"
    add("--offload", nargs="+", choices=OFFLOAD, default=["none"], help=offloads)
    count("--leave", default=0, help="GPUs that may stay idle")
    ranking.add_flags(parser)
    kinds = "--gpus, half of them ...: the fastest layout of each; weak: half the batch, too"
    add("--scale", choices=("strong", "weak"), help=kinds)
    critical = f"with --scale weak: {convergence.STATES}"
    add("--critical-batch", type=convergence.stated, metavar="B", help=critical)
    near = (
        f"the fastest layout at each rate of the network, and which is needed (within {NEAR:g} %)"
    )
    add("--networks", nargs="?", type=float, const=NEAR, metavar="PERCENT", help=near)
    tokens = "print the hours and days that so many tokens take, as 2e12"
    add("--tokens", type=float, metavar="N", help=tokens)
    count("--top", help="layouts shown (default: 10)")
    add("--why", metavar="LAYOUT", help="explain one: tp=8,pp=8,mbs=1")
    add("--study", type=Path, metavar="FILE", help="write layouts to measure as a study")
    add_force_flag(parser)
    programs = (*pasted.PROGRAMS, "study")
    paste = "print the first layout, or that of --why, as a program's flags or file"
    add("--show", choices=programs, help=paste)


def _check_flags(arguments: argparse.Namespace) -> None:
    """Refuses a number that is out of bounds, and a flag that would be ignored."""
    if bool(arguments.cluster) == bool(arguments.gpu_type):
        raise UsageError("say where: --cluster NAME or --gpu-type NAME, one of them")
    bounded = {*MODEL, "seq_len", "gpus", "global_batch"}
    stated = [(k, v) for k, v in vars(arguments).items() if k in bounded and v is not None]
    for name, value in [*stated, *(("cp", cp) for cp in arguments.cp)]:
        resolve.check_setting(name, value, resolve.COMMAND_LINE)
    check_flags(
        arguments,
        gpus_per_node=(1, 10**9),
        gpu_memory=(1, 10_000),
        leave=(0, 10**9),
        margin=ranking.MARGINS,
        networks=(0.1, 1000),
        tokens=(1, 1e18),
        top=(1, 10_000),
    )
    if arguments.leave >= arguments.gpus:
        raise UsageError(
            f"--leave {arguments.leave} would leave all {arguments.gpus} GPUs idle: give at most"
            f" {arguments.gpus - 1}"
        )
    ignored = [f"--{k}" for k in ("why", "study", "show", "top", "leave") if getattr(arguments, k)]
    if arguments.scale and ignored:
        raise UsageError(f"--scale shows the fastest layout of each count: no {', '.join(ignored)}")
    ignored += [f"--{k}" for k in ("scale", "network", "tokens") if getattr(arguments, k)]
    if arguments.networks is not None and ignored:
        raise UsageError(f"--networks tries every rate of the network: no {', '.join(ignored)}")
    if arguments.critical_batch and arguments.scale != "weak":
        raise UsageError("--critical-batch is of batches that grow: give --scale weak")
    if arguments.why is not None and arguments.study:
        raise UsageError("--why explains one layout: no --study with it")
    if arguments.optimizer != "adam" and (
        arguments.study or arguments.show not in (None, "megatron")
    ):
        raise UsageError(
            f"--optimizer {arguments.optimizer} is planned for Megatron-LM, which --show megatron"
            " writes: every engine of a study trains with AdamW"
        )
    if arguments.show and (arguments.study or arguments.top):
        raise UsageError("--show prints one layout: no --study or --top with it")
    if arguments.study and arguments.study.exists() and not arguments.force:  # edited, maybe
        raise UsageError(f"{arguments.study} exists: name another file, or replace it with --force")
    for flag in ("gpus_per_node", "gpu_memory"):
        if arguments.cluster and getattr(arguments, flag):
            name = flag.replace("_", "-")
            raise UsageError(f"--{name} goes with --gpu-type: a cluster knows its own")


def question(arguments: argparse.Namespace) -> Question:
    """Returns the flags as values of the library."""
    _check_flags(arguments)
    named = {k: v for k, v in resolve.from_flags(arguments).items() if k in MODEL}
    if arguments.seq_len is not None:
        named["max_seq_len"] = arguments.seq_len
    config = preset(arguments.preset, **named)
    if arguments.gpu_type:
        per_node, memory = arguments.gpus_per_node or 8, arguments.gpu_memory
        cluster = from_data_sheet(arguments.gpu_type, per_node, memory_gb=memory)
    else:
        cluster = load_calibration(arguments.cluster)
    cluster = cluster.on_links(arguments.links).on_network(arguments.network, arguments.gpus)
    return Question(
        config=config,
        preset=name_of(config, arguments.preset),
        sizes=named,
        cluster=cluster,
        gpus=arguments.gpus,
        global_batch=arguments.global_batch,
        settings={
            "seq_len": config.max_seq_len,
            "precision": cluster.precision(arguments.precision),
            "flash": arguments.flash,
            "leave": arguments.leave,
            "engines": arguments.engine if arguments.optimizer == "adam" else ("megatron",),
            "cps": sorted(set(arguments.cp)),
            "muon": OPTIMIZERS[arguments.optimizer],
            "offloads": tuple(dict.fromkeys(arguments.offload)),
        },
        margin=arguments.margin,
    )


def answer(arguments: argparse.Namespace) -> Table:
    """Returns the ranked table; files are written as flags say."""
    ask = question(arguments)
    if arguments.scale:
        scaled = scale.table(ask, arguments.scale == "weak", arguments.critical_batch)
        return replace(scaled, notes=[*scaled.notes, _model_and_batch(ask)])
    if arguments.networks is not None:
        swept = networks.table(ask, arguments.networks)
        return replace(swept, notes=[*swept.notes, _model_and_batch(ask)])
    ranked = ask.ranked()
    if not len(ranked.order):
        raise UsageError(ranking.nothing_fits(ranked, ask.config, ask.gpus))
    count = arguments.top or 10
    top = ranking.to_measure(ranked, count) if arguments.study else ranked.best[:count]
    rows = ranking.rows_of(ranked, top, ask.config, ask.gemms)
    if arguments.study:
        _write_study(arguments.study, rows, ask, arguments.cluster or arguments.gpu_type)
    notes = _notes(ask, ranked, rows, arguments)
    return ranking.table(rows, notes, ask.cluster.mfu(1.0, ask.gemms).reason)


def _notes(
    ask: Question, ranked: Ranking, rows: list[dict[str, Any]], arguments: argparse.Namespace
) -> list[str]:
    """Returns the notes on a plan: what was predicted, what was assumed, and what does not fit."""
    cluster, steps, precision = ask.cluster, ranked.steps, ask.settings["precision"]
    flash, card = arguments.flash, arguments.gpu_type
    # The flag or the cluster decides, for all layouts alike.
    attention = "flash" if steps.flash[0] else "unfused"
    notes = [
        f"predicted, not measured, for {cluster.name} ({cluster.source}) in"
        f" {ask.gemms} with {attention} attention",
        *ranking.width_note(rows, cluster),
    ]
    notes += ranking.alike_note(ranked)
    if card and not find_gpu(card):
        name = planning_gpu(card).name
        notes.append(f"--gpu-type {card} may be several cards: {name} is assumed")
    if flash is not None and flash != cluster.flash and cluster.fit.n:
        notes.append(f"no run of this fit had {attention} attention: its time is the model's alone")
    if any(row["engine"] == "fsdp2" for row in rows):
        notes.append(NOTE_FSDP2)
    notes.append(_model_and_batch(ask))
    if ask.preset is None:
        config = ask.config
        sizes = [
            f"{f.name} {value}"
            for f in fields(config)
            if (value := getattr(config, f.name)) != f.default or f.name in SIZES
        ]
        notes.append(f"the model: {', '.join(sizes)}; all else as in GPT-2")
    if precision == "fp8":
        notes.append(NOTE_FP8_MEMORY)
    if any(row["cp"] > 1 for row in rows):
        notes.append(NOTE_RING)
    if ask.settings["muon"]:
        notes.append(NOTE_MUON)
    if any(row["offload"] for row in rows):
        notes.append(NOTE_OFFLOAD)
    if any("ep" in row for row in rows):
        notes.append(NOTE_BALANCED)
    shared = ", shared by the ranks" if cluster.is_host else ""
    return [
        *notes,
        *cluster.links_note(),
        *cluster.network_note(ask.gpus),
        f"{len(ranked.order)} of {len(steps)} possible layouts fit in {ranked.limit / GIB:.1f} GiB"
        f" ({cluster.gpu_memory_gb:.4g} GiB less --margin {ask.margin:g}{shared}); tight: less"
        f" than {ranking.TIGHT:.0%} of that is left",
        *ranking.refusals(ranked),
    ]


def _model_and_batch(ask: Question) -> str:
    """Returns a line: the model, its size, the tokens of a step and the GPUs."""
    model = f"{ask.preset}: " if ask.preset else ""
    return (
        f"{model}{ask.config.n_params / 1e9:.4g}B parameters, {ask.global_batch} sequences of"
        f" {ask.settings['seq_len']} tokens a step, {ask.gpus} GPUs"
    )


def _write_study(path: Path, rows: list[dict[str, Any]], ask: Question, where: str) -> None:
    """Writes the layouts as a study; `where` is the cluster or card as the flags name it."""
    clusters = sorted(load_clusters())
    with output(path, mark="", force=True) as file:
        file.write_text("\n".join(pasted.study(ask, rows, where)) + "\n")
    warn("analysis.plan", f"wrote {len(rows)} runs to {path}")
    if where not in clusters:
        remedy = f"render with --cluster NAME, one of {', '.join(clusters)}"
        warn("analysis.plan", f"{where} is no Slurm cluster: {remedy}")


def shown(ask: Question, program: str, layout: str | None, where: str) -> str:
    """Returns the fastest layout, or the one that a text such as tp=8,pp=8 names, as a program's
    flags or file, under comments that say what it cannot hold."""
    ranked = ask.ranked()
    if layout is None and not len(ranked.order):
        raise UsageError(ranking.nothing_fits(ranked, ask.config, ask.gpus))
    i = ranked.best[0] if layout is None else explain.chosen_row(ranked, layout).row
    [row] = ranking.rows_of(ranked, np.array([i]), ask.config, ask.gemms)
    comments = [
        f"# {_model_and_batch(ask)}",
        f"# {explain.title(ranked.steps, i)}",
        f"# predicted, not measured: {row['predicted_s']:.4g} s per iteration,"
        f" {row['memory_gib']:.1f} of {ranked.limit / GIB:.1f} GiB",
    ]
    if program == "study":
        return "\n".join([*comments, *pasted.study(ask, [row], where)]) + "\n"
    flash = bool(ranked.steps.flash[i])
    planned = pasted.Plan(
        ask.config, ranked.steps.layout(i), row["engine"], ask.gemms, flash, ask.settings["muon"]
    )
    answer = pasted.PROGRAMS[program](planned)
    comments += [f"# not said: {sentence}" for sentence in answer.unsaid]
    return "\n".join([*comments, answer.text]) + "\n"


def explanation(ask: Question, layout: str) -> str:
    """Returns one layout term by term, in words."""
    ranked = ask.ranked()
    i, chosen = explain.chosen_row(ranked, layout)
    fits = ranked.used[i] <= ranked.limit
    verdict = "fits in" if fits else "does NOT fit (nor does any with these settings) in"
    return (
        f"{_model_and_batch(ask)}\n{explain.title(ranked.steps, i)}\n{chosen}"
        f"predicted {ranked.seconds[i]:.4g} s per iteration:\n"
        f"{explain.bars(explain.seconds_of(ranked, i), 's')}"
        f"predicted {ranked.used[i] / GIB:.1f} GiB on the fullest rank,"
        f" {verdict} {ranked.limit / GIB:.1f} GiB:\n"
        f"{explain.bars(ranking.gigabytes(ranked.steps.take([i]), ranked.cluster), 'GiB')}"
    )


@command_line("analysis.plan")
def main(argv: list[str] | None = None) -> int:
    parser = Parser(prog="python -m analysis.plan", description=__doc__)
    add_flags(parser)
    add_table_flags(parser)
    arguments = parser.parse_args(argv)
    if arguments.why is not None or arguments.show:
        if arguments.format != "text" or arguments.columns:
            flag = "--show" if arguments.show else "--why"
            raise UsageError(f"{flag} prints text only: no --format and no --columns with it")
        if arguments.tokens:
            raise UsageError("--why and --show are of one step: no --tokens with them")
        ask, why, where = question(arguments), arguments.why, arguments.cluster
        if arguments.show:
            text = shown(ask, arguments.show, why, where or arguments.gpu_type)
        else:
            text = explanation(ask, why)
        print(text, end="")
    else:
        planned = answer(arguments)
        if arguments.tokens:
            planned = ranking.with_hours(planned, arguments.tokens)
        show([planned], arguments.format, arguments.columns)
    return 0


if __name__ == "__main__":
    sys.exit(main())
