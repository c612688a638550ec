"""Every layout of a model on a number of GPUs: each split, micro-batch and policy is one row."""

import math
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from analysis.planner.calibration import Calibration
from analysis.planner.columns import MUON, Columns, columns
from analysis.planner.memory.peak import check_counted
from base.errors import UsageError
from models.config import GPTConfig
from parallel.config.engine_abilities import ENGINES
from parallel.config.layout import AXES, OFFLOAD, RANK_AXES, RECOMPUTE, uneven_ends

WIDTHS = {"fp32": 4, "fp16": 2, "bf16": 2, "fp8": 2}  # bytes of a weight in compute
SPLIT = (*AXES, "micro_batch", "n_micro", "first_layers", "last_layers")
PLANNED = ("megatron", "deepspeed_zero", "fsdp2")
POLICY = ("recompute", "zero_stage", "sequence_parallel", "fsdp2", "hybrid", "offload")
# Sequence parallelism, FSDP2, and whether its shards are within what fast links join.
_BELOW_2, _SHARDED = ((0, 0, 0), (1, 0, 0)), ((0, 0, 0), (0, 1, 0), (0, 1, 1))


def policies(offloads: Sequence[str]) -> list[tuple[int, ...]]:
    """Returns the values of POLICY to try for each split; ZeRO 2 and 3 run without sequence
    parallelism. Of offloads, each engine has those of its abilities."""
    return [
        (recompute, zero, *ways, OFFLOAD.index(offload))
        for recompute in map(RECOMPUTE.index, ("none", "full"))
        for zero in range(4)
        for ways in (_BELOW_2 if zero < 2 else _SHARDED)
        for offload in offloads
        if offload in ENGINES[engine_of(zero, ways[1])].offload and (offload != "all" or zero == 3)
    ]


