"""A planned layout as a program's own flags or file, ready to paste: Megatron-LM's, DeepSpeed's,
torchtitan's, and a study of ours. What a program cannot say of it is a line of its own.
"""

import json
import shlex
from dataclasses import fields
from itertools import groupby
from typing import Any, NamedTuple

from analysis.logs.facts import FACTS
from analysis.planner.ranking import STEPS, Question, limit_minutes
from models.config import PRESETS, GPTConfig, LatentAttention
from parallel.config import megatron_options
from parallel.config.clusters import load_clusters
from parallel.config.deepspeed_json import as_deepspeed_json
from parallel.config.layout import EXPERT_AXES, SET_AXES, Layout


class Plan(NamedTuple):
    """A layout to write. gemms: the number format of GEMMs; flash: attention is one kernel; muon:
    as in `space`."""

    config: GPTConfig
    layout: Layout
    engine: str
    gemms: str
    flash: bool
    muon: str = ""


class Pasted(NamedTuple):
    """A text to paste, and a sentence for each part of the plan that it does not say."""

    text: str
    unsaid: list[str]


def _name(fact: str, ending: str = "") -> str:
    """Returns what a program calls a fact: the first name in argument dumps, which is that of
    Megatron-LM, or the first with torchtitan's ending."""
    return next(name for name in FACTS[fact].names.split() if name.endswith(ending))


def _command(flags: dict[str, Any], *words: str) -> str:
    """Returns flags and words that continue a command, a line each; True is a flag alone."""
    lines = [
        f"--{name}" if value is True else f"--{name} {shlex.quote(str(value))}"
        for name, value in flags.items()
    ]
    return " \\\n".join([*lines, *words])


def megatron(plan: Plan) -> Pasted:
    """Returns Megatron-LM's flags of the model and of its layout."""
    config, layout = plan.config, plan.layout
    sizes = {"n_layer": config.n_layer, "hidden": config.hidden, "n_head": config.n_head}
    sizes |= {"ffn_hidden": config.ffn_hidden, "max_seq_len": config.max_seq_len}
    flags: dict[str, Any] = {_name(fact): size for fact, size in sizes.items()}
    if config.kv_channels:
        flags[_name("kv_channels")] = config.kv_channels
    if config.n_kv_head:
        flags |= {"group_query_attention": True, _name("n_kv_head"): config.n_kv_head}
    positions = {"learned": "learned_absolute"}
    flags["position_embedding_type"] = positions.get(config.position, config.position)
    if config.position == "rope":
        flags["rotary_base"] = int(config.rope_theta)
    if config.rope_scaling != 1:
        flags |= {"use_rope_scaling": True, "rope_scaling_factor": config.rope_scaling}
    flags |= {"normalization": "RMSNorm" if config.norm == "rmsnorm" else "LayerNorm"}
    flags |= {"norm_epsilon": config.norm_eps, "qk_layernorm": config.qk_norm or bool(config.mla)}
    flags |= {"swiglu": config.gated, "disable_bias_linear": not config.bias}
    flags["untie_embeddings_and_output_weights"] = not config.tied
    if config.mla:
        flags |= {"multi_latent_attention": True, "rope_type": "rope"}
        flags |= {size.name: getattr(config.mla, size.name) for size in fields(LatentAttention)}
    axes = ("tp", "cp", "pp", *(EXPERT_AXES if config.experts else ()))
    flags |= _experts(config) | {_name(axis): getattr(layout, axis) for axis in axes}
    if layout.uneven:  # Of these and --decoder-first-pipeline-num-layers it alone takes every cut.
        flags["pipeline_model_parallel_layout"] = stages(layout, config)
    elif layout.vpp > 1:
        flags[_name("vpp", "_rank")] = layout.vpp
    flags |= {"sequence_parallel": layout.sequence_parallel}
    flags[megatron_options.fields_decided("zero_stage")[0]] = layout.zero_stage == 1
    if plan.muon:
        flags |= {"optimizer": "muon", "muon_tp_mode": plan.muon}
    if layout.recompute != "none":
        flags["recompute_granularity"] = layout.recompute
    if layout.recompute == "full":
        flags |= {"recompute_method": "uniform", "recompute_num_layers": 1}
    flags |= {_name("seq_len"): config.max_seq_len, _name("micro_batch"): layout.micro_batch}
    flags[_name("global_batch")] = layout.global_batch
    precision = {"fp8": "bf16"}.get(plan.gemms, plan.gemms)
    flags[precision] = precision in ("bf16", "fp16")
    flags["attention_backend"] = "flash" if plan.flash else "unfused"
    if plan.gemms == "fp8":
        flags["fp8_format"] = "hybrid"
    given = {name.replace("_", "-"): v for name, v in flags.items() if v not in (False, None, 0)}
    unsaid = [
        f"the tokenizer, which must have {config.vocab_size} ids; data, learning rate, saving"
    ]
    if layout.zero_stage > 1:
        unsaid.append(
            f"ZeRO {layout.zero_stage}, as {plan.engine} has it: --engine megatron plans without it"
        )
    return Pasted(_command(given), unsaid)


