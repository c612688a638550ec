"""A run, fully specified: every setting once, with its help text, its default and its checks.

`RunSpec` is what a study file's tables and the command line's flags both become. Values are taken
from, each overriding the one before: the defaults here, a DeepSpeed JSON, the study file, flags.
Torch-free.
"""

import argparse
import json
from dataclasses import MISSING, asdict, dataclass, field, fields
from functools import cached_property
from pathlib import Path
from typing import Any

from models.bounds import Bounds
from models.config import GPTConfig, preset
from models.errors import UsageError
from models.files import parse_json, read_text
from parallel.engines import ENGINES, inabilities
from parallel.layout import OFFLOAD, RECOMPUTE, Layout, split_world
from parallel.work import WORK, steps_of

PRECISIONS = ("fp32", "bf16", "fp16")
KERNELS = ("auto", "te", "apex", "torch")
PROFILE_MODES = ("none", "nvtx", "torch")

# Far beyond any run, and such that nothing overflows, hangs or fills the memory before it is said.
_RANKS, _STEPS = Bounds(1, 10**6), Bounds(1, 10**9)
_MAYBE_STEPS = Bounds(0, 10**9)  # 0: never
_SECONDS = Bounds(0, 30 * 86400, above=True)
_RATE = Bounds(0, 100)


def _flag(
    default: Any,
    help: str,
    allowed: tuple[str, ...] | Bounds | None = None,
    kind: type | None = None,
    alias: str | None = None,
) -> Any:
    """A dataclass field that is also a command-line flag; `allowed` are the words to choose from,
    or a number's bounds; `kind` where the default is None."""
    bounds, choices = (allowed, None) if isinstance(allowed, Bounds) else (None, allowed)
    meta = {"help": help, "choices": choices, "kind": kind or type(default), "alias": alias}
    meta["bounds"] = bounds
    return field(default=default, metadata=meta)


