"""Energy, memory and load of the machine while it trains. Torch is imported only where it is used.

Energy is read from NVML's counter (joules since the driver was loaded, whole GPU, Volta or newer;
needs setup.py's extra `nvml`) for the GPUs that rank 0 sees. It is None elsewhere.
"""

import os
import resource
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from parallel.record.facts import load_average


class Energy:
    """Joules of rank 0's GPUs while it trains: `count` after training, `skip` after the rest."""

    def __init__(self, gpus: list[str]):
        """`gpus`: UUIDs of those rank 0 sees; none on CPU."""
        self.source, self._read = _nvml(gpus)
        self.joules = 0.0 if self._read else None
        self._last = self._now()

    def _now(self) -> float:
        try:
            return self._read() if self._read else 0.0
        except Exception as error:  # a counter that goes away must not end the training
            self.source = f"none ({type(error).__name__}: {error})"
            self._read = self.joules = None
            return 0.0

    def count(self) -> None:
        """Count the energy used since the last call: it was used for training."""
        before = self._last
        self._last = self._now()
        if self.joules is not None:
            self.joules += self._last - before

    def skip(self) -> None:
        """Leave out the energy used since the last call."""
        self._last = self._now()


def visible_gpus(device: Any) -> list[str]:
    """NVML's names of the GPUs this rank sees; none on CPU. NVML itself ignores what is visible."""
    if device.type != "cuda":
        return []
    import torch

    count = torch.cuda.device_count()
    return [f"GPU-{torch.cuda.get_device_properties(index).uuid}" for index in range(count)]


class _Counter(NamedTuple):
    """Where joules are read, and how; no reader where there are none."""

    source: str
    read: Callable[[], float] | None = None


def _nvml(gpus: list[str]) -> _Counter:
    if not gpus:
        return _Counter("none (no GPU)")
    try:
        import pynvml

        pynvml.nvmlInit()
        handles = [pynvml.nvmlDeviceGetHandleByUUID(uuid) for uuid in gpus]

        def joules() -> float:
            return sum(pynvml.nvmlDeviceGetTotalEnergyConsumption(h) for h in handles) / 1e3

        joules()
    except Exception as error:  # no package, no driver, or a GPU without the counter: no number
        return _Counter(f"none (NVML: {error})")
    return _Counter(f"NVML, {len(gpus)} GPUs that rank 0 sees", joules)


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

    def facts(self) -> dict[str, float | None]:
        """The part of run.json's `load` that is known at the end; every rank calls it."""
        import torch

        wall_s, cpu_s, machine_s = self._start
        wall_s = time.perf_counter() - wall_s
        ended_s = machine_cpu_s()
        total_s = torch.tensor(time.process_time() - cpu_s, dtype=torch.float64)
        torch.distributed.all_reduce(total_s)
        known = None not in (machine_s, ended_s)
        return {
            "end": load_average(),
            "wall_s": wall_s,
            "cpu_s": total_s.item(),
            "machine_cpu_s": ended_s - machine_s if known else None,
        }


def machine_cpu_s(stat: Path = Path("/proc/stat")) -> float | None:
    """Seconds of all cores since the machine started in which they were not idle, also where a
    hypervisor had them; None where the kernel does not tell."""
    try:
        ticks = [int(word) for word in stat.read_text().split("\n", 1)[0].split()[1:9]]
    except (OSError, ValueError):
        return None
    idle, waiting_for_disk = ticks[3:5]  # proc(5): user nice system idle iowait irq softirq steal
    return (sum(ticks) - idle - waiting_for_disk) / os.sysconf("SC_CLK_TCK")
