"""Joules of the GPUs that rank 0 sees, by the counter of the whole GPU since its driver was loaded:
NVML's (Volta or newer; setup.py's extra `nvml`), or that of AMD SMI (`amdsmi`, a part of ROCm)."""

from typing import Any

import torch


class Energy:
    """A meter of the joules from here on. `source` says whose counter it reads, or why none."""

    def __init__(self, device: torch.device):
        self.source, self._gpus = "none (no GPU)", []
        if device.type == "cuda":
            count = torch.cuda.device_count()
            self._gpus = [torch.cuda.get_device_properties(index) for index in range(count)]
            self._counter = "AMD SMI" if torch.version.hip else "NVML"
            self.source = f"{self._counter}, {count} GPUs that rank 0 sees"
        self._start_j = self._counter_j() if self._gpus else None

    def joules(self) -> float | None:
        """Returns the joules so far; None without a counter, or where it went away."""
        now_j = None if self._start_j is None else self._counter_j()
        return None if now_j is None else now_j - self._start_j

    def _counter_j(self) -> float | None:
        try:
            return sum(map(_amd_j if self._counter == "AMD SMI" else _nvidia_j, self._gpus))
        except Exception as error:  # no package, driver or counter: training goes on without
            self.source = f"none ({self._counter}: {error})"
            return None


# By a card's own name or address: neither library heeds which cards the process may see.
def _nvidia_j(gpu: Any) -> float:
    import pynvml

    pynvml.nvmlInit()
    handle = pynvml.nvmlDeviceGetHandleByUUID(f"GPU-{gpu.uuid}")
    return pynvml.nvmlDeviceGetTotalEnergyConsumption(handle) / 1e3  # of mJ


def _amd_j(gpu: Any) -> float:
    import amdsmi

    amdsmi.amdsmi_init(amdsmi.AmdSmiInitFlags.INIT_AMD_GPUS)
    address = f"{gpu.pci_domain_id:04x}:{gpu.pci_bus_id:02x}:{gpu.pci_device_id:02x}.0"
    count = amdsmi.amdsmi_get_energy_count(amdsmi.amdsmi_get_processor_handle_from_bdf(address))
    ticks = count.get("energy_accumulator", count.get("power"))  # its name before ROCm 6.2.1
    return ticks * count["counter_resolution"] / 1e6  # of microjoules
