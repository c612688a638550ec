"""What a checkpoint stores: pieces of parameters and of AdamW's moments.

A piece is a parameter's reference name (models/gpt.py), the part of the parameter that a
tensor-parallel rank holds (a box: offset and shape), and a run of that part's elements in row-major
order, which is what a ZeRO rank holds of it. Each piece has three fp32 tensors: the master weight
and AdamW's two moments, 12 bytes per parameter. An engine lists its pieces as views of its live
tensors. Saving writes the views and loading fills them, so no engine knows the files.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from torch import Tensor

from parallel.config.layout import Layout

Shape = tuple[int, ...]
KINDS = ("param", "exp_avg", "exp_avg_sq")  # the tensors of a piece


class Copy(NamedTuple):
    """One of `n` equal copies of a piece; this rank saves slice `index` of it."""

    index: int
    n: int


ONLY_COPY = Copy(0, 1)
NEVER_SAVED = Copy(0, 0)  # another rank saves all of it; here it is only filled


@dataclass(frozen=True)
class Piece:
    """Elements [start, start + n) of a part of a parameter, row-major.

    name, shape: the parameter's reference name and full shape.
    offset, part: where the part begins in the parameter, and the part's shape.
    tensors: kind -> live fp32 tensor of n elements, contiguous.
    """

    name: str
    shape: Shape
    offset: Shape
    part: Shape
    start: int
    tensors: dict[str, Tensor]
    copy: Copy = ONLY_COPY

    def __len__(self) -> int:
        return next(iter(self.tensors.values())).numel()

    @property
    def saved(self) -> range:
        """Returns the range of the piece's elements that this rank saves."""
        index, n = self.copy
        return range(len(self) * index // n, len(self) * (index + 1) // n) if n else range(0)


@dataclass
class State:
    """An engine's training state: its pieces and what is not a tensor.

    Random states are no part of it: nothing draws random numbers after the start, for there is no
    dropout, and the order of the data depends on (seed, step) alone.

    adam_step: AdamW's step count, without skipped steps. scaler: empty without fp16, else the parts
    of engines.optim.LossScale.
    """

    pieces: list[Piece]
    adam_step: int = 0
    scaler: dict[str, float] = field(default_factory=dict)


def unpadded(
    name: str,
    shape: Shape,
    offset: Shape,
    part: Shape,
    start: int,
    tensors: dict[str, Tensor],
    copy: Copy = ONLY_COPY,
) -> list[Piece]:
    """Returns a list of the one piece of `part` that `tensors` hold, without rows that pad the
    vocabulary; an empty list where nothing is left of it.

    start: where in the part the tensors begin; negative where they begin before it. They may end
    after it.
    """
    rows = max(0, min(part[0], shape[0] - offset[0]))
    part = (rows, *part[1:])
    first, last = max(start, 0), min(start + tensors["param"].numel(), math.prod(part))
    if first >= last:
        return []
    inside = slice(first - start, last - start)
    flat = {kind: tensor.detach().view(-1)[inside] for kind, tensor in tensors.items()}
    return [Piece(name, shape, offset, part, start=first, tensors=flat, copy=copy)]


def is_split(parameter: Any) -> bool:
    """Returns whether each tp rank holds a different part of this parameter; megatron-core marks it
    so."""
    return getattr(parameter, "tensor_model_parallel", False)


def pieces_of(
    trained: Iterable[tuple[Any, dict[str, Tensor], int]],
    layout: Layout,
    rank: int,
    shards: int = 1,
) -> list[Piece]:
    """Returns the pieces of what this rank trains. trained: (parameter, its fp32 tensors on this
    rank, the number of their first element in the parameter).

    `parameter.references` has the name, shape, offset and part of each reference parameter in it,
    one after the other: two in the first linear layer of a gated feed-forward. shards: neighbouring
    ranks of dp x cp that hold a parameter between them (ZeRO: all); with 1 each holds the same.
    """
    coords, pieces = layout.coords(rank), []
    expert_copy = Copy(layout.expert_copy(rank), layout.expert_copies)
    for parameter, tensors, start in trained:
        tp_rank, tp = (0, 1) if is_split(parameter) else (coords["tp"], layout.tp)
        copy_rank, copies = coords["dp"] * layout.cp + coords["cp"], layout.dp * layout.cp
        copy = Copy(copy_rank // shards * tp + tp_rank, copies // shards * tp)
        if not getattr(parameter, "allreduce", True):  # as megatron-core marks an expert's
            copy = ONLY_COPY if layout.zero_stage else expert_copy
        on_last_stage = layout.pp > 1 and coords["pp"] == layout.pp - 1
        if on_last_stage and parameter.references[0]["name"] == "embedding.word.weight":
            copy = NEVER_SAVED  # the tied output layer: the first stage saves the embedding
        for reference in parameter.references:
            pieces += unpadded(**reference, start=start, tensors=tensors, copy=copy)
            start -= math.prod(reference["part"])
    return pieces


def slices_to_save(pieces: list[Piece]) -> list[Piece]:
    """Returns the slice of each piece that this rank saves."""
    slices = []
    for piece in pieces:
        if saved := piece.saved:
            tensors = {
                kind: tensor[saved.start : saved.stop] for kind, tensor in piece.tensors.items()
            }
            start = piece.start + saved.start
            slices.append(replace(piece, start=start, tensors=tensors, copy=ONLY_COPY))
    return slices
