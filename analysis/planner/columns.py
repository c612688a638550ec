"""Layouts as columns: many ways to split a step, each setting one numpy array.

The planner and the models of time and memory work on these.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from base.errors import UsageError
from models.config import GPTConfig, in_words
from parallel.config.axes import AXES, EXPERT_AXES, RANK_AXES
from parallel.config.deepspeed_json import read_deepspeed_json
from parallel.config.layout import OFFLOAD, RECOMPUTE, Ends, Layout

if TYPE_CHECKING:
    from parallel.config.run_spec import RunSpec

Array = np.ndarray
BUCKET = 500_000_000  # elements of DeepSpeed's reduce bucket where its JSON says nothing
# Whose code runs a step: the engines of one family launch, overlap and hold alike.
FAMILIES = ("megatron", "deepspeed", "fsdp", "nanotron", "megatron_core")
FLAGS = ("glu", "untied", "qk_norm", "sequence_parallel", "fp8", "tf32", "flash")
FLAGS += ("deepspeed", "fsdp2", "rotary", "plain", "gelu_written_out")
FLAGS += ("host_checkpoints", "documents", "te_loss", "megatron", "biased")
FLAGS += ("deep_ep", "hybrid_ep", "ep_overlap", "padded")
EXPERTS = ("experts", "topk", "moe_ffn", "shared_ffn", "dense_layers")
EXPERTS += ("q_lora", "kv_lora", "rope_dim", "value_dim", "mtp")


@dataclass(frozen=True)
class Columns:
    """Models, layouts and machines of n training steps; every field is an array of length n.

    glu: the feed-forward has a gate. untied: the output layer is not the word embedding. qk_norm:
    queries and keys have norms. positions: rows of a learned table of positions. rotary: queries
    and keys are turned instead. dropout: backward needs its masks. recompute and offload count as
    their position in `RECOMPUTE` and `OFFLOAD`. width is the bytes of a weight in compute (2 or 4),
    grad_width those of an accumulated gradient. fp8: the layers' GEMMs run in fp8 (or fp4). tf32:
    fp32 is multiplied in TF32. flash: attention is one kernel that never stores its s x s scores.
    deepspeed: DeepSpeed's engine runs the step, not Megatron's or PyTorch's; fsdp2: PyTorch's FSDP2
    does. plain: PyTorch's own operators compute gates and the loss, not Megatron's fused ones.
    gelu_written_out: in five operators, as Hugging Face's GPT-2 has it. bucket: elements of all
    buckets of DeepSpeed's that live at a time. host_checkpoints: activation checkpoints lie in host
    memory. documents: attention ends with each. te_loss: Transformer Engine computes the loss.
    slower: the micro-batches take a fit's factor `engine` longer (by default DeepSpeed's). cp ranks
    share a sequence; keys and values travel in a ring. shards: ranks that ZeRO and FSDP2 cut one
    copy of the state over (by default dp x cp). reductions: of a gradient in FSDP2's step. family:
    the position in `FAMILIES` (by default as the flags say). gpus_per_node: GPUs that fast links
    join; in a rack with NVLink switches more than a node's. first_layers, last_layers: of the first
    and the last stage of an uneven pipeline; 0 where nothing states them.

    megatron: Megatron-LM runs the step, whose bytes megatron_memory.py counts. A token takes topk
    experts of width moe_ffn and those of all, together shared_ffn wide; dense_layers: at the start,
    without. deep_ep: a token goes to a node, and there to a rank, once; hybrid_ep: by HybridEP,
    whose kernels do more of the work than DeepEP's. padded: experts take equally many tokens, the
    others are dropped. ep_overlap: the messages of experts run beside another micro-batch.
    imbalance: tokens of the fullest rank's experts over the mean. mtp: layers that predict further
    tokens.
    q_lora, kv_lora, rope_dim, value_dim: of latent attention. biased: products have biases
    and norms two weights. fused_gradients: kernels add gradients up. output_twice: attention keeps
    its output in two orders. workspaces: MiB of cuBLAS, 96 on Hopper and later.
    """

    layers: Array
    hidden: Array
    heads: Array
    head_dim: Array
    kv_heads: Array
    ffn: Array
    glu: Array
    untied: Array
    qk_norm: Array
    dropout: Array
    vocab: Array
    positions: Array
    seq: Array
    tp: Array
    cp: Array
    pp: Array
    vpp: Array
    dp: Array
    micro_batch: Array
    n_micro: Array
    zero_stage: Array
    recompute: Array
    sequence_parallel: Array
    offload: Array
    width: Array
    grad_width: Array
    fp8: Array
    tf32: Array
    flash: Array
    gpus_per_node: Array
    deepspeed: Array
    fsdp2: Array
    rotary: Array
    plain: Array
    gelu_written_out: Array
    bucket: Array
    host_checkpoints: Array
    documents: Array
    te_loss: Array
    shards: Array
    reductions: Array
    slower: Array
    family: Array
    megatron: Array
    experts: Array
    topk: Array
    moe_ffn: Array
    shared_ffn: Array
    dense_layers: Array
    ep: Array
    etp: Array
    q_lora: Array
    kv_lora: Array
    rope_dim: Array
    value_dim: Array
    mtp: Array
    deep_ep: Array
    hybrid_ep: Array
    ep_overlap: Array
    padded: Array
    imbalance: Array
    biased: Array
    fused_gradients: Array
    output_twice: Array
    workspaces: Array
    first_layers: Array
    last_layers: Array

    def __len__(self) -> int:
        return len(self.layers)

    def take(self, chosen: Array | list[int]) -> "Columns":
        """The rows that an index or a mask chooses. A column of one value stays one number."""
        at = np.arange(len(self))[chosen]
        arrays = {f.name: getattr(self, f.name) for f in fields(self)}
        one = {name: np.broadcast_to(a[:1], len(at)) for name, a in arrays.items() if _is_one(a)}
        return Columns(**{name: one[name] if name in one else a[at] for name, a in arrays.items()})

    @classmethod
    def stack(cls, parts: Sequence["Columns"]) -> "Columns":
        """The rows of all parts."""
        names = [f.name for f in fields(cls)]
        return cls(**{name: np.concatenate([getattr(p, name) for p in parts]) for name in names})

    @property
    def gpus(self) -> Array:
        return math.prod(getattr(self, axis) for axis in RANK_AXES)

    @property
    def nanotron(self) -> Array:
        """Whether nanotron's code runs the step."""
        return self.family == FAMILIES.index("nanotron")

    @property
    def autocast(self) -> Array:
        """Whether fp32 weights compute in half precision, as DistributedDataParallel's do, and
        norms in fp32, as nanotron's do."""
        return self.plain & ~self.deepspeed & ~self.fsdp2 & (self.width < 4)

    @property
    def replicas(self) -> Array:
        """Ranks that hold the same parameters and add up their gradients."""
        return self.cp * self.dp

    @property
    def expert_replicas(self) -> Array:
        """Ranks of a stage that hold the same experts."""
        return self.tp * self.replicas / (self.ep * self.etp)

    @property
    def routed(self) -> Array:
        """The share of layers that have experts."""
        return np.where(self.experts > 0, 1.0 - self.dense_layers / self.layers, 0.0)

    @property
    def tokens(self) -> Array:
        """Tokens of a micro-batch on one rank, before sequence parallelism."""
        return self.micro_batch * self.seq / self.cp

    @property
    def global_batch(self) -> Array:
        return self.dp * self.micro_batch * self.n_micro

    def layout(self, i: int) -> Layout:
        """Row i as one Layout."""
        sizes = (*AXES, "micro_batch", "n_micro", "zero_stage")
        ends = Ends(int(self.first_layers[i]), int(self.last_layers[i]))
        return Layout(
            **{name: int(getattr(self, name)[i]) for name in sizes},
            **(ends.settings(int(self.vpp[i])) if any(ends) else {}),
            fsdp_shard=int(self.shards[i]) if self.shards[i] < self.replicas[i] else None,
            sequence_parallel=bool(self.sequence_parallel[i]),
            recompute=RECOMPUTE[self.recompute[i]],
            offload=OFFLOAD[self.offload[i]],
        )


