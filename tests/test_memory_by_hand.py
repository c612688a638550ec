"""Bytes of a step, part by part, against papers' numbers and sums made by hand."""

import math

import pytest

from analysis.planner.columns import columns
from analysis.planner.memory import buffers, output
from analysis.planner.memory.activations import computed_again, kept, layers_keep
from analysis.planner.memory.model_states import (
    Parameters,
    gradients,
    optimizer,
    parameters,
    weights,
)
from analysis.planner.memory.peak import fullest, parts, peaks
from analysis.planner.memory.pipeline import InFlight, Stage, chunks, stage_layers, stages
from models.config import PRESETS, parameter_shapes
from models.headroom import CONSTANTS
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


LAYERS = Stage(1, 1, (InFlight(1, 1, 1, 1),), False, False)  # in the middle of a pipeline


def step(**given):
    return columns(**SMALL | given).rows[0]


def rank(number=0, constants=CONSTANTS, **given):
    """The parts of a rank of a stage: 0 the first, -1 the last."""
    one = step(**given)
    return parts(one, stages(one)[number], constants)


def states(n, **given):
    """Bytes of weights, gradients and optimizer of n parameters."""
    one, numbers = step(**given), Parameters(n, 0.0)
    first = stages(one)[0]
    return weights(one, numbers), gradients(one, first, numbers), optimizer(one, first, numbers)


def test_in_fp8_weights_are_held_twice_more_and_the_inputs_of_products_in_one_byte():
    """A GPT of h 8, f 32, 2 heads of 4 and 3 layers on 16 tokens: Transformer Engine on Hopper."""
    given = {"layers": 3, "hidden": 8, "heads": 2, "vocab": 64, "seq": 16, "flash": True}
    low, plain = (rank(**given, fp8=fp8, grad_width=4) for fp8 in (True, False))
    assert low["fp8_copies"] == 2 * 3 * 12 * 8**2 and plain["fp8_copies"] == 0
    assert low["weights"] == plain["weights"]
    # Both norms' outputs and the second product's input halve; attention's output is there twice.
    low, plain = (layers_keep(step(**given, fp8=fp8), 1, 1) for fp8 in (True, False))
    assert plain - low == 16 * (2 * 8 + 32 - 8)
    torchao, none = (fullest(step(**given, fp8=fp8, fsdp2=True)) for fp8 in (True, False))
    assert torchao == none  # its fp8 is another


def test_context_parallel_ranks_share_a_sequence_and_the_optimizer():
    """Activations and logits are cut by cp; ZeRO shards over dp x cp."""
    for recompute in range(3):
        given = {"micro_batch": 4, "zero_stage": 3, "recompute": recompute}
        whole, shared = step(**given, dp=8), step(**given, dp=2, cp=4)
        assert layers_keep(shared, 1, 1) == pytest.approx(layers_keep(whole, 1, 1) / 4)
        assert output.logits(shared) == pytest.approx(output.logits(whole) / 4)
        assert kept(shared).scores == pytest.approx(kept(whole).scores / 4)
        assert states(LAYER, **given, dp=8) == states(LAYER, **given, dp=2, cp=4)


def test_a_context_parallel_rank_holds_keys_and_values_of_another():
    own = 2 * 3 * 32 * 64 * 2 // 4  # keys and values of a quarter of three sequences
    ring = {"micro_batch": 3, "cp": 4}  # and their gradients
    assert rank(**ring)["keys_and_values"] == 2 * own
    assert rank(**ring, kv_heads=2, tp=2)["keys_and_values"] == 2 * own / 2 / 2
    assert rank()["keys_and_values"] == 0


def test_a_micro_batch_has_one_mask_of_its_documents_and_repeats_keys_for_all_heads():
    """2 sequences, 3 of 4 micro-batches in flight; 4 heads, whose keys and values are of 2."""
    given = {"kv_heads": 2, "rotary": True, "flash": True, "micro_batch": 2, "n_micro": 4, "pp": 3}
    assert rank(**given, documents=True)["masks"] == 3 * 2 * 32**2 * 2
    assert rank(**given)["masks"] == 0
    # Kept for a token of 16 a head are 2 x 2 heads more, and not the product, of 4 + 2 x 2 heads,
    # of which the values were a view.
    documents, plain = (layers_keep(step(**given, documents=on), 1, 1) for on in (True, False))
    assert documents - plain == 2 * 32 * 16 * 2 * (2 * 2 - (4 + 2 * 2) + 2)