def stages(layout: Layout, config: GPTConfig) -> str:
    """Returns Megatron-LM's --pipeline-model-parallel-layout: `|` stands between chunks, of all
    stages in turn; E is the embedding, t a layer, L the loss."""
    chunks = [[f"t*{len(chunk)}"] if chunk else [] for chunk in layout.chunks(config.n_layer)]
    first, *middle, last = chunks
    runs = [f"({layers}|)*{len(list(run))}" for [layers], run in groupby(middle)]
    return f"{','.join(['E', *first])}|{','.join([*runs, *last, 'L'])}"


def _experts(config: GPTConfig) -> dict[str, Any]:
    """Returns Megatron-LM's flags of experts, {} for a dense model."""
    if not (experts := config.experts):
        return {}
    has_experts = (config.has_experts(layer) for layer in range(config.n_layer))
    runs = (f"[{int(has)}]*{len(list(run))}" for has, run in groupby(has_experts))
    names = megatron_options.fields_decided("experts")[1:]  # the first is a flag of another name
    flags = {"num_experts": experts.num_experts}
    flags |= {name: value for name in names if (value := getattr(experts, name, None))}
    softmax = experts.moe_router_score_function == "softmax"
    if experts.moe_router_topk_scaling_factor == 1:
        del flags["moe_router_topk_scaling_factor"]
    return flags | {
        "moe_layer_freq": f"({'+'.join(runs)})",
        "moe_router_pre_softmax": softmax and not experts.norm_topk_prob,
        "moe_grouped_gemm": True,
        "moe_token_dispatcher_type": "alltoall",
    }


def deepspeed(plan: Plan) -> Pasted:
    """Returns DeepSpeed's JSON of a layout. A pipeline, tp and recomputation are not settings of
    the file but of the model's code."""
    layout = plan.layout
    unsaid = ["its model, optimizer, learning rate and clipping"]
    if layout.pp > 1:
        ranks = f"num_pp={layout.pp}, num_mp={layout.tp}, num_dp={layout.dp}"
        unsaid.append(
            f"pp {layout.pp}: a deepspeed.pipe.PipelineModule with the topology"
            f" PipeModelDataParallelTopology({ranks}), and ZeRO 0 or 1"
        )
    if layout.tp > 1:
        unsaid.append(f"tp {layout.tp}: layers that are cut (megatron-core's) and their mpu")
    for axis in ("cp", "vpp", *EXPERT_AXES):
        if (size := getattr(layout, axis)) > 1:
            unsaid.append(f"{axis} {size}: DeepSpeed has no such setting for these layers")
    if layout.uneven:
        unsaid.append("uneven stages: PipelineModule's partition_method cuts by its own weights")
    if layout.sequence_parallel:
        unsaid.append("sp: layers that are cut so")
    if layout.recompute != "none":
        unsaid.append(f"recompute {layout.recompute}: the model checkpoints its own layers")
    if plan.gemms == "fp8":
        unsaid.append("fp8: Transformer Engine's layers")
    text = json.dumps(as_deepspeed_json(layout, plan.gemms), indent=2)
    return Pasted(text, unsaid)