@dataclass(frozen=True)
class RunSpec:
    """One run. Build it with `resolve`, which fills in and checks; fields are the flags' names."""

    engine: str = _flag("ddp", "what trains", tuple(ENGINES))
    # the model
    preset: str = _flag("tiny", "model sizes by name; the size flags below override them")
    n_layer: int | None = _flag(None, "transformer blocks", Bounds(1, 10**4), int)
    hidden: int | None = _flag(None, "hidden size", Bounds(1, 2**20), int)
    n_head: int | None = _flag(None, "attention heads", Bounds(1, 2**16), int)
    ffn_hidden: int | None = _flag(None, "feed-forward size (4 x hidden)", Bounds(0, 2**22), int)
    vocab_size: int | None = _flag(
        None, "token ids; padded to a multiple of tp", Bounds(1, 2**24), int
    )
    max_seq_len: int | None = _flag(None, "learned positions", Bounds(1, 2**24), int)
    implementation: str = _flag(
        "gpt", "whose model code: ours or Hugging Face's GPT-2", ("gpt", "hf")
    )
    # the split
    gpus: int = _flag(1, "ranks, one per GPU; the launcher's world size where there is one", _RANKS)
    tp: int = _flag(1, "tensor-parallel size", _RANKS)
    pp: int = _flag(1, "pipeline-parallel size", _RANKS)
    vpp: int = _flag(
        1, "model chunks per pipeline rank: above 1, interleaved 1F1B", Bounds(1, 10**4)
    )
    sequence_parallel: bool = _flag(False, "split norms and residuals over tp ranks")
    zero_stage: int = _flag(0, "ZeRO stage; 1 is megatron's distributed optimizer", Bounds(0, 3))
    offload: str = _flag("none", "keep in host memory: optimizer state, or all", OFFLOAD)
    recompute: str = _flag("none", "activations to drop and recompute", RECOMPUTE)
    micro_batch: int = _flag(1, "sequences per micro-batch and dp rank", Bounds(1, 10**6))
    global_batch: int | None = _flag(
        None, "sequences per optimizer step, all ranks", Bounds(1, 2**24), int
    )
    grad_accum: int | None = _flag(
        None, "micro-batches per step; or give global_batch", Bounds(1, 2**24), int
    )
    # the training
    seq_len: int | None = _flag(
        None, "tokens per sequence (the model's positions)", Bounds(1, 2**24), int
    )
    steps: int = _flag(20, "optimizer steps, never micro-steps", _STEPS, alias="--max-train-steps")
    epochs: int | None = _flag(
        None, "train so many whole passes' worth instead", Bounds(1, 10**6), int
    )
    train_tokens: int | None = _flag(
        None, "a budget of tokens instead, all ranks", Bounds(1, 10**18), int
    )
    enforce_global_batch_size: bool = _flag(
        False, "refuse a run whose batch is not the global_batch that was stated anywhere"
    )
    precision: str = _flag("fp32", "fp16 needs a GPU and scales the loss dynamically", PRECISIONS)
    lr: float = _flag(3e-4, "peak learning rate", Bounds(0, 100, above=True))
    min_lr: float = _flag(3e-5, "learning rate at the end of the cosine", _RATE)
    warmup_steps: int = _flag(0, "steps of linear warm-up to lr", _MAYBE_STEPS)
    lr_schedule: str = _flag("cosine", "after the warm-up", ("cosine", "constant"))
    weight_decay: float = _flag(0.1, "AdamW's, on matrices only: not on biases and norms", _RATE)
    beta1: float = _flag(0.9, "AdamW's first-moment decay", Bounds(0, 1, below=True))
    beta2: float = _flag(0.95, "AdamW's second-moment decay", Bounds(0, 1, below=True))
    adam_eps: float = _flag(1e-8, "AdamW's epsilon", Bounds(0, 1))
    clip_grad: float = _flag(
        1.0, "largest gradient norm; 0 switches clipping off", Bounds(0, 10**9)
    )
    seed: int = _flag(1234, "of weights and data order", Bounds(0, 2**31 - 1))
    # the data
    data: str = _flag(
        "data/stdlib", "folder of token files, a nanoGPT .bin or a megatron .bin/.idx"
    )
    eval_interval: int = _flag(0, "steps between validations; 0: once, at the end", _MAYBE_STEPS)
    eval_steps: int = _flag(
        2, "global batches in a validation; 0: never validate", Bounds(0, 10**6)
    )
    # checkpoints
    save_interval: int = _flag(
        0,
        "steps between checkpoints, and one at the end and at a signal; 0: save nothing",
        _MAYBE_STEPS,
    )
    save: str | None = _flag(None, "folder for them (default: <run folder>/checkpoints)", kind=str)
    load: str | None = _flag(
        None,
        "go on from this checkpoint, or from a folder's newest; or start from weights alone",
        kind=str,
    )
    load_previous: bool = _flag(False, "where a checkpoint is damaged, take the one before")
    resume: bool = _flag(True, "go on where a stopped attempt of this run left a checkpoint")
    keep_last: int = _flag(2, "newest checkpoints to keep; 0: all", _MAYBE_STEPS)
    keep_every: int = _flag(0, "keep those whose step this divides, too; 0: none", _MAYBE_STEPS)
    export_weights: int = _flag(0, "steps between bf16 weights-only exports; 0: none", _MAYBE_STEPS)
    async_save: bool = _flag(False, "train on while a copy of the state is being written")
    save_grace_s: float = _flag(
        25.0, "seconds from SIGTERM in which to save before giving up", _SECONDS
    )
    # the machine
    device: str = _flag("auto", "auto is cuda where there is one", ("auto", "cpu", "cuda"))
    kernels: str = _flag("auto", "auto: Transformer Engine, apex, PyTorch, in that order", KERNELS)
    compile: bool = _flag(False, "torch.compile the model (ddp; on CPU it needs a C++ compiler)")
    threads: int = _flag(1, "CPU threads per rank", Bounds(1, 1024))
    deepspeed_config: str | None = _flag(None, "DeepSpeed JSON; other settings override", kind=str)
    profile_mode: str = _flag(
        "none", "nvtx: ranges for nsys; torch: ranges and a Chrome trace", PROFILE_MODES
    )
    profile_steps: str = _flag("3-5", "the steps that torch's trace holds, FIRST-LAST or one")
    profile_ranks: str = _flag("0", "the ranks that write one: all, or numbers with commas")
    breakdown: bool = _flag(False, "where each rank's time goes, per iteration line (breakdown/)")
    log_interval: int = _flag(1, "steps between iteration lines", _STEPS)
    timeout_s: float = _flag(600.0, "seconds a collective may wait before the run fails", _SECONDS)
    hang_s: float | None = _flag(
        None,
        "seconds without progress after which the run ends and names the rank that hangs"
        " (default: half of timeout_s)",
        _SECONDS,
        float,
    )

    @cached_property
    def model(self) -> GPTConfig:
        return preset(
            self.preset,
            n_layer=self.n_layer,
            hidden=self.hidden,
            n_head=self.n_head,
            ffn_hidden=self.ffn_hidden,
            vocab_size=self.vocab_size,
            max_seq_len=self.max_seq_len,
        )

    @cached_property
    def layout(self) -> Layout:
        assert self.grad_accum is not None, "resolve() fills in grad_accum"
        return Layout(
            dp=split_world(self.gpus, self.tp, self.pp),
            tp=self.tp,
            pp=self.pp,
            vpp=self.vpp,
            micro_batch=self.micro_batch,
            n_micro=self.grad_accum,
            sequence_parallel=self.sequence_parallel,
            zero_stage=self.zero_stage,
            recompute=self.recompute,
            offload=self.offload,
        )

    @property
    def name(self) -> str:
        """What distinguishes the run's split, e.g. `megatron-tp2-pp2-dp2`: never stated twice."""
        layout = self.layout
        parts = [self.engine.replace("_", "-")]
        parts += [
            f"{axis}{n}" for axis in ("tp", "pp", "vpp", "dp") if (n := getattr(layout, axis)) > 1
        ]
        if layout.sequence_parallel:
            parts.append("sp")
        if layout.zero_stage or self.engine == "deepspeed_zero":
            parts.append(f"zero{layout.zero_stage}")
        if layout.offload != "none":
            parts.append(f"offload-{layout.offload}")
        if layout.recompute != "none":
            parts.append(f"recompute-{layout.recompute}")
        if self.implementation != "gpt":
            parts.append(self.implementation)
        return "-".join(parts)

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

    def problems(self) -> list[str]:
        """Every reason this run cannot start, with the numbers."""
        if found := [
            bad for f in fields(self) if (bad := out_of_bounds(f.name, getattr(self, f.name)))
        ]:
            return found  # a model or a layout of such sizes is not looked at
        found = self.layout.problems(self.model, self.seq_len) + inabilities(self)
        if self.precision == "fp16" and self.device == "cpu":
            found.append("fp16 needs a GPU; on CPU use fp32 or bf16")
        if self.export_weights and not self.save_interval:
            found.append("export_weights are taken from checkpoints: give save_interval too")
        if self.export_weights and self.save_interval and self.export_weights % self.save_interval:
            found.append(
                f"export_weights {self.export_weights} must be a multiple of"
                f" save_interval {self.save_interval}"
            )
        if self.export_weights and self.implementation == "hf":
            found.append("export_weights are of our GPT, not of implementation hf")
        if self.min_lr > self.lr:
            found.append(f"min_lr {self.min_lr:g} exceeds lr {self.lr:g}")
        if self.kernels in ("te", "apex") and self.device == "cpu":
            found.append(f"kernels {self.kernels} needs a GPU; on CPU use kernels torch")
        if self.profile_mode == "torch":
            found += _profile_problems(self)
        return found

    def settings(self) -> dict[str, Any]:
        """All fields as plain data, for run.json."""
        return asdict(self)


