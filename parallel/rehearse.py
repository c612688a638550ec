r"""Build and train a step of any rank of any run on this machine, without its memory.

    python -m parallel.rehearse --study slurm/parity.toml --run-name megatron-tp2-pp2-dp2
    python -m parallel.rehearse --study slurm/parity.toml          # every run of the study
    python -m parallel.rehearse --engine megatron --preset 175b --gpus 512 --tp 8 --pp 8 \
        --micro-batch 1 --global-batch 512 --zero-stage 1 --precision bf16 --rank all-stages
    python -m parallel.rehearse ... --rank worst --out folder
    python -m parallel.rehearse ... --rank 317 --format json

The engine's own code runs with tensors that have shapes but no storage, as one rank of all those
the run has, with as many micro-batches as the peak of memory needs. The command prints what that
rank holds at its peak, its FLOPs and its messages, beside what the formulas of models/memory.py,
models/flops.py and parallel/config/message_bytes.py say. It runs no CUDA kernel, so it does not
show that one exists, is fast or is right. The exit status is 1 when a rank could not train its step
or needs more memory than the cluster's card has.

--rank: first-and-last (of the pipeline's stages), all-stages, worst (of the stage that has the
highest peak by formula), or numbers with commas. --out writes memory over the step's operators, by
kind, of every rank: a picture and a JSON file.
"""

import argparse
import contextlib
import gc
import io
import json
import logging
import multiprocessing
import os
import resource
import sys
import tempfile
import time
import traceback
from collections.abc import Collection
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import asdict, dataclass, field, fields, replace
from multiprocessing import forkserver
from pathlib import Path
from typing import Any

from base.errors import Parser, UsageError, command_line, warn
from base.files import named_folder
from models import flops, memory
from models.memory import GB
from parallel.config import clusters
from parallel.config.engine_abilities import ENGINES
from parallel.config.layout import Layout
from parallel.config.layout_arrays import columns_of
from parallel.config.message_bytes import step_volumes
from parallel.config.run_names import name_alone
from parallel.config.settings import COMMAND_LINE, RunSpec, add_flags, from_flags, resolve
from parallel.config.study import load_study
from parallel.record.launch import Launch
from parallel.train import set_environment

# What a rank's bytes are: parallel/measure/rehearsal.py sorts them.
KINDS = ("weights", "gradients", "optimizer", "activations", "logits", "buffers", "temporary")
# Settings on which no rehearsal depends.
_APART = """gpus global_batch grad_accum lr min_lr warmup_steps lr_schedule weight_decay beta1 beta2
adam_eps seed steps epochs train_tokens enforce_global_batch_size data eval_interval eval_steps
save_interval save load load_previous resume keep_last keep_every export_weights async_save
save_grace_s device kernels threads profile_mode profile_steps profile_ranks breakdown log_interval
timeout_s hang_s""".split()
PROGRESS_S = 10.0  # a line at most so often


@dataclass
class Rehearsal:
    """What one rank's rehearsal found; bytes, and FLOPs of the rehearsed micro-batches.

    error: why the step could not be trained, and where; "" when it could. peak: kind -> bytes.
    messages: axis -> (calls, bytes). timeline: (operators run, region, kind -> bytes).
    seconds, real_bytes: what the rehearsal itself took of a core, and of memory at most.
    """

    rank: int
    stage: int
    micro_batches: int
    parameters: int = 0
    peak: dict[str, int] = field(default_factory=dict)
    flops: float = 0.0
    messages: dict[str, tuple[int, float]] = field(default_factory=dict)
    timeline: list[tuple[int, str, dict[str, int]]] = field(default_factory=list)
    seconds: float = 0.0
    real_bytes: int = 0
    error: str = ""


def enough_micro_batches(layout: Layout, stage: int) -> int:
    """Micro-batches after which no step of this stage holds more: those in flight, and one that
    adds to gradients that are there already."""
    in_flight = 2 * layout.pp if layout.vpp > 1 else max(3, layout.pp - stage + 1)
    return min(layout.n_micro, 2 if layout.pp == 1 else in_flight)


