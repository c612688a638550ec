"""Bytes that a collective sends, and calls and bytes of a training step, by closed formulas.

Torch-free.

Letters: b sequences of a micro-batch, s their length, h hidden, m micro-batches of a step, n ranks
of a group, e bytes of an activation's number (4 in fp32, else 2).
"""

import math
import re
from collections import Counter
from dataclasses import dataclass, replace

from models.config import parameter_shapes
from parallel.config.settings import RunSpec

PERSISTENT = 100_000  # elements; DeepSpeed's stage3_param_persistence_threshold
# What each tp rank holds whole: norms, positions, routers and the biases after row-parallel layers.
WHOLE = re.compile(r"norm|position|router|(out|down)\.bias")
_BLOCK = re.compile(r"blocks\.\d+")
_EXPERT = re.compile(r"\.experts\.(\d+)\.")
GRAD_BYTES = 4  # ddp keeps fp32 weights, megatron is told to reduce in fp32
CONTROL_BYTES = 64  # messages of so many are not counted


def wire_bytes(operation: str, n: int, payload: float) -> float:
    """Bytes that each of the n ranks sends when `payload` bytes go through a collective.

    The ring algorithms of Patarasu & Yuan 2009 ("Bandwidth optimal all-reduce algorithms for
    clusters of workstations") and of nccl-tests' PERFORMANCE.md: an all-reduce sends 2(n-1)/n of
    its tensor; reduce-scatter, all-gather and all-to-all (n-1)/n of the whole; broadcast and reduce
    (n-1)/n, the mean over the ring, whose last rank sends nothing. A send sends all of it.
    `payload`: the tensor that is reduced or broadcast; all that is gathered, or scattered.
    """
    if operation == "send":
        return float(payload)
    return (2 if operation == "all_reduce" else 1) * (n - 1) / n * payload


@dataclass
class Volume:
    """What one rank sends along one axis in one optimizer step. `calls` is None where a library's
    bucket size, not the model, gives the number of calls."""

    calls: int | None = 0
    bytes: float = 0
    wire_bytes: float = 0.0

    def add(self, operation: str, n: int, payload: float, calls: int | None = 1) -> None:
        """`calls` collectives of `payload` bytes each; calls=None: so many bytes in some calls."""
        times = 1 if calls is None else calls
        self.calls = None if calls is None or self.calls is None else self.calls + calls
        self.bytes += times * payload
        self.wire_bytes += times * wire_bytes(operation, n, payload)


def step_volumes(spec: RunSpec, rank: int) -> dict[str, Volume | None]:
    """{axis: volume} of one optimizer step of a rank; axes with nothing to send are left out.

    Messages of at most 64 bytes (losses, norms, flags) are not in it, nor what only a first step
    sends (DeepSpeed's pipeline describes its first message). None: no closed formula is known.
    Along ep and etp it is the mean over ranks: a rank receives what routers choose to send.
    """
    volumes: dict[str, Volume | None] = {}
    layout = spec.layout
    if layout.tp > 1:
        volumes["tp"] = _tensor(spec, rank)
    if layout.pp > 1:
        volumes["pp"] = _pipeline(spec, rank)
        if spec.model.tied and layout.coords(rank)["pp"] in (0, layout.pp - 1):
            # The gradients of two copies of the word embedding; DeepSpeed's pipeline sends bf16's
            # as the fp32 sums of its BF16_Optimizer.
            wide = 4 if spec.engine == "megatron" or spec.precision != "fp16" else 2
            volumes["embedding"] = Volume()
            rows = spec.padded_vocab // layout.tp
            volumes["embedding"].add("all_reduce", 2, wide * rows * spec.model.hidden)
    if layout.cp > 1:
        volumes["cp"] = _ring(spec, rank)
    if layout.dp * layout.cp > 1:
        volumes["dp"] = _data(spec, rank)
    if spec.model.experts and spec.engine == "megatron":
        of, layers = spec.model.experts, sum(blocks_of(spec, rank).values())
        if layers and layout.ep * layout.etp > 1:
            volumes |= _dispatched(spec, layers)
        if layers and layout.expert_copies > 1:
            volumes["expert_dp"] = _data(spec, rank, experts=True)
        n, counts = layout.tp * layout.cp, 8 * of.num_experts
        if n > 1 and of.moe_aux_loss_coeff and counts > CONTROL_BYTES:  # of the loss that balances
            times = layout.n_micro * layers * (1 + (layout.recompute == "full"))
            volumes["tp" if layout.tp > 1 else "cp"].add("all_reduce", n, counts, times)
    if spec.engine == "deepspeed_zero" and layout.ep > 1:  # AutoEP's are in no formula
        volumes |= {"ep": None, "dp": None}
    if spec.model.mla and layout.tp > 1:  # what latent attention holds whole is in no formula
        volumes |= dict.fromkeys(volumes.keys() & {"tp", "dp"})
    return volumes


