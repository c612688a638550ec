"""Bytes of Megatron-LM's step against what was published of it, and against sums made by hand."""

import math

import numpy as np
import pytest

from analysis.planner.columns import columns
from analysis.planner.memory import peak
from analysis.planner.memory.activations import kept, layer_goes_back, routed_tokens
from analysis.planner.memory.model_states import attention_numbers, mlp_numbers
from analysis.planner.memory.pipeline import layer_numbers, stages
from base.files import ROOT
from base.units import GIB
from benchmarks.planner.published_rows import read_rows
from models.config import PRESETS

# A GPT of 4 layers with biases and a learned table of positions; 2 sequences of 32 tokens.
SMALL = {"layers": 4, "hidden": 64, "heads": 4, "vocab": 128, "seq": 32, "micro_batch": 2}
SMALL |= {"positions": 32, "biased": True, "flash": True, "grad_width": 4, "megatron": True}
LAYER = 12 * 64**2 + 13 * 64  # parameters, with norms and biases
WORDS, TOKENS = 128 * 64, 64
# DeepSeek-V2 (arXiv 2405.04434), which SimuMax cut to four layers.
DEEPSEEK = {"hidden": 5120, "heads": 128, "head_dim": 128, "q_lora": 1536, "kv_lora": 512}
DEEPSEEK |= {"rope_dim": 64, "value_dim": 128}
MIXTRAL = {"layers": 8, "glu": True, "experts": 8, "topk": 2, "moe_ffn": 96, "biased": False}


def step(**given):
    return columns(**SMALL | given).rows[0]


def parts(number=0, **given):
    """The parts of a rank of a stage, 0 the first and -1 the last, as PyTorch allocates them."""
    one = step(**given)
    return peak.parts(one, stages(one)[number], peak.ALLOCATED)


def simumax():
    return read_rows([ROOT / "logs" / "published" / "simumax_b200.csv"])


def errors(rows):
    errors = rows.allocated / rows.memory_gb - 1
    return np.where(np.isfinite(errors), errors, np.nan)


def test_simumaxs_runs_on_eight_b200s_within_half_a_percent():
    """Llama 3 70B and DeepSeek-V2 of few layers, Transformer Engine 2.11; GiB have two digits."""
    rows = simumax()
    off = np.abs(errors(rows))
    assert len(off) == 22 and off.max() < 0.005 and off.mean() < 0.0015


def test_megatrons_own_tests_above_a_gigabyte(shared):
    """The last rank of its continuous integration. 298 of 407 have what the bytes follow from."""
    rows = read_rows([shared / "published" / "megatron_golden.csv"])
    muon = np.abs(errors(rows))[rows.steps.muon > 0]
    assert len(muon) == 8 and np.median(muon) < 0.045 and muon.max() < 0.06
    rows.memory_gb[rows.steps.muon > 0] = np.nan
    off = np.abs(errors(rows))[rows.memory_gb > 1]
    known = off[np.isfinite(off)]
    assert len(known) == 298
    assert np.median(known) < 0.01 and np.mean(known < 0.05) > 0.9
    uneven = (rows.steps.layers % (rows.steps.pp * rows.steps.vpp) > 0) | (
        rows.steps.first_layers > 0
    )
    uneven = np.abs(errors(rows))[(rows.memory_gb > 1) & uneven]
    assert np.isfinite(uneven).sum() == 13 and np.nanmax(uneven) < 0.01
    routed = np.abs(errors(rows))[(rows.memory_gb > 1) & (rows.steps.experts > 0)]
    assert np.nanmedian(routed) < 0.025 and np.nanmax(routed) < 0.05


def test_each_rank_of_a_pipeline_has_its_own_bytes():
    """The first and the last stage of Llama 3 70B, 66.55 and 62.97 GiB."""
    rows = simumax()
    one = rows.steps.rows[rows.ids.index("simumax_b200-001")]
    for number, gib in ((0, 66.55), (-1, 62.97)):
        allocated = peak.allocated(one, stages(one)[number])
        assert allocated / GIB == pytest.approx(gib, rel=3e-3)


def test_states_of_a_small_gpt():
    """16 bits, fp32 sums, three fp32 numbers; a stand-in of each shape of gradient."""
    found = parts()
    n = 4 * LAYER + WORDS + 32 * 64 + 2 * 64
    shapes = 12 * 64**2
    assert found["weights"] == 2 * n and found["optimizer"] == 12 * n
    assert found["gradients"] == 4 * n + 2 * shapes
    assert parts(fused_gradients=False)["gradients"] == 4 * n
    assert parts(dp=4, zero_stage=1)["optimizer"] == 12 * n / 4
    halves = [parts(number, pp=2, n_micro=4)["weights"] / 2 for number in (0, -1)]
    # A tied word embedding is there at both ends, the last norm at one, the positions at the other.
    assert halves == [2 * LAYER + WORDS + 32 * 64, 2 * LAYER + WORDS + 2 * 64]
    assert parts(untied=True)["weights"] == 2 * (n + WORDS)


