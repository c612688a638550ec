"""Terms of the time model against a paper's count, or a sum made by hand.

What rows on record have (test_predictions_on_record.py) is noticed there.
"""

from dataclasses import replace
from functools import partial

import numpy as np
import pytest

from analysis.planner import engines
from analysis.planner.columns import FAMILIES, MUON, columns, columns_of
from analysis.planner.messages import sent_bytes
from analysis.planner.timemodel import compute, links, replicas, stages, step
from analysis.planner.timemodel import layer as layer_time
from analysis.planner.timemodel import machine as machines
from analysis.planner.timemodel.machine import Machine
from analysis.planner.timemodel.muon import newton_schulz
from models import flops
from models.config import GPTConfig
from parallel.config.resolve import resolve

# Every efficiency one, every latency and penalty none: what is left are the model's own numbers.
IDEAL = {"gemm": 1.0, "attn": 1.0, "mem": 1.0, "link": 1.0, "network": 1.0, "head": 1.0}
IDEAL |= {"exposed": 1.0, "engine": 1.0, "sat": 0.0, "align": 0.0, "launch": 0.0, "gap": 0.0}
IDEAL |= {"latency": 0.0, "step": 0.0, "micro": 0.0}
ENDLESS = Machine(1e12, np.inf, 1e9, 1e9)  # 1 TFLOP/s, and memory that costs nothing
MACHINE = Machine(1e12, 1e9, 1e9, 1e9)
CONFIG = GPTConfig(n_layer=4, hidden=256, n_head=4, vocab_size=1280, max_seq_len=128)
SBH = 128 * 256  # numbers of a micro-batch's hidden states; two bytes each
LAYER, WORDS = 12 * 256**2, 1280 * 256


def one(found):
    """A term's only row."""
    return np.atleast_1d(found)[0]


def ideal(**constants):
    return IDEAL | constants


def x_of(**given):
    return columns(CONFIG, **given)


# 2 of 4 heads for keys and values, heads of 96 numbers in 256, and a gate
LLAMA = replace(CONFIG, n_kv_head=2, kv_channels=96, ffn_hidden=512, activation="swiglu")


@pytest.mark.parametrize("config", [CONFIG, LLAMA], ids=["gpt", "llama"])
@pytest.mark.parametrize("recompute", [False, True])
def test_a_layer_and_the_logits_do_the_flops_of_sc21(recompute, config):
    x_of = partial(columns, config)
    x = x_of(micro_batch=3, recompute=2 * recompute)
    once = compute.gemms(x, ENDLESS, IDEAL) + compute.attention(x, ENDLESS, IDEAL)
    passes = 4 if recompute else 3
    seconds = 4 * passes * once + compute.logits(x, ENDLESS, IDEAL)
    tokens = 3 * 128
    assert one(seconds) * 1e12 == pytest.approx(tokens * flops.sc21(config, 128, recompute))
    assert one(layer_time.passes(x)) == passes
    layer = layer_time.layer(x, ENDLESS, IDEAL)
    assert one(layer) == pytest.approx(passes * one(once))
    split = compute.gemms(x_of(micro_batch=3, tp=2), ENDLESS, IDEAL)
    assert one(split) == pytest.approx(one(compute.gemms(x, ENDLESS, IDEAL)) / 2)


def test_attention_passes_over_its_scores_unless_flash_keeps_them():
    """Per score six and a half times its width; flash halves the products, too."""
    x = x_of(micro_batch=3, tp=2)
    products, scores = 4 * 3 * 128 * 128 * 256 / 2 / 1e12, 3 * 128 * 128 * 4 / 2
    found = one(compute.attention(x, MACHINE, ideal(mem=0.5, attn=0.25)))
    assert found == pytest.approx(4 * products + 2 * 6.5 * 2 * scores / 1e9)
    flash = x_of(micro_batch=3, tp=2, flash=True)
    assert one(compute.attention(flash, MACHINE, IDEAL)) == pytest.approx(products / 2)
    for heads, crooked in ((32, 0), (64, 1), (28, 1)):  # of 8, 4 and 9.14 numbers
        x = x_of(heads=heads, head_dim=256 / heads, flash=True)
        with_, without = (compute.attention(x, MACHINE, c) for c in (ideal(align=0.3), IDEAL))
        assert one(with_ / without) == pytest.approx(1 + 0.3 * crooked)


