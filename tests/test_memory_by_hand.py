"""Bytes of a step, part by part, against papers' numbers and sums made by hand."""

import math

import numpy as np
import pytest

from analysis.planner import memory
from analysis.planner.columns import columns
from models.config import PRESETS, parameter_shapes
from parallel.config.layout import Layout
from tests.tools import pipeline_schedules as pipeline

GIB = 2**30
LOSS = {"account_for_loss_in_pipeline_split": True}
BOTH = LOSS | {"account_for_embedding_in_pipeline_split": True}
# 8 layers of h 64 with 4 heads, s 32, b 1, 100 words; a layer has 12 h^2 = 49,152 parameters.
SMALL = {"layers": 8, "hidden": 64, "heads": 4, "vocab": 100, "seq": 32}
LAYER, WORDS = 49_152, 6_400
SBH = 32 * 64  # numbers in a layer's input
PLAIN = 34 * SBH + 5 * 4 * 32 * 32  # bytes that a layer keeps in half precision [K eq. 1]


def test_in_fp8_weights_are_held_twice_more_and_the_inputs_of_products_in_one_byte():
    """A GPT of h 8, f 32, 2 heads of 4 and 3 layers on 16 tokens: Transformer Engine on Hopper."""
    given = SMALL | {"layers": 3, "hidden": 8, "heads": 2, "vocab": 64, "seq": 16}
    x, plain = (columns(**given, fp8=low, flash=True, grad_width=4) for low in (True, False))
    parts, before = memory.parts(x), memory.parts(plain)
    assert parts["fp8_copies"][0] == 2 * 3 * 12 * 8**2 and before["fp8_copies"][0] == 0
    assert parts["weights"] == before["weights"]
    # Both norms' outputs and the second product's input halve; attention's output is there twice.
    saved = memory.layer_activations(plain) - memory.layer_activations(x)
    assert saved[0] == 16 * (2 * 8 + 32 - 8)
    torchao, none = (memory.peak(columns(**given, fp8=low, fsdp2=True)) for low in (True, False))
    assert torchao == none  # its fp8 is another


def test_context_parallel_ranks_share_a_sequence_and_the_optimizer():
    """Activations and logits are cut by cp; ZeRO shards over dp x cp."""
    whole = columns(**SMALL, micro_batch=4, dp=8, zero_stage=3, recompute=np.arange(3))
    shared = columns(**SMALL, micro_batch=4, dp=2, cp=4, zero_stage=3, recompute=np.arange(3))
    for part in (memory.kept_per_layer, memory.scores, memory.logits):
        assert part(shared) == pytest.approx(part(whole) / 4)
    found, alone = (memory.states(x, np.array([LAYER])) for x in (shared, whole))
    assert all((found[name] == alone[name]).all() for name in found)


def test_a_context_parallel_rank_holds_keys_and_values_of_another():
    own = 2 * 3 * 32 * 64 * 2 // 4  # keys and values of a quarter of three sequences
    ring = columns(**SMALL, micro_batch=3, cp=4)  # and their gradients
    assert memory.received(ring)[0] == memory.parts(ring)["keys_and_values"][0] == 2 * own
    grouped = columns(**SMALL, micro_batch=3, cp=4, kv_heads=2, tp=2)
    assert memory.received(grouped)[0] == 2 * own / 2 / 2
    assert memory.received(columns(**SMALL))[0] == 0


def test_a_micro_batch_has_one_mask_of_its_documents_and_repeats_keys_for_all_heads():
    """2 sequences, 3 of 4 micro-batches in flight; 4 heads, whose keys and values are of 2."""
    given = SMALL | {"kv_heads": 2, "rotary": True, "flash": True, "micro_batch": 2, "n_micro": 4}
    x, plain = (columns(**given, pp=3, documents=is_so) for is_so in (True, False))
    assert memory.parts(x)["masks"][0] == 3 * 2 * 32**2 * 2 and memory.parts(plain)["masks"][0] == 0
    # Kept for a token of 16 a head are 2 x 2 heads more, and not the product, of 4 + 2 x 2 heads,
    # of which the values were a view.
    more = memory.layer_activations(x) - memory.layer_activations(plain)
    assert more[0] == 2 * 32 * 16 * 2 * (2 * 2 - (4 + 2 * 2) + 2)


