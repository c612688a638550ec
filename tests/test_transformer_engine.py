"""What megatron asks of Transformer Engine, and what is refused without it."""

import sys
import types

import pytest
import torch

from base.errors import UsageError
from parallel.config import library_variables
from parallel.config.settings import resolve
from parallel.engines import kernels
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


def test_a_loss_whose_gradient_was_rounded_is_refused(monkeypatch):
    library = types.ModuleType("transformer_engine.pytorch.cross_entropy")
    monkeypatch.setitem(sys.modules, library.__name__, library)
    library.parallel_cross_entropy = lambda inp, target, *, overwrite_input=False: None
    kernels.check_loss()
    library.parallel_cross_entropy = lambda inp, target: None  # 2.18
    with pytest.raises(UsageError, match="te_loss needs Transformer Engine 2.19"):
        kernels.check_loss()


GPU = {"engine": "megatron", "precision": "bf16", "device": "cuda"}
OVERLAP = {"tp_overlap": True, "gpus": 2, "tp": 2, "sequence_parallel": True}
NORMS = {"recompute": "selective"}
GRAPHS = {"cuda_graphs": True}
REFUSED = [
    ({"te_loss": True, "engine": "ddp"}, "engine ddp has no te_loss"),
    ({"te_loss": True, "precision": "fp16"}, "te_loss needs precision bf16 or fp8"),
    ({"te_loss": True, "device": "cpu"}, "te_loss needs a GPU"),
    ({"te_loss": True, "kernels": "torch"}, "te_loss needs kernels te"),
    (NORMS | {"device": "cpu"}, "recompute selective needs a GPU"),
    (NORMS | {"kernels": "torch"}, "recompute selective needs kernels te"),
    (NORMS | {"precision": "fp8"}, "recompute selective in fp8 needs fp8_recipe tensorwise"),
    (OVERLAP | {"engine": "deepspeed_zero", "sequence_parallel": False}, "has no tp_overlap"),
    (OVERLAP | {"sequence_parallel": False}, "tp_overlap needs tp above 1 and sequence_parallel"),
    (
        OVERLAP | {"tp": 1},
        "tp_overlap needs tp above 1 and sequence_parallel \\(tp is 1, ",
    ),
    (OVERLAP | {"precision": "fp32"}, "tp_overlap needs precision bf16, fp16 or fp8"),
    (OVERLAP | {"device": "cpu"}, "tp_overlap needs a GPU"),
    (OVERLAP | {"kernels": "torch"}, "tp_overlap needs kernels te"),
    (GRAPHS | {"engine": "fsdp2", "zero_stage": 2}, "engine fsdp2 has no cuda_graphs"),
    (GRAPHS | {"device": "cpu"}, "cuda_graphs needs a GPU"),
    (GRAPHS | NORMS, "cuda_graphs has no recompute selective"),
    (GRAPHS | {"gpus": 2, "pp": 2, "recompute": "full"}, "no pp 2, recompute full: run without"),
    (GRAPHS | {"reset_at_documents": True, "end_of_text": 3}, "has no reset_at_documents"),
    (GRAPHS | {"preset": "tiny-moe"}, "cuda_graphs has no experts"),
    (GRAPHS | {"breakdown": True}, "cuda_graphs has no breakdown"),
    (GRAPHS | OVERLAP, "cuda_graphs has no tp_overlap"),
]


@pytest.mark.parametrize(("settings", "why"), REFUSED)
def test_what_megatron_core_cannot_combine_is_refused(settings, why):
    with pytest.raises(UsageError, match=why):
        resolve(("test", GPU | settings))


@pytest.mark.filterwarnings("ignore:full scope")  # of a default of megatron-core's own
@pytest.mark.parametrize(("precision", "more"), [("bf16", {}), ("fp8", {"use_fp8": True})])
def test_tp_overlap_reaches_megatron_core_and_the_buffers_have_a_ranks_tokens(
    precision, more, monkeypatch
):
    from parallel.engines import layers

    library, asked = types.ModuleType("transformer_engine.pytorch.module.base"), []
    library.initialize_ub = lambda **how: asked.append(how)
    monkeypatch.setitem(sys.modules, library.__name__, library)
    monkeypatch.setattr(layers.parallel_state, "initialize_model_parallel", lambda **_: None)
    monkeypatch.setattr(
        layers.tensor_parallel, "model_parallel_cuda_manual_seed", lambda *_, **__: None
    )
    given = GPU | OVERLAP | {"gpus": 4, "cp": 2, "micro_batch": 4, "precision": precision}
    spec = resolve(("test", given | {"preset": "tiny-llama", "seq_len": 64}))
    layers.start(spec, cuda=False)
    assert not asked  # a rehearsal has no GPU
    config = layers.start(spec, cuda=True)
    assert config.tp_comm_overlap and layers.options(config)["tp_comm_overlap"]
    shape = {"shape": [4 * 64 // 2, spec.model.hidden], "tp_size": 2, "dtype": torch.bfloat16}
    assert asked == [shape | {"bootstrap_backend": "nccl"} | more]
    assert not layers.transformer_config(resolve(("test", GPU)), True).tp_comm_overlap


@pytest.mark.filterwarnings("ignore:full scope")
@pytest.mark.parametrize("graphs", [True, False])
def test_cuda_graphs_reach_megatron_core_with_random_states_and_variables_for_them(
    graphs, monkeypatch
):
    from parallel.engines import layers

    states = []
    monkeypatch.setattr(layers.parallel_state, "initialize_model_parallel", lambda **_: None)
    seed = "model_parallel_cuda_manual_seed"
    monkeypatch.setattr(layers.tensor_parallel, seed, lambda _, **how: states.append(how))
    spec = resolve(("test", GPU | {"cuda_graphs": graphs}))
    built = [layers.start(spec, cuda).cuda_graph_impl for cuda in (True, False)]
    assert built == ["local" if graphs else "none", "none"]  # a rehearsal has no GPU
    assert states == [{"use_cudagraphable_rng": graphs}, {"use_cudagraphable_rng": False}]
    register = library_variables.wanted(spec).get("NCCL_GRAPH_REGISTER")
    assert register == ("0" if graphs else None)
