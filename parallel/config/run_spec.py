"""A run, fully specified: every setting once, with its help text, its default and its bounds.

`RunSpec` is what a study file's tables and the command line's flags both become (settings.py).
Torch-free.
"""

from dataclasses import asdict, dataclass, fields, replace
from functools import cached_property
from typing import Any

from base.bounds import Bounds, Text, key
from models.config import (
    ACTIVATIONS,
    COUNT,
    FFN,
    LAYERS,
    MAYBE_COUNT,
    NORMS,
    PARTS,
    POSITIONS,
    SIZE,
    VOCAB_MULTIPLE,
    WIDTH,
    Experts,
    GPTConfig,
    preset,
)
from models.gpus import lacking
from parallel.config.axes import AXES, EXPERT_AXES, MODEL_AXES, SET_AXES, UNEVEN
from parallel.config.engine_abilities import ENGINES
from parallel.config.layout import OFFLOAD, RECOMPUTE, Layout, split_world

PRECISIONS = ("fp32", "bf16", "fp16", "fp8")
KERNELS = ("auto", "te", "torch")
FP8_RECIPES = ("delayed", "tensorwise")
ROUTING = NATURAL, FORCED = "natural", "forced"  # see RunSpec.routing

# Far beyond any run. A number outside is refused before it can overflow, hang or fill the memory.
_RANKS, _STEPS = Bounds(1, 10**6), Bounds(1, 10**9)
_MAYBE_STEPS = Bounds(0, 10**9)  # 0: never
_SECONDS = Bounds(0, 30 * 86400, above=True)
_RATE = Bounds(0, 100)
_STEPS_TRACED = Text(r"\d{1,9}(-\d{1,9})?", "FIRST-LAST or one number")


# What decides what is computed, not how it is split.
TRAINING = (
    "precision", "seq_len", "steps", "seed", "lr", "min_lr", "warmup_steps", "lr_schedule",
    "weight_decay", "beta1", "beta2", "adam_eps", "clip_grad",
)  # fmt: skip
# The settings that the model and the split are made of, under the same names.
MODEL = tuple(f.name for f in fields(GPTConfig) if f.name not in PARTS)
_SPLIT = (
    *SET_AXES,
    *EXPERT_AXES,
    "micro_batch",
    "zero_stage",
    "fsdp_shard",
    "recompute",
    "offload",
)
_SPLIT += ("reduce_each_micro_batch", *UNEVEN)
# A dense model's facts do not mention them.
_OF_EXPERTS = ("experts", *EXPERT_AXES, "moe_token_dispatcher_type")
_OF_EXPERTS += ("moe_router_force_load_balancing", "moe_expert_capacity_factor")
DISPATCHERS = ("alltoall", "allgather")
_TAGS = dict(zip(UNEVEN, ("embedding-counts", "loss-counts", "first{}", "last{}"), strict=True))


