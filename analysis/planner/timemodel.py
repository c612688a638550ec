"""Seconds of one training step from first principles: one function per term, each on columns.

x is a `Columns`, c a `Constants`-like dict of floats (at most 15, `NAMES`), machine columns are in
`Machine`. Letters: b sequences of a micro-batch, s sequence length, h hidden, f feed-forward, a
heads of size d, V vocabulary, L layers. Times are seconds, sizes bytes, rates bytes/s and FLOP/s.

Sources: [N] Narayanan et al. SC'21, arXiv 2104.04473. [K] Korthikanti et al. 2022, arXiv
2205.05198. [R] Rajbhandari et al. 2020 (ZeRO), arXiv 1910.02054. [L] Liu et al. 2023 (Ring
Attention), arXiv 2310.01889.
"""

from dataclasses import dataclass, fields
from typing import NamedTuple

import numpy as np

from analysis.planner.columns import FULL, SELECTIVE, Array, Columns, Step
from analysis.planner.engines import CROWD, FAMILY, of
from analysis.planner.memory.activations import routed_tokens
from analysis.planner.memory.buffers import keys_and_values
from analysis.planner.memory.pipeline import layer_numbers, stage_layers, stages_of
from analysis.planner.memory.states import attention_numbers, mlp_numbers
from models.gpus import network_rate, planning_gpu
from parallel.measure.wire import wire_bytes

HOST_RATE = 2e9  # bytes/s of a rank's share of CPU Adam and PCIe (the Jean Zay offload rows)
PLAIN_SOFTMAX = 0.2  # added share of launching: cast, scale, mask, softmax, cast are five kernels
HOST_SPREAD = 0.04  # added share of launching for each further rank of a tp group
SENT = 0.8  # share of a node's network that stages reach, which send in pairs and not in a ring
SHOWN = 0.4  # share of p2p that no computation hides
STALL_GPUS = 360  # nanotron's runs on 512 GPUs stall; of those on 256 and fewer, some do
PARTS = 3  # DeepSpeed's ZeRO-3 gathers a layer's modules one by one
# Added shares of launching a layer (1.2 ms). Layers that the host holds up take 13 ms (DeepSeek-V2
# Lite on MI355X, Moonlight on H100: 64 experts), 15 (Qwen3 on H100: 128) and 33 (DeepSeek-V3 on
# GB200: 256).
ROUTED_LAUNCH = 4.5  # router, permutation, messages
HYBRID_LAUNCH = 2.0  # the same where HybridEP does most of it, and graphs the rest
CHUNK_LAUNCH = 0.04  # for each expert of the model: all-to-all sorts what came in a chunk for each
EXPERT_LAUNCH = 0.02  # for each expert of the rank: its products start one by one
LATENT_LAUNCH = 3.0  # latent attention: its products, norms, positions and copies
ROUTED_GAP = 0.5  # added share of the time in which the kernels of a layer start and drain
SHARPNESS = 5.0  # power of the mean of GPU time and launch time; infinity would be max()


@dataclass(frozen=True)
class Machine:
    """What a GPU and its links are, from data sheets: FLOP/s and bytes/s per GPU, or per node
    (`Columns.gpus_per_node`: what fast links join).

    mesh: GPUs of a node are wired pairwise (V100), so that n of N GPUs own (n-1)/(N-1) of the
    links; False for a switch. cores: of a host CPU whose ranks share them. fp8: FLOP/s of GEMMs in
    fp8, 0 where there is none. Fields are arrays (n,) or scalars.
    """

    peak: Array | float
    memory_rate: Array | float
    link: Array | float
    network: Array | float
    mesh: Array | bool = False
    cores: Array | float = np.inf
    fp8: Array | float = 0.0

    def take(self, chosen: Array) -> "Machine":
        """The rows that an index chooses, of fields that are arrays."""
        return Machine(*(getattr(self, f.name)[chosen] for f in fields(self)))

    @classmethod
    def stack(cls, machines: list["Machine"]) -> "Machine":
        """One machine a row."""
        return cls(*(np.array([getattr(m, f.name) for m in machines]) for f in fields(cls)))