KV = 2 * 128 * 256 * 2  # bytes of a layer's keys and values: two of SBH numbers in half precision


def test_a_ring_moves_keys_and_values_once_a_pass_and_hides_them_behind_attention():
    """Forward, backward (again, and their gradients back), and once more with recomputation."""

    def moved(flops=np.inf, latency=0.0, **given):
        x, machine = x_of(micro_batch=3, flash=True, **given), Machine(flops, 1e9, 1e9, 1e9)
        seconds = links.context_parallel(x, machine, ideal(latency=latency))
        return one(seconds) * 1e9 / (3 * KV)

    assert moved() == 0
    assert moved(cp=4) == pytest.approx(3 * 3 / 4)
    assert moved(cp=2, tp=2, kv_heads=2) == pytest.approx(3 / 2 / 2 / 2)
    for recompute in (1, 2):
        assert moved(cp=2, recompute=recompute) == pytest.approx(4 / 2)
    assert moved(cp=2, recompute=1, our_megatron=True) == pytest.approx(3 / 2)  # of norms alone
    waits = moved(latency=1.0, cp=4) - moved(cp=4)
    assert waits * 3 * KV / 1e9 == pytest.approx(3 * 3)  # for three sends in three passes
    slow = Machine(1e9, np.inf, 1e9, 1e9)  # attention of 1/4 of the sequence, three times of four
    attention = one(compute.attention(x_of(micro_batch=3, cp=4, flash=True), slow, IDEAL))
    shown = 3 * 3 / 4 * (1 - attention * 1e9 / (3 * KV))
    assert moved(1e9, cp=4) == pytest.approx(max(shown, 0)) and moved(1e7, cp=4) == 0
    machines = (Machine(1e12, 1e9, link, 1e9) for link in (1e8, 1e9))
    slow_s, fast_s = (layer_time.layer(x_of(cp=4, flash=True), m, IDEAL) for m in machines)
    assert slow_s > fast_s


def test_a_context_parallel_rank_adds_up_what_each_step_of_the_ring_gave():
    """Of cp 4, three sums of three quarters; two reads and a write of two bytes a number each."""
    machine = Machine(np.inf, 1e9, np.inf, np.inf)

    def numbers(recompute=0, **given):
        x = columns(LLAMA, micro_batch=3, flash=True, recompute=recompute, **given)
        ring = layer_time.layer(x, machine, ideal(mem=0.5))
        plain = layer_time.layer(replace(x, cp=np.ones(1)), machine, ideal(mem=0.5))
        shorter = compute.elementwise(x, machine, ideal(mem=0.5))
        whole = compute.elementwise(replace(x, cp=np.ones(1)), machine, ideal(mem=0.5))
        alone = one(ring - plain - layer_time.passes(x) * (shorter - whole))
        return alone * 0.5e9 / (3 * 0.75 * 3 * 2) / (3 * 128 / 4 * 96)

    out, queries, others = 4, 4, 2 * 2  # heads
    assert numbers(cp=4) == pytest.approx(out + queries + others)
    assert numbers(cp=4, tp=2) == pytest.approx((out + queries + others) / 2)
    assert numbers(cp=4, recompute=2) == pytest.approx(2 * out + queries + others)


def test_a_context_parallel_group_beyond_a_node_has_its_share_of_the_network():
    """Ranks of tp 8 fill a node of 8: its eight groups of cp 2 share its network."""
    machine = Machine(np.inf, 1e9, 1e9, 4e8)

    def moved(**given):
        x = columns(CONFIG, heads=8, flash=True, **given)
        return one(links.context_parallel(x, machine, IDEAL)) / 3 / (KV / 2)

    assert moved(cp=2, dp=4) * 1e9 == pytest.approx(1)  # inside
    assert moved(cp=2, tp=8) == pytest.approx(8 * 2**links.CROWD / 4e8 / 8)
    assert moved(cp=16) / 15 * 8 == pytest.approx(2**links.CROWD / 4e8)  # 8 of it in a node