def test_layers_are_dealt_to_stages_as_bloom_and_deepspeed_do():
    for layers, pp, stages in (
        (12, 4, (3, 3, 3)),
        (70, 12, (5, 6, 5)),  # BLOOM: embedding and logits count as a layer each
        (10, 4, (2, 3, 2)),
        (9, 4, (3, 3, 2)),  # DeepSpeed's partition_uniform: the first stages take one more
        (8, 2, (4, 4, 4)),
    ):
        x = columns(**SMALL | {"layers": layers}, pp=pp)
        assert tuple(part[0] for part in memory.stage_layers(x)) == stages


@pytest.mark.parametrize("name", ["llama2-70b", "llama3-405b", "qwen3-0.6b", "qwen3-4b", "175b"])
def test_weights_are_the_models_but_for_norms_biases_and_positions(name):
    config = PRESETS[name]
    x = columns(config)
    matrices = [s for n, s in parameter_shapes(config).items() if len(s) == 2]
    learned = config.max_seq_len * config.hidden * (config.position == "learned")
    found = memory.params(x, x.layers, True)[0]
    assert found == sum(map(math.prod, matrices)) - learned
    staged = columns(config, pp=2)  # the embedding at one end, the output layer at the other
    ends = memory.params(staged, x.layers, True)[0] - memory.params(staged, x.layers, False)[0]
    assert ends == config.vocab_size * config.hidden


def test_bytes_of_states_by_engine_precision_and_stage():
    """Per parameter, on 8 data-parallel ranks."""
    for given, weights, gradients, optimizer in (
        ({}, 2, 2, 12),  # fp16: master, two moments
        ({"grad_width": 4}, 2, 4, 12),  # bf16 that accumulates in fp32
        ({"width": 4}, 4, 4, 8),
        ({"zero_stage": 1}, 2, 2, 12 / 8),
        ({"zero_stage": 2}, 2, 2 / 8, 12 / 8),
        ({"zero_stage": 3}, 2 + 2 / 8, 2 / 8, 12 / 8),  # 2: those that are gathered while they run
        ({"deepspeed": True}, 2, 2, 16),  # and the shard of gradients in fp32
        ({"deepspeed": True, "zero_stage": 2}, 2, 2 / 8, 16 / 8),
        ({"deepspeed": True, "zero_stage": 3}, 2 + 2 / 8, 2 / 8, 12 / 8),
        ({"deepspeed": True, "grad_width": 4}, 2, 6, 12),  # the bf16 gradients live on
        ({"deepspeed": True, "width": 4}, 4, 4, 8),
        ({"deepspeed": True, "width": 4, "zero_stage": 1}, 4, 4, 12 / 8),
        ({"deepspeed": True, "width": 4, "zero_stage": 3}, 4 + 4 / 8, 4 / 8, 16 / 8),
        ({"zero_stage": 3, "offload": 1}, 2 + 2 / 8, 0.2 / 8, 0),
        ({"zero_stage": 3, "offload": 2}, 2, 0.2 / 8, 0),
    ):
        found = memory.states(columns(**SMALL, dp=8, **given), np.array([1e6]))
        wanted = {"weights": weights, "gradients": gradients, "optimizer": optimizer}
        assert {k: v[0] / 1e6 for k, v in found.items()} == pytest.approx(wanted)


ALL = 8 * LAYER + WORDS


