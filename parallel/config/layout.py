"""A layout: how one training step is split over GPUs, and every reason why it cannot be.

tp, cp, pp, dp are the tensor-, context-, pipeline- and data-parallel sizes, vpp the number of model
chunks per pipeline rank (interleaved 1F1B). Ranks count tp fastest, then cp, then dp, then pp, as
Megatron-LM and (without cp) DeepSpeed's topology order them. Experts have sizes of their own on the
tp x cp x dp ranks of a stage, which count etp fastest, then ep, then the copies of an expert.
"""

import itertools
import math
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any, NamedTuple

from base.bounds import Bounds, checked, key
from base.errors import UsageError
from models.config import LAYERS, SIZE, GPTConfig

# The axes, listed once: what names, checks, records or shows them iterates over these lists.
AXES = ("tp", "cp", "pp", "vpp", "dp")  # in the order of names and tables
# Of experts alone, which are split otherwise over the tp x cp x dp ranks of a stage. What is said
# of a dense model does not mention them.
EXPERT_AXES = ("ep", "etp")
# How a pipeline cuts layers that it does not divide (names of Megatron-LM). What is said of a run
# whose stages are equal does not mention them.
UNEVEN = ("account_for_embedding_in_pipeline_split", "account_for_loss_in_pipeline_split")
UNEVEN += ("decoder_first_pipeline_num_layers", "decoder_last_pipeline_num_layers")
RANK_AXES = ("tp", "cp", "dp", "pp")  # those whose product is the ranks, the fastest first
MODEL_AXES = tuple(axis for axis in RANK_AXES if axis != "dp")  # dp follows from them and the ranks
SET_AXES = tuple(axis for axis in AXES if axis != "dp")  # those that are settings of a run
SELDOM = ("cp", *EXPERT_AXES)  # left out of a table in which every row has 1 of it
# Far beyond any run. A number outside is refused before it can overflow, hang or fill the memory.
RANKS = Bounds(1, 10**6)
RECOMPUTE = ("none", "selective", "full")
OFFLOAD = ("none", "optimizer", "all")
DISPATCHERS = ("alltoall", "allgather")  # how tokens get to experts; the usual one first
ROUTING = NATURAL, FORCED = "natural", "forced"  # see RunSpec.routing


class Ends(NamedTuple):
    """The numbers of layers of a pipeline's first and last stage."""

    first: int
    last: int

    def settings(self, vpp: int) -> dict[str, int | bool]:
        """Returns the settings of `UNEVEN` that cut such stages."""
        embedding, loss, first, last = UNEVEN
        if any(layers % vpp for layers in self):  # the first or the last chunk has one fewer
            counted = {embedding: self.first % vpp != 0, loss: self.last % vpp != 0}
            return {name: counts for name, counts in counted.items() if counts}
        return {first: self.first, last: self.last}


