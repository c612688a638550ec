"""Weights, gradients and optimizer of a rank.

[R] Rajbhandari et al. 2020, arXiv 1910.02054 (ZeRO, section 5): stage 1 shards the optimizer, stage
2 also the gradients, stage 3 also the weights. FSDP2 shards all but what it gathers.
"""

from typing import NamedTuple

from analysis.planner.columns import Step
from analysis.planner.memory.pipeline import Stage, layer_numbers
from models.headroom import adam_bytes

LIVE = 1e9  # elements: DeepSpeed's default stage3_max_live_parameters
GATHERED_BLOCKS = 2  # of FSDP2 at a time: the next is under way


class Parameters(NamedTuple):
    """Numbers that a rank trains: its experts', and all others'."""

    common: float
    experts: float

    @property
    def total(self) -> float:
        return self.common + self.experts


def attention_numbers(step: Step) -> float:
    """Returns the numbers that a rank holds of one layer's attention. Of latent attention (arXiv
    2405.04434) what makes the latents is whole, and head_dim is the part of a head without
    positions."""
    inner = step.heads * step.head_dim
    if not step.kv_lora:
        return step.hidden * (2 * inner + 2 * step.kv_heads * step.head_dim) / step.tp
    value = step.heads * step.value_dim
    turned = step.heads * (step.head_dim + step.rope_dim) * (step.q_lora or step.hidden)
    latents = step.hidden * (step.q_lora + step.kv_lora + step.rope_dim)
    split = turned + step.kv_lora * (inner + value) + value * step.hidden
    return split / step.tp + latents


def mlp_numbers(step: Step, width: float, cut: float) -> float:
    """Returns the numbers that a rank holds of a feed-forward of that width, cut over `cut` ranks;
    of columns, arrays."""
    return step.hidden * width * (2.0 + step.glu) / cut


def parameters(step: Step, stage: Stage) -> Parameters:
    """Returns the numbers of a stage on one rank: layers and, at an end, the word embedding or the
    output layer. A rank that is both ends has an untied output layer beside the embedding. Norms
    and biases are counted where every tensor is."""
    hidden, tp = step.hidden, step.tp
    ends = stage.has_embedding + (stage.has_output and (step.untied or not stage.has_embedding))
    common = stage.layers * attention_numbers(step) + stage.dense * mlp_numbers(step, step.ffn, tp)
    common += ends * step.vocab * hidden / tp + step.positions * hidden * stage.has_embedding
    if not step.counted:
        return Parameters(common, 0.0)
    norm = 2 * hidden if step.biased else hidden
    heads = step.head_dim * (step.heads + 2 * step.kv_heads)
    biases = 2 * hidden + (heads + step.ffn) / tp if step.biased else 0
    routed = stage.layers - stage.dense
    common += stage.layers * (2 * norm + biases) + stage.has_output * norm
    common += routed * (mlp_numbers(step, step.shared_ffn, tp) + hidden * step.experts)
    expert = mlp_numbers(step, step.moe_ffn, step.etp)
    return Parameters(common, routed * expert * step.experts / step.ep)


def _shards(step: Step, stage: int) -> int:
    """Returns the ranks over which what ZeRO shards from `stage` on is cut."""
    return step.shards if step.zero_stage >= stage or step.fsdp2 else 1


def _keeps_two_gradients(step: Step) -> bool:
    """Returns whether bf16 gradients are there beside their fp32 sums, as in DeepSpeed and
    nanotron."""
    return (step.deepspeed or step.nanotron) and step.grad_width > step.width


def weights(step: Step, n: Parameters) -> float:
    """Returns the bytes of the weights that rest on a rank, and of those that are gathered. FSDP2's
    shard is the master weight in mixed precision. offload all: they rest in host memory."""
    resting = n.total * step.width / _shards(step, 3)
    if step.offload == 2 or (step.fsdp2 and step.width < 4):
        resting = 0.0
    return resting + gathered(step, n.total)


