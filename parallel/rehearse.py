r"""Build and train a step of any rank of any run on this machine, without its memory.

    python -m parallel.rehearse --study slurm/parity.toml --run-name megatron-tp2-pp2-dp2
    python -m parallel.rehearse --engine megatron --preset 175b --gpus 512 --tp 8 --pp 8 \
        --micro-batch 1 --global-batch 512 --zero-stage 1 --precision bf16 --ranks all-stages
    python -m parallel.rehearse ... --ranks 317 --format json

The engine's own code runs with tensors that have shapes but no storage, as one rank of all those
the run has, with as many micro-batches as the peak of memory needs. Printed is what that rank
holds at its peak, its FLOPs and its messages, beside what the formulas of models/memory.py,
models/flops.py and parallel/config/message_bytes.py say. No CUDA kernel is run: that one exists, is
fast or is right is not rehearsed. The exit status is 1 when a rank could not train its step.

--ranks: first-and-last (of the pipeline's stages), all-stages, or numbers with commas.
"""

import contextlib
import gc
import io
import json
import logging
import multiprocessing
import sys
import tempfile
import time
import traceback
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from models import flops, memory
from models.errors import Parser, UsageError, command_line
from models.memory import GB
from parallel.config.layout import Layout
from parallel.config.layout_arrays import columns_of
from parallel.config.message_bytes import step_volumes
from parallel.config.settings import RunSpec, add_flags
from parallel.record.launch import Launch
from parallel.train import choose


@dataclass
class Rehearsal:
    """What one rank's rehearsal found; bytes, and FLOPs of the rehearsed micro-batches.

    error: why the step could not be trained, and where; "" when it could. peak: kind -> bytes.
    messages: axis -> (calls, bytes).
    """

    rank: int
    stage: int
    micro_batches: int
    parameters: int = 0
    peak: dict[str, int] = field(default_factory=dict)
    flops: float = 0.0
    messages: dict[str, tuple[int, float]] = field(default_factory=dict)
    seconds: float = 0.0
    error: str = ""


def enough_micro_batches(layout: Layout) -> int:
    """Micro-batches after which no step holds more: those in flight, and one that adds to
    gradients that are there already."""
    if layout.pp == 1:
        return min(layout.n_micro, 2)
    return min(layout.n_micro, layout.pp * (2 if layout.vpp > 1 else 1) + (layout.vpp == 1))


def shortened(spec: RunSpec) -> RunSpec:
    """The run with `enough_micro_batches` a step."""
    n = enough_micro_batches(spec.layout)
    batch = spec.layout.dp * spec.micro_batch * n
    return replace(spec, grad_accum=n, global_batch=batch, device="cpu")


def rehearse(spec: RunSpec, rank: int) -> Rehearsal:
    """Rehearse one rank of a run, in this process, which must not have done it before."""
    began, spec = time.perf_counter(), shortened(spec)
    found = Rehearsal(rank, spec.layout.coords(rank)["pp"], spec.layout.n_micro)
    try:
        with contextlib.redirect_stdout(io.StringIO()), tempfile.TemporaryDirectory() as aside:
            _train_step(spec, rank, Path(aside), found)
    except Exception as error:  # whatever the engine or a library raised is the finding
        ours = [f for f in traceback.extract_tb(error.__traceback__) if "/parallel/" in f.filename]
        lines = str(error).strip().splitlines() or [""]
        where = f"{Path(ours[-1].filename).name}:{ours[-1].lineno}" if ours else "a library"
        found.error = f"{type(error).__name__}: {lines[0]} (at {where})"
    found.seconds = time.perf_counter() - began
    return found


def _train_step(spec: RunSpec, rank: int, aside: Path, found: Rehearsal) -> None:
    from parallel.train import set_environment

    layout = spec.layout
    logging.getLogger("megatron.core").setLevel(logging.ERROR)  # it misses the states of a GPU
    set_environment(spec, Launch(rank, layout.world_size, 0, 1, "none"))
    import torch
    from torch import nn
    from torch.utils.flop_counter import FlopCounterMode

    from models.tensor_files import DTYPES
    from parallel import engines
    from parallel.measure import breakdown, ranges
    from parallel.measure.rehearsal import Memory, held_part, without_storage

    device = torch.device("cpu")
    vocabulary = spec.model.padded_vocab(layout.tp) // layout.tp
    if spec.engine.startswith("deepspeed"):
        from parallel.engines import deepspeed_common

        shape = (spec.seq_len, spec.micro_batch, spec.model.hidden)
        deepspeed_common.redirect_for_rehearsal(shape, DTYPES[spec.precision])
    counter = FlopCounterMode(display=False, custom_mapping=_attention_flops())
    with without_storage(rank, layout.world_size):
        held = Memory(vocabulary)
        with held:
            messages = breakdown.start(replace(spec, breakdown=True), device, rank, aside)
            engine = engines.load(spec, device, "torch")
            parameters = [p for p in gc.get_objects() if isinstance(p, nn.Parameter)]
            for parameter in parameters:
                held.mark(held_part(parameter), "weights")
                held.mark(getattr(parameter, "main_grad", None), "gradients")
                parameter.register_post_accumulate_grad_hook(held.mark_gradient)
            for piece in engine.state().pieces:  # it makes Adam's moments
                for tensor in piece.tensors.values():
                    held.mark(tensor, "optimizer")
            for parameter in parameters:  # a parameter may be its own master
                held.mark(held_part(parameter), "weights")
            gc.collect()
            found.parameters = sum(getattr(p, "ds_numel", p.numel()) for p in parameters)
            held.restart()
            messages.forget()
            ranges.listeners.append(held)
            with counter:
                engine.step(_batches(spec), spec.lr)
    found.peak = {kind: size for kind, size in held.peak.items() if size}
    found.flops = float(counter.get_total_flops())
    for axis, size, _ in messages.messages:
        calls, total = found.messages.get(axis, (0, 0.0))
        found.messages[axis] = (calls + 1, total + size)


