"""What a step sends, against numbers added up by hand: precisions, sizes and middle stages beyond
the splits whose messages test_parity.py measures."""

from dataclasses import replace

import pytest

from analysis.planner.messages import parameter_sizes, sent_bytes
from parallel.config.resolve import resolve
from parallel.measure.wire import wire_bytes

# b 2, s 16, h 8 in fp32: 1,024 bytes of hidden states, 128 of one number a token. 3 micro-batches.
SMALL = {"n_layer": 4, "hidden": 8, "n_head": 2, "vocab_size": 14, "max_seq_len": 16}
SMALL |= {"micro_batch": 2, "grad_accum": 3, "engine": "megatron", "vocab_multiple": 1}
H, TOKEN, M = 1024, 128, 3


def settings(**given):
    return resolve(("test", {"preset": "tiny", "device": "cpu"} | given))


def small(gpus, **given):
    return settings(**(SMALL | {"gpus": gpus} | given))


def test_ring_volumes():
    assert wire_bytes("all_reduce", 4, 1000) == 2 * wire_bytes("all_gather", 4, 1000) == 1500
    assert wire_bytes("reduce_scatter", 4, 1000) == wire_bytes("broadcast", 4, 1000) == 750
    assert wire_bytes("send", 2, 1000) == 1000


@pytest.mark.parametrize(("recompute", "again"), [("none", 0), ("full", 2)])
def test_sequence_parallelism_gathers_six_times_a_layer_and_scatters_four(recompute, again):
    """Stages of one layer: the first embeds, the last has the logits, the middle ones neither."""
    spec = small(8, tp=2, pp=4, sequence_parallel=True, recompute=recompute)
    norms = 4 * 6 * 8
    first, middle, last = (sent_bytes(spec, rank)["tp"] for rank in (0, 2, 7))
    layer = M * (6 + again + 4 + again)  # gathers and scatters, of which half is sent
    assert first == M * H + (layer + M) * H / 2 + norms
    assert middle == layer * H / 2 + norms
    ends = M * (2 + 1)  # the logits' input is gathered for forward and backward, and scattered
    assert last == (layer + ends) * H / 2 + norms + 4 * 2 * 8 + 3 * M * TOKEN


def test_a_stage_sends_forward_and_backward_but_not_beyond_the_ends():
    for rank, sends in {0: 1, 1: 2, 2: 2, 3: 1}.items():
        found = sent_bytes(small(4, pp=4), rank)
        assert found["pp"] == M * sends * H
        assert ("embedding" in found) == (rank in (0, 3))
    interleaved = small(2, pp=2, vpp=2, grad_accum=4)  # 3 boundaries, each crossed both ways
    for rank in (0, 1):
        assert sent_bytes(interleaved, rank)["pp"] == 4 * 3 * H
    sharded = small(4, tp=2, pp=2, sequence_parallel=True)
    assert sent_bytes(sharded, 0)["pp"] == M * H / 2
    assert sent_bytes(small(4, tp=2, pp=2), 0)["pp"] == M * H
    assert sent_bytes(small(2, pp=2, precision="bf16"), 1)["pp"] == M * H / 2


def test_deepspeeds_pipeline_sends_a_part_with_its_description_and_gathers_it():
    """tp 2: half a tensor, and 9 numbers of 8 bytes; three gathers at a middle stage."""
    spec = small(8, tp=2, pp=4, engine="deepspeed_pipe")
    plain = small(8, tp=2, pp=4)
    for rank, sends, gathers in ((0, 1, 2), (2, 2, 3), (6, 1, 1)):
        found = sent_bytes(spec, rank)
        assert found["pp"] == M * sends * (H / 2 + 9 * 8)
        assert found["tp"] - sent_bytes(plain, rank)["tp"] == M * gathers * H / 2
    flat = {"tp": 2, "engine": "deepspeed_pipe"}
    assert sent_bytes(small(2, **flat), 0) == sent_bytes(small(2, tp=2), 0)
    pipe = small(4, pp=4, engine="deepspeed_pipe")
    assert sent_bytes(pipe, 0)["pp"] == M * H