def test_fsdp2_shards_all_but_what_it_gathers_and_adds_up():
    """Eight ranks. In mixed precision the shard of the weights is the master weight."""
    for given, weights, gradients, optimizer in (
        ({"zero_stage": 3}, 4 * ALL / 8 + 4 * (WORDS + 2 * LAYER), 4 * ALL / 8, 8 * ALL / 8),
        ({"zero_stage": 2}, 4 * ALL / 8 + 4 * ALL, 4 * ALL / 8, 8 * ALL / 8),
        ({"zero_stage": 3, "shards": 2}, 2 * ALL + 4 * (WORDS + 2 * LAYER), 2 * ALL, 4 * ALL),
        ({"zero_stage": 3, "n_micro": 2}, 4 * ALL / 8 + 4 * (WORDS + 2 * LAYER), 4 * ALL, ALL),
        (
            {"zero_stage": 2, "n_micro": 2, "reductions": 2},
            4 * ALL / 8 + 4 * ALL,
            4 * ALL / 8,
            ALL,
        ),
        # Of the two tables of words one is gathered.
        ({"zero_stage": 3, "untied": True}, ALL / 2 + 4 * 2 * LAYER, ALL / 2, ALL),
        ({"zero_stage": 3, "offload": 2}, 4 * (WORDS + 2 * LAYER), 0.1 * 4 * ALL / 8, 0),
    ):
        given = {"width": 4, "grad_width": 4} | given
        found = memory.states(columns(**SMALL, dp=8, fsdp2=True, **given), np.array([ALL]))
        found = {part: float(value[0]) for part, value in found.items()}
        assert found == {"weights": weights, "gradients": gradients, "optimizer": optimizer}


def test_zero_3_keeps_no_more_than_a_billion_gathered_weights_live():
    x = columns(**SMALL, dp=1000, zero_stage=3, offload=2)
    assert memory.states(x, np.array([7e9]))["weights"][0] == 2 * 1e9


def test_what_a_layer_keeps_for_backward():
    for given, kept in (
        ({}, PLAIN),
        ({"micro_batch": 3}, 3 * PLAIN),
        ({"width": 4}, 2 * PLAIN),
        ({"tp": 2}, SBH * (10 + 24 / 2) + 5 * 4 * 32 * 32 / 2),  # [K eq. 2]
        ({"tp": 2, "sequence_parallel": True}, PLAIN / 2),  # [K eq. 4]
        ({"flash": True}, 34 * SBH),
        ({"ffn": 128}, PLAIN - 8 * SBH),  # 2 h instead of 4 h: 4 bytes less of each of 2 h
        # Shazeer 2020: 2/3 as wide, a gate beside
        ({"ffn": 256 * 2 / 3, "glu": True, "dropout": True}, PLAIN),
        ({"ffn": 256 * 2 / 3, "glu": True}, PLAIN - 2 * SBH - 3 * 4 * 32 * 32),
        # the gate's output beside its input, 2 bytes of each of 2/3 4 h
        (
            {"ffn": 256 * 2 / 3, "glu": True, "dropout": True, "plain": True},
            PLAIN + (4 + 16 / 3) * SBH,
        ),
        ({"plain": True}, PLAIN + 4 * SBH),  # DistributedDataParallel's norms are in fp32
        ({"plain": True, "recompute": 2}, 4 * SBH),
        ({"plain": True, "fsdp2": True}, PLAIN),
        ({"plain": True, "fsdp2": True, "recompute": 1}, (2 + 2 * (4 + 4 + 2)) * SBH),
        ({"rotary": True, "kv_heads": 2, "tp": 2}, SBH * (10 + (6 * 1.5 + 16) / 2) + 10 * 32 * 32),
        ({"head_dim": 32}, PLAIN + 8 * SBH),  # queries, keys, values and context of 2 h
        ({"qk_norm": True, "kv_heads": 2, "tp": 2}, SBH * (10 + (6 * 1.5 + 16) / 2) + 10 * 32 * 32),
        ({"recompute": 1}, 34 * SBH),
        ({"recompute": 2}, 2 * SBH),
        ({"recompute": 2, "width": 4, "micro_batch": 2, "tp": 4}, 8 * SBH),
        ({"recompute": 2, "host_checkpoints": True}, 0),
    ):
        assert memory.kept_per_layer(columns(**SMALL, **given))[0] == pytest.approx(kept, rel=0.005)


