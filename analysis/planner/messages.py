"""Bytes that one rank sends in a training step, exactly, along each axis of its split.

A breakdown counts them, and these formulas say what it should count. The time model has the same
messages by a layer and a mean rank, without what is small: padding, the loss, norms' gradients. It
takes what stages send from here.

Letters: b sequences of a micro-batch, s their length, h hidden, m micro-batches of a step, n ranks
of a group, e bytes of an activation's number (4 in fp32, else 2). A half is what an all-gather or a
reduce-scatter of n ranks sends; an all-reduce sends two (Korthikanti et al. 2022, arXiv 2205.05198,
section 4.2.2).
"""

import math
import re
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np

from models.config import parameter_shapes
from parallel.config.run_spec import RunSpec
from parallel.measure.wire import CONTROL_BYTES, wire_bytes

PERSISTENT = 100_000  # elements; DeepSpeed's stage3_param_persistence_threshold
# What each tp rank holds whole: norms, positions, routers and the biases after row-parallel layers.
WHOLE = re.compile(r"norm|position|router|(out|down)\.bias")
_BLOCK = re.compile(r"blocks\.\d+")
_EXPERT = re.compile(r"\.experts\.(\d+)\.")
GRAD_BYTES = 4  # ddp keeps fp32 weights, megatron is told to reduce in fp32


def sent_bytes(spec: RunSpec, rank: int) -> dict[str, float | None]:
    """Returns {axis: bytes} of one optimizer step of a rank, without axes that have no message.

    Messages of at most 64 bytes (losses, norms, flags) are not in it, nor what only a first step
    sends (DeepSpeed's pipeline describes its first message). None: no closed formula is known.
    Along ep and etp it is the mean over ranks: a rank receives what routers choose to send.
    """
    sent: dict[str, float | None] = {}
    layout, model = spec.layout, spec.model
    if layout.tp > 1:
        sent["tp"] = _tensor_parallel(spec, rank)
    if layout.pp > 1:
        sent["pp"] = _pipeline(spec, rank)
        if model.tied and layout.coords(rank)["pp"] in (0, layout.pp - 1):
            # The gradients of two copies of the word embedding; DeepSpeed's pipeline sends bf16's
            # as the fp32 sums of its BF16_Optimizer.
            width = 4 if spec.engine == "megatron" or spec.precision != "fp16" else 2
            table = spec.padded_vocab // layout.tp * model.hidden
            sent["embedding"] = wire_bytes("all_reduce", 2, width * table)
    if layout.cp > 1:
        sent["cp"] = _context_parallel(spec, rank)
    if layout.dp * layout.cp > 1:
        sent["dp"] = _data_parallel(spec, rank)
    experts = model.experts
    if experts and spec.engine == "megatron":
        routed_layers = sum(blocks_of(spec, rank).values())
        if routed_layers and layout.ep * layout.etp > 1:
            sent |= _expert_parallel(spec, routed_layers)
        if routed_layers and layout.expert_copies > 1:
            sent["expert_dp"] = _data_parallel(spec, rank, experts=True)
        n, counts = layout.tp * layout.cp, 8 * experts.num_experts
        if n > 1 and experts.moe_aux_loss_coeff and counts > CONTROL_BYTES:  # of the loss
            passes = layout.n_micro * routed_layers * _forward_passes(spec)
            axis = "tp" if layout.tp > 1 else "cp"
            sent[axis] += passes * wire_bytes("all_reduce", n, counts)
    if spec.engine == "deepspeed_zero" and layout.ep > 1:  # AutoEP's are in no formula
        sent |= {"ep": None, "dp": None}
    if model.mla and layout.tp > 1:  # what latent attention holds whole is in no formula
        sent |= dict.fromkeys(sent.keys() & {"tp", "dp"})
    return sent


def blocks_of(spec: RunSpec, rank: int) -> dict[str, bool]:
    """Returns, by the name of each block of a rank, whether it has experts."""
    layout, stage = spec.layout, spec.layout.coords(rank)["pp"]
    blocks = list(spec.model.blocks.items())
    chunks = layout.chunks(spec.model.n_layer)[stage :: layout.pp]
    return dict(blocks[i] for chunk in chunks for i in chunk)


def _forward_passes(spec: RunSpec) -> int:
    """Returns how often a layer's forward runs: full recomputation repeats it."""
    return 2 if spec.layout.recompute == "full" else 1


def _width(spec: RunSpec) -> int:
    """Returns the bytes of an activation's number."""
    return 4 if spec.precision == "fp32" else 2


def _tokens(spec: RunSpec) -> int:
    """Returns the tokens of one micro-batch on one rank, b*s/cp."""
    return spec.layout.micro_batch * spec.seq_len // spec.layout.cp


