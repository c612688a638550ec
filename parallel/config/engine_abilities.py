"""What each engine can do; a setting that an engine cannot do is refused here first. Torch-free."""

from dataclasses import dataclass

from models.config import Experts, GPTConfig, in_words
from parallel.config.axes import EXPERT_AXES, SET_AXES
from parallel.config.layout import RECOMPUTE, Layout


@dataclass(frozen=True)
class Ability:
    """What an engine can be asked for; anything else is refused with a sentence."""

    module: str
    zero_stages: tuple[int, ...] = (0,)
    offload: tuple[str, ...] = ("none",)
    implementations: tuple[str, ...] = ("gpt",)
    recompute: tuple[str, ...] = ("none", "full")
    kernels: tuple[str, ...] = ("torch",)
    precisions: tuple[str, ...] = ("fp32", "bf16", "fp16")
    parts: tuple[str, ...] = ()  # of PARTS: what a model may have beyond a dense GPT
    tp: bool = False
    cp: bool = False
    pp: bool = False
    vpp: bool = False
    ep: bool = False
    etp: bool = False
    sequence_parallel: bool = False
    compile: bool = False


_MEGATRON_KERNELS = ("te", "torch")  # what megatron-core's layers can be made of

ENGINES: dict[str, Ability] = {
    "ddp": Ability(
        module="parallel.engines.ddp",
        parts=("experts", "mla"),
        implementations=("gpt", "hf"),
        recompute=RECOMPUTE,
        compile=True,
    ),
    "fsdp2": Ability(
        module="parallel.engines.fsdp2",
        parts=("experts", "mla"),
        zero_stages=(2, 3),
        offload=("none", "all"),
        recompute=RECOMPUTE,
        compile=True,
    ),
    "deepspeed_zero": Ability(
        module="parallel.engines.deepspeed_zero",
        parts=("experts", "mla"),
        zero_stages=(0, 1, 2, 3),
        offload=("none", "optimizer", "all"),
        implementations=("gpt", "hf"),
        kernels=_MEGATRON_KERNELS,  # with tp > 1
        tp=True,
        ep=True,
    ),
    "deepspeed_pipe": Ability(
        module="parallel.engines.deepspeed_pipe",
        parts=("experts",),
        zero_stages=(0, 1),
        kernels=_MEGATRON_KERNELS,
        tp=True,
        pp=True,
    ),
    "megatron": Ability(
        module="parallel.engines.megatron",
        parts=("experts", "mla"),
        zero_stages=(0, 1),
        recompute=RECOMPUTE,  # selective of norms, through Transformer Engine alone
        kernels=_MEGATRON_KERNELS,
        precisions=("fp32", "bf16", "fp16", "fp8"),  # fp8 and cp through Transformer Engine alone
        tp=True,
        cp=True,
        pp=True,
        vpp=True,
        ep=True,
        etp=True,
        sequence_parallel=True,
    ),
}


def inabilities(
    engine: str,
    model: GPTConfig,
    layout: Layout,
    implementation: str,
    precision: str,
    compile: bool,
) -> list[str]:
    """What is asked of an engine that it does not do, in words."""
    able = ENGINES[engine]
    problems = []
    if lacking := [part for part in model.parts if part not in able.parts]:
        others = ", ".join(e for e, a in ENGINES.items() if {*a.parts} >= {*model.parts})
        which = f"engines that do: {others}" if others else "no engine here does"
        problems.append(f"engine {engine} trains no model with {in_words(lacking)} ({which})")
    elif model.parts:
        if model.mla:
            problems += _of_latent_attention(engine, model, layout)
        if of := model.experts:
            problems += _of_experts(engine, of, compile)
            if engine in ("megatron", "deepspeed_pipe"):
                problems += _of_megatrons_experts(engine, of, model.bias, layout)
            if engine == "deepspeed_zero" and layout.ep > 1:
                problems += _of_auto_ep(model, layout)
        words = in_words(model.parts)
        if implementation == "hf":
            problems.append(f"Hugging Face's model with {words} is not trained here: use gpt")
        if layout.tp > 1 and engine not in ("megatron", "deepspeed_pipe"):
            problems.append(f"{words} of the reference GPT have no tp (asked: {layout.tp})")
    for axis in (*SET_AXES, *EXPERT_AXES):
        if getattr(layout, axis) > 1 and not getattr(able, axis):
            others = ", ".join(e for e, a in ENGINES.items() if getattr(a, axis))
            problems.append(
                f"engine {engine} has no {axis} (asked: {getattr(layout, axis)};"
                f" engines with {axis}: {others})"
            )
    if layout.sequence_parallel and not able.sequence_parallel:
        problems.append(f"engine {engine} has no sequence_parallel (megatron has)")
    for what, value, known in (
        ("zero_stage", layout.zero_stage, able.zero_stages),
        ("offload", layout.offload, able.offload),
        ("recompute", layout.recompute, able.recompute),
        ("implementation", implementation, able.implementations),
        ("precision", precision, able.precisions),
    ):
        if value not in known:
            allowed = ", ".join(map(str, known))
            problems.append(f"engine {engine} offers {what} {allowed}, not {value}")
    if layout.uneven and engine != "megatron":
        problems.append(f"engine {engine} has no {' and no '.join(layout.uneven)} (megatron has)")
    if layout.fsdp_shard and engine != "fsdp2":
        problems.append(f"engine {engine} has no fsdp_shard (fsdp2 has)")
    if layout.reduce_each_micro_batch is not None and engine != "fsdp2":
        problems.append(f"engine {engine} has no reduce_each_micro_batch (fsdp2 has)")
    if engine == "fsdp2" and precision == "fp16":
        problems.append("engine fsdp2 scales no loss, as fp16 needs; use bf16 or fp32")
    if compile and not able.compile:
        problems.append(f"engine {engine} does not compile its model (ddp and fsdp2 do)")
    if compile and layout.recompute == "selective":
        problems.append("a compiled block shows no operators to recompute selective: use full")
    if implementation == "hf" and layout.tp > 1:
        problems.append(f"Hugging Face's model has no tp (asked: {layout.tp})")
    if engine.startswith("deepspeed") and precision == "bf16" and layout.zero_stage == 0:
        stages = ", ".join(map(str, able.zero_stages[1:]))
        problems.append(
            "DeepSpeed without ZeRO adds gradients up in bf16, and deepspeed_zero updates the bf16"
            f" weights themselves; for bf16 {engine} offers zero_stage {stages}"
        )
    return problems


