r"""Build and train a step of any rank of any run on this machine, without its memory.

    python -m parallel.rehearse --study slurm/parity.toml --run-name megatron-tp2-pp2-dp2
    python -m parallel.rehearse --study slurm/parity.toml          # every run of the study
    python -m parallel.rehearse --engine megatron --preset 175b --gpus 512 --tp 8 --pp 8 \
        --micro-batch 1 --global-batch 512 --zero-stage 1 --precision bf16 --rank all-stages
    python -m parallel.rehearse ... --rank worst --format json

The engine's own code runs with tensors that have shapes but no storage, as one rank of the run. The
command prints its messages, and what that rank holds at its peak, beside what the formulas of
parallel/config/memory.py say. The exit status is 1 when a rank could not
train its step or needs more memory than the cluster's card has.
"""

import contextlib
import gc
import importlib
import io
import json
import logging
import multiprocessing
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Iterable
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import NamedTuple

from base.errors import Parser, UsageError, command_line, warn
from base.units import GIB
from models.gpus import Gpu, card_memory, find_gpu, lacking, planning_gpu
from parallel.config import clusters, memory
from parallel.config.engine_abilities import ENGINES
from parallel.config.layout_arrays import columns_of
from parallel.config.run_spec import RunSpec
from parallel.config.settings import add_flags, from_flags
from parallel.config.study import choose_runs
from parallel.record.launch import Launch
from parallel.train import set_environment

# What a rank's bytes are: parallel/measure/rehearsal.py sorts them.
KINDS = ("weights", "gradients", "optimizer", "activations", "logits", "buffers", "temporary")


@dataclass
class Rehearsal:
    """One rank's. error: why the step could not be trained, and where, or "". peak: kind -> bytes.
    messages: axis -> (calls, bytes). seconds: what the rehearsal itself took of a core."""

    rank: int
    stage: int
    micro_batches: int = 0
    parameters: int = 0
    peak: dict[str, int] = field(default_factory=dict)
    messages: dict[str, tuple[int, float]] = field(default_factory=dict)
    seconds: float = 0.0
    error: str = ""


class Comparison(NamedTuple):
    """A number of the rehearsal beside the formula's, which may be None."""

    what: str
    rehearsed: float
    formula: float | None


def shortened(spec: RunSpec, stage: int) -> RunSpec:
    """The run with as many micro-batches a step as the peak of memory of this stage needs: those in
    flight, and one that adds to gradients that are there already. Experts have as many tokens
    each: no number is computed that a router could choose by."""
    layout, n = spec.layout, 2
    if layout.pp > 1:
        n = 2 * layout.pp if layout.vpp > 1 else max(3, layout.pp - stage + 1)
    n = min(layout.n_micro, n)
    spec = replace(spec, moe_router_force_load_balancing=bool(spec.model.experts))
    return replace(spec, grad_accum=n, global_batch=layout.dp * spec.micro_batch * n, device="cpu")


def import_libraries(specs: Iterable[RunSpec]) -> None:
    """Import what the engines of `specs` import, once for all rehearsals of this process."""
    set_environment(RunSpec(device="cpu", threads=1), Launch(0, 1, 0, 1, "none"))
    warnings.simplefilter("ignore")  # of the libraries: what they miss is what no GPU machine lacks
    logging.getLogger("megatron.core").setLevel(logging.ERROR)
    for engine in sorted({spec.engine for spec in specs}):
        importlib.import_module(ENGINES[engine].module)
    # After the engines: they redirect torch's factories, which the rehearsal redirects again.
    importlib.import_module("parallel.measure.rehearsal")


def unrehearsed(spec: RunSpec) -> str:
    """Why no rank of a run is rehearsed, though it may train; "" where each can be."""
    is_auto_ep = spec.engine == "deepspeed_zero" and spec.ep > 1
    return "DeepSpeed's AutoEP needs the numbers of tokens" if is_auto_ep else ""


def rehearse_apart(spec: RunSpec, rank: int) -> Rehearsal:
    """`rehearse` in a fork of this process, because libraries keep their process groups."""
    with ProcessPoolExecutor(1, multiprocessing.get_context("fork")) as fork:
        try:
            return fork.submit(rehearse, spec, rank).result()
        except BrokenProcessPool:
            why = "its process was killed; this machine may be out of memory"
            return Rehearsal(rank, spec.layout.coords(rank)["pp"], error=why)


