"""What a rehearsal has in the place of Transformer Engine: its attention with cp, its products in
fp8 and its loss, which hold and send what its own do and compute nothing.

The loss follows its version 2.19, the others 2.9: AttnFuncWithCPAndKVP2P, the ring of
`cp_comm_type` p2p, and Linear and LayerNormLinear in fp8 on Hopper. The all-reduce of the scales is
left out, and tp's all-gathers are in bf16 as the formula has them, where Transformer Engine gathers
one byte a number.
"""

import contextlib
import sys
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from parallel.config.run_spec import RunSpec
from parallel.engines import layers

_SCALED = 5  # tensors of a product: input, weight and output, and the gradients of two


def _share(into: Tensor, of: Tensor) -> None:
    into.untyped_storage().resize_(of.untyped_storage().nbytes())


def redirect(spec: RunSpec, kept: Callable[[Tensor, str], None]) -> None:
    """Patch megatron-core's layers in this process. kept: told the kind of what stays."""
    if spec.cp > 1:
        layers.FusedAttention = RingAttention
    random = sys.modules["megatron.core.tensor_parallel.random"]  # of norms computed again
    random.FP8GlobalStateManager = SimpleNamespace(is_fp8_enabled=bool)
    random._get_share_storage = lambda: _share  # since 0.19
    random.activation_recompute_forward = lambda **_: contextlib.nullcontext()
    random.fp8_autocast = lambda **_: contextlib.nullcontext()
    language = sys.modules["megatron.core.models.common.language_module.language_module"]
    language.te_parallel_cross_entropy = lambda logits, _, tp, __: _Loss.apply(logits, tp)
    if spec.precision != "fp8":
        return
    usual, history = layers.transformer_config, 1024 if spec.fp8_recipe == "delayed" else 1
    layers.transformer_config = lambda of, cuda: usual(replace(of, precision="bf16"), cuda)

    def forward(self: nn.Module, x: Tensor) -> Any:
        """The library's, which keeps its input [S, B, H] in one byte."""
        if not hasattr(self, "in_fp8"):  # as they are and transposed, from the first micro-batch on
            self.in_fp8 = torch.empty((2, *self.weight.shape), dtype=torch.uint8)
            self.scales = torch.empty((1 + history, _SCALED))
            for tensor in (self.in_fp8, self.scales):
                kept(tensor, "weights")
        with saved_tensors_hooks(_in_one_byte, _read):
            return super(type(self), self).forward(x)

    for kind in ("Column", "Row"):
        theirs = getattr(layers.tensor_parallel, f"{kind}ParallelLinear")
        product = type(theirs.__name__, (theirs,), {"forward": forward})
        name = f"{kind.lower()}_parallel_linear"
        provider = layers.gpt_layer_specs.LocalSpecProvider
        setattr(provider, name, lambda _, product=product: product)


def _in_one_byte(x: Tensor) -> Tensor:
    return x if x.dim() == 2 else torch.empty_like(x, dtype=torch.uint8)  # a weight, or an input


def _read(x: Tensor) -> Tensor:
    """As a product takes it, without bytes of its own."""
    return x if x.dim() == 2 else torch.empty((), dtype=torch.bfloat16).expand(x.shape)


class RingAttention(layers.FusedAttention):
    """Attention of a cp rank's queries, around whose ring keys and values travel."""

    def __init__(self, pg_collection: Any, **_: Any):
        super().__init__()
        self.group = pg_collection.cp

    def forward(self, query: Tensor, key: Tensor, value: Tensor, *_: Any, **__: Any) -> Tensor:
        """[S/cp, B, N/tp, D] and twice [S/cp, B, K/tp, D] to [S/cp, B, N/tp * D]."""
        return _Ring.apply(query, key, value, self.group)


class _Loss(torch.autograd.Function):
    """Of each token, from logits [S, B, V/tp]. Forward copies these; the gradient takes the place
    of the copy. Each tp rank has four numbers of a token for the others."""

    @staticmethod
    def forward(context: Any, logits: Tensor, tp: dist.ProcessGroup) -> Tensor:
        context.save_for_backward(torch.empty_like(logits))
        own = logits.new_empty((*logits.shape[:2], 4), dtype=torch.float32)
        if tp.size() > 1:
            every = own.new_empty((tp.size() * own.size(0), *own.shape[1:]))
            dist.all_gather_into_tensor(every, own, group=tp)
        return own[..., 0].clone()

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return context.saved_tensors[0], None


def _pass_on(sent: Tensor, received: Tensor, group: dist.ProcessGroup) -> None:
    rank, n = group.rank(), group.size()
    dist.isend(sent, group=group, group_dst=(rank + 1) % n)
    dist.irecv(received, group=group, group_src=(rank - 1) % n)


class _Ring(torch.autograd.Function):
    """Forward holds the keys and values of all ranks and each step's output; backward holds, twice,
    those of one rank and their gradients."""

    @staticmethod
    def forward(context: Any, q: Tensor, k: Tensor, v: Tensor, group: Any) -> Tensor:
        parts, outputs = [torch.cat((k.flatten(), v.flatten()))], []
        for step in range(group.size()):
            if step < group.size() - 1:
                parts.append(torch.empty_like(parts[0]))
                _pass_on(parts[-2], parts[-1], group)
            # Of what comes after this rank's early tokens, the late half alone sees anything.
            seeing = q if step <= group.rank() else q[: q.size(0) // 2]
            outputs.append(torch.empty_like(seeing))
        output = torch.empty_like(q, dtype=torch.float32).to(q.dtype).flatten(2)
        per_row = q.new_empty(q.shape[:-1], dtype=torch.float32)
        context.group, context.shape = group, k.shape
        context.save_for_backward(q, parts[-1], output, per_row)
        return output

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
        q, part, _, _ = context.saved_tensors
        n, of_q = context.group.size(), torch.empty_like(q)
        both = [part.new_empty((2, *part.shape)) for _ in range(2)]
        for step in range(n):  # the first sends no gradients yet, the last nothing but those
            rows = slice(step == n - 1, 1 if step == 0 else 2)
            sent, received = both[step % 2], both[(step + 1) % 2]
            _pass_on(sent[rows], received[rows], context.group)
            of_step = torch.empty_like(q), torch.empty_like(part)
        del of_step
        of_k, of_v = (x.view(context.shape) for x in received[1].chunk(2))
        return of_q, of_k, of_v, None