def _is_one(array: Array) -> bool:
    """Whether an array is one number that was broadcast."""
    return array.strides == (0,) and len(array) > 0


def _of_model(config: GPTConfig) -> dict[str, Any]:
    """The columns that a model sets."""
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
    """The columns that experts and latent attention set; {} of a dense model.

    Raises:
        UsageError: a part, or a setting of experts, that no formula counts.
    """
    sizes: dict[str, Any] = {}
    if unknown := [part for part in config.parts if part not in ("experts", "mla")]:
        parts = in_words(unknown)
        raise UsageError(f"no formula has the memory and time of a model with {parts}")
    if latent := config.mla:
        sizes = {"q_lora": latent.q_lora_rank, "kv_lora": latent.kv_lora_rank}
        sizes |= {"rope_dim": latent.qk_pos_emb_head_dim, "value_dim": latent.v_head_dim}
        sizes["head_dim"] = latent.qk_head_dim
    if of := config.experts:
        if of.moe_layer_freq > 1 or of.moe_expert_capacity_factor:
            raise UsageError(
                "no formula has the bytes of moe_layer_freq above 1 or moe_expert_capacity_factor:"
                " plan with 1 and 0"
            )
        sizes |= {"experts": of.num_experts, "topk": of.moe_router_topk}
        sizes["moe_ffn"] = of.moe_ffn_hidden_size or config.ffn_hidden
        sizes["shared_ffn"] = of.moe_shared_expert_intermediate_size
        sizes["dense_layers"] = of.first_dense
    return sizes


