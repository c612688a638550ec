"""Experts of the reference GPT: megatron-core's choice and balance, readable and dropless."""

import json
import math
from dataclasses import asdict, replace

import pytest
import torch
from torch import nn

from analysis import prune
from analysis.planner.calibration import load_calibration
from base.errors import UsageError
from models import gpt
from models.config import PRESETS, Experts, LatentAttention, parameter_shapes
from parallel import train
from parallel.config.resolve import resolve
from parallel.engines import optim

TINY = PRESETS["tiny-moe"]
AUTO_EP = {"engine": "deepspeed_zero", "ep": 2, "zero_stage": 1}
# Each router that a model family has: Mixtral's and Qwen3's, OLMoE's, DeepSeek-V3's without its
# bias, Llama 4's.
ROUTERS = {
    "softmax, divided by the sum": Experts(8, 2, 64, moe_aux_loss_coeff=1e-2),
    "softmax": Experts(8, 3, 64, moe_aux_loss_coeff=1e-2, norm_topk_prob=False),
    "sigmoid, scaled": Experts(
        8,
        2,
        64,
        moe_aux_loss_coeff=1e-2,
        moe_router_score_function="sigmoid",
        moe_router_topk_scaling_factor=2.5,
    ),
    "softmax of the best groups": Experts(
        8, 4, 64, norm_topk_prob=False, moe_router_num_groups=4, moe_router_group_topk=2
    ),
    "divided softmax of the best groups": Experts(
        8, 4, 64, moe_router_num_groups=4, moe_router_group_topk=2
    ),
    "sigmoid, biased, of the best groups": Experts(
        8,
        4,
        64,
        moe_aux_loss_coeff=1e-2,
        moe_router_score_function="sigmoid",
        moe_router_enable_expert_bias=True,
        moe_router_num_groups=4,
        moe_router_group_topk=2,
    ),
    "biased, what is too many dropped": Experts(
        8,
        2,
        64,
        moe_router_score_function="sigmoid",
        moe_router_enable_expert_bias=True,
        moe_expert_capacity_factor=0.7,
    ),
}


def mixture(of: Experts, **sizes) -> gpt.MixtureOfExperts:
    torch.manual_seed(0)
    layer = gpt.MixtureOfExperts(replace(TINY, experts=of, **sizes), of)
    for parameter in layer.parameters():
        nn.init.normal_(parameter, std=0.05)
    for bias in layer.buffers():
        nn.init.normal_(bias)
    return layer


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", ROUTERS)
def test_choice_weights_and_balance_are_megatron_cores(name):
    from megatron.core.transformer.moe import moe_utils

    of, layer = ROUTERS[name], mixture(ROUTERS[name])
    x = torch.randn(2, 24, TINY.hidden)
    with torch.no_grad():
        y, balance = layer(x)
        logits = layer.router(x.flatten(0, 1))
        how = of.moe_router_score_function
        weights, chosen = moe_utils.topk_routing_with_score_function(
            logits,
            of.moe_router_topk,
            use_pre_softmax=not of.norm_topk_prob,
            scaling_factor=of.moe_router_topk_scaling_factor,
            score_function=how,
            num_groups=of.moe_router_num_groups or None,
            group_topk=of.moe_router_group_topk or None,
            expert_bias=layer.router.expert_bias,
        )
        if of.moe_expert_capacity_factor:
            weights, chosen = moe_utils.apply_router_token_dropping(
                weights, chosen, of.moe_router_topk, of.moe_expert_capacity_factor
            )
        assert layer.tokens_E.tolist() == chosen.sum(0).tolist()
        routing, scores = moe_utils.compute_routing_scores_for_aux_loss(
            logits, of.moe_router_topk, how
        )
        if layer.router.expert_bias is None and not of.moe_router_num_groups:
            assert torch.equal(routing, chosen)  # of booleans
        wanted = moe_utils.switch_load_balancing_loss_func(
            scores, routing.sum(0), 48, of.moe_router_topk, of.num_experts, of.moe_aux_loss_coeff
        )
        assert float(balance) == pytest.approx(float(wanted), rel=1e-5)
        of_all = torch.stack([expert(x.flatten(0, 1)) for expert in layer.experts], dim=1)
        assert torch.allclose(y.flatten(0, 1), (weights[..., None] * of_all).sum(1), atol=1e-5)


def test_the_loss_is_the_cross_entropy_and_its_gradient_has_the_balance_too():
    tokens = torch.randint(257, (2, 33))
    gradients, losses = [], []
    for coefficient in (0.0, 1e-2):
        of = replace(TINY.experts, moe_aux_loss_coeff=coefficient)
        model = gpt.GPT(replace(TINY, max_seq_len=32, experts=of))
        gpt.initialise(model, seed=3)
        loss = model(tokens[:, :-1], tokens[:, 1:])
        loss.backward()
        losses.append(float(loss.detach()))
        gradients.append(model.blocks[0].mlp.router.weight.grad)
    assert losses[0] == losses[1]  # exact: one process, the same forward pass
    # Even shares have the smallest balance, the coefficient; its gradient is not small.
    assert float((gradients[1] - gradients[0]).norm()) > 0.01 * float(gradients[0].norm())


def test_a_step_moves_the_biases_of_experts_towards_the_mean_of_their_tokens(monkeypatch):
    monkeypatch.setattr(optim.dist, "get_world_size", lambda _: 1)
    biases = [torch.tensor([0.5, 0.0, 0.0]), torch.zeros(3)]
    optim.balance(biases, [torch.tensor([4, 1, 1]), torch.tensor([2, 3, 1])])
    wanted = torch.tensor([[0.499, 0.001, 0.001], [0.0, -0.001, 0.001]])
    assert torch.allclose(torch.stack(biases), wanted, atol=1e-7)


