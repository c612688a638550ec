"""Every reason why a run cannot start, in words with the numbers. Torch-free.

`Layout.problems` says what the split and the model's sizes do not allow. Here is what the engine,
the machine and other settings do not. A case is (whether it is so, the reason).
"""

from collections.abc import Iterator
from typing import TYPE_CHECKING

from base.errors import UsageError
from models.config import in_words
from models.hf_config import architecture
from parallel.config import megatron_options
from parallel.config.data_files import stated_by
from parallel.config.engine_abilities import ENGINES, OPTIONS
from parallel.config.layout import EXPERT_AXES, SET_AXES

if TYPE_CHECKING:
    from parallel.config.run_spec import RunSpec

Cases = Iterator[tuple[bool, str]]  # (whether this case holds, why the run is then refused)


def refusals(spec: "RunSpec") -> list[str]:
    """Returns every reason why the run cannot start; none where it can."""
    cases = [
        *_of_parts(spec),
        *_of_engine(spec),
        *_of_machine(spec),
        *_of_megatron(spec),
        *_of_documents(spec),
        *_of_training(spec),
        *_used_with_others(spec),
    ]
    trains_all_parts = {*spec.model.parts} <= {*ENGINES[spec.engine].parts}
    if spec.model.mla and trains_all_parts:
        cases += _of_latent_attention(spec)
    if spec.model.experts and trains_all_parts:
        cases += _of_experts(spec)
    if spec.precision == "fp8":
        cases += _of_fp8(spec)
    problems = spec.layout.problems(spec.model, spec.seq_len)
    return problems + [reason for is_so, reason in cases if is_so]


def _of_parts(spec: "RunSpec") -> Cases:
    """Yields the cases in which the engine does not train a part of the model."""
    parts = set(spec.model.parts)
    engine, tp = spec.engine, spec.layout.tp
    lacking = [part for part in spec.model.parts if part not in ENGINES[engine].parts]
    able_engines = ", ".join(name for name, able in ENGINES.items() if {*able.parts} >= parts)
    engines = f"engines that do: {able_engines}" if able_engines else "no engine here does"
    yield bool(lacking), f"engine {engine} trains no model with {in_words(lacking)} ({engines})"
    words = in_words(spec.model.parts)
    is_hf = spec.implementation == "hf"
    reason = f"Hugging Face's model with {words} is not trained here: use gpt"
    yield bool(parts) and is_hf and not lacking, reason
    of_reference = bool(parts) and not lacking and engine not in ("megatron", "deepspeed_pipe")
    yield tp > 1 and of_reference, f"{words} of the reference GPT have no tp (asked: {tp})"
    yield is_hf and tp > 1, f"Hugging Face's model has no tp (asked: {tp})"
    if is_hf:
        try:
            architecture(spec.model)
        except UsageError as error:
            yield True, str(error)


def _of_engine(spec: "RunSpec") -> Cases:
    """Yields what the engine lacks, and combinations of settings that it does not take."""
    engine, able, layout = spec.engine, ENGINES[spec.engine], spec.layout
    for axis in (*SET_AXES, *EXPERT_AXES):
        size = getattr(layout, axis)
        names = ", ".join(name for name, ability in ENGINES.items() if axis in ability.axes)
        reason = f"engine {engine} has no {axis} (asked: {size}; engines with {axis}: {names})"
        yield size > 1 and axis not in able.axes, reason
    for name in OPTIONS:
        able_engines = [key for key, ability in ENGINES.items() if name in ability.options]
        have = f"{', '.join(able_engines)} {'have' if len(able_engines) > 1 else 'has'}"
        reason = f"engine {engine} has no {name} ({have})"
        yield spec.asks_for(name) and name not in able.options, reason
    for name, offered in able.values.items():
        allowed, value = ", ".join(map(str, offered)), spec.value(name)
        yield value not in offered, f"engine {engine} offers {name} {allowed}, not {value}"
    reason = "engine fsdp2 scales no loss, as fp16 needs; use bf16 or fp32"
    yield engine == "fsdp2" and spec.precision == "fp16", reason
    reason = "a compiled block shows no operators to recompute selective: use full"
    yield spec.compile and layout.recompute == "selective", reason
    is_bf16_without_zero = spec.precision == "bf16" and layout.zero_stage == 0
    stages = ", ".join(map(str, able.zero_stages[1:]))
    reason = (
        "DeepSpeed without ZeRO adds gradients up in bf16, and deepspeed_zero updates the bf16"
        f" weights themselves; for bf16 {engine} offers zero_stage {stages}"
    )
    yield engine.startswith("deepspeed") and is_bf16_without_zero, reason
    is_auto_ep = engine == "deepspeed_zero" and layout.ep > 1
    reason = f"breakdown has no column for messages between cp {layout.cp} ranks"
    yield spec.breakdown and layout.cp > 1, reason
    reason = "breakdown has no column for messages of DeepSpeed's AutoEP (ep > 1)"
    yield spec.breakdown and is_auto_ep, reason