def test_ends_of_a_model_add_up_their_words():
    """The embedding's words, and the gradient of the logits' input: an all-reduce each."""
    machine = Machine(np.inf, np.inf, 1e9, 1e9)
    each = 2 / 2 * SBH * 2 / 1e9
    for pp, layers in ((1, 4), (2, 2), (4, 1)):
        found = stages.stages(x_of(tp=2, pp=pp), machine, IDEAL)
        assert one(found.micro_batch) == pytest.approx((4 * layers + (2 if pp == 1 else 1)) * each)
        assert one(found.slot) == pytest.approx((4 * 4 + 2) / pp * each)
    uneven = stages.stages(x_of(tp=2, pp=4, layers=9), machine, IDEAL)  # 3 layers, and 2 at last
    assert one(uneven.micro_batch) == pytest.approx((4 * 3 + 1) * each)
    assert one(stages.word_messages(x_of(), machine, ideal(latency=1.0))) == 0


def test_experts_that_etp_cuts_are_gathered_and_added_up():
    """In fp32 by our engine, in 16 bits by default."""
    machine = Machine(np.inf, np.inf, 1e9, 1e9)
    sizes = {"experts": 4, "topk": 2, "moe_ffn": 512, "tp": 2, "sequence_parallel": True}
    for ours, width in ((False, 2), (True, 4)):
        x = x_of(**sizes, our_megatron=ours)
        routed = 2 * SBH / 2 * 2  # of two ranks, two choices a token
        found = one(links.expert_parallel(x, machine, IDEAL)) * 1e9
        assert found == pytest.approx(2 * routed * (2 + width) / 2)


def test_launching_is_the_hosts():
    for given, launches in (
        ({"micro_batch": 3, "heads": 3}, 2 * 1.2),  # b a / t is no multiple of four
        ({"micro_batch": 2, "tp": 4}, 2 * 1.12 * 1.2),
        ({"micro_batch": 3, "heads": 3, "flash": True}, 2),
        ({"micro_batch": 4, "recompute": 1}, 2),
    ):
        assert one(layer_time.launch(x_of(**given), ideal(launch=1.0))) == pytest.approx(launches)


def test_a_layer_counts_attention_thrice_and_once_more_where_it_is_recomputed():
    """Selective recomputation repeats attention alone, with PyTorch's layers all but attention and
    products; kernels start and drain once a pass."""
    for plain, recompute, passes, cores, moves in (
        (False, 0, 3, 3, 3),
        (False, 1, 3, 4, 3),
        (False, 2, 4, 4, 4),
        (True, 1, 3, 3, 4),
    ):
        x = x_of(plain=plain, recompute=recompute)
        parts = (compute.attention, compute.gemms, compute.elementwise)
        core, products, moved = (one(part(x, MACHINE, IDEAL)) for part in parts)
        layer = one(layer_time.layer(x, MACHINE, ideal(gap=0.5)))
        assert layer == pytest.approx(passes * (products + 0.5) + moves * moved + cores * core), (
            plain,
            recompute,
        )


def test_a_ring_over_more_nodes_is_as_much_slower_as_jean_zays_was():
    """NCCL's all-reduces of Jean Zay: 10.6 GB/s on 4 nodes, 6.9 on 16."""
    four, sixteen = (links.outside_rate(n, ENDLESS, IDEAL) for n in (4, 16))
    assert sixteen / four == pytest.approx(6.9 / 10.6, rel=0.02)
    assert links.outside_rate(0.5, ENDLESS, ideal(network=0.5)) == 0.5e9