def _hidden_bytes(spec: RunSpec) -> int:
    """Returns the bytes of one micro-batch's hidden states, b*s*h*e."""
    return _tokens(spec) * spec.model.hidden * _width(spec)


def _tensor_parallel(spec: RunSpec, rank: int) -> float:
    """Returns the bytes per step that a rank sends along tp.

    Shoeybi et al. 2019 (Megatron-LM), section 3: two all-reduces of b*s*h per layer forward, two
    backward; one for the embedding forward and one for the logits' input backward; section 4's
    parallel cross-entropy all-reduces three numbers per token (maximum, own logit, sum) in fp32.

    Sequence parallelism (Korthikanti et al. 2022, section 4.2.2) makes an all-gather and a
    reduce-scatter of each, and gathers the input of every column-parallel layer once more for its
    weight's gradient; the word embedding stays an all-reduce where a position embedding is added
    before the sequence is cut. Full recomputation repeats the layers' forward part.

    A norm of queries or keys sees its rank's heads alone, so its gradient is summed over tp:
    megatron does so once a step in fp32, the DeepSpeed engines in every backward pass.
    """
    layout, tp, model = spec.layout, spec.layout.tp, spec.model
    stage = layout.coords(rank)["pp"]
    first, last = stage == 0, stage == layout.pp - 1
    experts = model.experts
    blocks = list(blocks_of(spec, rank).values())  # whether each has experts
    layers, routed = len(blocks), sum(blocks)
    # Attention, and the feed-forwards but for experts, which tp does not split.
    split = 2 * layers
    if experts and not experts.moe_shared_expert_intermediate_size:
        split -= routed
    vectors = 1 + (model.norm == "layernorm")  # of a norm
    head_vectors = 2 * layers * vectors * model.qk_norm  # whose gradients are summed over tp
    summed = head_vectors * model.head_dim
    passes = _forward_passes(spec)
    # halves: a micro-batch's messages of hidden states, each half of an all-reduce: an all-gather
    # or a reduce-scatter.
    if layout.sequence_parallel:
        # Per layer forward 2 + 2; backward per column-parallel layer the input again and the
        # scattered gradient, per row-parallel layer the gathered gradient.
        halves = split * (3 + 2 * passes)
        halves += first * (3 if model.position == "learned" else 2) + last * 3
        # What every tp rank holds whole but sees with a part of the sequence: norms, routers and
        # the biases after row-parallel layers.
        summed += model.hidden * (layers * 2 * (vectors + model.bias) + last * vectors)
        if experts:
            summed += routed * experts.num_experts * (model.hidden + model.bias)
    else:
        halves = 2 * (split * (1 + passes) + first + last)
    deepspeed = spec.engine == "deepspeed_pipe"
    halves += int(stage_gathers(first, last, scattered=deepspeed, deepspeed=deepspeed))
    n_micro = layout.n_micro
    sent = n_micro * halves * wire_bytes("all_gather", tp, _hidden_bytes(spec))
    if spec.engine == "megatron":
        sent += wire_bytes("all_reduce", tp, GRAD_BYTES * summed)
    elif summed:
        head_bytes = _width(spec) * model.head_dim
        sent += n_micro * head_vectors * wire_bytes("all_reduce", tp, head_bytes)
    if last:
        sent += n_micro * 3 * wire_bytes("all_reduce", tp, 4 * _tokens(spec))
    return sent


def _pipeline(spec: RunSpec, rank: int) -> float:
    """Returns the bytes per step that a rank sends along pp.

    Narayanan et al. 2021 (SC'21), section 3.2: b*s*h per micro-batch and boundary, each way.

    With vpp chunks per rank there are pp * vpp - 1 boundaries: rank r sends forward from every
    chunk but the model's last, and backward from every chunk but the first.
    """
    layout, deepspeed = spec.layout, spec.engine == "deepspeed_pipe"
    stage = layout.coords(rank)["pp"]
    cut = layout.sequence_parallel or deepspeed
    message = float(stage_message(_hidden_bytes(spec), layout.tp, cut, deepspeed))
    crossings = layout.vpp - (stage == layout.pp - 1) + layout.vpp - (stage == 0)
    return layout.n_micro * crossings * wire_bytes("send", 2, message)


def stage_message(hidden: Any, tp: Any, cut: Any, deepspeed: Any) -> Any:
    """Returns the bytes that a rank sends over one boundary of stages for one micro-batch, whose
    hidden states are `hidden` bytes; numbers or arrays. cut: over tp, by sequence parallelism
    (megatron-core's get_tensor_shapes), or `Columns.scattered`.

    DeepSpeed's pipeline describes each part in int64: the three sizes of the whole and their
    number, the number of parts, which one it is, and tp + 1 boundaries.
    """
    description = np.where(deepspeed & (tp > 1), 8.0 * (3 + 3 + tp + 1), 0.0)
    return hidden / np.where(cut, tp, 1) + description


