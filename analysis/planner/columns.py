"""Training steps that the planner predicts: a `Step` of numbers, many as `Columns` of arrays.

The time model works on columns, for a fit moves all constants at once; the bytes of memory follow
from a step, for they depend on what an engine does. `x.each(function)` takes one to the other.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import fields, make_dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from base.errors import UsageError
from models.config import GPTConfig, in_words
from parallel.config.deepspeed_json import read_deepspeed_json
from parallel.config.layout import AXES, EXPERT_AXES, OFFLOAD, RANK_AXES, RECOMPUTE, Ends, Layout

if TYPE_CHECKING:
    from parallel.config.run_spec import RunSpec

Array = np.ndarray
BUCKET = 500_000_000  # elements of DeepSpeed's reduce bucket where its JSON says nothing
NONE, SELECTIVE, FULL = range(3)  # positions in RECOMPUTE
# How Megatron-LM's Muon shares a matrix over tp (--muon-tp-mode); Adam otherwise.
MUON = ("", "duplicated", "distributed", "layer_sharded")
# Whose code runs a step: the engines of one family launch, overlap and hold alike.
FAMILIES = ("megatron", "deepspeed", "fsdp", "nanotron", "megatron_core")


class _Settings(NamedTuple):
    """The model, layout, engine and machine of a step. `_usual` has the values of those without a
    default."""

    # --- the model
    layers: int
    hidden: int
    heads: int
    head_dim: float  # of latent attention, the part of a head without positions
    kv_heads: int
    ffn: int  # width of the feed-forward
    vocab: int  # words as they are held: padded to a multiple of tp, in runs of ours of 128 tp
    seq: int  # tokens of a sequence
    dropout: bool  # backward needs its masks
    # --- the split
    shards: int  # ranks that ZeRO and FSDP2 cut one copy of the state over
    etp: int
    # --- the engine
    family: int  # position in FAMILIES
    grad_width: int  # bytes of an accumulated gradient
    slower: bool  # micro-batches take a fit's factor `engine` longer
    # Stages cut what they send over tp without sequence parallelism, too, and gather it.
    scattered: bool
    bucket: int  # elements of all buckets of DeepSpeed's that live at a time
    output_twice: bool  # attention keeps its output in two orders
    # --- the model, where it is no plain GPT
    glu: bool = False  # the feed-forward has a gate
    untied: bool = False  # the output layer is not the word embedding
    qk_norm: bool = False  # queries and keys have norms
    positions: int = 0  # rows of a learned table of positions
    rotary: bool = False  # queries and keys are turned instead
    biased: bool = False  # products have biases and norms two weights
    documents: bool = False  # attention ends with each document
    mtp: int = 0  # layers that predict further tokens
    experts: int = 0
    topk: int = 0  # experts that a token takes
    moe_ffn: int = 0  # width of an expert
    shared_ffn: int = 0  # width of the experts that all tokens take, together
    dense_layers: int = 0  # layers at the start without experts
    imbalance: float = 1.0  # tokens of the fullest rank's experts over the mean
    padded: bool = False  # experts take equally many tokens, the others are dropped
    q_lora: int = 0  # sizes of latent attention
    kv_lora: int = 0
    rope_dim: int = 0
    value_dim: int = 0
    # --- the split
    tp: int = 1
    cp: int = 1  # ranks that share a sequence; keys and values travel in a ring
    pp: int = 1
    vpp: int = 1
    dp: int = 1
    ep: int = 1
    micro_batch: int = 1
    n_micro: int = 1
    zero_stage: int = 0
    sequence_parallel: bool = False
    recompute: int = 0  # position in RECOMPUTE
    offload: int = 0  # position in OFFLOAD
    muon: int = 0  # position in MUON
    host_checkpoints: bool = False  # activation checkpoints lie in host memory
    first_layers: int = 0  # of the first and the last stage of an uneven pipeline; 0: not stated
    last_layers: int = 0
    reductions: int = 1  # of a gradient in FSDP2's step
    # --- the engine
    megatron: bool = False  # Megatron-LM with Transformer Engine, whose every tensor is known
    # Our engine of that name, whose selective recomputation repeats norms and not attention, and
    # which adds up in fp32 what experts that etp cuts give (moe_router_dtype).
    our_megatron: bool = False
    deepspeed: bool = False
    whole_gradients: bool = False  # of what stages send, only activations are scattered
    fsdp2: bool = False
    gradients_wait: bool = False  # no data-parallel message runs beside computation
    plain: bool = False  # PyTorch's own operators compute gates and the loss, not fused ones
    gelu_written_out: bool = False  # in five operators, as Hugging Face's GPT-2 has it
    width: int = 2  # bytes of a weight in compute: 2 or 4
    fp8: bool = False  # the layers' products run in fp8, or fp4
    tf32: bool = False  # fp32 is multiplied in TF32
    flash: bool = False  # attention is one kernel that never stores its s x s scores
    te_loss: bool = False  # Transformer Engine computes the loss
    fused_gradients: bool = True  # kernels add gradients up
    workspaces: int = 96  # MiB of cuBLAS: 96 on Hopper and later
    deep_ep: bool = False  # a token goes to a node, and there to a rank, once
    hybrid_ep: bool = False  # by HybridEP, whose kernels do more of the work than DeepEP's
    repeated: int = 0  # modules whose forward backward repeats, beside a policy of recomputation
    repeats_latent: bool = False  # of them the up-projections of latent attention
    repeats_mlp: bool = False  # and the feed-forward of layers without experts
    fp8_attention: bool = False
    fused_sort: bool = False  # one kernel sorts what all-to-all brings, for all experts
    # One CUDA graph is the whole step: the host launches nothing, and the products of all experts
    # are one kernel, for a graph cannot know how many tokens each gets.
    step_graph: bool = False
    ep_overlap: bool = False  # the messages of experts run beside another micro-batch
    # --- the machine
    gpus_per_node: int = 8  # GPUs that fast links join: in a rack with NVLink switches, more


class _Sizes:
    """What follows from settings, of numbers and of arrays alike."""

    __slots__ = ()

    @property
    def gpus(self) -> Any:
        return math.prod(getattr(self, axis) for axis in RANK_AXES)

    @property
    def nanotron(self) -> Any:
        """Returns whether nanotron's code runs the step."""
        return self.family == FAMILIES.index("nanotron")

    @property
    def replicas(self) -> Any:
        """Returns how many ranks hold the same parameters and add up their gradients."""
        return self.cp * self.dp

    @property
    def expert_replicas(self) -> Any:
        """Returns how many ranks of a stage hold the same experts."""
        return self.tp * self.replicas / (self.ep * self.etp)

    @property
    def tokens(self) -> Any:
        """Returns the tokens of a micro-batch on one rank, before sequence parallelism."""
        return self.micro_batch * self.seq / self.cp

    @property
    def attention_again(self) -> Any:
        """Returns whether backward computes attention again. Selective recomputation of PyTorch's
        own operators keeps what attention gave."""
        selective = (self.recompute == SELECTIVE) & (self.plain == 0) & (self.our_megatron == 0)
        return (self.recompute == FULL) | selective

    @property
    def global_batch(self) -> Any:
        return self.dp * self.micro_batch * self.n_micro


