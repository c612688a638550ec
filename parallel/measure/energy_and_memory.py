"""Energy, memory and load of the machine while it trains. Torch is imported only where it is used.

Energy is read where a counter exists and is None elsewhere: NVML's (joules since the driver was
loaded, whole GPU, Volta or newer; needs setup.py's extra `nvml`) for the GPUs that rank 0 sees, on
CPU the kernel's RAPL counters (whole processor packages and what else runs on them; often readable
by root alone).
"""

import contextlib
import os
import resource
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from parallel.record.facts import load_average

POWERCAP = Path("/sys/class/powercap")


class Energy:
    """Joules of rank 0's machine while it trains: `count` after training, `skip` after the rest."""

    def __init__(self, gpus: list[str], powercap: Path = POWERCAP):
        """`gpus`: UUIDs of those rank 0 sees; none for a run on CPU, whose packages count then."""
        self.source, self._counters = _nvml(gpus) if gpus else _rapl(powercap)
        self.joules: float | None = 0.0 if self._counters else None
        self._last = self._read()

    def _read(self) -> list[float]:
        try:
            return [read() for read, _ in self._counters]
        except Exception as error:  # a counter that goes away must not end the training
            self.source, self.joules = f"none ({type(error).__name__}: {error})", None
            self._counters = []
            return []

    def count(self) -> None:
        """Count the energy used since the last call: it was used for training."""
        now, before = self._read(), self._last
        self._last = now
        if self.joules is not None:
            pairs = zip(now, before, self._counters, strict=True)
            self.joules += sum(a - b + (wraps if a < b else 0.0) for a, b, (_, wraps) in pairs)

    def skip(self) -> None:
        """Leave out the energy used since the last call."""
        self._last = self._read()


def visible_gpus(device: Any) -> list[str]:
    """NVML's names of the GPUs this rank sees; none on CPU. NVML itself ignores what is visible."""
    if device.type != "cuda":
        return []
    import torch

    count = torch.cuda.device_count()
    return [f"GPU-{torch.cuda.get_device_properties(index).uuid}" for index in range(count)]


_Counter = tuple[Callable[[], float], float]  # reads joules; after how many it starts again


def _nvml(gpus: list[str]) -> tuple[str, list[_Counter]]:
    try:
        import pynvml

        pynvml.nvmlInit()
        handles = [pynvml.nvmlDeviceGetHandleByUUID(uuid) for uuid in gpus]
        for handle in handles:
            pynvml.nvmlDeviceGetTotalEnergyConsumption(handle)
    except Exception as error:  # no package, no driver, or a GPU without the counter: no number
        return f"none (NVML: {error})", []

    def joules(handle: Any) -> float:
        return pynvml.nvmlDeviceGetTotalEnergyConsumption(handle) / 1e3  # millijoules

    return f"NVML, {len(gpus)} GPUs that rank 0 sees", [(partial(joules, h), 0.0) for h in handles]


def _rapl(powercap: Path) -> tuple[str, list[_Counter]]:
    counters: list[_Counter] = []
    # Packages only (intel-rapl:0); what lies inside them (intel-rapl:0:0) is counted already.
    for package in sorted(powercap.glob("*-rapl:*")):
        if package.name.count(":") != 1:
            continue
        with contextlib.suppress(OSError, ValueError):
            wraps = int((package / "max_energy_range_uj").read_text()) / 1e6
            reader = partial(_joules, package / "energy_uj")
            reader()
            counters.append((reader, wraps))
    if not counters:
        return "none (no readable RAPL counter)", []
    return f"RAPL, {len(counters)} packages of rank 0's node", counters


def _joules(path: Path) -> float:
    return int(path.read_text()) / 1e6  # microjoules


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