def test_wires_of_a_mesh_are_owned_by_the_cards_they_join():
    mesh, switch = (Machine(1e12, 1e9, 7e9, 1e9, mesh=wired) for wired in (True, False))
    for n, share in ((1, 1 / 7), (2, 1 / 7), (4, 3 / 7), (8, 1), (16, 1)):
        assert links.inside_rate(n, 8, mesh, IDEAL) == pytest.approx(7e9 * share)
        assert links.inside_rate(n, 8, switch, ideal(link=0.5)) == 3.5e9


def test_tensor_parallelism_reduces_four_times_a_layer_or_six():
    machine = Machine(np.inf, np.inf, 1e9, 1e9)
    x = x_of(tp=4, micro_batch=2, recompute=np.arange(3), width=4)
    for term in (links.tensor_parallel, layer_time.layer):
        times = term(x, machine, IDEAL) * 1e9 / (2 * 3 / 4 * 2 * SBH * 4)
        assert times == pytest.approx([4, 4, 6])
    assert one(links.tensor_parallel(x_of(), machine, ideal(latency=1.0))) == 0


def test_stages_send_their_hidden_states_and_the_gradients_of_them():
    """Of which 40 % shows."""
    for given, sent in (
        ({}, 0),
        ({"pp": 2}, 2),
        ({"pp": 2, "micro_batch": 3, "width": 4, "vpp": 2}, 2 * 3 * 2 * 2),
        ({"pp": 2, "tp": 2}, 2),  # megatron-core sends the whole
        ({"pp": 2, "tp": 2, "sequence_parallel": True}, 1),
        ({"pp": 2, "tp": 2, "sequence_parallel": True, "scattered": True}, 1),
        ({"pp": 16}, 2 * 8 / 0.8),  # beyond a node each GPU has its share of 80 % of the network
    ):
        seconds = one(stages.p2p(x_of(**given), MACHINE, IDEAL))
        assert seconds / 0.4 * 1e9 / (SBH * 2) == pytest.approx(sent)


def test_what_stages_scatter_is_gathered():
    """Of tp 4 a quarter is sent, each way; DeepSpeed's has 11 numbers of 8 bytes beside it."""
    half, deepspeed = 3 / 4 * SBH * 2, {"scattered": True, "deepspeed": True}
    for pp, given, described, gathers in (
        (2, {"scattered": True}, 0, 1),
        (3, {"scattered": True}, 0, 2),
        (2, deepspeed, 88, 2),
        (3, deepspeed, 88, 3),
        (2, deepspeed | {"whole_gradients": True}, 88, 1),
        (3, deepspeed | {"whole_gradients": True}, 88, 2),
    ):
        whole = "whole_gradients" in given
        found = one(stages.p2p(x_of(pp=pp, tp=4, gpus_per_node=12, **given), MACHINE, IDEAL))
        part = SBH * 2 / 4 + described
        sent = part + (SBH * 2 if whole else part)
        assert found * 1e9 == pytest.approx(0.4 * sent + gathers * half)


def test_programs_scatter_what_their_stages_send():
    for name in ("Megatron-LM", "Megatron-DeepSpeed (microsoft)", "deepspeed_pipe", "InternEvo"):
        assert engines.scatters(name)
    for name in ("megatron", "NeMo 24.07 (Megatron core)", "nanotron"):
        assert not engines.scatters(name)


PIPELINES = (
    {"engine": "megatron"},
    {"engine": "megatron", "sequence_parallel": True},
    {"engine": "megatron", "vpp": 2, "precision": "bf16"},
    {"engine": "deepspeed_pipe"},
)