def shortened(spec: RunSpec, stage: int) -> RunSpec:
    """The run with `enough_micro_batches` a step."""
    n = enough_micro_batches(spec.layout, stage)
    batch = spec.layout.dp * spec.micro_batch * n
    return replace(spec, grad_accum=n, global_batch=batch, device="cpu")


def work_of(spec: RunSpec, rank: int) -> str:
    """What a rehearsal depends on, as text: equal for ranks that hold and do the same.

    The tp ranks of a stage do. Its dp ranks do where nothing is cut over them; otherwise the parts
    differ in their padding.
    """
    layout = spec.layout
    coords = layout.coords(rank)
    n_micro = shortened(spec, coords["pp"]).layout.n_micro
    part = (coords["dp"], layout.dp) if layout.zero_stage > 0 else (0, min(layout.dp, 2))
    rest = {f.name: getattr(spec, f.name) for f in fields(RunSpec) if f.name not in _APART}
    return repr((coords["pp"], n_micro, part, rest))


def unable(spec: RunSpec) -> str:
    """Why a run cannot be rehearsed; "" when it can."""
    if not spec.te_alone:
        return ""
    instead = {"--cp 1": spec.cp > 1, "--precision bf16": spec.precision == "fp8"}
    flags = " ".join(flag for flag, is_needed in instead.items() if is_needed)
    return f"a rehearsal has no Transformer Engine for {spec.te_alone}: try {flags}"


def rehearse(spec: RunSpec, rank: int) -> Rehearsal:
    """Rehearse one rank of a run, in this process, which must not have done it before."""
    stage = spec.layout.coords(rank)["pp"]
    began, spec = time.process_time(), shortened(spec, stage)
    found = Rehearsal(rank, stage, spec.layout.n_micro)
    try:
        with contextlib.redirect_stdout(io.StringIO()), tempfile.TemporaryDirectory() as aside:
            _train_step(spec, rank, Path(aside), found)
    except Exception as error:  # whatever the engine or a library raised is the finding
        ours = [f for f in traceback.extract_tb(error.__traceback__) if "/parallel/" in f.filename]
        lines = str(error).strip().splitlines() or [""]
        where = f"{Path(ours[-1].filename).name}:{ours[-1].lineno}" if ours else "a library"
        found.error = f"{type(error).__name__}: {lines[0]} (at {where})"
    found.seconds = time.process_time() - began
    found.real_bytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return found


class Processes:
    """Rehearses ranks, each in a process of its own, because libraries keep their process groups.

    The processes are forked from one that has imported the libraries of the engines of `specs`.
    """

    def __init__(self, specs: Collection[RunSpec]):
        self._forks = multiprocessing.get_context("forkserver")
        modules = sorted({ENGINES[spec.engine].module for spec in specs})
        # The engines first: they redirect torch's factories, which the rehearsal redirects again.
        modules += ["parallel.measure.rehearsal", "parallel.measure.step_parts"]
        # What a step would import otherwise, in every process.
        if any(spec.engine == "deepspeed_zero" for spec in specs):
            modules.append("deepspeed.runtime.zero.muon.muon_optimizer")
        if any(spec.implementation == "hf" for spec in specs):
            modules.append("models.hf_model")
        self._forks.set_forkserver_preload(modules)
        ours = dict(os.environ)
        set_environment(RunSpec(device="cpu", threads=1), Launch(0, 1, 0, 1, "none"))
        # What the libraries warn of when they are imported is what no GPU machine lacks.
        os.environ.setdefault("PYTHONWARNINGS", "ignore")
        forkserver.ensure_running()
        os.environ.clear()
        os.environ.update(ours)

    def rehearse(self, spec: RunSpec, rank: int) -> Rehearsal:
        with ProcessPoolExecutor(1, self._forks) as process:
            try:
                return process.submit(rehearse, spec, rank).result()
            except BrokenProcessPool:
                stage = spec.layout.coords(rank)["pp"]
                why = "its process was killed; this machine may be out of memory"
                return Rehearsal(rank, stage, 0, error=why)