def test_a_recomputed_layer_works_on_what_it_would_have_kept():
    pytorchs = {"plain": True, "fsdp2": True, "recompute": 1}  # keeps products and attention
    for given, working in (
        ({}, 0),
        ({"recompute": 1}, 5 * 4 * 32 * 32),
        ({"recompute": 2}, PLAIN),
        (pytorchs, PLAIN - 2 * (4 + 4 + 2) * SBH),
    ):
        x = columns(**SMALL, **given)
        kept = memory.kept_per_layer(x)
        found = memory.activations(x, np.array([3]), np.array([2]))
        assert found[0] == pytest.approx((6 * kept + working)[0])


@pytest.mark.parametrize(
    ("pp", "vpp", "n_micro"),
    [
        *((4, 1, 16), (4, 1, 2), (1, 1, 4), (2, 1, 8)),
        *((4, 2, 16), (2, 2, 8), (4, 3, 16), (8, 4, 32)),
    ],
)
def test_stages_hold_as_many_chunks_as_the_schedule_lets_fly(pp, vpp, n_micro):
    events = pipeline.simulate("interleaved" if vpp > 1 else "1f1b", pp, n_micro, vpp)
    flying = [pipeline.in_flight(events, stage) / vpp for stage in (0, pp - 1)]
    for n, wanted in ((n_micro, flying), (1, [1, 1])):
        found = memory.in_flight(columns(**SMALL, pp=pp, vpp=vpp, n_micro=n))
        assert [found.first[0], found.last[0]] == pytest.approx(wanted)


@pytest.mark.parametrize(
    ("layers", "pp", "vpp", "n_micro", "ends"),
    [(14, 4, 2, 16, BOTH), (6, 2, 4, 8, BOTH), (34, 4, 3, 12, BOTH), (10, 4, 1, 8, BOTH)]
    + [(11, 4, 3, 16, LOSS)]
    + [(16, 3, 2, 9, {"decoder_first_pipeline_num_layers": 4})]
    + [(7, 3, 1, 9, {"decoder_last_pipeline_num_layers": 1})],
)
def test_uneven_stages_hold_as_many_layers_as_the_schedule_lets_fly(layers, pp, vpp, n_micro, ends):
    layout = Layout(pp=pp, vpp=vpp, n_micro=n_micro, **ends)
    sizes = [len(chunk) for chunk in layout.chunks(layers)]
    first, last = layout.ends(layers)
    split = {"pp": pp, "vpp": vpp, "n_micro": n_micro, "first_layers": first, "last_layers": last}
    x = columns(**SMALL | {"layers": layers}, **split)
    assert x.layout(0).ends(layers) == (first, last)
    stages, flying = memory.stage_layers(x), memory.in_flight(x)
    assert stages.middle[0] == sum(sizes[1::pp])
    events = pipeline.simulate("interleaved" if vpp > 1 else "1f1b", pp, n_micro, vpp)
    sizes[-1] += 5  # the logits, in layers: they come and go with the last chunk
    most = [pipeline.in_flight(events, stage, sizes[stage::pp]) for stage in (0, pp - 1)]
    most[1] -= 5
    found = [(stages.first * flying.first)[0], (stages.last * flying.last)[0]]
    assert found == pytest.approx(most)


def test_deepspeeds_last_stage_has_two_buffers():
    for pp, n_micro, buffers in ((1, 8, 1), (2, 8, 2), (4, 8, 2), (4, 1, 1)):
        x = columns(**SMALL, pp=pp, n_micro=n_micro, deepspeed=True)
        assert memory.in_flight(x).last[0] == buffers


def test_logits_are_kept_in_compute_precision_and_in_fp32_beside_the_last_norm():
    """The last norm and the output layer keep 2 s b h numbers [K 4.3]."""
    for given, alone, numbers, each in (
        ({"micro_batch": 3}, False, 3 * SBH, 2 + 4 + 2),
        ({"width": 4, "tp": 2, "sequence_parallel": True}, False, SBH / 2, 4 + 4 + 4),
        ({"fsdp2": True}, False, SBH, 2 + 4),
        ({"width": 4}, True, SBH, 4 + 4),
        ({"plain": True}, False, SBH, 12),  # log-softmax, its gradient and the loss's, in fp32
    ):
        x = columns(**SMALL, **given)
        found = memory.logits(x, tensors_alone=alone)[0]
        assert found == 2 * numbers * x.width + 32 * 100 * x.micro_batch / x.tp * each