def test_the_tied_embedding_is_reduced_as_wide_as_gradients_are_kept():
    for engine, precision, zero_stage, width in (
        ("megatron", "bf16", 1, 4),
        ("deepspeed_pipe", "fp16", 0, 2),
        ("deepspeed_pipe", "bf16", 1, 4),
    ):
        given = {"precision": precision, "zero_stage": zero_stage, "device": "cuda"}
        spec = small(8, tp=4, pp=2, engine=engine, n_head=4, **given)
        for multiple, rows in ((1, 4), (128, 128)):  # 14 words in four parts, padded to 16 or 512
            sent = sent_bytes(replace(spec, vocab_multiple=multiple), 0)["embedding"]
            assert sent == width * rows * 8


def parameters(spec, rank):
    return sum(size for size, _ in parameter_sizes(spec, rank))


def test_parameters_of_all_ranks_are_the_models():
    """Split by tp and pp: what is cut is there once, what is not once a tp rank, the word embedding
    on both ends of a pipeline."""
    whole, layer = small(1), 12 * 64 + 13 * 8
    assert parameters(whole, 0) == whole.model.n_params == 4 * layer + (14 + 16 + 2) * 8
    matrices = sum(size for size, matrix in parameter_sizes(whole, 0) if matrix)
    assert matrices == 4 * 12 * 64 + (14 + 16) * 8
    staged = [parameters(small(4, pp=4), rank) for rank in range(4)]
    assert staged == [layer + 30 * 8, layer, layer, layer + 2 * 8 + 14 * 8]
    cut = sorted(parameter_sizes(small(2, tp=2), 1))
    layer = [(8, False)] * 6 + [(96, True), (12, False), (32, True)]
    layer += [(128, True), (16, False), (128, True)]
    assert cut == sorted([*layer * 4, (56, True), (128, True), (8, False), (8, False)])


def dp_bytes(gpus=4, **given):
    found = sent_bytes(small(gpus, **given), 0)
    assert set(found) == {"dp"}
    return found["dp"]


N_PARAMS = 3744  # 4 x 872 + 256; of them 3,312 in matrices and 432 not


@pytest.mark.parametrize("engine", ["ddp", "megatron", "deepspeed_zero"])
def test_gradients_are_reduced_in_fp32_once(engine):
    assert dp_bytes(engine=engine) == 2 * 3 / 4 * 4 * N_PARAMS
    if engine != "deepspeed_zero":
        assert dp_bytes(engine=engine, precision="bf16") == 2 * 3 / 4 * 4 * N_PARAMS


def test_megatrons_distributed_optimizer_scatters_and_gathers_padded_parameters():
    """Each to 64: 24 + 2 vectors of 8, 4 of 24 and 4 of 32 to 64; matrices of 192, 64, 256, 256
    as they are; words 112 to 128, positions 128. In all 5,504, which lcm(4, 128) divides; three
    ranks pad to a multiple of 384."""
    padded = (26 + 4 + 4) * 64 + 4 * 768 + 128 + 128
    assert padded == 5504 == 43 * 128
    assert dp_bytes(zero_stage=1) == 3 / 4 * 8 * padded
    assert dp_bytes(zero_stage=1, precision="bf16") == 3 / 4 * (4 + 2) * padded
    assert dp_bytes(3, zero_stage=1) == pytest.approx(2 / 3 * 8 * 15 * 384)


