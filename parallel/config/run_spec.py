"""A run, fully specified: every setting once, with its help text, its default and its bounds.

`RunSpec` is what a study file's tables and the command line's flags both become (resolve.py).
Torch-free.
"""

from collections.abc import Mapping
from dataclasses import Field, asdict, dataclass, field, fields, replace
from functools import cached_property
from typing import Any

from base.bounds import Bounds, Text, key
from models.config import COUNT, OVERRIDES, SIZE, VOCAB_MULTIPLE, GPTConfig, preset
from models.gpus import lacking
from parallel.config import megatron_options
from parallel.config.engine_abilities import ENGINES
from parallel.config.layout import (
    DISPATCHERS,
    EXPERT_AXES,
    FORCED,
    MODEL_AXES,
    NATURAL,
    RANKS,
    SPLIT,
    UNEVEN,
    Layout,
    split_world,
)
from parallel.config.run_names import split_name

PRECISIONS = ("fp32", "bf16", "fp16", "fp8")
KERNELS = ("auto", "te", "torch")
FP8_RECIPES = ("delayed", "tensorwise")

# Far beyond any run. A number outside is refused before it can overflow, hang or fill the memory.
_STEPS = Bounds(1, 10**9)
_MAYBE_STEPS = Bounds(0, 10**9)  # 0: never
_SECONDS = Bounds(0, 30 * 86400, above=True)
_RATE = Bounds(0, 100)
_OPTION = Text(r"[A-Za-z]\w*", "the name of an option of megatron-core")
_STEPS_TRACED = Text(r"\d{1,9}(-\d{1,9})?", "FIRST-LAST or one number")


# What decides what is computed, not how it is split.
TRAINING = (
    "precision", "seq_len", "steps", "seed", "lr", "min_lr", "warmup_steps", "lr_schedule",
    "weight_decay", "beta1", "beta2", "adam_eps", "clip_grad",
)  # fmt: skip
# A dense model's facts do not mention them.
_OF_EXPERTS = ("experts", *EXPERT_AXES, "moe_token_dispatcher_type")
_OF_EXPERTS += ("moe_router_force_load_balancing", "moe_expert_capacity_factor")


@dataclass(frozen=True)
class _Sizes:
    """The settings by which users say a layout's dp and n_micro, which follow from them."""

    gpus: int = key(1, "ranks, one per GPU; the launcher's world size where there is one", RANKS)
    global_batch: int | None = key(None, "sequences per optimizer step, all ranks", SIZE)
    grad_accum: int | None = key(None, "micro-batches per step; or give global_batch", SIZE)


