"""What engines launch, wait for and overlap: constants of a family of engines, shared by clusters.

They were fitted to published tables, with the constants of each cluster at their priors. What a
family does not state is as in Megatron-LM.
"""

import re
from typing import Any

import numpy as np

from analysis.planner.columns import FAMILIES, Array, Columns

# An all-reduce over n nodes has n^-0.3 of the rate (Jean Zay: 10.6 GB/s on 4, 6.9 on 16).
CROWD = 0.3
# No family states more than 8.
USUAL = {
    "attention": 1.0,  # factor on the time of attention's kernel
    "elementwise": 1.0,  # factor on element-wise operations: eager ones are not fused
    "host": 1.0,  # factor on the host's time for a layer
    "stage_host": 0.0,  # seconds of the host a layer and rank of tp, in a pipeline over nodes
    "hop": 0.0,  # seconds that a tp collective waits for each of the nodes that its group spans
    "stall": 0.0,  # seconds that a message between stages may wait (timemodel/stages.py)
    "ring_stall": 0.0,  # seconds that a ring stalls for each of its nodes (timemodel/replicas.py)
    # Share of data-parallel traffic that can run beside the computation; of ZeRO-1's, Megatron
    # core's alone.
    "overlap": 0.0,
    "crowd": CROWD,  # a ring over n nodes has n^-crowd of the rate
}
FAMILY: dict[str, dict[str, float]] = {
    "fsdp": {"attention": 1.09, "elementwise": 1.7, "overlap": 0.41},
    "megatron_core": {"attention": 0.51, "crowd": 0.0, "overlap": 0.41},
    "nanotron": {
        "attention": 1.6,
        "host": 2.7,
        "stage_host": 1.2e-3,
        "hop": 0.77e-3,
        "stall": 0.285,
        "ring_stall": 0.034,
        "overlap": 0.7,
        "crowd": 0.5,
    },
}
TABLE = {
    name: np.array([(USUAL | FAMILY.get(family, {}))[name] for family in FAMILIES])
    for name in USUAL
}

# Engines of this repository on GPUs -> their family.
OURS = {
    "megatron": "megatron_core",
    "deepspeed_zero": "deepspeed",
    "deepspeed_pipe": "deepspeed",
    "fsdp2": "fsdp",
}
# What other programs are called, in logs and in published tables -> their family; the first that
# matches.
CALLED = {
    "nanotron": "nanotron",
    "internevo": "megatron_core",  # not fitted to its own table
    "deepspeed": "deepspeed",
    r"fsdp|torchtitan|llm-foundry": "fsdp",
    r"nemo|megatron-bridge|\bcore\b|\bTE 2": "megatron_core",
}


def constant(steps: Columns, name: str) -> Array:
    """Returns the constant called `name` of each row's engine, (n,)."""
    return TABLE[name][steps.family]


def family_of(engine: str) -> int:
    """Returns the place of an engine, or another program, in FAMILIES; else Megatron's."""
    called = (name for words, name in CALLED.items() if re.search(words, engine, re.IGNORECASE))
    return FAMILIES.index(OURS.get(engine) or next(called, "megatron"))


def is_recipe(engine: str) -> bool:
    """Returns whether NVIDIA's recipes for NeMo or Megatron-Bridge made the run."""
    return bool(re.search("nemo|megatron-bridge", engine, re.IGNORECASE))


def is_fsdp2(engine: str, zero_stage: int | None) -> bool:
    """Returns whether PyTorch's FSDP2 runs the step, or Megatron's own, which cuts as it does."""
    pytorch = bool(re.search("fsdp2|torchtitan", engine, re.IGNORECASE))
    return pytorch or (is_recipe(engine) and zero_stage == 3)


def fuses_attention(engine: str) -> bool:
    """Returns whether a program's attention is one kernel, on whatever card."""
    programs = "torchtitan|nanotron|picotron|internevo|nemo|core|flash"
    return bool(re.search(programs, engine, re.IGNORECASE))


def adds_in_16_bits(engine: str) -> bool:
    """Returns whether gradients are accumulated in the weights' format.

    Megatron-Bridge does so, as in its makers' other recipes in logs/published, and InternEvo, which
    adds and reduces `param.grad` so (internlm/solver/optimizer/hybrid_zero_optim.py).
    """
    return bool(re.search("megatron-bridge|internevo", engine, re.IGNORECASE))


def scatters(engine: str) -> bool:
    """Returns whether stages cut what they send over tp without sequence parallelism, too, and
    gather it.

    So do Megatron-LM of 2021 and 2022 (SC'21, section 4.1), which left it out with its core in
    January 2023, DeepSpeed's pipeline (`pipe_partitioned` and `grad_partitioned` are True unless
    its JSON says otherwise), and InternEvo.
    """
    scattering = [FAMILIES.index(family) for family in ("megatron", "deepspeed")]
    return family_of(engine) in scattering or "internevo" in engine.lower()


def families(engines: Any) -> Array:
    """Returns `family_of` of one name or of many."""
    names = np.atleast_1d(engines)
    family = np.zeros(names.shape, np.int64)
    for name in set(names.tolist()):
        family[names == name] = family_of(name)
    return family