def _of_latent_attention(engine: str, model: GPTConfig, layout: Layout) -> list[str]:
    """What is asked of latent attention that no engine here does, or megatron-core does not."""
    problems = []
    if layout.cp > 1 or model.position != "rope" or model.qk_norm:
        state = f"cp {layout.cp}, position {model.position}, qk_norm {model.qk_norm}"
        problems.append(f"latent attention needs cp 1, position rope and no qk_norm, not {state}")
    if engine == "megatron" and model.bias:
        problems.append("megatron-core's latent attention has no biases")
    if engine == "megatron" and layout.tp > 1 and not layout.sequence_parallel:
        problems.append(f"latent attention at tp {layout.tp} needs sequence_parallel")
    return problems


def _of_experts(engine: str, of: Experts, compile: bool) -> list[str]:
    """What is asked of a model with experts that an engine does not do."""
    problems = []
    if of.moe_router_enable_expert_bias and engine.startswith("deepspeed"):
        why = "it would round the bias to the precision of the weights"
        problems.append(f"engine {engine} has no moe_router_enable_expert_bias: {why}")
    if compile:
        problems.append("experts have another number of tokens in each step: not compiled")
    return problems


def _of_megatrons_experts(engine: str, of: Experts, bias: bool, layout: Layout) -> list[str]:
    """What megatron-core refuses, or computes otherwise than the reference GPT."""
    problems = []
    if layout.tp > 1 and engine == "deepspeed_pipe":
        problems.append(f"engine {engine} has no tp with experts (megatron has)")
    elif layout.tp > 1 and not layout.sequence_parallel:
        problems.append(f"megatron-core's experts at tp {layout.tp} need sequence_parallel")
    if bias:
        problems.append("megatron-core's experts with biases are not trained here (ddp's are)")
    if of.moe_expert_capacity_factor and layout.tp * layout.cp > 1:
        ranks = f"tp {layout.tp} x cp {layout.cp}"
        why = f"megatron-core drops by rank of {ranks}: use tp 1 cp 1"
        problems.append(f"moe_expert_capacity_factor is of a dp rank's tokens; {why}")
    chosen, how = of.moe_router_topk, of.moe_router_score_function
    if of.moe_router_enable_expert_bias and how != "sigmoid":
        problems.append(f"megatron-core biases no {how} scores (moe_router_enable_expert_bias)")
    divides = chosen > 1
    if of.norm_topk_prob != divides and (how == "sigmoid" or not divides):
        does = "divides" if divides else "does not divide"
        problems.append(f"megatron-core {does} {chosen} {how} scores by their sum (norm_topk_prob)")
    return problems


def _of_auto_ep(model: GPTConfig, layout: Layout) -> list[str]:
    """What DeepSpeed's AutoEP refuses or does not compute, or has not been tried with."""
    problems = []
    if model.bias or not model.gated:
        problems.append("DeepSpeed's AutoEP has experts with a gate and without biases alone")
    names = ("moe_router_num_groups", "moe_expert_capacity_factor")
    if lacking := [name for name in names if getattr(model.experts, name)]:
        problems.append(f"DeepSpeed's AutoEP has no {' and '.join(lacking)} here")
    if model.mla:
        problems.append("DeepSpeed's AutoEP has not been tried with latent attention")
    if layout.zero_stage not in (1, 2) or layout.offload != "none":
        asked = f"asked: {layout.zero_stage}, {layout.offload}"
        problems.append(f"deepspeed_zero with ep offers zero_stage 1, 2 and offload none ({asked})")
    return problems


def kernels_of(engine: str, tp: int) -> tuple[str, ...]:
    """The kernel sets that an engine has code for, best first."""
    if engine == "deepspeed_zero" and tp == 1:
        return ("torch",)  # the reference model, not megatron-core's layers
    return ENGINES[engine].kernels