def test_layers_are_dealt_to_stages_as_bloom_and_deepspeed_do():
    for layers, pp, cut in (
        (12, 4, (3, 3, 3)),
        (70, 12, (5, 6, 5)),  # BLOOM: embedding and logits count as a layer each
        (10, 4, (2, 3, 2)),
        (9, 4, (3, 3, 2)),  # DeepSpeed's partition_uniform: the first stages take one more
        (8, 2, (4, 4, 4)),
    ):
        assert stage_layers(step(layers=layers, pp=pp)) == cut


@pytest.mark.parametrize("name", ["llama2-70b", "llama3-405b", "qwen3-0.6b", "qwen3-4b", "175b"])
def test_weights_are_the_models_but_for_norms_biases_and_positions(name):
    config = PRESETS[name]
    whole, staged = columns(config).rows[0], columns(config, pp=2).rows[0]
    matrices = [s for n, s in parameter_shapes(config).items() if len(s) == 2]
    first, middle = (
        LAYERS._replace(layers=config.n_layer, dense=config.n_layer, has_embedding=True),
        LAYERS,
    )
    assert parameters(whole, first._replace(has_output=True)).total == sum(map(math.prod, matrices))
    # The embedding at one end, the output layer at the other.
    last = middle._replace(has_output=True)
    ends = parameters(staged, last).total - parameters(staged, middle).total
    assert ends == config.vocab_size * config.hidden