def test_muon_has_one_moment_of_a_matrix_and_a_home_for_each_parameter():
    """8 bytes of a matrix's number, 12 of the words' and the norms'; shared by whole parameters."""
    matrices = 4 * 12 * 64**2
    n = 4 * LAYER + WORDS + 32 * 64 + 2 * 64
    assert parts(muon=1)["optimizer"] == 12 * n - 4 * matrices
    shared = parts(muon=1, dp=4, zero_stage=1)["optimizer"]
    assert shared == (12 * n - 4 * matrices) / 4 > 12 * WORDS
    many = parts(muon=1, dp=64, zero_stage=1)["optimizer"]
    assert many == 12 * WORDS  # which one rank has
    assert parts()["weights"] == parts(muon=1)["weights"]


def test_activations_and_logits_of_a_small_gpt():
    """34 bytes a token and number for each layer [K eq. 1], the sums of attention's rows and the
    embedding's mask; logits in 16 bits and in fp32, or the output layer's gradients."""
    found = parts()
    assert found["activations"] == 4 * TOKENS * (34 * 64 + 4 * 4) + TOKENS * 64
    back = 2 * TOKENS * 128 + 2 * WORDS + 2 * TOKENS * 64
    assert found["logits"] == 4 * TOKENS * 64 + max(6 * TOKENS * 128, back)
    fused = parts(te_loss=True)["logits"]
    assert fused == 4 * TOKENS * 64 + back
    unfused = parts(flash=False)["activations"] - found["activations"]
    assert unfused == 4 * (5 * 4 * 2 * 32**2 - TOKENS * 4 * 4)
    twice = parts(output_twice=True)["activations"] - found["activations"]
    assert twice == 4 * TOKENS * 2 * 64


def test_sequence_parallelism_gathers_in_a_buffer_that_stays():
    cut, whole = (parts(tp=2, sequence_parallel=on)["logits"] for on in (True, False))
    norm, back = 4 * TOKENS * 64, 2 * TOKENS * 64
    values = max(6 * TOKENS * 64, 2 * TOKENS * 64 + WORDS + back)
    assert whole == norm + values
    more = max(6 * TOKENS * 64, 2 * TOKENS * 64 + WORDS + back + back / 2)
    assert cut == norm / 2 + more + back
    assert parts(sequence_parallel=True) == parts()  # of a rank alone


def test_full_recomputation_keeps_inputs_and_the_layer_that_goes_back():
    """Where the logits take little, the peak is in the last layer."""
    few = {"vocab": 8, "recompute": 2, "n_micro": 1}
    edge, layer = 2 * TOKENS * 64, TOKENS * (34 * 64 + 4 * 4)
    back = edge + TOKENS * 2 * 256 + layer - edge
    found = parts(**few)
    assert found["activations"] == 4 * edge + TOKENS * 64 + back and found["logits"] == 0
    assert parts(**few, fused_gradients=False)["activations"] - found["activations"] == 2 * 64 * 256


def test_experts_are_cut_by_ep_and_etp_and_their_optimizer_by_their_copies():
    """Two ranks of tp and four of dp; the router and attention are as without experts."""
    given = MIXTRAL | {"tp": 2, "dp": 4, "zero_stage": 1, "kv_heads": 4, "ffn": 96}
    expert = 3 * 64 * 96
    whole = parts(**given, ep=1, etp=1)["weights"] / 2
    for ep, etp in ((1, 1), (2, 1), (4, 1), (2, 2)):
        found = parts(**given, ep=ep, etp=etp)
        held = 8 * 8 * expert / (ep * etp)
        assert found["weights"] / 2 == whole - 8 * 8 * expert + held
        others = found["weights"] / 2 - held
        assert found["optimizer"] == pytest.approx(12 * (others / 4 + held / (8 / (ep * etp))))
    dense = parts(**given | {"experts": 0, "ffn": 96}, ep=1)["weights"] / 2
    assert whole - 8 * 8 * expert == dense - 8 * expert / 2 + 8 * 64 * 8


