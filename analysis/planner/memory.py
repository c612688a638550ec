"""Bytes of GPU memory of one training step, part by part, on the first and on the fullest rank.

Recompute is 0 none, 1 selective or 2 full, offload 0 none, 1 optimizer or 2 all. Letters: b
sequences of a micro-batch, s sequence length, h hidden, a heads of size d, k heads of keys and
values, f feed-forward, t tp, V vocabulary as it is held: padded to a multiple of t, and in this
repository's runs of 128 t.

Sources: [K] Korthikanti et al. 2022, arXiv 2205.05198 (activations). [R] Rajbhandari et al. 2020,
arXiv 1910.02054 (ZeRO). [N] Narayanan et al. 2021, arXiv 2104.04473 (schedules).
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from analysis.planner import megatron_memory
from analysis.planner.columns import Columns
from base.errors import UsageError
from base.units import GIB
from models.config import GPTConfig, in_words
from models.headroom import CONSTANTS

FULL, SELECTIVE = 2, 1
STAGES = ("first", "middle", "last")
PARTS = ("weights", "gradients", "optimizer", "fp8_copies", "activations", "keys_and_values")
PARTS += ("masks", "logits", "buckets", "library")
LIVE = 1e9  # elements: DeepSpeed's default stage3_max_live_parameters


class ByStage(NamedTuple):
    """Of the first, the fullest middle and the last stage of a pipeline."""

    first: np.ndarray
    middle: np.ndarray
    last: np.ndarray


def stage_layers(x: Columns) -> ByStage:
    """Layers of the stages: those that are stated. The middle stages share the others,
    the fullest of them has the fraction of a layer.

    Elsewhere: if pp divides the layers, all stages are equal. If it divides layers + 2, embedding
    and logits count as a layer each (the BLOOM rule). Otherwise the first stages have one layer
    more (DeepSpeed's partition_uniform). A middle stage exists from pp 3 on; below pp 3 its number
    is that of the fullest stage.

    nanotron's build_model: a stage ends with the layer at which the parameters of all layers until
    there reach its share of the parameters of layers and output layer.
    """
    even, balanced = x.layers % x.pp == 0, ends_count(x)
    most = np.ceil(x.layers / x.pp)
    share = (x.layers + x.vocab * x.hidden / layer_params(x)) / x.pp  # in layers
    begun = np.minimum(np.ceil(share * (x.pp - 1)), x.layers)
    cut = np.minimum(np.ceil(share), x.layers)
    usual = ByStage(
        np.where(x.nanotron, cut, np.where(balanced, most - 1, most)),
        np.where(x.nanotron, cut, most),
        np.where(x.nanotron, x.layers - begun, np.where(even, most, most - 1)),
    )
    first, last = x.first_layers, x.last_layers
    shared = np.ceil((x.layers - first - last) / np.maximum(x.pp - 2, 1))
    middle = np.where(x.pp > 2, shared, np.maximum(first, last))
    stated = zip((first, middle, last), usual, strict=True)
    return ByStage(*(np.where(first > 0, ours, other) for ours, other in stated))


def ends_count(x: Columns) -> np.ndarray:
    """Whether embedding and logits count as a layer each when stages are cut, bool (n,)."""
    return (x.layers % x.pp != 0) & ((x.layers + 2) % x.pp == 0)


def _lighter(x: Columns, layers: np.ndarray) -> np.ndarray:
    """Whether the chunks of a stage with the embedding or the logits, of so many layers, are not
    equal, because these take a layer's place in one of them; bool (n,)."""
    counted = np.where(x.first_layers > 0, layers % x.vpp != 0, ends_count(x))
    return counted & (x.vpp > 1)


def layer_params(x: Columns) -> np.ndarray:
    """Weights of one layer's matrices, whole: h (2 a d + 2 k d) + 2 h f, or 3 h f with a gate;
    12 h^2 for a GPT."""
    return x.hidden * (2.0 * x.head_dim * (x.heads + x.kv_heads) + x.ffn * (2.0 + x.glu))


def params(x: Columns, layers: np.ndarray, embedding: np.ndarray | bool) -> np.ndarray:
    """Parameters a rank computes with: its layers and, at an end, the word embedding or the output
    layer. A rank that is both ends has an untied output layer beside the embedding."""
    ends = np.where(x.untied & (x.pp == 1), 2, 1) * embedding
    return (layers * layer_params(x) + ends * x.vocab * x.hidden) / x.tp


def states(x: Columns, n: np.ndarray, tensors_alone: bool = False) -> dict[str, np.ndarray]:
    """Bytes of weights, gradients and optimizer of n parameters [R 5]. Stage 1 shards the
    optimizer, stage 2 also the gradients, stage 3 also the weights.

    Adam in mixed precision holds a master weight and two moments in fp32 (12 bytes); in fp32 two
    moments. DeepSpeed's fp16 optimizer also holds its shard of the gradients in fp32 (at stage 3 it
    steps in sub-groups and holds little of it), which `update` counts with tensors_alone. DeepSpeed
    and nanotron keep bf16 gradients beside their fp32 sums. In fp32, ZeRO copies the shard of
    the weights and, from stage 2, of the gradients.

    FSDP2 shards all but what it gathers. In mixed precision its shard of the weights is the master
    weight. It reduces gradients once a step: micro-batches before the last add up whole ones.
    """
    zero = x.zero_stage
    shards_by_stage = {
        stage: np.where((zero >= stage) | x.fsdp2, x.shards, 1) for stage in (1, 2, 3)
    }
    mixed = x.width < 4
    both = (x.deepspeed | x.nanotron) & (x.grad_width > x.width)
    per_grad = x.grad_width + np.where(both & (zero < 2), x.width, 0)
    fp32_gradients = np.where(x.deepspeed & mixed & (zero < 3) & ~both, 4.0, 0.0)
    copies = np.where(zero > 1, 8.0, 4.0) * (x.deepspeed & ~mixed & (zero > 0))
    per_optimizer = np.where(mixed, 12.0, 8.0) + fp32_gradients * (not tensors_alone) + copies
    resting = np.where((x.offload == 2) | (x.fsdp2 & mixed), 0.0, n * x.width / shards_by_stage[3])
    unsharded = x.fsdp2 & (x.reductions < x.n_micro)
    # Backward begins without gradients.
    before = tensors_alone & (x.fsdp2 & (x.n_micro == 1) | comes_late(x))
    handed_over = (x.offload > 0) & (zero > 1) & ~unsharded  # to the host, as they come
    host = np.where(handed_over, 0.0 if tensors_alone else 0.1, 1.0)
    return {
        "weights": resting + gathered(x, n, 1 if tensors_alone else 2),
        "gradients": np.where(
            before, 0.0, n * per_grad / np.where(unsharded, 1, shards_by_stage[2]) * host
        ),
        "optimizer": n * per_optimizer / shards_by_stage[1] * np.where(x.offload > 0, 0.0, 1.0),
    }


def comes_late(x: Columns) -> np.ndarray:
    """Whether gradients come into being one by one while backward frees activations: with
    DeepSpeed, in a step of one micro-batch, where no buffer of them is there from the start."""
    buffer = (x.grad_width > x.width) | (x.zero_stage == 3)
    return x.deepspeed & (x.pp == 1) & (x.n_micro == 1) & ~buffer


def gathered(x: Columns, n: np.ndarray, blocks: int = 2) -> np.ndarray:
    """Bytes of weights that ZeRO 3 or FSDP2 has gathered at a time, of n parameters.

    FSDP2's zero_stage 3: what is outside the blocks, without an embedding of its own, and two
    blocks, for the next is under way; at the loss one block. Its zero_stage 2 keeps all. Of
    DeepSpeed, ZeRO 3 alone gathers.
    """
    table = x.vocab * x.hidden * x.untied  # the embedding, which is needed at first alone
    sharded = (x.layers - np.minimum(x.layers, blocks)) * layer_params(x) / x.tp + table
    stage_3 = np.where(x.fsdp2, n - sharded, np.minimum(n, LIVE))
    return np.where(x.zero_stage == 3, stage_3, n * x.fsdp2) * x.width


def in_fp8(x: Columns) -> np.ndarray:
    """Whether Transformer Engine runs the layers' products in fp8. FSDP2's fp8 is torchao's, which
    keeps inputs and weights otherwise: its memory is counted as that of bf16."""
    return x.fp8 & ~x.fsdp2


def fp8_copies(x: Columns, layers: np.ndarray) -> np.ndarray:
    """Bytes of the layers' weights in fp8 beside those in bf16, as they are and transposed. Hopper
    multiplies fp8 in one order alone (Transformer Engine, issue 1261 and "Performance
    Considerations"), and Megatron core keeps both from a step's first micro-batch on. Blackwell
    needs no transposed copy where a tensor has one scale: half of this. Scales and their history
    are below 0.1 MB a layer.
    """
    return in_fp8(x) * 2.0 * layers * layer_params(x) / x.tp


def layer_activations(x: Columns) -> np.ndarray:
    """Bytes that backward needs of one layer when nothing is recomputed: s b h (10 + 24/t +
    5 a s / (h t)) for a GPT; with sequence parallelism all of it over t [K eq. 1, 2, 4].

    A token has 8 h whole: the inputs of two norms and of two sub-blocks; 2 h more for dropout's two
    masks. Split are 4 (a + k) d: queries, keys, values and the projection's input; 2 (a + k) d more
    with norms of queries and keys, and with rotary positions: the values are a view of the product
    that also holds the queries and keys from before; and 4 f, or with a gate 6 f where its kernel
    is fused and 8 f where it is not, or 10 f where GELU is written out. RMSNorm keeps no more. With
    autocast the norms' inputs are in fp32. In fp8 the inputs of the four products have one byte
    (`fp8_copies`): 2 h + f less, and a d more, for attention keeps its output beside the
    projection's input. Within documents torch's attention repeats keys and values for all heads.
    """
    low = in_fp8(x)
    replicated = (
        x.hidden
        * (8.0 - 2.0 * low + 2.0 * x.dropout + 4.0 * x.autocast)
        / np.where(x.sequence_parallel, x.tp, 1)
    )
    repeated = x.documents & (x.kv_heads < x.heads)
    turned = 2.0 * x.qk_norm + 2.0 * (x.rotary & ~repeated)
    split = (4.0 + turned) * x.head_dim * (x.heads + x.kv_heads) + low * x.head_dim * x.heads
    split = split + 4.0 * x.head_dim * (x.heads - x.kv_heads) * repeated
    gates = x.glu * (2.0 + 2.0 * x.plain)
    split = split + x.ffn * (4.0 - low + 6.0 * x.gelu_written_out + gates)
    return x.tokens * x.width / 2 * (replicated + split / x.tp) + scores(x)


def scores(x: Columns) -> np.ndarray:
    """Bytes of a layer's s x s scores: softmax's output and, with dropout, its mask and output,
    5 a s^2 b / t [K]. Flash attention keeps none."""
    each = np.where(x.dropout, 5.0, 2.0)
    kept = each * x.heads * x.seq * x.tokens / x.tp * x.width / 2
    return np.where(x.flash, 0.0, kept)


def kept_per_layer(x: Columns) -> np.ndarray:
    """Bytes that one layer keeps from forward to backward under its recompute policy."""
    everything = layer_activations(x)
    selective = everything - scores(x)
    width = np.where(x.autocast, 4.0, x.width)
    edge = x.tokens * x.hidden * width / np.where(x.sequence_parallel, x.tp, 1)
    edge = np.where(x.host_checkpoints, 0.0, edge)
    selective = np.where(x.plain, edge + products(x), selective)
    return np.select([x.recompute == FULL, x.recompute == SELECTIVE], [edge, selective], everything)


def products(x: Columns) -> np.ndarray:
    """Bytes of the outputs of a layer's matrix products and of attention, which selective
    recomputation of PyTorch's own operators keeps; Megatron's drops the scores alone [K 5]."""
    inner = 2.0 * x.head_dim * (x.heads + x.kv_heads) + x.ffn * (1.0 + x.glu)
    return x.tokens * x.width * (inner / x.tp + 2.0 * x.hidden)


def keys_and_values(x: Columns) -> np.ndarray:
    """Bytes of the keys and values of one layer and whole sequences, 2 b s k d / t numbers."""
    return 2.0 * x.micro_batch * x.seq * x.kv_heads * x.head_dim / x.tp * x.width


def received(x: Columns) -> np.ndarray:
    """Bytes of keys, values and their gradients that a context-parallel rank holds of the others':
    a ring (Liu et al. 2023, arXiv 2310.01889) holds one rank's part beside its own."""
    return (x.cp > 1) * 2.0 * keys_and_values(x) / x.cp


def masks(x: Columns, flying: np.ndarray) -> np.ndarray:
    """Bytes of the masks of documents, b s^2 numbers of each micro-batch in flight."""
    return x.documents * flying * x.micro_batch * x.seq**2.0 * x.width


def in_flight(x: Columns, tensors_alone: bool = False) -> ByStage:
    """Micro-batches' worth of a stage's layers that the stages hold at their peak.

    1F1B: min(pp, n_micro) and 1 (2 in DeepSpeed, TrainSchedule.num_pipe_buffers). Interleaved:
    1 + (pp - 1) / (pp vpp) times pp on the first [K 4], where micro-batches go in groups of pp; if
    pp does not divide them, they are one group (microbatch_group_size_per_vp_stage).
    """
    group = np.where(x.n_micro % x.pp, x.n_micro, x.pp)
    last = (group * (x.vpp - 1.0) + 1.0) / x.vpp
    deep = np.where(x.vpp > 1, last + 2.0 * (x.pp - 1.0) / x.vpp, x.pp)
    cut = stage_layers(x)
    chunk = (cut.last + 1.0) / x.vpp  # the logits take a layer's place in the last one
    shorter = (group * (x.vpp - 1.0) * chunk + chunk - 1.0) / np.maximum(chunk * x.vpp - 1.0, 1.0)
    last = np.where(_lighter(x, cut.last), shorter, last)
    deepest = 2.0 * x.pp - 1.0  # micro-batches of the first chunk, which has the embedding
    chunk = (cut.first + 1.0) / x.vpp
    shorter = (group * (x.vpp - 1.0) + deepest) * chunk - deepest
    deep = np.where(_lighter(x, cut.first), shorter / np.maximum(cut.first, 1.0), deep)
    last = np.where(x.deepspeed & (x.pp > 1), np.maximum(last, 2.0), last)
    first, last = np.minimum(deep, x.n_micro), np.minimum(last, x.n_micro)
    if tensors_alone:  # the second of DeepSpeed's last stage is a buffer alone
        last = np.where(x.deepspeed & (x.vpp == 1), 1.0, last)
    return ByStage(first, np.maximum(first - 1.0, last), last)


def activations(x: Columns, layers: np.ndarray, flying: np.ndarray) -> np.ndarray:
    """Bytes of the kept activations and of the one layer that is recomputed at a time."""
    policies = [x.recompute == FULL, x.recompute == SELECTIVE]
    selective = np.where(x.plain, layer_activations(x) - products(x), scores(x))
    working = np.select(policies, [layer_activations(x), selective], 0.0)
    # nanotron holds one whole input a layer of the micro-batch in work, gathered for tp's products,
    # once a pipeline is full (peaks of the Ultra-Scale sweep at tp 8 to 32).
    gathers = x.nanotron & x.sequence_parallel & (x.n_micro > x.pp)
    inputs = layers * x.tokens * x.hidden * x.width * gathers
    return layers * flying * kept_per_layer(x) + working + inputs


def logits(x: Columns, tensors_alone: bool = False) -> np.ndarray:
    """Bytes of the last norm and of the output layer's s b V / t values when backward begins: in
    compute precision, in fp32 and, as published peaks look, a gradient, which the tensors alone of
    Megatron's loss are not and a loss compiled into FSDP2's model is not; PyTorch's own loss holds
    three in fp32, Transformer Engine's two in compute precision. [K 4.3] counts fp32 alone."""
    edge = 2.0 * x.tokens * x.hidden * x.width / np.where(x.sequence_parallel, x.tp, 1)
    each = [12.0, 2.0 * x.width, x.width + 4.0]
    each = np.select([x.plain, x.te_loss, x.fsdp2 | tensors_alone], each, 2.0 * x.width + 4.0)
    return edge + x.tokens * x.vocab / x.tp * each


def buckets(x: Columns) -> np.ndarray:
    """Bytes of the buckets through which DeepSpeed's ZeRO reduces gradients in backward, allocated
    whole, as wide as the sums but for stage 2's. Its optimizer for bf16 with fp32 gradients has
    none at stage 1 without offload; Megatron works in place.
    """
    both = (x.grad_width > x.width) & (x.zero_stage == 1) & (x.offload == 0)
    width = np.where(x.zero_stage == 2, x.width, x.grad_width)
    return np.where(x.deepspeed & (x.zero_stage > 0) & ~both, x.bucket * width, 0.0)


def update(x: Columns, n: np.ndarray) -> np.ndarray:
    """Bytes that DeepSpeed holds of n parameters between backward and the new weights, beside those
    of `states`: its shard of the gradients in fp32 or, of bf16 without buckets, what one all-reduce
    takes in fp32. Stages 1 and 2 hold their shard in fp16 twice, too: as parameters and
    flat; the other gradients of stage 1 are gone.
    """
    both = x.grad_width > x.width
    shard = n / np.where(x.zero_stage > 0, x.shards, 1) * (x.width < 4) * (x.zero_stage < 3)
    flat = (~both & (x.offload == 0)) * ((x.zero_stage == 1) | (x.zero_stage == 2))
    more = x.width * flat * (shard * np.where(x.zero_stage == 1, 2, 1) - (x.zero_stage == 1) * n)
    message = 4.0 * np.minimum(n, x.bucket)
    return np.where(
        x.deepspeed, np.where(both & (x.zero_stage < 2), message, 4.0 * shard + more), 0.0
    )


def offloaded_gradients(x: Columns, n: np.ndarray) -> np.ndarray:
    """Bytes on the GPU through which DeepSpeed's stages 1 and 2 hand gradients to the host, beside
    those of `states`: a buffer of the largest parameter and, of bf16 summed in fp32, the shard."""
    largest = np.maximum(x.vocab, x.ffn * (1.0 + x.glu)) * x.hidden / x.tp * x.width
    shard = 4.0 * n / x.shards * (x.grad_width > x.width)
    offloads = x.deepspeed & (x.offload > 0) & (x.zero_stage > 0) & (x.zero_stage < 3)
    return np.where(offloads, largest + shard, 0.0)


@dataclass(frozen=True)
class Stage:
    """A rank of one pipeline stage when backward begins; (n,) each, bytes but for the first five.

    n: its parameters. flying: micro-batches in flight. first, last: whether the stage has the
    embedding, and the logits. kept: activations, with one_layer, what one layer needs while it is
    recomputed. head: logits.
    """

    n: np.ndarray
    layers: np.ndarray
    flying: np.ndarray
    first: np.ndarray
    last: np.ndarray
    kept: np.ndarray
    one_layer: np.ndarray
    head: np.ndarray

    @property
    def resting(self) -> np.ndarray:
        """The activations of layers that are not at work."""
        return self.kept - self.one_layer


def _of_stage(by_stage: tuple[Any, ...], stage: str | None) -> np.ndarray:
    """Of a stage (n,), or of all (3, n)."""
    return np.stack(by_stage) if stage is None else by_stage[STAGES.index(stage)]


def _ends(x: Columns, stage: str | None) -> tuple[np.ndarray, np.ndarray]:
    """Whether a stage has the embedding, and whether it has the logits."""
    both, no = x.pp == 1, np.zeros(len(x), bool)
    first, last = (~no, both, both), (both, both, ~no)
    return _of_stage(first, stage), _of_stage(last, stage)


def _stage(
    x: Columns, stage: str | None, fragments: float | np.ndarray, tensors_alone: bool = False
) -> Stage:
    """The "first", "middle" or "last" stage, or all; fragments: the factor on activations."""
    layers = _of_stage(stage_layers(x), stage)
    flying = _of_stage(in_flight(x, tensors_alone), stage)
    first, last = _ends(x, stage)
    n = params(x, layers, first | last) + x.positions * x.hidden * first
    kept = activations(x, layers, flying) * fragments
    one_layer = activations(x, 0.0 * layers, flying) * fragments
    head = logits(x, tensors_alone) * last * fragments
    # Where checkpoints go to the host, a layer's working memory and the logits take turns, too.
    head = np.where(x.host_checkpoints | tensors_alone, np.maximum(head - one_layer, 0.0), head)
    return Stage(n, layers, flying, first, last, kept, one_layer, head)


def parts(
    x: Columns,
    stage: str | None = "first",
    constants: dict[str, Any] | None = None,
    tensors_alone: bool = False,
) -> dict[str, Any]:
    """Bytes by part on a rank of the "first", "middle" or "last" pipeline stage, (n,); None: of all
    three, (3, n), or (n,) where they are equal.

    With tensors_alone, without the constants, and what comes later in a step takes the place of
    what has been freed (`passing`). Otherwise all parts add up: published peaks look as an
    allocator's would that does not use the freed blocks again.
    """
    c = {"library_gb": 0.0, "fragments": 1.0} if tensors_alone else CONSTANTS | (constants or {})
    exact = is_exact(x) & (not tensors_alone)
    counted = _counted(x, stage, c) if exact.any() else {}
    if exact.all():
        return counted
    s = _stage(x, stage, c["fragments"], tensors_alone)
    sizes = states(x, s.n, tensors_alone) | {
        "fp8_copies": fp8_copies(x, s.layers),
        "activations": s.kept,
        "keys_and_values": received(x),
        "masks": masks(x, s.flying),
        "logits": s.head,
        "buckets": passing(x, s) if tensors_alone else buckets(x),
        "library": c["library_gb"] * GIB + 0.0 * s.n,
    }
    unknown = np.where((x.experts > 0) & (not tensors_alone), np.nan, 0.0)  # no formula above
    return {k: np.where(exact, counted.get(k, 0), v + unknown) for k, v in sizes.items()}


def _counted(x: Columns, stage: str | None, c: dict[str, Any]) -> dict[str, np.ndarray]:
    """`parts` by `allocated_parts`, with what PyTorch does not allocate."""
    sizes = dict.fromkeys(PARTS, 0.0 * x.layers) | allocated_parts(x, stage)
    for part in ("activations", "logits"):
        sizes[part] = sizes[part] * c["fragments"]
    return sizes | {"library": sizes["library"] + c["library_gb"] * GIB}


def is_exact(x: Columns) -> np.ndarray:
    """Whether `allocated_parts` counts every tensor of a row, bool (n,)."""
    others = x.fp8 | x.documents | (x.width != 2) | (x.zero_stage > 1) | (x.offload > 0)
    others = others | (x.mtp > 0)
    return x.megatron & ~others


def check_counted(config: GPTConfig, x: Columns, what: str) -> None:
    """Refuse rows of a model with experts or latent attention whose bytes no formula counts.

    Raises:
        UsageError: there is one; `what` it is, in words.
    """
    if config.parts and not is_exact(x).all():
        raise UsageError(
            f"the bytes of {in_words(config.parts)} are counted for Megatron-LM alone, in 16 bits"
            f" (--precision bf16), on cards with bf16, not for {what}"
        )


def allocated_parts(x: Columns, stage: str | None) -> dict[str, np.ndarray]:
    """Bytes by part that PyTorch allocates on a rank of a stage (megatron_memory.py); of all stages
    as `parts` has them."""
    cut = stage_layers(x)
    layers, flying = _of_stage(cut, stage), _of_stage(in_flight(x), stage)
    first, last = _ends(x, stage)
    before = _of_stage((0 * x.layers, cut.first * (x.pp > 1), x.layers - cut.last), stage)
    dense = np.where(x.experts > 0, np.clip(x.dense_layers - before, 0, layers), layers)
    return megatron_memory.parts(x, megatron_memory.Place(layers, dense, flying, first, last))


def allocated(x: Columns, stage: str | None = None) -> np.ndarray:
    """torch.cuda.max_memory_allocated of a stage, or of the fullest; nan where unknown."""
    most = sum(allocated_parts(x, stage).values())
    return np.where(is_exact(x), most.max(axis=0) if stage is None else most, np.nan)


class Borders(NamedTuple):
    """Bytes of what a pipeline stage received and sent, beside its layers' inputs."""

    forward: np.ndarray
    backward: np.ndarray


def borders(x: Columns, flying: np.ndarray, ends: tuple[Any, Any]) -> Borders:
    """ends: whether the stage has the embedding, and the logits.

    Of Megatron's 1F1B, the gradients that came and went last stay until the next replace them, as
    does the input that the last sent gradient is of; outputs are freed once they are sent.
    DeepSpeed's pipeline has buffers of every micro-batch in flight, two at the end: of inputs and
    outputs or, cut over tp, of the outputs alone, which it gathers again for backward.
    """
    first, last = (np.asarray(end) for end in ends)
    edge, part = _edge(x)
    again = x.n_micro > flying  # a micro-batch has gone back before another comes
    coming, going = again * ~last, again * ~first
    forward = (coming + 2.0 * going) * part
    backward = (1.0 + going) * part
    held = np.minimum(np.where(last, 2.0, flying), x.n_micro)
    uncut = (held * (1.0 * ~first + ~last) + 1.0 + ~first) * edge
    cut = (held * ~last + 2.0) / x.tp * edge
    deepspeed = np.where(x.tp > 1, cut, uncut)
    gathered = np.where(x.tp > 1, 2.0 * edge, 0.0)
    piped = x.pp > 1
    return Borders(
        piped * np.where(x.deepspeed, deepspeed, forward),
        np.where(piped, np.where(x.deepspeed, deepspeed + gathered, backward), part),
    )


class Edge(NamedTuple):
    """Bytes of what goes into a layer: whole, and as a rank of tp holds it."""

    full: np.ndarray
    part: np.ndarray


def _edge(x: Columns) -> Edge:
    edge = x.tokens * x.hidden * x.width
    return Edge(edge, edge / np.where(x.sequence_parallel, x.tp, 1))


# --- the moments of a step whose bytes may be the most --------------------------------------------


def passing(x: Columns, s: Stage) -> np.ndarray:
    """Bytes by which a later moment of the step exceeds that at which backward begins: buckets and
    gradients, where others' activations have been freed."""
    moments = [
        when_forward_ends(x, s),
        when_the_logits_are_there(x, s),
        when_a_layer_goes_back(x, s),
        when_the_output_layer_goes_back(x, s),
        when_a_bucket_of_zero_3_is_copied(x, s),
        when_a_bucket_of_zero_2_is_widened(x, s),
        when_the_embedding_goes_back(x, s),
        when_weights_are_updated(x, s),
        when_a_pipeline_reduces(x, s),
    ]
    return (
        np.max(moments, axis=0)
        - s.kept
        - s.head
        + _buckets_that_stay(x)
        + offloaded_gradients(x, s.n)
    )


def _buckets_that_stay(x: Columns) -> np.ndarray:
    """Bytes of buckets all through a step: ZeRO 3's, and ZeRO 1's from the first micro-batch on."""
    first_micro = (x.zero_stage == 1) & (x.n_micro > 1) & (x.pp == 1)
    return buckets(x) * ((x.zero_stage == 3) | first_micro)


def _buckets_of_backward(x: Columns, s: Stage) -> np.ndarray:
    """Bytes of the other buckets, which come with the first gradient, when those of the logits are
    gone; of DeepSpeed's pipeline one fills in backward, another when it reduces afterwards. FSDP2
    has its second block, and the gradients of a step's only micro-batch."""
    filled = (buckets(x) - _buckets_that_stay(x)) / np.where(_deepspeed_pipe(x), 2, 1)
    block = layer_params(x) * x.width * (x.zero_stage == 3)
    return filled + x.fsdp2 * (block + s.n * x.grad_width / x.shards * (x.n_micro == 1))


def _deepspeed_pipe(x: Columns) -> np.ndarray:
    return x.deepspeed & (x.pp > 1)


def _word_table(x: Columns) -> np.ndarray:
    """Bytes of the gradient of the word embedding or the output layer."""
    return x.vocab * x.hidden / x.tp * x.width


def _waits_for_its_twin(x: Columns, s: Stage) -> np.ndarray:
    """Whether the output layer's gradient waits for the embedding's, and their sum."""
    return s.first & s.last & ~x.untied


def _outputs(x: Columns, s: Stage) -> np.ndarray:
    """Bytes of the logits of two buffers that DeepSpeed's pipeline keeps."""
    return 2.0 * x.tokens * x.vocab / x.tp * x.width * (s.last & _deepspeed_pipe(x))


def _late_gradients(x: Columns, s: Stage) -> np.ndarray:
    """Bytes of gradients that came one by one, when backward ends."""
    return comes_late(x) * s.n * x.grad_width / np.where(x.zero_stage > 1, x.shards, 1)


def when_forward_ends(x: Columns, s: Stage) -> np.ndarray:
    """The last layer has been computed: its output and that of its last product are there.
    Sequence parallelism gathers in a buffer that stays."""
    edge, part = _edge(x)
    computed = borders(x, s.flying, (s.first, s.last)).forward + edge + part
    computed = (computed + x.sequence_parallel * edge) * (x.recompute != FULL)
    return np.where(x.plain, s.kept, np.maximum(s.resting + computed, s.kept))


def when_the_logits_are_there(x: Columns, s: Stage) -> np.ndarray:
    """Backward begins, with what came over the pipeline's border."""
    forward = borders(x, s.flying, (s.first, s.last)).forward
    return s.kept + s.head + s.last * forward + _outputs(x, s)


def when_a_layer_goes_back(x: Columns, s: Stage) -> np.ndarray:
    """The last layer has been computed again, or has the gradients of its second matrix: those of
    the product's input and of its weight, of a gate's two inputs, and of the output, gathered."""
    edge, part = _edge(x)
    full = x.recompute == FULL
    inner = np.select([full, x.recompute == SELECTIVE], [layer_activations(x) - part, scores(x)], 0)
    inner = inner + borders(x, s.flying, (s.first, s.last)).backward
    gathers = x.sequence_parallel * edge
    again = (inner + edge + part + gathers) * full
    feed, matrix = (size * x.ffn / x.tp * x.width for size in (x.tokens, x.hidden))
    product = np.maximum(feed + matrix, 2.0 * x.glu * feed)
    gradient = inner + full * part + product + 2 * gathers
    backward = np.where(x.plain, s.kept, s.resting + np.maximum(again, gradient))
    return backward + _buckets_of_backward(x, s) + _waits_for_its_twin(x, s) * _word_table(x)


def when_the_output_layer_goes_back(x: Columns, s: Stage) -> np.ndarray:
    """The gradients of the logits and of the output layer. Buckets come with these alone in a
    pipeline of DeepSpeed."""
    coming = (buckets(x) - _buckets_that_stay(x)) * ~_deepspeed_pipe(x)
    gradients = _word_table(x) + x.tokens * x.vocab / x.tp * x.width
    return s.resting + _buckets_of_backward(x, s) - coming + s.last * gradients


def when_a_bucket_of_zero_3_is_copied(x: Columns, s: Stage) -> np.ndarray:
    """ZeRO 3's bucket is full, and its gradients are copied in the ranks' order; the layer's second
    matrix has the first gradient."""
    left = 1.0 - np.minimum(1.0, x.bucket / s.n)  # of backward
    matrix = x.hidden * x.ffn / x.tp
    copied = np.minimum(s.n, matrix * np.maximum(1.0, x.bucket // matrix)) * x.grad_width
    there = s.kept + _waits_for_its_twin(x, s) * _word_table(x) + matrix * x.width
    return (copied + left * there) * (x.deepspeed & (x.zero_stage == 3))


def when_a_bucket_of_zero_2_is_widened(x: Columns, s: Stage) -> np.ndarray:
    """One of ZeRO 2's two buckets in bf16 is copied, and copied in fp32; the gradient of the word
    table comes last."""
    table, half = _word_table(x), x.bucket / 2
    size = np.where(s.n > half, np.minimum(s.n - s.first * table / x.width, half), s.n)
    waiting = (size < s.n) * _waits_for_its_twin(x, s) * table
    widened = (x.width + 4.0) * size + (1.0 - size / s.n) * s.kept + waiting
    in_fp32 = x.deepspeed & (x.zero_stage == 2) & (x.grad_width > x.width)
    return (_buckets_of_backward(x, s) + widened) * in_fp32


def when_the_embedding_goes_back(x: Columns, s: Stage) -> np.ndarray:
    """Backward ends: no layer keeps anything."""
    tables = s.first * (1 + 2 * _waits_for_its_twin(x, s)) * _word_table(x)
    freed = s.layers * kept_per_layer(x)
    return s.resting - freed + _buckets_of_backward(x, s) + tables + _late_gradients(x, s)


def when_weights_are_updated(x: Columns, s: Stage) -> np.ndarray:
    """What `update` counts."""
    return update(x, s.n) + _outputs(x, s) + _late_gradients(x, s)


def when_a_pipeline_reduces(x: Columns, s: Stage) -> np.ndarray:
    """Both buckets of DeepSpeed's pipeline, and the gradients that do not lie in the first by then;
    elsewhere what is there when backward ends."""
    both = buckets(x) - _buckets_that_stay(x)
    filled = np.minimum(s.n, x.bucket / 2) * x.width
    reduced = both + np.maximum(s.n * x.width / x.shards - filled, 0.0)
    alone = _buckets_of_backward(x, s)
    there = np.where(_deepspeed_pipe(x) & (both > 0), reduced, alone)
    return there + _outputs(x, s) + _late_gradients(x, s)


def peak(x: Columns, constants: dict[str, Any] | None = None) -> np.ndarray:
    """Peak bytes of the fullest rank: what must fit; nan where no formula has the model's parts."""
    most, exact = np.empty(len(x)), is_exact(x)
    for rows in (exact, ~exact):
        if rows.any():
            alike = x if rows.all() else x.take(rows)
            most[rows] = sum(parts(alike, None, constants).values()).max(axis=0)
    return most


def fullest(
    x: Columns, constants: dict[str, Any] | None = None, tensors_alone: bool = False
) -> dict[str, float]:
    """`parts` of the fullest rank of one layout; x: one row."""
    stages = [parts(x, stage, constants, tensors_alone) for stage in STAGES]
    most = max(stages, key=lambda sizes: sum(sizes.values()))
    return {part: size.item() for part, size in most.items()}