def test_bytes_of_states_by_engine_precision_and_stage():
    """Per parameter, on 8 data-parallel ranks."""
    for given, *wanted in (
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
        found = [size / 1e6 for size in states(1e6, dp=8, **given)]
        assert found == pytest.approx(wanted)


ALL = 8 * LAYER + WORDS


def test_fsdp2_shards_all_but_what_it_gathers_and_adds_up():
    """Eight ranks. In mixed precision the shard of the weights is the master weight."""
    for given, *wanted in (
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
        assert states(ALL, dp=8, fsdp2=True, **given) == pytest.approx(wanted, rel=1e-15)


def test_zero_3_keeps_no_more_than_a_billion_gathered_weights_live():
    assert states(7e9, dp=1000, zero_stage=3, offload=2)[0] == 2 * 1e9


def test_what_a_layer_keeps_for_backward():
    for given, bytes_ in (
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
        assert layers_keep(step(**given), 1, 1) == pytest.approx(bytes_, rel=0.005)


def test_a_recomputed_layer_works_on_what_it_would_have_kept():
    pytorchs = {"plain": True, "fsdp2": True, "recompute": 1}  # keeps products and attention
    for given, working in (
        ({}, 0),
        ({"recompute": 1}, 5 * 4 * 32 * 32),
        ({"recompute": 2}, PLAIN),
        (pytorchs, PLAIN - 2 * (4 + 4 + 2) * SBH),
    ):
        assert computed_again(step(**given), LAYERS) == pytest.approx(working)
        one = step(**given)
        found = parts(
            one, Stage(3, 3, (InFlight(2, 6, 6, 2),), False, False), CONSTANTS | {"fragments": 1.0}
        )
        assert found["activations"] == pytest.approx(6 * layers_keep(one, 1, 1) + working)


@pytest.mark.parametrize(
    ("pp", "vpp", "n_micro"),
    [
        *((4, 1, 16), (4, 1, 2), (1, 1, 4), (2, 1, 8)),
        *((4, 2, 16), (2, 2, 8), (4, 3, 16), (8, 4, 32)),
    ],
)
def test_stages_hold_as_many_chunks_as_the_schedule_lets_fly(pp, vpp, n_micro):
    events = pipeline.simulate("interleaved" if vpp > 1 else "1f1b", pp, n_micro, vpp)
    flying = [pipeline.in_flight(events, stage) / vpp for stage in range(pp)]
    for n, wanted in ((n_micro, flying), (1, [1] * pp)):
        found = stages(step(pp=pp, vpp=vpp, n_micro=n))
        numbers = [*range(pp)][:2] + [*range(2, pp)][-1:]
        assert [stage.moments[0].micro_batches for stage in found] == pytest.approx(
            [wanted[i] for i in numbers]
        )


@pytest.mark.parametrize(
    ("layers", "pp", "vpp", "n_micro", "ends"),
    [(14, 4, 2, 16, BOTH), (6, 2, 4, 8, BOTH), (34, 4, 3, 12, BOTH), (10, 4, 1, 8, BOTH)]
    + [(11, 4, 3, 16, LOSS), (40, 4, 5, 4, {})]
    + [(16, 3, 2, 9, {"decoder_first_pipeline_num_layers": 4})]
    + [(7, 3, 1, 9, {"decoder_last_pipeline_num_layers": 1})],
)
def test_stages_have_the_layouts_chunks_and_hold_the_layers_that_the_schedule_lets_fly(
    layers, pp, vpp, n_micro, ends
):
    """Of both kinds (three layers have no experts), on each stage, and beside the logits."""
    layout = Layout(pp=pp, vpp=vpp, n_micro=n_micro, **ends)
    first, last = layout.ends(layers)
    split = {"pp": pp, "vpp": vpp, "n_micro": n_micro, "experts": 8, "dense_layers": 3}
    split |= {"first_layers": first, "last_layers": last} if ends else {}
    x = columns(**SMALL | {"layers": layers}, **split)
    assert not ends or x.layout(0).ends(layers) == (first, last)
    (one,) = x.rows
    cut = [(len(chunk), sum(layer < 3 for layer in chunk)) for chunk in layout.chunks(layers)]
    assert [list(chunks(one, number)) for number in range(pp)] == [cut[n::pp] for n in range(pp)]

    events = pipeline.simulate("interleaved" if vpp > 1 else "1f1b", pp, n_micro, vpp)
    found = stages(one)
    for number, stage in enumerate(found):
        number = number if number < len(found) - 1 else pp - 1
        sizes, dense = zip(*cut[number::pp], strict=True)
        assert (stage.layers, stage.dense) == (sum(sizes), sum(dense))
        for name, each in (("layers", sizes), ("dense", dense)):
            most = max(getattr(moment, name) for moment in stage.moments)
            assert most == pipeline.in_flight(events, number, each)
    logits = 1000  # in layers; they come and go with the last chunk
    beside = pipeline.in_flight(events, pp - 1, [*sizes[:-1], sizes[-1] + logits]) - logits
    assert found[-1].moments[0].layers == beside


def test_only_middle_stages_that_may_be_the_fullest_are_looked_at():
    """The first of them; with experts all until one has no other layers."""
    given = {"layers": 16, "pp": 8, "n_micro": 8}
    for more, most in ({}, 3), ({"experts": 4}, 3), ({"experts": 4, "dense_layers": 5}, 5):
        assert len(stages(step(**given, **more))) == most


def test_deepspeeds_last_stage_has_two_buffers():
    for pp, n_micro, held in ((1, 8, 1), (2, 8, 2), (4, 8, 2), (4, 1, 1)):
        assert (
            stages(step(pp=pp, n_micro=n_micro, deepspeed=True))[-1].moments[0].layers
            == held * 8 / pp
        )


def test_logits_are_kept_in_compute_precision_and_in_fp32_beside_the_last_norm():
    """The last norm and the output layer keep 2 s b h numbers [K 4.3]."""
    for given, numbers, each in (
        ({"micro_batch": 3}, 3 * SBH, 2 + 4 + 2),
        ({"width": 4, "tp": 2, "sequence_parallel": True}, SBH / 2, 4 + 4 + 4),
        ({"fsdp2": True}, SBH, 2 + 4),
        ({"te_loss": True}, SBH, 2 + 2),  # Transformer Engine's, in compute precision alone
        ({"plain": True}, SBH, 12),  # log-softmax, its gradient and the loss's, in fp32
    ):
        one = step(**given)
        values = 32 * 100 * one.micro_batch / one.tp
        assert output.logits(one) == 2 * numbers * one.width + values * each


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
        assert buffers.buckets(step(**given)) == bytes_


def test_learned_positions_are_on_the_first_stage_and_whole_on_every_tp_rank():
    for number, numbers in ((0, 2048 * 64), (-1, 0)):
        more, less = (sum(rank(number, pp=2, tp=2, positions=rows).values()) for rows in (2048, 0))
        assert more - less == pytest.approx(numbers * (2 + 2 + 12))


def total(layers, flying, ends, logits):
    """Bytes of a stage in fp16 on one data-parallel rank, as one adds them up."""
    states = (layers * LAYER + ends * WORDS) * 16
    head = 32 * 100 * 8 + 4 * SBH
    return states + (layers * flying * PLAIN + logits * head) * 1.05 + 4.2 * GIB


def test_each_stage_has_its_layers_its_ends_and_its_micro_batches():
    """8 layers on 4 stages: four micro-batches fly on the first, three on the next, one at last."""
    x = columns(**SMALL, pp=4, n_micro=8)
    by_hand = [(2, 4, 1, 0), (2, 3, 0, 0), (2, 1, 1, 1)]
    for number, numbers in enumerate(by_hand):
        found = sum(rank(number, pp=4, n_micro=8).values())
        assert found == pytest.approx(total(*numbers), rel=1e-12)
    assert peaks(x)[0] == pytest.approx(total(2, 4, 1, 0), rel=1e-12)
    assert sum(rank().values()) == pytest.approx(total(8, 1, 1, 1), rel=1e-12)
    two = {"vocab": 10_000, "pp": 2, "n_micro": 1}  # the last has the logits
    assert fullest(step(**two)) == rank(-1, **two)
    bloom = {"layers": 70, "hidden": 14336, "heads": 112, "vocab": 1000, "seq": 2048, "pp": 12}
    assert fullest(step(**bloom, n_micro=64)) == rank(1, **bloom, n_micro=64)


def test_a_pipeline_of_two_has_no_middle_stage():
    """DeepSeek-V2 Lite: 14 layers of which one has no experts, and 13."""
    given = {"layers": 27, "experts": 4, "topk": 1, "moe_ffn": 512, "dense_layers": 1}
    one = step(**given, pp=2, megatron=True)
    assert [(stage.layers, stage.dense) for stage in stages(one)] == [(14, 1), (13, 0)]
    ranks = [sum(parts(one, stage).values()) for stage in stages(one)]
    assert sum(fullest(one).values()) == max(ranks)


def test_constants_of_a_cluster_replace_the_usual_ones():
    own = rank(constants={"library_gb": 1.0, "fragments": 2.0})
    assert own["library"] == GIB and own["activations"] == 2 * 8 * PLAIN
    assert own["logits"] == 2 * (32 * 100 * 8 + 4 * SBH)
    x = columns(**SMALL)
    alone = peaks(x, CONSTANTS | {"library_gb": 0.0})
    assert (peaks(x) - alone)[0] == pytest.approx(4.2 * GIB)


def test_where_checkpoints_leave_a_layer_and_the_logits_take_turns():
    for vocab, logits in ((100, 0), (1000, 32 * 1000 * 8 + 4 * SBH - PLAIN)):
        given = {"vocab": vocab, "host_checkpoints": True, "recompute": 2}
        found = rank(-1, CONSTANTS | {"fragments": 1.0}, **given)
        assert (found["activations"], found["logits"]) == (PLAIN, logits)


def test_zero_shards_what_rajbhandari_says():
    """ZeRO (arXiv 1910.02054), figure 1: 7.5B parameters on 64 GPUs, 120, 31.4, 16.6 and 1.9 GB."""
    gigabytes = [sum(states(7.5e9, dp=64, zero_stage=stage)) / 1e9 for stage in range(4)]
    gigabytes[3] -= 2.0  # the layers that are gathered while they run
    assert gigabytes == pytest.approx([120, 31.4, 16.6, 1.9], abs=0.06)  # as printed