def stage_gathers(
    first: Any, last: Any, scattered: Any, deepspeed: Any, whole_gradients: Any = False
) -> Any:
    """Returns how many all-gathers over tp a stage makes of a micro-batch where stages scatter what
    they send (`Columns.scattered`, `Columns.whole_gradients`); numbers or arrays.

    Of its input, and of its output's gradient. DeepSpeed's pipeline also gathers the output that it
    had cut itself.
    """
    of_output = np.where(whole_gradients, 0, 1) + np.where(deepspeed, 1, 0)
    return np.where(scattered, np.where(first, 0, 1) + np.where(last, 0, of_output), 0)


def _context_parallel(spec: RunSpec, rank: int) -> float:
    """Returns the bytes per step that a rank sends along cp.

    Liu et al. 2023 (arXiv 2310.01889): keys and values of s/cp tokens go around the cp ranks in
    forward, and again in backward, one step behind them their gradients (Transformer Engine's p2p).
    """
    layout, model = spec.layout, spec.model
    part = 2 * _tokens(spec) * model.kv_heads // layout.tp * model.head_dim * _width(spec)
    parts = (layout.cp - 1) * _forward_passes(spec) + 2 + 2 * (layout.cp - 2)
    layers = len(blocks_of(spec, rank))
    return layout.n_micro * layers * parts * wire_bytes("send", 2, part)


def _expert_parallel(spec: RunSpec, layers: int) -> dict[str, float]:
    """Returns the bytes per step, by axis, that a rank with `layers` layers of experts sends along
    ep and etp with megatron-core's dispatchers. Tokens travel to their experts and back (GShard,
    Lepikhin et al. 2020, arXiv 2006.16668, section 3.2).

    alltoall: the ep ranks exchange the hidden states of each token's choices, and their weights
    in fp32; the etp ranks of an expert gather these of all, and add up its output in fp32.
    allgather: the ep x etp ranks gather all tokens, with a weight and a truth value for each
    expert, and add up the outputs in fp32. Backward does the converse.
    """
    assert (experts := spec.model.experts)
    layout, ep, etp = spec.layout, spec.layout.ep, spec.layout.etp
    group = ep * etp  # ranks that have all experts together
    n_experts, choices = experts.num_experts, experts.moe_router_topk
    state = _width(spec) * spec.model.hidden  # bytes of a token's hidden state, ...
    fp32_state = 4 * spec.model.hidden  # ... and of an expert's output for it
    joint = "ep" if ep > 1 else "etp"  # the axis of messages between all ep x etp ranks
    tokens = _tokens(spec) // layout.tp
    forward = layout.n_micro * layers * _forward_passes(spec)
    passes = forward + layout.n_micro * layers
    if spec.moe_token_dispatcher_type == "allgather":
        # A weight in fp32 for each expert; in forward a truth value of one byte, too.
        token = (4 * n_experts + state + fp32_state) * passes + n_experts * forward
        gathered = group * tokens * token
        return {joint: wire_bytes("all_gather", group, gathered)}
    sent = {axis: 0.0 for axis in ("ep", "etp") if getattr(layout, axis) > 1}
    counts = 8 * n_experts * group  # bytes: how many tokens go to each expert, in int64
    if counts > CONTROL_BYTES:
        sent[joint] += forward * wire_bytes("all_gather", group, counts)
    if ep > 1:
        exchanged = choices * tokens * (state + 4 + state)  # to the experts, and back
        sent["ep"] += passes * wire_bytes("all_to_all", ep, exchanged)
    if etp > 1:
        gathered = etp * choices * tokens * (state + 4 + fp32_state)
        sent["etp"] += passes * wire_bytes("all_gather", etp, gathered)
    return sent


class ParameterSize(NamedTuple):
    """The elements of a parameter, and whether it is a matrix."""

    elements: int
    is_matrix: bool