@dataclass(frozen=True)
class RunSpec:
    """A run, fully specified. `resolve` and `assembled` build it from settings, and `values` gives
    them back."""

    engine: str = key("ddp", "what trains", tuple(ENGINES))
    preset: str = key("tiny", "model sizes by name; without it, --load of weights takes theirs")
    overrides: Mapping[str, Any] = field(default_factory=dict, hash=False)  # of the preset's sizes
    vocab_multiple: int = key(
        VOCAB_MULTIPLE, "masked ids fill the vocabulary to a multiple of this x tp", COUNT
    )
    implementation: str = key("gpt", "whose model code: ours or Hugging Face's", ("gpt", "hf"))
    layout: Layout = field(default_factory=Layout)
    moe_token_dispatcher_type: str = key(DISPATCHERS[0], "how tokens get to experts", DISPATCHERS)
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
    megatron: dict = key(
        {}, "an option of megatron-core's configurations by its name; may be repeated", _OPTION
    )
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
        return preset(self.preset, **self.overrides)

    @property
    def trained(self) -> GPTConfig:
        """Returns the model, with the run's capacity of its experts."""
        experts, factor = self.model.experts, self.moe_expert_capacity_factor
        if experts is None or factor is None:
            return self.model
        return replace(self.model, experts=replace(experts, moe_expert_capacity_factor=factor))

    @property
    def padded_vocab(self) -> int:
        """Returns the word embedding's rows over all tp ranks. Hugging Face's is not padded."""
        if self.implementation == "hf":
            return self.model.vocab_size
        return self.model.padded_vocab(self.layout.tp, self.vocab_multiple)

    @property
    def fuses_loss(self) -> bool:
        """Returns whether megatron-core's layers take its fused cross-entropy. It rounds its
        gradient to bf16, whatever the logits are, and is not deterministic (Megatron-LM)."""
        return self.precision in ("bf16", "fp8") and not self.deterministic

    @property
    def gpus(self) -> int:
        return self.layout.world_size

    @property
    def global_batch(self) -> int:
        return self.layout.global_batch

    @property
    def grad_accum(self) -> int:
        return self.layout.n_micro

    @property
    def name(self) -> str:
        """Returns the name of the run's split, `megatron-tp2-pp2-dp2` for example."""
        return split_name(self.values | {"dp": self.layout.dp})

    @property
    def routing(self) -> str | None:
        """Returns how tokens get to experts: "natural", by the router's scores, or "forced"."""
        if not self.model.experts:
            return None
        return FORCED if self.moe_router_force_load_balancing else NATURAL

    @cached_property
    def te_alone(self) -> str:
        """Returns the parts of the run that need Transformer Engine, in words; "" where none."""
        cp = self.layout.cp
        asked = {f"cp {cp}": cp > 1, "precision fp8": self.precision == "fp8"}
        needing = megatron_options.NEED_TRANSFORMER_ENGINE
        asked |= {f"megatron {n}": megatron_options.is_asked(self.megatron, n) for n in needing}
        asked |= {"recompute selective": self.computes_norms_again}
        return " and ".join(words for words, is_so in asked.items() if is_so)

    @property
    def computes_norms_again(self) -> bool:
        """Returns whether backward recomputes norms, through Transformer Engine alone."""
        return self.engine == "megatron" and self.layout.recompute == "selective"

    @property
    def megatron_layers(self) -> bool:
        """Returns whether layers and groups of ranks are megatron-core's."""
        return self.layout.tp > 1 or self.engine in ("megatron", "deepspeed_pipe")

    @property
    def needing_a_gpu(self) -> str:
        """Returns the first part of the run that needs a GPU, in words; "" where none does."""
        asked = {
            "device cuda": self.device == "cuda",
            self.te_alone: bool(self.te_alone),
            "a CUDA graph of megatron": megatron_options.captures_graphs(self.megatron),
            "tf32": self.tf32,
            f"precision {self.precision}": self.precision in lacking(self.formats, None),
            "kernels te": self.kernels == "te",
        }
        return next((words for words, is_so in asked.items() if is_so), "")

    @property
    def gemm_precision(self) -> str:
        return gemm_precision(self.precision, self.tf32)

    @property
    def formats(self) -> tuple[str, ...]:
        """Returns the number formats that a GPU must have."""
        return self.precision, self.gemm_precision

    @property
    def tokens_per_step(self) -> int:
        """Returns the tokens of one optimizer step over all ranks."""
        return self.layout.global_batch * self.seq_len

    @property
    def hang_after_s(self) -> float:
        """Returns the seconds without progress that the watchdog allows."""
        return self.timeout_s / 2 if self.hang_s is None else self.hang_s

    @property
    def work(self) -> dict[str, int]:
        """Returns the fixed work, counted in each unit so that none is taken for another."""
        return {
            "optimizer_steps": self.steps,
            "micro_steps": self.steps * self.layout.n_micro,
            "tokens_per_optimizer_step": self.tokens_per_step,
            "tokens": self.steps * self.tokens_per_step,
        }

    def value(self, name: str) -> Any:
        """Returns the value of a setting, by the name that users give it."""
        if name in OVERRIDES:
            return self.overrides.get(name)
        return getattr(self.layout if name in SPLIT else self, name)

    @property
    def values(self) -> dict[str, Any]:
        """Returns the value of every setting, by name."""
        return {name: self.value(name) for name in SETTINGS}

    def asks_for(self, name: str) -> bool:
        """Returns whether a setting has another value than its default."""
        return self.value(name) != DEFAULTS[name]

    @property
    def profiled_steps(self) -> range:
        """Returns the steps, from 1, that torch's profiler records; none where nobody asked."""
        if self.profile_steps is None:
            return range(0)
        first, dash, last = self.profile_steps.partition("-")
        return range(int(first), int(last if dash else first) + 1)

    def settings(self) -> dict[str, Any]:
        """Returns the settings as plain data. A dense model has none of experts, equal stages none
        of uneven ones, and only megatron has megatron's options."""
        silent = set() if self.model.experts else {*_OF_EXPERTS}
        silent |= {name for name in UNEVEN if not getattr(self.layout, name)}
        silent |= {"megatron"} if self.engine != "megatron" else set()
        values = {name: value for name, value in self.values.items() if name not in silent}
        experts = values.get("experts")
        return values | ({"experts": asdict(experts)} if experts else {})

    def as_facts(self) -> dict[str, dict[str, Any]]:
        """Returns run.json's `spec` and `layout`. Each setting stands in one of them, and a size of
        the model only where it is not the preset's."""
        elsewhere = {*IN_LAYOUT, *OVERRIDES} - self.overrides.keys()
        spec = {name: value for name, value in self.settings().items() if name not in elsewhere}
        derived = ("world_size", "global_batch", "bubble", "reductions")
        layout = self.layout.as_dict() | {name: getattr(self.layout, name) for name in derived}
        return {"spec": spec, "layout": layout}