@dataclass(frozen=True)
class RunSpec:
    """One run. Build it with `resolve`, which fills in and checks; fields are the flags' names."""

    engine: str = key("ddp", "what trains", tuple(ENGINES))
    # the model
    preset: str = key("tiny", "model sizes by name; without it, --load of weights takes theirs")
    n_layer: int | None = key(None, "transformer blocks", LAYERS)
    hidden: int | None = key(None, "hidden size", WIDTH)
    n_head: int | None = key(None, "attention heads", COUNT)
    n_kv_head: int | None = key(None, "heads of keys and values; 0: n_head", MAYBE_COUNT)
    kv_channels: int | None = key(None, "size of a head; 0: hidden / n_head", MAYBE_COUNT)
    ffn_hidden: int | None = key(
        None, "feed-forward size; 0: 4 x hidden, with swiglu 8/3 x hidden", FFN
    )
    vocab_size: int | None = key(None, "token ids; default: the preset's, or the data's", SIZE)
    vocab_multiple: int = key(
        VOCAB_MULTIPLE, "masked ids fill the vocabulary to a multiple of this x tp", COUNT
    )
    max_seq_len: int | None = key(None, "positions: the longest sequence", SIZE)
    position: str | None = key(None, "how positions enter the model", POSITIONS)
    rope_theta: float | None = key(None, "base of the rotary wavelengths", Bounds(1, 10**12))
    rope_scaling: float | None = key(None, "Llama 3.1's stretching of them", Bounds(1, 10**4))
    norm: str | None = key(None, "the norm before each part of a block", NORMS)
    norm_eps: float | None = key(None, "its epsilon", Bounds(0, 1, above=True))
    qk_norm: bool | None = key(None, "norm each head's query and key, as in Qwen3")
    activation: str | None = key(None, "of the feed-forward; swiglu has a gate", ACTIVATIONS)
    tied: bool | None = key(None, "the output layer is the word embedding")
    bias: bool | None = key(None, "linear layers have biases")
    experts: Experts | None = key(
        None, 'JSON: {"num_experts": 8, "moe_router_topk": 2}, names as in models.config.Experts'
    )
    implementation: str = key("gpt", "whose model code: ours or Hugging Face's", ("gpt", "hf"))
    # the split
    gpus: int = key(1, "ranks, one per GPU; the launcher's world size where there is one", _RANKS)
    tp: int = key(1, AXES["tp"], _RANKS)
    cp: int = key(1, f"{AXES['cp']}: ranks that share a sequence", _RANKS)
    pp: int = key(1, AXES["pp"], _RANKS)
    vpp: int = key(1, f"{AXES['vpp']}: above 1, interleaved 1F1B", Bounds(1, 10**4))
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
    ep: int = key(1, f"{EXPERT_AXES['ep']}: of the experts each rank has 1 / ep", _RANKS)
    etp: int = key(1, f"{EXPERT_AXES['etp']}; their dp is tp x cp x dp / (ep x etp)", _RANKS)
    moe_token_dispatcher_type: str = key(DISPATCHERS[0], "how tokens get to experts", DISPATCHERS)
    sequence_parallel: bool = key(False, "split norms and residuals over tp ranks")
    zero_stage: int = key(
        0, "ZeRO stage; 1 is megatron's distributed optimizer; fsdp2 has 2 and 3", Bounds(0, 3)
    )
    fsdp_shard: int | None = key(
        None, "fsdp2's hybrid sharding: dp ranks that share one copy of the state", _RANKS
    )
    reduce_each_micro_batch: bool | None = key(
        None, "fsdp2: reduce gradients with every micro-batch (default: with ZeRO stage 3 alone)"
    )
    offload: str = key("none", "keep in host memory: optimizer state, or all", OFFLOAD)
    recompute: str = key("none", "activations to drop and recompute", RECOMPUTE)
    micro_batch: int = key(1, "sequences per micro-batch and dp rank", Bounds(1, 10**6))
    global_batch: int | None = key(None, "sequences per optimizer step, all ranks", SIZE)
    grad_accum: int | None = key(None, "micro-batches per step; or give global_batch", SIZE)
    moe_router_force_load_balancing: bool = key(
        False, "experts: tokens go to them by turns or at random, for timing alone"
    )
    moe_expert_capacity_factor: float | None = key(
        None, "experts: tokens that each takes, over its even share; 0 drops none", Bounds(0, 2**16)
    )
    # the training
    seq_len: int | None = key(None, "tokens per sequence (the model's positions)", SIZE)
    steps: int = key(20, "optimizer steps, never micro-steps", _STEPS)
    epochs: int | None = key(None, "train so many whole passes' worth instead", Bounds(1, 10**6))
    train_tokens: int | None = key(None, "a budget of tokens instead, all ranks", Bounds(1, 10**18))
    precision: str = key("fp32", "fp8: bf16, with the layers' GEMMs in fp8", PRECISIONS)
    fp8_recipe: str = key(
        "delayed", "scale by the largest value seen before, or by the tensor's own", FP8_RECIPES
    )
    lr: float = key(3e-4, "peak learning rate", Bounds(0, 100, above=True))
    min_lr: float = key(3e-5, "learning rate at the end of the cosine", _RATE)
    warmup_steps: int = key(0, "steps of linear warm-up to lr", _MAYBE_STEPS)
    lr_schedule: str = key("cosine", "after the warm-up", ("cosine", "constant"))
    weight_decay: float = key(0.1, "AdamW's, on matrices only: not on biases and norms", _RATE)
    beta1: float = key(0.9, "AdamW's first-moment decay", Bounds(0, 1, below=True))
    beta2: float = key(0.95, "AdamW's second-moment decay", Bounds(0, 1, below=True))
    adam_eps: float = key(1e-8, "AdamW's epsilon", Bounds(0, 1))
    clip_grad: float = key(1.0, "largest gradient norm; 0 switches clipping off", Bounds(0, 10**9))
    seed: int = key(1234, "of weights and data order", Bounds(0, 2**31 - 1))
    # the data
    data: str = key("data/stdlib", "folder of token files, a nanoGPT .bin or a megatron .bin/.idx")
    reset_at_documents: bool = key(
        False, "start positions again at each document's end, and let no attention cross it"
    )
    end_of_text: int | None = key(
        None, "the token id that ends a document (default: the data's)", Bounds(0, 2**24)
    )
    eval_interval: int = key(0, "steps between validations; 0: once, at the end", _MAYBE_STEPS)
    eval_steps: int = key(2, "global batches in a validation; 0: never validate", Bounds(0, 10**6))
    # checkpoints
    save_interval: int = key(
        0, "steps between checkpoints, also one at the end and at a signal; 0: none", _MAYBE_STEPS
    )
    load: str | None = key(None, "a checkpoint or folder of them; or weights, also Hugging Face's")
    resume: bool = key(True, "go on where a stopped attempt of this run left a checkpoint")
    keep_last: int = key(2, "newest checkpoints to keep; 0: all", _MAYBE_STEPS)
    keep_every: int = key(0, "keep those whose step this divides, too; 0: none", _MAYBE_STEPS)
    async_save: bool | None = key(
        None, "train on while a copy of the state is being written (default: on GPUs alone)"
    )
    save_grace_s: float = key(25.0, "seconds from SIGTERM in which to save", _SECONDS)
    # the machine
    device: str = key("auto", "auto is cuda where there is one", ("auto", "cpu", "cuda"))
    kernels: str = key("auto", "auto: Transformer Engine where it works, else PyTorch", KERNELS)
    tf32: bool = key(False, "GEMMs of fp32 numbers in TF32; parity of fp32 is then lost")
    deterministic: bool = key(False, "only operations that give the same bits every time (slower)")
    compile: bool = key(False, "torch.compile the model (ddp) or each block (fsdp2)")
    te_loss: bool = key(False, "megatron: Transformer Engine's loss, which keeps no fp32 logits")
    tp_overlap: bool = key(False, "megatron: overlap tp's messages with GEMMs by user buffers")
    cuda_graphs: bool = key(False, "megatron: capture each layer once, start it as one kernel")
    threads: int = key(1, "CPU threads per rank", Bounds(1, 1024))
    deepspeed_config: str | None = key(None, "DeepSpeed JSON; other settings override")
    profile_steps: str | None = key(
        None, "FIRST-LAST or one: the steps that PyTorch's profiler traces on rank 0", _STEPS_TRACED
    )
    breakdown: bool = key(False, "where each rank's time goes, per iteration line (breakdown/)")
    log_interval: int = key(1, "steps between iteration lines", _STEPS)
    timeout_s: float = key(600.0, "seconds a collective may wait before the run fails", _SECONDS)
    hang_s: float | None = key(
        None, "seconds without progress that end the run; default: half of timeout_s", _SECONDS
    )

    @cached_property
    def model(self) -> GPTConfig:
        sizes = {name: getattr(self, name) for name in (*MODEL, "experts")}
        return preset(self.preset, **sizes)

    @property
    def trained(self) -> GPTConfig:
        """The model, with the run's capacity of its experts."""
        of, factor = self.model.experts, self.moe_expert_capacity_factor
        if of is None or factor is None:
            return self.model
        return replace(self.model, experts=replace(of, moe_expert_capacity_factor=factor))

    @property
    def padded_vocab(self) -> int:
        """Rows of the word embedding, over all tp ranks. Hugging Face's classes are not padded."""
        if self.implementation == "hf":
            return self.model.vocab_size
        return self.model.padded_vocab(self.tp, self.vocab_multiple)

    @property
    def fuses_loss(self) -> bool:
        """Whether megatron-core's layers take its fused cross-entropy. That rounds its gradient to
        bf16, whatever the logits are, and Megatron-LM says that it is not deterministic."""
        return self.precision in ("bf16", "fp8") and not self.deterministic

    @property
    def dp(self) -> int:
        """The data-parallel size. Raises: UsageError: the split does not divide the ranks."""
        return split_world(self.gpus, **{axis: getattr(self, axis) for axis in MODEL_AXES})

    @cached_property
    def layout(self) -> Layout:
        assert self.grad_accum is not None, "resolve() fills in grad_accum"
        return Layout(
            dp=self.dp,
            n_micro=self.grad_accum,
            sequence_parallel=self.sequence_parallel,
            **{name: getattr(self, name) for name in _SPLIT},
        )

    @property
    def name(self) -> str:
        """What distinguishes the run's split, e.g. `megatron-tp2-pp2-dp2`: never stated twice."""
        return self.split_name(self.layout.dp)

    def split_name(self, dp: int) -> str:
        """The name of the split with `dp` in it; with dp 1 it does not depend on the GPUs."""
        sizes = {axis: getattr(self, axis) for axis in (*SET_AXES, *EXPERT_AXES)} | {"dp": dp}
        parts = [self.engine.replace("_", "-")]
        parts += [f"{axis}{size}" for axis, size in sizes.items() if size > 1]
        parts += [_TAGS[name].format(n) for name in UNEVEN if (n := getattr(self, name))]
        if self.sequence_parallel:
            parts.append("sp")
        if self.moe_token_dispatcher_type != DISPATCHERS[0]:
            parts.append(self.moe_token_dispatcher_type)
        if self.zero_stage or self.engine == "deepspeed_zero":
            parts.append(f"zero{self.zero_stage}")
        if self.fsdp_shard:
            parts.append(f"shard{self.fsdp_shard}")
        if self.offload != "none":
            parts.append(f"offload-{self.offload}")
        if self.recompute != "none":
            parts.append(f"recompute-{self.recompute}")
        if self.implementation != "gpt":
            parts.append(self.implementation)
        if self.moe_router_force_load_balancing:
            parts.append(FORCED)
        return "-".join(parts)

    @property
    def routing(self) -> str | None:
        """How tokens get to experts: "natural", by the router's scores, or "forced"."""
        if not self.model.experts:
            return None
        return FORCED if self.moe_router_force_load_balancing else NATURAL

    @cached_property
    def te_alone(self) -> str:
        """What of the run Transformer Engine alone can do, in words; "" where nothing."""
        asked = {f"cp {self.cp}": self.cp > 1, "precision fp8": self.precision == "fp8"}
        asked |= {name: getattr(self, name) for name in ("te_loss", "tp_overlap")}
        asked |= {"recompute selective": self.computes_norms_again}
        return " and ".join(what for what, is_so in asked.items() if is_so)

    @property
    def computes_norms_again(self) -> bool:
        """Whether backward does, for which megatron-core needs Transformer Engine."""
        return self.engine == "megatron" and self.recompute == "selective"

    @property
    def megatron_layers(self) -> bool:
        """Whether the model is made of megatron-core's layers, and the ranks of its groups."""
        return self.tp > 1 or self.engine in ("megatron", "deepspeed_pipe")

    @property
    def needing_a_gpu(self) -> str:
        """What of the run a machine without a GPU cannot do, in words; "" where nothing."""
        asked = {
            "device cuda": self.device == "cuda",
            self.te_alone: bool(self.te_alone),
            "cuda_graphs": self.cuda_graphs,
            "tf32": self.tf32,
            f"precision {self.precision}": self.precision in lacking(self.formats, None),
            "kernels te": self.kernels == "te",
        }
        return next((what for what, is_so in asked.items() if is_so), "")

    @property
    def gemm_precision(self) -> str:
        return gemm_precision(self.precision, self.tf32)

    @property
    def formats(self) -> tuple[str, ...]:
        """The number formats that a GPU must have."""
        return self.precision, self.gemm_precision

    @property
    def tokens_per_step(self) -> int:
        """Tokens of one optimizer step over all ranks."""
        return self.layout.global_batch * self.seq_len

    @property
    def hang_after_s(self) -> float:
        """Seconds without progress that the watchdog allows."""
        return self.timeout_s / 2 if self.hang_s is None else self.hang_s

    @property
    def work(self) -> dict[str, int]:
        """The fixed work, counted in each unit so that none is taken for another."""
        return {
            "optimizer_steps": self.steps,
            "micro_steps": self.steps * self.layout.n_micro,
            "tokens_per_optimizer_step": self.tokens_per_step,
            "tokens": self.steps * self.tokens_per_step,
        }

    def value(self, name: str) -> Any:
        """Returns the value of a setting, by the name that users give it."""
        return getattr(self, name)

    def asks_for(self, name: str) -> bool:
        """Whether a setting has another value than its default."""
        return self.value(name) != DEFAULTS[name]

    @property
    def profiled_steps(self) -> range:
        """The steps, from 1, that torch's profiler records; none where that is not asked for."""
        if self.profile_steps is None:
            return range(0)
        first, dash, last = self.profile_steps.partition("-")
        return range(int(first), int(last if dash else first) + 1)

    def settings(self) -> dict[str, Any]:
        """All fields as plain data, for run.json. A dense model's has no word of experts, and one
        of equal stages none of uneven ones."""
        silent = set() if self.model.experts else {*_OF_EXPERTS}
        silent |= {name for name in UNEVEN if not getattr(self, name)}
        values = {name: getattr(self, name) for name in DEFAULTS if name not in silent}
        return values | ({"experts": asdict(self.experts)} if self.experts else {})


def gemm_precision(precision: str, tf32: bool | None) -> str:
    """The number format of a run's GEMMs, which names the GPU's peak."""
    return "tf32" if tf32 and precision == "fp32" else precision


DEFAULTS: dict[str, Any] = {f.name: f.default for f in fields(RunSpec)}
# The bounds of the settings that are numbers.
BOUNDS: dict[str, Bounds] = {
    f.name: f.metadata["allowed"]
    for f in fields(RunSpec)
    if isinstance(f.metadata["allowed"], Bounds)
}