class _Progress:
    """A listener of the regions of a step that says how far it is, on stderr."""

    def __init__(self, rank: int, passes: int):
        self.rank, self.passes = rank, passes  # forward passes of chunks
        self.began = self.said = time.monotonic()
        self.forwards = 0

    def enter(self, name: str) -> None:
        self.forwards += name == "forward"
        if (now := time.monotonic()) - self.said > PROGRESS_S:
            self.said = now
            print(
                f"rank {self.rank}: {self.forwards} of {self.passes} forward passes begun,"
                f" {now - self.began:.0f} s",
                file=sys.stderr,
                flush=True,
            )

    def leave(self, name: str) -> None:
        pass


def _train_step(spec: RunSpec, rank: int, aside: Path, found: Rehearsal) -> None:
    layout = spec.layout
    logging.getLogger("megatron.core").setLevel(logging.ERROR)  # it misses the states of a GPU
    set_environment(spec, Launch(rank, layout.world_size, 0, 1, "none"))
    import torch
    from torch import nn

    from models.tensor_files import DTYPES
    from parallel import engines
    from parallel.measure import ranges, step_parts
    from parallel.measure.rehearsal import HOST, Memory, held_part, without_storage

    device = torch.device("cpu")
    vocabulary = spec.padded_vocab // layout.tp
    gc.freeze()  # what is there already is not looked through again for parameters and garbage
    held = Memory(vocabulary)
    if spec.engine.startswith("deepspeed"):
        from parallel.engines import deepspeed_common

        shape = (spec.seq_len, spec.micro_batch, spec.model.hidden)
        deepspeed_common.redirect_for_rehearsal(
            shape, DTYPES[spec.precision], lambda tensor: held.mark(tensor, HOST)
        )
    with without_storage(rank, layout.world_size):
        with held:
            messages = step_parts.start(replace(spec, breakdown=True), device, rank, aside)
            engine = engines.load(spec, device, "torch")
            parameters = [p for p in gc.get_objects() if isinstance(p, nn.Parameter)]
            weights = HOST if layout.offload == "all" else "weights"
            states = "optimizer" if layout.offload == "none" else HOST
            for parameter in parameters:
                held.mark(held_part(parameter), weights)
                held.mark(getattr(parameter, "main_grad", None), "gradients")
                parameter.register_post_accumulate_grad_hook(held.mark_gradient)
            for piece in engine.state().pieces:  # it makes Adam's moments
                for tensor in piece.tensors.values():
                    held.mark(tensor, states)
            for parameter in parameters:  # a parameter may be its own master
                held.mark(held_part(parameter), weights)
            gc.collect()
            found.parameters = sum(getattr(p, "ds_numel", p.numel()) for p in parameters)
            # Where it has seen a micro-batch, ZeRO-3 gathers ahead and keeps what it needs again.
            steps = 2 if layout.zero_stage == 3 and layout.n_micro == 1 else 1
            ranges.listeners += [held, _Progress(rank, steps * layout.n_micro * layout.vpp)]
            for _ in range(steps):
                held.restart()
                messages.forget()
                engine.step(_batches(spec), spec.lr)
    found.peak = {kind: size for kind, size in held.peak.items() if size and kind != HOST}
    found.timeline = held.timeline
    found.flops = float(held.flops)
    for axis, size, _ in messages.messages:
        calls, total = found.messages.get(axis, (0, 0.0))
        found.messages[axis] = (calls + 1, total + size)


def _batches(spec: RunSpec) -> Any:
    import torch

    shape = (spec.micro_batch, spec.seq_len)
    for _ in range(spec.layout.n_micro):
        yield torch.zeros(shape, dtype=torch.int64), torch.zeros(shape, dtype=torch.int64)


# --- beside the formulas -------------------------------------------------------------------------