class Step(_Sizes, _Settings):
    """One training step of numbers, truth values and positions in lists."""

    __slots__ = ()

    @property
    def counted(self) -> bool:
        """Returns whether every tensor of the step is known: of Megatron core in 16 bits, with
        Transformer Engine's layers."""
        if not self.megatron or self.width != 2 or self.zero_stage > 1:
            return False
        return not (self.fp8 or self.documents or self.offload or self.mtp)

    @property
    def in_fp8(self) -> bool:
        """Returns whether Transformer Engine runs the layers' products in fp8. FSDP2's fp8 is
        torchao's, which keeps inputs and weights otherwise: its memory is counted as that of
        bf16."""
        return self.fp8 and not self.fsdp2

    @property
    def autocast(self) -> bool:
        """Returns whether fp32 weights compute in half precision, as DistributedDataParallel's
        do, and norms in fp32, as nanotron's do."""
        return self.plain and not self.deepspeed and not self.fsdp2 and self.width < 4

    @property
    def sequence_cut(self) -> int:
        """Returns how many ranks cut the sequence between the layers' products."""
        return self.tp if self.sequence_parallel else 1


_Arrays = make_dataclass("_Arrays", [(f, Array) for f in Step._fields], frozen=True)


class Columns(_Sizes, _Arrays):
    """n training steps: each setting of `Step` is an array of length n."""

    def __len__(self) -> int:
        return len(self.layers)

    def take(self, chosen: Array | list[int]) -> "Columns":
        """Returns the rows that an index or a mask chooses. A column of one value stays one
        number."""
        indices = np.arange(len(self))[chosen]
        arrays = {f.name: getattr(self, f.name) for f in fields(self)}
        for name, array in arrays.items():
            if array.strides == (0,) and len(array):  # one value was broadcast
                arrays[name] = np.broadcast_to(array[:1], len(indices))
            else:
                arrays[name] = array[indices]
        return Columns(**arrays)

    @classmethod
    def stack(cls, parts: Sequence["Columns"]) -> "Columns":
        """Returns the rows of all parts."""
        names = [f.name for f in fields(cls)]
        return cls(**{name: np.concatenate([getattr(p, name) for p in parts]) for name in names})

    @cached_property
    def rows(self) -> list[Step]:
        """Returns the rows, one by one."""
        numbers = (getattr(self, f.name).tolist() for f in fields(self))
        return [Step._make(row) for row in zip(*numbers, strict=True)]

    def each(self, function: Callable[[Step], Any]) -> Array:
        """Returns a function's number, or numbers, of every row: (n,) or (n, numbers)."""
        if function not in self._numbers:
            self._numbers[function] = np.array([function(step) for step in self.rows])
        return self._numbers[function]

    @cached_property
    def _numbers(self) -> dict[Callable, Array]:
        return {}

    @property
    def routed(self) -> Array:
        """Returns the share of layers that have experts."""
        return np.where(self.experts > 0, 1.0 - self.dense_layers / self.layers, 0.0)

    def layout(self, i: int) -> Layout:
        """Returns row i as one Layout."""
        step = self.rows[i]
        sizes = (*AXES, "micro_batch", "n_micro", "zero_stage", "sequence_parallel")
        sizes += EXPERT_AXES if step.experts else ()
        ends = Ends(step.first_layers, step.last_layers)
        return Layout(
            **{name: getattr(step, name) for name in sizes},
            **(ends.settings(step.vpp) if any(ends) else {}),
            fsdp_shard=step.shards if step.shards < step.replicas else None,
            recompute=RECOMPUTE[step.recompute],
            offload=OFFLOAD[step.offload],
        )