@pytest.mark.parametrize("given", PIPELINES, ids=lambda given: "-".join(map(str, given.values())))
def test_stages_send_in_the_model_what_a_run_sends(given):
    """A stage in the middle: sent_bytes is what test_parity.py and test_rehearsal.py count. What
    sequence parallelism gathers beside a product takes no time."""
    sizes = {"n_layer": 8, "hidden": 64, "n_head": 4, "device": "cuda"}
    split = {"gpus": 8, "tp": 2, "pp": 4, "grad_accum": 4}
    spec = resolve(("test", {"preset": "tiny"} | sizes | split | given))
    x = columns_of(spec, flash=True)
    sent, m = sent_bytes(spec, 2), spec.layout.n_micro
    slow = Machine(np.inf, np.inf, 1.0, 1.0)  # one byte a second
    gathers = {"deepspeed_pipe": 3}.get(spec.engine, 0) * one(links.hidden_states(x, slow, IDEAL))
    found = one(stages.p2p(x, slow, IDEAL)) - gathers / 2
    assert found / 0.4 * m == pytest.approx(sent["pp"])
    if not spec.layout.sequence_parallel:
        layers = 2 * one(links.tensor_parallel(x, slow, IDEAL))
        assert (layers + gathers / 2) * m == pytest.approx(sent["tp"])


def test_parameters_of_the_fullest_rank():
    for given, parameters in (
        ({"pp": 2, "tp": 2}, LAYER + WORDS / 2),
        ({"pp": 12, "layers": 70, "vocab": 1}, 6 * LAYER),  # BLOOM's stages: 5, 6 ... 6, 5
        ({"pp": 12, "layers": 70, "vocab": 3840}, 5 * LAYER + 3840 * 256),  # more than a layer
        ({"pp": 4, "layers": 9}, 3 * LAYER + WORDS),
    ):
        assert one(replicas.parameters(x_of(**given))) == parameters


N = 4 * LAYER + WORDS  # parameters of x_of() on one GPU


def test_data_parallelism_moves_gradients_and_gathers_weights():
    """Bytes per parameter, of which (n - 1)/n are sent. FSDP2 gathers words once a micro-batch."""
    for given, numbers in (
        ({}, 2 * 2),  # reduce-scatter and all-gather of two-byte gradients
        ({"zero_stage": 1}, 2 * 2),  # the same bytes [R 7]
        ({"deepspeed": True, "zero_stage": 1}, 2 * 2 + 2),  # it reduces, and gathers the weights
        ({"deepspeed": True, "zero_stage": 2, "n_micro": 5}, 5 * 2 * 2 + 2),
        ({"zero_stage": 1, "n_micro": 5}, 2 * 2),
        ({"zero_stage": 3, "n_micro": 5}, 5 * (2 * 2 + 2)),  # gathered twice, scattered once
        ({"fsdp2": True, "zero_stage": 3, "n_micro": 5}, 5 * 2 * 2 + 2),  # scattered once a step
        ({"fsdp2": True, "zero_stage": 2, "n_micro": 5, "grad_width": 4}, 2 + 4),
        ({"fsdp2": True, "zero_stage": 3, "n_micro": 5, "reductions": 5}, 5 * (2 * 2 + 2)),
    ):
        found = one(replicas.data_parallel(x_of(dp=4, **given), MACHINE, IDEAL))
        again = 5 * 2 * WORDS if "fsdp2" in given and given["zero_stage"] == 3 else 0
        assert found * 1e9 / (3 / 4) == pytest.approx(numbers * N - again)
        half = one(replicas.data_parallel(x_of(dp=4, **given), MACHINE, ideal(exposed=0.5)))
        assert half == pytest.approx(found / 2)


def test_copies_of_fsdp2_add_up_the_gradients_of_a_shard():
    """Two copies of four shards each: three quarters are scattered and gathered, a quarter is
    added up by two."""
    given = {"fsdp2": True, "zero_stage": 2, "grad_width": 4, "dp": 8, "shards": 4}
    found = one(replicas.data_parallel(x_of(**given), MACHINE, IDEAL))
    assert found * 1e9 == pytest.approx(3 / 4 * N * (2 + 4) + N / 4 * 4)