def gemm_precision(precision: str, tf32: bool | None) -> str:
    """Returns the number format of a run's GEMMs, which names the GPU's peak."""
    return "tf32" if tf32 and precision == "fp32" else precision


def _settings() -> dict[str, Field]:
    """Returns the field that declares each setting, by name, in the order of --help."""
    model, split = ({f.name: f for f in fields(kind)} for kind in (GPTConfig, Layout))
    sizes = {f.name: f for f in fields(_Sizes)}
    parts = {
        "overrides": {name: model[name] for name in OVERRIDES},
        "layout": {"gpus": sizes.pop("gpus")} | {name: split[name] for name in SPLIT} | sizes,
    }
    settings: dict[str, Field] = {}
    for setting in fields(RunSpec):
        settings |= parts.get(setting.name, {setting.name: setting})
    return settings


SETTINGS = _settings()
# Where a size of the model is not set, it is the preset's.
DEFAULTS = {n: None if n in OVERRIDES else f.default for n, f in SETTINGS.items()}
DEFAULTS["megatron"] = {}


# The settings that run.json's `layout` states, under its names.
IN_LAYOUT = {"gpus": "world_size", "global_batch": "global_batch", "grad_accum": "n_micro"}
IN_LAYOUT |= {name: name for name in SPLIT}


def settings_of(facts: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the settings that a run.json states (see `as_facts`), or a checkpoint's manifest. An
    older one states the split in its `spec`, too."""
    spec, layout = facts.get("spec") or {}, facts.get("layout") or {}
    split = {name: layout[key] for name, key in IN_LAYOUT.items() if key in layout}
    return spec | {name: value for name, value in split.items() if name not in spec}


def assembled(settings: Mapping[str, Any]) -> RunSpec:
    """Returns the run of these settings, with defaults for those that are left out. It does not
    check whether the run can start."""
    asked = DEFAULTS | dict(settings)
    layout = Layout(
        dp=split_world(asked["gpus"], **{axis: asked[axis] for axis in MODEL_AXES}),
        n_micro=asked["grad_accum"] or 1,
        **{name: asked[name] for name in SPLIT},
    )
    overrides = {name: asked[name] for name in OVERRIDES if asked[name] is not None}
    fields_of_run = {f.name: asked[f.name] for f in fields(RunSpec) if f.name in asked}
    return RunSpec(layout=layout, overrides=overrides, **fields_of_run)