def rehearse(spec: RunSpec, rank: int) -> Rehearsal:
    """Rehearse one rank of a run, in this process, which must not have done it before."""
    stage = spec.layout.coords(rank)["pp"]
    began, spec = time.process_time(), shortened(spec, stage)
    rehearsal = Rehearsal(rank, stage, spec.layout.n_micro)
    try:
        with contextlib.redirect_stdout(io.StringIO()), tempfile.TemporaryDirectory() as aside:
            _train_step(spec, rank, Path(aside), rehearsal)
    except Exception as error:  # whatever the engine or a library raised is the finding
        ours = [f for f in traceback.extract_tb(error.__traceback__) if "/parallel/" in f.filename]
        lines = str(error).strip().splitlines() or [""]
        where = f"{Path(ours[-1].filename).name}:{ours[-1].lineno}" if ours else "a library"
        rehearsal.error = f"{type(error).__name__}: {lines[0]} (at {where})"
    rehearsal.seconds = time.process_time() - began
    return rehearsal


def _train_step(spec: RunSpec, rank: int, aside: Path, rehearsal: Rehearsal) -> None:
    layout = spec.layout
    set_environment(spec, Launch(rank, layout.world_size, 0, 1, "none"))
    import torch

    from parallel import engines
    from parallel.measure import ranges, step_parts
    from parallel.measure.rehearsal import HOST, Memory, without_storage

    device = torch.device("cpu")
    gc.freeze()  # what is there already is not looked through again for parameters and garbage
    held = Memory(spec.padded_vocab // layout.tp, bool(spec.model.experts))
    if spec.engine.startswith("deepspeed"):
        from parallel import rehearsed_deepspeed

        rehearsed_deepspeed.redirect(spec, lambda tensor: held.mark(tensor, HOST))
    if spec.te_alone:
        from parallel import rehearsed_transformer_engine

        rehearsed_transformer_engine.redirect(spec, held.mark)
    with without_storage(rank, layout.world_size), held:
        messages = step_parts.start(replace(spec, breakdown=True), device, rank, aside)
        engine = engines.load(spec, device, "torch", draws=False)
        rehearsal.parameters = held.mark_engine(engine, layout.offload)
        # Where it has seen a micro-batch, ZeRO-3 gathers ahead and keeps what it needs again.
        steps = 2 if layout.zero_stage == 3 and layout.n_micro == 1 else 1
        ranges.listeners.append(held)
        shape = (spec.micro_batch, spec.seq_len)
        for _ in range(steps):
            held.restart()
            messages.forget()
            tokens = (torch.zeros(shape, dtype=torch.int64) for _ in range(2 * layout.n_micro))
            engine.step(zip(tokens, tokens, strict=True), spec.lr, stop=bool)
    rehearsal.peak = {kind: size for kind, size in held.peak.items() if size and kind != HOST}
    for axis, size, _ in messages.messages:
        calls, total = rehearsal.messages.get(axis, (0, 0.0))
        rehearsal.messages[axis] = (calls + 1, total + size)


# --- beside the formulas -------------------------------------------------------------------------

# The rows of memory: the kinds of parallel/measure/rehearsal.py, of parallel/config/memory.py.
_PARTS = {
    "weights": ("weights", "fp8_copies"),
    "gradients": ("gradients",),
    "optimizer": ("optimizer",),
    "activations": ("activations", "logits", "masks"),
    "other": ("buffers", "temporary", "buckets", "keys_and_values"),
}


def memory_by_formula(spec: RunSpec, stage: int) -> dict[str, float]:
    """Bytes of the peak of a rank of a pipeline stage, by part of `memory.parts`: its tensors
    alone, of the kernels that a rehearsal runs. Those of experts and latent attention are
    counted on GPUs alone (memory.allocated)."""
    if spec.model.parts:
        return {}
    at = {spec.layout.pp - 1: "last", 0: "first"}.get(stage, "middle")
    x = columns_of(spec, flash=True, dropout=False)  # torch's fused attention in every engine
    return {part: float(size[0]) for part, size in memory.parts(x, at, tensors_alone=True).items()}


def memory_rows(spec: RunSpec, stage: int, peak: dict[str, int]) -> list[Comparison]:
    """A rank's peak in bytes, part by part; the last row is their sum."""
    formula = memory_by_formula(spec, stage)
    rows = [
        Comparison(part, *(float(sum(of.get(k, 0) for k in kinds)) for of in (peak, formula)))
        for part, kinds in _PARTS.items()
    ]
    rows.append(Comparison("peak", float(sum(peak.values())), sum(formula.values())))
    return [row if formula else row._replace(formula=None) for row in rows]


def comparison(spec: RunSpec, rehearsal: Rehearsal) -> list[Comparison]:
    """A rank's bytes at its peak, and the messages of the rehearsed micro-batches."""
    rows = [
        Comparison(f"{part} GiB", size / GIB, formula if formula is None else formula / GIB)
        for part, size, formula in memory_rows(spec, rehearsal.stage, rehearsal.peak)
    ]
    for axis, (calls, size) in sorted(rehearsal.messages.items()):
        if axis != "control":
            rows.append(Comparison(f"{axis} calls", calls, None))
            rows.append(Comparison(f"{axis} GiB", size / GIB, None))
    return rows


def printed(name: str, spec: RunSpec, rehearsal: Rehearsal, details: bool) -> str:
    """A rank's rehearsal as a line; with details the table of `comparison` below it."""
    where = f"{name}, rank {rehearsal.rank} (stage {rehearsal.stage} of {spec.pp})"
    if rehearsal.error:
        return f"{where} could not train a step: {rehearsal.error}"
    peak = memory_rows(spec, rehearsal.stage, rehearsal.peak)[-1]
    sizes = f"{peak.rehearsed / GIB:.2f} GiB at the peak"
    if peak.formula is not None:
        sizes += f", {peak.formula / GIB:.2f} by formula"
    lines = [f"{where} trains a step: {sizes}"]
    if not details:
        return lines[0]
    lines += [
        f"  {rehearsal.parameters:,} parameters, {rehearsal.micro_batches} of"
        f" {spec.layout.n_micro} micro-batches, {rehearsal.seconds:.0f} s of a core",
        f"  {'':20}{'rehearsed':>12}{'formula':>12}{'difference':>12}",
    ]
    for what, size, formula in comparison(spec, rehearsal):
        beside = "-" if formula is None else f"{formula:.4g}"
        difference = f"{size / formula - 1:+.1%}" if formula else "-"
        lines.append(f"  {what:20}{size:>12.4g}{beside:>12}{difference:>12}")
    if spec.engine == "ddp" and spec.layout.dp > 1:
        lines.append("  dp is 0: the reducer of DistributedDataParallel is not rehearsed")
    if spec.model.experts:
        lines.append("  each expert has as many tokens as the others, as with a forced balance")
    return "\n".join(lines)


def card_gb_of(cluster: clusters.Cluster | None) -> float | None:
    """GiB of a cluster's GPU; None where it is not known or there is none."""
    return cluster.gpu_memory_gb if cluster and cluster.gpu else None


def card_of(name: str, cluster: str | None, runs: dict[str, RunSpec]) -> Gpu:
    """The card of --gpu-type. Raises: UsageError: none, a cluster beside it, or a format lacks."""
    if cluster:
        raise UsageError("say where: --cluster NAME or --gpu-type NAME, one of them")
    card = planning_gpu(name)
    if find_gpu(name) is None:
        print(f"--gpu-type {name} may be several cards: {card.name} is assumed", file=sys.stderr)
    for run, spec in runs.items():
        if lacks := lacking(spec.formats, card.name):
            raise UsageError(f"{run}: the {card.name} has no {' and no '.join(lacks)}")
    return card


def too_much(rank: int, stage: int, peak: dict[str, int], card_gb: float | None) -> str:
    """Why a rank's peak does not fit on its card; "" when it fits or the card is not known."""
    tensors = sum(peak.values())
    staying = sum(peak.get(kind, 0) for kind in ("weights", "gradients", "optimizer", "buffers"))
    taken = memory.taken(tensors, tensors - staying)
    if card_gb is None or taken <= memory.usable(card_gb):
        return ""
    return (
        f"rank {rank} (stage {stage}) does not fit: its tensors take {tensors / GIB:.1f} GiB, with"
        f" CUDA, NCCL and the allocator about {taken / GIB:.1f}, and a step may use"
        f" {memory.usable(card_gb) / GIB:.1f} of the card's {card_gb:g}"
    )


def ranks_of(spec: RunSpec, asked: str) -> list[int]:
    """The ranks that --rank names; of a stage, the first.

    Raises:
        UsageError: neither a word of --help nor numbers of ranks.
    """
    last, world = spec.pp - 1, spec.layout.world_size
    stages = {"all-stages": range(spec.pp), "first-and-last": {0, last}}
    if asked == "worst" and spec.model.experts:
        raise UsageError(f"--rank worst is by formula, and {spec.name} has experts: all-stages")
    if asked == "worst":  # by formula; of the middle stages, the first holds the most micro-batches
        some = sorted({0, min(1, last), last})
        peaks = [sum(memory_by_formula(spec, stage).values()) for stage in some]
        stages["worst"] = [some[peaks.index(max(peaks))]]
    if asked in stages:
        return [stage * (world // spec.pp) for stage in sorted(stages[asked])]
    numbers = asked.split(",")
    if not all(number.isdecimal() and int(number) < world for number in numbers):
        raise UsageError(
            "--rank must be first-and-last, all-stages, worst or numbers with commas, not"
            f" {asked!r}: the ranks of {spec.name} are 0 to {world - 1}"
        )
    return sorted(set(map(int, numbers)))


@command_line("parallel.rehearse")
def main(argv: list[str] | None = None) -> int:
    parser = Parser(prog="python -m parallel.rehearse", description=__doc__)
    parser.add_argument("--study", type=Path, metavar="TOML", help="a study file ...")
    parser.add_argument(
        "--run-name", dest="runs", nargs="+", metavar="NAME", help="... and its runs (default: all)"
    )
    parser.add_argument("--cluster", metavar="NAME", help="the cluster whose card it must fit")
    parser.add_argument("--gpu-type", metavar="NAME", help="a card, where there is no cluster")
    about = "first-and-last (stage), all-stages, worst (by formula), or numbers with commas"
    parser.add_argument("--rank", default="first-and-last", metavar="RANKS", help=about)
    parser.add_argument("--format", choices=("text", "json"), default="text", help="how to print")
    add_flags(parser)
    arguments = parser.parse_args(argv)
    choice = choose_runs(arguments.study, arguments.runs, from_flags(arguments), arguments.cluster)
    runs, card_gb = choice.runs, card_gb_of(choice.cluster)
    if arguments.gpu_type:
        card_of(arguments.gpu_type, arguments.cluster, runs)
        card_gb = card_memory(arguments.gpu_type)
    left_out = {name: why for name, spec in runs.items() if (why := unrehearsed(spec))}
    for name, why in left_out.items():
        warn("parallel.rehearse", f"{name} is not rehearsed: {why}")
    runs = {name: spec for name, spec in runs.items() if name not in left_out}
    work = [(name, rank) for name, spec in runs.items() for rank in ranks_of(spec, arguments.rank)]
    if card_gb is None:
        line = "no card is known, so nothing is checked to fit (give --cluster or --gpu-type)"
        print(line, file=sys.stderr)
    import_libraries(runs.values())
    failed, rows = [], []
    for at, (name, rank) in enumerate(work, start=1):
        spec = runs[name]
        doing = f"rehearsing {at} of {len(work)}: {name}, rank {rank} of {spec.gpus}"
        print(doing, file=sys.stderr, flush=True)
        rehearsal = rehearse_apart(spec, rank)
        over = too_much(rank, rehearsal.stage, rehearsal.peak, card_gb)
        if rehearsal.error or over:
            failed.append(f"{name} rank {rank}")
        if arguments.format == "text":
            text = printed(name, spec, rehearsal, details=len(runs) == 1)
            print("\n".join(filter(None, [text, over])), flush=True)
        beside = [] if rehearsal.error else comparison(spec, rehearsal)
        row = {"run": name, "too_much": over, "beside": [line._asdict() for line in beside]}
        rows.append(row | asdict(rehearsal))
    if arguments.format == "json":
        print(json.dumps({"ranks": rows}, indent=2))
    if failed:
        why = f"cannot train a step or does not fit: {', '.join(failed)}"
        warn("parallel.rehearse", f"{why} (python -m analysis.plan finds layouts that fit)")
    return int(bool(failed or left_out))


if __name__ == "__main__":
    sys.exit(main())