def machine_of(
    gpu: str | None,
    cluster: str | None,
    gpus_per_node: float,
    width: int = 2,
    low: str = "fp8",
    domain: float | None = None,
    tf32: bool = False,
) -> Machine:
    """The machine of a card by name; the network's rate is the one that the cluster's description
    states, else the card's. low: what the layers' GEMMs run in where `Columns.fp8` says so.
    domain: GPUs that fast links join (`joined`, default: the node's), whose network is meant.
    width: bytes of a weight; those of 4 are multiplied in fp32, or where `tf32` and the card has
    it, in TF32. An fp32 peak that is not known counts as an eighth of fp16's.

    Raises:
        UsageError: no such card.
    """
    card = planning_gpu(gpu)
    peak = card.peaks["fp16"]
    if width == 4:
        fp32 = card.peaks.get("fp32", peak / 8)
        peak = card.peaks.get("tf32", fp32) if tf32 else fp32
    network = network_rate(cluster, gpus_per_node) or card.network * float(gpus_per_node)
    network *= (domain or gpus_per_node) / gpus_per_node
    mesh = card.mesh and gpus_per_node <= 8  # sixteen V100s are a DGX-2, which has a switch
    fp8 = card.peaks.get(low, 0.0) * 1e12
    return Machine(peak * 1e12, card.memory_rate, card.link, network, mesh, fp8=fp8)


def passes(x: Columns) -> Array:
    """Forward-equivalents of a layer in a step: 1 forward + 2 backward, + 1 when recomputed."""
    return np.where(x.recompute == FULL, 4.0, 3.0)


def _gemm(m: Array, n: Array, k: Array, peak: Array, c: dict) -> Array:
    """Seconds of a GEMM (m x k)(k x n) at peak x efficiency; longer where a side is short or ill
    aligned.

    Tensor cores want sides in multiples of 64 half-precision elements (NVIDIA, "Matrix
    Multiplication Background User's Guide", tile and wave quantisation).
    """
    seconds = 2.0 * m * n * k / (peak * c["gemm"])
    short = 1.0 + c["sat"] * (1.0 / m + 1.0 / n + 1.0 / k)
    crooked = ((n % 64 != 0) | (k % 64 != 0)) * c["align"]
    return seconds * (short + crooked)


def gemms(x: Columns, machine: Machine, c: dict) -> Array:
    """The four GEMMs of a layer, forward, one micro-batch: QKV, projection, MLP up and down; of a
    mean layer where some have experts."""
    m = x.tokens
    peak = np.where(x.fp8, np.maximum(machine.peak, machine.fp8), machine.peak)
    qkv = x.head_dim * (x.heads + 2 * x.kv_heads) / x.tp
    h, up = x.hidden, x.ffn * (1 + x.glu) / x.tp
    products = _gemm(m, qkv, h, peak, c) + _gemm(m, h, x.head_dim * x.heads / x.tp, peak, c)
    dense = 1.0 - x.routed
    if x.kv_lora.any():
        products = np.where(x.kv_lora > 0, _latent_gemms(x, peak, c), products)
    products = (
        products + dense * _gemm(m, up, h, peak, c) + dense * _gemm(m, h, x.ffn / x.tp, peak, c)
    )
    return products + x.routed * _expert_gemms(x, peak, c) if x.experts.any() else products


def _latent_gemms(x: Columns, peak: Array, c: dict) -> Array:
    """Queries and keys and values of latent attention, down and up, and the projection
    (arXiv 2405.04434); tp ranks make the same latents."""
    m, h, latent = x.tokens, x.hidden, np.maximum(x.q_lora, 1)
    queries = x.heads * (x.head_dim + x.rope_dim) / x.tp
    down = _gemm(m, latent, h, peak, c) * (x.q_lora > 0)
    inner = np.maximum(x.kv_lora, 1)
    return (
        down
        + _gemm(m, queries, np.where(x.q_lora > 0, latent, h), peak, c)
        + _gemm(m, inner + x.rope_dim, h, peak, c)
        + _gemm(m, x.heads * (x.head_dim + x.value_dim) / x.tp, inner, peak, c)
        + _gemm(m, h, np.maximum(x.heads * x.value_dim / x.tp, 1), peak, c)
    )