def _of_latent_attention(spec: "RunSpec") -> Cases:
    """Yields the cases of latent attention that no engine here, or megatron-core, trains."""
    model, layout, is_megatron = spec.model, spec.layout, spec.engine == "megatron"
    state = f"cp {layout.cp}, position {model.position}, qk_norm {model.qk_norm}"
    reason = f"latent attention needs cp 1, position rope and no qk_norm, not {state}"
    yield layout.cp > 1 or model.position != "rope" or model.qk_norm, reason
    yield is_megatron and model.bias, "megatron-core's latent attention has no biases"
    reason = f"latent attention at tp {layout.tp} needs sequence_parallel"
    yield is_megatron and layout.tp > 1 and not layout.sequence_parallel, reason


def _of_experts(spec: "RunSpec") -> Cases:
    """Yields the cases of a model with experts that the engine does not train."""
    experts = spec.trained.experts
    reason = "it would round the bias to the precision of the weights"
    reason = f"engine {spec.engine} has no moe_router_enable_expert_bias: {reason}"
    is_deepspeed = spec.engine.startswith("deepspeed")
    yield experts.moe_router_enable_expert_bias and is_deepspeed, reason
    reason = "experts have another number of tokens in each step: not compiled"
    yield spec.compile, reason
    if spec.engine in ("megatron", "deepspeed_pipe"):
        yield from _of_megatrons_experts(spec)
    if spec.engine == "deepspeed_zero" and spec.layout.ep > 1:
        yield from _of_auto_ep(spec)


def _of_megatrons_experts(spec: "RunSpec") -> Cases:
    """Yields the cases that megatron-core refuses, or computes otherwise than the reference GPT."""
    experts, layout = spec.trained.experts, spec.layout
    is_pipe = spec.engine == "deepspeed_pipe"
    yield layout.tp > 1 and is_pipe, f"engine {spec.engine} has no tp with experts (megatron has)"
    reason = f"megatron-core's experts at tp {layout.tp} need sequence_parallel"
    yield layout.tp > 1 and not is_pipe and not layout.sequence_parallel, reason
    reason = "megatron-core's experts with biases are not trained here (ddp's are)"
    yield spec.model.bias, reason
    ranks = f"tp {layout.tp} x cp {layout.cp}"
    reason = "moe_expert_capacity_factor is of a dp rank's tokens, and megatron-core drops"
    reason = f"{reason} by rank of {ranks}: use tp 1 cp 1"
    yield experts.moe_expert_capacity_factor > 0 and layout.tp * layout.cp > 1, reason
    chosen, score = experts.moe_router_topk, experts.moe_router_score_function
    reason = f"megatron-core biases no {score} scores (moe_router_enable_expert_bias)"
    yield experts.moe_router_enable_expert_bias and score != "sigmoid", reason
    divides = chosen > 1
    does = "divides" if divides else "does not divide"
    reason = f"megatron-core {does} {chosen} {score} scores by their sum (norm_topk_prob)"
    yield experts.norm_topk_prob != divides and (score == "sigmoid" or not divides), reason