def _derived(values: dict[str, Array]) -> dict[str, Array]:
    """The usual values of columns that follow from others."""
    engines = [values["fsdp2"].astype(bool), values["deepspeed"].astype(bool)]
    return {
        "ffn": 4 * values["hidden"],
        "kv_heads": values["heads"],
        "head_dim": values["hidden"] / values["heads"],
        "dropout": ~values["glu"].astype(bool),
        "grad_width": values["width"],
        "slower": engines[1],
        # As published runs had them: two that overlap and one to gather with, none in a pipeline.
        "bucket": np.where(values["pp"] > 1, 0, 3 * BUCKET),
        "shards": values["dp"] * values["cp"],
        "family": np.select(engines, [FAMILIES.index("fsdp"), FAMILIES.index("deepspeed")], 0),
        "etp": values["tp"],  # as in Megatron-LM
        "output_twice": values["cp"] > 1,
        "fused_gradients": np.array(True),
        "workspaces": np.array(96),
    }


def columns(config: GPTConfig | None = None, **stated: object) -> Columns:
    """Columns from scalars and arrays, broadcast together; what is not given has its usual value.

    `config` gives the model's sizes, of which any may be given instead. Models without a gate have
    dropout, as GPT-2 and GPT-3 had; those with one have none, as Llama.

    Raises:
        UsageError: `config` has what no formula counts.
    """
    usual: dict[str, Any] = dict.fromkeys((*AXES, "micro_batch", "n_micro", "reductions"), 1)
    usual |= dict.fromkeys(("zero_stage", "recompute", "offload", "positions"), 0)
    usual |= dict.fromkeys((*EXPERTS, "first_layers", "last_layers"), 0)
    usual |= {"ep": 1, "imbalance": 1.0}
    usual |= dict.fromkeys(FLAGS, False) | {"width": 2, "gpus_per_node": 8}
    values = usual | (_of_model(config) if config else {}) | stated
    values = _derived({name: np.asarray(value) for name, value in values.items()}) | values
    names = [f.name for f in fields(Columns)]
    if unknown := set(values) - set(names):
        raise TypeError(f"no such columns: {sorted(unknown)}")
    flags = (*FLAGS, "dropout", "slower", "fused_gradients", "output_twice")
    kinds = dict.fromkeys(flags, bool) | {"head_dim": float, "imbalance": float}
    arrays = {n: np.atleast_1d(values[n]).astype(kinds.get(n, np.int64)) for n in names}
    shape = np.broadcast_shapes(*(array.shape for array in arrays.values()))
    return Columns(**{name: np.broadcast_to(array, shape) for name, array in arrays.items()})


def columns_of(spec: "RunSpec", **stated: object) -> Columns:
    """A run's settings as one row; other columns (the machine's) are given or as usual.

    Raises:
        UsageError: the model has what no formula counts.
    """
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
        "te_loss": spec.te_loss,
        "fp8": spec.precision == "fp8",
        "tf32": spec.tf32,
        "deepspeed": spec.engine.startswith("deepspeed"),
        "fsdp2": spec.engine == "fsdp2",
    }
    if spec.model.experts:
        settings |= {axis: getattr(layout, axis) for axis in EXPERT_AXES}
    if layout.uneven:
        ends = layout.ends(spec.model.n_layer)
        settings |= {"first_layers": ends.first, "last_layers": ends.last}
    return columns(spec.model, **settings | stated)