def parameter_sizes(spec: RunSpec, rank: int, experts: bool | None = None) -> list[ParameterSize]:
    """Returns the size of every parameter that a rank holds. `experts` selects the parameters of
    experts (True), or all others (False)."""
    model, layout = spec.model, spec.layout
    stage, last = layout.coords(rank)["pp"], layout.pp - 1
    # megatron-core's fc1 is the gate and up in one.
    fused = model.gated and (layout.tp > 1 or spec.engine in ("megatron", "deepspeed_pipe"))
    on_stage = {"embedding": stage == 0, **dict.fromkeys(("norm", "output"), stage == last)}
    on_stage |= dict.fromkeys(blocks_of(spec, rank), True)
    own_experts = model.experts.num_experts // layout.ep if model.experts else 0
    sizes = []
    for name, shape in parameter_shapes(replace(model, vocab_size=spec.padded_vocab)).items():
        block, number = _BLOCK.match(name), _EXPERT.search(name)
        if not on_stage.get(block[0] if block else name.split(".")[0]):
            continue
        if fused and ".gate." in name:  # it is counted with up
            continue
        if experts is not None and experts != bool(number):  # it is not asked for
            continue
        if name.endswith(".expert_bias"):  # no gradient trains it
            continue
        if number and int(number[1]) >= own_experts:  # this rank's are as large as the first ones
            continue
        ranks = layout.etp if number else layout.tp  # that share the parameter
        elements = math.prod(shape) // (1 if WHOLE.search(name) else ranks)
        if fused and ".up." in name:
            elements *= 2
        sizes.append(ParameterSize(elements, len(shape) == 2))
    # The last stage has a copy of a tied embedding, as its output layer.
    if model.tied and layout.pp > 1 and stage == last and not experts:
        sizes.append(ParameterSize(spec.padded_vocab // layout.tp * model.hidden, True))
    return sizes


def _data_parallel(spec: RunSpec, rank: int, experts: bool = False) -> float | None:
    """Returns the bytes per step that a rank sends along the n = dp x cp ranks, for gradients and
    parameters as each library truly moves them. `experts` takes those of megatron's experts, over
    the ranks that have the same ones.

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
    layout, width = spec.layout, _width(spec)
    n = layout.expert_copies if experts else layout.dp * layout.cp
    sizes = parameter_sizes(spec, rank, experts if spec.engine == "megatron" else None)
    gradients = wire_bytes("all_reduce", n, GRAD_BYTES * sum(size for size, _ in sizes))
    if spec.engine in ("ddp", "megatron"):
        if layout.zero_stage == 0:
            return gradients
        padded = _up(sum(_up(size, 64) for size, _ in sizes), math.lcm(n, 128))
        return wire_bytes("all_gather", n, (GRAD_BYTES + width) * padded)
    if spec.precision == "fp16":
        return None  # which of its buffers are fp32 then depends on further settings
    if layout.zero_stage == 0:
        return gradients
    if layout.zero_stage < 3:
        # The two groups of the optimizer: matrices, and all else.
        matrices = sum(size.elements for size in sizes if size.is_matrix)
        vectors = sum(size.elements for size in sizes if not size.is_matrix)
        padded = _up(matrices, 2 * n) + _up(vectors, 2 * n)
        times = layout.n_micro if layout.zero_stage == 2 else 1
        return times * gradients + wire_bytes("all_gather", n, width * padded)
    if max(size for size, _ in sizes) >= PERSISTENT:
        return None
    padded = sum(_up(size, n) for size, _ in sizes)
    return wire_bytes("all_gather", n, (GRAD_BYTES * layout.n_micro + width) * padded)


def _fully_sharded(spec: RunSpec) -> float:
    """Returns the bytes per step that a rank sends under fsdp2 (torch 2.13). A group of parameters
    (a block; an untied embedding; the rest) is one message; the first dimension of each parameter
    is padded to a multiple of the shards.

    All-gathers in compute precision: with zero_stage 3 a block's twice and the others' once with
    every micro-batch, with zero_stage 2 each once a step. `reductions` times a step a
    reduce-scatter in fp32 and, where there are several copies, once an all-reduce of the shards
    between them.
    """
    layout, shards = spec.layout, spec.layout.shards
    in_blocks = outside = 0  # elements
    for name, shape in parameter_shapes(replace(spec.model, vocab_size=spec.padded_vocab)).items():
        if name.endswith(".expert_bias"):  # which no gradient trains
            continue
        padded = _up(shape[0], shards) * math.prod(shape[1:])
        if _BLOCK.match(name):
            in_blocks += padded
        else:
            outside += padded
    elements = in_blocks + outside
    gathered = elements
    if layout.zero_stage == 3:
        gathered = (2 * in_blocks + outside) * layout.n_micro
    # A reduce-scatter sends as many bytes as an all-gather.
    payload = _width(spec) * gathered + GRAD_BYTES * elements * layout.reductions
    between = wire_bytes("all_reduce", layout.dp // shards, GRAD_BYTES * elements / shards)
    return wire_bytes("all_gather", shards, payload) + between


def _up(size: int, divisor: int) -> int:
    """Returns the least multiple of the divisor that holds the size."""
    return -(-size // divisor) * divisor