def _of_auto_ep(spec: "RunSpec") -> Cases:
    """Yields the cases that DeepSpeed's AutoEP refuses, does not compute, or was not tried with."""
    model, layout = spec.model, spec.layout
    reason = "DeepSpeed's AutoEP has experts with a gate and without biases alone"
    yield model.bias or not model.gated, reason
    names = ("moe_router_num_groups", "moe_expert_capacity_factor")
    lacking = [name for name in names if getattr(spec.trained.experts, name)]
    yield bool(lacking), f"DeepSpeed's AutoEP has no {' and '.join(lacking)} here"
    reason = "DeepSpeed's AutoEP has not been tried with latent attention"
    yield model.mla is not None, reason
    asked = f"asked: {layout.zero_stage}, {layout.offload}"
    reason = f"deepspeed_zero with ep offers zero_stage 1, 2 and offload none ({asked})"
    yield layout.zero_stage not in (1, 2) or layout.offload != "none", reason
    reason = "moe_router_force_load_balancing is not of DeepSpeed's AutoEP (ep > 1)"
    yield spec.moe_router_force_load_balancing, reason


def _of_machine(spec: "RunSpec") -> Cases:
    """Yields the cases that need a GPU, Transformer Engine or another precision than asked for."""
    lacks_gpu, cp = spec.device == "cpu" and bool(spec.needing_a_gpu), spec.layout.cp
    yield lacks_gpu, f"{spec.needing_a_gpu} needs a GPU, and device is cpu"
    reason = f"{spec.te_alone} needs kernels te, not {spec.kernels}"
    yield bool(spec.te_alone) and not lacks_gpu and spec.kernels not in ("auto", "te"), reason
    reason = f"cp {cp} needs precision bf16, fp16 or fp8, not fp32"
    yield cp > 1 and spec.precision == "fp32", reason
    reason = f"tf32 is how fp32 is multiplied; precision is {spec.precision}"
    yield spec.tf32 and spec.precision != "fp32", reason


def _of_megatron(spec: "RunSpec") -> Cases:
    """Yields the cases in which an option of megatron-core cannot be given, or not to this run."""
    for problem in megatron_options.problems(spec.megatron, spec.values):
        yield True, problem
    layout, overlaps = spec.layout, megatron_options.is_asked(spec.megatron, "tp_comm_overlap")
    state = f"tp is {layout.tp}, sequence_parallel is {layout.sequence_parallel}"
    reason = f"megatron tp_comm_overlap needs tp above 1 and sequence_parallel ({state})"
    yield overlaps and not (layout.tp > 1 and layout.sequence_parallel), reason
    reason = "megatron tp_comm_overlap needs precision bf16, fp16 or fp8, not fp32"
    yield overlaps and spec.precision == "fp32", reason
    # Without its fused loss megatron-core takes no heed of which one it would be.
    reason = "megatron cross_entropy_fusion_impl te needs precision bf16 or fp8, not deterministic"
    is_of_te = megatron_options.is_asked(spec.megatron, "cross_entropy_fusion_impl")
    yield is_of_te and not spec.fuses_loss, reason
    beside = [name for name in ("reset_at_documents", "breakdown") if spec.value(name)]
    reason = f"a CUDA graph of megatron reads one mask and times nothing: no {', '.join(beside)}"
    yield megatron_options.captures_graphs(spec.megatron) and bool(beside), reason