def profiled_steps(spec: RunSpec) -> tuple[int, int]:
    """The first and last step, from 1, that torch's profiler records.

    Raises:
        ValueError: not FIRST-LAST and not one number.
    """
    first, dash, last = spec.profile_steps.partition("-")
    return int(first), int(last if dash else first)


def profiled_ranks(spec: RunSpec) -> tuple[int, ...]:
    """The ranks that write a torch trace.

    Raises:
        ValueError: neither `all` nor numbers with commas.
    """
    if spec.profile_ranks == "all":
        return tuple(range(spec.gpus))
    return tuple(map(int, spec.profile_ranks.split(",")))


def _profile_problems(spec: RunSpec) -> list[str]:
    found = []
    try:
        first, last = profiled_steps(spec)
        if not 1 <= first <= last <= spec.steps:
            found.append(
                f"profile_steps {spec.profile_steps} is not within steps 1 to {spec.steps}"
            )
    except ValueError:
        found.append(f"profile_steps must be FIRST-LAST or one number, not {spec.profile_steps!r}")
    try:
        if absent := [rank for rank in profiled_ranks(spec) if not 0 <= rank < spec.gpus]:
            found.append(f"profile_ranks asks for rank {absent[0]}, but there are {spec.gpus}")
    except ValueError:
        found.append(f"profile_ranks must be all or numbers, not {spec.profile_ranks!r}")
    return found