def _expert_gemms(x: Columns, peak: Array, c: dict) -> Array:
    """The router, the shared experts and the products of a rank's experts, forward: each takes its
    part of the tokens."""
    m, h, gate = x.tokens, x.hidden, 1 + x.glu
    own = np.maximum(x.experts / x.ep, 1)
    each = np.maximum(x.each(routed_tokens) * x.imbalance / own, 1)
    width, shared = (np.maximum(w, 1) for w in (x.moe_ffn / x.etp, x.shared_ffn / x.tp))
    routed = own * (_gemm(each, width * gate, h, peak, c) + _gemm(each, h, width, peak, c))
    always = _gemm(m, shared * gate, h, peak, c) + _gemm(m, h, shared, peak, c)
    return routed + always * (x.shared_ffn > 0)


def attention(x: Columns, machine: Machine, c: dict) -> Array:
    """Scores and context of a layer, forward: 4 b s^2 a d FLOPs [N eq. 2]. Flash attention skips
    the masked half. Without it, passes over the b a s^2 scores are added (write, softmax, dropout).
    """
    pairs = x.tokens * x.seq * x.heads / x.tp
    latent = (x.head_dim + x.rope_dim + x.value_dim) / 2.0  # of keys and of values
    width = np.where(x.kv_lora > 0, latent, x.head_dim)
    flops = 4.0 * pairs * width * np.where(x.flash, 0.5, 1.0)
    crooked = x.head_dim % 8 != 0
    scores = np.where(x.flash, 0.0, 6.5 * x.width) * pairs
    return flops / (machine.peak * c["attn"]) * (1 + crooked * c["align"]) + scores / (
        machine.memory_rate * c["mem"]
    )


def elementwise(x: Columns, machine: Machine, c: dict) -> Array:
    """Bytes moved by one layer, forward, over the memory rate: norms, dropouts and residuals (whole
    on every rank unless sequence-parallel [K]), GELU, biases and transposes (split by tp)."""
    sbh = x.tokens * x.hidden * x.width
    replicated = 13.0 * sbh / np.where(x.sequence_parallel, x.tp, 1)
    dense = 8.0 * x.ffn * (1.0 - x.routed) * (1 + 0.5 * x.glu) / (4.0 * x.hidden)
    split = (6.0 + dense) * sbh / x.tp
    moved = replicated + split
    if x.kv_lora.any():  # queries and keys are joined with their positions, values copied
        joined = x.heads * (2 * (x.head_dim + x.rope_dim) + x.value_dim) * (x.kv_lora > 0)
        moved = moved + 2.0 * x.tokens * joined * x.width / x.tp
    if x.experts.any():
        moved = moved + x.routed * _permuted(x)
    return moved / (machine.memory_rate * c["mem"])


def _permuted(x: Columns) -> Array:
    """Bytes moved by the experts' part of a layer, forward: the router's scores in fp32 in ten
    passes, tokens sorted by expert before their messages and after, and back, and the activation.
    DeepEP's kernels do the first sorting and the last sum. A pass reads the experts' weights, and
    backward adds to their gradients."""
    own = x.tokens / np.where(x.sequence_parallel, x.tp, 1)
    scores = 40.0 * own * x.experts
    sorting = np.where(x.deep_ep, 4.0, 6.0) * x.topk + 2.0
    sorted_bytes = own * sorting * x.imbalance * x.hidden * x.width * x.etp
    act = 2.0 * (1 + 0.5 * x.glu) * x.width
    routed = x.each(routed_tokens) * x.imbalance * x.moe_ffn / x.etp
    weights = mlp_numbers(x, x.moe_ffn, x.etp) * x.experts / x.ep
    held = weights * (2.0 * x.width + 2.0 * x.grad_width) / 3.0
    return scores + sorted_bytes + held + act * (routed + x.tokens * x.shared_ffn / x.tp)


def inside_rate(n: Array, gpus_per_node: Array, machine: Machine, c: dict) -> Array:
    """All-reduce bus bandwidth of n GPUs of one node. In a mesh, n GPUs own n - 1 of the wires."""
    wired = np.minimum(np.maximum(n - 1, 1) / np.maximum(gpus_per_node - 1, 1), 1.0)
    return machine.link * c["link"] * np.where(machine.mesh, wired, 1.0)