def test_zero_3_waits_for_three_collectives_a_layer_and_micro_batch():
    for given, calls in (
        ({"zero_stage": 3, "n_micro": 5}, 3 * 5 * 4),
        ({"zero_stage": 3, "n_micro": 5, "deepspeed": True}, 3 * 3 * 5 * 4),  # module by module
        ({"fsdp2": True, "zero_stage": 3, "n_micro": 5, "reductions": 5}, 3 * 5 * 4),
        ({"zero_stage": 3, "dp": 1}, 0),
    ):
        endless = Machine(1e12, np.inf, np.inf, np.inf)
        x = x_of(**{"dp": 2} | given)
        assert one(replicas.data_parallel(x, endless, ideal(latency=1.0))) == calls


def test_the_ends_of_a_pipeline_reduce_their_embedding():
    """Over the links of one node; of two nodes each GPU has an eighth of the network."""
    machine = Machine(1e12, 1e9, 3e9, 1e9)
    for given, constants, seconds in (
        ({"dp": 8, "tp": 2, "grad_width": 4}, IDEAL, WORDS / 2 * 4 * 8 / 1e9),
        ({"dp": 8, "zero_stage": 2}, ideal(network=0.5), WORDS * 2 * 8 * 2 / 1e9),
        ({"dp": 4, "zero_stage": 2}, ideal(network=0.5), WORDS * 2 / 3e9),
        ({"dp": 2, "tp": 2, "grad_width": 4}, ideal(link=0.5), WORDS / 2 * 4 * 2 / 3e9),
    ):
        found = stages.tied_embedding(x_of(pp=2, **given), machine, constants)
        assert one(found) == pytest.approx(seconds)
    meshed = stages.tied_embedding(x_of(pp=2), replace(machine, mesh=True), IDEAL)
    assert one(meshed) == pytest.approx(WORDS * 2 / (3e9 / 7))  # two of eight GPUs share a wire
    for given in ({}, {"pp": 2, "zero_stage": 3}, {"pp": 2, "untied": True}):
        assert one(stages.tied_embedding(x_of(**given), MACHINE, IDEAL)) == 0


def test_adam_moves_thirty_bytes_a_parameter_of_its_shard():
    for given, moved in (
        ({"dp": 4}, 30),
        ({"dp": 4, "zero_stage": 1}, 30 / 4),
        ({"offload": 1, "zero_stage": 1}, 30 + 15),  # the host's at 2 GB/s
        ({"offload": 1, "zero_stage": 1, "dp": 3}, 45 / 3),
    ):
        seconds = replicas.optimizer(x_of(**given), MACHINE, ideal(step=1.0))
        assert (one(seconds) - 1.0) * 1e9 / N == pytest.approx(moved, rel=1e-4)


def test_the_slowest_stage_is_the_one_with_the_most_layers_or_the_one_with_the_logits():
    layer, head = (one(f(x_of(), ENDLESS, IDEAL)) for f in (layer_time.layer, compute.logits))
    for given, slowest in (
        ({"pp": 2}, 2 * layer + head),
        ({"pp": 4, "layers": 9, "vocab": 1}, 3 * layer),  # 3, 3, 3 and 2: the first
        ({"pp": 12, "layers": 70, "vocab": 1}, 6 * layer),  # the middle
    ):
        found = stages.stages(x_of(**given), ENDLESS, ideal(micro=0.25))
        small = one(compute.logits(x_of(**given), ENDLESS, IDEAL))
        assert one(found[0]) == pytest.approx(slowest + 0.25)
        layers = given.get("layers", 4)
        assert one(found[1]) == pytest.approx((layers * layer + small) / given["pp"] + 0.25)