# The rows of memory: the kinds of parallel/measure/rehearsal.py and of models/memory.py in each.
_PARTS = {
    "weights": ("weights",),
    "gradients": ("gradients",),
    "optimizer": ("optimizer",),
    "activations": ("activations", "logits"),
    "other": ("buffers", "temporary", "buckets"),
}


def memory_by_formula(spec: RunSpec, stage: int) -> dict[str, float]:
    """Bytes of the peak of a rank of a pipeline stage, by part of models/memory.py: its tensors
    alone, of the kernels that a rehearsal runs."""
    at = "first" if stage == 0 else "last" if stage == spec.layout.pp - 1 else "middle"
    x = columns_of(spec, flash=True, dropout=False)  # torch's fused attention in every engine
    return {part: float(size[0]) for part, size in memory.parts(x, at, tensors_alone=True).items()}


def memory_rows(
    spec: RunSpec, stage: int, peak: dict[str, int]
) -> list[tuple[str, float, float | None]]:
    """(part, rehearsed, by formula) of a rank's peak, in bytes; the last row is their sum."""
    formula = memory_by_formula(spec, stage)
    rows = [
        (part, *(float(sum(of.get(kind, 0) for kind in kinds)) for of in (peak, formula)))
        for part, kinds in _PARTS.items()
    ]
    return [*rows, ("peak", float(sum(peak.values())), sum(formula.values()))]


def comparison(spec: RunSpec, found: Rehearsal) -> list[tuple[str, float, float | None]]:
    """(what, rehearsed, by formula or None) of a rank: bytes of its peak, FLOPs, and messages.

    The memory is that of the whole step; FLOPs and messages are those of the rehearsed
    micro-batches.
    """
    short = shortened(spec, found.stage)
    parts = memory_rows(spec, found.stage, found.peak)
    rows: list[tuple[str, float, float | None]]
    rows = [(f"{part} GB", ours / GB, formula / GB) for part, ours, formula in parts]
    rows.append(("TFLOP", found.flops / 1e12, _flops(short, found.stage) / 1e12))
    volumes = step_volumes(short, found.rank)
    for axis in sorted((found.messages.keys() | volumes.keys()) - {"control"}):
        calls, size = found.messages.get(axis, (0, 0.0))
        volume = volumes.get(axis)
        known = volume is not None
        rows.append((f"{axis} calls", calls, volume.calls if known else None))
        rows.append((f"{axis} GB", size / GB, volume.bytes / GB if known else None))
    return rows