def test_latent_attention_sees_no_later_token_and_only_differences_of_positions():
    config = replace(PRESETS["tiny-mla-moe"], max_seq_len=16)
    torch.manual_seed(0)
    layer = gpt.LatentAttention(config, config.mla)
    x = torch.randn(1, 8, config.hidden)
    angles = gpt.rope_angles(config, torch.arange(16))
    assert angles.shape == (2, 16, config.mla.qk_pos_emb_head_dim)
    with torch.no_grad():
        y, shifted = layer(x, angles[:, :8], None), layer(x, angles[:, 8:], None)
        early = layer(x[:, :5], angles[:, :5], None)
        unturned = layer(x, None, None)
    assert torch.allclose(y, shifted, atol=1e-5) and torch.allclose(y[:, :5], early, atol=1e-6)
    assert float((y - unturned).abs().max()) > 1e-3


@pytest.mark.parametrize("bias", [False, True])
def test_an_expert_without_tokens_has_gradients_of_zeros(bias):
    layer = mixture(Experts(8, 1, 16, moe_aux_loss_coeff=1e-2), bias=bias)
    layer(torch.randn(1, 3, TINY.hidden))[0].sum().backward()  # 3 tokens, 8 experts
    gradients = [expert.up.weight.grad for expert in layer.experts]
    assert sum(bool(gradient.any()) for gradient in gradients) <= 3
    assert all(p.grad is not None for p in layer.experts.parameters())


def test_the_router_computes_in_fp32_under_autocast():
    layer = mixture(TINY.experts)
    with torch.autocast("cpu", torch.bfloat16):
        assert layer.router(torch.randn(4, TINY.hidden)).dtype == torch.float32
        assert layer.experts[0](torch.randn(4, TINY.hidden)).dtype == torch.bfloat16


@pytest.mark.parametrize("q_lora_rank", [None, 0, 24])
def test_the_models_parameters_are_the_counted_ones(q_lora_rank):
    """With a dense layer first, every second layer, shared experts and biases."""
    of = Experts(4, 2, 64, 96, first_dense=1, moe_layer_freq=2, moe_router_enable_expert_bias=True)
    mla = None if q_lora_rank is None else LatentAttention(16, q_lora_rank, 8, 4, 12)
    config = replace(TINY, n_layer=4, bias=True, experts=of, mla=mla)
    model = gpt.GPT(config)
    gpt.initialise(model, seed=1)
    tensors = dict(model.named_parameters()) | dict(model.named_buffers())
    assert {name: tuple(p.shape) for name, p in tensors.items()} == parameter_shapes(config)
    assert not any(bool(bias.any()) for bias in model.buffers())
    for name in ("experts.3", "shared"):
        up, down = (
            model.get_submodule(f"blocks.1.mlp.{name}.{of}").weight for of in ("up", "down")
        )
        assert float(up.detach().std()) == pytest.approx(0.02, rel=0.05)
        assert float(down.detach().std()) == pytest.approx(0.02 / math.sqrt(8), rel=0.05)


def test_names_and_shapes_are_made_once_for_all_experts():
    assert parameter_shapes(PRESETS["qwen3-30b-a3b"]) is parameter_shapes(PRESETS["qwen3-30b-a3b"])


@pytest.mark.parametrize(
    ("experts", "asked"),
    [
        ({"moe_expert_capacity_factor": 1.0}, {"gpus": 2, "ep": 2}),
        ({"norm_topk_prob": False}, {}),
        ({"moe_router_topk": 1, "norm_topk_prob": False}, {}),
    ],
)
def test_experts_that_megatron_core_computes_as_our_gpt_does_are_taken(experts, asked):
    settings = {"engine": "megatron", "preset": "tiny-moe", "data": "none"} | asked
    assert resolve(("test", settings | {"experts": asdict(TINY.experts) | experts})).model.experts


def test_experts_are_a_setting_beside_a_preset(capsys):
    """As JSON in a flag, as a table in TOML and in run.json."""
    asked = {"num_experts": 6, "moe_router_topk": 2}
    words = ["--preset", "tiny-llama", "--experts", json.dumps(asked), "--data", "none", "--check"]
    assert train.main(words) == 0
    checked = json.loads(capsys.readouterr().out)
    assert checked["experts"] == asdict(Experts(**asked)) == checked["model"]["experts"]
    assert checked["run"].endswith("-expertsnum_experts6_moe_router_topk2-none")
    again = resolve(("test", {"preset": "tiny-llama", "experts": asked, "data": "none"}))
    assert again.model.experts == Experts(**asked)
    for wrong, why in (("[1]", "--experts is no table"), ('{"num_experts": 6}', "missing moe_")):
        assert train.main([*words[:3], wrong, "--check"]) == 2
        assert why in capsys.readouterr().err


def test_the_formula_of_megatron_is_not_applied_to_experts_of_another_engine():
    cluster = load_calibration("dgx-h100")
    for engine, precision in (("ddp", "bf16"), ("megatron", "fp32")):
        given = {"preset": "tiny-moe", "data": "none", "engine": engine, "precision": precision}
        with pytest.raises(
            UsageError, match=f"Megatron-LM alone.* not for run: {engine} in {precision}"
        ):
            prune.row_of("run", resolve(("test", given)), cluster, 0.0, None)
