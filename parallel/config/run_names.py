"""What a run is called: its split, and what else tells it from other runs. Torch-free.

The split's part is `RunSpec.name`; study.py finds out which settings tell its runs apart.
"""

import re
from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import Any

from models.config import Experts, preset
from parallel.config.axes import EXPERT_AXES, SET_AXES, UNEVEN
from parallel.config.duration import CIRCUMSTANCES, WORK
from parallel.config.run_spec import RunSpec

# What RunSpec.name tells already (gpus follows from the split's sizes), or what never names a run.
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


def name_alone(spec: RunSpec, flags: dict[str, Any]) -> str:
    """The name of a run of no study: its split, then what else its flags say of it, less how long
    it trains and its circumstances, for with others of those it may go on (duration.py)."""
    silent = IN_NAME | CIRCUMSTANCES | set(WORK)
    spec = replace(spec, vocab_size=flags.get("vocab_size"))  # the data's is not in the name
    values = {
        f.name: getattr(spec, f.name)
        for f in fields(RunSpec)
        if f.name in flags.keys() - silent and flags[f.name] != f.default
    }
    return run_name(spec.name, values, spec)


def run_name(split: str, values: dict[str, Any], spec: RunSpec, label: str = "") -> str:
    """A run's name: its split, the values that tell it from other runs, and its label."""
    if values.get("global_batch") is not None:
        values = {name: value for name, value in values.items() if name != "grad_accum"}
    tags = (_tag(name, value, spec) for name, value in values.items())
    return "-".join(filter(None, (split, *tags, label)))


def _tag(name: str, value: Any, spec: RunSpec) -> str:
    """The part of a run's name that says one setting, in letters that are safe in any file name."""
    if name == "preset" and spec.model != preset(value):  # sizes of its own: not that model
        value = f"{spec.model.n_params / 1e9:.3g}b"
    if value is None:
        return ""
    if isinstance(value, bool):
        return name if value else f"no-{name}"
    if isinstance(value, Experts):
        default = {f.name: f.default for f in fields(value)}
        stated = {k: v for k, v in asdict(value).items() if v != default[k]}
        value = "_".join(f"{k}{v}" for k, v in stated.items())
    text = f"{value:g}" if isinstance(value, float) else str(value)
    if name in ("deepspeed_config", "data"):
        text = Path(value).stem
    return re.sub(r"[^A-Za-z0-9.+-]+", "_", SHORT.get(name, name) + text).strip("_-.")