def _of_fp8(spec: "RunSpec") -> Cases:
    """Yields the cases of GEMMs whose sides are no multiples of 16 numbers, which is what cuBLAS
    takes in fp8 (megatron-core's `get_fp8_align_size`)."""
    reason = "recompute selective in fp8 needs fp8_recipe tensorwise, not delayed"
    yield spec.computes_norms_again and spec.fp8_recipe == "delayed", reason
    model, layout, tp = spec.model, spec.layout, spec.layout.tp
    shared = layout.cp * (tp if layout.sequence_parallel else 1)
    sides = {
        "hidden": model.hidden,
        "n_head x head size / tp": model.n_head * model.head_dim // tp,
        "a rank's tokens of a micro-batch": layout.micro_batch * spec.seq_len // shared,
    }
    if latent := model.mla:
        sides |= {
            "q_lora_rank": latent.q_lora_rank,
            "kv_lora_rank": latent.kv_lora_rank,
            "kv_lora_rank + qk_pos_emb_head_dim": latent.kv_lora_rank + latent.qk_pos_emb_head_dim,
            "n_head x (qk_head_dim + v_head_dim) / tp": model.n_head
            * (latent.qk_head_dim + latent.v_head_dim)
            // tp,
            "n_head x v_head_dim / tp": model.n_head * latent.v_head_dim // tp,
        }
    else:
        sides["kv heads x head size / tp"] = model.kv_heads * model.head_dim // tp
    if not all(model.blocks.values()):
        sides["ffn_hidden / tp"] = model.ffn_hidden // tp
    if experts := model.experts:  # whose tokens megatron-core pads
        width = experts.moe_ffn_hidden_size or model.ffn_hidden
        sides["an expert's width / etp"] = width // layout.etp
        sides["the shared experts' width / tp"] = experts.moe_shared_expert_intermediate_size // tp
    for name, size in sides.items():
        yield size % 16 != 0, f"fp8 GEMMs need multiples of 16, and {name} is {size}"


def _of_documents(spec: "RunSpec") -> Cases:
    """Yields the cases in which the ends of documents are not known, or cannot be told apart."""
    if not spec.reset_at_documents:
        return
    end, ids, cp = spec.end_of_text, spec.model.vocab_size, spec.layout.cp
    if end is None:
        reason = "reset_at_documents needs the token id that ends a document"
        mend = "give end_of_text, or prepare text with parallel.data"
        yield True, f"{reason}, and {spec.data} does not say it: {mend}"
        return
    reason = "reset_at_documents needs whole sequences on each rank"
    yield cp > 1, f"{reason}, so cp 1, not {cp}"
    stated = stated_by(spec.data, "end_of_text")
    reason = f"end_of_text {end} is not the data's: {spec.data} says {stated}"
    yield stated not in (None, end), reason
    reason = f"end_of_text {end} is not among the {ids} ids of the vocabulary"
    yield end >= ids, reason


def _of_training(spec: "RunSpec") -> Cases:
    """Yields the cases in which the learning rate or the profiled steps contradict the run."""
    yield spec.min_lr > spec.lr, f"min_lr {spec.min_lr:g} exceeds lr {spec.lr:g}"
    steps = spec.profiled_steps
    within = len(steps) > 0 and steps[0] >= 1 and steps[-1] <= spec.steps
    reason = f"profile_steps {spec.profile_steps} is not within steps 1 to {spec.steps}"
    yield spec.profile_steps is not None and not within, reason


# A setting -> the other, and its value, without which nothing reads it.
_READ_WITH = {
    "fp8_recipe": ("precision", "fp8"),
    "rope_theta": ("position", "rope"),
    "rope_scaling": ("position", "rope"),
    "end_of_text": ("reset_at_documents", True),
}
_READ_WITH_EXPERTS = ("moe_token_dispatcher_type", "moe_router_force_load_balancing")
_READ_WITH_EXPERTS += ("moe_expert_capacity_factor",)


def _used_with_others(spec: "RunSpec") -> Cases:
    """Yields the cases of a setting that is set and that nothing would read."""
    for name, (reader, wanted) in _READ_WITH.items():
        actual = spec.model.position if reader == "position" else spec.value(reader)
        reason = f"{name} {spec.value(name)} is used with {reader} {wanted} alone, not {actual}"
        yield spec.asks_for(name) and actual != wanted, reason
    for name in _READ_WITH_EXPERTS:
        reason = f"{name} is for a model with experts alone"
        asked = spec.asks_for(name) and bool(spec.value(name))
        yield asked and not spec.model.experts, reason
