"""Attention for tests of context parallelism and of packed documents on a CPU, where Transformer
Engine cannot run.

It takes the place of Transformer Engine's attention in megatron-core's layers. With context
parallelism each rank gathers the keys and values of its group, and masks by the tokens' positions.
"""

from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor


class _Gather(torch.autograd.Function):
    """[s, ...] of every rank of a group, one after the other; gradients are summed."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        parts = [torch.empty_like(x) for _ in range(group.size())]
        dist.all_gather(parts, x.contiguous(), group=group)
        return torch.cat(parts)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        gradient = gradient.contiguous()
        dist.all_reduce(gradient, group=ctx.group)
        return gradient.chunk(ctx.group.size())[ctx.group.rank()], None


class GatheredAttention(torch.nn.Module):
    """Causal attention of queries [s, B, heads, d] to the keys and values of all cp ranks."""

    def __init__(self, pg_collection: Any, **_: Any):
        super().__init__()
        self.group = pg_collection.cp

    def positions(self, rank: int, s: int) -> Tensor:
        """Where the s tokens of a rank stand: chunks `rank` and 2 cp - 1 - `rank` of 2 cp."""
        chunks = torch.arange(s * self.group.size()).chunk(2 * self.group.size())
        return torch.cat([chunks[rank], chunks[-1 - rank]])

    def forward(self, query: Tensor, key: Tensor, value: Tensor, *_: Any, **__: Any) -> Tensor:
        s, batch = query.shape[:2]
        every = [self.positions(rank, s) for rank in range(self.group.size())]
        seen = every[self.group.rank()][:, None] >= torch.cat(every)[None, :]
        q, k, v = (
            x.permute(1, 2, 0, 3)
            for x in (query, _Gather.apply(key, self.group), _Gather.apply(value, self.group))
        )
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=seen, enable_gqa=True)
        return out.permute(2, 0, 1, 3).reshape(s, batch, -1)


class PackedAttention(torch.nn.Module):
    """Attention as Transformer Engine has it: [tokens, heads, d] of documents in a row."""

    def __init__(self, *_: Any, **__: Any):
        super().__init__()

    def forward(self, q: Tensor, k: Tensor, v: Tensor, *mask: Any, **how: Any) -> Tensor:
        """megatron-core's call has the documents in `packed_seq_params`, the library's has not."""
        how = vars(how["packed_seq_params"]) if "packed_seq_params" in how else how
        assert how.get("qkv_format", "thd") == "thd" and not any(x is not None for x in mask)
        assert how["cu_seqlens_q"].dtype == torch.int32
        ends, parts = how["cu_seqlens_q"].tolist(), []
        assert ends[-1] == q.size(0)
        for first, last in pairwise(ends):
            assert 0 < last - first <= how["max_seqlen_q"]
            one = (x[first:last].transpose(0, 1)[None] for x in (q, k, v))
            y = F.scaled_dot_product_attention(*one, is_causal=True, enable_gqa=True)
            parts.append(y[0].transpose(0, 1).flatten(1))
        return torch.cat(parts)


def install() -> None:
    """Have megatron-core's layers use it where the run has cp > 1."""
    from megatron.core import parallel_state

    from parallel.engines import layers

    usual = layers.FusedAttention

    def attention(**given: Any) -> torch.nn.Module:
        split = parallel_state.get_context_parallel_world_size() > 1
        return (GatheredAttention if split else usual)(**given)

    layers.FusedAttention = attention
    # megatron-core's rotary embedding picks a cp rank's chunks with a tensor in pinned memory.
    plain = torch.tensor
    torch.tensor = lambda *given, pin_memory=False, **named: plain(*given, **named)
