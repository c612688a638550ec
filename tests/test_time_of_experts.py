"""Time of models with experts and latent attention: terms by hand, and published runs."""

import numpy as np
import pytest

from analysis.planner import fitting
from analysis.planner.columns import FAMILIES, Columns, columns
from analysis.planner.timemodel import compute, layer, links, replicas, step
from analysis.planner.timemodel.machine import Machine
from benchmarks.planner import held_out

MACHINE = Machine(peak=1e15, memory_rate=3e12, link=400e9, network=400e9)
# A GEMM takes 2 m n k / peak, and nothing waits.
IDEAL = {name: 1e-30 for name in fitting.NAMES} | {"gemm": 1.0, "attn": 1.0, "mem": 1.0}
IDEAL |= {"link": 1.0, "network": 1.0}
SIZES = {"layers": 4, "hidden": 1024, "heads": 8, "vocab": 32000, "seq": 2048, "glu": True}
ROUTED = {"experts": 16, "topk": 4, "moe_ffn": 512, "ffn": 2048, "etp": 1, "flash": True}


def model(**stated):
    return columns(**SIZES | ROUTED | stated)


def test_products_are_those_of_the_experts_that_a_token_takes():
    """Four of width 512 do as much as a dense layer of width 2048, on one rank and on eight."""
    dense = compute.gemms(model(experts=0, dp=8), MACHINE, IDEAL)
    for ep in (1, 8):
        routed = compute.gemms(model(ep=ep, dp=8), MACHINE, IDEAL)
        assert routed == pytest.approx(dense)
    narrow = fitting.priors_of("H100 SXM")["sat"][0]
    slower = compute.gemms(model(), MACHINE, IDEAL | {"sat": narrow})
    assert slower > compute.gemms(model(experts=0), MACHINE, IDEAL | {"sat": narrow})


def test_products_of_latent_attention_by_hand():
    latent = {"q_lora": 256, "kv_lora": 128, "rope_dim": 32, "value_dim": 64, "head_dim": 64}
    with_it, without = (
        compute.gemms(model(experts=0, **more), MACHINE, IDEAL) for more in (latent, {})
    )
    h, heads = 1024, 8
    numbers = h * 256 + 256 * heads * 96 + h * (128 + 32) + 128 * heads * 128 + heads * 64 * h
    usual = 4 * h * h
    assert (without - with_it)[0] == pytest.approx(2 * 2048 * (usual - numbers) / 1e15)


@pytest.mark.parametrize(
    ("stated", "seconds"),
    [
        ({"ep": 8}, 4 * 7 / 8 / (0.8 * 400e9)),  # all of the node
        ({"ep": 16}, 4 * 8 / 16 / (0.8 * 50e9)),  # half of them in the other node
        ({"ep": 16, "deep_ep": True}, 2 * (1 - 0.5**4) / 2 / (0.8 * 50e9)),  # once to each node
        ({"ep": 16, "imbalance": 1.5}, 1.5 * 4 * 8 / 16 / (0.8 * 50e9)),
        ({"ep": 16, "ep_overlap": True}, 0.4 * 4 * 8 / 16 / (0.8 * 50e9)),
        ({"ep": 16, "recompute": 2}, 1.5 * 4 * 8 / 16 / (0.8 * 50e9)),
    ],
)
def test_tokens_travel_to_their_experts(stated, seconds):
    """Four times a layer: there and back, and so their gradients; 400 GB/s inside and of a node."""
    x = model(dp=16, gpus_per_node=8, **stated)
    token = 2048 * 1024 * 2
    assert links.expert_parallel(x, MACHINE, IDEAL)[0] == pytest.approx(4 * token * seconds)


def test_modules_that_backward_repeats_do_their_products_again():
    """Up-projections of latents, and a feed-forward of three matrices; the host launches both."""
    latent = {"q_lora": 256, "kv_lora": 128, "rope_dim": 32, "value_dim": 64, "head_dim": 64}
    x = model(experts=0, repeated=2, repeats_latent=True, repeats_mlp=True, **latent)
    numbers = 256 * 8 * 96 + 128 * 8 * 128 + 3 * 1024 * 2048
    assert compute.repeated(x, MACHINE, IDEAL)[0] == pytest.approx(2 * 2048 * numbers / 1e15)
    plain = model(experts=0, **latent)
    more = layer.launch(x, IDEAL | {"launch": 1e-3}) - layer.launch(plain, IDEAL | {"launch": 1e-3})
    assert more[0] == pytest.approx(2e-3)
    assert compute.repeated(plain, MACHINE, IDEAL)[0] == 0.0


