"""The profiler of a run: its regions as ranges that profilers see, and torch's trace of some steps.

With --profile-steps, rank 0 writes a Chrome/Perfetto trace of them: profiles/trace_rank0.json.gz.
Inside `nsys profile` every rank has NVTX ranges train/* and val/*, without a flag. In torch's trace
a range is a user annotation. A validation after step s is part of step s.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch.profiler import record_function

from parallel.config.run_spec import RunSpec
from parallel.measure import ranges


class _Annotations:
    """A listener that makes regions annotations of the trace and, on CUDA, NVTX ranges."""

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


@contextmanager
def attach(
    spec: RunSpec, in_nsys: bool, device: torch.device, rank: int, folder: Path, done: int = 0
) -> Iterator[Callable[[], None]]:
    """Profiles this rank if the run asks for it, and yields what to call after each step.

    done: steps that earlier attempts made; of `profile_steps`, those after them are traced.
    """
    steps = [step - done for step in spec.profiled_steps if step > done]
    traces = bool(steps) and rank == 0
    if not (traces or in_nsys):
        yield lambda: None
        return
    annotations = _Annotations(device)
    ranges.listeners.append(annotations)
    try:
        if not traces:
            yield lambda: None
            return
        (folder / "profiles").mkdir(exist_ok=True)
        trace = folder / "profiles" / f"trace_rank{rank}.json.gz"
        # One step before the first warms the profiler up, where there is one.
        warmup = min(1, steps[0] - 1)
        schedule = torch.profiler.schedule(
            wait=steps[0] - 1 - warmup, warmup=warmup, active=len(steps), repeat=1
        )
        with torch.profiler.profile(
            schedule=schedule,
            on_trace_ready=lambda p: p.export_chrome_trace(str(trace)),
        ) as profiler:
            yield profiler.step
    finally:
        ranges.listeners.remove(annotations)