def _of_model(config: GPTConfig) -> dict[str, Any]:
    """Returns the columns that a model sets."""
    return {
        "layers": config.n_layer,
        "hidden": config.hidden,
        "heads": config.n_head,
        "head_dim": config.head_dim,
        "kv_heads": config.kv_heads,
        "ffn": config.ffn_hidden,
        "glu": config.gated,
        "untied": not config.tied,
        "qk_norm": config.qk_norm,
        "vocab": config.vocab_size,
        "positions": config.max_seq_len * (config.position == "learned"),
        "rotary": config.position == "rope",
        "seq": config.max_seq_len,
    } | _of_parts(config)


def _of_parts(config: GPTConfig) -> dict[str, Any]:
    """Returns the columns that experts and latent attention set; {} of a dense model. Other parts
    are refused."""
    sizes: dict[str, Any] = {}
    if unknown := [name for name in config.parts if name not in ("experts", "mla")]:
        words = in_words(unknown)
        raise UsageError(f"no formula has the memory and time of a model with {words}")
    if latent := config.mla:
        sizes = {"q_lora": latent.q_lora_rank, "kv_lora": latent.kv_lora_rank}
        sizes |= {"rope_dim": latent.qk_pos_emb_head_dim, "value_dim": latent.v_head_dim}
        sizes["head_dim"] = latent.qk_head_dim
    if experts := config.experts:
        if experts.moe_layer_freq > 1 or experts.moe_expert_capacity_factor:
            raise UsageError(
                "no formula has the bytes of moe_layer_freq above 1 or moe_expert_capacity_factor:"
                " plan with 1 and 0"
            )
        sizes |= {"experts": experts.num_experts, "topk": experts.moe_router_topk}
        sizes["moe_ffn"] = experts.moe_ffn_hidden_size or config.ffn_hidden
        sizes["shared_ffn"] = experts.moe_shared_expert_intermediate_size
        sizes["dense_layers"] = experts.first_dense
    return sizes