def test_zero_1_and_2_reduce_and_then_gather_the_groups_of_the_optimizer():
    """Matrices 3,312 and the rest 432: multiples of 2 x 4; of 2 x 5 the next are 3,320 and 440."""
    four = 4 * N_PARAMS
    for stage, times in ((1, 1), (2, M)):
        zero = {"engine": "deepspeed_zero", "zero_stage": stage}
        for n, gathered in ((4, four), (5, 4 * (3320 + 440)), (7, 4 * (3318 + 434))):
            sent = (n - 1) / n * (2 * four * times + gathered)
            assert dp_bytes(n, **zero) == pytest.approx(sent, rel=1e-12)
        assert dp_bytes(**zero, precision="bf16") == 3 / 4 * (2 * four * times + four / 2)


def test_zero_3_scatters_with_every_micro_batch_and_gathers_small_parameters_once():
    zero = {"engine": "deepspeed_zero", "zero_stage": 3}
    four = 4 * N_PARAMS
    assert dp_bytes(**zero) == 3 / 4 * four * (M + 1)
    assert dp_bytes(**zero, precision="bf16") == 3 / 4 * (four * M + four / 2)
    each = 26 * 10 + 4 * (25 + 35) + 4 * (195 + 65 + 260 + 260) + 115 + 130  # multiples of 5
    assert dp_bytes(5, **zero) == pytest.approx(4 / 5 * 4 * each * (M + 1))


def test_fsdp2_sends_blocks_twice_with_their_rows_padded():
    """872 numbers in a block; outside 16 + 2 rows of 8, and 14 words that four ranks pad to 16."""
    blocks, root = 4 * 4 * 872, 4 * (16 + 16 + 2) * 8
    gathered, scattered = M * (2 * blocks + root), blocks + root
    each = {"engine": "fsdp2", "zero_stage": 3}
    fsdp = each | {"reduce_each_micro_batch": False}
    assert dp_bytes(**fsdp) == 3 / 4 * (gathered + scattered)
    assert dp_bytes(**fsdp, precision="bf16") == 3 / 4 * (gathered / 2 + scattered)
    assert dp_bytes(engine="fsdp2", zero_stage=2) == 3 / 4 * 2 * scattered
    reduced = gathered + M * scattered
    assert dp_bytes(**each) == 3 / 4 * reduced
    more = 4 * 16 * 8 * 2 * M  # words of its own for the output layer
    assert dp_bytes(**each, tied=False) == 3 / 4 * (reduced + more)
    root -= 4 * 2 * 8  # two ranks share a copy
    gathered, scattered = M * (2 * blocks + root), blocks + root
    assert dp_bytes(**fsdp, fsdp_shard=2) == (gathered + scattered) / 2 + scattered / 2
    # Copies are added up once a step.
    assert dp_bytes(**each, fsdp_shard=2) == (gathered + M * scattered) / 2 + scattered / 2
    assert dp_bytes(**fsdp, fsdp_shard=1) == 3 / 4 * 2 * scattered


def test_no_formula_is_better_than_a_guessed_one():
    spec = settings(engine="deepspeed_zero", gpus=2, zero_stage=3, preset="gpt2-124m")
    assert sent_bytes(spec, 0) == {"dp": None}
    zero = {"engine": "deepspeed_zero", "zero_stage": 3}
    for words, known in ((12_499, True), (12_500, False)):  # of 8 numbers: 100,000 are gathered
        found = sent_bytes(small(4, vocab_size=words, **zero), 0)
        assert (found["dp"] is not None) == known
    half = small(4, engine="deepspeed_zero", zero_stage=1, precision="fp16", device="cuda")
    assert sent_bytes(half, 0) == {"dp": None}


# A Llama: 4 heads of 4 numbers in 8, two of keys and values, feed-forward 12 with a gate.
LLAMA = {"n_head": 4, "n_kv_head": 2, "kv_channels": 4, "ffn_hidden": 12, "position": "rope"}
LLAMA |= {"norm": "rmsnorm", "activation": "swiglu", "tied": False, "bias": False}
LLAMA_LAYER = 8 * (16 + 2 * 8) + 16 * 8 + 3 * 8 * 12


def llama(gpus, **given):
    return small(gpus, **LLAMA | given)


