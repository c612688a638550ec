"""Run by test_transformer_engine.py on 2 ranks, which are pipeline stages: what megatron trains
where stand-ins that run on a CPU have the place of Transformer Engine's products, attention,
rotation and loss.

The last rank prints a JSON line: name -> "curve", loss and gradient norm of two steps; what
megatron-core was asked; "output_layer", whether that adds up its weight's gradient itself;
"discarded", bytes that outputs of norms keep which backward computes again.
"""

import json
import sys
from contextlib import nullcontext
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from base.errors import UsageError
from parallel import engines
from parallel.config.settings import resolve
from parallel.engines import layers
from tests.gathered_attention import PackedAttention

SIZES = {"preset": "tiny-llama", "n_layer": 2, "hidden": 32, "n_head": 4, "n_kv_head": 2}
SIZES |= {"vocab_size": 17, "max_seq_len": 16, "steps": 2, "micro_batch": 2, "global_batch": 4}
SIZES |= {"engine": "megatron", "device": "auto", "zero_stage": 1}
SIZES |= {"gpus": 2, "pp": 2, "data": "none"}  # not what the working tree has
DISCARDED: list[int] = []  # bytes that each output of a norm keeps until backward
DOCUMENTS = {"reset_at_documents": True, "end_of_text": 3}


class _Product(torch.autograd.Function):
    """x W^T, whose backward adds the gradient of W to `main_grad` and hands on none that counts."""

    @staticmethod
    def forward(context: Any, x: Tensor, weight: Tensor) -> Tensor:
        context.save_for_backward(x, weight)
        context.weight = weight
        return x @ weight.t()

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
        (x, weight), own = context.saved_tensors, context.weight
        own.main_grad += gradient.flatten(0, 1).t().float() @ x.flatten(0, 1).float()
        own.grad_added_to_main_grad = True
        return gradient @ weight, torch.full_like(weight, torch.nan)


def _forward(self: torch.nn.Module, x: Tensor) -> tuple[Tensor, None]:
    if not self.config.gradient_accumulation_fusion:
        return x @ self.weight.t(), None
    return _Product.apply(x, self.weight), None


class Grouped(torch.nn.Module):
    """A product for each expert, of its own tokens."""

    def __init__(self, n: int, inputs: int, outputs: int, config: Any, **_: Any):
        super().__init__()
        self.n, self.fuses = n, config.gradient_accumulation_fusion
        for i in range(n):
            self.register_parameter(f"weight{i}", torch.nn.Parameter(torch.empty(outputs, inputs)))

    def forward(self, x: Tensor, tokens: Any) -> tuple[Tensor, None]:
        parts = x.split(list(tokens))
        weights = [getattr(self, f"weight{i}") for i in range(self.n)]
        if self.fuses:
            product = [_Product.apply(p[None], w)[0] for p, w in zip(parts, weights, strict=True)]
        else:
            product = [p @ w.t() for p, w in zip(parts, weights, strict=True)]
        return torch.cat(product), None


def _grouped(*legacy: bool) -> Any:
    """As get_moe_module_spec_for_backend asks for experts: 0.16 says a kind more."""
    kind = sys.modules["megatron.core.transformer.moe.experts"].TEGroupedMLP
    parts = SimpleNamespace(linear_fc1=Grouped, linear_fc2=Grouped, activation_func=None)
    return (kind, parts) if legacy else partial(kind, submodules=parts)


def _loss(logits: Tensor, labels: Tensor, group: Any, *_: Any) -> Tensor:
    return F.cross_entropy(logits.transpose(1, 2).float(), labels, reduction="none")


def _rope(t: Tensor, angles: Tensor, interleaved: bool) -> Tensor:
    rope = sys.modules["megatron.core.models.common.embeddings.rope_utils"]
    return rope._apply_rotary_pos_emb_bshd(t, angles, interleaved)


def _share(into: Tensor, of: Tensor) -> None:
    into.untyped_storage().resize_(of.untyped_storage().nbytes())
    into.untyped_storage().copy_(of.untyped_storage())