def divisors(n: int) -> list[int]:
    """Returns the whole numbers that divide n, ascending."""
    small = [d for d in range(1, math.isqrt(n) + 1) if n % d == 0]
    return small + [n // d for d in reversed(small) if d * d != n]


def engine_of(zero_stage: int, fsdp2: bool) -> str:
    """Returns the engine that a plan means: ZeRO 2 and 3 are FSDP2's or DeepSpeed's, all else is
    Megatron's."""
    if fsdp2:
        return "fsdp2"
    return "megatron" if zero_stage < 2 else "deepspeed_zero"


def space(
    config: GPTConfig,
    cluster: Calibration,
    gpus: int,
    global_batch: int,
    seq_len: int,
    precision: str = "bf16",
    flash: bool | None = None,
    leave: int = 0,
    cps: Sequence[int] = (1,),
    engines: Sequence[str] = PLANNED,
    offloads: Sequence[str] = ("none",),
    muon: str = "",
) -> Columns:
    """Returns every layout of the model on that many GPUs, one row each, of which `Layout.problems`
    finds nothing and which the engines can run.

    At most `leave` GPUs stay idle: 10,000 have few divisors, 9,984 have many. cps: the
    context-parallel sizes. engines: those of `PLANNED` to plan for. offloads: what may lie in host
    memory. muon: how Megatron-LM's Muon, in place of Adam, shares a matrix (`MUON`)."""
    if seq_len > config.max_seq_len:
        raise UsageError(f"seq_len {seq_len} exceeds the model's {config.max_seq_len} positions")
    if cluster.max_gpus and gpus > cluster.max_gpus:
        raise UsageError(f"{gpus} GPUs exceed the {cluster.max_gpus} of {cluster.name}")
    for cp in cps:
        if cp > 1 and seq_len % (2 * cp):
            raise UsageError(f"cp {cp} cuts a sequence into {2 * cp} chunks: not one of {seq_len}")
    # No tp group spans slow links.
    wholes = (config.n_head, config.kv_heads, config.ffn_hidden, cluster.joined)
    shared = [(tp, cp) for tp in divisors(math.gcd(*wholes)) for cp in cps]
    splits = list(_splits(pipelines(config), gpus, global_batch, shared, leave))
    if not splits:
        raise UsageError(_no_layout(config, gpus, global_batch, shared, leave))
    ways = policies(offloads)
    values = np.hstack([np.repeat(splits, len(ways), axis=0), np.tile(ways, (len(splits), 1))])
    engine = np.tile([engine_of(zero, fsdp2) for _, zero, _, fsdp2, *_ in ways], len(splits))
    settings = dict(zip((*SPLIT, *POLICY), values.T, strict=True)) | {"engine": engine}
    if config.experts:
        settings = _with_experts(config, settings)
    engine, hybrid = settings.pop("engine"), settings.pop("hybrid") == 1
    replicas = settings["dp"] * settings["cp"]
    settings["shards"] = np.where(hybrid, cluster.joined, replicas)
    tp, zero_stage, fsdp2 = settings["tp"], settings["zero_stage"], settings["fsdp2"]
    settings |= {
        "vocab": config.padded_vocab(tp),
        "seq": seq_len,
        "width": WIDTHS[precision],
        # The engines that shard gradients add up fp16's in fp16.
        "grad_width": np.where((zero_stage > 1) & (precision == "fp16"), 2, 4),
        "plain": (zero_stage > 1) & (tp == 1),
        "fp8": precision == "fp8",
        "tf32": cluster.gemm_precision(precision) == "tf32",
        "reductions": np.where((fsdp2 == 1) & (zero_stage == 3), settings["n_micro"], 1),
        "our_megatron": engine == "megatron",
        "muon": MUON.index(muon),
        "deepspeed": (zero_stage > 1) & (fsdp2 == 0),
    }
    settings |= cluster.columns(engine, tp, math.prod(settings[axis] for axis in RANK_AXES))
    if flash is not None:
        settings["flash"] = flash
    steps = columns(config, **settings)
    # Some copies of the model, each of more ranks than one.
    divides = (replicas % steps.shards == 0) & (steps.shards < replicas) & (steps.shards > 1)
    keep = np.isin(engine, engines) & ~_cannot_run(steps, precision) & (~hybrid | divides)
    steps = steps.take(keep)
    check_counted(config, steps, f"{precision} on {cluster.gpu}")
    if not keep.any():
        raise UsageError(
            f"{' and '.join(engines)} can run none of the {len(splits)} splits in {precision} with"
            f" cp {', '.join(map(str, cps))}: a dp x cp of 1, cp above 1 (not in fp32) and fp8"
            " (GEMMs with sides in multiples of 16) are planned for megatron"
        )
    return steps


def _with_experts(config: GPTConfig, settings: dict[str, Any]) -> dict[str, Any]:
    """Returns layouts with every ep and etp that divide the ranks of a stage and the experts. An
    expert is whole, or cut like the layers beside it."""
    experts = config.experts
    width = experts.moe_ffn_hidden_size or config.ffn_hidden
    tp, ranks = settings["tp"], settings["tp"] * settings["cp"] * settings["dp"]
    parts = []
    for ep in divisors(experts.num_experts):
        for cut in (False, True):
            etp = tp if cut else np.ones_like(tp)
            fits = (ranks % (ep * etp) == 0) & (width % etp == 0) & ((tp > 1) | (not cut))
            fits &= experts.moe_shared_expert_intermediate_size % tp == 0
            fits = np.flatnonzero(fits & (settings["zero_stage"] < 2))
            columns_of = {name: column[fits] for name, column in settings.items()}
            parts.append(columns_of | {"ep": np.full(len(fits), ep), "etp": etp[fits]})
    return {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}


def _cannot_run(steps: Columns, precision: str) -> np.ndarray:
    """Returns which rows their engine does not run, or runs as another row, bool (n,)."""
    sharded = steps.zero_stage > 1  # DeepSpeed and FSDP2
    megatron_only = (steps.experts > 0) | (steps.kv_lora > 0)  # planned for Megatron-LM
    sequence_parts = np.where(steps.sequence_parallel, steps.tp, 1)
    refused = steps.sequence_parallel & ((steps.tp < 2) | (steps.seq // steps.cp % steps.tp != 0))
    refused |= sharded & ((steps.pp > 1) | (steps.cp > 1) | steps.fp8 | megatron_only)
    # Megatron-LM demands it.
    refused |= (steps.experts > 0) & (steps.tp > 1) & ~steps.sequence_parallel
    refused |= (steps.cp > 1) & (steps.width == 4)  # attention of Transformer Engine has no fp32
    refused |= steps.fsdp2 & ((steps.tp > 1) | (precision == "fp16"))
    refused |= (steps.zero_stage > 0) & (steps.replicas == 1)  # nothing to shard over: as stage 0
    head = steps.head_dim / steps.tp
    sides = (
        steps.hidden,
        steps.heads * head,
        steps.kv_heads * head,
        steps.ffn / steps.tp,
        steps.tokens / sequence_parts,
    )
    return refused | steps.fp8 & np.any([side % 16 != 0 for side in sides], axis=0)  # cuBLAS


def pipelines(config: GPTConfig) -> dict[int, list[tuple[int, int, int]]]:
    """Returns, by pp, the pipelines that can hold the layers: (vpp, layers of the first stage, of
    the last stage), both 0 where all stages are equal. Where pp does not divide the layers, the
    last stage has fewer, by what the output layer costs; each vpp has one cut."""
    n, table = config.n_layer, config.vocab_size * config.hidden
    head = table / ((config.n_active - table * (1 if config.tied else 2)) / n)  # in layers
    cuts: dict[int, list[tuple[int, int, int]]] = {}
    for pp in range(1, n + 1):
        if n % pp == 0:
            cuts[pp] = [(vpp, 0, 0) for vpp in (divisors(n // pp) if pp > 1 else [1])]
            continue
        ends = {vpp: uneven_ends(n, pp, vpp, head) for vpp in range(1, -(-n // pp) + 1)}
        if uneven := [(vpp, *cut) for vpp, cut in ends.items() if cut]:
            cuts[pp] = uneven
    return cuts


def _splits(
    cuts: dict[int, list[tuple[int, int, int]]],
    gpus: int,
    global_batch: int,
    shared: list[tuple[int, int]],
    leave: int,
) -> Iterator[tuple[int, ...]]:
    """Yields the numbers of SPLIT for each split of the GPUs. `cuts` are those of `pipelines`,
    `shared` the pairs (tp, cp) to try; dp is the largest that divides the batch."""
    dps = divisors(global_batch)[::-1]
    for tp, cp in shared:
        for pp in cuts:
            ranks = tp * cp * pp
            most, least = gpus // ranks, -(-(gpus - leave) // ranks)
            dp = next((dp for dp in dps if dp <= most), 0)
            if dp < max(least, 1):
                continue
            for micro in divisors(global_batch // dp):
                n_micro = global_batch // dp // micro
                for vpp, *ends in cuts[pp]:
                    if vpp == 1 or n_micro % pp == 0:
                        yield tp, cp, pp, vpp, dp, micro, n_micro, *ends


def _no_layout(
    config: GPTConfig, gpus: int, global_batch: int, shared: list[tuple[int, int]], leave: int
) -> str:
    """Returns one line: why no split of GPUs and batch exists, and which numbers would do."""
    tp, cp = max(shared, key=math.prod)
    most = tp * cp * config.n_layer * global_batch
    if gpus - leave > most:
        context = f" x cp {cp}" if cp > 1 else ""
        return (
            f"{gpus} GPUs are too many for a global batch of {global_batch}: at most tp {tp}"
            f"{context} x pp {config.n_layer} (the layers) x dp {global_batch} = {most}"
        )
    splits = [tp * cp * pp for tp, cp in shared for pp in pipelines(config)]
    dps = sorted({gpus // split for split in splits if gpus % split == 0})
    if not dps:
        return f"no layout of {gpus} GPUs: no tp x cp x pp divides them; other --cp, or --leave N"
    batches = {dp * (global_batch // dp + more) for dp in dps for more in (0, 1)} - {0}
    near = sorted(sorted(batches, key=lambda batch: abs(batch - global_batch))[:2])
    sizes = ", ".join(map(str, dps if len(dps) < 8 else [*dps[:3], "...", *dps[-2:]]))
    return (
        f"no layout of {gpus} GPUs: the dp that tp and pp leave ({sizes}) do not divide a global"
        f" batch of {global_batch}; {' or '.join(map(str, near))} would do, or --leave N for up to"
        " N idle GPUs"
    )