def blocks_of(spec: RunSpec, rank: int) -> dict[str, bool]:
    """The names of a rank's blocks -> whether each has experts."""
    layout, stage = spec.layout, spec.layout.coords(rank)["pp"]
    blocks = list(spec.model.blocks.items())
    chunks = layout.chunks(spec.model.n_layer)[stage :: layout.pp]
    return dict(blocks[i] for chunk in chunks for i in chunk)


def _dispatched(spec: RunSpec, layers: int) -> dict[str, Volume]:
    """megatron-core's dispatchers, of a rank with so many layers with experts. Tokens travel to
    their experts and back (GShard, Lepikhin et al. 2020, arXiv 2006.16668, section 3.2).

    alltoall: the ep ranks exchange the hidden states of each token's C choices, and their weights
    in fp32; the etp ranks of an expert gather these of all, and add up its output in fp32.
    allgather: the ep x etp ranks gather all tokens, with a weight and a truth value for each
    expert, and add up the outputs in fp32. Backward does the converse.
    """
    assert (of := spec.model.experts)
    layout, e = spec.layout, _width(spec)
    ep, etp, both = layout.ep, layout.etp, layout.ep * layout.etp
    volumes = {axis: Volume() for axis in ("ep", "etp") if getattr(layout, axis) > 1}
    joint = volumes.get("ep", volumes.get("etp"))  # of messages between all ep x etp ranks
    tokens = layout.micro_batch * spec.seq_len // layout.cp // layout.tp
    backward = layout.n_micro * layers
    forward = backward * (2 if layout.recompute == "full" else 1)
    gather, scatter = "all_gather", "reduce_scatter"
    h, E, C = spec.model.hidden, of.num_experts, of.moe_router_topk
    if spec.moe_token_dispatcher_type == "allgather":
        joint.add(gather, both, both * tokens * E, forward)
        messages = [(joint, both, gather, scatter, both * size * tokens) for size in (4 * E, e * h)]
        messages.append((joint, both, scatter, gather, both * 4 * h * tokens))
    else:
        if 8 * E * both > CONTROL_BYTES:  # how many tokens go to each expert
            joint.add(gather, both, 8 * E * both, forward)
        exchanged = [C * size * tokens for size in (e * h, 4, e * h)]
        there, sum_ = [etp * size for size in exchanged[:2]], etp * C * 4 * h * tokens
        messages = [(volumes.get("ep"), ep, "all_to_all", "all_to_all", x) for x in exchanged]
        messages += [(volumes.get("etp"), etp, gather, scatter, x) for x in there]
        messages.append((volumes.get("etp"), etp, scatter, gather, sum_))
    for volume, n, ahead, back, payload in messages:
        if volume:
            volume.add(ahead, n, payload, forward)
            volume.add(back, n, payload, backward)
    return volumes


def _width(spec: RunSpec) -> int:
    """Bytes of an activation's number."""
    return 4 if spec.precision == "fp32" else 2


