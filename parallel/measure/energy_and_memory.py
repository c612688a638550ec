"""Energy, memory and load of the machine while it trains. Torch is imported only where it is used.

Energy is read from NVML's counter (joules since the driver was loaded, whole GPU, Volta or newer;
needs setup.py's extra `nvml`) for the GPUs that rank 0 sees. It is None elsewhere.
"""

import resource
import sys
import time
from typing import Any

import psutil

from parallel.record.facts import load_average

_NOT_WORK = ("idle", "iowait", "guest", "guest_nice")


class Energy:
    """Joules of rank 0's GPUs from here on, and the `source` of the number."""

    def __init__(self, gpus: list[str]):
        """`gpus`: NVML's names of those that rank 0 sees; none on CPU."""
        self.source = f"NVML, {len(gpus)} GPUs that rank 0 sees" if gpus else "none (no GPU)"
        self._gpus, self._start_j = gpus, 0.0
        self._start_j = self.joules()

    def joules(self) -> float | None:
        """None without a counter, or where it went away."""
        if self._start_j is None or not self._gpus:
            return None
        try:
            import pynvml

            pynvml.nvmlInit()
            handles = map(pynvml.nvmlDeviceGetHandleByUUID, self._gpus)
            millijoules = sum(map(pynvml.nvmlDeviceGetTotalEnergyConsumption, handles))
        except Exception as error:  # no package, driver or counter: no number, and training goes on
            self.source = f"none (NVML: {error})"
            return None
        return millijoules / 1e3 - self._start_j


def visible_gpus(device: Any) -> list[str]:
    """NVML's names of the GPUs this rank sees; none on CPU. NVML itself ignores what is visible."""
    if device.type != "cuda":
        return []
    import torch

    count = torch.cuda.device_count()
    return [f"GPU-{torch.cuda.get_device_properties(index).uuid}" for index in range(count)]


def peak_memory(device: Any) -> dict[str, int]:
    """Most bytes this rank held: allocated and reserved on CUDA, resident on CPU."""
    if device.type == "cuda":
        import torch

        return {
            "allocated": torch.cuda.max_memory_allocated(device),
            "reserved": torch.cuda.max_memory_reserved(device),
        }
    unit = 1 if sys.platform == "darwin" else 1024
    return {"resident": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit}


def most_of_all_ranks(peaks: dict[str, int]) -> dict[str, int]:
    """The largest of each over all ranks; every rank calls it."""
    import torch

    values = torch.tensor(list(peaks.values()), dtype=torch.int64)
    torch.distributed.all_reduce(values, torch.distributed.ReduceOp.MAX)
    return dict(zip(peaks, values.tolist(), strict=True))


class Load:
    """What the ranks and everything else on rank 0's machine computed on CPU cores, from here on.

    A rank that shares its core gets fewer CPU seconds in the same wall time. So does one that
    waits for other ranks: then the machine's CPU seconds say whether somebody else had the cores.
    """

    def __init__(self) -> None:
        self._start = time.perf_counter(), time.process_time(), machine_cpu_s()

    def facts(self) -> dict[str, float]:
        """The part of run.json's `load` that is known at the end; every rank calls it."""
        import torch

        now = time.perf_counter(), time.process_time(), machine_cpu_s()
        wall_s, cpu_s, machine_s = (
            end - start for end, start in zip(now, self._start, strict=True)
        )
        total_s = torch.tensor(cpu_s, dtype=torch.float64)
        torch.distributed.all_reduce(total_s)
        load = {"end": load_average(), "wall_s": wall_s, "cpu_s": total_s.item()}
        return load | {"machine_cpu_s": machine_s}


def machine_cpu_s() -> float:
    """Seconds of all cores since the machine started in which they were not idle, also where a
    hypervisor had them."""
    spent = psutil.cpu_times()._asdict()
    # A guest's time is in user time already.
    return sum(spent.values()) - sum(spent.get(kind, 0.0) for kind in _NOT_WORK)
