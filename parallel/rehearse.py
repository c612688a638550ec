r"""Trains one step of any rank of any run on this machine, without its memory.

    python -m parallel.rehearse --study slurm/parity.toml --run-name megatron-tp2-pp2-dp2
    python -m parallel.rehearse --study slurm/parity.toml          # every run of the study
    python -m parallel.rehearse --engine megatron --preset 175b --gpus 512 --tp 8 --pp 8 \
        --micro-batch 1 --global-batch 512 --zero-stage 1 --precision bf16 --rank all-stages
    python -m parallel.rehearse ... --format json

The engine's own code runs as one rank of the run, with tensors that have shapes but no storage. The
command prints what that rank holds at its peak, and its messages. The exit status is 1 when a rank
could not train its step, when it needs more memory than the cluster's card has, and when a run is
not rehearsed. Runs with cp or fp8 are not: only Transformer Engine has that code.
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
from models import headroom
from models.gpus import Gpu, card_memory, find_gpu, lacking, planning_gpu
from parallel import engines
from parallel.config.layout import AXES, EXPERT_AXES
from parallel.config.resolve import add_flags, from_flags
from parallel.config.run_spec import RunSpec
from parallel.config.study import choose_runs
from parallel.record.launch import Launch
from parallel.train import set_environment


class Messages(NamedTuple):
    """Calls of a rank, the bytes of their payloads, and those that it sends on the wire."""

    calls: int = 0
    bytes: int = 0
    wire_bytes: float = 0.0


@dataclass
class Rehearsal:
    """The result of rehearsing one rank. error: why it could not train the step, and where, or "".
    peak: bytes by kind. messages: by axis. seconds: a core's, for the rehearsal itself."""

    rank: int
    stage: int
    micro_batches: int = 0
    parameters: int = 0
    peak: dict[str, int] = field(default_factory=dict)
    messages: dict[str, Messages] = field(default_factory=dict)
    seconds: float = 0.0
    error: str = ""


def shortened(spec: RunSpec, stage: int) -> RunSpec:
    """Returns the run with as many micro-batches a step as this stage needs to reach its peak of
    memory. These are those in flight, and one that adds to gradients that are there already. All
    experts get equally many tokens: no number is computed that a router could choose by."""
    layout, n_micro = spec.layout, 2
    if layout.pp > 1:
        n_micro = 2 * layout.pp if layout.vpp > 1 else max(3, layout.pp - stage + 1)
    n_micro = min(layout.n_micro, n_micro)
    spec = replace(spec, moe_router_force_load_balancing=bool(spec.model.experts))
    return replace(spec, layout=replace(layout, n_micro=n_micro), device="cpu")


def import_libraries(specs: Iterable[RunSpec]) -> None:
    """Imports what the engines of `specs` import, once for all rehearsals of this process."""
    set_environment(RunSpec(device="cpu", threads=1), Launch(0, 1, 0, 1, "none"))
    warnings.simplefilter("ignore")  # of the libraries: what they miss is what no GPU machine lacks
    logging.getLogger("megatron.core").setLevel(logging.ERROR)
    for engine in sorted({spec.engine for spec in specs}):
        engines.import_engine(engine)
    # After the engines: they redirect torch's factories, which the rehearsal redirects again.
    importlib.import_module("parallel.measure.rehearsal")


def unrehearsed(spec: RunSpec, study: Path | None = None, place: str = "") -> str:
    """Returns why no rank of a run is rehearsed, though it may train; "" where each can be. Where
    the planner counts the run's bytes, its command is named. place: as `planners_count` takes
    it."""
    if spec.engine == "deepspeed_zero" and spec.layout.ep > 1:
        return "DeepSpeed's AutoEP needs the numbers of tokens"
    asked = [f"cp {spec.layout.cp}"] if spec.layout.cp > 1 else []
    asked += ["precision fp8"] if spec.precision == "fp8" else []
    if asked:
        reason = f"Transformer Engine alone has {' and '.join(asked)}, and only a GPU runs it"
        return f"{reason}; the planner counts its bytes: {planners_count(spec, study, place)}"
    return ""


def planners_count(spec: RunSpec, study: Path | None, place: str) -> str:
    """Returns the command by which the planner counts the bytes of a run. place: --cluster or
    --gpu-type with its name, or "" where the study names the cluster."""
    if study:
        return f"python -m analysis.prune {study} {place}".strip()
    axes = {axis: getattr(spec.layout, axis) for axis in (*AXES, *EXPERT_AXES)}
    split = {axis: size for axis, size in axes.items() if axis in AXES or size > 1}
    split |= {"mbs": spec.layout.micro_batch, "zero": spec.layout.zero_stage}
    split |= {"sp": "yes" if spec.layout.sequence_parallel else "no"}
    split |= {"recompute": spec.layout.recompute}
    layout = ",".join(f"{name}={value}" for name, value in split.items())
    sizes = {k: v for k, v in spec.overrides.items() if k not in ("max_seq_len", "experts")}
    flags = {"preset": spec.preset} | sizes
    flags |= {"gpus": spec.gpus, "global_batch": spec.layout.global_batch}
    flags |= {"seq_len": spec.seq_len, "precision": spec.precision, "cp": spec.layout.cp}
    words = " ".join(f"--{name.replace('_', '-')} {value}" for name, value in flags.items())
    return f"python -m analysis.plan {words} {place or '--gpu-type CARD'} --why {layout}"