def _hidden_bytes(spec: RunSpec) -> int:
    """Bytes of one micro-batch's hidden states, b*s*h*e."""
    tokens = spec.layout.micro_batch * spec.seq_len // spec.layout.cp
    return tokens * spec.model.hidden * _width(spec)


def _tensor(spec: RunSpec, rank: int) -> Volume:
    """Shoeybi et al. 2019 (Megatron-LM), section 3: two all-reduces of b*s*h per layer forward, two
    backward; one for the embedding forward and one for the logits' input backward; section 4's
    parallel cross-entropy all-reduces three numbers per token (maximum, own logit, sum) in fp32.

    Sequence parallelism (Korthikanti et al. 2022, section 4.2.2) makes an all-gather and a
    reduce-scatter of each, and gathers the input of every column-parallel layer once more for its
    weight's gradient; the word embedding stays an all-reduce where a position embedding is added
    before the sequence is cut. Full recomputation repeats the layers' forward part.

    A norm of queries or keys sees its rank's heads alone, so its gradient is summed over tp:
    megatron does so once a step in fp32, the DeepSpeed engines in every backward pass.
    """
    layout, n = spec.layout, spec.layout.tp
    stage, m = layout.coords(rank)["pp"], layout.n_micro
    model = spec.model
    hidden = _hidden_bytes(spec)
    blocks, of = list(blocks_of(spec, rank).values()), model.experts
    layers, routed = len(blocks), sum(blocks)
    # Attention, and the feed-forwards but for experts, which tp does not split.
    split = 2 * layers
    if of and not of.moe_shared_expert_intermediate_size:
        split -= routed
    first, last = stage == 0, stage == layout.pp - 1
    again = layout.recompute == "full"
    volume = Volume()
    norm = 1 + (model.norm == "layernorm")  # vectors of a norm
    of_heads = 2 * layers * norm * model.qk_norm  # vectors whose gradients are summed over tp
    summed = of_heads * model.head_dim
    if layout.sequence_parallel:
        # Per layer forward 2 + 2; backward per column-parallel layer the input again and the
        # scattered gradient, per row-parallel layer the gathered gradient.
        gathers = split * (3 + again) + first + last * 2
        scatters = split * (2 + again) + last
        embedded = "all_reduce" if model.position == "learned" else "reduce_scatter"
        volume.add(embedded, n, hidden, m * first)
        volume.add("all_gather", n, hidden, m * gathers)
        volume.add("reduce_scatter", n, hidden, m * scatters)
        # What every tp rank holds whole but sees with a part of the sequence: norms, routers and
        # the biases after row-parallel layers.
        summed += model.hidden * (layers * 2 * (norm + model.bias) + last * norm)
        if of:
            summed += routed * of.num_experts * (model.hidden + model.bias)
    else:
        volume.add("all_reduce", n, hidden, m * (split * (2 + again) + first + last))
    if summed and spec.engine == "megatron":
        volume.add("all_reduce", n, GRAD_BYTES * summed)
    elif summed:
        volume.add("all_reduce", n, _width(spec) * model.head_dim, m * of_heads)
    if last:
        per_token = layout.micro_batch * spec.seq_len // layout.cp * 4
        if spec.te_loss:  # four numbers of each rank, once
            volume.add("all_gather", n, n * 4 * per_token, m)
        elif spec.fuses_loss:  # it sends two of the numbers together
            volume.add("all_reduce", n, per_token, m)
            volume.add("all_reduce", n, 2 * per_token, m)
        else:
            volume.add("all_reduce", n, per_token, 3 * m)
    if spec.engine == "deepspeed_pipe":
        # What its stages send is cut over tp (`pipe_partitioned`, `grad_partitioned`) and must be
        # gathered: a stage's input; its own output, which it had cut, and that output's gradient.
        volume.add("all_gather", n, hidden, m * ((not first) + 2 * (not last)))
    return volume