def test_a_layer_of_experts_keeps_the_tokens_that_came_to_them():
    """Two experts a token: its numbers, and 6 bytes of each of theirs; shared ones take all."""
    one = step(**MIXTRAL, etp=1, shared_ffn=32)
    assert routed_tokens(one) == 2 * TOKENS
    assert kept(one).experts == 2 * TOKENS * (2 * 64 + 6 * 96) + TOKENS * 6 * 32
    assert routed_tokens(step(**MIXTRAL, tp=2, etp=1, sequence_parallel=True)) == TOKENS
    # Without a gate the weighted output is another tensor, and a bias needs the tokens' outputs.
    plain = step(**MIXTRAL | {"glu": False, "biased": True})
    assert kept(plain).experts == 2 * TOKENS * (4 * 64 + 6 * 96)


def test_the_first_layers_may_have_no_experts():
    """Of eight layers three, over four stages of two: both of the first stage, one of the next."""
    given = MIXTRAL | {"ffn": 96, "dense_layers": 3, "pp": 4, "n_micro": 4}
    first, second, third, last = (parts(n, **given)["weights"] / 2 for n in range(4))
    dense, routed = 3 * 64 * 96, 8 * 3 * 64 * 96 + 64 * 8
    layer = 4 * 64**2 + 2 * 64
    assert second == 2 * layer + dense + routed
    assert third == 2 * (layer + routed)
    assert first == 2 * (layer + dense) + WORDS + 32 * 64
    assert last == 2 * (layer + routed) + WORDS + 64


def test_latent_attention_has_deepseeks_parameters():
    """149.2 M a layer; what makes the latents is on every rank of tp."""
    h, heads = 5120, 128
    down = h * (1536 + 512 + 64)
    up = 1536 * heads * 192 + 512 * heads * 256 + heads * 128 * h
    for tp in (1, 8):
        (one,) = columns(**DEEPSEEK, layers=4, vocab=102400, seq=4096, tp=tp).rows
        assert attention_numbers(one) == down + up / tp
    (llama,) = columns(PRESETS["llama3-70b"]).rows
    ours = attention_numbers(llama) + mlp_numbers(llama, llama.ffn, llama.tp)
    assert ours == layer_numbers(llama)


def test_micro_batches_that_pp_does_not_divide_are_one_group():
    """Interleaved on four stages of three chunks: of four 4 x 2 + 1 chunks, of five 5 x 2 + 1."""
    for n_micro, chunks in ((4, 9), (5, 11)):
        last = stages(step(layers=12, pp=4, vpp=3, n_micro=n_micro))[-1]
        assert last.moments[0].micro_batches == pytest.approx(chunks / 3)


def test_the_embeddings_masks_are_those_of_the_first_chunk():
    """Two stages of two chunks: five chunks are in flight on the first, four of them the first."""
    given = {"pp": 2, "vpp": 2, "n_micro": 8, "dropout": True}
    one, first = step(**given), stages(step(**given))[0]
    kept_bytes = 5 * kept(one).layer(routed=False) + 4 * kept(one).edge / 2
    assert parts(**given)["activations"] == kept_bytes + layer_goes_back(one, first)


def test_the_last_chunk_has_the_logits_and_fewer_layers():
    """Six layers and both ends on four stages of two chunks of one layer: the logits are alone in
    the last chunk. Beside them the first one's group is kept, without them one more."""
    for vocab, layers in ((128, 5), (100_000, 4)):
        given = {
            "layers": 6,
            "pp": 4,
            "vpp": 2,
            "n_micro": 8,
            "vocab": vocab,
            "fused_gradients": True,
        }
        one, last = step(**given), stages(step(**given))[-1]
        kept_layers = layers * kept(one).layer(routed=False) + 2 * kept(one).edge
        found = parts(-1, **given)
        goes_back = layer_goes_back(one, last) if layers == 5 else 0
        assert found["activations"] == kept_layers + goes_back
        assert (found["logits"] > 0) == (layers == 4)


def test_only_what_every_tensor_is_counted_of_is_called_allocated():
    assert math.isfinite(peak.allocated(step()))
    for given in ({"fp8": True}, {"width": 4}, {"zero_stage": 2}, {"offload": 1}):
        assert math.isnan(peak.allocated(step(**given)))
    assert math.isnan(peak.allocated(step(megatron=False)))
    # No other formula has experts: their peak is unknown rather than a dense model's.
    unknown = columns(**SMALL | MIXTRAL | {"megatron": False})
    assert math.isnan(peak.peaks(unknown)[0])
    known = columns(**SMALL | MIXTRAL)
    assert peak.peaks(known)[0] > peak.allocated(known.rows[0]) + 4 * GIB