ZERO_1 = {"deepspeed": True, "zero_stage": 1}
ZERO_2 = ZERO_1 | {"zero_stage": 2}


def test_deepspeed_allocates_its_buckets_whole():
    for given, bytes_ in (
        (ZERO_1, 3 * 5e8 * 2),  # of published runs: three of half a billion elements,
        (ZERO_1 | {"pp": 2}, 0),  # none in a pipeline
        (ZERO_1 | {"pp": 2, "bucket": 5e8, "width": 4}, 5e8 * 4),
        ({"zero_stage": 1}, 0),
        ({"deepspeed": True}, 0),
        (ZERO_1 | {"grad_width": 4}, 0),  # bf16 at stage 1 adds up without, in fp32
        (ZERO_2 | {"grad_width": 4, "bucket": 1000}, 2 * 1000),  # and sends fp32 copies
        (ZERO_1 | {"zero_stage": 3, "grad_width": 4, "bucket": 1000}, 4 * 1000),
    ):
        assert memory.buckets(columns(**SMALL, **given))[0] == bytes_


def test_an_update_holds_a_shard_of_the_gradients_in_fp32():
    for given, n, bytes_ in (
        (ZERO_1 | {"grad_width": 4, "bucket": 1000}, 700, 4 * 700),
        (ZERO_1 | {"grad_width": 4, "bucket": 1000}, 7000, 4 * 1000),
        (ZERO_1 | {"dp": 7}, 700, 8 * 100 - 2 * 700),  # a rank's 100: in fp32, and in fp16 twice
        (ZERO_2 | {"dp": 7}, 700, 6 * 100),
    ):
        assert memory.update(columns(**SMALL, **given), np.array([float(n)])) == bytes_


def test_what_is_held_for_a_moment_counts_where_it_exceeds_what_was_freed():
    """The gradient of a word table of 10,000 rows is more than a recomputed layer; buckets are
    beside the layers, not beside the logits."""
    x = columns(**SMALL | {"vocab": 10_000}, pp=2, recompute=2)
    first = memory.parts(x, "first", tensors_alone=True)
    assert first["buckets"][0] == 10_000 * 64 * 2 - PLAIN - 4 * 2 * SBH
    zero = columns(**SMALL, deepspeed=True, zero_stage=2, bucket=20_000, dp=10**6)
    held = memory.parts(zero, "first", tensors_alone=True)
    loss, buckets, table = 32 * 100 * 6 + 4 * SBH, 20_000 * 2, 100 * 64 * 2
    # The gradients of a layer's output, of its second product's input and of that one's matrix.
    layer = 2 * SBH + 2 * 4 * SBH + 2 * 4 * 64 * 64
    assert held["buckets"][0] == buckets + table + layer - loss


def test_transformer_engines_loss_holds_logits_in_compute_precision_alone():
    fp32, low = (memory.logits(columns(**SMALL, te_loss=te), True)[0] for te in (False, True))
    assert fp32 - low == 32 * 100 * (4 - 2)


def test_a_stage_holds_what_it_received_and_sent():
    """Of Megatron's 1F1B and of DeepSpeed's pipeline, in units of a layer's input."""
    middle, first, last = (False, False), (True, False), (False, True)

    def units(flying, ends, **given):
        found = memory.borders(columns(**SMALL, pp=4, **given), flying, ends)
        return [float(size[0]) / (2 * SBH) for size in found]

    # In forward the gradients that came and went last and the input of that which went.
    assert units(3, middle, n_micro=8) == [3, 2]
    assert units(4, first, n_micro=8) == [1, 1]
    assert units(1, last, n_micro=8) == [2, 2]
    assert units(3, middle, n_micro=3) == [0, 1]  # none has gone back before the last comes
    assert units(3, middle, n_micro=8, vpp=2) == [3, 2]
    # Buffers of three inputs and outputs; cut over tp, of the outputs, gathered for backward.
    assert units(3, middle, n_micro=8, deepspeed=True) == [8, 8]
    assert units(3, middle, n_micro=8, deepspeed=True, tp=2) == [2.5, 4.5]
    assert units(1, last, n_micro=8, deepspeed=True) == [4, 4]
    assert memory.borders(columns(**SMALL), 1, (True, True))[0] == 0