def rehearse_apart(spec: RunSpec, rank: int) -> Rehearsal:
    """Runs `rehearse` in a fork of this process, because libraries keep their process groups."""
    with ProcessPoolExecutor(1, multiprocessing.get_context("fork")) as fork:
        try:
            return fork.submit(rehearse, spec, rank).result()
        except BrokenProcessPool:
            reason = "its process was killed; this machine may be out of memory"
            return Rehearsal(rank, spec.layout.coords(rank)["pp"], error=reason)


def rehearse(spec: RunSpec, rank: int) -> Rehearsal:
    """Rehearses one rank of a run, in this process, which must not have done it before."""
    stage = spec.layout.coords(rank)["pp"]
    began, spec = time.process_time(), shortened(spec, stage)
    rehearsal = Rehearsal(rank, stage, spec.layout.n_micro)
    try:
        with contextlib.redirect_stdout(io.StringIO()), tempfile.TemporaryDirectory() as aside:
            _train_step(spec, rank, Path(aside), rehearsal)
    except Exception as error:  # whatever the engine or a library raised is the finding
        frames = [
            frame
            for frame in traceback.extract_tb(error.__traceback__)
            if "/parallel/" in frame.filename
        ]
        lines = str(error).strip().splitlines() or [""]
        place = f"{Path(frames[-1].filename).name}:{frames[-1].lineno}" if frames else "a library"
        rehearsal.error = f"{type(error).__name__}: {lines[0]} (at {place})"
    rehearsal.seconds = time.process_time() - began
    return rehearsal


