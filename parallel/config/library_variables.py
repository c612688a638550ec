"""Environment variables that CUDA's libraries read once, so they are set before torch is imported.
Torch-free.

CUDA_DEVICE_MAX_CONNECTIONS=1 starts kernels in the order in which they were asked for. megatron-
core relies on it to overlap tp's messages with GEMMs, on GPUs before Blackwell (Megatron-LM's
arguments.py asks for it with tp or cp). ZeRO-3 and FSDP gather weights beside kernels that compute,
and need the opposite.
"""

import os
from collections.abc import Mapping, MutableMapping

from base.errors import UsageError
from parallel.config.megatron_options import captures_graphs
from parallel.config.run_spec import RunSpec

_OLDER_NAMES = {"PYTORCH_CUDA_ALLOC_CONF": "PYTORCH_ALLOC_CONF"}
# Of --deterministic: the value that is set, then the others that are deterministic, too. They are
# those of Megatron-LM's --deterministic-mode.
_DETERMINISTIC = {
    "CUBLAS_WORKSPACE_CONFIG": (":4096:8", ":16:8"),
    "NVTE_ALLOW_NONDETERMINISTIC_ALGO": ("0",),
    "NCCL_ALGO": ("Ring", "CollnetDirect", "CollnetChain", "^NVLS"),
}
# Transformer Engine asks cuBLAS for TF32 in every fp32 GEMM, whatever torch is told.
_WITHOUT_TF32 = {"NVIDIA_TF32_OVERRIDE": ("0",)}


def _arithmetic(spec: RunSpec) -> dict[str, tuple[str, ...]]:
    """Returns the variables that change what is computed, and the values that the run can have."""
    return ({} if spec.tf32 else _WITHOUT_TF32) | (_DETERMINISTIC if spec.deterministic else {})


def wanted(spec: RunSpec) -> dict[str, str]:
    """Returns the variables that a run on GPUs sets, by name."""
    values = {"PYTORCH_ALLOC_CONF": "expandable_segments:True"}
    layout = spec.layout
    if (layout.tp > 1 or layout.cp > 1) and layout.zero_stage < 3:
        values["CUDA_DEVICE_MAX_CONNECTIONS"] = "1"
    if captures_graphs(spec.megatron):
        # NCCL would register buffers in segments that grow (megatron-core).
        values["NCCL_GRAPH_REGISTER"] = "0"
    return values | {name: possible[0] for name, possible in _arithmetic(spec).items()}


def set_variables(
    spec: RunSpec, environment: MutableMapping[str, str] = os.environ
) -> dict[str, str]:
    """Sets those of the `wanted` variables that the user has not set; returns all as they are."""
    if spec.tf32 and environment.get("NVIDIA_TF32_OVERRIDE") == "0":
        raise UsageError("tf32 is asked for, but NVIDIA_TF32_OVERRIDE=0 switches it off: unset it")
    for name, possible in _arithmetic(spec).items():
        if set(environment.get(name, possible[0]).split(",")) - set(possible):
            asked = "fp32 without tf32" if name in _WITHOUT_TF32 else "deterministic"
            raise UsageError(
                f"{asked} needs {name} {' or '.join(possible)}, not {environment[name]}: unset it"
            )
    older = {new: old for old, new in _OLDER_NAMES.items() if old in environment}
    names = {older.get(name, name): value for name, value in wanted(spec).items()}
    return {name: environment.setdefault(name, value) for name, value in names.items()}


def kept(spec: RunSpec, values: Mapping[str, str]) -> list[str]:
    """Returns one line for each of the `values` that the user set to another than the run would."""
    wanted_values = wanted(spec)
    return [
        f"{name}={value} is kept, as the environment has it; the run would set {instead}"
        for name, value in values.items()
        if (instead := wanted_values[_OLDER_NAMES.get(name, name)]) != value
    ]