def _batches(spec: RunSpec) -> Any:
    import torch

    shape = (spec.micro_batch, spec.seq_len)
    for _ in range(spec.layout.n_micro):
        yield torch.zeros(shape, dtype=torch.int64), torch.zeros(shape, dtype=torch.int64)


def _attention_flops() -> dict[Any, Any]:
    """FLOPs of the fused attention that runs on a CPU, which torch's counter does not know: two
    products forward, four backward, over all of the s x s square."""
    import torch

    def forward(query: Any, key: Any, value: Any, *_: Any, **__: Any) -> float:
        b, n, s, d = query
        return 4.0 * b * n * s * s * d

    def backward(gradient: Any, query: Any, *_: Any, **__: Any) -> float:
        return 2.0 * forward(query, None, None)

    aten = torch.ops.aten
    return {
        aten._scaled_dot_product_flash_attention_for_cpu: forward,
        aten._scaled_dot_product_flash_attention_for_cpu_backward: backward,
    }


# --- beside the formulas -------------------------------------------------------------------------

# The rows of memory: the kinds of parallel/measure/rehearsal.py and of models/memory.py in each.
_PARTS = {
    "weights": ("weights",),
    "gradients": ("gradients",),
    "optimizer": ("optimizer",),
    "activations": ("activations", "logits"),
    "other": ("buffers", "temporary", "buckets"),
}


def comparison(spec: RunSpec, found: Rehearsal) -> list[tuple[str, float, float | None]]:
    """(what, rehearsed, by formula or None) of a rank: bytes of its peak, FLOPs, and messages.

    The memory is that of the whole step; FLOPs and messages are those of the rehearsed
    micro-batches.
    """
    short, layout = shortened(spec), spec.layout
    at = "first" if found.stage == 0 else "last" if found.stage == layout.pp - 1 else "middle"
    tensors_alone = {"library_gb": 0.0, "fragments": 1.0}
    x = columns_of(spec, flash=True, dropout=False)  # torch's fused attention in every engine
    formula = {k: float(v[0]) for k, v in memory.parts(x, at, tensors_alone).items()}
    rows: list[tuple[str, float, float | None]] = []
    for part, kinds in _PARTS.items():
        held, counted = (sum(of.get(kind, 0) for kind in kinds) for of in (found.peak, formula))
        rows.append((f"{part} GB", held / GB, counted / GB))
    rows.append(("peak GB", sum(found.peak.values()) / GB, sum(formula.values()) / GB))
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
    layout, padded = spec.layout, spec.model.padded_vocab(spec.layout.tp)
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
        f" {spec.layout.n_micro} micro-batches, {found.seconds:.0f} s",
        f"  {'':20}{'rehearsed':>12}{'formula':>12}{'difference':>12}",
    ]
    for what, ours, formula in comparison(spec, found):
        beside = "-" if formula is None else f"{formula:.4g}"
        off = "-" if not formula else f"{ours / formula - 1:+.1%}"
        lines.append(f"  {what:20}{ours:>12.4g}{beside:>12}{off:>12}")
    return "\n".join(lines)


def ranks_of(layout: Layout, asked: str) -> list[int]:
    """The ranks that --ranks names; of a stage, the first.

    Raises:
        UsageError: neither a word of --help nor numbers of ranks.
    """
    apart = layout.world_size // layout.pp  # ranks of a stage
    if asked == "all-stages":
        return [stage * apart for stage in range(layout.pp)]
    if asked == "first-and-last":
        return sorted({0, (layout.pp - 1) * apart})
    if not all(number.isdigit() and int(number) < layout.world_size for number in asked.split(",")):
        raise UsageError(
            f"--ranks must be first-and-last, all-stages or numbers below {layout.world_size},"
            f" not {asked!r}"
        )
    return [int(number) for number in asked.split(",")]


@command_line("parallel.rehearse")
def main(argv: list[str] | None = None) -> int:
    parser = Parser(prog="python -m parallel.rehearse", description=__doc__)
    parser.add_argument("--study", type=Path, metavar="TOML", help="a study file ...")
    parser.add_argument("--run-name", dest="run", metavar="NAME", help="... and which of its runs")
    parser.add_argument("--cluster", metavar="NAME", help="the cluster to plan nodes for")
    parser.add_argument("--ranks", default="first-and-last", help="see above")
    parser.add_argument("--format", choices=("text", "json"), default="text", help="how to print")
    add_flags(parser)
    arguments = parser.parse_args(argv)
    arguments.check, arguments.out = True, None
    spec, facts, _ = choose(arguments, Launch(0, 1, 0, 1, "none"))
    if spec.cp > 1 or spec.precision == "fp8":
        raise UsageError(
            "cp above 1 and fp8 need Transformer Engine, which is not rehearsed: leave them out"
        )
    ranks = ranks_of(spec.layout, arguments.ranks)
    failed = False
    rows = []
    for rank in ranks:  # each in a process of its own: libraries keep their process groups
        with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
            found = pool.submit(rehearse, spec, rank).result()
        failed |= bool(found.error)
        beside = [] if found.error else comparison(spec, found)
        names = ("what", "rehearsed", "formula")
        rows.append(
            asdict(found) | {"beside": [dict(zip(names, row, strict=True)) for row in beside]}
        )
        if arguments.format == "text":
            print(printed(spec, found), flush=True)
    if arguments.format == "json":
        print(json.dumps({"run": facts["run"], "ranks": rows}, indent=2))
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