def outside_rate(n_nodes: Array, machine: Machine, c: dict, crowd: Array | float = CROWD) -> Array:
    """All-reduce bus bandwidth of whole nodes: a ring over more nodes is slower."""
    return machine.network * c["network"] * np.maximum(n_nodes, 1.0) ** -crowd


def latency(n: Array, c: dict) -> Array:
    """Seconds of a collective of n ranks before its bytes count; c["latency"] is that of two."""
    return c["latency"] * (1.0 + np.log2(np.maximum(n, 1.0))) / 2.0


def all_reduce(n: Array, size: Array, gpus_per_node: Array, machine: Machine, c: dict) -> Array:
    """Seconds of one all-reduce of `size` bytes over n GPUs that fill their nodes, alone, as
    nccl-tests measures it. Ring: 2 (n-1)/n of the bytes over the bus bandwidth."""
    inside = inside_rate(np.minimum(n, gpus_per_node), gpus_per_node, machine, c)
    outside = np.minimum(inside, outside_rate(n / gpus_per_node, machine, c))
    rate = np.where(n > gpus_per_node, outside, inside)
    return latency(n, c) + wire_bytes("all_reduce", n, size) / rate


def tensor_parallel(x: Columns, machine: Machine, c: dict) -> Array:
    """Collectives of a layer, all passes: an all-reduce of b s h per sub-block in forward and in
    backward [N 2.3], again in recomputation; with sequence parallelism the same bytes as
    all-gather and reduce-scatter [K 4.2]. Ring: 2 (n-1)/n of the bytes."""
    n_all_reduce = np.where(x.recompute == FULL, 6.0, 4.0)
    size = 1.0 * x.tokens * x.hidden * x.width
    # In a pipeline the host is slower than these hops (`launch`).
    hops = np.where((x.pp == 1) & (x.tp > x.gpus_per_node), x.tp / x.gpus_per_node, 0.0)
    each = all_reduce(x.tp, size, x.gpus_per_node, machine, c) + of(x, "hop") * hops
    if x.experts.any():  # experts take a rank's own part of a sequence, shared ones the whole
        each = each * (1.0 - 0.5 * x.routed * (x.shared_ffn == 0))
    return n_all_reduce * each * (x.tp > 1)