def test_parameters_of_a_llama_are_the_models():
    whole, normed = llama(1), llama(1, qk_norm=True, tied=True)
    layers = 4 * (LLAMA_LAYER + 2 * 8)
    assert parameters(whole, 0) == whole.model.n_params == layers + 2 * 14 * 8 + 8
    assert parameters(normed, 0) == normed.model.n_params == layers + 4 * 2 * 4 + 14 * 8 + 8
    apart = llama(1, engine="deepspeed_zero")  # whose gate is a matrix beside up
    assert parameters(apart, 0) == parameters(whole, 0)
    assert len(parameter_sizes(apart, 0)) == len(parameter_sizes(whole, 0)) + 4
    ends = [parameters(llama(2, pp=2), rank) for rank in (0, 1)]
    assert ends == [layers / 2 + 112, layers / 2 + 112 + 8]


def test_rotary_positions_let_the_embedding_scatter_the_sequence():
    """Where learned positions are added first, it is an all-reduce: the wire sends twice as much.
    A layer has two norms' weights that each rank sees with a part of the sequence."""
    spec = llama(8, tp=2, pp=4, sequence_parallel=True)
    norms = 4 * 2 * 8
    assert sent_bytes(spec, 0)["tp"] == M * 12 * H / 2 + norms
    logits = 3 * M * TOKEN + 4 * 8
    assert sent_bytes(spec, 7)["tp"] == M * (6 + 4 + 2 + 1) * H / 2 + logits + norms


def test_norms_of_queries_and_keys_are_summed_over_tp():
    """Two of 4 numbers in each layer, of LayerNorm their biases, too: once a step, or by DeepSpeed
    in every backward pass."""
    for engine, norm, bytes_ in (
        ("megatron", "rmsnorm", 4 * 4 * 2 * 4),
        ("megatron", "layernorm", 4 * 4 * 4 * 4),
        ("deepspeed_zero", "rmsnorm", M * 4 * 2 * 4 * 4),
        ("deepspeed_zero", "layernorm", M * 4 * 4 * 4 * 4),
    ):
        normed, plain = (
            sent_bytes(llama(2, tp=2, engine=engine, norm=norm, qk_norm=qk_norm), 0)["tp"]
            for qk_norm in (True, False)
        )
        assert normed - plain == bytes_


# 4 experts of 16 with a gate, of which a token chooses 2: 16 tokens of 8 numbers a micro-batch.
def routed(gpus, **given):
    of = {"preset": "tiny-moe", "n_layer": 4, "hidden": 8, "n_head": 2, "vocab_size": 14}
    of |= {"max_seq_len": 16, "micro_batch": 1, "grad_accum": 3, "engine": "megatron"}
    return settings(**(of | {"gpus": gpus, "vocab_multiple": 1, "n_kv_head": 2} | given))


@pytest.mark.parametrize(("recompute", "forward"), [("none", 1), ("full", 2)])
def test_tokens_travel_to_their_experts_and_back(recompute, forward):
    """16 tokens choose 2 experts: 32 hidden states of 8 numbers there and back and their weights
    there, each once more in backward. 8 experts' numbers of tokens have 8 bytes."""
    times, hidden, weights = M * 4, 32 * 8 * 4, 32 * 4
    passes, counts = forward + 1, 2 * 8 * 8
    ep = sent_bytes(routed(2, ep=2, recompute=recompute), 0)["ep"]
    assert ep == times * (passes * (2 * hidden + weights) + forward * counts) / 2
    etp = sent_bytes(routed(2, etp=2, recompute=recompute), 0)["etp"]
    assert etp == times * (passes * 2 * (2 * hidden + weights) + forward * counts) / 2
    half = {"precision": "bf16", "device": "cuda"}
    less = sent_bytes(routed(2, ep=2, recompute=recompute, **half), 0)["ep"]
    assert ep - less == times * passes * hidden / 2