def _pipeline(spec: RunSpec, rank: int) -> Volume:
    """Narayanan et al. 2021 (SC'21), section 3.2: b*s*h per micro-batch and boundary, each way.

    With vpp chunks per rank there are pp * vpp - 1 boundaries: rank r sends forward from every
    chunk but the model's last, and backward from every chunk but the first.
    """
    layout = spec.layout
    stage, m = layout.coords(rank)["pp"], layout.n_micro
    hidden = _hidden_bytes(spec)
    chunks = layout.vpp - (stage == layout.pp - 1) + layout.vpp - (stage == 0)
    volume = Volume()
    if spec.engine == "deepspeed_pipe" and layout.tp > 1:
        # 1/tp of the tensor and a description in int64: its three sizes and their number, the
        # number of parts, which one it is, and tp + 1 boundaries.
        volume.add("send", 2, hidden / layout.tp, m * chunks)
        volume.add("send", 2, 8 * (3 + 3 + layout.tp + 1), m * chunks)
    else:
        part = layout.tp if layout.sequence_parallel else 1
        volume.add("send", 2, hidden / part, m * chunks)
    return volume


def _ring(spec: RunSpec, rank: int) -> Volume:
    """Liu et al. 2023 (arXiv 2310.01889): keys and values of s/cp tokens go around the cp ranks in
    forward, and again in backward, one step behind them their gradients (Transformer Engine's p2p).
    """
    layout, model = spec.layout, spec.model
    tokens = layout.micro_batch * spec.seq_len // layout.cp
    part = 2 * tokens * model.kv_heads // layout.tp * model.head_dim * _width(spec)
    times = layout.n_micro * len(blocks_of(spec, rank))
    forward = (layout.cp - 1) * (2 if layout.recompute == "full" else 1)
    volume = Volume()
    volume.add("send", 2, part, times * (forward + 2))
    volume.add("send", 2, 2 * part, times * (layout.cp - 2))
    return volume


