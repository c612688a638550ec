"""What megatron asks of Transformer Engine, and what is refused without it."""

import argparse
import sys
import types

import pytest
import torch

from analysis.runs.fairness import changes
from base.errors import UsageError
from parallel.config import library_variables
from parallel.config.resolve import add_flags, from_flags, resolve
from parallel.config.study import load_study
from parallel.engines import kernels, megatron_config
from tests.conftest import study_file
from tests.fixture_runs import facts, logged
from tests.gathered_attention import PackedAttention


class Crossing(PackedAttention):
    def forward(self, *qkv: torch.Tensor, **how: object) -> torch.Tensor:
        return super().forward(*qkv, **how | {"cu_seqlens_q": torch.tensor([0, 64]).int()})


class WithoutAKernel(PackedAttention):
    def forward(self, *_: object, **__: object) -> torch.Tensor:
        raise ValueError("no dot product attention support for the inputs")


ATTENTIONS = [(PackedAttention, True), (Crossing, False), (WithoutAKernel, False)]


@pytest.mark.parametrize(("attention", "packs"), ATTENTIONS)
def test_an_attention_that_crosses_documents_or_has_no_kernel_is_not_used(
    attention, packs, monkeypatch
):
    library = types.ModuleType("transformer_engine.pytorch")
    library.DotProductAttention = attention
    monkeypatch.setitem(sys.modules, library.__name__, library)
    on_cpu = torch.randn
    monkeypatch.setattr(torch, "randn", lambda *shape, device, **how: on_cpu(*shape, **how))
    documents = {"reset_at_documents": True, "end_of_text": 3}
    spec = resolve(("test", {"engine": "megatron", "preset": "tiny-llama", **documents}))
    kernels.packs_documents.cache_clear()
    assert kernels.packs_documents(spec, "te") is packs
    assert not kernels.packs_documents(spec, "torch")


# Of a default of megatron-core's own.
pytestmark = pytest.mark.filterwarnings("ignore:full scope")
GPU = {"engine": "megatron", "precision": "bf16", "device": "cuda"}
SPLIT = {"gpus": 2, "tp": 2, "sequence_parallel": True}
OVERLAP = {"megatron": {"tp_comm_overlap": True}}
GRAPHS = {"megatron": {"cuda_graph_impl": "local"}}


@pytest.fixture
def without_groups(monkeypatch) -> list[dict]:
    """megatron-core forms no groups; what its random states are asked for."""
    states: list[dict] = []
    seed = "model_parallel_cuda_manual_seed"
    monkeypatch.setattr(megatron_config.tensor_parallel, seed, lambda _, **how: states.append(how))
    forming = "initialize_model_parallel"
    monkeypatch.setattr(megatron_config.parallel_state, forming, lambda **_: None)
    return states


@pytest.mark.parametrize(("precision", "more"), [("bf16", {}), ("fp8", {"use_fp8": True})])
def test_where_messages_overlap_the_buffers_have_a_ranks_tokens(
    precision, more, monkeypatch, without_groups
):
    library, asked = types.ModuleType("transformer_engine.pytorch.module.base"), []
    library.initialize_ub = lambda **how: asked.append(how)
    monkeypatch.setitem(sys.modules, library.__name__, library)
    given = GPU | OVERLAP | SPLIT | {"gpus": 4, "cp": 2, "micro_batch": 4, "precision": precision}
    spec = resolve(("test", given | {"preset": "tiny-llama", "seq_len": 64}))
    megatron_config.start(spec, cuda=False)
    assert not asked  # a rehearsal has no GPU
    config = megatron_config.start(spec, cuda=True)
    assert config.tp_comm_overlap and megatron_config.options(config)["tp_comm_overlap"]
    shape = {"shape": [4 * 64 // 2, spec.model.hidden], "tp_size": 2, "dtype": torch.bfloat16}
    assert asked == [shape | {"bootstrap_backend": "nccl"} | more]
    assert not megatron_config.transformer_config(resolve(("test", GPU)), True).tp_comm_overlap


@pytest.mark.parametrize("graphs", [True, False])
def test_cuda_graphs_have_random_states_and_variables_for_them(graphs, without_groups):
    spec = resolve(("test", GPU | (GRAPHS if graphs else {})))
    built = [megatron_config.start(spec, cuda).cuda_graph_impl for cuda in (True, False)]
    assert built == ["local" if graphs else "none", "none"]  # a rehearsal has no GPU
    usual = {"use_cudagraphable_rng": False}
    assert without_groups == [{"use_cudagraphable_rng": graphs}, usual]
    register = library_variables.wanted(spec).get("NCCL_GRAPH_REGISTER")
    assert register == ("0" if graphs else None)


def test_an_option_of_megatron_core_reaches_each_configuration_that_has_it():
    options = {"calculate_per_token_loss": True, "bucket_size": 1000, "log_num_zeros_in_grad": True}
    options |= {"overlap_param_gather": True, "attention_softmax_in_fp32": False}
    spec = resolve(("test", GPU | {"megatron": options, "zero_stage": 1}))
    config = megatron_config.transformer_config(spec, cuda=True)
    assert config.calculate_per_token_loss and not config.attention_softmax_in_fp32
    ddp, adam = (
        megatron_config.configured(kind, spec, True, use_distributed_optimizer=True)
        for kind in megatron_config.KINDS[1:]
    )
    assert ddp.bucket_size == 1000 and ddp.overlap_param_gather and adam.overlap_param_gather
    assert adam.log_num_zeros_in_grad


@pytest.mark.parametrize(
    ("option", "words"),
    [
        ({"moe_permut_fusion": True}, "has no option moe_permut_fusion; did you mean moe_permute"),
        ({"moe_permute_fusion": 1}, "moe_permute_fusion must be bool, not 1"),
        ({"bucket_size": "many"}, r"bucket_size must be Optional\[int\], not 'many'"),
        ({"cuda_graph_impl": "loc"}, r"cuda_graph_impl must be one of \['none', 'local'"),
        (
            {"fp8_param": True},
            "megatron-core refuses fp8_param True: fp8_param must be used together",
        ),
    ],
)
def test_an_option_that_megatron_core_has_not_or_refuses_is_one_line(option, words):
    spec = resolve(("test", GPU | {"megatron": option}))
    with pytest.raises(UsageError, match=words):
        megatron_config.transformer_config(spec, cuda=True)


def test_options_of_megatron_core_are_settings_of_their_own_in_study_name_and_comparison(tmp_path):
    path = study_file(
        tmp_path / "options.toml",
        """
[defaults]
engine = "megatron"
megatron = { moe_permute_fusion = true }
[[sweep]]
product = { megatron = [{ bucket_size = 5 }, { bucket_size = 6, moe_permute_fusion = false }] }
""",
    )
    first, second = load_study(path).specs.items()
    assert first[0] == "megatron-moe_permute_fusion-bucket_size5"
    assert second[0] == "megatron-no-moe_permute_fusion-bucket_size6"
    assert second[1].settings()["megatron"] == {"moe_permute_fusion": False, "bucket_size": 6}
    parser = argparse.ArgumentParser()
    add_flags(parser)
    words = "--megatron bucket_size=7 --megatron cuda_graph_scope=full --megatron a=[1,2]"
    options = from_flags(parser.parse_args(words.split()))
    assert options == {"megatron": {"bucket_size": 7, "cuda_graph_scope": "full", "a": [1, 2]}}
    one, other = (
        logged("x", facts=facts("s", None, engine="megatron", megatron=each))
        for each in ({}, {"bucket_size": 5})
    )
    assert changes(one, other)["megatron"] == ("without options", "bucket_size 5")