def test_fp8_casts_what_the_products_of_experts_take():
    """Inputs of width 1024 and 512 and gradients of 1024 and 2 x 512, of four experts a token."""
    moved = [compute.elementwise(model(fp8=fp8), MACHINE, IDEAL) for fp8 in (False, True)]
    cast = 4 * 2048 * 4 * (1024 + 512 + 1024 + 2 * 512)
    assert 3 * (moved[1] - moved[0])[0] == pytest.approx(cast / 3e12)  # of three passes


def test_in_one_graph_no_kernel_waits_for_the_host_or_for_each_expert():
    slow_host = IDEAL | {"launch": 1.0, "gap": 0.1}
    waits, graph = (layer.layer(model(step_graph=on), MACHINE, slow_host) for on in (False, True))
    assert waits > 1.0 and graph[0] == pytest.approx(3 * 0.1, rel=0.01)


@pytest.mark.parametrize(
    ("number", "facts"),
    [
        ("001", {"hybrid_ep", "deep_ep", "fused_sort", "step_graph", "ep_overlap"}),  # MXFP8, 26.08
        ("036", {"hybrid_ep", "deep_ep", "fused_sort"}),  # 26.06, a pipeline without chunks
        ("043", {"hybrid_ep", "deep_ep", "fused_sort"}),  # 26.06, H100
        ("163", {"fused_sort"}),  # 25.11, GB300
        ("178", {"deep_ep", "fused_sort"}),  # 25.11, H100
        ("180", {"padded", "fused_sort"}),  # 25.09, tokens are dropped
    ],
)
def test_a_release_of_megatron_bridge_says_how_experts_run(number, facts):
    rows = held_out.rows_of("Megatron-Bridge, containers 25.09 to 26.08")
    step_of_row = rows.steps.rows[rows.ids.index(f"megatron_bridge_moe-{number}")]
    names = "hybrid_ep deep_ep padded fused_sort step_graph ep_overlap".split()
    assert {name for name in names if getattr(step_of_row, name)} == facts


@pytest.mark.parametrize(
    ("family", "stated", "share"),
    [
        ("megatron_core", {"zero_stage": 1}, 0.41),
        ("megatron_core", {"zero_stage": 1, "gradients_wait": True}, 0.0),
        ("megatron", {"zero_stage": 1}, 0.0),
        ("nanotron", {"zero_stage": 1}, 0.0),
    ],
)
def test_megatron_core_alone_sends_what_zero_1_shares_beside_computation(family, stated, share):
    x = model(dp=8, family=FAMILIES.index(family), **stated)
    short, long = np.array([1.0]), np.array([6.0])  # of backward, two thirds of a micro-batch
    assert replicas.hidden(x, short, long)[0] == pytest.approx(share * 1.0)
    assert replicas.hidden(x, long, short)[0] == pytest.approx(share * 2 / 3)


def test_each_expert_is_reduced_by_the_ranks_that_hold_it():
    x = model(tp=2, dp=16, ep=8, zero_stage=1, untied=True)
    assert x.expert_replicas == 4
    assert replicas.expert_parameters(x) * 8 == 4 * 16 * 3 * 1024 * 512
    assert replicas.parameters(x) == 4 * (4 * 1024**2 / 2 + 1024 * 16) + 2 * 32000 * 1024 / 2


def test_a_dense_row_beside_rows_with_experts_keeps_its_seconds():
    rows = [columns(**SIZES, dp=8), model(dp=8, ep=8), model(dp=8, kv_lora=128, value_dim=64)]
    constants = fitting.prior_fit().constants
    together = step.seconds(Columns.stack(rows), MACHINE, constants)
    assert together.tolist() == [step.seconds(x, MACHINE, constants)[0] for x in rows]


@pytest.mark.parametrize("name", held_out.EXPERTS)
def test_published_runs_with_experts_without_a_run_of_theirs(name):
    rows = held_out.rows_of(name)
    errors = held_out.of_time(rows, 0, "random").errors(rows.measured)
    assert errors["median"] <= (0.10 if "SimuMax" in name else 0.20)


def test_five_layouts_of_qwen3_are_in_their_order():
    rows = held_out.rows_of("Qwen3-235B, Megatron-MoE-ModelZoo")
    x, machine = rows.steps.take(np.arange(5)), rows.machine.take(np.arange(5))
    seconds = fitting.prior_fit(fitting.priors_of("H100 SXM")).seconds(x, machine)
    measured = rows.measured[:5]
    for i in range(5):
        slower = measured[i] > 1.03 * measured
        assert (seconds[i] > seconds[slower]).all()