def test_learned_positions_are_on_the_first_stage_and_whole_on_every_tp_rank():
    more, less = (columns(**SMALL, pp=2, tp=2, positions=p) for p in (2048, 0))
    for stage, numbers in (("first", 2048 * 64), ("last", 0)):
        both = (sum(memory.parts(x, stage).values())[0] for x in (more, less))
        assert np.subtract(*both) == pytest.approx(numbers * (2 + 2 + 12))


def total(layers, flying, ends, logits, **given):
    """Bytes of a stage in fp16 on one data-parallel rank, as one adds them up."""
    states = (layers * LAYER + ends * WORDS) * 16
    head = 32 * 100 * 8 + 4 * SBH
    return states + (layers * flying * PLAIN + logits * head) * 1.05 + 4.2 * GIB


def test_each_stage_has_its_layers_its_ends_and_its_micro_batches():
    """8 layers on 4 stages: four micro-batches fly on the first, three on the next, one at last."""
    x = columns(**SMALL, pp=4, n_micro=8)
    stages = {"first": (2, 4, 1, 0), "middle": (2, 3, 0, 0), "last": (2, 1, 1, 1)}
    for stage, of in stages.items():
        assert sum(memory.parts(x, stage).values())[0] == pytest.approx(total(*of), rel=1e-12)
    assert memory.peak(x)[0] == pytest.approx(total(2, 4, 1, 0), rel=1e-12)
    for stage in stages:
        alone = sum(memory.parts(columns(**SMALL), stage).values())[0]
        assert alone == pytest.approx(total(8, 1, 1, 1), rel=1e-12)
    two = columns(**SMALL | {"vocab": 10_000}, pp=2, n_micro=1)  # the last has the logits
    assert memory.peak(two)[0] == sum(memory.parts(two, "last").values())[0]
    bloom = columns(layers=70, hidden=14336, heads=112, vocab=1000, seq=2048, pp=12, n_micro=64)
    assert memory.peak(bloom)[0] == sum(memory.parts(bloom, "middle").values())[0]


def test_constants_of_a_cluster_replace_the_usual_ones():
    x = columns(**SMALL)
    own = memory.parts(x, constants={"library_gb": 1.0, "fragments": 2.0})
    assert own["library"][0] == GIB and own["activations"][0] == 2 * 8 * PLAIN
    assert own["logits"][0] == 2 * (32 * 100 * 8 + 4 * SBH)
    assert memory.peak(x)[0] - memory.peak(x, {"library_gb": 0})[0] == pytest.approx(4.2 * GIB)


def test_where_checkpoints_leave_a_layer_and_the_logits_take_turns():
    for vocab, logits in ((100, 0), (1000, 32 * 1000 * 8 + 4 * SBH - PLAIN)):
        host = SMALL | {"vocab": vocab, "host_checkpoints": True, "recompute": 2}
        parts = memory.parts(columns(**host), "last", {"fragments": 1.0})
        assert (parts["activations"][0], parts["logits"][0]) == (PLAIN, logits)


def test_zero_shards_what_rajbhandari_says():
    """ZeRO (arXiv 1910.02054), figure 1: 7.5B parameters on 64 GPUs, 120, 31.4, 16.6 and 1.9 GB."""
    x = columns(PRESETS["tiny"], dp=64, zero_stage=np.arange(4))
    gigabytes = sum(memory.states(x, 7.5e9 * np.ones(4)).values()) / 1e9
    live = np.array([0, 0, 0, 2.0])  # the layers that are gathered while they run
    assert gigabytes - live == pytest.approx([120, 31.4, 16.6, 1.9], abs=0.06)  # as printed