def parameter_sizes(
    spec: RunSpec, rank: int, experts: bool | None = None
) -> list[tuple[int, bool]]:
    """(elements, whether it is a matrix) of every parameter that a rank holds; experts: of those of
    experts, or of the others alone."""
    model, layout = spec.model, spec.layout
    stage, last = layout.coords(rank)["pp"], layout.pp - 1
    # megatron-core's fc1 is the gate and up in one
    fused = model.gated and (layout.tp > 1 or spec.engine in ("megatron", "deepspeed_pipe"))
    here = {"embedding": stage == 0, **dict.fromkeys(("norm", "output"), stage == last)}
    here |= dict.fromkeys(blocks_of(spec, rank), True)
    held = model.experts.num_experts // layout.ep if model.experts else 0
    sizes = []
    for name, shape in parameter_shapes(replace(model, vocab_size=spec.padded_vocab)).items():
        block, number = _BLOCK.match(name), _EXPERT.search(name)
        if not here.get(block[0] if block else name.split(".")[0]):
            continue
        if fused and ".gate." in name or experts not in (None, bool(number)):
            continue
        if name.endswith(".expert_bias"):  # which no gradient trains
            continue
        if number and int(number[1]) >= held:  # this rank's are as large as the first
            continue
        ways = layout.etp if number else layout.tp
        size = math.prod(shape) // (1 if WHOLE.search(name) else ways)
        sizes.append((size * (2 if fused and ".up." in name else 1), len(shape) == 2))
    if model.tied and stage == last > 0 and not experts:
        sizes.append((spec.padded_vocab // layout.tp * model.hidden, True))
    return sizes


def _data(spec: RunSpec, rank: int, experts: bool = False) -> Volume | None:
    """Gradients and parameters over the n = dp ranks, as each library truly moves them; experts: of
    megatron's experts over the ranks that have the same.

    ddp: one all-reduce of the fp32 gradients (Li et al. 2020, "PyTorch Distributed"), in buckets.
    megatron (core 0.16): the same; with zero_stage 1 a reduce-scatter, and an all-gather of the
    parameters, each padded to 64 elements and their bucket to lcm(n, 128).
    DeepSpeed (0.19), counted in elements of each library's flat buffers; gradients in fp32,
    parameters in fp32 or bf16:
    - zero 0: an all-reduce. zero 1: an all-reduce too (its buckets span several owners, and are
      not scattered), then the all-gather of the updated parameters, each of the optimizer's groups
      padded to 2n elements. zero 2: the all-reduce with every micro-batch.
    - zero 3: a reduce-scatter with every micro-batch. Parameters below 100,000 elements stay
      gathered, but for one all-gather each after the update. Larger ones are gathered where a
      trace of earlier steps says so: no formula.
    """
    if spec.engine == "fsdp2":
        return _fully_sharded(spec)
    layout, n, e = spec.layout, spec.layout.dp * spec.layout.cp, _width(spec)
    n = layout.expert_copies if experts else n
    sizes = parameter_sizes(spec, rank, experts if spec.engine == "megatron" else None)
    gradients = GRAD_BYTES * sum(size for size, _ in sizes)
    volume = Volume(calls=None)
    if spec.engine in ("ddp", "megatron"):
        if layout.zero_stage == 0:
            volume.add("all_reduce", n, gradients, None)
        else:
            padded = _up(sum(_up(size, 64) for size, _ in sizes), math.lcm(n, 128))
            volume.add("reduce_scatter", n, GRAD_BYTES * padded, None)
            volume.add("all_gather", n, e * padded, None)
        return volume
    if spec.precision == "fp16":
        return None  # which of its buffers are fp32 then depends on further settings
    if layout.zero_stage < 3:
        times = layout.n_micro if layout.zero_stage == 2 else 1
        volume.add("all_reduce", n, gradients * times, None)
        if layout.zero_stage:
            groups = [sum(s for s, matrix in sizes if matrix == of) for of in (True, False)]
            padded = sum(_up(size, 2 * n) for size in groups)
            volume.add("all_gather", n, e * padded, None)
        return volume
    if max(size for size, _ in sizes) >= PERSISTENT:
        return None
    padded = sum(_up(size, n) for size, _ in sizes)
    volume.add("reduce_scatter", n, GRAD_BYTES * padded * layout.n_micro, None)
    volume.add("all_gather", n, e * padded, None)
    return volume


def _fully_sharded(spec: RunSpec) -> Volume:
    """fsdp2's (torch 2.13): a group of parameters (a block; an untied embedding; the rest) is one
    message; the first dimension of each parameter is padded to a multiple of the shards.

    All-gathers in compute precision: with zero_stage 3 a block's twice and the others' once with
    every micro-batch, with zero_stage 2 each once a step. `reductions` times a step a
    reduce-scatter in fp32 and, where there are several copies, once an all-reduce of the shards
    between them.
    """
    layout, shards = spec.layout, spec.layout.shards
    padded: Counter[str] = Counter()  # elements of a group
    for name, shape in parameter_shapes(replace(spec.model, vocab_size=spec.padded_vocab)).items():
        group = block[0] if (block := _BLOCK.match(name)) else name.split(".")[0]
        if not block and (spec.model.tied or group != "embedding"):
            group = "last"
        if not name.endswith(".expert_bias"):  # which no gradient trains
            padded[group] += _up(shape[0], shards) * math.prod(shape[1:])
    per_step = layout.n_micro if layout.zero_stage == 3 else 1
    per_block = 2 * per_step if layout.zero_stage == 3 else 1
    volume = Volume()
    alike = Counter(("." in group, elements) for group, elements in padded.items())
    for (is_block, elements), groups in alike.items():
        gathers = per_block if is_block else per_step
        if shards > 1:
            volume.add("all_gather", shards, _width(spec) * elements, groups * gathers)
            times = groups * layout.reductions
            volume.add("reduce_scatter", shards, GRAD_BYTES * elements, times)
        if layout.dp > shards:
            volume.add("all_reduce", layout.dp // shards, GRAD_BYTES * elements // shards, groups)
    return volume


def _up(size: int, divisor: int) -> int:
    return -(-size // divisor) * divisor
