"""The profiler of a run: ranges that Nsight Systems and torch.profiler see, and the latter's trace.

profile_mode nvtx   NVTX ranges train/* and val/* on CUDA, for `nsys profile` around the run
profile_mode torch  the same ranges, and a Chrome/Perfetto trace of the chosen steps and ranks:
                    profiles/trace_rank<r>.json.gz

On a CPU a range is torch's record_function, which the trace shows as a user annotation. A run that
is already inside `nsys profile` has its ranges without a flag. A validation after step s is part of
step s.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch.profiler import record_function

from parallel.config.settings import RunSpec, profiled_ranks, profiled_steps
from parallel.measure import ranges


class _Annotations:
    """Regions as annotations of the trace and, on CUDA, as NVTX ranges."""

    def __init__(self, device: torch.device):
        self._nvtx = torch.cuda.nvtx if device.type == "cuda" else None
        self._open: list[Any] = []

    def enter(self, name: str) -> None:
        name = f"{ranges.phase}/{name}"
        if self._nvtx:
            self._nvtx.range_push(name)
        self._open.append(record_function(name))
        self._open[-1].__enter__()

    def leave(self, name: str) -> None:
        self._open.pop().__exit__(None, None, None)
        if self._nvtx:
            self._nvtx.range_pop()


_IDLE = SimpleNamespace(step=lambda: None)  # nothing is traced


def is_traced(spec: RunSpec, rank: int, done: int) -> bool:
    """Whether this rank writes a trace when `done` steps are made already."""
    return rank in profiled_ranks(spec) and done < profiled_steps(spec)[1]


@contextmanager
def attach(
    spec: RunSpec, mode: str, device: torch.device, rank: int, folder: Path, done: int = 0
) -> Iterator:
    """Profile this rank as `mode` (none, nvtx or torch) says; call `.step()` after each step.

    done: steps that earlier attempts made; of `profile_steps`, those after them are traced.
    """
    if mode == "none" or (mode == "torch" and not is_traced(spec, rank, done)):
        yield _IDLE
        return
    annotations = _Annotations(device)
    ranges.listeners.append(annotations)
    try:
        if mode == "nvtx":
            yield _IDLE
            return
        (folder / "profiles").mkdir(exist_ok=True)
        trace = folder / "profiles" / f"trace_rank{rank}.json.gz"
        first, last = (max(1, step - done) for step in profiled_steps(spec))
        # One step before the first warms the profiler up, where there is one.
        warmup = min(1, first - 1)
        schedule = torch.profiler.schedule(
            wait=first - 1 - warmup, warmup=warmup, active=last - first + 1, repeat=1
        )
        with torch.profiler.profile(
            schedule=schedule, on_trace_ready=lambda p: p.export_chrome_trace(str(trace))
        ) as profiler:
            yield profiler
    finally:
        ranges.listeners.remove(annotations)