def _flops(spec: RunSpec, stage: int) -> float:
    """FLOPs of a rank's step: equation 3 of SC'21 for the layers of its stage and, on the last
    stage, the output layer, whose padded rows are computed too."""
    layout, padded = spec.layout, spec.padded_vocab
    part = replace(spec.model, n_layer=spec.model.n_layer // layout.pp, vocab_size=padded)
    per_token = flops.sc21(part, spec.seq_len, layout.recompute == "full")
    if stage < layout.pp - 1:
        per_token -= 6 * part.hidden * padded
    return per_token * layout.micro_batch * layout.n_micro * spec.seq_len / layout.tp


def printed(spec: RunSpec, found: Rehearsal) -> str:
    """A rank's rehearsal as text."""
    where = f"rank {found.rank} (stage {found.stage} of {spec.pp})"
    if found.error:
        return f"{where} could not train a step: {found.error}"
    lines = [
        f"{where}: {found.parameters:,} parameters, {found.micro_batches} of"
        f" {spec.layout.n_micro} micro-batches, {found.seconds:.0f} s of a core"
        f" and {found.real_bytes / GB:.1f} GB of this machine",
        f"  {'':20}{'rehearsed':>12}{'formula':>12}{'difference':>12}",
    ]
    for what, ours, formula in comparison(spec, found):
        beside = "-" if formula is None else f"{formula:.4g}"
        off = "-" if not formula else f"{ours / formula - 1:+.1%}"
        lines.append(f"  {what:20}{ours:>12.4g}{beside:>12}{off:>12}")
    if spec.engine == "ddp" and spec.layout.dp > 1:
        lines.append("  dp is 0: the reducer of DistributedDataParallel is not rehearsed")
    return "\n".join(lines)


def in_a_line(
    name: str, spec: RunSpec, found: Rehearsal, card_gb: float | None, same_as: str = ""
) -> str:
    """A rank's rehearsal as one line; same_as: the run of equal work that was rehearsed for it."""
    where = f"{name}: stage {found.stage} of {spec.pp}"
    if found.error:
        return f"{where} could not train a step: {found.error}"
    *_, (_, ours, formula) = memory_rows(spec, found.stage, found.peak)
    of = f" of {card_gb:g} GB" if card_gb else ""
    as_other = f", as {same_as}" if same_as else ""
    return (
        f"{where} trains a step{as_other}: {ours / GB:.2f} GB{of} at the peak,"
        f" {formula / GB:.2f} by formula"
    )


def card_gb_of(cluster: clusters.Cluster | None) -> float | None:
    """GB of a cluster's GPU; None where it is not known or there is none."""
    return cluster.gpu_memory_gb if cluster and cluster.gpu else None


def too_much(rank: int, stage: int, peak: dict[str, int], card_gb: float | None) -> str:
    """Why a rank's peak does not fit on its card; "" when it fits or the card is not known."""
    tensors = sum(peak.values())
    staying = sum(peak.get(kind, 0) for kind in ("weights", "gradients", "optimizer", "buffers"))
    taken = memory.taken(tensors, tensors - staying)
    if card_gb is None or taken <= memory.usable(card_gb):
        return ""
    return (
        f"rank {rank} (stage {stage}) does not fit: its tensors take {tensors / GB:.1f} GB, with"
        f" CUDA, NCCL and the allocator about {taken / GB:.1f}, and a step may use"
        f" {memory.usable(card_gb) / GB:.1f} of the card's {card_gb:g}"
    )


def ranks_of(spec: RunSpec, asked: str) -> list[int]:
    """The ranks that --rank names; of a stage, the first.

    Raises:
        UsageError: neither a word of --help nor numbers of ranks.
    """
    layout = spec.layout
    apart = layout.world_size // layout.pp  # ranks of a stage
    if asked == "all-stages":
        return [stage * apart for stage in range(layout.pp)]
    if asked == "first-and-last":
        return sorted({0, (layout.pp - 1) * apart})
    if asked == "worst":
        return [worst_stage(spec)[0] * apart]
    if not all(
        number.isdecimal() and int(number) < layout.world_size for number in asked.split(",")
    ):
        raise UsageError(
            "--rank must be first-and-last, all-stages, worst or numbers with commas, not"
            f" {asked!r}: the ranks of {spec.name} are 0 to {layout.world_size - 1}"
        )
    return sorted({int(number) for number in asked.split(",")})


def worst_stage(spec: RunSpec) -> tuple[int, str]:
    """The stage with the highest peak by formula, and a sentence that says so. Of the middle
    stages, the first holds the most micro-batches."""
    stages = sorted({0, min(1, spec.pp - 1), spec.pp - 1})
    peaks = {stage: sum(memory_by_formula(spec, stage).values()) / GB for stage in stages}
    worst = max(stages, key=lambda stage: peaks[stage])
    beside = ", ".join(f"stage {stage} {size:.2f} GB" for stage, size in peaks.items())
    return worst, f"stage {worst} has the highest peak by formula ({beside})"


def runs_of(arguments: argparse.Namespace) -> tuple[dict[str, RunSpec], float | None]:
    """The runs that the flags and the study ask for, by name, and the GB of their cluster's card.

    Raises:
        UsageError: no such run, or one that its cluster cannot run.
    """
    flags = from_flags(arguments)
    if arguments.study is None:
        if arguments.runs is not None:
            raise UsageError("--run-name names a run of a study: give --study too")
        cluster = clusters.cluster(arguments.cluster) if arguments.cluster else None
        spec = resolve((COMMAND_LINE, flags))
        runs, across = {name_alone(spec, flags): spec}, {}
    else:
        study = load_study(arguments.study, arguments.cluster)
        names = arguments.runs or list(study.settings)
        runs = {name: study.run(name, flags) for name in names}
        cluster, across = study.cluster, study.slurm
    for name, spec in runs.items():
        tp_across = bool(across.get(name, {}).get("tp_across_nodes"))
        if cluster and (problems := cluster.problems(spec, tp_across)):
            raise UsageError(f"{name} on {cluster.name}: {'; '.join(problems)}")
    return runs, card_gb_of(cluster)


@command_line("parallel.rehearse")
def main(argv: list[str] | None = None) -> int:
    parser = Parser(prog="python -m parallel.rehearse", description=__doc__)
    parser.add_argument("--study", type=Path, metavar="TOML", help="a study file ...")
    parser.add_argument(
        "--run-name", dest="runs", nargs="+", metavar="NAME", help="... and its runs (default: all)"
    )
    parser.add_argument("--cluster", metavar="NAME", help="the cluster whose card it must fit")
    parser.add_argument("--rank", default="first-and-last", metavar="RANKS", help="see above")
    parser.add_argument("--out", type=named_folder, metavar="DIR", help="memory over the step")
    parser.add_argument("--format", choices=("text", "json"), default="text", help="how to print")
    add_flags(parser)
    arguments = parser.parse_args(argv)
    runs, card_gb = runs_of(arguments)
    if arguments.study is None and (why := unable(next(iter(runs.values())))):
        raise UsageError(why)
    if arguments.out:
        arguments.out.mkdir(parents=True, exist_ok=True)
    work = [
        (name, spec, rank) for name, spec in runs.items() for rank in ranks_of(spec, arguments.rank)
    ]
    if card_gb is None:
        print("no card is known, so nothing is checked to fit (give --cluster)", file=sys.stderr)
    processes = Processes(runs.values())
    text, failed, not_fitting, rows = arguments.format == "text", [], False, []
    known: dict[str, tuple[str, Rehearsal]] = {}
    for at, (name, spec, rank) in enumerate(work):
        if why := unable(spec):
            print(f"{name}: {why}", file=sys.stderr)
            rows.append({"run": name, "rank": rank, "not_rehearsed": why})
            continue
        same_as, found = known.get(work_of(spec, rank), ("", None))
        if found is None:
            of_stages = arguments.rank == "worst" and spec.pp > 1
            chosen = f"; {worst_stage(spec)[1]}" if of_stages else ""
            of = f"{at + 1} of {len(work)}: {name}, rank {rank} of {spec.gpus}"
            print(f"rehearsing {of}{chosen}", file=sys.stderr, flush=True)
            found = processes.rehearse(spec, rank)
            known[work_of(spec, rank)] = name, found
            if arguments.out and not found.error:
                from parallel.measure import memory_timeline

                memory_timeline.write(arguments.out / f"{name}-rank{rank}", found.timeline)
        found = replace(found, rank=rank)
        over = too_much(rank, found.stage, found.peak, card_gb)
        not_fitting |= bool(over)
        if found.error or over:
            failed.append(f"{name} rank {rank}")
        if text:
            short = in_a_line(name, spec, found, card_gb, same_as)
            print(printed(spec, found) if len(runs) == 1 else short)
            print(over, flush=True, end="\n" * bool(over))
        beside = [] if found.error else comparison(spec, found)
        names = ("what", "rehearsed", "formula")
        beside = [dict(zip(names, row, strict=True)) for row in beside]
        about = {"run": name, "same_as": same_as, "too_much": over}
        rows.append(about | asdict(replace(found, timeline=[])) | {"beside": beside})
    if not text:
        print(json.dumps({"ranks": rows}, indent=2))
    if failed:
        which = ", ".join(failed)
        fits = "; python -m analysis.plan finds layouts that fit" if not_fitting else ""
        warn("parallel.rehearse", f"cannot train a step or does not fit: {which}{fits}")
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main())