def uneven_ends(n_layer: int, pp: int, vpp: int = 1, head: float = 1.0) -> Ends | None:
    """Returns ends with fewer layers than other stages, so that pp stages of vpp chunks have all
    layers; None where no such ends exist. head: the cost of the output layer, in layers.

    The output layer, or it and the embedding, are a layer where that makes all chunks equal.
    Otherwise the last stage has fewer layers than the first by what the output layer costs.
    """
    for counted in (1, 2):
        size, remainder = divmod(n_layer + counted, pp)
        if pp > 1 and size > 1 and size % vpp == 0 and not remainder:
            return Ends(size - counted + 1, size - 1)
    most = -(-n_layer // (pp * vpp))  # layers of a chunk
    two_chunks, remainder = divmod(n_layer, vpp)
    two_chunks -= most * (pp - 2)  # their layers, one chunk of each end
    if pp < 2 or remainder or two_chunks < 2:
        return None
    last = min(max(round((two_chunks - head) / 2), two_chunks - most, 1), two_chunks - 1)
    return Ends((two_chunks - last) * vpp, last * vpp)


@dataclass(frozen=True)
class Layout:
    """One way to split a step. A dp rank has `n_micro` micro-batches of `micro_batch` sequences.

    dp and n_micro follow from what users set (`RunSpec`); the other fields are settings of a run.

    Raises:
        UsageError: a size is out of its bounds, or a name is not a known one.
    """

    dp: int = key(1, "data-parallel size", RANKS)
    tp: int = key(1, "tensor-parallel size", RANKS)
    cp: int = key(1, "context-parallel size: ranks that share a sequence", RANKS)
    pp: int = key(1, "pipeline-parallel size", RANKS)
    vpp: int = key(1, "model chunks per pipeline rank: above 1, interleaved 1F1B", Bounds(1, 10**4))
    account_for_embedding_in_pipeline_split: bool = key(
        False, "megatron: the embedding counts as a layer where pp cuts the layers"
    )
    account_for_loss_in_pipeline_split: bool = key(
        False, "megatron: the output layer counts as a layer where pp cuts the layers"
    )
    decoder_first_pipeline_num_layers: int | None = key(
        None, "megatron: layers of the first stage; the others share the rest", LAYERS
    )
    decoder_last_pipeline_num_layers: int | None = key(
        None, "megatron: layers of the last stage; the others share the rest", LAYERS
    )
    ep: int = key(1, "expert-parallel size: of the experts each rank has 1 / ep", RANKS)
    etp: int = key(
        1, "tensor-parallel size of experts; their dp is tp x cp x dp / (ep x etp)", RANKS
    )
    sequence_parallel: bool = key(False, "split norms and residuals over tp ranks")
    zero_stage: int = key(
        0, "ZeRO stage; 1 is megatron's distributed optimizer; fsdp2 has 2 and 3", Bounds(0, 3)
    )
    fsdp_shard: int | None = key(
        None, "fsdp2's hybrid sharding: dp ranks that share one copy of the state", RANKS
    )
    reduce_each_micro_batch: bool | None = key(
        None, "fsdp2: reduce gradients with every micro-batch (default: with ZeRO stage 3 alone)"
    )
    offload: str = key("none", "keep in host memory: optimizer state, or all", OFFLOAD)
    recompute: str = key("none", "activations to drop and recompute", RECOMPUTE)
    micro_batch: int = key(1, "sequences per micro-batch and dp rank", Bounds(1, 10**6))
    n_micro: int = key(1, "micro-batches of a step on each dp rank", SIZE)

    def __post_init__(self) -> None:
        for size in fields(self):
            if (value := getattr(self, size.name)) != size.default:
                checked(size, value, size.name)

    @property
    def world_size(self) -> int:
        return math.prod(getattr(self, axis) for axis in RANK_AXES)

    @property
    def shards(self) -> int:
        """Returns the number of data-parallel ranks over which FSDP2 cuts one copy of the state."""
        return self.fsdp_shard or self.dp

    @property
    def reductions(self) -> int:
        """Returns how often FSDP2 reduces a gradient in a step. By default stage 3 needs the least
        memory, and stage 2, which gathers once a step, the fewest messages."""
        asked = self.reduce_each_micro_batch
        return self.n_micro if (self.zero_stage == 3 if asked is None else asked) else 1

    @property
    def global_batch(self) -> int:
        """Returns the sequences per optimizer step over all ranks."""
        return self.dp * self.micro_batch * self.n_micro

    @property
    def bubble(self) -> float:
        """Returns the pipeline's idle time over its ideal time, (pp - 1) / (vpp * n_micro).

        Narayanan et al. SC'21 (arXiv 2104.04473), section 2.2.
        """
        return (self.pp - 1) / (self.vpp * self.n_micro)

    def coords(self, rank: int) -> dict[str, int]:
        """Returns where `rank` stands on each axis: {"tp": .., "cp": .., "dp": .., "pp": ..}."""
        coords = {}
        for axis in RANK_AXES:
            rank, coords[axis] = divmod(rank, getattr(self, axis))
        return coords

    @property
    def expert_copies(self) -> int:
        """Returns the experts' data-parallel size: how many ranks hold the same part of them."""
        return self.tp * self.cp * self.dp // (self.ep * self.etp)

    def expert_copy(self, rank: int) -> int:
        """Returns which of the `expert_copies` a rank's experts are."""
        return rank // (self.ep * self.etp) % self.expert_copies

    def chunks(self, n_layer: int) -> list[range]:
        """Returns the layers of each model chunk, as megatron-core cuts them: chunk c is on stage c
        % pp. They are all layers where `problems` finds nothing."""
        # True where the loss or the embedding counts as a layer.
        loss = self.account_for_loss_in_pipeline_split
        embedding = self.account_for_embedding_in_pipeline_split
        stated = {
            0: self.decoder_first_pipeline_num_layers,
            self.pp - 1: self.decoder_last_pipeline_num_layers,
        }
        stated = {stage: layers for stage, layers in stated.items() if layers}
        remaining = n_layer + embedding + loss - sum(stated.values())
        usual = remaining // max(1, self.pp - len(stated))  # layers of a stage that states none
        sizes = [stated.get(stage, usual) // self.vpp for stage in range(self.pp)] * self.vpp
        sizes[0] -= embedding
        sizes[-1] -= loss
        ends = itertools.accumulate(sizes)
        return [range(end - size, end) for end, size in zip(ends, sizes, strict=True)]

    def ends(self, n_layer: int) -> Ends:
        """Returns the numbers of layers of the first and of the last stage."""
        chunks = self.chunks(n_layer)
        return Ends(*(sum(map(len, chunks[stage :: self.pp])) for stage in (0, self.pp - 1)))

    @property
    def uneven(self) -> dict[str, int | bool]:
        """Returns the settings of `UNEVEN` that are used, with their values."""
        return {name: value for name in UNEVEN if (value := getattr(self, name))}

    def as_dict(self) -> dict[str, Any]:
        """Returns the sizes as plain data, without those of experts where these are not split, and
        without those of uneven stages where stages are equal."""
        sizes = {
            name: size for name, size in asdict(self).items() if name not in EXPERT_AXES or size > 1
        }
        return {name: size for name, size in sizes.items() if name not in UNEVEN or size}

    def problems(self, config: GPTConfig, seq_len: int) -> list[str]:
        """Returns every reason this layout cannot train `config`, with the numbers; empty when it
        can."""
        problems = []
        heads_of = {"attention heads": config.n_head}
        if config.n_kv_head:
            heads_of["heads of keys and values"] = config.n_kv_head
        for kind, heads in heads_of.items():
            if heads % self.tp:
                fits = ", ".join(str(size) for size in range(1, heads + 1) if heads % size == 0)
                problems.append(f"tp {self.tp} does not divide the {heads} {kind} ({fits} do)")
        if config.ffn_hidden % self.tp:
            problems.append(f"tp {self.tp} does not divide ffn_hidden {config.ffn_hidden}")
        problems += self._problems_of_stages(config.n_layer)
        if self.vpp > 1 and self.pp < 2:
            problems.append(f"vpp {self.vpp} interleaves pipeline stages and needs pp >= 2")
        if self.vpp > 1 and self.n_micro % self.pp:
            needs = f"vpp {self.vpp} needs micro-batches in multiples of pp {self.pp}"
            problems.append(f"{needs}, but there are {self.n_micro}")
        if self.sequence_parallel and self.tp < 2:
            problems.append("sequence_parallel splits over tensor-parallel ranks and needs tp >= 2")
        if self.cp > 1 and seq_len % (2 * self.cp):
            chunks = f"{2 * self.cp} chunks, two for each rank"
            problems.append(f"cp {self.cp} cuts seq_len {seq_len} unevenly into {chunks}")
        elif self.sequence_parallel and seq_len // self.cp % self.tp:
            tokens = f"seq_len {seq_len}" + (f" / cp {self.cp}" if self.cp > 1 else "")
            problems.append(f"sequence_parallel: tp {self.tp} does not divide {tokens}")
        if seq_len > config.max_seq_len:
            problems.append(f"seq_len {seq_len} exceeds the model's {config.max_seq_len} positions")
        if self.offload == "all" and self.zero_stage != 3:
            problems.append(f"offload all needs zero_stage 3, not {self.zero_stage}")
        if self.offload == "optimizer" and self.zero_stage < 1:
            problems.append("offload optimizer needs zero_stage 1, 2 or 3, not 0")
        if self.dp % self.shards:
            problems.append(f"fsdp_shard {self.shards} does not divide dp {self.dp}")
        return problems + self._problems_of_experts(config)

    def _problems_of_stages(self, n_layer: int) -> list[str]:
        """Returns why the stages cannot have the layers, and what would do; empty if they can."""
        used = " and ".join(f"{name} {value}" for name, value in self.uneven.items())
        if used and self.pp < 2:
            return [f"{used} is of pipeline stages and needs pp >= 2"]
        if len({name.partition("_")[0] for name in self.uneven}) > 1:
            return [f"{used}: ends count as layers, or have a number of layers, not both"]
        sizes = [len(chunk) for chunk in self.chunks(n_layer)]
        if sum(sizes) == n_layer and min(sizes[1:-1], default=1) > 0:
            return []
        split = f"pp {self.pp} x vpp {self.vpp}" if self.vpp > 1 else f"pp {self.pp}"
        fits = ", ".join(str(ways) for ways in range(1, n_layer + 1) if n_layer % ways == 0)
        fits += " do"
        if n_layer % (self.pp * self.vpp) == 0:
            fits += ", without these settings"
        elif ends := uneven_ends(n_layer, self.pp, self.vpp):
            settings = ends.settings(self.vpp).items()
            fits += "; with megatron " + " and ".join(f"{name} {size}" for name, size in settings)
        used = f" with {used}" if used else ""
        return [f"{split}{used} does not divide the {n_layer} layers ({fits})"]

    def _problems_of_experts(self, config: GPTConfig) -> list[str]:
        """Returns every reason why the experts cannot be split as ep and etp say."""
        sizes = {axis: getattr(self, axis) for axis in EXPERT_AXES}
        split = {axis: size for axis, size in sizes.items() if size > 1}
        words = " x ".join(f"{axis} {size}" for axis, size in split.items())
        if not (experts := config.experts):
            return [f"{words} splits experts, and the model has none"] if split else []
        problems, ranks = [], self.tp * self.cp * self.dp
        if experts.num_experts % self.ep:
            problems.append(f"ep {self.ep} does not divide the {experts.num_experts} experts")
        if ranks % (self.ep * self.etp):
            problems.append(f"{words} does not divide the {ranks} ranks of a stage (tp x cp x dp)")
        for axis, name, size in (
            ("etp", "moe_ffn_hidden_size", experts.moe_ffn_hidden_size or config.ffn_hidden),
            (
                "tp",
                "moe_shared_expert_intermediate_size",
                experts.moe_shared_expert_intermediate_size,
            ),
        ):
            if size % getattr(self, axis):
                problems.append(f"{axis} {getattr(self, axis)} does not divide {name} {size}")
        return problems


def split_world(gpus: int, **sizes: int) -> int:
    """Returns the data-parallel size that `gpus` ranks leave after the other axes' `sizes`."""
    ranks = math.prod(sizes.values())
    if gpus % ranks:
        split = " x ".join(
            f"{axis} {size}" for axis, size in sizes.items() if size > 1 or axis not in SELDOM
        )
        raise UsageError(f"{gpus} ranks cannot be split into {split}: no multiple of {ranks}")
    return gpus // ranks


# Those of a Layout's fields that users set.
SPLIT = tuple(f.name for f in fields(Layout) if f.name not in ("dp", "n_micro"))


def shown_axes(rows: Iterable[Mapping[str, Any]]) -> list[str]:
    """Returns the axes that a table of these rows shows: one of SELDOM only where a row has more
    than 1."""
    rows = list(rows)
    return [
        axis
        for axis in (*AXES, *EXPERT_AXES)
        if axis not in SELDOM or any((row.get(axis) or 1) > 1 for row in rows)
    ]
