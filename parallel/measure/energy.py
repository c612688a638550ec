"""Joules of the GPUs that rank 0 sees, by NVML's counter of the whole GPU since its driver was
loaded (Volta or newer; setup.py's extra `nvml`)."""

import torch


class Energy:
    """Joules from here on. `source` says whose counter they are of, or why there is none."""

    def __init__(self, device: torch.device):
        self.source, self._gpus = "none (no GPU)", []
        if device.type == "cuda":  # by NVML's names: NVML itself ignores which are visible
            count = torch.cuda.device_count()
            self._gpus = [f"GPU-{torch.cuda.get_device_properties(i).uuid}" for i in range(count)]
            self.source = f"NVML, {count} GPUs that rank 0 sees"
        self._start_j = self._counter_j() if self._gpus else None

    def joules(self) -> float | None:
        """None without a counter, or where it went away."""
        now_j = None if self._start_j is None else self._counter_j()
        return None if now_j is None else now_j - self._start_j

    def _counter_j(self) -> float | None:
        try:
            import pynvml

            pynvml.nvmlInit()
            handles = map(pynvml.nvmlDeviceGetHandleByUUID, self._gpus)
            return sum(map(pynvml.nvmlDeviceGetTotalEnergyConsumption, handles)) / 1e3  # of mJ
        except Exception as error:  # no package, driver or counter: training goes on without
            self.source = f"none (NVML: {error})"
            return None