def gathered(step: Step, n: float) -> float:
    """Returns the bytes of weights that ZeRO 3 or FSDP2 has gathered at a time, of n parameters.

    FSDP2's zero_stage 3: what is outside the blocks, without an embedding of its own, which is
    needed at first alone, and two blocks. Its zero_stage 2 keeps all. Of DeepSpeed, ZeRO 3 alone
    gathers.
    """
    if not step.fsdp2:
        return min(n, LIVE) * step.width if step.zero_stage == 3 else 0.0
    if step.zero_stage < 3:
        return n * step.width
    blocks = step.layers - min(step.layers, GATHERED_BLOCKS)
    table = step.vocab * step.hidden * step.untied
    return (n - (blocks * layer_numbers(step) / step.tp + table)) * step.width


def gradients(step: Step, stage: Stage, n: Parameters) -> float:
    """Returns the bytes of a rank's gradients. FSDP2 reduces them once a step unless `reductions`
    says otherwise: micro-batches before the last add up whole ones. Offload hands them to the host
    as they come, and a tenth is there.

    Where kernels add gradients up, Transformer Engine keeps an empty one of each shape in 16 bits
    for autograd.
    """
    each = step.grad_width
    if _keeps_two_gradients(step) and step.zero_stage < 2:
        each += step.width
    if step.fsdp2 and step.reductions < step.n_micro:
        return n.total * each
    size = n.total * each / _shards(step, 2)
    if step.offload and step.zero_stage > 1:
        size *= 0.1
    if step.counted and step.fused_gradients:
        size += 2.0 * _shapes(step, stage)
    return size


def _shapes(step: Step, stage: Stage) -> float:
    """Returns the numbers of one tensor of each shape of the stage's layers."""
    numbers = attention_numbers(step)
    if stage.dense:
        numbers += mlp_numbers(step, step.ffn, step.tp)
    if stage.layers > stage.dense:
        shared = mlp_numbers(step, step.shared_ffn, step.tp)
        numbers += shared + mlp_numbers(step, step.moe_ffn, step.etp)
    return numbers


def matrices(step: Step, stage: Stage) -> Parameters:
    """Returns the numbers of a stage's matrices, which Muon steps; Adam steps the words, positions,
    norms and biases."""
    common = stage.layers * attention_numbers(step)
    common += stage.dense * mlp_numbers(step, step.ffn, step.tp)
    routed = stage.layers - stage.dense
    common += routed * (mlp_numbers(step, step.shared_ffn, step.tp) + step.hidden * step.experts)
    expert = mlp_numbers(step, step.moe_ffn, step.etp)
    return Parameters(common, routed * expert * step.experts / step.ep)


def optimizer(step: Step, stage: Stage, n: Parameters) -> float:
    """Returns the bytes of Adam on a rank [R 3.1], which is sharded over the copies: dp x cp, of
    experts tp x cp x dp / (ep x etp).

    DeepSpeed's fp16 optimizer also holds its shard of the gradients in fp32; at stage 3 it steps in
    sub-groups and holds little of it. In fp32, its ZeRO copies the shard of the weights and, from
    stage 2, of the gradients.
    """
    if step.offload:
        return 0.0
    each = adam_bytes(step.width)
    if step.deepspeed and step.width < 4 and step.zero_stage < 3 and not _keeps_two_gradients(step):
        each += 4.0
    if step.deepspeed and step.width == 4 and step.zero_stage:
        each += 8.0 if step.zero_stage > 1 else 4.0
    copies = step.expert_replicas if step.zero_stage else 1
    common, experts = each * n.common / _shards(step, 1), each * n.experts / copies
    if step.muon:  # which has one moment of a matrix, and one rank at home for a whole parameter
        stepped = matrices(step, stage)
        common -= 4.0 * stepped.common / _shards(step, 1)
        experts -= 4.0 * stepped.experts / copies
        if stage.has_embedding or stage.has_output:
            common = max(common, each * step.vocab * step.hidden / step.tp)
    return common + experts


def fp8_copies(step: Step, stage: Stage) -> float:
    """Returns the bytes of the layers' weights in fp8 beside those in bf16, as they are and
    transposed. Hopper multiplies fp8 in one order alone (Transformer Engine, issue 1261 and
    "Performance Considerations"), and Megatron core keeps both from a step's first micro-batch on.
    Blackwell needs no transposed copy where a tensor has one scale: half of this. Scales and their
    history are below 0.1 MB a layer."""
    return 2.0 * stage.layers * layer_numbers(step) / step.tp if step.in_fp8 else 0.0