def test_all_tokens_are_gathered_for_their_experts():
    """Of 2 x 16 tokens the 8 weights in fp32, the 8 truth values and the hidden states."""
    spec = routed(2, ep=2, moe_token_dispatcher_type="allgather")
    each = 2 * 16 * (8 + 2 * (8 * 4 + 2 * 8 * 4))
    assert sent_bytes(spec, 0)["ep"] == M * 4 * each / 2


def test_experts_have_ranks_of_their_own_for_their_gradients():
    spec = routed(8, ep=2, etp=2, pp=2)
    own = sum(size for size, _ in parameter_sizes(spec, 0, experts=True))
    width = spec.model.experts.moe_ffn_hidden_size
    assert own == 2 * 8 // 2 * 3 * 8 * width // 2  # 2 layers, half of 8 experts, half of each
    assert "expert_dp" not in sent_bytes(spec, 0)
    sent = sent_bytes(routed(8, ep=2, pp=2), 0)
    assert sent["expert_dp"] == 2 * (2 - 1) / 2 * 4 * 2 * own
    others = sum(size for size, _ in parameter_sizes(spec, 0, experts=False))
    assert sent["dp"] == 2 * (4 - 1) / 4 * 4 * others
    assert others + own == sum(size for size, _ in parameter_sizes(spec, 0))


def test_keys_and_values_go_around_a_ring_and_their_gradients_one_step_behind():
    """4 of 16 tokens of two sequences on a rank: 2 x 8 keys and values of 8 numbers in bf16. Each
    goes on three times in forward; in backward once, three times beside its gradients."""
    part = 2 * 8 * 8 * 2
    for recompute, forward in (("none", 3), ("full", 6)):
        given = {"cp": 4, "precision": "bf16", "device": "cuda", "recompute": recompute}
        sent = sent_bytes(small(4, **given), 0)
        assert sent["cp"] == M * 4 * (forward + 2 + 2 * 2) * part
    assert sent["dp"] == 2 * 3 / 4 * 4 * N_PARAMS  # cp ranks add up the gradients


def test_of_latent_attention_no_formula_knows_what_tp_ranks_hold_whole():
    spec = settings(preset="tiny-mla-moe", engine="megatron", gpus=4, tp=2, sequence_parallel=True)
    sent = sent_bytes(spec, 0)
    assert sent["tp"] is None and sent["dp"] is None
    assert sent_bytes(settings(preset="tiny-mla-moe", engine="megatron", gpus=2), 0)["dp"] > 0


def test_the_loss_that_balances_experts_sums_their_tokens_over_tp():
    """Of 8 experts the 64 bytes count as none, of 16 the 128; forward alone, in each layer."""
    for number, bytes_ in ((8, 0), (16, 16 * 8)):
        sizes = {"num_experts": number, "moe_router_topk": 2, "moe_ffn_hidden_size": 16}
        sums = [
            sent_bytes(routed(2, tp=2, sequence_parallel=True, experts=sizes | loss), 0)["tp"]
            for loss in ({"moe_aux_loss_coeff": 0.01}, {"moe_aux_loss_coeff": 0.0})
        ]
        assert sums[0] - sums[1] == M * 4 * bytes_


def test_a_rank_alone_sends_nothing():
    assert sent_bytes(small(1), 0) == {}


def test_tp_splits_the_experts_of_all_tokens_as_it_does_a_feed_forward():
    """16 tokens of 8 numbers in fp32: three gathers and two scatters of each layer more."""
    sizes = {"num_experts": 8, "moe_router_topk": 2, "moe_ffn_hidden_size": 16}
    shared, alone = (
        sent_bytes(routed(2, tp=2, sequence_parallel=True, experts=sizes | more), 0)["tp"]
        for more in ({"moe_shared_expert_intermediate_size": 16}, {})
    )
    assert shared - alone == M * 4 * 5 * (16 * 8 * 4) / 2