def _kind_of(name: str) -> type:
    return RunSpec.__dataclass_fields__[name].metadata["kind"]


BOUNDS: dict[str, Bounds | None] = {f.name: f.metadata["bounds"] for f in fields(RunSpec)}


def out_of_bounds(name: str, value: Any) -> str:
    """What is wrong with a setting's number, with its bounds; empty where nothing is."""
    bounds = BOUNDS[name]
    return "" if bounds is None or value is None else bounds.problem(name, value)


def check_setting(name: str, value: Any, source: str) -> Any:
    """`value` in the setting's type.

    Raises:
        UsageError: no such setting, or not its type, one of its choices or within its bounds; it
            names the source.
    """
    if name not in RunSpec.__dataclass_fields__:
        known = ", ".join(f.name for f in fields(RunSpec))
        raise UsageError(f"{source}: unknown setting {name!r}; known: {known}")
    meta = RunSpec.__dataclass_fields__[name].metadata
    kind, choices = meta["kind"], meta["choices"]
    if kind is float and isinstance(value, int) and not isinstance(value, bool):
        value = float(value)
    if value is None and RunSpec.__dataclass_fields__[name].default is None:
        return None
    if type(value) is not kind:
        raise UsageError(f"{source}: {name} must be a {kind.__name__}, not {value!r}")
    if choices and value not in choices:
        raise UsageError(f"{source}: {name} must be one of {', '.join(choices)}, not {value!r}")
    if kind is str and "\0" in value:
        raise UsageError(f"{source}: {name} cannot hold a zero byte: {value!r}")
    if problem := out_of_bounds(name, value):
        raise UsageError(f"{source}: {problem}")
    return value


