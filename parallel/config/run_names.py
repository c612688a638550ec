"""What a run is called: its split, and what else tells it from other runs. Torch-free.

study.py finds out which settings tell its runs apart.
"""

import re
from collections.abc import Iterable, Mapping
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

from models.config import OVERRIDES, Experts, GPTConfig, preset
from parallel.config.layout import DISPATCHERS, EXPERT_AXES, FORCED, SET_AXES, UNEVEN

_ENDS = dict(zip(UNEVEN, ("embedding-counts", "loss-counts", "first{}", "last{}"), strict=True))
# What `split_name` tells already (gpus follows from the split's sizes), or what never names a run.
IN_NAME = {"engine", "gpus", *SET_AXES, *EXPERT_AXES, "sequence_parallel", "zero_stage", "offload"}
IN_NAME |= {"fsdp_shard", "recompute", "implementation", "moe_token_dispatcher_type"}
IN_NAME |= {"moe_router_force_load_balancing", *UNEVEN}
SHORT = {
    "micro_batch": "mbs",
    "global_batch": "gbs",
    "grad_accum": "gas",
    "seq_len": "seq",
    "n_layer": "layers",
    "n_head": "heads",
    "vocab_size": "vocab",
    "moe_expert_capacity_factor": "capacity",
}
SHORT |= dict.fromkeys("preset precision deepspeed_config device kernels data".split(), "")


def model_of(values: Mapping[str, Any]) -> GPTConfig:
    """Returns the model of a run with these settings."""
    return preset(values["preset"], **{size: values[size] for size in OVERRIDES})


def split_name(values: Mapping[str, Any]) -> str:
    """Returns what distinguishes the split of a run with these settings and this dp, e.g.
    `megatron-tp2-pp2-dp2`; with dp 1 it does not depend on the GPUs."""
    sizes = {axis: values[axis] for axis in (*SET_AXES, *EXPERT_AXES, "dp")}
    parts = [values["engine"].replace("_", "-")]
    parts += [f"{axis}{size}" for axis, size in sizes.items() if size > 1]
    parts += [_ENDS[name].format(values[name]) for name in UNEVEN if values[name]]
    if values["sequence_parallel"]:
        parts.append("sp")
    if values["moe_token_dispatcher_type"] != DISPATCHERS[0]:
        parts.append(values["moe_token_dispatcher_type"])
    if values["zero_stage"] or values["engine"] == "deepspeed_zero":
        parts.append(f"zero{values['zero_stage']}")
    if values["fsdp_shard"]:
        parts.append(f"shard{values['fsdp_shard']}")
    if values["offload"] != "none":
        parts.append(f"offload-{values['offload']}")
    if values["recompute"] != "none":
        parts.append(f"recompute-{values['recompute']}")
    if values["implementation"] != "gpt":
        parts.append(values["implementation"])
    if values["moe_router_force_load_balancing"]:
        parts.append(FORCED)
    return "-".join(parts)


def run_name(
    split: str, settings: Iterable[str], values: Mapping[str, Any], label: str = ""
) -> str:
    """Returns a run's name: its split, the values of `settings`, which tell it from other runs, and
    its label."""
    settings = list(settings)
    if "global_batch" in settings and values["global_batch"] is not None:
        settings = [name for name in settings if name != "grad_accum"]  # it follows from the batch
    tags = [_tag(name, values) for name in settings]
    return "-".join(part for part in (split, *tags, label) if part)


def _words(name: str, value: Any) -> str:
    """Returns a switch, or a name with its value, in letters that are safe in any file name."""
    if isinstance(value, bool):
        return name if value else f"no-{name}"
    return re.sub(r"[^A-Za-z0-9.+-]+", "_", f"{name}{value}").strip("_-.")


def _tag(name: str, values: Mapping[str, Any]) -> str:
    """Returns the part of a run's name that says one setting."""
    value = values[name]
    if name == "preset":
        model = model_of(values)
        if model != preset(value):  # sizes of its own: not that model
            value = f"{model.n_params / 1e9:.3g}b"
    if value is None:
        return ""
    if name == "megatron":
        return "-".join(_words(option, chosen) for option, chosen in value.items())
    if isinstance(value, bool):
        return _words(name, value)
    if isinstance(value, Experts):
        default = {size.name: size.default for size in fields(value)}
        stated = {key: setting for key, setting in asdict(value).items() if setting != default[key]}
        value = "_".join(f"{key}{setting}" for key, setting in stated.items())
    text = f"{value:g}" if isinstance(value, float) else str(value)
    if name in ("deepspeed_config", "data"):
        text = Path(value).stem
    return _words(SHORT.get(name, name), text)