def expert_parallel(x: Columns, machine: Machine, c: dict) -> Array:
    """Seconds of a mean layer, all passes, in which tokens travel to their experts and back: an
    all-to-all each over ep ranks, and over etp ranks an all-gather and a reduce-scatter.

    All-to-all sends a token to each of its topk experts. DeepEP sends it once to a node, and there
    once to a rank; experts are drawn at random.
    """
    k, n = x.topk, x.ep
    near = np.clip(x.gpus_per_node // x.etp, 1, n)  # ranks of the group that share a node
    nodes = n / near
    beyond = np.where(x.deep_ep, nodes * (1.0 - (1.0 - 1.0 / nodes) ** k), k) * (nodes - 1) / nodes
    ranks = np.where(x.deep_ep, n * (1.0 - (1.0 - 1.0 / n) ** k), k)
    inside = ranks * (near - 1) / near * np.where(x.deep_ep, 1.0, near / n)
    token = x.tokens / np.where(x.sequence_parallel, x.tp, 1) * x.hidden * x.width * x.imbalance
    links = inside_rate(n, x.gpus_per_node, machine, c) * SENT
    network = machine.network * c["network"] * SENT / x.gpus_per_node
    each = np.maximum(token * inside / links, token * beyond / network) + latency(n, c)
    each = each * np.where(x.ep_overlap, SHOWN, 1.0) * (n > 1)
    gathered = all_reduce(
        x.etp, x.each(routed_tokens) * x.hidden * x.width, x.gpus_per_node, machine, c
    )
    times = np.where(x.recompute == FULL, 6.0, 4.0)
    return x.routed * times * (each + gathered / 2.0 * (x.etp > 1))


def context_parallel(x: Columns, machine: Machine, c: dict) -> Array:
    """Seconds of a layer, all passes, in which its keys and values travel between the cp ranks: in
    a ring [L] (Megatron-LM's p2p) a part travels while attention works on the one before, so that
    only what takes longer is added."""
    n = x.cp
    together = np.clip(x.gpus_per_node // x.tp, 1, n)  # ranks of the group that share a node
    share = together / np.minimum(x.gpus_per_node, x.gpus)  # of a node's network, beside the others
    within = inside_rate(x.tp * n, x.gpus_per_node, machine, c)
    outside = np.minimum(within, outside_rate(n / together, machine, c) * share)
    rate = np.where(together < n, outside, within)
    # Once in forward, twice in backward (their gradients, too), once more where it is recomputed.
    times = np.where(x.recompute > 0, 4.0, 3.0)
    wait = (n - 1) * c["latency"]
    hidden = (n - 1) / n * attention(x, machine, c)
    shown = times * (wait - hidden) + times * (n - 1) / n * keys_and_values(x) / rate
    return np.maximum(shown, 0.0) * (n > 1)


def ring_sums(x: Columns, machine: Machine, c: dict) -> Array:
    """Seconds of a layer, all passes, in which a cp rank adds what other ranks' keys and values
    gave to what it has: outputs in forward, gradients of queries, keys and values in backward.
    A sum reads two numbers and writes one (Transformer Engine's p2p); balanced over the ranks, a
    causal mask leaves 3/4 of them."""
    forward = x.heads * np.where(x.recompute > 0, 2.0, 1.0)
    numbers = (forward + x.heads + 2 * x.kv_heads) * x.tokens * x.head_dim / x.tp
    moved = 0.75 * (x.cp - 1) * 3.0 * numbers * x.width
    return moved / (machine.memory_rate * c["mem"])


def launch(x: Columns, c: dict) -> Array:
    """Host seconds to launch one layer, all passes; backward launches about as much as forward. The
    ranks of a tp group of a node wait for their slowest host at each collective. In a pipeline
    nanotron's host takes longer for each rank of the group, but not in a run on one node."""
    # Megatron's softmax kernel wants b a / t in fours (its fused_softmax.py, is_kernel_available).
    plain = ~x.flash & (x.micro_batch * x.heads / x.tp % 4 != 0)
    more = 1.0 + plain * PLAIN_SOFTMAX
    if x.experts.any():
        chunks = np.where(x.deep_ep | x.padded, 0.0, CHUNK_LAUNCH * x.experts)
        routed = np.where(x.hybrid_ep, HYBRID_LAUNCH, ROUTED_LAUNCH)
        more = more + x.routed * (routed + chunks + EXPERT_LAUNCH * x.experts / x.ep)
    more = (more + LATENT_LAUNCH * (x.kv_lora > 0)) * (1.0 + HOST_SPREAD * (x.tp - 1))
    staged = (x.pp > 1) & (x.gpus > x.gpus_per_node)
    each = c["launch"] * of(x, "host") * more + of(x, "stage_host") * x.tp * staged
    return each * (passes(x) - 1.0)


def layer(x: Columns, machine: Machine, c: dict) -> Array:
    """One layer, one micro-batch, forward and backward: the larger of GPU and host time, smooth."""
    core = attention(x, machine, c) * np.where(x.flash, of(x, "attention"), 1.0)
    moved = elementwise(x, machine, c) * of(x, "elementwise")
    again = x.plain & (x.recompute == SELECTIVE)  # all but products and attention
    gpu = passes(x) * (gemms(x, machine, c) + moved) + again * moved
    gpu = gpu + np.where((x.recompute > 0) & ~again, 4.0, 3.0) * core
    gpu = gpu + tensor_parallel(x, machine, c) + context_parallel(x, machine, c)
    gpu = gpu + ring_sums(x, machine, c)
    if x.experts.any():
        gpu = gpu + expert_parallel(x, machine, c)
    gaps = 1.0 + ROUTED_GAP * x.routed
    gpu = gpu + c["gap"] * gaps * passes(x)  # kernels start and drain one by one
    return (gpu**SHARPNESS + launch(x, c) ** SHARPNESS) ** (1 / SHARPNESS)


def logits(x: Columns, machine: Machine, c: dict) -> Array:
    """The output layer and the loss of one micro-batch, forward and backward: never recomputed."""
    m = x.tokens
    gemm = 3.0 * _gemm(m, np.ceil(x.vocab / x.tp / 128) * 128, x.hidden, machine.peak, c)
    loss = 60.0 * m * x.vocab / x.tp / (machine.memory_rate * c["mem"])  # fp32, about ten passes
    return (gemm + loss) * c["head"]


class PipelineTimes(NamedTuple):
    """Seconds of a micro-batch on the slowest stage, and of a mean stage in the bubble."""

    micro_batch: Array
    slot: Array


def stages(x: Columns, machine: Machine, c: dict) -> PipelineTimes:
    """Forward and backward, with what a stalling pipeline waits."""
    layer_s, head_s = layer(x, machine, c), logits(x, machine, c)
    first, middle, last = stages_of(x)
    slowest = np.maximum(np.maximum(first, middle) * layer_s, last * layer_s + head_s)
    mean = ((x.layers + x.mtp) * layer_s + (1 + x.mtp) * head_s) / x.pp
    slowest = np.maximum(slowest, mean * (x.mtp > 0))
    each, slot = (wait * stalls(x) for wait in pipeline_stall(x))
    return PipelineTimes(slowest + c["micro"] + each, mean + c["micro"] + slot)


def stalls(x: Columns) -> Array:
    """Whether a row is a pipeline of a kind whose runs stall in nanotron: of 110 on 512 GPUs 109
    did, and nearly all whose tp groups span 4 nodes. Bool (n,)."""
    return (x.pp > 1) & ((x.gpus > STALL_GPUS) | (x.tp >= 4 * x.gpus_per_node))


def pipeline_stall(x: Columns) -> PipelineTimes:
    """What a pipeline that stalls adds, whatever its size: each message between stages waits. A
    stage has four a micro-batch, and two where all stages are ends. A slot of the bubble waits for
    one. Why they wait is not known."""
    message = of(x, "stall")
    return PipelineTimes(message * np.where(x.pp > 2, 4.0, 2.0), message)


def ring_stall(x: Columns) -> Array:
    """Seconds that nanotron's data-parallel ring stalls in a step, for each of its nodes, on more
    than STALL_GPUS GPUs without a pipeline. ZeRO-1, which gathers narrower weights, moves fewer
    bytes than an all-reduce and stalls for as much less."""
    moved = np.where(x.zero_stage == 1, (x.grad_width + x.width) / (2.0 * x.grad_width), 1.0)
    return of(x, "ring_stall") * ring_nodes(x) * moved * ((x.pp == 1) & (x.gpus > STALL_GPUS))


def luck(x: Columns, machine: Machine, c: dict) -> Array:
    """Standard deviation of log seconds that comes from runs which stall or do not.

    A pipeline that stalls with probability q takes t or t + w seconds: sqrt(q - q^2) log(1 + w/t).
    q is 109/110 where `stalls` says so. Of the other pipelines one in seven stalls on 128 GPUs, and
    half on 256. Every other ring stalls.
    """
    step_s, stall = seconds(x, machine, c), pipeline_stall(x)
    waits_s = x.n_micro * stall.micro_batch + (x.pp - 1) * stall.slot
    without_s = step_s - waits_s * stalls(x)  # step_s counts what is sure to come
    q = np.where(stalls(x), 109 / 110, 1.0 / (1.0 + (240.0 / x.gpus) ** 3)) * (x.pp > 1)
    pipelines = np.sqrt(q * (1.0 - q)) * np.log1p(waits_s / without_s)
    rings = 0.5 * np.log(step_s / (step_s - ring_stall(x)))
    return pipelines + rings


def p2p(x: Columns, machine: Machine, c: dict) -> Array:
    """Seconds that sending activations and their gradients between stages adds to a micro-batch.

    Every GPU of a node sends at once, so each has its share of the node's network.
    """
    volume = 2.0 * x.tokens * x.hidden * x.width
    scattered = x.sequence_parallel | ~x.deepspeed  # Megatron's scatter-gather [N 4.1]
    volume = volume / np.where(scattered, x.tp, 1)
    inside = x.gpus <= x.gpus_per_node
    rate = np.where(inside, machine.link * c["link"], machine.network * SENT / x.gpus_per_node)
    return (x.pp > 1) * x.vpp * volume / rate * SHOWN


def parameters(x: Columns) -> Array:
    """Trained parameters of the fullest rank, without its experts: its share of layers and, at an
    end, the embedding. Norms and biases take no time to speak of."""
    return x.each(_parameters)


def _parameters(step: Step) -> float:
    first, middle, last = stage_layers(step)
    table = step.vocab * step.hidden * (2 if step.untied and step.pp == 1 else 1)
    if not (step.experts or step.kv_lora):
        layer = layer_numbers(step)
        return max(middle * layer, max(first, last) * layer + table) / step.tp
    mlp, shared = (mlp_numbers(step, width, step.tp) for width in (step.ffn, step.shared_ffn))
    routed = 1.0 - step.dense_layers / step.layers if step.experts else 0.0
    own = (1.0 - routed) * mlp + routed * (shared + step.hidden * step.experts)
    return max(first, last) * (attention_numbers(step) + own) + table / step.tp


def expert_parameters(x: Columns) -> Array:
    """Trained parameters of a rank's experts, of the fullest rank."""
    layers = np.maximum(*stages_of(x)[:2]) * x.routed
    return layers * mlp_numbers(x, x.moe_ffn, x.etp) * x.experts / x.ep


def ring_nodes(x: Columns) -> Array:
    """Nodes that the ranks which hold the same parameters span."""
    return _ring_nodes(x, x.tp, x.replicas)


def _ring_nodes(x: Columns, apart: Array, n: Array) -> Array:
    """Nodes that n ranks span of which each is `apart` ranks from the next."""
    return n / np.clip(x.gpus_per_node // apart, 1, n)


def ring_rate(x: Columns, apart: Array, n: Array, machine: Machine, c: dict) -> Array:
    """Bytes/s of one ring of the n ranks that hold the same parameters, `apart` ranks apart.

    Inside a node it has the links' rate. Beyond a node it shares the network with the rings beside
    it. One ring alone does not fill all adapters (hence the square root). A ring over more nodes is
    slower, by the power -0.3: Jean Zay's all-reduce went from 10.6 to 6.9 GB/s between 4 and 16
    nodes, and ZeRO-3's gathers on Selene slowed by 1.6 between 48 and 280.
    """
    inside = apart * n <= x.gpus_per_node
    nodes = _ring_nodes(x, apart, n)
    alone = np.sqrt(n / nodes / np.minimum(x.gpus_per_node, x.gpus))
    rate = outside_rate(nodes, machine, c, of(x, "crowd")) * alone
    within = inside_rate(apart * n, x.gpus_per_node, machine, c)
    return np.where(inside, within, np.minimum(rate, within))


def data_parallel(x: Columns, machine: Machine, c: dict) -> Array:
    """Seconds that the gradients' all-reduce over the n ranks of dp and cp (ring, 2 (n-1)/n), or
    ZeRO's reduce-scatter and all-gathers [R 7], adds after overlap. ZeRO-3 gathers the weights in
    forward and in backward of every micro-batch. FSDP2 reduces `reductions` times a step, and at
    stage 2 gathers once a step. Experts have rings of their own."""
    rate = ring_rate(x, x.tp, x.replicas, machine, c)
    shared = _reduced(x, x.replicas, parameters(x), rate, c)
    if not x.experts.any():
        return shared
    n, apart = x.expert_replicas, x.ep * x.etp
    rate = ring_rate(x, apart, n, machine, c)
    return shared + (x.experts > 0) * _reduced(x, n, expert_parameters(x), rate, c)


def _reduced(x: Columns, n: Array, numbers: Array, rate: Array, c: dict) -> Array:
    """`data_parallel` of that many parameters, which n ranks hold."""
    share = wire_bytes("all_gather", n, numbers)
    grads = 2.0 * share * x.grad_width
    gathers = np.where(x.deepspeed & (x.zero_stage > 0), share * x.width, 0.0)
    # DeepSpeed's stage 2 cannot accumulate whole gradients: it reduces every micro-batch.
    times = np.where(x.zero_stage == 2, x.n_micro, 1)
    # Elsewhere ZeRO-1 reduces to shards and gathers weights. DeepSpeed's stage 1 all-reduces.
    scatters = (x.zero_stage == 1) & ~x.deepspeed
    grads = np.where(scatters, share * (x.grad_width + x.width), grads)
    once = (grads * times + gathers) / rate * c["exposed"]
    once = once + x.layers / x.pp * (n > 1) * latency(n, c)
    calls = 3.0 * x.n_micro * x.layers * (n > 1) * latency(n, c) * np.where(x.deepspeed, PARTS, 1)
    zero3 = calls + share * (2.0 * x.width + x.grad_width) / rate * x.n_micro * c["exposed"]
    rounds = np.where(x.zero_stage == 3, 2.0 * x.n_micro, 1.0)  # FSDP2's all-gathers of a layer
    fsdp2 = (rounds + x.reductions) * x.layers / x.pp * (n > 1) * latency(n, c)
    fsdp2 = fsdp2 + share * (rounds * x.width + x.reductions * x.grad_width) / rate * c["exposed"]
    return np.select([x.fsdp2, x.zero_stage == 3], [fsdp2, zero3], once)


def hidden(x: Columns, traffic_s: Array, micro_s: Array) -> Array:
    """Seconds of data-parallel traffic that run beside the computation of micro-batches of micro_s
    seconds each. Gradients are whole in the last backward alone. ZeRO-3 and FSDP2 gather in every
    pass. ZeRO-1's traffic comes after the last backward. Megatron's FSDP gathers experts
    beside the computation as PyTorch's does."""
    always = x.fsdp2 | (x.zero_stage == 3)
    experts = always & (x.experts > 0) & ~x.deepspeed
    overlap = np.where(experts, FAMILY["fsdp"]["overlap"], of(x, "overlap"))
    beside = micro_s * np.where(always, x.n_micro, 2.0 / 3.0)
    return overlap * (x.zero_stage != 1) * np.minimum(traffic_s, beside)


def tied_embedding(x: Columns, machine: Machine, c: dict) -> Array:
    """The all-reduce of a tied embedding's gradient between the first and the last stage, which are
    on two nodes wherever there are two."""
    volume = x.vocab * x.hidden / x.tp * x.grad_width
    inside = inside_rate(np.array(2), x.gpus_per_node, machine, c)
    outside = machine.network * c["network"] / x.gpus_per_node
    rate = np.where(x.gpus <= x.gpus_per_node, inside, outside)
    return np.where((x.pp > 1) & (x.zero_stage < 3) & ~x.untied, volume / rate, 0.0)


def optimizer(x: Columns, machine: Machine, c: dict) -> Array:
    """Adam over the rank's parameters, memory-bound (about 30 bytes each), and the fixed cost of a
    step: gradient norm, scaler, logging."""
    moved = 30.0 * parameters(x) / np.where(x.zero_stage > 0, x.replicas, 1)
    if x.experts.any():
        shards = np.where(x.zero_stage > 0, x.expert_replicas, 1)
        moved = moved + 30.0 * expert_parameters(x) / shards
    move = moved / (machine.memory_rate * c["mem"])
    host = moved / HOST_RATE * (x.offload > 0)
    return move + host + c["step"]


def terms(x: Columns, machine: Machine, c: dict) -> dict[str, Array]:
    """Every additive term of a step in seconds; their sum is the prediction.

    Ranks that share a core take turns: their seconds count that many times, but not those of a
    stage that waits, for its core works for another. These are seconds before that counting.
    """
    slowest, mean = stages(x, machine, c)
    send = p2p(x, machine, c)
    wait = np.where(x.slower, c["engine"], 1.0)
    traffic = data_parallel(x, machine, c)
    ranks_per_core = np.maximum(x.gpus / machine.cores, 1.0)
    return {
        "compute": x.n_micro * slowest * wait,
        "bubble": (x.pp - 1) * (mean + send) / x.vpp * wait / ranks_per_core,
        "p2p": x.n_micro * send * wait,
        "data_parallel": traffic - hidden(x, traffic, mean) + ring_stall(x),
        "embedding": tied_embedding(x, machine, c),
        "optimizer": optimizer(x, machine, c),
    }


def seconds(x: Columns, machine: Machine, c: dict) -> Array:
    """Predicted seconds of one step."""
    return sum(terms(x, machine, c).values())