def _train_step(spec: RunSpec, rank: int, aside: Path, rehearsal: Rehearsal) -> None:
    layout = spec.layout
    set_environment(spec, Launch(rank, layout.world_size, 0, 1, "none"))
    import torch

    from parallel.measure import ranges, step_parts
    from parallel.measure.rehearsal import HOST, Memory, without_storage

    device = torch.device("cpu")
    gc.freeze()  # what is there already is not looked through again for parameters and garbage
    memory = Memory(spec.padded_vocab // layout.tp, bool(spec.model.experts))
    if spec.engine.startswith("deepspeed"):
        from parallel import rehearsed_deepspeed

        rehearsed_deepspeed.redirect(spec, lambda tensor: memory.mark(tensor, HOST))
    with without_storage(rank, layout.world_size), memory:
        messages = step_parts.start(replace(spec, breakdown=True), device, rank, aside)
        engine = engines.load(spec, device, "torch", draws=False)
        rehearsal.parameters = memory.mark_engine(engine, layout.offload)
        # Where it has seen a micro-batch, ZeRO-3 gathers ahead and keeps what it needs again.
        steps = 2 if layout.zero_stage == 3 and layout.n_micro == 1 else 1
        ranges.listeners.append(memory)
        shape = (layout.micro_batch, spec.seq_len)
        for _ in range(steps):
            memory.restart()
            messages.forget()
            tokens = (torch.zeros(shape, dtype=torch.int64) for _ in range(2 * layout.n_micro))
            engine.step(zip(tokens, tokens, strict=True), spec.lr, stop=bool)
    rehearsal.peak = {kind: size for kind, size in memory.peak.items() if size and kind != HOST}
    for axis, payload, sent in messages.messages:
        calls, size, wire = rehearsal.messages.get(axis, Messages())
        rehearsal.messages[axis] = Messages(calls + 1, size + payload, wire + sent)


# --- what is printed ------------------------------------------------------------------------------

# The rows of memory: the kinds of parallel/measure/rehearsal.py.
_PARTS = {
    "weights": ("weights",),
    "gradients": ("gradients",),
    "optimizer": ("optimizer",),
    "activations": ("activations", "logits"),
    "other": ("buffers", "temporary"),
}


def counted(rehearsal: Rehearsal) -> dict[str, float]:
    """Returns a rank's gigabytes at its peak by part, and the calls and gigabytes of the messages
    of the rehearsed micro-batches by axis."""
    peak = rehearsal.peak
    sizes = {part: sum(peak.get(kind, 0) for kind in kinds) for part, kinds in _PARTS.items()}
    sizes["peak"] = sum(peak.values())
    rows = {f"{part} GiB": size / GIB for part, size in sizes.items()}
    for axis, messages in sorted(rehearsal.messages.items()):
        if axis != "control":
            rows |= {f"{axis} calls": messages.calls, f"{axis} GiB": messages.bytes / GIB}
    return rows


def printed(name: str, spec: RunSpec, rehearsal: Rehearsal, details: bool) -> str:
    """Returns a rank's rehearsal as a line; with details the table of what it `counted` below."""
    title = f"{name}, rank {rehearsal.rank} (stage {rehearsal.stage} of {spec.layout.pp})"
    if rehearsal.error:
        return f"{title} could not train a step: {rehearsal.error}"
    rows = counted(rehearsal)
    line = f"{title} trains a step: {rows['peak GiB']:.2f} GiB at the peak"
    if not details:
        return line
    lines = [
        line,
        f"  {rehearsal.parameters:,} parameters, {rehearsal.micro_batches} of"
        f" {spec.layout.n_micro} micro-batches, {rehearsal.seconds:.0f} s of a core",
        *(f"  {row:20}{number:>12.4g}" for row, number in rows.items()),
    ]
    if spec.engine == "ddp" and spec.layout.dp > 1:
        lines.append("  no dp: the reducer of DistributedDataParallel is not rehearsed")
    if spec.model.experts:
        lines.append("  each expert has as many tokens as the others, as with a forced balance")
    return "\n".join(lines)


def card_of(name: str, cluster: str | None, runs: dict[str, RunSpec]) -> Gpu:
    """Returns the card of --gpu-type. Raises: UsageError: none, a cluster beside it, or a format
    lacks."""
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
    """Returns the reason why a rank's peak does not fit on its card; "" when it fits or the card is
    not known."""
    tensors = sum(peak.values())
    staying = sum(peak.get(kind, 0) for kind in ("weights", "gradients", "optimizer", "buffers"))
    taken = headroom.taken(tensors, tensors - staying)
    if card_gb is None or taken <= headroom.usable(card_gb):
        return ""
    return (
        f"rank {rank} (stage {stage}) does not fit: its tensors take {tensors / GIB:.1f} GiB, with"
        f" CUDA, NCCL and the allocator about {taken / GIB:.1f}, and a step may use"
        f" {headroom.usable(card_gb) / GIB:.1f} of the card's {card_gb:g}"
    )


def ranks_of(spec: RunSpec, asked: str) -> list[int]:
    """Returns the ranks that --rank names; of a stage, the first.

    Raises:
        UsageError: neither a word of --help nor numbers of ranks.
    """
    world = spec.layout.world_size
    stages = {
        "all-stages": range(spec.layout.pp),
        "first-and-last": sorted({0, spec.layout.pp - 1}),
    }
    if asked in stages:
        return [stage * (world // spec.layout.pp) for stage in stages[asked]]
    numbers = asked.split(",")
    if not all(number.isdecimal() and int(number) < world for number in numbers):
        raise UsageError(
            f"--rank must be first-and-last, all-stages or numbers with commas, not {asked!r}: the"
            f" ranks of {spec.name} are 0 to {world - 1}"
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
    about = "first-and-last (stage), all-stages, or numbers with commas"
    parser.add_argument("--rank", default="first-and-last", metavar="RANKS", help=about)
    parser.add_argument("--format", choices=("text", "json"), default="text", help="how to print")
    add_flags(parser)
    arguments = parser.parse_args(argv)
    choice = choose_runs(arguments.study, arguments.runs, from_flags(arguments), arguments.cluster)
    runs, cluster = choice.runs, choice.cluster
    card_gb = cluster.gpu_memory_gb if cluster and cluster.gpu else None
    if arguments.gpu_type:
        card_of(arguments.gpu_type, arguments.cluster, runs)
        card_gb = card_memory(arguments.gpu_type)
    places = {"cluster": arguments.cluster, "gpu-type": arguments.gpu_type}
    place = " ".join(f"--{flag} {value}" for flag, value in places.items() if value)
    reasons = {name: unrehearsed(spec, arguments.study, place) for name, spec in runs.items()}
    left_out = {name: reason for name, reason in reasons.items() if reason}
    for name, reason in left_out.items():
        warn("parallel.rehearse", f"{name} is not rehearsed: {reason}")
    runs = {name: spec for name, spec in runs.items() if name not in left_out}
    work = [(name, rank) for name, spec in runs.items() for rank in ranks_of(spec, arguments.rank)]
    if card_gb is None:
        line = "no card is known, so nothing is checked to fit (give --cluster or --gpu-type)"
        print(line, file=sys.stderr)
    import_libraries(runs.values())
    failed, rows = [], []
    for number, (name, rank) in enumerate(work, start=1):
        spec = runs[name]
        doing = f"rehearsing {number} of {len(work)}: {name}, rank {rank} of {spec.gpus}"
        print(doing, file=sys.stderr, flush=True)
        rehearsal = rehearse_apart(spec, rank)
        over = too_much(rank, rehearsal.stage, rehearsal.peak, card_gb)
        if rehearsal.error or over:
            failed.append(f"{name} rank {rank}")
        if arguments.format == "text":
            text = printed(name, spec, rehearsal, details=len(runs) == 1)
            print("\n".join(filter(None, [text, over])), flush=True)
        rows.append({"run": name, "too_much": over} | asdict(rehearsal))
    if arguments.format == "json":
        print(json.dumps({"ranks": rows}, indent=2))
    if failed:
        reason = f"cannot train a step or does not fit: {', '.join(failed)}"
        warn("parallel.rehearse", f"{reason} (python -m analysis.plan finds layouts that fit)")
    return int(bool(failed or left_out))


if __name__ == "__main__":
    sys.exit(main())