def resolve(*layers: tuple[str, dict[str, Any]], gpus: int | None = None) -> RunSpec:
    """Merge (source, settings) layers, the later overriding the earlier, into a checked RunSpec.

    `gpus` is the launcher's world size, which must agree with what the layers say. Relative paths
    are relative to the working directory, wherever the layer that names them is.

    Raises:
        UsageError: one line with every problem and its numbers.
    """
    merged: dict[str, Any] = {}
    sources: dict[str, str] = {}
    chosen = [given["deepspeed_config"] for _, given in layers if given.get("deepspeed_config")]
    if chosen:
        path = chosen[-1]
        layers = ((path, from_deepspeed_json(read_deepspeed_json(Path(path)), path)), *layers)
    for source, settings in layers:
        for name, value in settings.items():
            check_setting(name, value, source)
        # Of the batch settings, what this layer says wins over what an earlier one implied.
        if "grad_accum" in settings and "global_batch" not in settings:
            merged.pop("global_batch", None)
        elif {"global_batch", "micro_batch"} & set(settings) and "global_batch" in (
            merged | settings
        ):
            merged.pop("grad_accum", None)
        if set(WORK) & set(settings):
            for name in WORK:
                merged.pop(name, None)
        for name, value in settings.items():
            merged[name], sources[name] = check_setting(name, value, source), source
    if gpus is not None:
        if merged.get("gpus", gpus) != gpus:
            raise UsageError(
                f"{sources['gpus']} asks for {merged['gpus']} ranks,"
                f" but the launcher started {gpus}"
            )
        merged["gpus"] = gpus
    draft = RunSpec(**merged)
    merged["seq_len"] = draft.model.max_seq_len if draft.seq_len is None else draft.seq_len
    merged["grad_accum"] = _grad_accum(draft)
    merged["global_batch"] = (
        split_world(draft.gpus, draft.tp, draft.pp) * draft.micro_batch * merged["grad_accum"]
    )
    given = {name: merged[name] for name in WORK if merged.get(name) is not None}
    if given and min(given.values()) > 0 and min(merged["global_batch"], merged["seq_len"]) > 0:
        per_step = merged["global_batch"] * merged["seq_len"]
        merged["steps"] = steps_of(given, per_step, draft.data)
    spec = RunSpec(**merged)
    if problems := spec.problems() + _other_batches(spec, layers):
        raise UsageError("; ".join(problems))
    return spec


def _other_batches(spec: RunSpec, layers: tuple[tuple[str, dict[str, Any]], ...]) -> list[str]:
    """With enforce_global_batch_size: each layer's global_batch that is not this run's."""
    if not spec.enforce_global_batch_size:
        return []
    stated = [(s, given["global_batch"]) for s, given in layers if given.get("global_batch")]
    if not stated:
        return ["enforce_global_batch_size: nothing states a global_batch to enforce"]
    layout = spec.layout
    return [
        f"enforce_global_batch_size: {source} states global_batch {wanted}, but this run would have"
        f" micro_batch {layout.micro_batch} x dp {layout.dp} x grad_accum {layout.n_micro}"
        f" = {layout.global_batch}"
        for source, wanted in stated
        if wanted != layout.global_batch
    ]


def _grad_accum(draft: RunSpec) -> int:
    """Micro-batches per dp rank and step, from global_batch where that is what was given."""
    if draft.global_batch is None:
        return 1 if draft.grad_accum is None else draft.grad_accum
    dp = split_world(draft.gpus, draft.tp, draft.pp)
    if draft.micro_batch < 1 or draft.global_batch % (dp * draft.micro_batch):
        raise UsageError(
            f"global_batch {draft.global_batch} is not a multiple of"
            f" micro_batch {draft.micro_batch} x dp {dp} = {draft.micro_batch * dp}"
        )
    accum = draft.global_batch // (dp * draft.micro_batch)
    if draft.grad_accum not in (None, accum):
        raise UsageError(
            f"global_batch {draft.global_batch} = micro_batch {draft.micro_batch} x dp {dp}"
            f" x grad_accum {accum}, but grad_accum {draft.grad_accum} was asked for"
        )
    return accum


def read_deepspeed_json(path: Path) -> dict[str, Any]:
    """A DeepSpeed configuration file.

    Raises:
        UsageError: missing, too large, or not a JSON object.
    """
    text = read_text(Path(path), "deepspeed_config")
    try:
        config = parse_json(text)
    except ValueError as error:
        raise UsageError(f"deepspeed_config {path} is not JSON: {error}") from error
    if not isinstance(config, dict):
        raise UsageError(f"deepspeed_config {path} is not a JSON object")
    return config