def install() -> None:
    """Put the stand-ins where megatron-core finds Transformer Engine's."""
    names = {"TENorm": layers.SequenceParallelNorm, "TEFusedMLP": SimpleNamespace}
    for kind in ("Column", "Row"):
        theirs = getattr(layers.tensor_parallel, f"{kind}ParallelLinear")
        product = type(theirs.__name__, (theirs,), {"forward": _forward})
        provider = layers.gpt_layer_specs.LocalSpecProvider
        setattr(provider, f"{kind.lower()}_parallel_linear", lambda _, product=product: product)
        names[f"TE{kind}ParallelLinear"] = product
    specs = layers.gpt_layer_specs
    alone = provider.grouped_mlp_modules
    provider.grouped_mlp_modules = lambda self, grouped, *legacy: (
        _grouped(*legacy) if grouped else alone(self, grouped, *legacy)
    )

    def te_layer(num_experts: int | None, moe_grouped_gemm: bool, **_: Any) -> Any:
        layer = specs.get_gpt_layer_local_spec(num_experts, moe_grouped_gemm)
        layer.submodules.input_layernorm = layers.SequenceParallelNorm
        layer.submodules.pre_mlp_layernorm = layers.SequenceParallelNorm
        layer.submodules.self_attention.submodules.core_attention = PackedAttention
        return layer

    specs.get_gpt_layer_with_transformer_engine_spec = te_layer
    library = "megatron.core.extensions.transformer_engine"
    sys.modules[library] = SimpleNamespace(**names)
    layers.linear_layers.HAVE_TE = True
    language = sys.modules["megatron.core.models.common.language_module.language_module"]
    language.te_parallel_cross_entropy = _loss
    random = sys.modules["megatron.core.tensor_parallel.random"]  # of norms computed again
    random.FP8GlobalStateManager = SimpleNamespace(is_fp8_enabled=bool)
    random._get_share_storage = lambda: _share  # 0.19 compiles it
    random.activation_recompute_forward = random.fp8_autocast = lambda **_: nullcontext()
    discard = random.CheckpointWithoutOutput.discard_output_and_register_recompute

    def discarding(self: Any, *hook: Any) -> None:
        discard(self, *hook)
        DISCARDED.extend(output.untyped_storage().size() for output in self.outputs)

    random.CheckpointWithoutOutput.discard_output_and_register_recompute = discarding
    rope = sys.modules["megatron.core.models.common.embeddings.rope_utils"]
    rope.fused_apply_rotary_pos_emb = _rope
    rope.fused_apply_rotary_pos_emb_thd = lambda t, ends, angles, **_: (
        rope._apply_rotary_pos_emb_thd(
            t, ends, angles, cp_group=layers.parallel_state.get_context_parallel_group()
        )
    )
    sys.modules["transformer_engine.pytorch"] = SimpleNamespace(DotProductAttention=PackedAttention)


def batches() -> Any:
    draw = torch.Generator().manual_seed(1)
    for _ in range(2):
        yield torch.randint(17, (2, 2, 16), generator=draw).unbind()


def train(name: str, kind: str, **settings: Any) -> dict[str, Any]:
    spec = resolve(("test", SIZES | settings))
    built = engines.load(spec, torch.device("cpu"), kind)
    DISCARDED.clear()
    curve = [built.step(batches(), 10 * spec.lr, bool) for _ in range(2)]
    found = {"curve": [[step.loss, step.grad_norm] for step in curve]} | built.describe()
    model = built.chunks[0].module
    output = getattr(getattr(model, "module", model), "output_layer", None)
    found["discarded"] = list(DISCARDED)
    found["output_layer"] = output and output.gradient_accumulation_fusion
    sys.modules["megatron.core"].parallel_state.destroy_model_parallel()
    return {name: found}


def refused_without_ninja() -> str:
    def compile_it() -> None:
        raise RuntimeError("Ninja is required")

    sys.modules["megatron.core.tensor_parallel.random"]._get_share_storage = compile_it
    try:
        train("", "te", recompute="selective", **DOCUMENTS)
    except UsageError as error:
        return str(error)
    return ""


def main() -> None:
    dist.init_process_group("gloo")
    learned = {"preset": "tiny", "n_kv_head": 4, "bias": False, **DOCUMENTS}
    found = train("torch", "torch") | train("torch documents", "torch", **DOCUMENTS)
    found |= train("torch learned documents", "torch", **learned)
    moe = {"preset": "tiny-moe", "n_kv_head": 2, **DOCUMENTS}
    found |= train("torch experts", "torch", **moe)
    found |= train("torch bf16", "torch", precision="bf16", **DOCUMENTS)
    install()
    found |= train("te documents", "te", **DOCUMENTS)
    found |= train("te norms", "te", recompute="selective", **DOCUMENTS)
    found |= train("te learned documents", "te", **learned)
    found |= train("te loss", "te", precision="bf16", te_loss=True, **DOCUMENTS)
    found |= train("te experts", "te", **moe)
    found |= train("te experts again", "te", recompute="selective", **moe)
    found["without ninja"] = refused_without_ninja()
    if dist.get_rank() == 1:
        print(json.dumps(found), flush=True)


if __name__ == "__main__":
    main()