def _usual(values: dict[str, Array]) -> dict[str, Any]:
    """Returns the usual values of settings that follow from others."""
    engines = [values["fsdp2"].astype(bool), values["deepspeed"].astype(bool)]
    return {
        "ffn": 4 * values["hidden"],
        "kv_heads": values["heads"],
        "head_dim": values["hidden"] / values["heads"],
        "dropout": ~values["glu"].astype(bool),
        "grad_width": values["width"],
        "slower": engines[1],
        "scattered": engines[1],
        # As published runs had them: two that overlap and one to gather with, none in a pipeline.
        "bucket": np.where(values["pp"] > 1, 0, 3 * BUCKET),
        "shards": values["dp"] * values["cp"],
        "family": np.select(engines, [FAMILIES.index("fsdp"), FAMILIES.index("deepspeed")], 0),
        "etp": values["tp"],  # as in Megatron-LM
        "output_twice": values["cp"] > 1,
    }


def columns(config: GPTConfig | None = None, **stated: object) -> Columns:
    """Returns columns from scalars and arrays, broadcast together; what is not given has its usual
    value.

    `config` gives the model's sizes, of which any may be given instead. Models without a gate have
    dropout, as GPT-2 and GPT-3 had; those with one have none, as Llama.
    """
    values = Step._field_defaults | (_of_model(config) if config else {}) | stated
    values = {name: np.asarray(value) for name, value in values.items()}
    values = _usual(values) | values
    if unknown := values.keys() - set(Step._fields):
        raise TypeError(f"no such columns: {sorted(unknown)}")
    kinds = _Settings.__annotations__
    arrays = {name: np.atleast_1d(values[name]).astype(kinds[name]) for name in Step._fields}
    shape = np.broadcast_shapes(*(array.shape for array in arrays.values()))
    return Columns(**{name: np.broadcast_to(array, shape) for name, array in arrays.items()})


def columns_of(spec: "RunSpec", **stated: object) -> Columns:
    """Returns a run's settings as one row; other columns (the machine's) are given or as usual."""
    layout = spec.layout
    width = 4 if spec.precision == "fp32" else 2
    fp32_sums = spec.engine in ("megatron", "ddp")  # of gradients, in fp16, too
    json = read_deepspeed_json(Path(spec.deepspeed_config)) if spec.deepspeed_config else {}
    zero = json.get("zero_optimization", {})
    overlaps = spec.engine == "deepspeed_zero" and layout.zero_stage in (1, 2)
    overlaps = overlaps and zero.get("overlap_comm", True)  # then one fills while one is reduced
    in_turns = layout.pp > 1 and layout.zero_stage  # one in backward, another after it
    bucket = int(zero.get("reduce_bucket_size", BUCKET)) * (2 if overlaps or in_turns else 1)
    sizes = (*AXES, "micro_batch", "n_micro", "zero_stage", "sequence_parallel")
    settings = {name: getattr(layout, name) for name in sizes} | {
        "shards": layout.shards * layout.cp,
        "reductions": layout.reductions,
        "vocab": spec.padded_vocab,
        "seq": spec.seq_len,
        "recompute": RECOMPUTE.index(layout.recompute),
        "offload": OFFLOAD.index(layout.offload),
        "width": width,
        "grad_width": 4 if spec.precision in ("bf16", "fp8") or fp32_sums else width,
        "plain": spec.engine in ("ddp", "fsdp2", "deepspeed_zero")
        and layout.tp == 1
        and not spec.compile,
        "gelu_written_out": spec.implementation == "hf" and not spec.model.gated,
        "bucket": bucket,
        "documents": spec.reset_at_documents,
        "fp8": spec.precision == "fp8",
        "tf32": spec.tf32,
        "our_megatron": spec.engine == "megatron",
        "deepspeed": spec.engine.startswith("deepspeed"),
        "fsdp2": spec.engine == "fsdp2",
    }
    if spec.model.experts:
        settings |= {axis: getattr(layout, axis) for axis in EXPERT_AXES}
    if layout.uneven:
        ends = layout.ends(spec.model.n_layer)
        settings |= {"first_layers": ends.first, "last_layers": ends.last}
    return columns(spec.model, **settings | stated)