def from_deepspeed_json(config: dict[str, Any], source: str) -> dict[str, Any]:
    """The settings a DeepSpeed JSON states that are ours too; "auto" states nothing.

    Raises:
        UsageError: a section is not what DeepSpeed takes, or asks for what is not offered here.
    """

    def section(name: str, within: dict[str, Any] = config) -> dict[str, Any]:
        found = within.get(name, {})
        if not isinstance(found, dict):
            raise UsageError(f"{source}: {name} must be an object, not {json.dumps(found)}")
        return found

    zero, optimizer = section("zero_optimization"), section("optimizer")
    adam = section("params", optimizer)
    if optimizer.get("type", "AdamW").lower() not in ("adam", "adamw"):
        raise UsageError(
            f"{source}: optimizer {optimizer['type']}, but every engine here trains with AdamW"
        )
    betas = adam.get("betas", "auto")
    if betas != "auto" and not (isinstance(betas, list) and len(betas) == 2):
        raise UsageError(f"{source}: betas must be two numbers, not {json.dumps(betas)}")
    offload = None
    for name, ours in (("offload_optimizer", "optimizer"), ("offload_param", "all")):
        device = section(name, zero).get("device", "none")
        if device not in ("none", "cpu"):
            raise UsageError(f"{source}: {name} to {device}; only cpu is offered here")
        offload = ours if device == "cpu" else offload
    enabled = [p for p in ("bf16", "fp16") if section(p).get("enabled") is True]
    stated = {
        "micro_batch": config.get("train_micro_batch_size_per_gpu"),
        "global_batch": config.get("train_batch_size"),
        "grad_accum": config.get("gradient_accumulation_steps"),
        "clip_grad": config.get("gradient_clipping"),
        "zero_stage": zero.get("stage"),
        "offload": offload,
        "precision": enabled[0] if enabled else None,
        "lr": adam.get("lr"),
        "beta1": betas[0] if betas != "auto" else None,
        "beta2": betas[1] if betas != "auto" else None,
        "adam_eps": adam.get("eps"),
        "weight_decay": adam.get("weight_decay"),
    }
    return {k: v for k, v in stated.items() if v is not None and v != "auto"}


def add_flags(parser: argparse.ArgumentParser) -> None:
    """One flag per setting; a flag that is not given leaves no trace in the namespace."""
    groups = {
        "engine": "what trains",
        "preset": "the model",
        "gpus": "the split (dp = gpus / (tp x pp))",
        "seq_len": "the training",
        "data": "the data",
        "save_interval": "checkpoints",
        "device": "the machine",
    }
    group = parser
    for setting in fields(RunSpec):
        if setting.name in groups:
            group = parser.add_argument_group(groups[setting.name])
        meta, flag = setting.metadata, "--" + setting.name.replace("_", "-")
        assert setting.default is not MISSING
        help = meta["help"]
        if setting.default is not None:
            help += f" (default: {setting.default})"
        common = {"dest": setting.name, "default": argparse.SUPPRESS, "help": help}
        names = [flag, meta["alias"]] if meta["alias"] else [flag]
        if meta["kind"] is bool:
            group.add_argument(*names, action=argparse.BooleanOptionalAction, **common)
        else:
            group.add_argument(
                *names,
                type=meta["kind"],
                choices=meta["choices"],
                metavar=None if meta["choices"] else meta["kind"].__name__.upper(),
                **common,
            )


def from_flags(arguments: argparse.Namespace) -> dict[str, Any]:
    """The settings that flags gave, out of a namespace that may hold other things too."""
    given = vars(arguments)
    return {f.name: given[f.name] for f in fields(RunSpec) if f.name in given}