def torchtitan(plan: Plan) -> Pasted:
    """Returns torchtitan's flags of a layout; each is section.key of its older TOML, too."""
    layout, unsaid = (
        plan.layout,
        ["the model: --module and --config (--module llama3 --config llama3_8b)"],
    )
    axes = ("tp", "pp", "cp", *(["ep"] if plan.config.experts else []))
    parallelism = {_name(axis, "_degree"): getattr(layout, axis) for axis in axes}
    sharded = layout.zero_stage > 0
    parallelism |= {
        "data_parallel_replicate_degree": layout.dp // layout.shards if sharded else layout.dp,
        "data_parallel_shard_degree": layout.shards if sharded else 1,
        "fsdp_reshard_after_forward": "always" if layout.zero_stage == 3 else "never",
    }
    if layout.tp > 1:
        switch = "" if layout.sequence_parallel else "no-"
        parallelism[f"{switch}enable_sequence_parallel"] = True
    local = layout.micro_batch
    if layout.pp > 1:
        local *= layout.n_micro
        parallelism["pipeline_parallel_microbatch_size"] = layout.micro_batch
        sizes = [len(chunk) for chunk in layout.chunks(plan.config.n_layer)]
        usual = max(sizes)
        schedule = "Interleaved1F1B" if layout.vpp > 1 else "1F1B"
        parallelism["pipeline_parallel_schedule"] = schedule
        if all(size == usual for size in sizes[1:-1]):
            parallelism |= {
                "pipeline_parallel_layers_per_stage": usual,
                "pipeline_parallel_first_stage_less_layers": usual - sizes[0],
                "pipeline_parallel_last_stage_less_layers": usual - sizes[-1],
            }
        else:
            cut = "-".join(map(str, sizes))
            unsaid.append(f"chunks of {cut} layers: parallelism.module_fqns_per_model_part")
    training = {_name("seq_len", "seq_len"): plan.config.max_seq_len, "local_batch_size": local}
    training |= {_name("global_batch"): layout.global_batch}
    training["mixed_precision_param"] = "float32" if plan.gemms in ("fp32", "tf32") else "bfloat16"
    if layout.pp > 1 or layout.ep > 1:  # torchtitan captures no graph of them, and says so
        training["disable_cuda_graphs"] = True
    if layout.offload == "all":
        training["enable_cpu_offload"] = True
    if layout.zero_stage == 1:
        unsaid.append("ZeRO 1: torchtitan shards gradients, too (ZeRO 2), as FSDP does")
    if plan.config.experts and layout.etp > 1:
        unsaid.append(f"etp {layout.etp}: torchtitan cuts no expert")
    if plan.gemms in ("fp16", "fp8"):
        unsaid.append(f"{plan.gemms}: a converter of the model")
    sections = {"training": training, "parallelism": parallelism}
    flags = {
        f"{part}.{name}": value for part, keys in sections.items() for name, value in keys.items()
    }
    # torchtitan 0.3 takes it last, without dashes; before, it was --activation_checkpoint.mode.
    return Pasted(_command(flags, f"activation-checkpoint:{layout.recompute}"), unsaid)


PROGRAMS = {"megatron": megatron, "deepspeed": deepspeed, "torchtitan": torchtitan}


def study(ask: Question, rows: list[dict[str, Any]], where: str) -> list[str]:
    """Returns a study of ours whose runs are rows of the ranked table; `where` is the cluster or
    card as the flags name it."""
    if ask.preset is None:
        model = ask.config.as_dict()
        if ask.config.position != "rope":  # a run that learns its positions is refused with them
            del model["rope_theta"], model["rope_scaling"]
    else:
        sizes = {k: v for k, v in ask.sizes.items() if v != getattr(PRESETS[ask.preset], k)}
        model = {"preset": ask.preset} | sizes
    defaults = model | {
        "gpus": ask.gpus,
        "global_batch": ask.global_batch,
        "seq_len": ask.settings["seq_len"],
        "precision": ask.settings["precision"],
        "steps": STEPS,
        "eval_steps": 0,
    }
    if ask.gemms == "tf32":
        defaults["tf32"] = True
    lines = [
        "# Written by: python -m analysis.plan --study. Times in it are predicted, not measured.",
        'question = "Are these layouts as fast as predicted?"',
        *([f'cluster = "{where}"'] if where in load_clusters() else []),
        "",
        "[defaults]",
    ]
    lines += [f"{name} = {json.dumps(value)}" for name, value in defaults.items()]
    for row in rows:
        lines += [
            "",
            f"[[run]] # predicted {row['predicted_s']:.4g} s, {row['memory_gib']:.1f} GiB",
            f'engine = "{row["engine"]}"',
            *(f"{key} = {row[key]}" for key in (*SET_AXES, "micro_batch", "zero_stage")),
            *(f"{axis} = {row[axis]}" for axis in EXPERT_AXES if axis in row),
            *(f"{name} = {json.dumps(value)}" for name, value in row["uneven"].items()),
            f'recompute = "{row["recompute"]}"',
            *([f"fsdp_shard = {row['fsdp_shard']}"] if row["fsdp_shard"] else []),
            *([f'offload = "{row["offload"]}"'] if row["offload"] else []),
            *(["sequence_parallel = true"] if row["sequence_parallel"] else []),
            f'label = "plan{row["rank"]}"',
            f'slurm = {{ time = "{time_limit(row["high_s"])}" }}',
        ]
    return lines


def time_limit(high_s: float) -> str:
    """Returns `limit_minutes` as Slurm writes it, H:MM:SS."""
    minutes = limit_minutes(high_s)
    return f"{minutes // 60}:{minutes % 60:02}:00"