def test_a_step_is_its_micro_batches_and_the_bubble():
    """(pp - 1) / vpp of a mean stage is waited for; DeepSpeed's engine costs its factor more."""

    def terms(machine=MACHINE, constants=IDEAL, **more):
        x = x_of(pp=2, vpp=2, n_micro=6, **more)
        return {name: one(part) for name, part in step.terms(x, machine, constants).items()}

    x, found = x_of(pp=2, vpp=2, n_micro=6), terms()
    slowest, mean = (one(part) for part in stages.stages(x, MACHINE, IDEAL))
    send = one(stages.p2p(x, MACHINE, IDEAL))
    wanted = {"compute": 6 * slowest, "bubble": (mean + send) / 2, "p2p": 6 * send}
    assert {name: found[name] for name in wanted} == pytest.approx(wanted)
    assert found["data_parallel"] == 0 and found["embedding"] > 0 and found["optimizer"] > 0
    slower = terms(constants=ideal(engine=1.5), slower=True)
    assert {k: slower[k] / 1.5 for k in wanted} == pytest.approx(wanted)
    assert terms(constants=ideal(engine=1.5)) == found
    for cores, shared in ((1, 2), (2, 1), (4, 1)):  # two ranks
        bubble = terms(replace(MACHINE, cores=cores))["bubble"]
        assert bubble == pytest.approx(found["bubble"] / shared)


def test_a_card_brings_its_sheet_and_the_description_its_network():
    for of, rates in (
        (("A100", "a cluster", 8), {"peak": 312e12, "memory_rate": 2039e9, "link": 300e9}),
        (("A100", "a cluster", 8), {"network": 8 * 25e9, "fp8": 0, "cores": np.inf, "mesh": False}),
        (("A100", "800 Gbps InfiniBand", 8), {"network": 100e9}),
        (("A100", None, 4, 4), {"peak": 19.5e12}),  # fp32
        (("A100", None, 4, 4, "fp8", None, True), {"peak": 156e12}),  # tf32
        (("V100", None, 8, 4, "fp8", None, True), {"peak": 15.7e12}),  # it has none
        (("MI250X", None, 8, 4), {"peak": 191.5e12 / 8}),  # neither is known
        (("H100", None, 8), {"fp8": 1978.9e12}),
        (("V100", None, 8), {"mesh": True}),
        (("V100", None, 16), {"mesh": False}),  # a DGX-2 has a switch
    ):
        machine = machines.machine_of(*of)
        assert {name: getattr(machine, name) for name in rates} == rates


def test_engines_have_the_constants_of_their_family():
    """Rows of nanotron and megatron-core are on record: test_predictions_on_record.py."""
    assert set(engines.FAMILY) <= set(FAMILIES)
    x = x_of(tp=np.array([1, 2]))
    assert [engines.constant(x, name).tolist() for name in ("host", "overlap")] == [[1, 1], [0, 0]]
    ours = engines.families(["megatron", "deepspeed_zero", "fsdp2", "ddp"])
    assert [FAMILIES[i] for i in ours] == ["megatron_core", "deepspeed", "fsdp", "megatron"]


def test_muons_products_are_made_once_where_a_layer_has_one_home():
    """Four matrices of attention, two of the feed-forward: 5 (4 s^2 l + 2 s^3) FLOPs each."""
    machine = Machine(1e14, 1e12, 3e12, 1e12)
    constants = {"gemm": 0.5, "link": 1.0, "latency": 0.0, "network": 1.0}
    sizes = {"layers": 2, "hidden": 64, "heads": 4, "vocab": 128, "seq": 32}
    sizes |= {"dp": 2, "zero_stage": 1}

    def seconds(mode, **given):
        steps = columns(**sizes | given, muon=MUON.index(mode))
        return newton_schulz(steps, machine, constants).item()

    square, long = 5 * 6 * 64**3, 5 * (4 * 64**2 * 256 + 2 * 64**3)
    whole = 2 * (4 * square + 2 * long) / 5e13
    assert seconds("") == 0
    assert seconds("duplicated") == pytest.approx(whole / 2)
    assert seconds("duplicated", zero_stage=0) == pytest.approx(whole)
    assert seconds("duplicated", dp=4096) == pytest.approx(long / 5e13)  # one matrix is whole
    cut = {"tp": 4, "zero_stage": 0}
    one_home, repeated = seconds("layer_sharded", **cut), seconds("duplicated", **cut)
    assert repeated == pytest.approx(4 * one_home)
    split = seconds("distributed", **cut)  # A's own product is not split
    assert one_home < split < repeated
